"""The fast path of repeated calls whose operands come in lists or mappings, or may be numbers.

Like call_cache.py for operands that are fields, it finds the plan of a call without making a request. Here all operands
are flattened into one list. The call's pattern says which positions are tensors of ours, tensors of another library or
numbers; code is generated for each pattern (list_call_code.py). The request class declares which fields hold several
operands, and which a number or an operand (`unpacked`); each request declares which operand or number every argument of
its plan is (`named_arguments`). Both are checked against the request's own arguments before a call is cached.

A key consists of the layouts of all operands, the names in a mapping, the types of numbers, and the choices. For a
number that is passed by value, `fast_call` checks the range; a number that the plan may depend on must be the same.
If some operands belong to another library, all operands that are written must; its stream and its allocator provide the
order, as in framework_call_cache.py, and tensors of ours may only be read. This module keeps no tensors and no
requests, and knows no op.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core import call_cache
from dispatch.core.call_cache import CACHE_MISS, MAX_FORMS, Pair, is_constant, overlap_bounds
from dispatch.core.framework_call_cache import memory_of
from dispatch.core.list_call_code import (
    CHOICE,
    DEVICE,
    NUMBER,
    OWN,
    THEIRS,
    CallBinding,
    CallLookup,
    ListCallForm,
    Pattern,
    Spans,
    lookup_of,
    make_fast_call,
)
from dispatch.core.request import run
from dispatch.device.frameworks.framework import ForeignStorage
from dispatch.device.frameworks.frameworks import framework_of
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.core.request import Argument, NamedArguments, Request
    from dispatch.device.frameworks.framework import Framework

__all__ = ["ListCallCache"]

MAX_PAIRS = 48  # up to this number, pairs of operands are compared one by one; beyond it, all ranges are sorted
REAL = (int, float, np.float32, np.float64)
SEVERAL = "several"  # the kind of a field with several operands; other fields have the kinds of positions


class ListCallCache:
    """The fast path of one request class: called with the values of its fields, it returns the result of a run."""

    __slots__ = ("_has_several", "_lookups", "_make", "_names", "_sorts")

    def __init__(self, kind: Any, make: Callable[..., Request] | None = None, names: tuple[str, ...] = ()) -> None:
        """`make` makes a request from arguments called `names`; by default it is the class, with its fields."""
        self._make: Callable[..., Request] = kind if make is None else make
        self._names = names or tuple(field.name for field in fields(kind))
        unpacked = kind.unpacked
        sorts = {
            unpacked.device: DEVICE,
            **dict.fromkeys(unpacked.several, SEVERAL),
            **dict.fromkeys(unpacked.numbers, NUMBER),
        }
        self._sorts = tuple(sorts.get(name, CHOICE) for name in self._names)
        self._has_several = SEVERAL in self._sorts
        self._lookups: dict[Any, CallLookup] = {}  # by names and counts of fields with several operands, and all types

    def __call__(self, *values: Any) -> Any:
        return self.found(*values)[0]

    def found(self, *values: Any) -> tuple[Any, Request | None]:
        """The result of a run, and the request, or None if none was needed."""
        items: Sequence[Any] = values
        pattern: Any
        try:
            if self._has_several:
                pattern, items = self._flat(values)
            else:
                pattern = tuple(map(type, values))
            lookup = self._lookups.get(pattern)
        except Exception:  # noqa: BLE001  # a field for several operands is not a list: the request says which
            pattern = lookup = None
        if lookup is not None:
            result = lookup.run(*items)
            if result is not CACHE_MISS:
                return result, None
        if pattern is not None and (lookup is None or lookup.pattern.framework is None):
            arrays = _objects_of(items)
            if arrays is not None:
                pattern, items = (*pattern[: -len(items)], *map(type, arrays)), arrays
                lookup = self._lookups.get(pattern)
                result = CACHE_MISS if lookup is None else lookup.run(*items)
                if result is not CACHE_MISS:
                    return result, None
        request = self._make(**dict(zip(self._names, values, strict=True)))
        result = run(request)
        if pattern is not None:
            self._learn(request, pattern, values, items)
        return result, request

    def _flat(self, values: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        """The types of all operands, and the operands in one list; TypeError if a field for several has no list."""
        items: list[Any] = []
        names_and_counts: list[Any] = []
        for sort, value in zip(self._sorts, values, strict=True):
            if sort is SEVERAL and value is not None:
                names, members = _several(value)
                names_and_counts.append((names, len(members)))
                items.extend(members)
            else:
                items.append(value)
        return (*names_and_counts, *map(type, items)), items

    def _places(self, values: tuple[Any, ...]) -> list[tuple[str, str]]:
        """The name of each position, and the kind of its field."""
        places = []
        for name, sort, value in zip(self._names, self._sorts, values, strict=True):
            if sort is SEVERAL and value is not None:
                names, items = _several(value)
                item_names = [f"{name}[{place}]" for place in range(len(items))] if names is None else names
                places += [(one, NUMBER) for one in item_names]  # each item may be a number
            else:
                places.append((name, CHOICE if sort is SEVERAL else sort))
        return places

    def _learn(self, request: Request, pattern: Any, values: tuple[Any, ...], items: Sequence[Any]) -> None:
        """Cache a call that was made through a request, if that represents all calls of its pattern and key."""
        bound, named = request.bound, request.named_arguments()
        executor = getattr(bound, "executor", None)
        if named is None or executor is None:
            return
        places = self._places(values)
        lookup = self._lookups.get(pattern)
        if lookup is None:
            new_pattern = _pattern(items, [kind for _, kind in places])
            if new_pattern is None:
                return
            if len(self._lookups) >= MAX_FORMS:
                self._lookups.clear()
            lookup = self._lookups[pattern] = lookup_of(new_pattern)  # stored even if the call is not cached
        arrays = [items[place] for place in lookup.pattern.places(THEIRS)]
        if request.framework is not lookup.pattern.framework:
            return
        calls = executor.calls if lookup.pattern.framework is None else memory_of(request, arrays)
        try:
            home, key = lookup.key(*items)
            hash(key)
        except Exception:  # noqa: BLE001  # an operand is not a tensor, or a choice has no hash
            return
        if calls is None or home is not executor or executor.plans is not bound.plans:
            return
        binding = _binding(request, named, lookup.pattern, items, [name for name, _ in places])
        if binding is None or not all(map(is_constant, binding.unchanged)):
            return
        if len(calls) >= call_cache.MAX_CALLS:
            calls.pop(next(iter(calls)), None)
        calls[key] = make_fast_call(bound.plan, binding)


def _objects_of(items: Sequence[Any]) -> list[Any] | None:
    """The operands of a call, with tensors over another library's arrays replaced by those arrays.

    A sparse matrix over torch's memory holds such tensors. None if an operand already is an array of a library, or if a
    tensor has memory of ours, covers only a part of an array, or was used on another stream than that library's current
    one, because a request would wait for that stream.
    """
    objects = list(items)
    framework = stream = None
    for place, item in enumerate(items):
        if type(item) is not Tensor:
            if framework_of(type(item)) is not None:
                return None
            continue
        storage = item.storage
        if type(storage) is not ForeignStorage or item.layout is not storage.layout or item.ptr != storage.at:
            return None
        if framework is None:
            framework = storage.framework
            stream = framework.stream(item.device) if framework.code is not None else None
        if storage.framework is not framework or stream is None or storage.owner is not stream:
            return None
        objects[place] = storage.keep
    return None if framework is None else objects


def _several(value: Any) -> tuple[tuple[str, ...] | None, Sequence[Any]]:
    """The names (None for a list) and items of a list, a mapping or a list of pairs; TypeError for anything else."""
    kind = type(value)
    if kind is dict:
        return tuple(value), tuple(value.values())
    if kind is not tuple and kind is not list:
        raise TypeError(f"a {kind.__name__}")
    items = tuple(value)
    if items and type(items[0]) is tuple:
        return tuple([name for name, _ in items]), [item for _, item in items]
    return None, items


def _pattern(items: Sequence[Any], kinds: Sequence[str]) -> Pattern | None:
    """The pattern of a call; None for operands of several libraries, or of one whose calls are not cached."""
    holds: list[str | None] = []
    libraries: dict[str, Framework] = {}
    for item, kind in zip(items, kinds, strict=True):
        framework = framework_of(type(item))
        if item is None:
            holds.append(None)
        elif type(item) is Tensor:
            holds.append(OWN)
        elif framework is not None and framework.code is not None and type(item) in framework.code.kinds:
            libraries[framework.name] = framework
            holds.append(THEIRS)
        else:
            holds.append(kind)
    if len(libraries) > 1 or not {OWN, THEIRS, DEVICE} & set(holds) or (libraries and DEVICE in holds):
        return None
    return Pattern(tuple(holds), next(iter(libraries.values()), None))


# -- caching a call ---------------------------------------------------------------------------------------------------
class Operands(NamedTuple):
    """The operands of a call, by their names in the request."""

    tensors: dict[str, Tensor]
    allocated: dict[str, Tensor]  # outputs allocated at each call: placeholders with an address but no memory
    words: dict[str, str]  # the name of each in the generated code


def _binding(
    request: Request, named: NamedArguments, pattern: Pattern, items: Sequence[Any], names: Sequence[str]
) -> CallBinding | None:
    """How calls like this one run the plan; None if `named` does not reproduce the request's own arguments."""
    operands = _operands(request, pattern, items, names)
    if operands is None:
        return None
    tensors, allocated, words = operands
    uses = request.tensors()
    numbers = {names[place]: place for place in pattern.places(NUMBER)}
    free = {name: place for name, place in numbers.items() if _is_free(named, name, items[place])}
    constants: list[Argument] = []
    arguments = []
    for name, argument in zip(named.order, request.arguments(allocated), strict=True):
        if name in words:
            arguments.append(f"_at_{words[name]}")
            expected: Argument = (allocated[name] if name in allocated else tensors[name]).ptr
        elif name in free:
            arguments.append(f"_number_{free[name]}")
            expected = named.numbers[name].argument(items[free[name]])
        else:
            arguments.append(f"_argument_{len(constants)}")
            constants.append(argument)
            expected = argument if type(argument) is not int else 0  # an int would be the address of no operand
        if type(argument) is not type(expected) or argument != expected:
            return None
    result = request.result(allocated)
    results = result if isinstance(result, tuple) else (result,)
    writes = [name for name, _, is_written in uses if is_written]
    written = {id(tensors[name]): words[name] for name in writes} | {
        id(allocated[name]): words[name] for name in allocated
    }
    if len(written) < len(allocated) + len(writes) or not all(id(one) in written for one in results):
        return None
    outputs = _outputs(request, pattern)
    pairs, bounds, spans = _apart(uses, words, named.in_place)
    layouts = {words[name]: tensor.layout for name, tensor, _ in uses}
    their_positions = pattern.places(THEIRS)
    if outputs is None or (their_positions and not all(int(words[name][1:]) in their_positions for name in writes)):
        return None
    sized = [place for place in their_positions if layouts[f"x{place}"].size]
    form = ListCallForm(
        pattern=pattern,
        unchanged=(*pattern.places(CHOICE), *(place for name, place in numbers.items() if name not in free)),
        numbers=tuple((place, named.numbers[name].is_whole) for name, place in free.items()),
        allocated=len(allocated),
        arguments=tuple(arguments),
        constants=len(constants),
        reads=tuple(words[name] for name, _, is_written in uses if not is_written),
        writes=tuple(words[name] for name in (*writes, *allocated)),
        results=tuple(written[id(one)] for one in results),
        is_tuple=isinstance(result, tuple),
        pairs=pairs,
        spans=tuple(f"_at_{words[name]}" for name, tensor, _ in uses if tensor.layout.size) if spans else (),
        sized=tuple(sized),
        unusual=_unusual(pattern, layouts),
    )
    ranges = tuple((named.numbers[name].low, named.numbers[name].high) for name in free)
    held = tuple(items[place] for place in form.unchanged)
    return CallBinding(form, held, ranges, outputs, tuple(constants), bounds, spans)


