"""Makes the flags of a command from its signature.

A parameter of a plain type becomes one flag, described in the docstring's Args. A parameter annotated with a configuration,
such as ``config: Annotated[Typed, RunConfig]``, becomes one flag for each field, also of nested configurations. The field's
docstring describes the flag, and the command gets a dictionary of the typed fields. Help, completion and the parser all read
these flags.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from smupar.lm.config.fields import default_of

Typed: TypeAlias = dict[str, Any]  # field -> value, for the fields that the user typed

# Placeholders for values in help, where the type does not say enough.
_METAVARS = {
    **dict.fromkeys(("folder", "folders", "data", "valid_data", "data_dir", "out", "publish"), "FOLDER"),
    **dict.fromkeys(("hps", "follow", "requests", "scores"), "FILE"),
    **dict.fromkeys(
        ("steps", "whole_run", "mask_every", "warmup", "save_every", "valid_every", "log_every", "from_step"), "STEPS"
    ),
    **dict.fromkeys(("width", "widths", "base_width"), "WIDTH"),
    **dict.fromkeys(("depth", "base_depth", "proxy_depth", "depths"), "BLOCKS"),
    **dict.fromkeys(("sparsity", "sparsities", "mask_stop", "drop_fraction", "peak_share"), "SHARE"),
    **dict.fromkeys(("rule", "rules"), "RULE"),
    **{"lr": "LR", "rest_lr": "LR", "pattern": "PATTERN", "optimizer": "OPTIMIZER", "device": "DEVICE", "address": "ADDRESS"},
    **{"prompt": "TEXT", "seed": "SEED", "search_seed": "SEED", "host": "HOST", "port": "PORT", "tasks": "TASK"},
    **{"tokens": "TOKENS", "max_tokens": "TOKENS", "seq_len": "TOKENS", "context": "TOKENS", "shard_tokens": "TOKENS"},
    **{"sources": "SOURCE", "figures": "FIGURE", "axes": "FIELD=VALUE,...", "gpu_gib": "GIB", "max_length": "TOKENS"},
}
_BY_TYPE = {int: "N", float: "X", str: "NAME"}
_KINDS = {int: "a whole number", float: "a number"}
# Titles of sections in --help-all, by the first field of each section.
_SECTIONS = {
    "ModelConfig": {"width": "Model"},
    "RunConfig": {
        "rule": "Rule and base model",
        "sparsity": "Sparsity and masks",
        "init_std": "Hyperparameters that transfer",
        "optimizer": "Optimizer",
        "steps": "Length, batches and text",
    },
    "Execution": {"out": "How it is carried out"},
    "MachineConfig": {"gpus": "Machine, for --dry-run"},
    "EngineConfig": {"engine": "How it is carried out"},
}


@dataclass(frozen=True)
class Arg:
    """How a parameter of a command is typed, if its type and name do not say it."""

    metavar: str = ""
    positional: bool = False
    default: str | None = None  # default to show in help


@dataclass(frozen=True)
class Flag:
    """One flag, or a positional argument."""

    name: str  # name of the field
    parameter: str  # parameter of the command: the flag's own, or the configuration's
    section: str
    hint: Any  # the type of its value
    sentence: str
    metavar: str
    default: str  # as a user would type it; "" if there is none
    is_positional: bool = False
    is_required: bool = False

    @property
    def word(self) -> str:
        return self.metavar if self.is_positional else "--" + self.name.replace("_", "-")

    @property
    def is_switch(self) -> bool:
        return _inner(self.hint) is bool

    @property
    def turns_off(self) -> bool:
        """Whether a switch is on by default, or its default is decided later. Such a switch needs a way to turn it off."""
        return self.is_switch and self.default != "False"

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values; empty if there are many."""
        return tuple(str(choice) for choice in get_args(_inner(self.hint))) if get_origin(_inner(self.hint)) is Literal else ()

    @property
    def num_values(self) -> int | str | None:
        """The number of words that it takes, in argparse's notation: None for one."""
        inner = _inner(self.hint)
        if get_origin(inner) is not tuple:
            return "?" if self.is_positional and not self.is_required else None
        return len(get_args(inner)) if get_args(inner)[-1] is not ... else "+" if self.is_required else "*"

    @property
    def usage(self) -> str:
        """The way to type it: --width WIDTH, --[no-]tied, FOLDER."""
        if self.is_switch:
            return f"--[no-]{self.word[2:]}" if self.turns_off else self.word
        value = "{" + ",".join(self.choices) + "}" if self.choices else self.metavar
        many = self.num_values
        if many in ("+", "*"):
            value = f"{value} ..." if self.is_required or not self.is_positional else f"[{value} ...]"
        elif isinstance(many, int):
            value = " ".join([value] * many)
        if self.is_positional:
            return f"[{value}]" if many == "?" else value
        return f"{self.word} {value}"

    def value_of(self, word: str) -> Any:
        """Converts a typed word to a value. Raises ValueError with what was expected."""
        inner = _inner(self.hint)
        kind = get_args(inner)[0] if get_origin(inner) is tuple else inner
        if self.choices:
            if word not in self.choices:
                raise ValueError(f"takes one of {', '.join(self.choices)}, got {word!r}")
            return word
        if (_is_optional(self.hint) and word == "None") or (kind is not str and word == "none" and _is_optional(self.hint)):
            return None
        try:
            value = kind(word)
        except ValueError as error:
            raise ValueError(f"takes {_KINDS[kind]}, got {word!r}") from error
        if kind is float and math.isnan(value):
            raise ValueError(f"takes a number, got {word!r}")
        return value


