"""Lists what is installed, for ``smupar --version``. It reads package metadata, so no package has to be imported."""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, requires, version

from smupar import __version__

_NOT_FOR_USERS = ("all", "dev")  # extras that only combine other extras


def describe() -> str:
    """The versions of smupar, Python and torch, the platform, and which extras are installed."""
    extras = {extra: all(map(_version, packages)) for extra, packages in _extras().items()}
    missing = [extra for extra, is_there in extras.items() if not is_there]
    lines = [
        f"smupar {__version__}",
        f"Python {platform.python_version()}, torch {_version('torch') or 'missing'}, {platform.platform()}",
        f"extras: {', '.join(extra for extra, is_there in extras.items() if is_there) or 'none'}",
    ]
    if missing:
        lines.append(f"not installed: {', '.join(missing)} (pip install 'smupar[{missing[0]}]')")
    return "\n".join(lines)


def _extras() -> dict[str, list[str]]:
    """The packages of every extra, by the names in pyproject.toml; empty if smupar runs from source without being installed."""
    extras: dict[str, list[str]] = {}
    try:
        lines = requires("smupar") or []
    except PackageNotFoundError:
        return extras
    for line in lines:
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        package = re.match(r"[\w.-]+", line)
        if extra and package and package[0] != "smupar" and extra[1] not in _NOT_FOR_USERS:
            extras.setdefault(extra[1], []).append(package[0])
    return extras


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
