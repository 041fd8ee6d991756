"""The fast path of repeated calls: from the operands of a call to its plan, without making a request.

A request function looks in its executor's cache by request class, layouts and choices (the fields that are not
tensors). The entry is a function `fast_call`, which enqueues the plan on the operands of this call, or returns
CACHE_MISS if a request is needed: the request checks everything and explains errors. `fast_call` does exactly what the
request would do: the same plan, the same addresses in the same order, the same reads and writes, the same result.

A key matches more calls than it should, because 1, True and 1.0 are equal, and so are 0.0 and -0.0; `fast_call`
distinguishes these. It also checks what depends on addresses: whether a tensor that is written overlaps another one.
The distances at which two operands overlap follow from their layouts, so the check takes a subtraction and two
comparisons for each pair. Alignment and read-only memory are part of a layout.

The code of `fast_call` is generated: it names each operand and has no loops. Calls with the same set of operands share
it (`CallForm`). This module keeps no tensors and no requests, and knows no op.
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, lru_cache
from itertools import combinations, starmap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.request_class import is_tensor
from dispatch.device.tensor import Tensor
from dispatch.keys import Dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dispatch.core.operands import OperandRequest
    from dispatch.core.request import Request
    from dispatch.device.device import Device
    from dispatch.device.layout import Layout

__all__ = [
    "CACHE_MISS",
    "MAX_CALLS",
    "MAX_FORMS",
    "Pair",
    "cache_call",
    "executor_on",
    "fields_of",
    "is_constant",
    "is_same_choice",
    "overlap_bounds",
    "overlap_condition",
    "overlap_pairs",
    "tuple_code",
    "unpacking_line",
]

MAX_CALLS = 4096  # cached calls of one executor; the oldest is dropped first, because each keeps its plan alive
MAX_FORMS = 1024  # cached forms of all classes
CACHE_MISS = object()  # returned by `fast_call` if a request is needed
Pair = tuple[str, str, bool]  # two operands, at least one of them written; whether they may be one view


class CallForm(NamedTuple):
    """The operands that a call has and how each is used; calls of one form share their generated code."""

    parameters: tuple[str, ...]  # operands and choices, in the order of `fast_call`'s parameters
    choices: tuple[str, ...]
    order: tuple[str, ...]  # order of the addresses; 0 for an absent operand
    reads: tuple[str, ...]
    writes: tuple[str, ...]  # given operands that are written
    allocated: tuple[str, ...]  # the outputs that are allocated
    results: tuple[str, ...]
    pairs: tuple[Pair, ...]


@cache
def fields_of(kind: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fields of a request class that are tensors, and all others."""
    operands = tuple(field.name for field in fields(kind) if is_tensor(field))
    return operands, tuple(field.name for field in fields(kind) if field.name not in operands)


def executor_on(device: Device) -> Any:
    """The calling thread's executor on a device that is not its current one's."""
    device.check()
    return device.executor()


# -- caching a call ---------------------------------------------------------------------------------------------------
def cache_call(executor: Any, calls: dict[Any, Any], key: tuple[Any, ...], request: OperandRequest) -> None:
    """Store `fast_call` for the next call of the same key, if the request that has run represents all such calls."""
    bound = request.bound
    if getattr(bound, "executor", None) is not executor or not request.is_plain or request.framework is not None:
        return  # the host's plans need requests; other libraries' operands have no layout for the key
    operands, choices = fields_of(type(request))
    values = key[1 + len(operands) :]
    if not all(map(is_constant, values)):
        return
    order = (*(type(request).plain_reads() or ()), *request.writes)
    uses = {name: (tensor.layout, written) for name, tensor, written in request.tensors()}
    if not uses.keys() <= set(order):
        return
    outputs = request.unallocated()
    form = CallForm(
        parameters=(*operands, *choices),
        choices=choices,
        order=order,
        reads=tuple(name for name, (_, written) in uses.items() if not written),
        writes=tuple(name for name, (_, written) in uses.items() if written),
        allocated=tuple(outputs),
        results=tuple(request.outputs()),
        pairs=overlap_pairs(request),
    )
    bounds = [overlap_bounds(uses[one][0], uses[other][0]) for one, other, _ in form.pairs]
    fast_call = _maker(form)(bound.plan, values, tuple(outputs.values()), *zip(*bounds, strict=True))
    if len(calls) >= MAX_CALLS:
        calls.pop(next(iter(calls)), None)
    calls[key] = fast_call


def overlap_pairs(request: Request) -> tuple[Pair, ...]:
    """The pairs of operands that must not overlap."""
    in_place: frozenset[tuple[str, str]] = getattr(request, "in_place", frozenset())
    pairs = [(one[0], other[0]) for one, other in combinations(request.tensors(), 2) if one[2] or other[2]]
    return tuple((*pair, not in_place.isdisjoint((pair, pair[::-1]))) for pair in pairs)


def overlap_bounds(one: Layout, other: Layout) -> tuple[int, int, int | None]:
    """The range of address distances at which the tensors may overlap, and the distance at which they are one view."""
    same = (one.dtype, one.shape, one.strides) == (other.dtype, other.shape, other.strides)
    if one.size == 0 or other.size == 0:
        return 0, 0, None
    return one.low - other.high, one.high - other.low, 0 if same else None


