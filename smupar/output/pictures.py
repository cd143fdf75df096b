"""Makes pictures with matplotlib, which is imported when the first picture is drawn. If a picture is optional, call
``missing_pictures`` first."""

from __future__ import annotations

import io
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any

from smupar.output.files import write_atomic
from smupar.output.optional import optional


def missing_pictures() -> str:
    """A sentence on how to get pictures if matplotlib is missing; "" if it is installed."""
    try:
        is_there = find_spec("matplotlib") is not None
    except ValueError:  # sys.modules has a stand-in for it, without a spec
        is_there = False
    return "" if is_there else "no picture is drawn, since matplotlib is not installed: pip install 'smupar[plot]'"


def new_figure(**settings: Any) -> Any:
    """An empty matplotlib figure. If matplotlib is missing, the error says how to install it."""
    return optional("matplotlib.figure", "the picture", "plot").Figure(**settings)


def save_figure(figure: Any, path: str | PathLike[str], *, dpi: int) -> None:
    """Writes a figure in the format that the file's ending names; PNG if it has none."""
    content = io.BytesIO()
    figure.savefig(content, dpi=dpi, format=Path(path).suffix.removeprefix(".") or "png")
    write_atomic(Path(path), content.getvalue())
