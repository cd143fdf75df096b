"""What is known about the architectures of transformers: which fields of a config change with the width."""

from __future__ import annotations

import math
from copy import deepcopy
from fractions import Fraction

from transformers import PreTrainedConfig

from smupar.refusals import refuse

# config.model_type -> the config's name for the width inside an MLP
FAMILIES = {
    "gpt2": "n_inner",
    "llama": "intermediate_size",
    "mistral": "intermediate_size",
    "qwen2": "intermediate_size",
    "qwen3": "intermediate_size",
    "gpt_neox": "intermediate_size",
    "vit": "intermediate_size",
}


def base_config(config: PreTrainedConfig, width: int = 256) -> PreTrainedConfig:
    """The config of the same architecture at another width. The number of layers, the head size and the number of queries per
    key stay the same; the number of heads and the width of MLPs change in proportion.

    A single head stays a single head. If keys and values have a single head, the number of queries per key changes with the
    width. If queries have a single head, the size of that head changes, unless the config sets the size.
    """
    kind = config.model_type
    refuse(
        kind not in FAMILIES,
        f"base_config knows {', '.join(FAMILIES)}, not {kind!r}: build the base's config yourself, changing only widths "
        "(fewer heads of the same size), and pass it as parameterize(model, base=config)",
    )
    refuse(
        isinstance(width, bool) or not isinstance(width, int) or width < 1,
        f"the base width must be a positive whole number, got {width!r}",
    )
    ratio = Fraction(width, config.hidden_size)
    every = {name: getattr(config, name, None) or 1 for name in ("num_attention_heads", "num_key_value_heads")}
    counts = {name: count for name, count in every.items() if count > 1}
    unit = Fraction(config.hidden_size, math.gcd(*counts.values()) if counts else 1)
    shown = " and ".join(f"{name} {count}" for name, count in counts.items()) or "one head"
    refuse(
        Fraction(width) % unit,
        f"at width {width} the heads of this {kind} ({shown} at width {config.hidden_size}) would not be a whole number: "
        f"choose a multiple of {unit.numerator}",
    )
    base = deepcopy(config)
    inside = getattr(config, FAMILIES[kind])
    base.hidden_size = width
    for name, count in counts.items():
        setattr(base, name, int(count * ratio))
    if inside is not None:
        setattr(base, FAMILIES[kind], max(1, round(inside * ratio)))
    if getattr(config, "pooler_output_size", None) == config.hidden_size:
        base.pooler_output_size = width
    return base
