"""Pictures are made by matplotlib, which is imported when the first one is drawn."""

from __future__ import annotations

from typing import Any


def new_figure(**settings: Any) -> Any:
    """An empty matplotlib figure; without matplotlib, an error that says how to get it."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the picture needs matplotlib: pip install 'smupar[plot]'") from error
    return Figure(**settings)