def _operands(request: Request, pattern: Pattern, items: Sequence[Any], names: Sequence[str]) -> Operands | None:
    """The operands by name; None if the request's tensors are not those of the call, or if two have one name."""
    uses = request.tensors()
    operands = {names[place]: items[place] for place in pattern.places(OWN, THEIRS)}
    words = {names[place]: f"x{place}" for place in pattern.places(OWN, THEIRS)}
    if len(uses) != len(operands) or {name for name, *_ in uses} != operands.keys():
        return None
    if not all(_stands_for(tensor, operands[name]) for name, tensor, _ in uses):
        return None
    nothing: Any = None
    outputs = {name: Tensor(nothing, -1 - place, nothing) for place, name in enumerate(request.unallocated())}
    words |= {name: f"made_{number}" for number, name in enumerate(outputs)}
    numbers = [names[place] for place in pattern.places(NUMBER)]
    if len(words) + len(numbers) > len({*operands, *outputs, *numbers}) or len(words) < len(operands) + len(outputs):
        return None
    return Operands({name: tensor for name, tensor, _ in uses}, outputs, words)


def _stands_for(tensor: Tensor, given: Any) -> bool:
    """Whether a request's tensor is the given operand, or covers the whole of a given array."""
    if tensor is given:
        return True
    storage = tensor.storage
    if type(storage) is not ForeignStorage or storage.keep is not given:
        return False
    if tensor.layout is not storage.layout or tensor.ptr != storage.at:
        return False
    try:  # the memory or shape of the array may have changed since the tensor was made
        now = storage.framework.tensor("operand", given)
    except BadRequest:
        return False
    return bool(now.ptr == tensor.ptr and now.layout == tensor.layout)


