"""How a weight is kept: as its layer's own tensor, or as its non-zeros alone; and what the rest of the library asks about it.

A layer that keeps only non-zeros is a ``Compressed`` one; ``sparse`` has the kinds there are. Its ``weight`` is one parameter
of values under the name that the plan knows, so groups, learning rates and checkpoints need not care. What does care about the
matrix asks the functions here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from smupar.stepping import Step, on_every_step, seam_of
from smupar.tensors import parent_path

COLUMNS, ROW_STARTS = "_columns", "_row_starts"


@dataclass(frozen=True)
class Moved:
    """What a new mask did to a parameter: ``carry`` does it to a tensor that goes along, such as optimizer state."""

    carry: Callable[[Tensor], Tensor]
    grown: Tensor  # where the parameter is new


_REPLACED = "_smupar_replaced"
_MODELS: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def watch_optimizers(model: nn.Module, replaced: Iterable[nn.Parameter]) -> None:
    """For a model whose weights may be kept in another way from now on: optimizers that hold what was replaced refuse to step,
    and state that they load is laid out as the weights are now."""
    _MODELS.add(model)
    for parameter in replaced:
        setattr(parameter, _REPLACED, True)
    on_every_step("refuse_replaced", _refuse_replaced)
    on_every_step("fit_state", _fit_state)


def _refuse_replaced(step: Step) -> None:
    if any(hasattr(parameter, _REPLACED) for group in step.optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            "this optimizer holds weights that sparsify_storage has replaced, and would train nothing: make param_groups and "
            "the optimizer again, after it"
        )


def _fit_state(step: Step) -> None:
    """At the first step, and at the first after state was loaded."""
    seam, states = seam_of(step.optimizer), step.optimizer.state
    if seam.fitted_state is states:
        return
    seam.fitted_state = states
    for model in _MODELS:
        for name, parameter in model.named_parameters():
            state = states.get(parameter, {})
            for what, value in state.items():
                if isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape:
                    state[what] = _laid_out(model, name, value)


def _laid_out(model: nn.Module, name: str, value: Tensor) -> Tensor:
    """What belongs to a matrix, for its non-zeros alone, and the other way round; anything else as it is."""
    layer = compressed(model, name)
    if layer is not None:
        return layer.gather(value) if tuple(value.shape) == layer.weight_shape else value
    mask = getattr(model.get_submodule(parent_path(name)), f"{name.rpartition('.')[2]}_mask", None)
    return value if mask is None or value.shape != (int(mask.sum()),) else scatter(mask, value)


def scatter(mask: Tensor, values: Tensor) -> Tensor:
    """A matrix with these values where the mask is, in the order of the flattened matrix."""
    return values.new_zeros(mask.shape).masked_scatter_(mask, values)


class Compressed(nn.Module):
    """A linear layer that keeps only its non-zeros; ``weight`` holds their values.

    While ``keeps_dense`` is set, ``dense`` holds what the gradient would be without a mask, summed over micro-batches.
    """

    weight: nn.Parameter
    keeps_dense: bool = False
    dense: Tensor | None = None
    index_names: ClassVar[tuple[str, ...]] = ()
    """Buffers beside the weight: the same on every rank."""

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        raise NotImplementedError

    @property
    def num_index_bytes(self) -> int:
        """Of all that is kept beside the weight to find its places."""
        raise NotImplementedError

    @property
    def weight_mask(self) -> Tensor:
        """A new tensor, (rows, columns)."""
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        """What the weight makes of rows ``x``, without bias, in their dtype."""
        raise NotImplementedError

    def expand(self, values: Tensor) -> Tensor:
        """The matrix with these values at the non-zeros."""
        raise NotImplementedError

    def gather(self, matrix: Tensor) -> Tensor:
        """The entries of a matrix at the non-zeros, in the order of ``weight``."""
        raise NotImplementedError

    def keep(self, grad: Tensor, x: Tensor) -> None:
        """Adds to ``dense`` what rows of the output's gradient and of the input make of it."""
        raise NotImplementedError

    def make_room(self, num_values: int) -> None:
        """For that many non-zeros, which are about to be read into the weight and its index."""
        raise NotImplementedError

    def move(self, mask: Tensor) -> Moved:
        """Makes ``mask`` the places of the non-zeros: weights that stay keep value and gradient, new ones start at 0."""
        raise NotImplementedError


def compressed(model: nn.Module, name: str) -> Compressed | None:
    """The layer that keeps only the non-zeros of a parameter, if it is kept so."""
    path, leaf = parent_path(name), name.rpartition(".")[2]
    module = model.get_submodule(path)
    return module if leaf == "weight" and isinstance(module, Compressed) else None


def shape_of(model: nn.Module, name: str) -> tuple[int, ...]:
    """Of the matrix, however it is kept."""
    layer = compressed(model, name)
    return tuple(model.get_parameter(name).shape) if layer is None else layer.weight_shape


# In a state dict: values ``<name>``, ``<name>_columns`` of each, and for each row ``<name>_row_starts`` among them


def is_compressed(state: MutableMapping[str, Any], key: str) -> bool:
    return f"{key}{COLUMNS}" in state


def expand_state(state: MutableMapping[str, Any], key: str, shape: tuple[int, ...]) -> None:
    """Makes of a weight that is kept as its non-zeros the matrix and its mask, in place."""
    values, columns, starts = state[key], state.pop(f"{key}{COLUMNS}"), state.pop(f"{key}{ROW_STARTS}")
    if len(starts) != shape[0] + 1 or len(columns) != len(values):
        raise ValueError(
            f"{key!r} is kept as {len(values)} non-zeros in {len(starts) - 1} rows, which does not fit the shape {shape}: the "
            "state dict is of another model"
        )
    places = flat_places(starts, columns, shape[1])
    state[key] = values.new_zeros(shape).view(-1).index_copy_(0, places, values).view(shape)
    mask = torch.zeros(shape, dtype=torch.bool, device=values.device)
    state[f"{key}_mask"] = mask.view(-1).index_fill_(0, places, True).view(shape)


def flat_places(row_starts: Tensor, columns: Tensor, num_columns: int) -> Tensor:
    """Where the non-zeros lie in the flattened matrix, in whole numbers of 64 bits."""
    rows = torch.arange(len(row_starts) - 1, device=columns.device).repeat_interleave(row_starts.diff())
    return rows * num_columns + columns
