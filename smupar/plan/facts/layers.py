"""The table of the layers that smupar knows. All code that must tell a Linear from a convolution asks this table.

A kind of layer says which parameter is a weight matrix, and which dimensions of the matrix are inputs or the output. It also
says what the layer reads (rows, images or indices), how well smupar understands its forward pass, and how to multiply by its
weight. ``register_layer`` adds the user's own layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.parametrize import ParametrizationList

from smupar.refusals import refuse

ROWS, IMAGES, INDICES = "rows", "images", "indices"
GROUPED_DIM = 1  # the dimension of a convolution's weight, transposed or not, that counts the channels of one group
LINEAR = "linear"  # the product is x @ W.T if in_dim is 1, x @ W if it is 0

# How well smupar understands a layer's forward pass. Each level includes the levels before it.
OPAQUE = 0
SCALABLE = 1  # the output is linear in the weight, so scaling the layer's input or output is the same as scaling the weight
MEASURABLE = 2  # a coordinate check can measure what one update does to its output
PLAIN = 3  # the forward pass is the product plus ``bias`` and nothing else, so a CSR product can replace it

# (layer, weight, input) -> output without bias. Products of registered layers take (weight, input) only.
Product = Callable[..., Tensor]


@dataclass(frozen=True)
class LayerKind:
    """The facts about one kind of layer."""

    name: str
    matches: Callable[[nn.Module], bool] = field(compare=False)
    weights: str = ""  # glob for the names of its weight matrices; "" if the module's class does not say what its tensors do
    in_dims: tuple[int, ...] = (1,)  # input dimensions of the weight; the kernel's dimensions are added for IMAGES
    out_dim: int = 0
    reads: str = ROWS
    understood: int = OPAQUE
    takes_factor: bool = True  # hooks can scale the layer's input or output
    product: Product | str | None = None  # how ``record_updates`` multiplies by a weight; None if it cannot
    is_registered: bool = False
    # layout of the layer's other tensors of several dimensions: "vector", "raw" (unknown), or "" if their sizes decide
    rest: str = ""
    by_element: bool = False  # its tensors multiply or add element by element, as in norms
    # of a recurrent layer: prefix of the weights that read the layer's input; all other weights read its state
    outside: str | None = None
    written: Callable[[Any], int] | None = None  # computes the output size, if the weight's shape does not show it

    @property
    def is_lookup(self) -> bool:
        return self.reads == INDICES

    @property
    def is_linear(self) -> bool:
        return self.understood >= SCALABLE

    @property
    def is_measured(self) -> bool:
        return self.understood >= MEASURABLE

    @property
    def is_plain(self) -> bool:
        return self.understood >= PLAIN

    def owns(self, leaf: str) -> bool:
        """Whether a parameter of this name is a weight matrix of the layer."""
        return fnmatchcase(leaf, self.weights)

    def multiply(self, layer: nn.Module, weight: Tensor, x: Tensor, in_dim: int | None = None) -> Tensor:
        """The product of the layer's input with a weight, without bias. ``in_dim`` overrides the kind's own."""
        if callable(self.product):
            return self.product(weight, x) if self.is_registered else self.product(layer, weight, x)
        return x @ (weight.T if (self.in_dims[0] if in_dim is None else in_dim) == 1 else weight)

    def output(self, layer: nn.Module, x: Tensor) -> Tensor:
        """The layer's output on rows of its input. For a registered layer this is the product alone, without bias."""
        return self.multiply(layer, getattr(layer, self.weights), x) if self.is_registered else layer.forward(x)

    def effect(self, layer: nn.Module, parameter: nn.Parameter, change: Tensor, x: Tensor) -> Tensor:
        """The layer's output on ``x`` with ``change`` as its weight and no bias. Hooks on the layer are not run again."""
        if self.is_registered:
            return self.multiply(layer, change, x)
        bias = getattr(layer, "bias", None)
        values = parameter.data, None if bias is None else bias.data
        try:
            parameter.data = change
            if bias is not None:
                bias.data = torch.zeros_like(bias)
            return layer.forward(x)
        finally:
            parameter.data = values[0]
            if bias is not None:
                bias.data = values[1]


def kind_of(module: nn.Module) -> LayerKind:
    """The kind of a module: what the user registered for its class, or else the first kind of the table that fits."""
    for base in type(module).__mro__:
        if base in REGISTERED:  # a subclass may have another forward pass
            kind = REGISTERED[base]
            return replace(kind, understood=min(kind.understood, MEASURABLE)) if base is not type(module) else kind
    return next(kind for kind in LAYERS if kind.matches(module))


def num_groups(module: nn.Module) -> int:
    return module.groups if isinstance(module, _ConvNd) else 1


