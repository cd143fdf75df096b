"""cuSPARSELt's product with a 2:4 matrix, planned once for a size. torch's own call makes its plan anew each time, which takes
the host about as long as a GPU multiplies at width 4096.

Called through ctypes: torch brings the library along, but not its header. What is here holds for versions 0.5 and later.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from smupar.sparse.gpu import current_stream

_BYTES = 16 * 1024  # of each of its structures: the largest of any version has 11024
_ALIGNMENT = 16  # of matrices, in bytes, and of the structures
# As its header numbers them
_BF16, _BY_COLUMN, _BY_ROW, _AS_IT_IS, _TURNED, _HALF_ZERO, _IN_F32, _DEFAULT = 14, 1, 2, 0, 1, 0, 2, 0


class Struct:
    """One of the library's structures, which it lays out as it likes."""

    def __init__(self) -> None:
        self.room = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
        start = ctypes.addressof(self.room)
        self._as_parameter_ = ctypes.c_void_p(start + -start % _ALIGNMENT)


@cache
def _library() -> ctypes.PyDLL:
    # PyDLL: a handle is not for two threads at once, and such calls keep the interpreter's lock.
    return ctypes.PyDLL("libcusparseLt.so.0")


def _call(name: str, *args: object) -> None:
    code = getattr(_library(), f"cusparseLt{name}")(*args)
    if code:
        raise RuntimeError(f"cusparseLt{name} failed with code {code}")


@cache
def _handle(device: torch.device) -> Struct:
    handle = Struct()
    with torch.cuda.device(device):
        _call("Init", handle)
    return handle


class Plan:
    """``plan(matrix, rows)`` is rows @ matrix.T, for one size of each, in bfloat16. ``matrix`` is packed."""

    in_graph = False

    def __init__(self, shape: tuple[int, int], num_rows: int, device: torch.device) -> None:
        self.shape, self.num_rows, self.handle = shape, num_rows, _handle(device)
        (num_outputs, num_inputs), make = shape, ctypes.c_int64
        # All are kept: a plan may refer to what it was made of.
        self.matrices = matrix, rows, made = Struct(), Struct(), Struct()
        self.product, self.choice, self.plan = Struct(), Struct(), Struct()
        sizes = make(num_outputs), make(num_inputs), make(num_inputs)
        _call("StructuredDescriptorInit", self.handle, matrix, *sizes, _ALIGNMENT, _BF16, _BY_ROW, _HALF_ZERO)
        sizes = make(num_rows), make(num_inputs), make(num_inputs)
        _call("DenseDescriptorInit", self.handle, rows, *sizes, _ALIGNMENT, _BF16, _BY_ROW)
        sizes = make(num_outputs), make(num_rows), make(num_outputs)
        _call("DenseDescriptorInit", self.handle, made, *sizes, _ALIGNMENT, _BF16, _BY_COLUMN)
        _call("MatmulDescriptorInit", self.handle, self.product, _AS_IT_IS, _TURNED, matrix, rows, made, made, _IN_F32)
        _call("MatmulAlgSelectionInit", self.handle, self.choice, self.product, _DEFAULT)
        _call("MatmulPlanInit", self.handle, self.plan, self.product, self.choice)
        self.one, self.zero = ctypes.c_float(1), ctypes.c_float(0)
        self._measure_workspace()

    def search(self, matrix: Tensor, rows: Tensor) -> None:
        """Times the library's algorithms and keeps the one that it found the fastest."""
        self._run("MatmulSearch", matrix, rows)
        self._measure_workspace()

    def __call__(self, matrix: Tensor, rows: Tensor) -> Tensor:
        return self._run("Matmul", matrix, rows)

    def close(self) -> None:
        """Gives back what the library keeps for it, unless a CUDA graph may replay its products."""
        if self.in_graph:
            return
        _call("MatmulPlanDestroy", self.plan)
        for matrix in self.matrices:
            _call("MatDescriptorDestroy", matrix)

    def _measure_workspace(self) -> None:
        size = ctypes.c_size_t()
        _call("MatmulGetWorkspace", self.handle, self.plan, ctypes.byref(size))
        self.workspace = size.value

    def _run(self, name: str, matrix: Tensor, rows: Tensor) -> Tensor:
        made = rows.new_empty(self.num_rows, self.shape[0])
        workspace = rows.new_empty(self.workspace, dtype=torch.uint8) if self.workspace else None
        stream = current_stream(rows.device)
        into = ctypes.c_void_p(made.data_ptr())
        _call(
            name,
            self.handle,
            self.plan,
            ctypes.byref(self.one),
            ctypes.c_void_p(matrix.data_ptr()),
            ctypes.c_void_p(rows.data_ptr()),
            ctypes.byref(self.zero),
            into,
            into,
            None if workspace is None else ctypes.c_void_p(workspace.data_ptr()),
            ctypes.byref(stream),
            1,
        )
        return made
