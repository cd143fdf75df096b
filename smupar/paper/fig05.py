"""Figure 5: the coordinate check over density: do activations, gradients and updates keep their size?"""

from __future__ import annotations

from pathlib import Path

from smupar.coordinates.report import Report
from smupar.coordinates.verdict import FAIL, PASS
from smupar.lm.check import check_gpt
from smupar.lm.config import CheckConfig
from smupar.paper.figure import Claim
from smupar.paper.settings import TABLE_4, Scale

TITLE = "Coordinate check over density"
SHOWS = "Activations of SP and muP vanish as weights are removed; SmuPar's keep their size."
FINDING = 1


def measure(scale: Scale, folder: Path, device: str = "auto") -> Report:
    """Writes the check's own picture and pages."""
    size, printed = scale.size("coordinates"), TABLE_4["coordinates"]
    assert printed.lr is not None
    run = scale.run("coordinates")
    return check_gpt(
        CheckConfig(
            base_width=run.base_width,
            widths=(size.width,),
            sparsities=size.sparsities,
            lr=printed.lr["smupar"],
            steps=size.steps,
            seeds=size.seeds,
            depth=size.depth,
            head_dim=printed.head_dim,
            batch_size=size.batch_size,
            seq_len=size.seq_len,
            device=device,
            out=str(folder),
        )
    )


def what(scale: Scale) -> str:
    size = scale.size("coordinates")
    sparsities = ", ".join(f"{one:g}" for one in size.sparsities)
    base = scale.run("coordinates").base_width
    return (
        f"The coordinate check of a GPT of {size.depth} layers, width {size.width} (base {base}), at sparsity {sparsities}: "
        f"{size.steps} steps of {size.batch_size} x {size.seq_len} bytes, {size.seeds} seeds."
    )


def claim(report: Report) -> Claim:
    said = ", ".join(f"{rule} {verdict}" for rule, verdict in report.verdicts.items())
    vanish = all(report.verdicts[rule] == FAIL for rule in ("sp", "mup"))
    return Claim(vanish and report.verdicts["smupar"] == PASS, f"SmuPar keeps all sizes, SP and muP do not: {said}")
