"""A sentence of the paper: as weights per neuron decrease, the optimal learning rate tends to increase proportionally. From the
runs of Figure 6."""

from __future__ import annotations

import math

from smupar.output.colours import rule_colour
from smupar.paper.figure import Claim, Figure, Rows, all_of, curves, title
from smupar.paper.figures import fig06
from smupar.study.curves.curves import Line, Panel, Point
from smupar.study.curves.optima import Curve

_RULES = ("sp", "mup")  # SmuPar corrects for it
# Closer to a learning rate in proportion to 1 / weights per neuron, an exponent of 1, than to a constant one.
_PROPORTIONAL = 0.5


def _weights(curve: Curve) -> float:
    return curve.width * (1 - curve.sparsity)


def _optimum(curve: Curve) -> Point:
    return Point(_weights(curve), math.log2(curve.best))


def draw(rows: Rows) -> list[Panel]:
    """The best learning rates, and what they would be in exact proportion. Sparser models are on the right."""
    lines = []
    for rule in _RULES:
        own, name, colour = curves(rows, rule), title(rule), rule_colour(title(rule))
        proportional = (Point(_weights(curve), math.log2(own[0].best * _weights(own[0]) / _weights(curve))) for curve in own)
        lines.append(Line(name, tuple(map(_optimum, own)), colour))
        lines.append(Line(f"{name}, if in proportion", tuple(proportional), colour, joined=False, marker="x"))
        if at_edge := tuple(_optimum(curve) for curve in own if curve.on_edge):
            lines.append(Line(f"{name}: edge of the grid, could be higher", at_edge, colour, joined=False, marker="^"))
    return [Panel("", "weights per neuron", "log2 of the best learning rate", tuple(lines), whole_y=True, falling_x=True)]


def claim(rows: Rows) -> Claim:
    return all_of(*(_rises(rows, rule) for rule in _RULES))


def _rises(rows: Rows, rule: str) -> Claim:
    """Whether the exponent between the dense and the sparsest model is large enough. If an optimum is at the edge of the grid,
    the measured exponent is a lower bound, so a small one decides nothing."""
    dense, *_, sparsest = curves(rows, rule)
    rise, fewer = sparsest.best / dense.best, _weights(dense) / _weights(sparsest)
    exponent = math.log(rise) / math.log(fewer)
    holds = True if exponent > _PROPORTIONAL else None if sparsest.on_edge else False
    bound = " or more (edge of the grid)" if sparsest.on_edge else ""
    text = (
        f"{title(rule)}'s best learning rate rises by {rise:.2g}x{bound} while weights per neuron fall by {fewer:g}x: an "
        f"exponent of {exponent:.2f}{' or more' if bound else ''} (1 is in proportion, more than {_PROPORTIONAL:g} is needed)"
    )
    return Claim(holds, text)


FIGURE = Figure(
    title="The best learning rate over weights per neuron",
    claimed="SP's and muP's best learning rates rise in proportion as weights per neuron fall",
    shows="The text says that as weights per neuron decrease, the optimal learning rate tends to increase proportionally.",
    runs=fig06.FIGURE.runs,
    swept=("sweep", "lr"),
    draw=draw,
    claim=claim,
)
