"""Writes what is generated from code into the documentation. ``make docs`` runs it; a test fails when a page is stale.

docs/rules.md is generated whole. In docs/optimizers.md and docs/any_model.md tables stand between the markers
``<!-- table of NAME -->`` and ``<!-- end of the table -->``.
"""

from pathlib import Path

from smupar import rules
from smupar.plan.layers import IMAGES, LAYERS
from smupar.plan.optimizers import FAMILIES, OPTIMIZERS
from smupar.plan.role_table import ASK, DOUBTS, ROLE_TABLE, Case

DOCS = Path(__file__).parent
END = "<!-- end of the table -->"
# What stands in a table of roles for what a question names.
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
    """Each page that is generated, or has generated tables, as it should be."""
    tables = {
        "optimizers.md": {"optimizers": optimizers()},
        "any_model.md": {"layers": layers(), "roles": cases(ROLE_TABLE), "doubts": cases(DOUBTS)},
    }
    filled = {DOCS / name: fill((DOCS / name).read_text(encoding="utf-8"), parts) for name, parts in tables.items()}
    return {DOCS / "rules.md": rules.markdown(), **filled}


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
    """The optimizers that have a rule."""
    rows = ([getattr(OPTIMIZERS[name], fact) for fact in OPTIMIZER_COLUMNS.values()] for name in FAMILIES)
    words = ([("yes" if cell else "") if isinstance(cell, bool) else str(cell) for cell in row] for row in rows)
    return markdown(list(OPTIMIZER_COLUMNS), *words)


def layers() -> str:
    """The layers that tell what their weights do."""
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
        role = f"you are asked (guess: {case.guess})" if case.role == ASK else case.role
        rows.append([str(number), case.when, role, case.reason.format(**WORDS)])
    return markdown(*rows)


if __name__ == "__main__":
    for path, page in pages().items():
        path.write_text(page, encoding="utf-8")
