"""Keeps what is known about the tensors of a forward pass, and records how the pass uses each parameter (``uses``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from smupar.plan.forward.flows import CONSTANT, Dims, Flow, Known, Label, Labels, by_name, strides_of
from smupar.plan.forward.uses import Event, Usage, Use, WeightProduct


class UsageRecorder:
    """What is known of a pass so far, and its record. The docstring of ``watcher.watch`` explains ``scaling`` and ``reads``."""

    def __init__(self, model: nn.Module, scaling: Mapping[str, Dims], reads: Mapping[str, Dims]) -> None:
        self.scaling, self.reads = scaling, reads
        self.usage = Usage({name: Use() for name, _ in model.named_parameters()})
        self.paths = [""]  # paths of the modules that are running, the innermost last
        self._known: dict[StorageWeakRef, Known] = {}
        for name, parameter in model.named_parameters():
            self.put(parameter, CONSTANT, tuple(frozenset({(name, dim)}) for dim in range(parameter.ndim)))

    def put(self, tensor: Tensor, flow: Flow, labels: Labels = ()) -> None:
        known = Known(flow, tuple(tensor.shape), strides_of(tensor), labels) if any(labels) else Known(flow)
        self._known[StorageWeakRef(tensor.untyped_storage())] = known

    def use_numbers(self, flow: Flow) -> None:
        """Records that a weight reads this flow, or that the model returns it. Either way, the numbers by which the flow was
        multiplied are used."""
        for number in flow.numbers:
            self.usage.numbers[number].is_elsewhere = True

    def use(self, labels: Iterable[frozenset[Label]]) -> bool:
        """Records that parameters act element by element; returns whether one of them scales."""
        used = {label for dim_labels in labels for label in dim_labels}
        for name, _ in used:
            self.usage.uses[name].by_element = True
        return any(dim in self.scaling[name] for name, dim in used)

    def mark_unclear(self, labels: Iterable[frozenset[Label]], why: str) -> None:
        for name in {name for dim_labels in labels for name, _ in dim_labels}:
            self.usage.uses[name].unclear = why

    def add_event(self, kind: str, sizes: Iterable[int], *, weights: frozenset[str] = frozenset(), unit: bool = False) -> int:
        self.usage.events.append(Event(kind, self.paths[-1], tuple(sizes), weights, unit))
        return len(self.usage.events) - 1

    def known_of(self, tensor: Tensor) -> Known:
        return self._known.get(StorageWeakRef(tensor.untyped_storage()), Known(CONSTANT))

    def labels_of(self, tensor: Tensor) -> Labels:
        return self.known_of(tensor).labels_of(tensor)

    def weigh(self, summed: list[frozenset[Label]], written: list[frozenset[Label]], read: Flow) -> Flow:
        """Records the product of a weight with a tensor whose flow is ``read``, and returns the flow of the result. ``summed``
        and ``written`` are the labels of the weight's dimensions."""
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
        for name in outs.keys() - set(names):  # for example weight norm's lengths, which multiply the weight's rows
            self.usage.uses[name].by_element = True
        if not scales:
            return replace(read | CONSTANT, is_data=True, scores=frozenset(), mixed=read.scores, shares=frozenset())
        for name in read.writers:
            self.usage.uses[name].is_inside = True
        writers = frozenset(names)
        return Flow(is_data=True, is_inside=True, writers=writers, logits=writers, mixed=read.scores, past=read.past)

    def route(self, first: Flow, second: Flow) -> None:
        """Records the weights that route, if one of two flows is a choice that multiplies or selects the other."""
        for choice, other in ((first, second), (second, first)):
            if choice.is_choice and not other.is_choice and other.is_data:
                for name in choice.writers:
                    self.usage.uses[name].routes = True

    def multiply(self, first: Flow, second: Flow) -> None:
        """Records that outputs of weights are multiplied. A softmax or sigmoid of an output does not vanish with it, so it does
        not count."""
        if not first.is_choice and not second.is_choice:
            for name in first.writers:
                self.usage.uses[name].multiplied_by |= second.writers - first.writers
            for name in second.writers:
                self.usage.uses[name].multiplied_by |= first.writers - second.writers

    def end_products(self) -> None:
        """Finds the weights that make the output only together with a weight that is registered later."""
        later: set[str] = set()
        for name, use in reversed(self.usage.uses.items()):
            use.is_factor = use.makes_output and bool(use.multiplied_by & later)
            later |= {name} if use.makes_output else set()

    def mark_end(self, path: str, tensor: Tensor) -> None:
        """Marks a tensor as the output of a module, unless another module made it: then ``usage.same`` records the other
        module."""
        known = self.known_of(tensor)
        if known.flow.ends:
            self.usage.same[path] = known.flow.ends
        elif known.flow.is_data:
            marked = replace(known, flow=replace(known.flow, ends=frozenset({path})))
            self._known[StorageWeakRef(tensor.untyped_storage())] = marked
