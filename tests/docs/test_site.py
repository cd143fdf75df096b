"""The documentation as a site: it builds strictly, and works from a disk without a network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.browser import chromium, needs_chromium

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_site_has_examples_arguments_and_readme(site):
    api = (site / "api.html").read_text()
    arguments = api[api.index('id="smupar.parameterize"') : api.index('id="smupar.make_plan"')]
    assert "share of hidden weights kept" in arguments
    assert (site / "examples" / "your_own_loop.html").exists()
    home = (site / "index.html").read_text()
    assert 'href="idea.html"' in home
    assert (site / "images" / "three-rules.png").exists()
    assert 'src="images/three-rules.png"' in home
    assert re.search(r'<a href="fig12.png"><img [^>]*src="fig12.png"', (site / "results" / "fig12.html").read_text())


def test_no_page_loads_anything_from_elsewhere(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:link|script|img)[^>]+(?:href|src)="?(https?:[^" >]+)', page.read_text())
        assert [address for address in loaded if not address.startswith("https://smupar.github.io/")] == [], page


@needs_chromium
def test_site_works_from_a_disk_without_a_network(site):
    """Search, formulas and diagrams, with every request written down."""
    requests, wrong = [], []
    with chromium() as browser:
        page = browser.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto((site / "idea.html").as_uri())
        page.wait_for_selector(".mermaid svg, div.mermaid")
        formulas = page.locator(".arithmatex").count()
        assert formulas > 20
        assert page.locator(".arithmatex .katex-html").count() == formulas
        assert page.locator("a.md-footer__link--next").get_attribute("href") == "glossary.html"
        page.locator("input.md-search__input").click()
        page.locator("input.md-search__input").press_sequentially("FSDP2")
        page.wait_for_selector(".md-search-result__item a")
        page.goto((site / "rules.html").as_uri())
        table_1 = page.locator("table").first
        assert table_1.locator("tbody td .katex-html").count() > 100
        assert page.locator(".arithmatex .katex-html").count() == page.locator(".arithmatex").count()
        page.goto((site / "architecture.html").as_uri())
        page.wait_for_function(
            "() => !document.querySelector('pre.mermaid') && document.querySelectorAll('div.mermaid').length > 2"
        )
    assert wrong == []
    assert len(requests) > 10
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
