"""Compressed sparse rows (CSR), the format of stored non-zeros: the conversion, and the names of the parts.

The values of the non-zeros are in the order of the flattened matrix. ``columns`` has the column of each value (int32).
``row_starts`` has the number of the first value of each row, and at its end the number of all values (int64). A "non-zero" is a
weight that the mask keeps, even if its value is 0.

A state dict calls the parts ``<name>``, ``<name>_columns`` and ``<name>_row_starts``. An exported file calls them
``<name>.values``, ``<name>.col_indices`` and ``<name>.crow_indices``.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from smupar.refusals import refuse

MASK, COLUMNS, ROW_STARTS = "_mask", "_columns", "_row_starts"
_VALUES, _EXPORTED_COLUMNS, _EXPORTED_STARTS = ".values", ".col_indices", ".crow_indices"


def row_index(mask: Tensor) -> tuple[Tensor, Tensor]:
    """(row starts, columns) of a mask."""
    starts = torch.zeros(len(mask) + 1, dtype=torch.int64, device=mask.device)
    torch.cumsum(mask.sum(1), 0, out=starts[1:])
    return starts, mask.nonzero()[:, 1].to(torch.int32)


def flat_places(row_starts: Tensor, columns: Tensor, num_columns: int) -> Tensor:
    """The positions of the non-zeros in the flattened matrix (int64)."""
    rows = torch.arange(len(row_starts) - 1, device=columns.device).repeat_interleave(row_starts.diff())
    return rows * num_columns + columns


def matrix_of(values: Tensor, row_starts: Tensor, columns: Tensor, num_columns: int) -> Tensor:
    shape = len(row_starts) - 1, num_columns
    places = flat_places(row_starts, columns, num_columns)
    return values.new_zeros(shape).view(-1).index_copy_(0, places, values).view(shape)


def mask_of_index(row_starts: Tensor, columns: Tensor, num_columns: int) -> Tensor:
    ones = torch.ones(len(columns), dtype=torch.bool, device=columns.device)
    return matrix_of(ones, row_starts, columns, num_columns)


# In a state dict


def is_compressed(state: MutableMapping[str, Any], key: str) -> bool:
    return f"{key}{COLUMNS}" in state


def compress_state(state: MutableMapping[str, Any], key: str) -> None:
    """Replaces a matrix and its mask by the non-zeros and their index, in place."""
    mask = state.pop(f"{key}{MASK}").bool()
    starts, columns = row_index(mask)
    state[key], state[f"{key}{COLUMNS}"], state[f"{key}{ROW_STARTS}"] = state[key][mask], columns, starts


def expand_state(state: MutableMapping[str, Any], key: str, shape: tuple[int, ...]) -> None:
    """Replaces non-zeros and their index by the matrix and its mask, in place."""
    values, columns, starts = state[key], state.pop(f"{key}{COLUMNS}"), state.pop(f"{key}{ROW_STARTS}")
    refuse(
        len(starts) != shape[0] + 1 or len(columns) != len(values),
        f"{key!r} is kept as {len(values)} non-zeros in {len(starts) - 1} rows, which does not fit the shape {shape}: the "
        "state dict belongs to another model",
    )
    state[key] = matrix_of(values, starts, columns, shape[1])
    state[f"{key}{MASK}"] = mask_of_index(starts, columns, shape[1])


# In an exported file


def compress_export(tensors: MutableMapping[str, Tensor], name: str, mask: Tensor) -> None:
    """Replaces a matrix by its non-zeros, in place. Both index tensors have the same dtype, as other tools expect."""
    starts, columns = row_index(mask)
    dtype = torch.int32 if int(starts[-1]) < 2**31 else torch.int64
    index = {_EXPORTED_STARTS: starts.to(dtype), _EXPORTED_COLUMNS: columns.to(dtype), _VALUES: tensors.pop(name)[mask]}
    tensors.update({f"{name}{part}": tensor for part, tensor in index.items()})


def expand_export(tensors: MutableMapping[str, Tensor], num_columns: dict[str, int]) -> None:
    """Replaces the parts of every compressed matrix by the matrix, in place. ``num_columns`` maps names to numbers of
    columns."""
    for name in [key.removesuffix(_VALUES) for key in tensors if key.endswith(_VALUES)]:
        values, starts, columns = (tensors.pop(f"{name}{part}") for part in (_VALUES, _EXPORTED_STARTS, _EXPORTED_COLUMNS))
        tensors[name] = matrix_of(values, starts, columns, num_columns[name])
