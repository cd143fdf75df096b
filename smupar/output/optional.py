"""Imports packages that only some commands need, when they are needed. If one is missing, the error says what to install."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def optional(module: str, purpose: str) -> Any:
    """Imports a module of the extra ``data``. If it is missing, the error is one line that says how to get it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ValueError(f"{purpose} needs {package}: pip install 'smupar[data]'") from error


def first_line(error: BaseException) -> str:
    """The first line of another library's error, short enough for an error of one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
