"""The rows of the table, the stacks of hidden layers that are timed, the machine's speeds, and the floor."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smupar.execute.timing import Call, best_of, gpu_seconds_of
from smupar.model.compressed import SparseLinear
from smupar.model.parameterize import parameterize
from smupar.plan.plan import Plan


@dataclass(frozen=True)
class Row:
    what: str  # "layers" (hidden ones, a training step), "gpt", "layer" (forward and backward) or "product" (forward)
    width: int
    tokens: int
    density: float
    side: str
    seconds: float  # median time of a step
    speed: float  # relative to dense in the same rounds: fp32 on a CPU, bf16 on a GPU
    state_bytes: int  # weights, indices and AdamW's state of the hidden layers; 0 if there is none
    state_share: float  # state_bytes relative to dense
    floor_seconds: float
    peak_bytes: int = 0  # on a GPU: peak of the memory that a step allocates in addition


@dataclass(frozen=True)
class Part:
    """The result of a case: its rows, and notes on what was not measured."""

    rows: list[Row]
    missed: list[str]


@dataclass(frozen=True)
class Machine:
    copy_bytes: float  # per second, read and written
    product_flops: float  # per second


def measure_machine(device: torch.device) -> Machine:
    """The speeds of a copy and of a dense product: on a CPU in fp32 by the host's clock, on a GPU in bf16 by the GPU's."""
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
    # activation function after it does the same. Weight, gradient and both averages are read, and all but one are written.
    return depth * _floor(width, tokens, density, machine, 10 * activation_bytes, 7 * 4 + (8 if density < 1 else 0), 6)


def layer_floor(width: int, tokens: int, density: float, machine: Machine) -> float:
    """The floor of forward and backward in bfloat16, in seconds. Activations count half as often as in a step, weights are read
    twice, and their gradient is written. Indices do not count."""
    return _floor(width, tokens, density, machine, 5 * 2, 3 * 2, 6)


def product_floor(width: int, tokens: int, density: float, machine: Machine) -> float:
    """The floor of a forward product in bfloat16, in seconds. Activations are read and written, weights read; indices do not
    count."""
    return _floor(width, tokens, density, machine, 2 * 2, 2, 2)


def _floor(
    width: int, tokens: int, density: float, machine: Machine, activation_bytes: int, weight_bytes: int, num_flops: int
) -> float:
    """The time for ``activation_bytes`` for each feature of a token, ``weight_bytes`` for each non-zero, and ``num_flops`` for
    each token and non-zero."""
    num = density * width * width
    num_bytes = activation_bytes * tokens * width + weight_bytes * num
    return max(num_bytes / machine.copy_bytes, num_flops * num * tokens / machine.product_flops)
