"""The colours of rules, in pictures and on the page.

Readers with red-green blindness can tell the colours apart too. No colour is close to the green, red and amber of verdicts.
Each has a contrast of at least 3:1 with the background of its theme. Pictures have the light theme. Tests measure all of this.
"""

from __future__ import annotations

from typing import NamedTuple


class RuleStyle(NamedTuple):
    light: str
    dark: str
    dash: str  # how loss curves are dashed, in plotly's words


RULE_STYLES = {  # by title
    "SP": RuleStyle("#d9652a", "#c8701a", "dash"),
    "muP": RuleStyle("#1558c8", "#93dbfb", "dashdot"),
    "SmuPar": RuleStyle("#5a2078", "#8f58fb", "solid"),
    "measured updates": RuleStyle("#2a97b0", "#12adc8", "longdash"),
}


def rule_colour(label: str, default: str = "#777777") -> str:
    """The colour of a line whose label begins with the title of a rule, on white."""
    return next((style.light for title, style in RULE_STYLES.items() if label.startswith(title)), default)


def mixed(first: str, second: str, share: float) -> str:
    """A colour between two: the first at a share of 0, the second at 1."""
    channels = ((int(first[at : at + 2], 16), int(second[at : at + 2], 16)) for at in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in channels)
