"""Keeps the records of forward passes, so that a second plan of the same model and example needs no pass.

Code, numbers and the example determine a pass. So the key of a record consists of classes and functions, every attribute of
every module, all tensors with their values, and the example. Tensors on the meta device have no values. Some models cannot be
compared: those with hooks, or with attributes such as functions that close over variables. They always get a new pass.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from smupar.plan.forward.uses import Usage

Key = tuple[Any, ...]
NUM_KEPT = 16
MAX_VALUES = 50_000_000  # entries; larger models run without values, so the key has none
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, slice, range)
_CONTAINERS = {"_parameters", "_buffers", "_modules", "training", "_non_persistent_buffers_set"}
_kept: OrderedDict[Key, Usage] = OrderedDict()


class _UnknownError(Exception):
    """A part of the model or of the example cannot be compared."""


def cached(model: nn.Module, given: Any, run: Callable[[], Usage]) -> Usage:
    """The result of ``run``, or the result that is kept for an equal model and an equal ``given``. ``given`` is everything
    besides the model that determines the result."""
    try:
        key = _Describer(model).key(given)
    except _UnknownError:
        return run()
    if key in _kept:
        _kept.move_to_end(key)
    else:
        _kept[key] = run()
        if len(_kept) > NUM_KEPT:
            _kept.popitem(last=False)
    return _kept[key]


class _Describer:
    """Turns a model and its arguments into a key."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.has_values = sum(parameter.numel() for parameter in model.parameters()) <= MAX_VALUES
        self._tensors: dict[int, tuple[int, str]] = {}  # by id, so that tied tensors share an entry
        self._objects: dict[int, Any] = {}  # plain objects such as configs, which many modules share

    def key(self, given: Any) -> Key:
        modules = tuple(self._module(path, module) for path, module in self.model.named_modules(remove_duplicate=False))
        return modules, self.described(given), torch.get_default_dtype(), torch.is_autocast_enabled("cpu")

    def _module(self, path: str, module: nn.Module) -> Key:
        kind: Any = type(module)
        attributes = {name: value for name, value in vars(module).items() if name not in _CONTAINERS}
        if any(value for name, value in attributes.items() if name.endswith("_hooks") and isinstance(value, dict)):
            raise _UnknownError
        tensors = {**module._parameters, **module._buffers}
        return path, kind, kind.forward, self.described(attributes), self.described(tensors)

    def described(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, _PLAIN):
            return type(value), repr(value)
        if isinstance(value, Mapping):
            return type(value), tuple((self.described(key), self.described(item)) for key, item in value.items())
        if isinstance(value, (tuple, list)):
            return type(value), tuple(map(self.described, value))
        if isinstance(value, (set, frozenset)):
            return type(value), frozenset(map(self.described, value))
        # The key has the function's code and defaults, since the function itself would keep its default arguments alive.
        if isinstance(value, FunctionType) and not value.__closure__:
            return value.__module__, value.__code__, self.described((value.__defaults__, value.__kwdefaults__))
        if isinstance(value, (type, BuiltinFunctionType)):
            return value
        return self._object(value)

    def _object(self, value: Any) -> Any:
        """Describes a plain object that holds settings."""
        if isinstance(value, nn.Module) or callable(value) or not hasattr(value, "__dict__"):
            raise _UnknownError
        if id(value) not in self._objects:
            self._objects[id(value)] = "an object that contains itself"
            self._objects[id(value)] = type(value), self.described(vars(value))
        return self._objects[id(value)]

    def _tensor(self, tensor: Tensor) -> Any:
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = len(self._tensors), self._values(tensor)
        number, values = self._tensors[id(tensor)]
        return number, tuple(tensor.shape), tensor.stride(), tensor.dtype, isinstance(tensor, nn.Parameter), values

    def _values(self, tensor: Tensor) -> str:
        if tensor.is_meta or not self.has_values:
            return ""
        if tensor.layout != torch.strided or hasattr(tensor, "full_tensor"):
            raise _UnknownError
        values = tensor.detach().cpu().contiguous()
        content = ctypes.string_at(values.data_ptr(), values.numel() * values.element_size()) if values.numel() else b""
        return hashlib.blake2b(content, digest_size=16).hexdigest()
