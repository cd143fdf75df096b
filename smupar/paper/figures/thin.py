"""Beyond the paper: how few weights per neuron does SmuPar need? Its derivation uses a law of large numbers over the weights of
a neuron."""

from __future__ import annotations

from smupar.lm.config.run_config import RunConfig
from smupar.paper.figure import STABLE, Claim, Figure, Rows, curves, panel, swept
from smupar.paper.settings import Scale
from smupar.plan.remarks import MIN_WEIGHTS_PER_NEURON
from smupar.study.curves.curves import Panel
from smupar.study.curves.optima import Curve, moved

WEIGHTS_PER_NEURON = {"cpu": (16, 8, 4), "small": (64, 16, 8, 4, 2), "paper": (64, 16, 8, 4, 2)}


def runs(scale: Scale) -> list[RunConfig]:
    width = scale.size("sweep").width
    sparse = [scale.run("sweep", sparsity=1 - num / width) for num in WEIGHTS_PER_NEURON[scale.name]]
    return swept(scale, "sweep", [scale.run("sweep", rule="mup", sparsity=0.0), *sparse])


def _weights(curve: Curve) -> int:
    return round(curve.width * (1 - curve.sparsity))


def draw(rows: Rows) -> list[Panel]:
    return [panel(curves(rows, "smupar"), "SmuPar", label=lambda curve: f"{_weights(curve)} weights per neuron")]


def claim(rows: Rows) -> Claim:
    dense, *sparse = curves(rows, "smupar")
    num_weights = [_weights(curve) for curve in sparse]
    by_num = {
        num: (moved(dense, curve), curve.excess(dense.best_value)) for num, curve in zip(num_weights, sparse, strict=True)
    }
    words = ", ".join(f"{move:.2g}x at {num} ({cost:+.1%})" for num, (move, cost) in sorted(by_num.items(), reverse=True))
    holds = all(move <= STABLE for num, (move, _) in by_num.items() if num >= MIN_WEIGHTS_PER_NEURON)
    return Claim(
        holds,
        f"with {MIN_WEIGHTS_PER_NEURON} weights per neuron or more the best learning rate moves by at most {STABLE:g}x: {words}"
        "; in parentheses, what the dense model's best one costs",
    )


FIGURE = Figure(
    title="Few weights per neuron",
    shows="The paper names the question and leaves it open.",
    runs=runs,
    swept=("sweep", "lr"),
    draw=draw,
    claim=claim,
)
