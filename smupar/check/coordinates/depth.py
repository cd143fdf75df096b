"""Models that differ in depth: which of their layers are compared, and how a depth rule changes sizes there.

Several blocks may correspond to one block of the base. Then the output of the last of these blocks is measured, because this
block ends at the same relative depth in every model. Through the residual stream its output contains what the other blocks
added. The gradient of the input is measured at the first block, which begins at the same relative depth. Layers inside blocks
are measured in the middle block, which is typical of all. A depth rule divides residual branches, and with them the gradients
inside. These factors are divided out of the measured sizes, which should then be equal at every depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from smupar.check.coordinates.calls import first_tensor, undisturbed
from smupar.plan.depth.correspondence import correspond
from smupar.plan.plan import Plan
from smupar.plan.roles.parameters import parent_path
from smupar.rules import depth_factor, get_depth_rule


@dataclass(frozen=True)
class ComparedLayers:
    """The layers of a model to measure, and the factors that the plan puts on their sizes."""

    # path of each module to measure -> its name in the base; None measures every module, under its own name
    places: dict[str, str] | None = None
    blocks: frozenset[str] = frozenset()  # blocks in lists, whose outputs are the residual stream
    # path of the first of several blocks -> path of the last; the input gradient of the first counts as the input gradient of
    # the last
    firsts: dict[str, str] = field(default_factory=dict)
    # path -> factor of the plan, see the methods of the same name
    outputs: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    effects: dict[str, float] = field(default_factory=dict)
    undivided: tuple[str, ...] = ()  # layers in blocks whose output reaches the loss without passing a divided branch

    def is_measured(self, path: str) -> bool:
        return self.places is None or path in self.places

    def is_block_measured(self, path: str) -> bool:
        return self.is_measured(path) or path in self.firsts

    def shows_output(self, path: str) -> bool:
        return path not in self.firsts

    def shows_gradient(self, path: str) -> bool:
        return path not in self.firsts.values()

    def place(self, path: str) -> str:
        """The name of a module, or of a parameter, in the base."""
        path = self.firsts.get(path, path)
        if self.places is None or path in self.places:
            return path if self.places is None else self.places[path]
        owner, _, leaf = path.rpartition(".")
        return f"{self.places[owner]}.{leaf}".lstrip(".")

    def output(self, path: str) -> float:
        """The factor of the plan in a module's output."""
        return self.outputs.get(path, 1.0)

    def gradient(self, path: str) -> float:
        """The factor of the plan in the gradient of a module's input."""
        return self.gradients.get(path, 1.0)

    def effect(self, path: str) -> float:
        """How much an update may change a module's output, relative to the base, before the branch is divided."""
        return self.effects.get(path, 1.0)


SAME_DEPTH = ComparedLayers()


def compared_layers(model: nn.Module, base: nn.Module, plan: Plan, loss: Callable[[], Tensor]) -> ComparedLayers:
    """The layers that correspond to layers of the base. ``loss`` runs the model once, to see which modules are inside residual
    branches."""
    matches, rule = correspond(model, base), get_depth_rule(plan.depth)
    modules = dict(model.named_modules())
    blocks = _blocks_of_lists(modules)
    groups: dict[str, list[str]] = {}
    for path in modules:
        if path in matches.modules:
            groups.setdefault(matches.modules[path], []).append(path)
    scaled = {path: matches.m_depth(path) for path in modules if matches.m_depth(path) != 1}
    outside, inside, divided = _branches(model, plan, loss) if plan.branches else (set[str](), set[str](), set[str]())
    layers = {parent_path(row.name) for row in plan if row.role == "hidden"}
    return ComparedLayers(
        places={paths[-1] if paths[-1] in blocks else paths[(len(paths) - 1) // 2]: place for place, paths in groups.items()},
        blocks=blocks,
        firsts={paths[0]: paths[-1] for paths in groups.values() if len(paths) > 1 and paths[-1] in blocks},
        outputs={path: depth_factor(scaled[path], rule.branch) for path in divided & scaled.keys()},
        gradients={path: depth_factor(scaled[path], rule.branch) for path in inside & scaled.keys()},
        effects={} if rule.alpha is None else {path: depth_factor(m, rule.alpha - 1) for path, m in scaled.items()},
        undivided=tuple(path for path in scaled if path in layers and path in outside),
    )


def _blocks_of_lists(modules: dict[str, nn.Module]) -> frozenset[str]:
    """The blocks of all lists. Lists that are as long as in the base count too, since a place has to be measured at every
    depth."""
    lists = [path for path, module in modules.items() if all(name.isdigit() for name, _ in module.named_children())]
    blocks = (f"{path}.{name}".lstrip(".") for path in lists for name, _ in modules[path].named_children())
    return frozenset(path for path in blocks if any(True for _ in modules[path].children()))


def _branches(model: nn.Module, plan: Plan, loss: Callable[[], Tensor]) -> tuple[set[str], set[str], set[str]]:
    """(modules outside residual branches, modules inside, modules whose output has already been divided).

    To find them, the outputs of all branches are detached. After that, a module is inside a branch if no gradient reaches it,
    and its output has been divided if it depends on no trained parameter.
    """
    reached: set[str] = set()
    called: set[str] = set()
    divided: set[str] = set()

    def watch(path: str, output: object) -> None:
        y = first_tensor(output)
        if y is None or not y.is_floating_point():
            return
        called.add(path)
        if y.requires_grad:
            y.register_hook(lambda _: reached.add(path))
        else:
            divided.add(path)

    with undisturbed(model), _branches_detached(model, plan, watch):
        value = loss()
        if value.requires_grad:
            value.backward()
    model.zero_grad(set_to_none=True)
    return reached, called - reached, divided


@contextmanager
def _branches_detached(model: nn.Module, plan: Plan, watch: Callable[[str, object], None]) -> Iterator[None]:
    """A context that detaches the outputs of branches, and passes the output of every module to ``watch``."""
    ends = {path for path, _ in plan.branches}
    handles = []
    for path, module in model.named_modules():
        if path in ends:
            handles.append(module.register_forward_hook(lambda module, args, output: _detached(output)))
        handles.append(module.register_forward_hook(lambda module, args, output, path=path: watch(path, output)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _detached(output: object) -> object:
    """The output of a branch, detached. Attention may return a tuple, whose first item is the output."""
    if isinstance(output, tuple):
        return (_detached(output[0]), *output[1:])
    return output.detach() if isinstance(output, torch.Tensor) else output
