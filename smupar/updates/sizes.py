"""Measures how large the updates of a stack of models are, in the quantity that ``Law.size`` names.

Each class looks at the stack before a step. After the step it measures the update of each layer, for each model.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from smupar.execute.stack.stack import Stack
from smupar.updates.law import EFFECT, FUNCTION, RMS, SPECTRAL, TRUST, Law
from smupar.updates.probe import Probe, exact, some_rows

_ITERATIONS = 8  # of the power method


class UpdateSizes(ABC):
    """Call ``look`` before a step, with a batch. After the step, call ``size`` for each layer, then ``forget``. ``decayed`` is
    the share of the weight that decoupled decay removed, for each model."""

    def __init__(self, stack: Stack, names: Sequence[str], law: Law) -> None:
        self.stack, self.names, self.law = stack, names, law
        self.before: dict[str, Tensor] = {}  # weights before the step

    def look(self, batch: Sequence[Tensor]) -> None:
        self.before = {name: self.stack.weights[name].values.clone() for name in self.names}

    @abstractmethod
    def size(self, name: str, decayed: Tensor) -> Tensor:
        """The size of a layer's update in each model."""

    def forget(self) -> None:
        self.before = {}

    def update(self, name: str, decayed: Tensor) -> Tensor:
        return self.stack.weights[name].values - (1 - decayed.view(-1, 1, 1)) * self.before[name]


class _Effect(UpdateSizes):
    def __init__(self, stack: Stack, names: Sequence[str], law: Law) -> None:
        super().__init__(stack, names, law)
        self.probes = {name: Probe(stack.weights[name]) for name in names}

    def look(self, batch: Sequence[Tensor]) -> None:
        inputs = self.stack.inputs(batch, partial(some_rows, num=self.law.tokens))
        with exact():
            for name, probe in self.probes.items():
                probe.inputs = inputs[name].float()
                probe.look()

    def size(self, name: str, decayed: Tensor) -> Tensor:
        with exact():
            return _rms(self.probes[name].change(decayed.view(-1, 1, 1)))

    def forget(self) -> None:
        for probe in self.probes.values():
            del probe.inputs


class _WeightSizes(UpdateSizes):
    def size(self, name: str, decayed: Tensor) -> Tensor:
        square, kept = self.update(name, decayed).square().sum((1, 2)), self.stack.weights[name].num_kept().reshape(-1)
        if self.law.size == TRUST:
            return (square / self.before[name].square().sum((1, 2))).sqrt()
        return (square / kept).sqrt()


class _Spectral(UpdateSizes):
    def size(self, name: str, decayed: Tensor) -> Tensor:
        update = self.update(name, decayed)
        num_out, num_in = update.shape[1:]
        start = torch.randn(num_in, 1, generator=torch.Generator().manual_seed(0)).to(update.device)
        direction = start.expand(len(update), -1, -1)
        with exact():
            for _ in range(_ITERATIONS):
                direction = torch.nn.functional.normalize(update.mT @ (update @ direction), dim=1)
            return (update @ direction).square().sum((1, 2)).sqrt() * math.sqrt(num_in / num_out)


class _Function(UpdateSizes):
    """Runs the model once for each layer. Only this layer has its new weights. All others have their weights from before the
    step."""

    def look(self, batch: Sequence[Tensor]) -> None:
        num = max(1, self.law.tokens // batch[0].shape[-1])
        self.batch = tuple(part[..., :num, :] for part in batch)
        self.params = {name: values.clone() for name, values in self.stack.tensors.params.items()}
        self.before = {name: self.params[name] for name in self.names}
        self.outputs = self._outputs(self.params)

    def _outputs(self, params: dict[str, Tensor]) -> Tensor:
        with exact():
            return self.stack.outputs(self.batch, params)

    def size(self, name: str, decayed: Tensor) -> Tensor:
        changed = {**self.params, name: self.before[name] + self.update(name, decayed)}
        return _rms((self._outputs(changed) - self.outputs).flatten(1))

    def forget(self) -> None:
        super().forget()
        self.params = {}


def sizes_of(stack: Stack, names: Sequence[str], law: Law) -> UpdateSizes:
    kinds: Mapping[str, Callable[[Stack, Sequence[str], Law], UpdateSizes]] = {
        EFFECT: _Effect, RMS: _WeightSizes, TRUST: _WeightSizes, SPECTRAL: _Spectral, FUNCTION: _Function,
    }  # fmt: skip
    return kinds[law.size](stack, names, law)


def _rms(values: Tensor) -> Tensor:
    return values.square().flatten(1).mean(1).sqrt()
