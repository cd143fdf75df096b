"""Tries smupar on every architecture of tests/architectures and writes docs/models.md.

``python docs/models.py`` does everything and takes minutes; names as arguments print single rows. Nothing is stored between
runs. A test runs the quick columns of a few architectures, and a slow one all of them.
"""

from __future__ import annotations

import ast
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
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
from smupar.plan.plan import Plan, PlanRow  # noqa: E402
from tests.architectures import ALL, PLAIN, Architecture  # noqa: E402

PAGE = DOCS / "models.md"
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
    """The roles that questions suggest, pasted until nothing more is asked. ``looks``: with a batch as the example."""
    pasted: dict[str, Any] = {}
    while True:
        try:
            _plan(architecture, pasted, looks=looks)
        except ValueError as error:
            line = next((line for line in str(error).splitlines() if line.strip().startswith("roles=")), None)
            if line is None:
                raise
            pasted |= ast.literal_eval(line.strip().removeprefix("roles="))
        else:
            return pasted


def answers(architecture: Architecture) -> dict[str, Any]:
    """The right answers, by parameter: what the question without an example suggests, unless the architecture says
    otherwise."""
    roles = [*architecture.roles.items(), *proposal(architecture, looks=False).items()]
    names = [name for name, _ in _meta(architecture, BASE).named_parameters()]
    found = {name: [role for glob, role in roles if fnmatchcase(name, glob)] for name in names}
    return {name: matches[0] for name, matches in found.items() if matches}


def _roles(architecture: Architecture, *, looks: bool) -> str:
    asked, right = proposal(architecture, looks=looks), answers(architecture)
    plan = _plan(architecture, asked, looks=looks)
    # The fan-in of raw input matrices cannot be said. So answers are compared in a plan that looked, too.
    by_shapes, by_look = (_plan(architecture, right, looks=each) for each in (False, looks))
    same = all(
        _numbers(row) in ([_numbers(by_shapes[row.name])] + [_numbers(by_look[row.name])] * (row.name in right)) for row in plan
    )
    if not asked:
        return "works as is" if same else "**wrong unless given**"
    return f"asks for {len(asked)}" + ("" if same else ", **suggestion wrong**")


def _plan(architecture: Architecture, roles: dict[str, Any], *, looks: bool) -> Plan:
    example = architecture.example(architecture.batch(0)) if looks else None
    return smupar.make_plan(_meta(architecture, WIDTH), base=_meta(architecture, BASE), roles=roles, example=example)


def _numbers(row: PlanRow) -> tuple[Any, ...]:
    return row.role, row.in_dims, row.init_std, row.lr_factors, row.forward


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
    return {"example": example, "roles": proposal(architecture, looks=True), "multipliers": "base"}


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


def verdict(architecture: Architecture, which: str) -> str:
    """The verdict of 8 seeds. If it asks for more seeds, 32 decide."""
    (found,) = check(architecture, which).verdicts.values()
    more = ""
    if found == UNCLEAR and not which.startswith("SP"):
        (found,) = check(architecture, which, seeds=MORE_SEEDS).verdicts.values()
        more = f" ({MORE_SEEDS} seeds)"
    return (found if found == ("fail" if which.startswith("SP") else "pass") else f"**{found}**") + more


# The page


def row(name: str) -> tuple[list[str], float]:
    """The cells of one architecture, and the seconds that it took."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    architecture = ALL[name]
    cells = [name, *astuple(quick(architecture)), *(verdict(architecture, which) for which in CHECKS)]
    return cells, time.perf_counter() - start


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
    rows = []
    with ProcessPoolExecutor(2) as pool:
        for cells, seconds in pool.map(row, names or ALL):
            print(f"{seconds:5.0f} s  {table([cells]).splitlines()[-1]}", flush=True)
            rows.append(cells)
    if not names:
        PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
