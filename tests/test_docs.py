"""README and docs are true: every Python block runs, and the output that README shows is what its example prints."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if _blocks(page, "python")], ids=lambda page: page.name)
def test_page_code_runs(page):
    namespace: dict[str, object] = {}
    for block in _blocks(page, "python"):
        exec(compile(block, str(page), "exec"), namespace)


def test_readme_output_is_what_the_example_prints(capsys):
    readme = ROOT / "README.md"
    exec(_blocks(readme, "python")[0], {})
    assert capsys.readouterr().out == _blocks(readme, "text")[0]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_page_links_to_files_that_exist(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_example_runs(example, capsys):
    runpy.run_path(str(example), run_name="__main__")
    assert "kept weights after training: 0.2500" in capsys.readouterr().out
