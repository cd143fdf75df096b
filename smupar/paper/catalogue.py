"""All figures and tables that can be reproduced, by name."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from smupar.paper.figure import Figure

EVERY = "all"  # the name that stands for all figures
FIGURES = (
    *("tab01", "fig01", "fig03", "fig05", "fig06", "fig07", "fig08", "fig09", "fig10", "fig11", "fig12", "fig13", "fig14"),
    *("tab02", "tab03", "tab04", "wpn", "patterns", "thin", "decay", "drift", "held", "depth", "controls"),
)
FINDINGS = {
    1: "Increasing sparsity makes activations and gradients vanish under SP and muP",
    2: "With SP and muP, dense and sparse networks do not share the same optimal hyperparameters",
    3: "SmuPar enables stable activation and stable optimal hyperparameters for any width and sparsity",
    4: "Sparse networks trained with SmuPar improve over SP and muP due to improved tuning",
}


def figure(name: str) -> Figure:
    if name in ("fig02", "fig04"):
        raise ValueError(f"{name} is a diagram, with nothing to run: see docs/reproduce.md")
    if name not in FIGURES:
        raise ValueError(f"no figure or table is called {name!r}: choose one of {', '.join(FIGURES)}")
    asked: Figure = import_module(f"smupar.paper.figures.{name}").FIGURE
    return asked


def list_values() -> list[dict[str, Any]]:
    """The figures and tables as plain values, for programs."""
    figures = ((name, figure(name)) for name in FIGURES)
    return [{"figure": name, "title": fig.title, "finding": fig.finding, "shows": fig.shows} for name, fig in figures]


def listed() -> str:
    """The text of ``smupar reproduce --list``."""
    lines = []
    for name in FIGURES:
        fig = figure(name)
        finding = f" (Finding {fig.finding})" if fig.finding else ""
        lines.append(f"{name}  {fig.title}{finding}. {fig.shows}")
    return "\n".join([*lines, *(f"Finding {number}: {text}." for number, text in FINDINGS.items())])
