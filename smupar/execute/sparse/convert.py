"""``sparsify_storage`` converts a model's masked linear layers between dense and sparse storage."""

from __future__ import annotations

import contextlib
import copy
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from smupar.execute.sparse import backends, compression
from smupar.execute.sparse.auto import Timings, Work, timing_of
from smupar.execute.sparse.backends import AUTO, BACKENDS, DENSE
from smupar.model.attached import check_not_compiled, check_parameterized, check_plan, unwrapped
from smupar.model.csr import expand_state, is_compressed
from smupar.model.parameterize import attach
from smupar.model.relayout import watch_optimizers
from smupar.model.sparse_linear import SparseLinear
from smupar.model.weights import ModelWeight, weight_of
from smupar.output.tables import aligned
from smupar.plan.globs import layer_glob
from smupar.plan.plan import Plan
from smupar.plan.roles.parameters import parent_path
from smupar.refusals import refuse

_ACTIVATIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class StoredLayer:
    """How one masked parameter is stored."""

    name: str
    shape: tuple[int, ...]
    density: float
    backend: str
    seconds: Mapping[str, float] = field(default_factory=dict)  # time of a training step by backend, if it was measured
    note: str = ""


@dataclass(frozen=True)
class StorageReport:
    """The choices of ``sparsify_storage``, layer by layer. ``str`` gives a table.

    num_bytes    bytes of these weights with their masks or indices
    dense_bytes  bytes of the same weights as dense matrices, without masks
    """

    layers: tuple[StoredLayer, ...]
    num_bytes: int
    dense_bytes: int

    def __str__(self) -> str:
        alike: dict[tuple[str, ...], list[str]] = {}  # equal layers of several blocks share a line
        for layer in self.layers:
            times = ", ".join(f"{name} {1e3 * seconds:.3g}" for name, seconds in layer.seconds.items())
            cells = "x".join(map(str, layer.shape)), f"{layer.density:.4g}", layer.backend, times or layer.note
            alike.setdefault((layer_glob(layer.name), *cells), []).append(layer.name)
        lines: list[tuple[str, ...]] = [("parameter", "shape", "density", "stored as", "ms a step")]
        lines += [(f"{key[0]} ({len(names)}x)" if len(names) > 1 else names[0], *key[1:]) for key, names in alike.items()]
        total = f"{self.num_bytes:,} bytes with masks and indices, {self.num_bytes / self.dense_bytes:.2%} of the dense weights"
        return f"{aligned(lines)}\n{total}"


def sparsify_storage(
    model: nn.Module,
    plan: Plan,
    *,
    backend: str = AUTO,
    tokens: int = 2048,
    passes: int = 1,
    dtype: torch.dtype | None = None,
    captured: bool = False,
) -> StorageReport:
    """Makes masked linear layers keep and multiply only their non-zeros, in place. Returns a report of its choices.

    backend   "csr" is for any mask, on a CPU or an NVIDIA GPU. "2:4" and "block" are for masks of the patterns
              "2:4-transposable" and "block-N", on an NVIDIA GPU. "dense" goes back to matrices with masks. "auto" measures each
              kind of layer once, and takes the fastest backend that can hold it, or dense
    tokens    number of rows of the activations, for the measurements of "auto"
    passes    number of micro-batches per step of the optimizer, for the measurements of "auto"
    dtype     dtype of the activations under the autocast that you will train with; by default autocast's dtype if autocast is
              on now, else the weights' dtype. Sparse layers on GPUs multiply bfloat16 only
    captured  whether you will capture the step in a CUDA graph, for the measurements of "auto"

    The weight of each converted layer becomes a parameter of non-zero values, under its old name. So call this after
    ``parameterize`` and before ``param_groups``, a sparsifier, DDP and torch.compile. On bad input, or if a kernel fails, the
    model stays unchanged. For this, all weights are held in both forms until the last one is converted, which takes memory.
    """
    _refuse(model, plan)
    refuse(
        backend not in (AUTO, DENSE, *BACKENDS),
        f"backend must be one of {', '.join(map(repr, (AUTO, DENSE, *BACKENDS)))}, got {backend!r}",
    )
    refuse(tokens < 1 or passes < 1, f"tokens and passes must be at least 1, got {tokens} and {passes}")
    masked = _masked(model, plan)
    device = masked[0].parameter.device
    if backend in BACKENDS and (missing := backends.missing(backend, device)):
        raise ValueError(missing)
    _refuse_dtype(dtype, masked)
    if dtype is None and torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    return _convert(model, plan, _decide(model, masked, backend, Work(tokens, passes, dtype, captured)))


