"""Keeps what is known about the tensors of a forward pass, and records how it uses each parameter (``uses``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from smupar.plan.forward.flows import CONSTANT, Dims, Flow, Known, Label, Labels, by_name
from smupar.plan.forward.uses import Event, Usage, Use, WeightProduct


class UsageRecorder:
    """The record of a pass so far. ``scaling`` and ``reads`` are explained by ``watcher.watch``."""

    def __init__(self, model: nn.Module, scaling: Mapping[str, Dims], reads: Mapping[str, Dims]) -> None:
        self.scaling, self.reads = scaling, reads
        self.usage = Usage({name: Use() for name, _ in model.named_parameters()})
        self.paths = [""]  # of the modules that are running, the innermost last
        self._known: dict[StorageWeakRef, Known] = {}
        for name, parameter in model.named_parameters():
            self.put(parameter, CONSTANT, tuple(frozenset({(name, dim)}) for dim in range(parameter.ndim)))

    def put(self, tensor: Tensor, flow: Flow, labels: Labels = ()) -> None:
        known = Known(flow, tuple(tensor.shape), tensor.stride(), labels) if any(labels) else Known(flow)
        self._known[StorageWeakRef(tensor.untyped_storage())] = known

    def use_numbers(self, flow: Flow) -> None:
        """Records that a weight or the output reads something that was multiplied by numbers."""
        for number in flow.numbers:
            self.usage.numbers[number].is_elsewhere = True

    def use(self, labels: Iterable[frozenset[Label]]) -> bool:
        """Records that parameters act element by element; returns whether one of them scales."""
        used = {label for each in labels for label in each}
        for name, _ in used:
            self.usage.uses[name].by_element = True
        return any(dim in self.scaling[name] for name, dim in used)

    def mark_unclear(self, labels: Iterable[frozenset[Label]], why: str) -> None:
        for name in {name for each in labels for name, _ in each}:
            self.usage.uses[name].unclear = why

    def add_event(self, kind: str, sizes: Iterable[int], *, weights: frozenset[str] = frozenset(), unit: bool = False) -> int:
        self.usage.events.append(Event(kind, self.paths[-1], tuple(sizes), weights, unit))
        return len(self.usage.events) - 1

    def known_of(self, tensor: Tensor) -> Known:
        return self._known.get(StorageWeakRef(tensor.untyped_storage()), Known(CONSTANT))

    def labels_of(self, tensor: Tensor) -> Labels:
        return self.known_of(tensor).labels_of(tensor)

    def weigh(self, summed: list[frozenset[Label]], written: list[frozenset[Label]], read: Flow) -> Flow:
        """Records the product of a weight with something whose flow is ``read``."""
        ins, outs = by_name(summed), by_name(written)
        self.use_numbers(read)
        names = sorted(ins) or sorted(outs)  # a summed dimension of size 1 has no label
        scales = any(dim in self.scaling[name] for name in names for dim in (*ins.get(name, ()), *outs.get(name, ())))
        for name in names:
            reads, writes = ins.get(name, set()), outs.get(name, set())
            if reads & writes:
                self.mark_unclear((frozenset({(name, 0)}),), "a product over a part of a dimension")
                continue
            product = WeightProduct(tuple(sorted(reads)), tuple(sorted(writes)), not read.is_inside, read.joins)
            self.usage.uses[name].products.append(product)
            self.usage.uses[name].reads_constant |= not read.is_data
        for name in outs.keys() - set(names):  # such as the lengths of weight norm
            self.usage.uses[name].by_element = True
        if not scales:
            return replace(read | CONSTANT, is_data=True, scores=frozenset(), shares=frozenset())
        for name in read.writers:
            self.usage.uses[name].is_inside = True
        writers = frozenset(names)
        return Flow(is_data=True, is_inside=True, writers=writers, logits=writers, past=read.past)

    def route(self, first: Flow, second: Flow) -> None:
        """Records which weights weight or choose the outputs of others, where one of two flows is a choice."""
        for choice, other in ((first, second), (second, first)):
            if choice.is_choice and not other.is_choice and other.is_data:
                for name in choice.writers:
                    self.usage.uses[name].routes = True

    def mark_end(self, path: str, tensor: Tensor) -> None:
        """Marks the output of a module. If modules return another module's output, the innermost one made it."""
        known = self.known_of(tensor)
        if known.flow.ends:
            self.usage.same[path] = known.flow.ends
        elif known.flow.is_data:
            marked = replace(known, flow=replace(known.flow, ends=frozenset({path})))
            self._known[StorageWeakRef(tensor.untyped_storage())] = marked
