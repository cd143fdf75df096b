"""Forward factors: buffers on layers and on the ends of residual branches, and the hooks that multiply by them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from smupar.plan.facts.layers import kind_of
from smupar.plan.plan import Plan
from smupar.plan.roles.parameters import parent_path

FACTOR, BRANCH = "smupar_factor", "smupar_branch"


def no_broadcast(model: nn.Module, buffers: Iterable[str]) -> None:
    """Tells DDP not to broadcast these buffers at every forward pass. They are the same on all ranks by construction."""
    ignored = {*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *buffers}
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)


def has_factor_hook(module: nn.Module) -> bool:
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return _scale_input in hooks or _scale_output in hooks


def add_missing_factors(models: Sequence[nn.Module], plans: Sequence[Plan]) -> None:
    """Adds a factor of 1 to embeddings, unembeddings and residual branches that have no factor, so that models of different
    rules can be batched."""
    for model, plan in zip(models, plans, strict=True):
        for name, parameter in model.named_parameters(remove_duplicate=False):
            module = model.get_submodule(parent_path(name))
            # The second name of a tied table has no row, but its module takes a factor.
            takes_factor = name not in plan or plan[name].role in ("embedding", "unembedding")
            if takes_factor and parameter.ndim > 1 and not hasattr(module, FACTOR):
                set_factor(module, 1.0, parameter)
    branches = sorted({path for plan in plans for path, _ in plan.branches})
    for model in models:
        add_missing_branch_factors(model, map(model.get_submodule, branches))


def add_missing_branch_factors(model: nn.Module, ends: Iterable[nn.Module]) -> None:
    """Adds a factor of 1 to the ends of residual branches that have no factor."""
    for module in ends:
        if not hasattr(module, BRANCH):
            set_branch_factor(module, 1.0, next(model.parameters()))


def _scale_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Multiplies the input and not the output, so that a bias is not scaled."""
    factor = getattr(module, FACTOR)
    if args:
        return (_times(args[0], factor), *args[1:]), kwargs
    first = "input" if "input" in kwargs else next(iter(kwargs))  # nn.GRU(hx=..., input=...)
    return args, {**kwargs, first: _times(kwargs[first], factor)}


def _times(x: Any, factor: Tensor) -> Any:
    if isinstance(x, nn.utils.rnn.PackedSequence):
        return x._replace(data=x.data * factor)
    return x * factor


def _scale_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Scales the output of a lookup, whose input is an index. A table of positions may return a tuple with the rows and the
    positions, which are not scaled."""
    factor = getattr(module, FACTOR)
    if isinstance(output, tuple):
        return tuple(part * factor if isinstance(part, Tensor) and part.is_floating_point() else part for part in output)
    return output * factor


def _scale_branch(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Scales the output of a module that ends a residual branch, bias included. Attention may return a tuple with its output
    first."""
    factor = getattr(module, BRANCH)
    return (output[0] * factor, *output[1:]) if isinstance(output, tuple) else output * factor


def _set_buffer(module: nn.Module, name: str, factor: float, parameter: Tensor) -> None:
    # The buffer is written again at each call, since .bfloat16() rounds it and to_empty leaves it uninitialised.
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    module.register_buffer(name, torch.tensor(factor, dtype=dtype, device=parameter.device), persistent=False)


def has_branch_hook(module: nn.Module) -> bool:
    return _scale_branch in module._forward_hooks.values()


def set_branch_factor(module: nn.Module, factor: float, parameter: Tensor) -> None:
    """Makes a module multiply its output by a factor. The factor has the device of ``parameter``. Its dtype is float64 if
    ``parameter`` has that dtype, otherwise float32."""
    _set_buffer(module, BRANCH, factor, parameter)
    if not has_branch_hook(module):
        module.register_forward_hook(_scale_branch)


def set_factor(module: nn.Module, factor: float, parameter: Tensor) -> None:
    _set_buffer(module, FACTOR, factor, parameter)
    if has_factor_hook(module):
        return
    if kind_of(module).is_lookup:
        module.register_forward_hook(_scale_output)
    else:
        module.register_forward_pre_hook(_scale_input, with_kwargs=True)
