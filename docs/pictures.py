"""Draws docs/images/three-rules.png, the first picture of README, from the rows of Figure 6. ``make docs`` runs it."""

from pathlib import Path

from smupar.paper.figure import Rows, curves, panel, title
from smupar.paper.publish import measured_in
from smupar.paper.published import read_published
from smupar.study.curves.curves import Panel
from smupar.study.curves.picture import draw_png

DOCS = Path(__file__).parent
RULES = ("sp", "mup", "smupar")


def three_rules(rows: Rows) -> list[Panel]:
    """A panel for each rule, with a curve for each density."""
    return [panel(curves(rows, rule), title(rule)) for rule in RULES]


if __name__ == "__main__":
    draw_png(three_rules(measured_in(read_published(DOCS / "results" / "fig06.json"))), DOCS / "images" / "three-rules.png")