@lru_cache(MAX_FORMS)
def _maker(form: CallForm) -> Callable[..., Callable[..., Any]]:
    """The compiled function that makes a plan's `fast_call` from its choices, outputs and bounds; one for each form."""
    held = [f"_held_{name}" for name in form.choices]
    lines = []
    if held:
        lines += [
            f"if not ({' and '.join(f'{name} is _held_{name}' for name in form.choices)}):",
            f"    if not _same(({', '.join(held)},), ({', '.join(form.choices)},)):",
            "        return _CACHE_MISS",
            # Equal but different objects: the next call is likely to have the same objects as this one.
            f"    {', '.join(held)}, = {', '.join(form.choices)},",
        ]
        lines = [f"nonlocal {', '.join(held)}", *lines]
    operands = (*form.reads, *form.writes)
    lines += [f"if {' or '.join(f'_type({name}) is not _Tensor' for name in operands)}:", "    return _CACHE_MISS"]
    lines += [f"_at_{name} = {name}.ptr" for name in operands]
    if form.pairs:
        lines += [f"if {' or '.join(starmap(overlap_condition, enumerate(form.pairs)))}:", "    return _CACHE_MISS"]
    lines += [f"{name} = _executor.empty(*_made_{name})" for name in form.allocated]
    lines += [f"_at_{name} = {name}.ptr" for name in form.allocated]
    there = {*operands, *form.allocated}
    addresses = tuple_code([f"_at_{name}" if name in there else "0" for name in form.order])
    writes = tuple_code((*form.writes, *form.allocated))
    lines += [
        f"_executor.enqueue(_plan, {addresses}, {tuple_code(form.reads)}, {writes})",
        f"return {form.results[0] if len(form.results) == 1 else tuple_code(form.results)}",
    ]
    unpacked = [
        *unpacking_line("_held", form.choices, "_choices"),
        *unpacking_line("_made", form.allocated, "_outputs"),
        *(
            line
            for end in ("low", "high", "one")
            for line in unpacking_line(f"_{end}", range(len(form.pairs)), f"_{end}s")
        ),
    ]
    source = [
        "def make(_plan, _choices, _outputs, _lows=(), _highs=(), _ones=()):",
        *(f"    {line}" for line in unpacked),
        f"    def fast_call(_executor, {', '.join(form.parameters)}):",
        *(f"        {line}" for line in lines),
        "    return fast_call",
    ]
    scope: dict[str, Any] = {"_Tensor": Tensor, "_CACHE_MISS": CACHE_MISS, "_same": is_same_choice, "_type": type}
    exec("\n".join(source), scope)
    make: Callable[..., Callable[..., Any]] = scope["make"]
    return make


def overlap_condition(number: int, pair: Pair) -> str:
    """The condition, as code, that two operands may overlap and are not the same view, if that is allowed in place."""
    one, other, in_place = pair
    distance = f"_at_{other} - _at_{one}"
    overlapping = f"_low_{number} < {distance} < _high_{number}"
    return f"{overlapping} and {distance} != _one_{number}" if in_place else overlapping


def unpacking_line(word: str, names: Iterable[object], values: str) -> list[str]:
    """The line that unpacks values into names `word_…`; no line without names."""
    targets = [f"{word}_{name}" for name in names]
    return [f"{tuple_code(targets)} = {values}"] if targets else []


def tuple_code(names: Sequence[str]) -> str:
    return f"({', '.join(names)},)" if names else "()"


# -- choices ----------------------------------------------------------------------------------------------------------
NUMBERS = {np.dtype(code).type for code in np.typecodes["AllInteger"] + np.typecodes["Float"] + "?"}
CONSTANTS = (type(None), bool, int, str, Dtype)
REAL = (float, np.floating)


def is_constant(value: Any) -> bool:
    """Whether a choice cannot change and equals itself; an instance of a user's class may change."""
    kind = type(value)
    if kind is float or kind in NUMBERS:
        return bool(value == value)  # False for NaN
    if kind is tuple or (kind.__bases__ == (tuple,) and "__eq__" not in vars(kind)):  # a NamedTuple
        return all(map(is_constant, value))
    if kind is type:
        return issubclass(value, np.generic) or value in (bool, int, float, complex)
    if getattr(kind, "is_constant", None) is True:  # a class that declares it
        return True
    if "__dataclass_params__" in vars(kind):
        return kind.__dataclass_params__.frozen and all(is_constant(getattr(value, f.name)) for f in fields(value))
    return kind in CONSTANTS or isinstance(value, (Enum, np.dtype))


def is_same_choice(held: Any, given: Any) -> bool:
    """Whether two equal choices also mean the same to a request: 1 is not True, and 0.0 is not -0.0."""
    if held is given:
        return True
    if type(held) is not type(given):
        return False
    if isinstance(held, tuple):
        return len(held) == len(given) and all(map(is_same_choice, held, given))
    if is_dataclass(held):
        return all(is_same_choice(getattr(held, field.name), getattr(given, field.name)) for field in fields(held))
    if isinstance(held, REAL):
        return bool(held == given) and math.copysign(1, held) == math.copysign(1, given)
    return bool(held == given)
