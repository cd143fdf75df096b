"""cuSPARSELt's product with a 2:4 matrix, planned once for each size. torch's own function plans on each call, and at width
4096 planning takes the host about as long as the product takes the GPU.

The library is called through ctypes, since torch comes with the library but not with its header.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import cache
from typing import Any

import torch
from torch import Tensor

from smupar.execute.sparse.gpu import current_stream

_OLDEST = 500  # version 0.5.0, the first in which the constants below have these values
_BYTES = 16 * 1024  # bytes for each of the library's structures; the largest of any version has 11024
_ALIGNMENT = 16  # alignment of matrices and structures, in bytes
_CUDA_R_16BF = 14
_CUSPARSE_ORDER_COL, _CUSPARSE_ORDER_ROW = 1, 2
_CUSPARSE_OPERATION_NON_TRANSPOSE, _CUSPARSE_OPERATION_TRANSPOSE = 0, 1
_CUSPARSELT_SPARSITY_50_PERCENT = 0
_CUSPARSE_COMPUTE_32F = 2
_CUSPARSELT_MATMUL_ALG_DEFAULT = 0


def missing() -> str | None:
    """What is missing here to call cuSPARSELt; None if nothing is."""
    version = torch.backends.cusparselt.version() if torch.backends.cusparselt.is_available() else None
    if version is None or not hasattr(torch, "_cslt_compress"):
        return f"cuSPARSELt, which torch {torch.__version__} was built without"
    if version < _OLDEST:
        return f"cuSPARSELt of version {_OLDEST} or later, torch {torch.__version__} has {version}"
    try:
        _library()
    except OSError as error:
        return f"the library of cuSPARSELt ({error})"
    return None


@cache
def _library() -> ctypes.PyDLL:
    # Two threads must not use a handle at the same time. Calls through PyDLL hold the interpreter's lock, which prevents this.
    return ctypes.PyDLL("libcusparseLt.so.0")


def _call(name: str, *args: object) -> None:
    code = getattr(_library(), f"cusparseLt{name}")(*args)
    if code:
        raise RuntimeError(f"cusparseLt{name} failed with code {code}")


class Struct:
    """One of the library's opaque structures."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
        start = ctypes.addressof(self.buffer)
        self._as_parameter_ = ctypes.c_void_p(start + -start % _ALIGNMENT)


@cache
def _handle(device: torch.device) -> Struct:
    handle = Struct()
    with torch.cuda.device(device):
        _call("Init", handle)
    return handle


class MatmulPlan:
    """``plan(matrix, rows)`` returns rows @ matrix.T in bfloat16, for fixed sizes. ``matrix`` is packed."""

    def __init__(self, shape: tuple[int, int], num_rows: int, device: torch.device) -> None:
        self.shape, self.num_rows, self.handle = shape, num_rows, _handle(device)
        matrix, rows, result, product = Struct(), Struct(), Struct(), Struct()
        self.choice, self.plan = Struct(), Struct()
        self._describe(matrix, rows, result)
        operations = (_CUSPARSE_OPERATION_NON_TRANSPOSE, _CUSPARSE_OPERATION_TRANSPOSE)
        operands = (matrix, rows, result, result)  # the product is written to the result, plus zero times the old result
        _call("MatmulDescriptorInit", self.handle, product, *operations, *operands, _CUSPARSE_COMPUTE_32F)
        _call("MatmulAlgSelectionInit", self.handle, self.choice, product, _CUSPARSELT_MATMUL_ALG_DEFAULT)
        _call("MatmulPlanInit", self.handle, self.plan, product, self.choice)
        # The plan points to all of these structures, which live as long as the finalizer. No cleanup at exit: the library may
        # already be unloaded then, and the process frees its memory anyway.
        weakref.finalize(self, _destroy, matrix, rows, result, product, self.choice, self.plan).atexit = False
        self.one, self.zero = ctypes.c_float(1), ctypes.c_float(0)
        self._measure_workspace()

    def _describe(self, matrix: Struct, rows: Struct, result: Struct) -> None:
        """Describes the sizes and layouts of the matrices."""
        num_outputs, num_inputs = self.shape
        matrix_layout = _layout(num_outputs, num_inputs, num_inputs, _CUSPARSE_ORDER_ROW)
        rows_layout = _layout(self.num_rows, num_inputs, num_inputs, _CUSPARSE_ORDER_ROW)
        result_layout = _layout(num_outputs, self.num_rows, num_outputs, _CUSPARSE_ORDER_COL)
        _call("StructuredDescriptorInit", self.handle, matrix, *matrix_layout, _CUSPARSELT_SPARSITY_50_PERCENT)
        _call("DenseDescriptorInit", self.handle, rows, *rows_layout)
        _call("DenseDescriptorInit", self.handle, result, *result_layout)

    def search(self, matrix: Tensor, rows: Tensor) -> None:
        """Lets the library time its algorithms, and uses the fastest from then on."""
        self._run("MatmulSearch", matrix, rows)
        self._measure_workspace()

    def __call__(self, matrix: Tensor, rows: Tensor) -> Tensor:
        return self._run("Matmul", matrix, rows)

    def _measure_workspace(self) -> None:
        size = ctypes.c_size_t()
        _call("MatmulGetWorkspace", self.handle, self.plan, ctypes.byref(size))
        self.workspace = size.value

    def _run(self, name: str, matrix: Tensor, rows: Tensor) -> Tensor:
        result = rows.new_empty(self.num_rows, self.shape[0])
        workspace = rows.new_empty(self.workspace, dtype=torch.uint8) if self.workspace else None
        stream = current_stream(rows.device)
        result_address = ctypes.c_void_p(result.data_ptr())
        _call(
            name,
            self.handle,
            self.plan,
            ctypes.byref(self.one),
            ctypes.c_void_p(matrix.data_ptr()),
            ctypes.c_void_p(rows.data_ptr()),
            ctypes.byref(self.zero),
            result_address,  # the old result, times zero
            result_address,
            None if workspace is None else ctypes.c_void_p(workspace.data_ptr()),
            ctypes.byref(stream),
            1,
        )
        return result


def _layout(num_rows: int, num_columns: int, leading: int, order: Any) -> tuple[Any, ...]:
    """The arguments that describe a bfloat16 matrix. ``leading`` is the distance between two rows, or columns, by ``order``."""
    sizes = map(ctypes.c_int64, (num_rows, num_columns, leading))
    return *sizes, ctypes.c_uint32(_ALIGNMENT), _CUDA_R_16BF, order


def _destroy(matrix: Struct, rows: Struct, result: Struct, product: Struct, choice: Struct, plan: Struct) -> None:
    """Frees the library's memory for a plan. The descriptor of a product owns no memory, so no function frees it. The choice of
    an algorithm owns memory since version 0.8."""
    library = _library()
    library.cusparseLtMatmulPlanDestroy(plan)
    if hasattr(library, "cusparseLtMatmulAlgSelectionDestroy"):
        library.cusparseLtMatmulAlgSelectionDestroy(choice)
    for descriptor in (matrix, rows, result):
        library.cusparseLtMatDescriptorDestroy(descriptor)
