"""Turns configurations into command-line flags. Parsing returns only the flags that the user typed, as a dictionary from field
names to values, without defaults. ``resolve`` turns the dictionary into a configuration.

A command is a plain function. A parameter annotated ``Annotated[Typed, RunConfig]`` receives RunConfig's flags; nested fields
become flags of the same level. The example is ``smupar plan --width 64`` with ``def plan(..., config: Run)``, where
``Run`` is short for ``Annotated[Typed, RunConfig]``:
1. ``parser_of(plan)`` has the signature of ``plan``, but ``config`` is annotated with a dictionary type that ``_flags`` makes.
   It has a key, and so a flag, for each field of RunConfig, with the field's docstring as help.
2. tyro parses argv into that dictionary. Flags that were not typed have no key: ``{"model": {"width": 64}}``.
3. ``flat`` flattens nested configurations: the call becomes ``plan(config={"width": 64})``.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache, partial
from typing import Annotated, Any, Required, TypeAlias, TypedDict, get_args, get_type_hints

import tyro

from smupar.lm.config.run import default_of, flat

Typed: TypeAlias = dict[str, Any]  # maps the fields that the user typed to their values
Call: TypeAlias = partial[None]  # a command with its arguments


def parser_of(command: Callable[..., None], shown: Mapping[type, Any]) -> Callable[..., Call]:
    """Wraps ``command`` for tyro. Parsing returns the call without making it, so that errors inside the command do not pass
    through tyro. ``shown`` maps a configuration class to the instance whose values the help shows as defaults."""
    hints = get_type_hints(command, include_extras=True)
    kinds = {
        name: kind
        for name, hint in hints.items()
        for kind in get_args(hint)[1:]
        if isinstance(kind, type) and is_dataclass(kind)
    }

    def parsed(*args: Any, **options: Any) -> Call:
        return partial(command, *args, **{name: flat(value) if name in kinds else value for name, value in options.items()})

    # tyro reads only the chosen command's annotations, so dictionary types are made on demand.
    flags = {
        name: Annotated[Any, tyro.conf.arg(constructor_factory=partial(_flags, kind, shown.get(kind)))]
        for name, kind in kinds.items()
    }
    _disguise(parsed, command, hints | flags)
    return parsed


def _disguise(function: Any, command: Callable[..., None], hints: dict[str, Any]) -> None:
    """Makes ``function`` look like ``command`` to tyro, except for its annotations. tyro takes the names, order and defaults of
    parameters from the signature, their types from the annotations, and their help from the docstring."""
    function.__doc__, function.__annotations__ = command.__doc__, hints
    function.__signature__ = inspect.signature(command)


def _flags(kind: type[Any], shown: Any = None, described: str | None = None) -> Any:
    """A dictionary type with a key for each field of ``kind``. tyro leaves out keys whose flags were not typed."""
    hints, docs, keys = get_type_hints(kind), _docs_of_fields(kind.__module__), {}
    for item in fields(kind):
        hint, doc = hints[item.name], docs.get((kind.__name__, item.name))
        default = default_of(item) if shown is None else getattr(shown, item.name)
        if is_dataclass(default):
            keys[item.name] = _flags(hint, default, doc)
        elif default is MISSING:
            keys[item.name] = Required[Annotated[hint, tyro.conf.arg(help=doc)]]
        else:
            keys[item.name] = Annotated[hint, tyro.conf.arg(help=doc, help_behavior_hint=f"(default: {_words(default)})")]
    typed: Any = TypedDict(kind.__name__, keys, total=False)  # type: ignore[misc]
    typed.__doc__ = described or kind.__doc__
    return Annotated[typed, tyro.conf.OmitArgPrefixes, tyro.conf.PositionalRequiredArgs]


def _words(value: Any) -> str:
    """A value as a user would type it."""
    return " ".join(shlex.quote(str(part)) for part in (value if isinstance(value, tuple) else (value,)))


@lru_cache
def _docs_of_fields(module: str) -> dict[tuple[str, str], str]:
    """Maps (class name, field name) to the string literal below the field in the source."""
    classes = (node for node in ast.parse(inspect.getsource(sys.modules[module])).body if isinstance(node, ast.ClassDef))
    docs = {}
    for node in classes:
        for pair in itertools.pairwise(node.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[node.name, name] = " ".join(text.split())
    return docs
