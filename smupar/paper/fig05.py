"""Figure 5: the coordinate check over density: do activations, gradients and updates keep their size?"""

from __future__ import annotations

from smupar.check.coordinates.measure import GRAD_X, Y
from smupar.check.coordinates.report import Report
from smupar.check.coordinates.verdict import PASS
from smupar.lm.config.commands import CheckConfig
from smupar.lm.use.check import check_gpt
from smupar.paper.figure import RULES, Claim, Figure, Place, Rows, all_of, title
from smupar.paper.settings import Scale


def measure(place: Place, rows: Rows) -> Report:
    """Runs the check, which writes its picture and pages."""
    scale = place.scale
    size, run = scale.size("coordinates"), scale.run("coordinates")
    return check_gpt(
        CheckConfig(
            rules=RULES,
            base_width=run.base_width,
            widths=(size.width,),
            sparsities=size.sparsities,
            init_std=run.init_std,
            alpha_input=run.alpha_input,
            alpha_output=run.alpha_output,
            steps=size.steps,
            seeds=size.seeds,
            depth=size.depth,
            head_dim=run.model.head_dim,
            batch_size=size.batch_size,
            seq_len=size.seq_len,
            device=place.device,
            out=str(place.folder),
        ),
        lr={rule: scale.run("coordinates", rule=rule).lr for rule in RULES},
    )


def what(scale: Scale) -> str:
    size = scale.size("coordinates")
    sparsities = ", ".join(f"{sparsity:g}" for sparsity in size.sparsities)
    base = scale.run("coordinates").base_width
    return (
        f"The coordinate check of a GPT of {size.depth} layers, width {size.width} (base {base}), at sparsity {sparsities}: "
        f"{size.steps} steps of {size.batch_size} x {size.seq_len} bytes of Python's standard library, {size.seeds} seeds."
    )


def claim(report: Report) -> Claim:
    """Sizes are read at attention and feed-forward blocks, as in the paper. Gradients are read at the first step, since later
    gradients also depend on how far a model has been trained."""
    last = max(slope.step for slope in report.slopes)
    parts = []
    for rule in ("sp", "mup"):
        parts.append(_vanish(report, rule, Y, (1, last), "activations"))
        parts.append(_vanish(report, rule, GRAD_X, (1,), "gradients"))
    smupar_keeps = Claim(report.verdicts["smupar"] == PASS, f"SmuPar keeps all sizes: {report.verdicts['smupar']}")
    return all_of(*parts, smupar_keeps)


def _vanish(report: Report, rule: str, quantity: str, steps: tuple[int, ...], name: str) -> Claim:
    slopes = [
        slope.slope
        for slope in report.slopes
        if (slope.rule, slope.quantity, slope.axis, slope.role) == (rule, quantity, "density", "block")
        and slope.step in steps
        and not slope.is_mean
    ]
    when = " and ".join(map(str, dict.fromkeys(steps)))
    fall = f"density^{min(slopes):.2f} to density^{max(slopes):.2f}"
    return Claim(min(slopes) > 0, f"{title(rule)}'s {name} fall with density in every block at step {when}: as {fall}")


FIGURE = Figure(
    title="Coordinate check over density",
    shows="Activations of SP and muP vanish as weights are removed, SmuPar's keep their size. The text names gradients too.",
    finding=1,
    measure=measure,
    what=what,
    claim=claim,
)
