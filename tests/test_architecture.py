"""What docs/architecture.md, docs/wiring.md and CONTRIBUTING.md promise about the code, held against the code."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

import smupar
from smupar.model.seam import AFTER, BEFORE, seam_of

ROOT = Path(__file__).parent.parent
LONGEST, MOST_BRANCHES = 60, 20
SOURCES, TESTS = (sorted((ROOT / folder).rglob("*.py")) for folder in ("smupar", "tests"))


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


def test_every_class_name_is_used_once():
    names = [node.name for path in SOURCES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
    twice = {name for name in names if names.count(name) > 1}
    assert twice == {"SmuparCallback"}  # one for each trainer, by the name that its users know


@pytest.mark.parametrize("path", [*SOURCES, *TESTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_variables_have_nouns_and_docstrings_stand_alone(path):
    tree = ast.parse(path.read_text())
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    assert not {"one", "each"} & stored  # a variable is called by its noun
    docstrings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    texts = [node.value for node in docstrings if isinstance(node.value, str)]
    assert not [text for text in texts if text.startswith("Of ") or re.search(r"\banew\b|\bbehind (it|its|them|each)\b", text)]


def test_page_has_the_layers_that_imports_are_checked_against():
    blocks = re.findall(r"```text\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.DOTALL)
    shown = [[re.split(r"\s{2,}", line)[0].split(" : ") for line in block.splitlines()] for block in blocks]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    assert shown == [[layer.replace("smupar.", "").split(" : ") for layer in order] for order in layers]


@pytest.mark.parametrize("page", ["architecture.md", "wiring.md", "extending.md"])
def test_modules_that_pages_name_exist(page):
    """Pages name `updates/meter`, `smupar/updates/meter.py`, `updates.meter` and `updates.meter.Meter`."""
    packages = "|".join(path.name for path in (ROOT / "smupar").iterdir() if path.is_dir())
    text = re.sub(r"```.*?```", "", (ROOT / "docs" / page).read_text(), flags=re.DOTALL)
    named = re.findall(rf"`(?:smupar[/.])?((?:{packages})[/.]\w[\w/.]*?)(?:\.py)?/?`", text.replace("NAME", "sweep"))
    places = {name: ROOT / "smupar" / name.replace(".", "/") for name in named}
    modules = {name: [place, place.parent] if "." in name else [place] for name, place in places.items()}
    missing = [n for n in named if not places[n].is_dir() and not any(at.with_suffix(".py").exists() for at in modules[n])]
    assert missing == []
    assert len(named) > 5


# Tests whose subject is no single module: folders, and files
NO_MODULE = {
    "docs": "README, the pages, the notebook and the site",
    "faults": "damaged files, and processes that are killed, through whatever reads and writes them",
    "watch/test_browser": "the page in a browser, with the server and the studies that it shows",
    "test_against_mup": "side by side with another library",
    "test_architecture": "this file",
    "test_golden": "runs and files of older versions",
    "test_packaging": "wheel, sdist, extras",
    "test_peer_mistakes": "mistakes that other code bases shipped with",
    "test_security": "the promises of SECURITY.md",
}


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("test_*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_tests_are_named_after_what_they_test(path):
    """``tests/plan/test_make.py`` tests ``smupar/plan/make.py``; a large module has a folder, ``tests/plan/make/test_*.py``."""
    folder = path.parent.relative_to(ROOT / "tests")
    subject = ROOT / "smupar" / folder / path.stem.removeprefix("test_")
    is_mirrored = subject.is_dir() or subject.with_suffix(".py").is_file() or (ROOT / "smupar" / f"{folder}.py").is_file()
    assert is_mirrored or {str(folder), str(folder / path.stem)} & set(NO_MODULE)


# The wiring


def wired():
    """A model and its optimizer with all that the core can add to them, and how they were before."""

    def make(width):
        return nn.Sequential(
            nn.Embedding(8, width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 8)
        )

    model = make(64)
    replaced = model[1].weight
    before = looks(model)
    plan = smupar.parameterize(model, base=make(16), density=0.5)
    smupar.sparsify_storage(model, plan, backend="csr")
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01, weight_decay=0.1))
    smupar.audit(model, plan, optimizer)
    smupar.record_updates(model, plan, optimizer)
    smupar.observe(model, plan, optimizer)
    sparsifier = smupar.RigL(model, plan, optimizer, every=1, stop=2, restart_bias_correction=True)
    smupar.attach(model, plan, optimizer)
    for _ in range(2):
        model(torch.arange(8)).square().mean().backward()
        optimizer.step()
        sparsifier.step()
    sparse = looks(model)
    smupar.sparsify_storage(model, plan, backend="dense")  # so that masks and what replaced them are both seen
    return model, optimizer, replaced, before, sparse | looks(model)


def looks(model):
    """Names of buffers, attributes, classes and hooks of a model's modules and parameters."""
    seen = set()
    for module in model.modules():
        seen |= {f"attribute {name}" for name in vars(module) if not isinstance(getattr(nn.Module(), name, None), dict)}
        seen |= {f"buffer {name}" for name in module._buffers}
        seen |= {f"class {type(module).__name__}"}
        kinds = ("_forward_pre_hooks", "_forward_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
        seen |= {kind for kind in kinds if getattr(module, kind)}
        for parameter in module.parameters(recurse=False):
            seen |= {f"hook {type(hook).__name__}" for hook in (parameter._post_accumulate_grad_hooks or {}).values()}
    return seen


def page():
    return (ROOT / "docs" / "wiring.md").read_text()


def test_all_that_is_added_to_a_model_is_on_the_page():
    _, _, replaced, before, after = wired()
    added = {re.sub(r"(attribute|buffer|class|hook) ", "", thing) for thing in after - before} | set(vars(replaced))
    named = {"_forward_pre_hooks", "_forward_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"}
    assert named <= after  # in the page's words: before and after the forward pass, and load_state_dict
    shown = page().replace("<param>", "weight")
    assert added - named == {thing for thing in added - named if f"`{thing}`" in shown}
    assert {"weight_mask", "smupar_factor", "weight_smupar_input", "MaskGradient", "_smupar_attached"} <= added
    assert {"SparseLinear", "original", "kernel_of", "_index", "weight_columns"} <= added


def test_all_that_is_added_to_an_optimizer_is_on_the_page():
    _, optimizer, *_ = wired()
    plain = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    keys = {key for group in optimizer.param_groups for key in group} - set(plain.param_groups[0])
    added = keys | (set(vars(optimizer)) - set(vars(plain)))
    assert {"lr_factor", "hidden_weight", "_smupar_seam"} <= added
    assert added == {thing for thing in added if f"`{thing}`" in page()}


def test_phases_are_on_the_page_in_their_order():
    phases = re.findall(r"^\| `(\w+)` \|", page(), re.MULTILINE)
    assert tuple(phases) == (*BEFORE, *AFTER)
    _, optimizer, *_ = wired()
    shown = str(seam_of(optimizer))
    assert "set_rates (LayerRates)" in shown
    assert shown.index("correct") < shown.index("mask") < shown.index("measure") < shown.index("restore_rates")
