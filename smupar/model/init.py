"""Writes initial values into a model's tensors, for ``parameterize``.

Our own random numbers come from (seed, parameter name) on the CPU, so they are the same on every device and rank. A module that
resets itself draws on its own device, seeded by its path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from smupar.model.sharding import like, zero_off_mask
from smupar.plan.facts.layers import kind_of, padding_row
from smupar.plan.masks.patterns import generator
from smupar.plan.plan import Plan, PlanRow
from smupar.refusals import refuse


@dataclass
class Resets:
    """How to reset the parameters that the plan does not initialise, if ``to_empty`` left raw memory in them."""

    zeros: list[nn.Parameter]  # biases of layers
    calls: dict[str, tuple[Callable[[], Any], set[torch.device]]]  # module path -> its own init
    cautions: list[str]

    def run(self, seed: int) -> None:
        for parameter in self.zeros:
            parameter.zero_()
        for path, (reset, devices) in self.calls.items():
            with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
                # A random init is seeded by name. torch.manual_seed would also seed GPUs that the model does not use, in which
                # other threads may be training.
                on_cpu = all(device.type == "cpu" for device in devices)
                seed_generators = torch.default_generator.manual_seed if on_cpu else torch.manual_seed
                seed_generators(generator(seed, "reset", path).initial_seed())
                reset()


def plan_resets(model: nn.Module, plan: Plan, *, sure: bool) -> Resets:
    """Plans the resets. Biases of layers become 0. Other modules call their ``reset_parameters``, or the ``_init_weights`` of
    their Hugging Face model."""
    resets, done, left = Resets([], {}, []), [], []
    for path, module in model.named_modules():
        names = [f"{path}.{leaf}" if path else leaf for leaf, _ in module.named_parameters(recurse=False)]
        rows = [plan[name] for name in names if name in plan]
        kept = {row.name: module.get_parameter(row.name.rpartition(".")[2]) for row in rows if row.init_std is None}
        if len(kept) < len(rows):
            resets.zeros += list(kept.values())
        elif kept and (init := _init_of(module, model)) is not None:
            resets.calls[path] = (init, {parameter.device for parameter in kept.values()})
        else:
            left += list(kept)
            continue
        done += list(kept)
    refuse(
        left and sure,
        f"reset=True, but {', '.join(left[:4])} belong to modules without reset_parameters: "
        "initialise them yourself after to_empty and pass reset=False",
    )
    if done or left:
        resets.cautions.append(
            f"no parameter of the model was ever written in place, as after to_empty, so {len(done)} norms and biases "
            f"({', '.join(done[:2])}, ...) get fresh values. Pass reset=True to confirm this, or reset=False to keep their "
            "values." + (f" These have no init of their own and are left as they are: {', '.join(left[:4])}." if left else "")
        )
    return resets


def _init_of(module: nn.Module, model: nn.Module) -> Callable[[], Any] | None:
    """The method that gives a module fresh values: its own method, or the Hugging Face model's method for all modules."""
    reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
    reset_any = getattr(model, "_init_weights", None)
    if reset is None and callable(reset_any):
        return partial(reset_any, module)
    return reset if callable(reset) else None


def padding_rows(model: nn.Module) -> dict[int, int]:
    """id of a lookup's weight -> its padding row. torch sets that row to 0 and never trains it."""
    rows = ((module, padding_row(module)) for module in model.modules())
    return {id(getattr(module, kind_of(module).weights)): row for module, row in rows if row is not None}


def initialise(parameter: nn.Parameter, row: PlanRow, mask: Tensor | None, seed: int, *, padding: int | None = None) -> None:
    """Fills a parameter with values that depend only on (seed, name), or keeps its values if the plan says so."""
    if row.init_std is None:
        if row.kept_factor != 1:
            parameter.mul_(row.kept_factor)
        if mask is not None:
            zero_off_mask(parameter, like(mask, parameter))
        return
    rng = generator(seed, "init", row.name)
    # Half-precision values are drawn in float32 and rounded: 0.6 % of the normal numbers that torch 2.9 draws in bfloat16 are
    # 0.
    dtype = torch.float32 if parameter.dtype in (torch.bfloat16, torch.float16) else parameter.dtype
    is_plain = parameter.device.type == "cpu" and type(parameter) is nn.Parameter and parameter.is_contiguous()
    in_place = is_plain and parameter.dtype == dtype
    values = parameter if in_place else torch.empty(row.shape, dtype=dtype)
    if mask is None:
        values.normal_(0, row.init_std, generator=rng)
    else:  # drawing only the kept weights saves most of the time at low density
        kept = torch.empty(int(torch.count_nonzero(mask)), dtype=values.dtype).normal_(0, row.init_std, generator=rng)
        values.zero_().masked_scatter_(mask, kept)
    if padding is not None:
        values[padding] = 0
    if not in_place:
        parameter.copy_(like(values.to(parameter.dtype), parameter))
