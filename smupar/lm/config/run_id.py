"""The text of a configuration that is hashed into the id of a run."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache
from typing import Any, cast

from smupar.lm.config.fields import default_of

# The fields of the first published runs, which are always hashed. Never change this list. A later field is hashed only if it
# differs from its default, so that the ids of earlier runs do not change.
FIRST_FIELDS = frozenset(
    re.findall(
        r"\w+",
        """
        width depth head_dim vocab_size ff_ratio ff_multiple positions activation biases tied residual_factor context
        model rule base_width sparsity pattern allocation dynamic rounds mask_every mask_stop drop_fraction correction
        follow record init_std alpha_input alpha_output optimizer lr rest_lr betas momentum eps eps_scaling weight_decay
        decay clip schedule warmup steps batch_size seq_len dtype data valid_data valid_batches seed
        """,
    )
)


def id_of(config: Any) -> str:
    """A hash of all fields of a configuration, equal for equal configurations."""
    return hashlib.sha256(as_text(_hashed(config)).encode()).hexdigest()[:10]


@cache
def _defaults(kind: Hashable) -> list[tuple[str, Any]]:
    """The fields of a kind of configuration, with their defaults."""
    return [(item.name, default_of(item)) for item in fields(cast(Any, kind))]


def _hashed(config: Any) -> dict[str, Any]:
    return {
        name: _hashed(value) if is_dataclass(value) else value
        for name, default in _defaults(cast(Hashable, type(config)))
        if (value := getattr(config, name)) != default or name in FIRST_FIELDS
    }


def as_text(values: Mapping[str, Any], depth: int = 1) -> str:
    """The text of ``json.dumps(values, indent=1)``, in a fifth of the time, since json does not use its C encoder with an
    indent. The page of a large study hashes thousands of runs before it opens."""
    space = "\n" + " " * depth
    parts = [f"{_scalar(name)}: {_value_as_text(value, depth + 1)}" for name, value in values.items()]
    return f"{{{space}{f',{space}'.join(parts)}{space[:-1]}}}"


def _value_as_text(value: Any, depth: int) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return float.__repr__(value)
    if isinstance(value, dict):
        return as_text(value, depth)
    if isinstance(value, (list, tuple)) and value:
        space = "\n" + " " * depth
        return f"[{space}{f',{space}'.join(_value_as_text(entry, depth + 1) for entry in value)}{space[:-1]}]"
    return json.dumps(value) if isinstance(value, (list, tuple)) else _scalar(value)


@lru_cache(maxsize=4096, typed=True)
def _scalar(value: str | int | float | None) -> str:
    return json.dumps(value)
