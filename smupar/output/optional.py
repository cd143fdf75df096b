"""Imports packages that only some commands need, when they are needed. If a package is missing, the error says what to
install."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class MissingPackageError(ModuleNotFoundError, ValueError):
    """A package that the command needs is not installed."""


def optional(module: str, purpose: str, extra: str = "data") -> Any:
    """Imports a module that one of smupar's extras installs. If it is missing, the error says which extra to install."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise MissingPackageError(f"{purpose} needs {package}: pip install 'smupar[{extra}]'") from error


def first_line(error: BaseException) -> str:
    """The first line of another library's error, to quote in a one-line message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
