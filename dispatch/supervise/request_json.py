"""Requests as JSON and back: class and fields, with tensors by layout and position in memory, never with their data.

journal.py writes these entries, cli/replay.py reads them. Storages are numbered, so that tensors which shared memory do
so again. Reading imports only modules of this package and those that the caller names: a file must not choose the code
that runs.
"""

from __future__ import annotations

import importlib
import math
import os
import weakref
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.checks import check_shape, shown
from dispatch.core.request import Request
from dispatch.device.device import Device
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, DispatchError, OutOfMemory
from dispatch.keys import Dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dispatch.device.layout import Layout
    from dispatch.device.storage import Storage

__all__ = ["Memory", "Reader", "Writer"]

Json = dict[str, Any]
MACHINE_MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # bytes of this machine's memory
MAX_NUMBER = 2**48  # the largest extent, stride or offset
MAX_INT_BITS = 2048  # bits: Python's JSON reader and writer refuse longer numbers
OWN_PACKAGE = "dispatch"  # the package whose classes an entry may always name


class Writer:
    """Turns requests into entries."""

    def __init__(self) -> None:
        self._storages: weakref.WeakKeyDictionary[Storage, int] = weakref.WeakKeyDictionary()
        self._count = 0

    def request(self, request: Request) -> Json:
        """The entry of a request: its fields without those that have their default values.

        For a class that is not a dataclass it has the attributes that a pickle would have.
        """
        usual = _defaults(type(request))
        items = (
            (name, value) for name, value in request.__getstate__().items() if usual.get(name, MISSING) is not value
        )
        state = {name: self._value(value) for name, value in items}
        return {"op": request.op, "class": _name_of(type(request)), "fields": state}

    def _value(self, value: Any) -> Any:
        if isinstance(value, Enum):
            return {"enum": _name_of(type(value)), "name": value.name}
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, (int, np.integer)):
            number = int(value)
            if number.bit_length() > MAX_INT_BITS:
                raise BadRequest("field", f"an integer of {number.bit_length()} bits", f"one of up to {MAX_INT_BITS}")
            return number
        if isinstance(value, (float, np.floating)):
            return float(value) if math.isfinite(value) else {"float": repr(float(value))}
        if isinstance(value, (complex, np.complexfloating)):
            return {"complex": [repr(float(value.real)), repr(float(value.imag))]}
        return self._structure(value)

    def _structure(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, Dtype):
            return {"dtype": value.name}
        if isinstance(value, (np.dtype, type)) and np.dtype(value) in Dtype.by_numpy:
            return {"dtype": Dtype.of(value).name}
        if isinstance(value, tuple) and hasattr(value, "_asdict"):
            state = {name: self._value(item) for name, item in value._asdict().items()}
            return {"namedtuple": _name_of(type(value)), "fields": state}
        if isinstance(value, (tuple, list)):
            return {"tuple": [self._value(item) for item in value]}
        if isinstance(value, Device):
            return {"device": value.name}
        if is_dataclass(value) and not isinstance(value, type):
            constant = value.__reduce_ex__(2)  # a str names a module's constant, as in pickle: it must be that object
            if isinstance(constant, str):
                return {"constant": f"{type(value).__module__}:{constant}"}
            state = {field.name: self._value(getattr(value, field.name)) for field in fields(value)}
            return {"dataclass": _name_of(type(value)), "fields": state}
        return {"other": type(value).__name__}  # its text might contain data

    def _tensor(self, tensor: Tensor) -> Json:
        number = self._storages.get(tensor.storage)
        if number is None:
            number = self._storages[tensor.storage] = self._count
            self._count += 1
        layout = tensor.layout
        entry = {"tensor": number, "offset": tensor.ptr - tensor.storage.base, "dtype": layout.dtype.name}
        entry |= {"shape": list(layout.shape), "strides": list(layout.strides)}
        return entry | ({"readonly": True} if layout.readonly else {})


