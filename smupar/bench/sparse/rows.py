"""The rows of the table, the hidden layers that are timed, the machine's speeds, and floors, which
are times that the machine cannot beat."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smupar.execute.timing import Call, best_of, gpu_seconds_of
from smupar.model.parameterize import parameterize
from smupar.model.sparse_linear import SparseLinear
from smupar.plan.plan import Plan


@dataclass(frozen=True)
class Row:
    what: str  # what is timed: a step of hidden "layers" or of a "gpt", both passes of a "layer", or a forward "product"
    width: int
    tokens: int
    density: float
    side: str  # how weights are stored and multiplied, such as "dense bf16" or "csr"
    seconds: float  # median time of a call
    speed: float  # relative to dense in the same rounds: fp32 on a CPU, bf16 on a GPU
    state_bytes: int  # weights, indices and AdamW's state of the hidden layers; 0 if there is none
    state_share: float  # state_bytes relative to dense
    floor_seconds: float
    peak_bytes: int = 0  # on a GPU: the most memory that is allocated during the call, beyond what is allocated before it


@dataclass(frozen=True)
class Measured:
    """The result of one case or of all: rows, and notes on what was not measured."""

    rows: list[Row]
    missed: list[str]


@dataclass(frozen=True)
class Machine:
    copy_bytes: float  # per second, read and written
    product_flops: float  # per second


def measure_machine(device: torch.device) -> Machine:
    """The speeds of a copy and of a dense product: on a CPU by the host's clock, on a GPU by the GPU's. The
    product is in fp32 on a CPU and in bf16 on a GPU."""
    on_gpu = device.type == "cuda"
    num, size, dtype = (2**28, 8192, torch.bfloat16) if on_gpu else (2**26, 2048, torch.float32)
    big, square = torch.ones(num, device=device), torch.randn(size, size, device=device, dtype=dtype)
    copy = torch.empty_like(big)
    how: dict[str, Any] = {"rounds": 4, "num": 5, "clock": synced_seconds_of} if on_gpu else {"rounds": 12}
    copying, multiplying = best_of(lambda: copy.copy_(big), **how), best_of(lambda: square @ square, **how)
    return Machine(2 * 4 * num / copying, 2 * size**3 / multiplying)


def synced_seconds_of(call: Call, num: int = 1) -> float:
    """Seconds of a call by the GPU's clock, starting with an idle GPU. So the time that the host needs to start the first call
    is included."""
    torch.cuda.synchronize()
    return gpu_seconds_of(call, num)


class HiddenLayers(nn.Module):
    """Hidden layers of one width, as they follow each other in a network."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, width, bias=False)  # never called; it makes the plan see that the later layers are hidden
        self.hidden = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.last = nn.Linear(width, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.hidden:
            x = F.relu(layer(x))
        return x


def hidden_layers(width: int, depth: int, density: float, *, pattern: str = "random") -> tuple[HiddenLayers, Plan]:
    model = HiddenLayers(width, depth)
    with warnings.catch_warnings(action="ignore"):  # few weights per neuron are intended here
        with torch.device("meta"):
            base = HiddenLayers(width // 4, depth)
        return model, parameterize(model, base=base, density=density, pattern=pattern, reset=False)


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of hidden weights, their indices and their optimizer state. Indices of other packages' layers are not counted."""
    hidden = model.hidden if isinstance(model, HiddenLayers) else model
    weights = [parameter for parameter in hidden.parameters() if parameter in optimizer.state]
    tensors = [value for weight in weights for value in (weight, *optimizer.state[weight].values()) if value.ndim]
    index = sum(layer.num_index_bytes for layer in hidden.modules() if isinstance(layer, SparseLinear))
    return sum(tensor.nbytes for tensor in tensors) + index


def step_floor(width: int, tokens: int, depth: int, density: float, machine: Machine, *, activation_bytes: int = 4) -> float:
    """The floor of a training step of hidden layers, in seconds."""
    # A layer reads its input twice and the gradient of its output, and writes its output and the gradient of its input. The
    # activation function after it does the same. AdamW reads weight, gradient and both averages, and writes all of these except
    # the gradient. Sparse weights have 8 bytes of indices.
    return depth * _floor(width, tokens, density, machine, 10 * activation_bytes, 7 * 4 + (8 if density < 1 else 0), 6)


def layer_floor(width: int, tokens: int, density: float, machine: Machine) -> float:
    """The floor of forward and backward in bfloat16, in seconds. There is no activation function, so activations move half
    as often as in ``step_floor``. Weights are read twice, and their gradient is written once. Indices do not count."""
    return _floor(width, tokens, density, machine, 5 * 2, 3 * 2, 6)


def product_floor(width: int, tokens: int, density: float, machine: Machine) -> float:
    """The floor of a forward product in bfloat16, in seconds. Activations are read and written, weights read; indices do not
    count."""
    return _floor(width, tokens, density, machine, 2 * 2, 2, 2)


def _floor(
    width: int, tokens: int, density: float, machine: Machine, activation_bytes: int, weight_bytes: int, num_flops: int
) -> float:
    """The longer of two times: to move all bytes, and to do all FLOPs.

    activation_bytes   for each feature of a token
    weight_bytes       for each non-zero
    num_flops          for each token and non-zero
    """
    num = density * width * width
    num_bytes = activation_bytes * tokens * width + weight_bytes * num
    return max(num_bytes / machine.copy_bytes, num_flops * num * tokens / machine.product_flops)