def _masked(model: nn.Module, plan: Plan) -> list[ModelWeight]:
    names = [name for name, _ in model.named_parameters() if name in plan]
    masked = [weight for name in names if (weight := weight_of(model, name)).is_masked]
    refuse(not masked, "no weight of this model has a mask: pass a density below 1 to parameterize")
    return masked


def _decide(model: nn.Module, masked: list[ModelWeight], backend: str, work: Work) -> list[StoredLayer]:
    """Decides how each weight will be stored. Raises ValueError if the named backend cannot hold one of the weights."""
    users = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    refusals = {weight.name: _refusal(model, weight, backend, users, work.dtype) for weight in masked}
    refused = {name: why for name, why in refusals.items() if why}
    if refused and backend in BACKENDS:
        name, why = next(iter(refused.items()))
        raise ValueError(
            f"backend {backend!r} cannot hold {len(refused)} of {len(masked)} masked weights, such as {name!r}: {why}; "
            "parameterize it with density 1, or use backend='auto', which leaves it unchanged"
        )
    known = Timings()
    return [_choice(weight, backend, refusals[weight.name], work, known) for weight in masked]


def _convert(model: nn.Module, plan: Plan, layers: list[StoredLayer]) -> StorageReport:
    """Stores all layers as decided, or changes nothing if one of them fails."""
    old = {layer.name: model.get_parameter(layer.name) for layer in layers}
    tried = set[tuple[object, ...]]()
    with _all_or_nothing([model.get_submodule(parent_path(name)) for name in old]):
        for layer in layers:
            _store(model, layer, tried)
        attach(model, plan)
        num_bytes = sum(weight_of(model, name).num_bytes for name in old)
        dense_bytes = sum(math.prod(layer.shape) * old[layer.name].element_size() for layer in layers)
        report = StorageReport(tuple(layers), num_bytes, dense_bytes)
    watch_optimizers(model, [weight for name, weight in old.items() if model.get_parameter(name) is not weight])
    return report


