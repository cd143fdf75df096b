"""Watches one forward pass and records how it uses each parameter (``uses``).

The watcher passes every operation of the forward pass to ``operations``, which derives what is known about the results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from itertools import islice
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from smupar.plan.forward.cache import cached
from smupar.plan.forward.flows import Dims, Flow
from smupar.plan.forward.operations import Operations
from smupar.plan.forward.run_copy import Example, run_copy
from smupar.plan.forward.uses import Output, Usage


def watch(model: nn.Module, example: Example, *, scaling: Mapping[str, Dims], reads: Mapping[str, Dims]) -> Usage:
    """The record of one forward pass of a copy of the model. Raises ``CannotRunError``.

    scaling  parameter name -> its dimensions that follow the width
    reads    parameter name -> its input dimensions, if the kind of its module decides them
    """

    def run(copied: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Usage:
        operations = Operations(copied, scaling, reads)
        for tensor in _tensors((args, kwargs)):
            operations.put(tensor, Flow(is_data=True))
        with _Watcher(copied, operations):
            output = copied(*args, **kwargs)
        operations.end_residuals()
        _record_output(operations, output)
        operations.end_products()
        return operations.usage

    return cached(model, (example, scaling, reads), lambda: run_copy(model, example, run))


_SLICES = ("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "slice")


class _Watcher(TorchDispatchMode):
    def __init__(self, model: nn.Module, operations: Operations) -> None:
        super().__init__()
        self.operations = operations
        for path, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, path=path: operations.paths.append(path), prepend=True)
            module.register_forward_hook(self._leave)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping it would import torch's compiler, which takes seconds

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        path = self.operations.paths.pop()
        for tensor in islice(_tensors(output), 1):
            self.operations.mark_end(path, tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = list(_tensors(result))
        inputs = list(_tensors((args, kwargs)))
        name = func._schema.name.removeprefix("aten::")
        if outputs and inputs:
            if name in _SLICES:
                self.operations.slice(inputs[0], outputs)
            if func._schema.is_mutable or not _are_views(outputs, inputs):
                self.operations.record(name.removesuffix("_") if func._schema.is_mutable else name, args, inputs, outputs)
        return result


def _are_views(outputs: list[Tensor], inputs: list[Tensor]) -> bool:
    storages = {StorageWeakRef(tensor.untyped_storage()) for tensor in inputs}
    return all(StorageWeakRef(tensor.untyped_storage()) in storages for tensor in outputs)


def _record_output(operations: Operations, output: object) -> None:
    """Records which weights make the output. If a weight makes several parts of the output, only the first counts; the order is
    the loss, the logits, everything else."""
    usage, judged = operations.usage, set[str]()
    for part in _by_weight(output):
        flows = [(tensor, operations.known_of(tensor).flow) for tensor in _tensors(part)]
        weighted = [(tensor, flow) for tensor, flow in flows if flow.writers]
        usage.outputs = usage.outputs or [Output(tuple(tensor.shape), flow.is_normed) for tensor, flow in weighted]
        for _, flow in weighted:
            for use in (usage.uses[name] for name in flow.writers - judged):
                use.makes_output |= not flow.is_normed
                use.makes_normed_output |= flow.is_normed
        judged |= frozenset[str]().union(*(flow.writers for _, flow in weighted))
    for tensor in _tensors(output):
        operations.use_numbers(operations.known_of(tensor).flow)


def _by_weight(output: Any) -> list[Any]:
    """The parts of an output: the loss, then the logits, then everything else, as transformers names them."""
    if not isinstance(output, Mapping):
        return [output]
    logits = [value for key, value in output.items() if str(key).startswith("logits")]
    return [output.get("loss"), logits, output]


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
        return
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, (tuple, list)):
        items = value
    elif is_dataclass(value) and not isinstance(value, type):
        items = vars(value).values()
    for item in items:
        yield from _tensors(item)
