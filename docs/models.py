"""Tries smupar on every architecture of tests/support/architectures and writes docs/models.md.

``python docs/models.py`` does everything, which took an hour on a busy machine. Each row goes to docs/lab/models.json
as it ends, and a row that is there and of the present state of the code is not run again. Names as arguments run these rows
again. A test runs the quick columns of a few architectures, and a slow one all of them.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))  # for the models, which live beside the tests

import smupar  # noqa: E402
from smupar.check.coordinates.verdict import UNCLEAR  # noqa: E402
from smupar.integrations import huggingface  # noqa: E402
from smupar.output.files import write_atomic  # noqa: E402
from smupar.plan.plan import Plan, PlanRow  # noqa: E402
from tests.support.architectures import ALL, PLAIN, Architecture  # noqa: E402

PAGE, ROWS = DOCS / "models.md", DOCS / "lab" / "models.json"
# What decides the numbers of a row.
CODE = [DOCS / "models.py", DOCS.parent / "tests" / "support" / "architectures"]
CODE += [DOCS.parent / "smupar" / part for part in ("rules.py", "plan", "model", "optim", "check", "integrations")]
END = "<!-- end of the table -->"
BASE, WIDTH, DENSITY = 64, 256, 1 / 4
MORE_SEEDS = 32  # where eight seeds do not decide
CHECK = {"base_width": BASE, "lr": 2**-7, "steps": 4, "seeds": 8, "progress": False}
WIDTHS = {"widths": (BASE, WIDTH)}
CHECKS = {
    "over width": WIDTHS,
    "over density": {"widths": (WIDTH,), "densities": (1, DENSITY)},
    "SP over width": {**WIDTHS, "rules": "sp", "seeds": 2},  # it fails by so much that two seeds will do
}
COLUMNS = ("architecture", "roles", "without an example", "attention scale", "export", *CHECKS)


@dataclass(frozen=True)
class Quick:
    """What can be seen without training."""

    roles: str
    without: str
    attention: str
    export: str


def quick(architecture: Architecture) -> Quick:
    with _quietly():
        roles, without = _roles(architecture, looks=True), _roles(architecture, looks=False)
        return Quick(roles, without, _attention(architecture), _export(architecture))


# Roles


def proposal(architecture: Architecture, *, looks: bool) -> dict[str, Any]:
    """The roles that questions suggest, pasted until nothing more is asked; ``...`` where a question suggests none, and the
    right role is passed. ``looks``: with a batch as the example."""
    suggested: dict[str, Any] = {}
    pasted: dict[str, Any] = {}
    while True:
        try:
            _plan(architecture, pasted, looks=looks)
        except ValueError as error:
            line = next((line for line in str(error).splitlines() if line.strip().startswith("roles=")), None)
            if line is None:
                raise
            new = ast.literal_eval(line.strip().removeprefix("roles="))
            suggested |= new
            pasted |= _filled(architecture, new)
        else:
            return suggested


def _filled(architecture: Architecture, suggested: dict[str, Any]) -> dict[str, Any]:
    """The suggestions, with the architecture's own roles in the place of dots."""
    open_globs = [glob for glob, role in suggested.items() if role is ...]
    names = [name for name in _names(architecture) if any(fnmatchcase(name, glob) for glob in open_globs)]
    given = {name: next(role for glob, role in architecture.roles.items() if fnmatchcase(name, glob)) for name in names}
    return given | {glob: role for glob, role in suggested.items() if role is not ...}


def answers(architecture: Architecture) -> dict[str, Any]:
    """The right answers, by parameter: what the question without an example suggests, unless the architecture says
    otherwise."""
    roles = [*architecture.roles.items(), *_filled(architecture, proposal(architecture, looks=False)).items()]
    found = {name: [role for glob, role in roles if fnmatchcase(name, glob)] for name in _names(architecture)}
    return {name: matches[0] for name, matches in found.items() if matches}


def _names(architecture: Architecture) -> list[str]:
    return [name for name, _ in _meta(architecture, BASE).named_parameters()]


def _roles(architecture: Architecture, *, looks: bool) -> str:
    asked, right = proposal(architecture, looks=looks), answers(architecture)
    plan = _plan(architecture, _filled(architecture, asked), looks=looks)
    # The fan-in of raw input matrices cannot be said. So answers are compared in a plan that looked, too.
    by_shapes, by_look = (_plan(architecture, right, looks=each) for each in (False, looks))
    same = all(
        _numbers(row) in ([_numbers(by_shapes[row.name])] + [_numbers(by_look[row.name])] * (row.name in right)) for row in plan
    )
    if not asked:
        return "works as is" if same else "**wrong unless given**"
    open_questions = list(asked.values()).count(...)
    suggestions = f", {open_questions} without a suggestion" if open_questions else ""
    return f"asks for {len(asked)}{suggestions}" + ("" if same else ", **suggestion wrong**")


def _plan(architecture: Architecture, roles: dict[str, Any], *, looks: bool) -> Plan:
    example = architecture.example(architecture.batch(0)) if looks else None
    return smupar.make_plan(_meta(architecture, WIDTH), base=_meta(architecture, BASE), roles=roles, example=example)


def _numbers(row: PlanRow) -> tuple[Any, ...]:
    read = tuple(row.shape[dim] for dim in row.in_dims)  # a square matrix gets the same numbers either way
    return row.role, read, row.init_std, row.lr_factors, row.forward


# Attention and export