def dense_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state dict that the model would have if all its weights were dense, with matrices and masks. Dense models and models
    that keep only non-zeros can both load it. (Both can also load the state dict of a model that keeps only non-zeros.)"""
    model = unwrapped(model)
    state = dict(model.state_dict())
    for key in [key for key in state if is_compressed(state, key)]:
        expand_state(state, key, weight_of(model, key).shape)
    return state


def _refuse(model: nn.Module, plan: Plan) -> None:
    refuse(
        unwrapped(model) is not model,
        f"the model is wrapped in a {type(model).__name__} already, which holds its old weights: sparsify first, then "
        "compile or wrap it",
    )
    check_not_compiled(model, "for its old weights: sparsify before it")
    check_parameterized(model)
    check_plan(model, plan)


def _refuse_dtype(dtype: torch.dtype | None, masked: list[ModelWeight]) -> None:
    if dtype is None:
        return
    refuse(dtype not in _ACTIVATIONS, f"dtype of activations must be one of {', '.join(map(str, _ACTIVATIONS))}, got {dtype!r}")
    other = next((weight for weight in masked if weight.parameter.dtype != torch.float64), None)
    if dtype == torch.float64 and other is not None:
        raise ValueError(
            f"dtype is torch.float64, but {other.name!r} is {other.parameter.dtype}: convert the model (model.double()), or "
            "leave dtype out"
        )


def _refusal(model: nn.Module, weight: ModelWeight, backend: str, users: Counter[int], dtype: torch.dtype | None) -> str | None:
    """The reason why the backend cannot hold a weight, or for "auto", why the weight has to stay dense; None if there is
    none."""
    if backend == DENSE:
        return None
    parent = model.get_submodule(parent_path(parent_path(weight.name)))
    why = (
        compression.layer_refusal(weight.module, weight.leaf, parent, users[id(weight.parameter)])
        if weight.stores_zeros
        else None
    )
    if why is None and backend in BACKENDS:
        why = backends.refusal(backend, weight.module, weight.full_mask(), dtype or weight.parameter.dtype)
    return why


def _choice(weight: ModelWeight, backend: str, refusal: str | None, work: Work, known: Timings) -> StoredLayer:
    mask, seconds = weight.full_mask(), dict[str, float]()
    chosen, note = DENSE if backend == AUTO else backend, refusal or ""
    if backend == AUTO and refusal is None:
        chosen, seconds, note = _fastest(_with_matrix(weight.module), mask, work, known)
    density = float(torch.count_nonzero(mask)) / mask.numel()
    return StoredLayer(weight.name, tuple(mask.shape), density, chosen, seconds, note)


def _with_matrix(layer: nn.Module) -> nn.Module:
    """The layer itself if it is dense, or a dense copy if it keeps only its non-zeros."""
    if not isinstance(layer, SparseLinear):
        return layer
    dense = copy.copy(layer)
    dense.__dict__.update(_tensor_dicts(layer))  # copy.copy shares these dictionaries
    compression.expand(dense)
    return dense


def _store(model: nn.Module, chosen: StoredLayer, tried: set[tuple[object, ...]]) -> None:
    """Stores a layer as it was decided. ``tried`` remembers which kernels have run."""
    layer, mask = model.get_submodule(parent_path(chosen.name)), weight_of(model, chosen.name).full_mask()
    if isinstance(layer, SparseLinear):
        compression.expand(layer)
    if chosen.backend == DENSE:
        return
    sparse = compression.compress(layer, mask, chosen.backend)
    sparse.index()
    key = chosen.backend, chosen.shape, sparse.out_dim, sparse.weight.dtype, sparse.weight.device
    if sparse.weight.is_cuda and key not in tried:
        _try_kernel(sparse)
        tried.add(key)


def _try_kernel(layer: SparseLinear) -> None:
    """Computes a product and its gradients once. GPU kernels are compiled on their first call, so their errors appear here."""
    sizes = layer.matrix_shape[1 - layer.out_dim], layer.matrix_shape[layer.out_dim]
    kernel, values, index = layer.kernel, layer.weight.detach(), layer.index()
    x, grad = (torch.zeros(1, size, dtype=kernel.dtype, device=layer.weight.device) for size in sizes)
    kernel.forward(x, index, values, None)
    kernel.backward(grad, x, index, values, for_input=True, for_values=True)
    torch.cuda.synchronize(layer.weight.device)  # a failed launch raises only when the host waits for the GPU


@contextlib.contextmanager
def _all_or_nothing(layers: list[nn.Module]) -> Iterator[None]:
    """A context that restores the layers if an error is raised in it. The layers get the same tensors again, so this takes no
    memory."""
    before = [(layer, type(layer), {**layer.__dict__, **_tensor_dicts(layer)}) for layer in layers]
    try:
        yield
    except BaseException:
        for layer, kind, attributes in before:
            layer.__class__ = kind
            layer.__dict__.clear()
            layer.__dict__.update(attributes)
        raise


def _tensor_dicts(layer: nn.Module) -> dict[str, Any]:
    """Copies of the dictionaries that hold a module's tensors."""
    return {name: copy.copy(layer.__dict__[name]) for name in ("_parameters", "_buffers", "_non_persistent_buffers_set")}


def _fastest(layer: nn.Module, mask: Tensor, work: Work, known: Timings) -> tuple[str, dict[str, float], str]:
    """(name of the fastest backend, measured times, note on backends that could not be measured)."""
    weight: Any = layer.weight
    activations: torch.dtype = work.dtype or weight.dtype
    available = [name for name in BACKENDS if not backends.missing(name, weight.device)]
    unable = {name: why for name in available if (why := backends.refusal(name, layer, mask, activations))}
    able = [name for name in available if name not in unable]
    chosen, seconds = DENSE, dict[str, float]()
    if able:
        timing = timing_of(layer, mask, able, work, known)
        chosen, seconds, unable = timing.fastest(weight.device), timing.seconds, unable | timing.failures
    return chosen, seconds, "; ".join(f"{name}: {why}" for name, why in unable.items())