def _is_optional(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType) and type(None) in get_args(hint)


def _inner(hint: Any) -> Any:
    """The type without None."""
    if not _is_optional(hint):
        return hint
    [inner] = [kind for kind in get_args(hint) if kind is not type(None)]
    return inner


def flags_of(command: Callable[..., Any], shown: Mapping[type, Any] | None = None) -> list[Flag]:
    """All flags of a command, in order. ``shown`` maps a configuration class to the instance whose values are the defaults."""
    hints, sentences = get_type_hints(command, include_extras=True), _docs_of_parameters(command)
    found: list[Flag] = []
    for name, parameter in inspect.signature(command).parameters.items():
        hint, *extras = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
        kind = next((extra for extra in extras if isinstance(extra, type) and is_dataclass(extra)), None)
        if kind is not None:
            found += _of_fields(kind, name, (shown or {}).get(kind))
            continue
        arg = next((extra for extra in extras if isinstance(extra, Arg)), Arg())
        default = parameter.default
        is_required = default is inspect.Parameter.empty
        shown_default = arg.default if arg.default is not None else "" if is_required else _words(default)
        metavar = arg.metavar or _metavar(name, hint)
        found.append(
            Flag(
                name,
                name,
                "",
                hint,
                sentences.get(name, ""),
                metavar,
                shown_default,
                arg.positional,
                is_required and arg.positional,
            )
        )
    return found


def _of_fields(kind: type[Any], parameter: str, shown: Any) -> Iterator[Flag]:
    """The flags of a configuration. Required fields are positional."""
    hints, docs, section = get_type_hints(kind), _docs_of_fields(kind.__module__), ""
    for item in fields(kind):
        default = default_of(item) if shown is None else getattr(shown, item.name)
        section = _SECTIONS.get(kind.__name__, {}).get(item.name, section)
        hint, sentence = hints[item.name], docs.get((kind.__name__, item.name), "")
        if is_dataclass(default):
            yield from _of_fields(type(default), parameter, default)
        else:
            required = default is MISSING
            metavar = "OUT" if required and item.name == "out" else _metavar(item.name, hint)
            shown_default = "" if required else _words(default)
            yield Flag(item.name, parameter, section, hint, sentence, metavar, shown_default, required, is_required=required)


def _metavar(name: str, hint: Any) -> str:
    if name in _METAVARS:
        return _METAVARS[name]
    inner = _inner(hint)
    kind = get_args(inner)[0] if get_origin(inner) is tuple else inner
    return "CHOICE" if get_origin(kind) is Literal else _BY_TYPE.get(kind, "")


def _words(value: Any) -> str:
    """A value as a user would type it; "" for None, which the flag's description explains."""
    if value is None or value == ():
        return ""
    parts: Sequence[Any] = value if isinstance(value, tuple) else (value,)
    return " ".join(shlex.quote(str(part)) if str(part).isprintable() else repr(part) for part in parts)


def summary_of(command: Callable[..., Any]) -> str:
    """The description of a command: its docstring without the Args."""
    return inspect.cleandoc(command.__doc__ or "").partition("\nArgs:")[0].strip()


@lru_cache
def _docs_of_parameters(command: Callable[..., Any]) -> dict[str, str]:
    """Maps each parameter to its description in the docstring's Args."""
    text = inspect.cleandoc(command.__doc__ or "").partition("\nArgs:\n")[2]
    found = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", text, re.MULTILINE)
    return {name: " ".join(sentence.split()) for name, sentence in found}


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