@cache
def _defaults(kind: Any) -> dict[str, Any]:
    return {field.name: field.default for field in fields(kind)} if is_dataclass(kind) else {}


def _name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def tensors_of(entry: Any) -> list[Json]:
    """Every tensor in an entry or a part of one, in order; without recursion, because a file may nest them deeply."""
    tensors, stack = [], [entry]
    while stack:
        part = stack.pop()
        if isinstance(part, dict) and "tensor" in part:
            tensors.append(part)
        elif isinstance(part, (dict, list)):
            stack += reversed(list(part.values()) if isinstance(part, dict) else part)
    return tensors


class Memory:
    """The storages of entries, created on a device when the first of their tensors is made, with random values."""

    def __init__(self, device: Device, lines: Sequence[Json], last: Mapping[int, int], seed: int) -> None:
        """`last` has the line at which each definition is used for the last time."""
        self._device, self._rng = device, np.random.default_rng(seed)
        self._storages: dict[int, Storage] = {}
        self._ends: dict[int, int] = {}  # bytes of each storage
        self._last: dict[int, int] = {}
        for line in lines:
            for entry in tensors_of(line.get("fields", {})):
                try:
                    layout = self._layout(entry, 0)  # also checks the entry
                    number, end = entry["tensor"], entry["offset"] + layout.high
                except BadRequest:
                    continue  # `tensor` raises it
                self._ends[number] = max(self._ends.get(number, 0), end)
                self._last[number] = max(self._last.get(number, 0), last.get(line["define"], 0))

    def tensor(self, entry: Json) -> Tensor:
        """The tensor of an entry, at its old offset in its storage; BadRequest for an invalid entry."""
        layout = self._layout(entry, 0)
        if entry["offset"] + layout.high > self._ends.get(entry["tensor"], 0):
            raise BadRequest("tensor", shown(entry), "a tensor that an earlier line of the journal defines")
        storage = self._storages.get(entry["tensor"])
        if storage is None:
            storage = self._random_storage(self._ends[entry["tensor"]], Dtype.by_name[entry["dtype"]])
            self._storages[entry["tensor"]] = storage
        ptr = storage.base + entry["offset"]
        return Tensor(storage, ptr, self._layout(entry, ptr))

    def forget(self, line: int) -> None:
        """Drop the storages that are not used after a line."""
        self._storages = {number: storage for number, storage in self._storages.items() if self._last[number] > line}

    def _layout(self, entry: Json, ptr: int) -> Layout:
        """The layout of an entry at an address; BadRequest if it begins before its storage, or is too large."""
        kind, shape, strides = _read_layout(entry)
        layout = self._device.layout(kind, shape, strides, ptr, entry.get("readonly", False) is True)
        low, high = entry["offset"] + layout.low, entry["offset"] + layout.high
        if low < 0 or high > MACHINE_MEMORY or entry["offset"] % max(kind.itemsize, 1):
            actual, expected = f"bytes {low} to {high} of a storage", f"whole elements from 0 to {MACHINE_MEMORY}"
            raise BadRequest("tensor", actual, expected, "the journal was damaged or edited")
        return layout

    def _random_storage(self, nbytes: int, kind: Dtype) -> Storage:
        count = -(-nbytes * 8 // kind.bits)
        count += count % 2  # an even number, so that packed types fill bytes
        if 8 * count + nbytes > MACHINE_MEMORY:  # the random numbers, and the tensor made from them
            raise OutOfMemory(f"a tensor of {nbytes} bytes is larger than the memory of this machine")
        numbers: Any = self._rng.integers(0, 2, count)
        if kind.numpy.kind not in "biu":
            numbers = self._rng.uniform(0.5, 2, count)  # a range that every type has, scale factors included
        return self._device.array(numbers, kind).storage


def _read_layout(entry: Json) -> tuple[Dtype, tuple[int, ...], tuple[int, ...]]:
    """Dtype, shape and strides of an entry; BadRequest if they are invalid."""
    kind = Dtype.by_name.get(entry["dtype"]) if isinstance(entry.get("dtype"), str) else None
    shape, strides = entry.get("shape"), entry.get("strides")
    if kind is None or not isinstance(shape, list) or not isinstance(strides, list) or len(shape) != len(strides):
        raise BadRequest("tensor", shown(entry), "a dtype, a shape, and as many strides")
    numbers = (entry.get("tensor"), entry.get("offset"), *shape, *strides)
    if not all(type(number) is int and abs(number) <= MAX_NUMBER for number in numbers) or min(shape, default=0) < 0:
        raise BadRequest("tensor", shown(entry), "whole numbers whose product fits into memory")
    return kind, check_shape("shape", shape, kind.bits), tuple(strides)


class Reader:
    """Makes requests from entries: `tensor` makes the tensors; classes must be from this package or from `modules`."""

    def __init__(self, tensor: Callable[[Json], Tensor], device: Device, modules: Sequence[str] = ()) -> None:
        self._tensor, self._device, self._modules = tensor, device, frozenset(modules)
        self._made: dict[str, Tensor] = {}  # of the present request

    def request(self, entry: Json) -> Request:
        """The request of an entry; BadRequest, with the reason, if it cannot be made."""
        try:
            return self._request(entry)
        except (DispatchError, MemoryError):
            raise
        except Exception as error:  # the entry is damaged, or the class refuses a field with its own error
            expected = "a value that this class has written"
            reason = f"{type(error).__name__}: {error}"
            raise BadRequest("entry", shown(entry.get("class")), expected, reason) from error

    def _request(self, entry: Json) -> Request:
        kind = self._find(entry["class"])
        if not (isinstance(kind, type) and issubclass(kind, Request)):
            raise BadRequest("class", entry["class"], "a dispatch.Request")
        self._made = {}
        state = {name: self._value(value) for name, value in entry["fields"].items()}
        if is_dataclass(kind):
            instance = kind(**state)
        else:
            instance = kind.__new__(kind)
            instance.__dict__.update(state)
        request: Request = instance
        return request

    def _value(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kind = next(iter(value))
        if kind == "tensor":  # the same object for the same tensor: requests compare C and D by identity
            return self._made.setdefault(repr(value), self._tensor(value))
        if kind == "dtype":
            return Dtype.by_name[value["dtype"]]
        if kind == "device":
            return self._device
        if kind == "float":
            return float(value["float"])
        if kind == "complex":
            return complex(*map(float, value["complex"]))
        if kind == "tuple":
            return tuple(map(self._value, value["tuple"]))
        return self._named(kind, value)

    def _named(self, kind: str, value: Json) -> Any:
        if kind not in ("enum", "constant", "dataclass", "namedtuple"):
            raise BadRequest(
                "field", f"a {value.get('other', kind)}", "a number, a string, a tensor, or a container of these"
            )
        target = self._find(value[kind])
        if kind == "constant" and is_dataclass(target):
            return target
        if kind == "enum" and isinstance(target, type) and issubclass(target, Enum):
            return target[value["name"]]
        is_class = isinstance(target, type)
        if (kind == "dataclass" and is_class and is_dataclass(target)) or (
            kind == "namedtuple" and is_class and issubclass(target, tuple) and hasattr(target, "_asdict")
        ):
            return target(**{name: self._value(item) for name, item in value["fields"].items()})
        raise BadRequest("field", value[kind], f"{'an' if kind == 'enum' else 'a'} {kind}")

    def _find(self, name: str) -> Any:
        module, _, path = name.partition(":")
        if module.partition(".")[0] != OWN_PACKAGE and module not in self._modules:
            raise BadRequest("class", name, "a class of this package", f"allow the file to use it: --setup {module}")
        target: Any = importlib.import_module(module)
        for part in path.split("."):
            target = getattr(target, part)
        return target
