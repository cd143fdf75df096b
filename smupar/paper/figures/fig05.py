"""Figure 5: the coordinate check over density: do activations, gradients and updates keep their size?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smupar.check.coordinates.readings import GRAD_X, Y
from smupar.check.coordinates.verdict import LAYER_AT_STEP_1, PASS, Slope
from smupar.lm.config.commands import CheckConfig
from smupar.lm.use.check import check_gpt
from smupar.paper.figure import RULES, Claim, Figure, Place, Rows, all_of, title
from smupar.paper.settings import Scale

_FLAT = LAYER_AT_STEP_1[0]  # a layer whose slope is below this passes the check


@dataclass(frozen=True)
class SlopesOverDensity:
    """How sizes in hidden layers and blocks change with density, and the check's verdict on each rule."""

    slopes: Sequence[Slope]
    verdicts: Mapping[str, str]


def measure(place: Place, rows: Rows) -> SlopesOverDensity:
    """Runs the check, which writes its picture and page."""
    scale = place.scale
    size, run = scale.size("coordinates"), scale.run("coordinates")
    report = check_gpt(
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
    return SlopesOverDensity(
        [slope for slope in report.slopes if slope.axis == "density" and not slope.is_mean], report.verdicts
    )


def from_published(published: dict[str, Any]) -> SlopesOverDensity:
    """Reads the published slopes, which leave out some of a place's fields."""
    slopes = [Slope(axis="density", kind="block" if row["role"] == "block" else "layer", **row) for row in published["slopes"]]
    return SlopesOverDensity(slopes, published["verdicts"])


def what(scale: Scale) -> str:
    size = scale.size("coordinates")
    sparsities = ", ".join(f"{sparsity:g}" for sparsity in size.sparsities)
    base = scale.run("coordinates").base_width
    return (
        f"The coordinate check of a GPT of {size.depth} layers, width {size.width} (base {base}), at sparsity {sparsities}: "
        f"{size.steps} steps of {size.batch_size} x {size.seq_len} bytes of Python's standard library, {size.seeds} seeds."
    )


def claim(sizes: SlopesOverDensity) -> Claim:
    """Activations are read at attention and feed-forward blocks, as in the paper. Gradients are read at each layer, only at the
    first step, since later gradients also depend on how much a model has learned."""
    last = max(slope.step for slope in sizes.slopes)
    parts = []
    for rule in ("sp", "mup"):
        parts.append(_vanish(sizes, rule, Y, "block", (1, last)))
        parts.append(_vanish(sizes, rule, GRAD_X, "hidden", (1,)))
    smupar_keeps = Claim(
        sizes.verdicts["smupar"] == PASS, f"SmuPar keeps all sizes (verdict of the check: {sizes.verdicts['smupar']})"
    )
    return all_of(*parts, smupar_keeps, _independent(sizes))


def _vanish(sizes: SlopesOverDensity, rule: str, quantity: str, role: str, steps: tuple[int, ...]) -> Claim:
    """Whether sizes fall with density everywhere, by more than the check allows for a flat layer."""
    slopes = _chosen(sizes, rule, quantity, role, steps)
    falling = [slope for slope in slopes if slope > _FLAT]
    when = f"step{'s' * (len(set(steps)) > 1)} {' and '.join(map(str, dict.fromkeys(steps)))}"
    what, where = {Y: ("activations", "block"), GRAD_X: ("gradients", "layer")}[quantity]
    text = f"{title(rule)}'s {what} shrink with density in every {where} at {when}: as density^{min(slopes):.2f} to "
    text += f"density^{max(slopes):.2f}, with an exponent above {_FLAT:g} in {len(falling)} of {len(slopes)}"
    return Claim(len(falling) == len(slopes), text)


def _independent(sizes: SlopesOverDensity) -> Claim:
    """Whether gradients at init behave as if they were independent of the weights, which the paper assumes without a test.
    If they were not, sums over a neuron's weights would not grow like the square root of the number of weights. SmuPar divides
    by this root, so sizes would then depend on density."""
    slopes = _chosen(sizes, "smupar", GRAD_X, "hidden", (1,))
    largest = max(slopes, key=abs)
    return Claim(
        abs(largest) < _FLAT,
        f"at the first step SmuPar's gradients have the same size at every density, in each of {len(slopes)} layers (farthest: "
        f"density^{largest:+.3f}), as they would if gradients were independent of weights",
    )


def _chosen(sizes: SlopesOverDensity, rule: str, quantity: str, role: str, steps: tuple[int, ...]) -> list[float]:
    wanted = rule, quantity, role
    return [s.slope for s in sizes.slopes if (s.rule, s.quantity, s.role) == wanted and s.step in steps]


FIGURE = Figure(
    title="Coordinate check over density",
    claimed="Under SP and muP, activations and gradients vanish with density; under SmuPar they keep their size",
    shows="Activations of SP and muP vanish as weights are removed; SmuPar's keep their size. The text names gradients too.",
    finding=1,
    measure=measure,
    from_published=from_published,
    what=what,
    claim=claim,
)
