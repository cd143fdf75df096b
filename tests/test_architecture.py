"""What docs/architecture.md and CONTRIBUTING.md promise about the code, held against the code."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LONGEST, MOST_BRANCHES = 60, 20
SOURCES = sorted((ROOT / "smupar").rglob("*.py"))


def functions(path):
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def num_branches(function):
    """Tests, loops, handlers, comprehensions, and every further operand of ``and`` and ``or``."""
    kinds = (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.comprehension)
    nodes = list(ast.walk(function))
    operands = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    return sum(isinstance(node, kinds) for node in nodes) + operands


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_can_be_read_in_one_go(path):
    sizes = {f"{node.name}:{node.lineno}": (node.end_lineno - node.lineno + 1, num_branches(node)) for node in functions(path)}
    hard = {name: size for name, size in sizes.items() if size[0] > LONGEST or size[1] > MOST_BRANCHES}
    assert hard == {}


def test_page_has_the_layers_that_imports_are_checked_against():
    page = (ROOT / "docs" / "architecture.md").read_text()
    block = re.search(r"```text\n(.*?)```", page, re.DOTALL).group(1)
    shown = [re.split(r"\s{2,}", line)[0].split(" : ") for line in block.splitlines()]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    checked = [layer.replace("smupar.", "").split(" : ") for layer in contracts[0]["layers"]]
    assert shown == checked
