"""How large the gradient of a layer's input should be, compared with the same gradient in a model of another width."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import takewhile
from statistics import fmean

from torch import Tensor

from smupar.check.coordinates.calls import SampledCall, WholeCall
from smupar.check.coordinates.depth import ComparedLayers
from smupar.check.coordinates.places import NARROWING, ROUTER, WIDENING, Places
from smupar.plan.plan import Plan

Calls = Mapping[str, SampledCall | WholeCall]  # path -> the call of this step, with the gradient of its output


class ExpectedGradients:
    """The sizes by which gradients are divided, so that they can be compared over widths.

    Usually the readout is the last layer, and all other gradients have passed it, with its factor 1/m_d. They are proportional
    to the gradient that arrives at its outputs, by which ``verdict`` divides them. A readout that other layers follow, such as
    a router, makes no logits.

    The last layer may instead be a hidden weight from n inputs to a fixed number of outputs, as in CLIP's projection or
    ELECTRA's head. Its init variance is 1/n, so the gradients of its inputs, and of all layers before it, fall as
    1/sqrt(n). They are also proportional to the gradient that arrives at its outputs. If a norm follows, that gradient is
    inversely proportional to the size of the outputs. The size of the outputs is judged on its own. So that it does not
    count twice, gradients are divided by the arriving gradient.
    """

    def __init__(self, plan: Plan, places: Places, depth: ComparedLayers) -> None:
        self.plan, self.places, self.depth = plan, places, depth
        self.factor = plan.output_factor
        self.inner: set[str] = set()  # readouts after which other layers come
        self.readouts: list[str] = []  # the last layers, if they are readouts
        self.ends: list[str] = []  # the last layers, if they are hidden weights with outputs of fixed size

    def read_order(self, called_modules: Iterable[str]) -> None:
        """Learns from the order of the first forward pass which layers are the last ones."""
        layers = self.places.layers
        called = [path for path in called_modules if path in layers]
        roles = [layers[path][1] for path in called]
        later = [number for number, role in enumerate(roles) if role != "unembedding"]
        self.inner = {path for path, role in zip(called[: max(later, default=0)], roles, strict=False) if role == "unembedding"}
        self.readouts = list(takewhile(lambda path: layers[path][1] == "unembedding", reversed(called)))
        if roles and roles[-1] == NARROWING and "unembedding" not in roles:
            self.ends = list(takewhile(lambda path: layers[path][1] == NARROWING, reversed(called)))
            row = self.plan[layers[called[-1]][0]]
            self.factor = math.sqrt(row.width_out / row.width_in)

    def of_block(self, path: str, calls: Calls) -> float:
        """The size for a block, or for a layer between whose inputs and outputs the width does not change."""
        return self.factor * self.depth.gradient(path) * self._arriving(calls)

    def of_layer(self, path: str, calls: Calls) -> float:
        """The size for a layer.

        If the inputs and outputs of a layer scale alike, this size is the same as for all other gradients in the network. Other
        layers inside the network have a fixed size on one side, so the gradient grad Y that arrives at their output is not
        known in advance, and is measured. For independent weights of std s, the mean square of grad X = W^T grad Y is s^2 n_out
        times that of grad Y. In a hidden layer s^2 is proportional to 1/m_in and n_out to m_out, so the size of grad X is that
        of grad Y times sqrt(m_out / m_in). In a readout inside the network neither s nor n_out scales, but it has a forward
        factor. In a router s^2 is proportional to 1/m_in^2, and n_out does not scale.
        """
        (name, role), output_grad = self.places.layers[path], calls[path].output_grad
        if output_grad is None or not (role in (NARROWING, WIDENING, ROUTER) or path in self.inner):
            return self.of_block(path, calls)
        row = self.plan[name]
        through = self.plan.output_factor if path in self.inner else math.sqrt(row.width_out / row.width_in)
        through = 1 / float(row.width_in) if role == ROUTER else through
        return through * self.depth.output(path) * (rms(output_grad) or 1.0)

    def _arriving(self, calls: Calls) -> float:
        """The size of the gradient that arrives at the layers of ``ends``; 1 if there are none."""
        grads = [calls[path].output_grad for path in self.ends if path in calls]
        squares = [float(grad.float().square().mean()) for grad in grads if grad is not None]
        return math.sqrt(fmean(squares)) or 1.0 if squares else 1.0


def rms(values: Tensor) -> float:
    return float(values.float().square().mean().sqrt())
