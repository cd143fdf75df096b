"""README and docs are true: every Python block runs, and the output that README shows is what its example prints."""

import json
import re
import runpy
from pathlib import Path

import pytest
import yaml

import smupar
from smupar.cli import commands
from smupar.cli import main as cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "lab").glob("*.md"))]
MKDOCS = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=yaml.BaseLoader)  # a loader that resolves no tags


GENERATED = runpy.run_path(str(ROOT / "docs" / "generate.py"))["pages"]()


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if _blocks(page, "python")], ids=lambda page: page.name)
def test_page_code_runs(page, capsys):
    namespace: dict[str, object] = {}
    for block in _blocks(page, "python"):
        exec(compile(block, str(page), "exec"), namespace)
    if page.name == "quickstart.md":
        _check_losses(_blocks(page, "text")[0], capsys.readouterr().out)


def _check_losses(shown: str, printed: str) -> None:
    """The table that the quickstart shows is the one that it prints, but for the last digits, which depend on the processor."""
    header, *rows = shown.splitlines()
    assert header in printed
    (sparsest,) = [line.split()[1:] for line in printed.splitlines() if line.startswith(rows[-1].split()[0])]
    sp, mup, smupar = map(float, sparsest)
    assert 2 * smupar < sp
    assert 2 * smupar < mup


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_lines_of_code_fit_a_page_of_the_site(page):
    lines = [line for language in ("python", "sh") for block in _blocks(page, language) for line in block.splitlines()]
    assert [line for line in lines if len(line) > 100] == []


@pytest.mark.parametrize("page", GENERATED, ids=lambda page: page.name)
def test_generated_page_is_what_the_code_says(page):
    assert page.read_text(encoding="utf-8") == GENERATED[page], "stale: run `make docs`"


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "plan.md"], ids=lambda page: page.name)
def test_shown_output_is_what_the_example_prints(page, capsys):
    exec(_blocks(page, "python")[0], {})
    assert capsys.readouterr().out == _blocks(page, "text")[0]


def test_readme_example_is_short():
    (example,) = _blocks(ROOT / "README.md", "python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 15


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"], ids=lambda page: page.name)
def test_page_links_to_files_that_exist(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_table_of_readme_says_what_the_results_say():
    """Yes, no or cannot tell, how many parts, and whether without decay; and nothing that does not hold is left out."""
    results = (ROOT / "docs" / "results" / "README.md").read_text()
    found = dict(re.findall(r"^\| \[(\w+)\]\(\w+\.md\) \|[^|]*\|[^|]*\| ([^|]+) \|", results, re.MULTILINE))
    rows = re.findall(r"^\| ([^|]+) \| \[[^|]+\]\([^|]+/results/(\w+)\.md\) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    said = {name: verdict for verdict, name in rows}
    assert {name for name, verdict in found.items() if not verdict.startswith("yes")} <= said.keys()
    for name, verdict in said.items():
        assert _facts(verdict) == _facts(found[name]), name


def _facts(verdict: str) -> tuple[str, str, bool]:
    parts = re.search(r"(\d+ of \d+)", verdict)
    answer = re.match(r"yes|no|in part|cannot tell", verdict.replace("**", ""))
    assert answer, verdict
    assert answer[0] != "in part" or parts
    return answer[0], parts[1] if parts else "", "without" in verdict or "°" in verdict


def test_caption_of_readme_says_what_figure_6_says():
    words = " ".join((ROOT / "README.md").read_text().split())
    published = json.loads((ROOT / "docs/results/fig06.json").read_text())
    common, rows, claims = published["common"], published["rows"], " ".join(claim["text"] for claim in published["claims"])
    for said, found in {
        "moves by {}x under SP": r"SP's best learning rate moves by ([\d.]+)x,",
        "by {}x or more under muP": r"muP's best learning rate moves by ([\d.]+)x or more",
        "by {}x under SmuPar": r"SmuPar's best learning rate moves by ([\d.]+)x",
        "{} % under SP": r"SP \+([\d.]+)% at 1/16",
        "({} % already when dense)": r"gap when dense is \+([\d.]+)%",
        "{} % higher under muP": r"muP \+([\d.]+)% at 1/16",
    }.items():
        (number,) = re.findall(found, claims)
        assert said.format(number) in words
    assert f"in [{len(rows)} GPTs](" in words
    assert {row.get("weight_decay", common["weight_decay"]) for row in rows} == {0.1}


OF_OTHERS = {  # names that torch, transformers, Lightning and mup have
    *("AveragedModel", "use_buffers", "resize_token_embeddings", "load_from_checkpoint", "lm_head", "MuAdam"),
    *("gradient_accumulation_steps", "torch_compile"),
    *("assert_hidden_size_inf", "get_coord_data", "get_shapes", "plot_coord_data"),
}


def _pages_of(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in _pages_of(part)]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_page_names_files_and_names_that_exist(page):
    """In backticks: paths of this repository, and words that look like a class, a constant or a function."""
    code = "\n".join(path.read_text() for path in sorted((ROOT / "smupar").rglob("*.py")))
    quoted = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE))
    paths = [word for word in quoted if re.fullmatch(r"(smupar|tests|docs|examples)/[\w/.-]+", word) and "NAME" not in word]
    assert [word for word in paths if not (ROOT / word).exists()] == []
    names = [word for word in quoted if re.fullmatch(r"([A-Z][a-z]+){2,}|\w*_\w*|[A-Z]{3,}", word)]
    assert set(names) - OF_OTHERS - set(re.findall(r"\w+", code)) == set()


def test_every_page_is_in_the_menu_of_the_site_once():
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:]] + [
        "index.md",
        "tour.md",
    ]  # made by docs/pages.py
    assert sorted(_pages_of(MKDOCS["nav"])) == sorted([*pages, "results/README.md", "results/without-decay/README.md"])


def test_api_page_has_every_public_name_once():
    names = re.findall(r"^::: smupar\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(names) == sorted(smupar.__all__)


def test_command_line_page_has_every_command_and_exit_code():
    text = (ROOT / "docs" / "command-line.md").read_text()
    for command in {name.partition(" ")[0] for name in cli.COMMANDS}:
        assert re.search(rf"^smupar {command}( |$)", text, re.MULTILINE), command
    for command in filter(cli.answers, cli.COMMANDS):
        assert f"`{command}`" in text.partition("fields of its JSON")[2], command
    for code in {1, 2, 130, 141, *commands.EXIT_CODES.values()}:
        assert f"\n| {code} | " in text, code


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_example_runs(example, capsys):
    runpy.run_path(str(example), run_name="__main__")
    assert "kept weights after training: 0.2500" in capsys.readouterr().out