def _is_free(named: NamedArguments, name: str, value: Any) -> bool:
    """Whether later calls may have other values of this number."""
    return name in named.numbers and name in named.order and type(value) in REAL and named.numbers[name].has(value)


def _outputs(request: Request, pattern: Pattern) -> tuple[Any, ...] | None:
    """How each output that was not given is allocated; None if the operands' library cannot allocate one."""
    described = tuple(request.unallocated().values())
    if pattern.framework is None:
        return described
    makers = tuple(pattern.framework.maker(request.device, *one) for one in described)
    return None if None in makers else makers


def _unusual(pattern: Pattern, layouts: dict[str, Any]) -> tuple[str, ...]:
    """The conditions, as code, under which the memory of another library's operands does not hold the elements."""
    if pattern.framework is None:
        return ()
    conditions = []
    for place in pattern.places(THEIRS):
        guard = pattern.framework.guard(layouts[f"x{place}"].dtype)
        if guard:
            conditions.append(f"({guard.format(x=f'x{place}')})")
    return tuple(conditions)


def _apart(
    uses: Sequence[tuple[str, Tensor, bool]], words: dict[str, str], in_place: frozenset[tuple[str, str]]
) -> tuple[tuple[Pair, ...], tuple[tuple[int, int, int | None], ...], Spans | None]:
    """The pairs of operands that must not overlap and their bounds, or the ranges of all operands if there are many."""
    sized = [(name, tensor.layout, written) for name, tensor, written in uses if tensor.layout.size]
    pairs, bounds = [], []
    for count, (name, layout, written) in enumerate(sized):
        for other_name, other, other_written in sized[count + 1 :]:
            if written or other_written:
                may_be_one = not in_place.isdisjoint(((name, other_name), (other_name, name)))
                pairs.append((words[name], words[other_name], may_be_one))
                bounds.append(overlap_bounds(layout, other))
    if len(pairs) <= MAX_PAIRS or in_place:
        return tuple(pairs), tuple(bounds), None
    lows, highs, written_ones = zip(*((layout.low, layout.high, written) for _, layout, written in sized), strict=True)
    return (), (), Spans(lows, highs, written_ones)
