"""Pictures are made by matplotlib, which is imported when the first one is drawn."""

from __future__ import annotations

from typing import Any

from smupar.output.optional import optional


def new_figure(**settings: Any) -> Any:
    """An empty matplotlib figure; without matplotlib, an error that says how to get it."""
    return optional("matplotlib.figure", "the picture", "plot").Figure(**settings)