def is_depthwise(module: nn.Module, scaling: tuple[int, ...]) -> bool:
    """Whether each output of a convolution reads a fixed number of inputs at every width."""
    return isinstance(module, _ConvNd) and (module.groups == module.in_channels > 1 or (module.groups > 1 and scaling == (0,)))


def is_plain_lookup(module: nn.Module) -> bool:
    """Whether a lookup runs torch's own forward pass, without max_norm, which rescales rows. A probe may call only
    such a lookup."""
    return type(module) is nn.Embedding and module.max_norm is None


def padding_row(module: nn.Module) -> int | None:
    """The index of a lookup table's padding row, which torch keeps at 0."""
    return getattr(module, "padding_idx", None) if kind_of(module).is_lookup else None


def has_running_statistics(module: nn.Module) -> bool:
    """Whether the module is a norm that keeps averages over batches in its buffers."""
    return isinstance(module, nn.modules.batchnorm._NormBase)


def channel_dim(module: nn.Module) -> int:
    """The dimension of a module's output that counts its neurons: before the places of an image in convolutions, the second in
    norms of images, the last elsewhere."""
    if isinstance(module, _ConvNd):
        return 1 - module.weight.ndim
    return 1 if has_running_statistics(module) or isinstance(module, nn.GroupNorm) else -1


def draws_random_numbers(module: nn.Module) -> bool:
    """Whether the module's forward pass draws random numbers in its current mode."""
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0


def reads_weights_of_its_layers(module: nn.Module) -> bool:
    """Whether a module may use its layers' weights without calling the layers, as nn.TransformerEncoderLayer does in
    evaluation."""
    return isinstance(module, nn.TransformerEncoderLayer)


def _instance_of(*classes: type[nn.Module]) -> Callable[[nn.Module], bool]:
    return lambda module: isinstance(module, classes)