def _attention(architecture: Architecture) -> str:
    model = architecture.make(BASE)
    plan = smupar.parameterize(model, base=_meta(architecture, WIDTH), **_settings(architecture))
    if "attention_scale" not in plan.pending:
        return "none"
    prepare(architecture, model, plan)
    return "by hand" if "attention_scale" in plan.pending else "set"


def _export(architecture: Architecture) -> str:
    if architecture in PLAIN:
        return ""
    model = architecture.make(2 * BASE)
    huggingface.parameterize(model, base=architecture.make(BASE), density=DENSITY)
    model.eval()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(f"{folder}/sparse")
        try:
            huggingface.export(f"{folder}/sparse", f"{folder}/plain")
        except ValueError:
            return "refused"
        plain = type(model).from_pretrained(f"{folder}/plain").eval()
        batch = architecture.batch(0)
        same = torch.allclose(architecture.logits(plain, batch), architecture.logits(model, batch), rtol=1e-3, atol=1e-3)
    return "yes" if same else "**other logits**"


def prepare(architecture: Architecture, model: nn.Module, plan: Plan) -> None:
    """What a user does after ``parameterize``."""
    example = architecture.example(architecture.batch(0))
    if "attention_scale" in plan.pending and architecture in PLAIN:
        smupar.set_attention_scale(model, plan, example)
    elif "attention_scale" in plan.pending:
        huggingface.set_attention_scale(model, plan, example)
    if architecture.prepare is not None:
        architecture.prepare(model, plan)


def _settings(architecture: Architecture) -> dict[str, Any]:
    """What a user passes to ``parameterize``: a batch, the roles that are asked for all the same, and what the integration of
    Hugging Face does about numbers that follow the width."""
    example = architecture.example(architecture.batch(0))
    return {"example": example, "roles": _filled(architecture, proposal(architecture, looks=True)), "multipliers": "base"}


# The check


def check(architecture: Architecture, which: str, **changes: Any) -> Any:
    settings = {**CHECK, **CHECKS[which], **changes}
    with _quietly():
        return smupar.coord_check(
            architecture.make,
            architecture.loss,
            [architecture.batch(seed) for seed in range(settings["steps"])],
            prepare=lambda model, plan: prepare(architecture, model, plan),
            **_settings(architecture),
            **settings,
        )


def checked(architecture: Architecture, which: str) -> tuple[str, list[str]]:
    """The cell of a check, and what its reports say. If 8 seeds ask for more, 32 decide."""
    is_sp = which.startswith("SP")
    reports = [check(architecture, which)]
    if UNCLEAR in reports[0].verdicts.values() and not is_sp:
        reports.append(check(architecture, which, seeds=MORE_SEEDS))
    (found,) = reports[-1].verdicts.values()
    more = f" ({MORE_SEEDS} seeds)" if len(reports) > 1 else ""
    return (found if found == ("fail" if is_sp else "pass") else f"**{found}**") + more, [each.explain() for each in reports]


# The rows


def row(name: str) -> dict[str, Any]:
    """The cells of one architecture, what the reports behind them say, the seconds that it took, and the state of the code."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    architecture = ALL[name]
    found = {which: checked(architecture, which) for which in CHECKS}
    cells = [name, *astuple(quick(architecture)), *(cell for cell, _ in found.values())]
    reports = {which: said for which, (_, said) in found.items() if not which.startswith("SP")}
    return {"cells": cells, "reports": reports, "seconds": round(time.perf_counter() - start), "code": state()}


def state() -> str:
    """A hash of the code and the libraries that the rows depend on."""
    files = [file for place in CODE for file in (sorted(place.rglob("*.py")) if place.is_dir() else [place])]
    texts = [file.read_bytes() for file in files] + [torch.__version__.encode(), transformers.__version__.encode()]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


def stored() -> dict[str, dict[str, Any]]:
    """The rows of the last runs, by architecture."""
    return json.loads(ROWS.read_text(encoding="utf-8")) if ROWS.exists() else {}


def store(rows: dict[str, dict[str, Any]]) -> None:
    """Writes the rows in the order of the architectures, and the page. Rows that were not run stay there as they are."""
    ordered = {name: rows[name] for name in ALL if name in rows}
    write_atomic(ROWS, json.dumps(ordered, indent=1) + "\n")
    cells = shown_rows() | {name: found["cells"] for name, found in ordered.items()}
    write_atomic(PAGE, page([cells[name] for name in ALL if name in cells]))


# The page


def table(rows: list[list[str]]) -> str:
    header, *body = (f"| {' | '.join(cells)} |" for cells in (list(COLUMNS), *rows))
    return "\n".join([header, "|" + "---|" * len(COLUMNS), *body])


def page(rows: list[list[str]]) -> str:
    """The page, with the table between its markers."""
    text = PAGE.read_text(encoding="utf-8")
    before, start, rest = text.partition("<!-- table of architectures -->\n")
    return f"{before}{start}\n{table(rows)}\n\n{END}{rest.partition(END)[2]}"


def shown_rows() -> dict[str, list[str]]:
    """The rows of the page as it is."""
    lines = PAGE.read_text(encoding="utf-8").partition("<!-- table of architectures -->\n")[2].partition(END)[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {row[0]: row for row in cells[1:]}


def _meta(architecture: Architecture, width: int) -> nn.Module:
    with torch.device("meta"):
        return architecture.make(width)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without warnings about small vocabularies and unknown architectures."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def main(names: list[str]) -> None:
    rows, now = stored(), state()
    for name in names or [name for name in ALL if rows.get(name, {}).get("code") != now]:
        rows[name] = row(name)
        print(f"{rows[name]['seconds']:5.0f} s  {table([rows[name]['cells']]).splitlines()[-1]}", flush=True)
        store(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
