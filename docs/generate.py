"""Writes what is generated from code into the documentation. ``make docs`` runs it; a test fails when a page is stale.

docs/rules.md is generated whole. In README, docs/optimizers.md, docs/roles.md and docs/api.md tables stand between the markers
``<!-- table of NAME -->`` and ``<!-- end of the table -->``. Claims, pages and pictures in docs/results are made again from
their rows.
"""

import inspect
import re
from pathlib import Path
from typing import get_type_hints

import smupar
from smupar import rule_tables
from smupar.paper.publish import rewrite
from smupar.paper.results_page import claims_table
from smupar.plan.facts.layers import IMAGES, LAYERS
from smupar.plan.facts.optimizers import FAMILIES, OPTIMIZERS
from smupar.plan.roles.table import ASK, DOUBTS, ROLE_TABLE, Case
from smupar.plan.settings import DEFAULTS, Settings

DOCS = Path(__file__).parent
RESULTS = "https://github.com/smupar/smupar/blob/main/docs/results/{}.md"  # absolute, for PyPI
END = "<!-- end of the table -->"
# In the tables of roles, these words stand for the names that a question fills in.
WORDS = {"owner": "module", "groups": "several", "size": "some", "use": "is used in an operation that smupar does not follow"}
OPTIMIZER_COLUMNS = {
    "optimizer": "name",
    "family": "family",
    "states": "num_states",
    "decoupled decay": "decoupled",
    "epsilon": "eps",
    "betas": "betas",
    "momentum": "momentum",
    "mixes entries": "mixes_entries",
    "fused": "fused",
    "CUDA graph": "capturable",
    "stacks": "stackable",
    "restarts": "restartable",
}


def pages() -> dict[Path, str]:
    """Maps each page that is generated, or has generated tables, to the text that it should have."""
    tables = {
        "optimizers.md": {"optimizers": optimizers()},
        "../README.md": {"claims": claims_table(DOCS / "results", RESULTS)},
        "roles.md": {"layers": layers(), "roles": cases(ROLE_TABLE), "doubts": cases(DOUBTS)},
        "api.md": {"arguments": arguments()},
    }
    filled = {DOCS / name: fill((DOCS / name).read_text(encoding="utf-8"), parts) for name, parts in tables.items()}
    return {DOCS / "rules.md": rule_tables.markdown(), **filled}


def fill(page: str, tables: dict[str, str]) -> str:
    """The page with the tables between its markers."""
    for name, table in tables.items():
        before, start, rest = page.partition(f"<!-- table of {name} -->\n")
        page = f"{before}{start}\n{table}\n\n{END}{rest.partition(END)[2]}"
    return page


def markdown(*rows: list[str]) -> str:
    """Rows as a table, header first."""
    header, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([header, "|" + "---|" * len(rows[0]), *body])


def optimizers() -> str:
    """A row for each optimizer that has a rule."""
    rows = ([getattr(OPTIMIZERS[name], fact) for fact in OPTIMIZER_COLUMNS.values()] for name in FAMILIES)
    words = ([("yes" if cell else "") if isinstance(cell, bool) else str(cell) for cell in row] for row in rows)
    return markdown(list(OPTIMIZER_COLUMNS), *words)


def layers() -> str:
    """A row for each kind of layer that smupar knows."""
    rows = [["layer", "weights", "reads", "writes"]]
    for kind in LAYERS:
        if kind.weights:
            reads = f"dimension {kind.in_dims[0]}" + (" and the kernel" if kind.reads == IMAGES else "")
            rows.append([kind.name, f"`{kind.weights}`", reads, f"dimension {kind.out_dim}"])
    return markdown(*rows)


def cases(lines: tuple[Case, ...]) -> str:
    """A table by which roles are decided."""
    rows = [["", "a parameter that ...", "role", "why"]]
    for number, case in enumerate(lines, 1):
        asked = f"you are asked (guess: {case.guess})" if case.guess else "you are asked"
        role = asked if case.role == ASK else case.role
        rows.append([str(number), case.when, role, case.reason.format(**WORDS)])
    return markdown(*rows)


def arguments() -> str:
    """The arguments of ``parameterize``, of which most are settings, with types and defaults."""
    parameters = inspect.signature(smupar.parameterize).parameters.values()
    own = {parameter.name: parameter.default for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD}
    types = get_type_hints(smupar.parameterize) | get_type_hints(Settings)
    rows = [
        [f"`{name}`", _type(types[name]), "required" if default is inspect.Parameter.empty else f"`{default!r}`"]
        for name, default in {**own, **DEFAULTS}.items()
    ]
    return markdown(["argument", "type", "default"], *rows)


def _type(hint: object) -> str:
    """A type without the modules of its parts."""
    name = hint.__name__ if isinstance(hint, type) else repr(hint)
    return f"`{re.sub(r'(?:[a-z_]+[.])+(?=[A-Z])', '', name)}`".replace("|", "\\|").replace("NoneType", "None")


if __name__ == "__main__":
    for path, page in pages().items():
        path.write_text(page, encoding="utf-8")
    for results in (DOCS / "results", DOCS / "results" / "without-decay"):
        rewrite(results)