def _is_conv1d(module: nn.Module) -> bool:
    """Whether the module is transformers' Conv1D, checked by name to avoid importing transformers."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _convolve(layer: Any, weight: Tensor, x: Tensor) -> Tensor:
    function = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[weight.ndim]
    return function(x, weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)


def _rnn_size(module: Any) -> int:
    return int((module.proj_size or module.hidden_size) * (1 + module.bidirectional))


_TABLE = LayerKind("`nn.Embedding`", _instance_of(nn.Embedding), "weight", (0,), 1, reads=INDICES, understood=MEASURABLE)
_LINEAR = LayerKind("`nn.Linear`", lambda module: type(module) is nn.Linear, "weight", understood=MEASURABLE)
_CONV = replace(_LINEAR, name="`nn.Conv1d`, `Conv2d`, `Conv3d`", reads=IMAGES)
_RNN = LayerKind("`nn.RNN`, `LSTM`, `GRU`", _instance_of(nn.RNNBase), "*", outside="weight_ih_l0", written=_rnn_size)
# Parametrizations such as weight_norm, which compute one weight from several tensors.
PARAMETRIZED = LayerKind("parametrizations of several tensors", _instance_of(ParametrizationList), rest="raw")

LAYERS = (
    _TABLE,
    replace(_TABLE, name="`nn.EmbeddingBag`", matches=_instance_of(nn.EmbeddingBag), understood=SCALABLE),
    replace(_LINEAR, product=LINEAR, understood=PLAIN),
    # nn.MultiheadAttention uses the weight of its out_proj without calling out_proj.
    replace(
        _LINEAR,
        name="`out_proj` of `nn.MultiheadAttention`",
        matches=_instance_of(nn.modules.linear.NonDynamicallyQuantizableLinear),
    ),
    replace(_LINEAR, name="classes derived from `nn.Linear`", matches=_instance_of(nn.Linear), product=LINEAR),
    replace(
        _LINEAR, name="`Conv1D` of transformers", matches=_is_conv1d, in_dims=(0,), out_dim=1, product=LINEAR, understood=PLAIN
    ),
    replace(_CONV, matches=_instance_of(nn.Conv1d, nn.Conv2d, nn.Conv3d), product=_convolve),
    replace(_CONV, name="transposed convolutions", matches=_instance_of(_ConvTransposeNd), in_dims=(0,), out_dim=1),
    replace(_CONV, name="other convolutions", matches=_instance_of(_ConvNd)),
    _RNN,
    replace(
        _RNN,
        name="`nn.RNNCell`, `LSTMCell`, `GRUCell`",
        matches=_instance_of(nn.RNNCellBase),
        outside="weight_ih",
        written=lambda cell: int(cell.hidden_size),
    ),
    LayerKind("`nn.MultiheadAttention`", _instance_of(nn.MultiheadAttention), "*_weight", takes_factor=False, rest="vector"),
    # nn.Bilinear takes two inputs and sums over both; its weight has three dimensions.
    LayerKind("`nn.Bilinear`", _instance_of(nn.Bilinear)),
    PARAMETRIZED,
    LayerKind("`nn.ParameterList`, `ParameterDict`", _instance_of(nn.ParameterList, nn.ParameterDict)),
    LayerKind("other modules of torch", lambda module: type(module).__module__.startswith("torch."), by_element=True),
    LayerKind("any other module", lambda module: True),
)
REGISTERED: dict[type[nn.Module], LayerKind] = {}


# Layers of the user's own


def register_layer(
    layer: type[nn.Module],
    *,
    in_dim: int | tuple[int, ...],
    out_dim: int,
    weight: str = "weight",
    lookup: bool = False,
    product: Callable[[Tensor, Tensor], Tensor] | str | None = None,
) -> None:
    """Tells smupar what a layer of your own does with its weight. It is then treated like torch's layers.

    layer     the class; subclasses count as well
    in_dim    dimension of the weight that is summed over: 1 if stored as (out, in), 0 if (in, out); or a tuple of dimensions
    out_dim   dimension of the weight that corresponds to outputs
    weight    name of the parameter
    lookup    True if the layer's input is an index, as in an embedding
    product   (weight, x) -> output without bias, for x of shape (rows, in). ``coord_check`` and ``record_updates`` use it to
              measure the layer; without it the layer is not measured on its own. "linear" says that the forward pass is
              x @ W.T or x @ W, plus ``bias``, and nothing else. Then ``sparsify_storage`` can keep only the non-zeros.

    Call it once, beside the class. The weight then gets its role, mask, init and factors without ``roles={...}``.
    """
    in_dims = _checked_dims(layer, in_dim, out_dim)
    refuse(
        not (isinstance(weight, str) and weight.isidentifier()),
        f"{layer.__name__}: weight must be the name of a parameter of the layer, got {weight!r}",
    )
    _check_product(layer, product, (*in_dims, out_dim), lookup)
    kind = LayerKind(
        f"`{layer.__name__}`",
        _instance_of(layer),
        weight,
        in_dims,
        out_dim,
        reads=INDICES if lookup else ROWS,
        understood=SCALABLE if product is None else PLAIN if product == LINEAR else MEASURABLE,
        product=product,
        is_registered=True,
    )
    refuse(
        REGISTERED.setdefault(layer, kind) != kind,
        f"{layer.__name__} is registered already, with other arguments: register it once, beside the class",
    )


def _checked_dims(layer: type[nn.Module], in_dim: int | tuple[int, ...], out_dim: int) -> tuple[int, ...]:
    refuse(
        not inspect.isclass(layer) or not issubclass(layer, nn.Module) or layer is nn.Module,
        f"register_layer takes a class derived from nn.Module, got {layer!r}",
    )
    inherited = kind_of(layer.__new__(layer))
    refuse(
        layer.__module__.startswith("torch.") and inherited.weights and not inherited.is_registered,
        f"{layer.__name__} is known already ({inherited.name}): register a class of your own",
    )
    in_dims = in_dim if isinstance(in_dim, tuple) else (in_dim,)
    dims = (*in_dims, out_dim)
    refuse(
        not in_dims or any(isinstance(dim, bool) or not isinstance(dim, int) or dim < 0 for dim in dims),
        f"{layer.__name__}: in_dim and out_dim must be whole numbers, 0 or greater, got {in_dim!r} and {out_dim!r}",
    )
    refuse(
        len(set(dims)) < len(dims),
        f"{layer.__name__}: in_dim={in_dim!r} and out_dim={out_dim!r} name the same dimension: a weight stored as (in, "
        "out) has in_dim=0, out_dim=1",
    )
    return in_dims


def _check_product(layer: type[nn.Module], product: object, dims: tuple[int, ...], lookup: bool) -> None:
    if product is None:
        return
    refuse(
        product != LINEAR and not callable(product),
        f"{layer.__name__}: product must be a function of (weight, x), 'linear' or None, got {product!r}",
    )
    refuse(
        len(dims) > 2,
        f"{layer.__name__}: a product reads rows of one dimension, but in_dim names {len(dims) - 1} dimensions",
    )
    refuse(
        product == LINEAR and (lookup or set(dims) != {0, 1}),
        f"{layer.__name__}: product='linear' is for matrices of shape (in, out) or (out, in)",
    )


def check_registered(module: nn.Module) -> None:
    """Refuses a module that does not fit what was registered for its class."""
    kind = kind_of(module)
    if not kind.is_registered:
        return
    weight = getattr(module, kind.weights, None)
    if not isinstance(weight, Tensor) or weight.ndim <= max(*kind.in_dims, kind.out_dim):
        actual = "has no such weight" if weight is None else f"its weight has shape {tuple(getattr(weight, 'shape', ()))}"
        raise ValueError(
            f"{type(module).__name__} was registered with weight={kind.weights!r}, in_dim={kind.in_dims}, "
            f"out_dim={kind.out_dim}, but {actual}: correct the call of register_layer"
        )
