"""Makes pictures with matplotlib, which is imported when the first picture is drawn."""

from __future__ import annotations

from typing import Any

from smupar.output.optional import optional


def new_figure(**settings: Any) -> Any:
    """An empty matplotlib figure. If matplotlib is missing, the error says how to install it."""
    return optional("matplotlib.figure", "the picture", "plot").Figure(**settings)
