"""A linear layer that keeps its non-zeros row by row (CSR), whichever kernel multiplies by them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from smupar.execute.sparse.kernels import kernel_of
from smupar.execute.sparse.products import Index, Kernel, Product
from smupar.model.compressed import Compressed
from smupar.model.csr import COLUMNS, ROW_STARTS, compress_state, is_compressed, row_index
from smupar.model.gradients import PassGradient


class SparseLinear(Compressed):
    """What nn.Linear or transformers' Conv1D becomes; made by ``compress``, which changes the class of the layer and leaves
    its identity, its name, its hooks and its bias alone."""

    bias: nn.Parameter | None

    # Set by ``compress``: the class that the layer had, and the name of the backend
    original: type[nn.Module]
    backend: str
    kernel: Kernel | None = None
    """None: the backend's for the device that the weight is on."""

    _index: Index | None = None
    _made_of: tuple[object, ...] | None = None

    def forward(self, x: Tensor) -> Tensor:
        self._refuse_device(x)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        elif x.dtype != self.weight.dtype:
            raise ValueError(f"the input is {x.dtype}, the weight {self.weight.dtype}: convert one of them")
        return self._product(x, self.bias)

    def product(self, x: Tensor) -> Tensor:
        self._refuse_device(x)
        if self._kernel().dtype is None:
            return self._product(x, None)
        # Kernels for GPUs round to bfloat16, and what is asked for here is the small difference of two products.
        matrix = self.expand(self.weight.detach()).to(x.dtype)
        return x @ (matrix.T if self.out_dim == 0 else matrix)

    def _refuse_device(self, x: Tensor) -> None:
        if x.device != self.weight.device:
            raise ValueError(f"the input is on {x.device}, the weight on {self.weight.device}: move one of them")

    # A kernel of our own: torch.compile does what lies between such layers.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        num_inputs = self.matrix_shape[1 - self.out_dim]
        if x.shape[-1] != num_inputs:
            raise ValueError(f"the layer reads {num_inputs} features, the input of shape {tuple(x.shape)} has {x.shape[-1]}")
        kernel = self._kernel()
        if kernel.dtype not in (None, x.dtype):
            raise ValueError(
                f"backend {self.backend!r} multiplies {kernel.dtype} on a GPU, the input is {x.dtype}: call the model under "
                f"torch.autocast('cuda', {kernel.dtype}), or convert model and input"
            )
        return Product.apply(x, self.weight, bias, self, self.index(), kernel)

    def _kernel(self) -> Kernel:
        return self.kernel or kernel_of(self.backend, self.weight.device)

    # The index

    def index(self) -> Index:
        """What the kernel needs to know. It is derived, and made again whenever the places were written to: by masks that move,
        by a checkpoint."""
        kernel, starts, columns = self._kernel(), self.weight_row_starts, self.weight_columns
        made_of = kernel.name, columns.device, starts._version, columns._version
        if self._index is None or self._made_of != made_of:
            self._check_index()
            with torch.inference_mode(False):  # what is made while a model evaluates serves when it trains, too
                self._index = kernel.index(starts, columns, self.matrix_shape, self.out_dim)
            self._made_of = made_of
        return self._index

    def _check_index(self) -> None:
        """A kernel reads where the index points to, so it must not be raw memory."""
        starts, columns, num_columns = self.weight_row_starts, self.weight_columns, self.matrix_shape[1]
        ordered = int(starts[0]) == 0 and bool((starts.diff() >= 0).all()) and int(starts[-1]) == len(columns)
        inside = len(columns) == 0 or (int(columns.min()) >= 0 and int(columns.max()) < num_columns)
        if not (ordered and inside and len(columns) == len(self.weight)):
            raise ValueError(
                f"the index of a sparse layer of shape {self.matrix_shape} is damaged, as after to_empty: load a checkpoint "
                "into the model before it is used"
            )

    def forget_index(self) -> None:
        self._index = self._made_of = None

    @property
    def num_index_bytes(self) -> int:
        tensors = self.weight_row_starts, self.weight_columns, *self.index().tensors()
        parts = {id(part): part for part in tensors}  # the kernel's index may hold the layer's own
        return sum(part.numel() * part.element_size() for part in parts.values())

    def check_mask(self, mask: Tensor) -> None:
        if why := self._kernel().refusal(mask):
            raise ValueError(
                f"backend {self.backend!r} cannot hold the moved mask: {why}; or "
                "sparsify_storage(model, plan, backend='csr'), or 'dense', before masks move"
            )

    # Copies, conversions, checkpoints

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.forget_index()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.forget_index()
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Reads both kinds: non-zeros, as many as there are, and a matrix with its mask."""
        key = f"{prefix}weight"
        matrix, mask = state_dict.get(key), state_dict.get(f"{key}_mask")
        if matrix is not None and mask is not None and tuple(matrix.shape) == tuple(mask.shape) == self.matrix_shape:
            compress_state(state_dict, key)
        if is_compressed(state_dict, key):
            starts, columns = state_dict[f"{key}{ROW_STARTS}"], state_dict[f"{key}{COLUMNS}"]
            if starts.shape == self.weight_row_starts.shape:  # else torch says what does not fit
                self.make_room(len(columns))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        sizes = self.matrix_shape[1 - self.out_dim], self.matrix_shape[self.out_dim]
        about = f"in_features={sizes[0]}, out_features={sizes[1]}, bias={self.bias is not None}"
        return f"{about}, non-zeros={len(self.weight)}, backend={self.backend!r}"


def compress(layer: nn.Module, mask: Tensor, *, out_dim: int, backend: str = "csr") -> None:
    """Makes a SparseLinear of a linear layer, in place."""
    weight: Any = layer.weight
    starts, columns = row_index(mask)
    values = nn.Parameter(weight.detach()[mask], requires_grad=weight.requires_grad)
    shape, original = tuple(weight.shape), type(layer)
    del layer.weight_mask
    layer.__class__ = SparseLinear
    assert isinstance(layer, SparseLinear)
    layer.original, layer.matrix_shape, layer.out_dim, layer.backend = original, shape, out_dim, backend
    layer.weight, layer.dense = values, PassGradient()
    layer.register_buffer("weight_columns", columns)
    layer.register_buffer("weight_row_starts", starts)


def expand(layer: SparseLinear) -> None:
    """The way back."""
    mask, original = layer.weight_mask, layer.original
    weight = nn.Parameter(layer.expand(layer.weight.detach()), requires_grad=layer.weight.requires_grad)
    layer.forget_index()
    del layer.weight_columns, layer.weight_row_starts
    own = ("original", "matrix_shape", "out_dim", "backend", "kernel", "dense", "_index", "_made_of")
    for name in own:
        layer.__dict__.pop(name, None)
    layer.__class__ = original  # type: ignore[assignment]
    layer.weight = weight
    layer.register_buffer("weight_mask", mask)
