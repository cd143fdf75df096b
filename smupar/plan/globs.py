"""Values by parameter name, ``{"glob": value}``. The first glob that matches a name decides. A glob that matches nothing is
refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

from smupar.refusals import refuse

T = TypeVar("T")


def match_globs(settings: Mapping[str, T], names: Iterable[str], *, setting: str, among: str) -> dict[str, T]:
    """The setting of each name that a glob matches. Names that no glob matches are left out.

    Errors use ``setting`` as the name of the argument, and ``among`` for the kind of the names.
    """
    names = list(names)
    first_glob = {name: next((glob for glob in settings if fnmatchcase(name, glob)), None) for name in names}
    for glob in settings:
        if glob in first_glob.values():
            continue
        refuse(
            any(fnmatchcase(name, glob) for name in names),
            f"{setting}: {glob!r} has no effect, earlier globs take all its matches; put it before them",
        )
        shown = ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if len(names) > 8 else "")
        raise ValueError(f"{setting}: {glob!r} matches none of the {among}: {shown or 'there are none'}")
    return {name: settings[glob] for name, glob in first_glob.items() if glob is not None}


def layer_glob(name: str) -> str:
    """The name with stars instead of layer numbers, so that one line stands for all blocks."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
