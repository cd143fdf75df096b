"""Chromium, driven by Playwright: the system's, or the one that `playwright install chromium` brings. `make test-browser`
installs both; without them the tests of pages are skipped."""

import contextlib
import importlib.util
import shutil
from pathlib import Path

import pytest

_OWN = sorted(Path.home().glob(".cache/ms-playwright/chromium-*/chrome-linux*/chrome"))  # Playwright's, the newest last
CHROMIUM = shutil.which("chromium") or (str(_OWN[-1]) if _OWN else "/usr/bin/chromium")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
needs_chromium = pytest.mark.skipif(
    not Path(CHROMIUM).exists() or importlib.util.find_spec("playwright") is None,
    reason="Chromium or playwright is not installed: make test-browser installs them",
)


@contextlib.contextmanager
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        running = started.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield running
        running.close()


def contrast(one, other):
    def luminance(colour):
        values = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
