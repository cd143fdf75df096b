"""Where sizes are measured in a model: layers, blocks of modules, and matrices inside modules (parts)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import nn

from smupar.check.coordinates.depth import ComparedLayers
from smupar.plan.facts.layers import channel_dim, kind_of
from smupar.plan.plan import Plan, PlanRow
from smupar.plan.roles.parameters import parent_path

# Hidden weights with a partly fixed size on one side. If inputs are fixed in part, outputs grow more than inputs (widening). If
# outputs are, they grow less (narrowing).
WIDENING, NARROWING, ROUTER = "hidden, widening", "hidden, narrowing", "router"
# Inputs and outputs grow unevenly if their growth differs by this factor. Below it, a layer
# changes a gradient by at most 2^(1/4), which is a slope of 1/8 over two octaves.
UNEVEN = math.sqrt(2)
Growth = Mapping[str, Sequence[float]]  # parameter name -> how many times larger each dimension is at another width of the grid


class Places:
    """The places of one model, and what is known of each. The first forward pass tells which modules use the parts."""

    def __init__(self, model: nn.Module, plan: Plan, growth: Growth, depth: ComparedLayers) -> None:
        self.plan = plan
        layers = {path: (name, role) for path, name, role in _layers(model, plan, growth)}
        hidden_parents = {parent_path(path) for path, (_, role) in layers.items() if _is_hidden(role) or role == ROUTER}
        # Modules with weights that are not layers (recurrent, attention, the user's own) are measured as blocks.
        owners = {next(ancestors(row.name)) for row in plan if row.role == "hidden"} - layers.keys()
        blocks = {*hidden_parents, *owners, *depth.blocks}
        # path -> (name of the weight, role)
        self.layers = {path: found for path, found in layers.items() if depth.is_measured(path)}
        self._channels = {path: channel_dim(model.get_submodule(path)) for path in self.layers}
        # path -> "block", "logits" for the head, or "router"
        self.blocks = {
            path: "block" for path, _ in model.named_modules() if path in blocks and path and depth.is_block_measured(path)
        }
        self.blocks[""] = "logits"
        parts = _parts(plan, {name for name, _ in layers.values()})
        # name of the matrix -> path of the module that uses it
        self.parts = {name: path for name, path in parts.items() if depth.is_measured(path)}

    def __contains__(self, path: str) -> bool:
        return path in self.layers or path in self.blocks

    @property
    def watched(self) -> set[str]:
        """The modules whose calls matter. A part may be used by any module around it."""
        around = {path for row in self.plan if is_matrix(row) for path in ancestors(row.name)}
        return {*self.layers, *self.blocks, *around}

    def kind_and_role(self, place: str) -> tuple[str, str]:
        if place in self.layers:
            return "layer", self.layers[place][1]
        return ("part", self.plan[place].role) if place in self.parts else ("block", self.blocks[place])

    def find_users(self, called: Collection[str]) -> None:
        """For each matrix that is not a layer's weight, finds the innermost module that contains it and is called. If a layer
        is never called, because the model uses its weight directly, the weight counts as such a matrix.

        A readout that no hook can scale gets its factor from the model, possibly after its module. So the whole model counts as
        its module."""
        used = {name for path, (name, _) in self.layers.items() if path in called}
        unused = [name for name, _ in self.layers.values() if name not in used]
        users = {name: next(filter(called.__contains__, ancestors(name)), None) for name in (*self.parts, *unused)}
        self.parts = {
            name: "" if self.plan[name].role == "unembedding" and not self.plan[name].forward else path
            for name, path in users.items()
            if path is not None
        }

    def see_output(self, path: str, shape: Sequence[int]) -> None:
        """Notes that a block is a head, which makes logits, or that it makes a router's logits: its output has as many neurons
        as a readout inside it, or as a router that is its only layer."""
        if path not in self.blocks:
            return
        inside = {layer: role for layer, (_, role) in self.layers.items() if layer.startswith(f"{path}.")}
        alone = set(inside.values()) == {ROUTER}
        for layer, role in inside.items():
            if (role == "unembedding" or alone) and self._has_neurons_of(layer, shape):
                self.blocks[path] = ROUTER if alone else "logits"

    def _has_neurons_of(self, layer: str, shape: Sequence[int]) -> bool:
        row, channels = self.plan[self.layers[layer][0]], self._channels[layer]
        sizes = [size for dim, size in enumerate(row.shape) if dim not in (*row.scaling, *row.in_dims[1:])]
        return len(shape) >= -channels and shape[channels] in sizes


def _layers(model: nn.Module, plan: Plan, growth: Growth) -> Iterator[tuple[str, str, str]]:
    """(module path, weight name, role) of the layers that are linear in their weight."""
    for row in plan:
        uses = [path for path, _ in row.forward] or [parent_path(row.name)]
        kinds = {path: kind_of(model.get_submodule(path)) for path in uses}
        for path, kind in kinds.items():
            # A layer's other parameters do not count, only the one that it multiplies by.
            is_other = parent_path(row.name) == path and not kind.owns(row.name.rpartition(".")[2])
            if row.role in ("embedding", "hidden", "unembedding", ROUTER) and kind.is_measured and not is_other:
                tied_readout = row.role == "embedding" and kinds[uses[0]].is_lookup and not kind.is_lookup
                yield path, row.name, "unembedding" if tied_readout else _role(row, growth)


def _role(row: PlanRow, growth: Growth) -> str:
    """The role of a weight. Hidden weights are told apart by how much their inputs and outputs grow along the grid. Rounded
    sizes, such as an MLP of 8/3 times the width, may grow slightly unevenly, which is ignored."""
    if row.role != "hidden":
        return row.role
    # Without a grid, all dimensions that scale are assumed to grow by the same factor.
    factors = growth.get(row.name) or [2.0 if dim in row.scaling else 1.0 for dim in range(len(row.shape))]
    grown = [
        math.prod(factor for dim, factor in enumerate(factors) if (dim in row.in_dims) is inside) for inside in (True, False)
    ]
    ratio = grown[1] / grown[0]
    return WIDENING if ratio > UNEVEN else NARROWING if ratio < 1 / UNEVEN else row.role


def _is_hidden(role: str) -> bool:
    return role in ("hidden", WIDENING, NARROWING)


def is_matrix(row: PlanRow) -> bool:
    return sum(size > 1 for size in row.shape) > 1


def _parts(plan: Plan, layers: set[str]) -> dict[str, str]:
    """Matrices of any role that are not the weight of a layer, with the module that owns them."""
    return {row.name: parent_path(row.name) for row in plan if is_matrix(row) and row.name not in layers}


def ancestors(name: str) -> Iterator[str]:
    """The paths of the modules around a parameter, from the inside out. Parametrizations are left out, since they are not
    called with the layer's input."""
    while name:
        name = parent_path(name)
        if "parametrizations" not in name.split("."):
            yield name
