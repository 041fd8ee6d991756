"""Calls that were made before, of requests whose operands come in lists and mappings, or may be numbers.

As remembered.py does for operands that are fields of their own: from the operands of a repeated call to its plan,
without a request. Here `take` is given the operands one behind the other, and goes by their places. Which fields hold
several, and which a number or an operand, the class says (`unpacked`); what a run follows from, by the names of its
operands, each request (`named_arguments`). Both are compared with the request's own run before anything is remembered.

A key has the layouts of all operands, the names in a mapping, the types of numbers, and the choices. Of a number that
is given by value `take` looks at its range; one that the plan may depend on has to be the same. Nothing here keeps a
tensor or a request, and nothing here knows an op.
"""

from __future__ import annotations

from dataclasses import fields
from operator import add, is_, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core import remembered
from dispatch.core.remembered import UNFIT, bounds_of, executor_on, is_constant, same
from dispatch.core.request import run
from dispatch.device.frameworks.framework import Adopted
from dispatch.device.stream import current
from dispatch.device.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dispatch.core.request import Argument, NamedArguments, Number, Request

__all__ = ["OperandCalls"]

MOST_PAIRS = 48  # of operands that are looked at pair by pair; of more the spans are sorted
REAL = (int, float, np.float32, np.float64)
ALONE, SEVERAL, NUMBER, DEVICE = range(4)  # what a field may hold beside None


class Flat(NamedTuple):
    """The operands of a call, one behind the other."""

    key: tuple[Any, ...]
    tensors: list[Tensor]
    numbers: list[Any]
    choices: list[Any]
    executor: Any


class OperandCalls:
    """The way from the values of a request class's fields to what a run gives, through what is remembered of calls."""

    __slots__ = ("_make", "_names", "_sorts")

    def __init__(self, kind: Any, make: Callable[..., Request] | None = None, names: tuple[str, ...] = ()) -> None:
        """`make` is called with `names`; unless said, it is the class, with its fields."""
        self._make: Callable[..., Request] = kind if make is None else make
        self._names = names or tuple(field.name for field in fields(kind))
        said = kind.unpacked
        sorts = {said.device: DEVICE, **dict.fromkeys(said.several, SEVERAL), **dict.fromkeys(said.numbers, NUMBER)}
        self._sorts = tuple(sorts.get(name, ALONE) for name in self._names)

    def __call__(self, *values: Any) -> Any:
        return self.found(*values)[0]

    def found(self, *values: Any) -> tuple[Any, Request | None]:
        """What a run gives, and the request, where one had to be made."""
        try:
            flat = self._flat(values)
            calls = None if flat is None else flat.executor.calls
            take = None if flat is None or calls is None else calls.get(flat.key)
        except Exception:  # noqa: BLE001  # an operand is no tensor, a choice has no hash: the request says which
            flat = calls = take = None
        if flat is not None and take is not None:
            result = take(flat.executor, flat.tensors, flat.numbers, flat.choices)
            if result is not UNFIT:
                return result, None
        request = self._make(**dict(zip(self._names, values, strict=True)))
        result = run(request)
        if flat is not None and calls is not None:
            take = take_of(request, flat, *self._flat_names(values))
            if take is not None:
                if len(calls) >= remembered.MAX_CALLS:
                    calls.pop(next(iter(calls)), None)
                calls[flat.key] = take
        return result, request

    def _flat(self, values: tuple[Any, ...]) -> Flat | None:
        """None on the host, whose plans run requests."""
        key: list[Any] = [self]
        tensors: list[Tensor] = []
        numbers: list[Any] = []
        choices: list[Any] = []
        device = None
        for sort, value in zip(self._sorts, values, strict=True):
            kind = type(value)
            if value is None:
                key.append(None)
            elif kind is Tensor:
                key.append(value.layout)
                tensors.append(value)
            elif sort == ALONE:
                key.append(value)
                choices.append(value)
            elif sort == NUMBER:
                key.append(kind)
                numbers.append(value)
            elif sort == SEVERAL:
                names, items = _several(value)
                held: list[Any] = [names]
                for item in items:
                    if type(item) is Tensor:
                        held.append(item.layout)
                        tensors.append(item)
                    elif item is None:
                        held.append(None)
                    else:
                        held.append(type(item))
                        numbers.append(item)
                key.append(tuple(held))
            else:
                key.append(value)
                device = value
        if device is None:
            device = tensors[0].layout.device
        if device.is_host:
            return None
        executor: Any = current.executor
        if executor is None or executor.device is not device:
            executor = executor_on(device)
        return Flat(tuple(key), tensors, numbers, choices, executor)

    def _flat_names(self, values: tuple[Any, ...]) -> tuple[list[str], list[str]]:
        """The names of the tensors and of the numbers, in their order."""
        tensors, numbers = [], []
        for name, sort, value in zip(self._names, self._sorts, values, strict=True):
            if type(value) is Tensor:
                tensors.append(name)
            elif sort == NUMBER and value is not None:
                numbers.append(name)
            elif sort == SEVERAL and value is not None:
                names, items = _several(value)
                own = [f"{name}[{place}]" for place in range(len(items))] if names is None else names
                for one, item in zip(own, items, strict=True):
                    if item is not None:
                        (tensors if type(item) is Tensor else numbers).append(one)
        return tensors, numbers


def _several(value: Any) -> tuple[tuple[str, ...] | None, Sequence[Any]]:
    """The items of a list, or those of a mapping or of pairs with their names; TypeError for what is none of these."""
    kind = type(value)
    if kind is dict:
        return tuple(value), tuple(value.values())
    if kind is not tuple and kind is not list:
        raise TypeError(f"a {kind.__name__}")
    items = tuple(value)
    if items and type(items[0]) is tuple:
        return tuple([name for name, _ in items]), [item for _, item in items]
    return None, items


# -- what is remembered -----------------------------------------------------------------------------------------------
class Spans(NamedTuple):
    """Where the bytes of operands lie around their addresses, none of them without any."""

    places: tuple[int, ...]
    lows: tuple[int, ...]
    highs: tuple[int, ...]
    written: tuple[bool, ...]


class Course(NamedTuple):
    """What becomes of the operands of a call, by their places: tensors given, outputs made, numbers, and the rest."""

    numbers: tuple[tuple[int, Number], ...]  # those of any value in a range, by their places among the numbers
    held: tuple[int, ...]  # the places of the other numbers
    constants: tuple[Argument, ...]  # the arguments that are the same in each call
    made: tuple[tuple[Any, ...], ...]
    order: tuple[int, ...]  # of the arguments
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    results: tuple[int, ...]
    is_tuple: bool
    pairs: tuple[tuple[int, int, int, int, int | None], ...]
    spans: Spans | None  # instead of pairs


def take_of(
    request: Request, flat: Flat, tensor_names: list[str], number_names: list[str]
) -> Callable[..., Any] | None:
    """`take(executor, tensors, numbers, choices)` for calls like the one that a request was made for and that was run.

    None where each such call needs a request.
    """
    bound, named = request.bound, request.named_arguments()
    if named is None or getattr(bound, "executor", None) is not flat.executor or request.framework is not None:
        return None
    course = _course(request, named, flat, tensor_names, number_names)
    if course is None:
        return None
    held = (*flat.choices, *(flat.numbers[place] for place in course.held))
    if not all(map(is_constant, held)):
        return None
    return _taking(bound.plan, course, held)


def _course(
    request: Request, named: NamedArguments, flat: Flat, tensor_names: list[str], number_names: list[str]
) -> Course | None:
    """None where the names do not lead to what the request itself runs with."""
    uses = request.tensors()
    names = [*tensor_names, *number_names, *request.unallocated()]
    given = dict(zip(tensor_names, map(id, flat.tensors), strict=True))
    if len(set(names)) < len(names) or len(uses) != len(given) or given != {name: id(one) for name, one, _ in uses}:
        return None
    nothing: Any = None  # outputs that are still to be made have addresses here, and no memory
    made = {name: Tensor(nothing, -1 - place, nothing) for place, name in enumerate(request.unallocated())}
    memory = {**dict(zip(tensor_names, flat.tensors, strict=True)), **made}
    places = {name: place for place, name in enumerate(memory)}
    free = [
        (place, named.numbers[name])
        for place, (name, value) in enumerate(zip(number_names, flat.numbers, strict=True))
        if name in named.numbers and name in named.order and type(value) in REAL and named.numbers[name].has(value)
    ]
    behind = {number_names[place]: len(places) + count for count, (place, _) in enumerate(free)}
    constants: list[Argument] = []
    order = []
    for name, argument in zip(named.order, request.arguments(made), strict=True):
        if name in places:
            order.append(places[name])
            wanted: Argument = memory[name].ptr
        elif name in behind:
            order.append(behind[name])
            place, number = free[behind[name] - len(places)]
            wanted = number.argument(flat.numbers[place])
        else:
            order.append(len(places) + len(free) + len(constants))
            constants.append(argument)
            wanted = argument if type(argument) is not int else 0  # an address that is none of the operands'
        if type(argument) is not type(wanted) or argument != wanted:
            return None
    found = request.result(made)
    results = found if isinstance(found, tuple) else (found,)
    written = {id(memory[name]): places[name] for name in (*(use[0] for use in uses if use[2]), *made)}
    if len(written) < len(made) + sum(use[2] for use in uses) or not all(id(one) in written for one in results):
        return None
    pairs, spans = _apart(uses, places, named.in_place)
    return Course(
        numbers=tuple(free),
        held=tuple(place for place, name in enumerate(number_names) if name not in behind),
        constants=tuple(constants),
        made=tuple(request.unallocated().values()),
        order=tuple(order),
        reads=tuple(places[name] for name, _, is_written in uses if not is_written),
        writes=tuple(places[name] for name in (*(use[0] for use in uses if use[2]), *made)),
        results=tuple(written[id(one)] for one in results),
        is_tuple=isinstance(found, tuple),
        pairs=pairs,
        spans=spans,
    )


def _apart(
    uses: Iterable[tuple[str, Tensor, bool]], places: dict[str, int], in_place: frozenset[tuple[str, str]]
) -> tuple[tuple[Any, ...], Spans | None]:
    """The pairs of operands whose memory must be apart, or the spans of all where there are many."""
    sized = [(name, tensor.layout, written) for name, tensor, written in uses if tensor.layout.size]
    pairs = []
    for count, (name, layout, written) in enumerate(sized):
        for other_name, other, other_written in sized[count + 1 :]:
            if written or other_written:
                low, high, one = bounds_of(layout, other)
                one = None if in_place.isdisjoint(((name, other_name), (other_name, name))) else one
                pairs.append((places[name], places[other_name], low, high, one))
    if len(pairs) <= MOST_PAIRS or in_place:
        return tuple(pairs), None
    lines = [(places[name], layout.low, layout.high, written) for name, layout, written in sized]
    return (), Spans(*zip(*lines, strict=True))


def _taking(plan: Any, course: Course, held: tuple[Any, ...]) -> Callable[..., Any]:
    numbers, held_places, constants, made = course.numbers, course.held, course.constants, course.made
    pairs, spans = course.pairs, course.spans
    addresses, reads, writes, results = map(_at, (course.order, course.reads, course.writes, course.results))
    (only, *_), is_tuple = course.results, course.is_tuple

    def take(executor: Any, tensors: list[Tensor], given: list[Any], choices: list[Any]) -> Any:
        nonlocal held
        if held_places:
            choices = [*choices, *[given[place] for place in held_places]]
        if not all(map(is_, held, choices)):
            if not same(held, tuple(choices)):
                return UNFIT
            held = tuple(choices)  # the next call is likely to have these very objects
        arguments: list[Any] = []
        for tensor in tensors:
            if type(tensor.storage) is Adopted:
                return UNFIT
            arguments.append(tensor.ptr)
        for one, other, low, high, view in pairs:
            distance = arguments[other] - arguments[one]
            if low < distance < high and distance != view:
                return UNFIT
        if spans is not None and _meet(arguments, spans):
            return UNFIT
        for place, number in numbers:
            if not number.has(given[place]):
                return UNFIT
        if made:
            for output in made:
                tensor = executor.empty(*output)
                tensors.append(tensor)
                arguments.append(tensor.ptr)
        for place, number in numbers:
            arguments.append(number.argument(given[place]))
        executor.enqueue(plan, addresses([*arguments, *constants]), reads(tensors), writes(tensors))
        return results(tensors) if is_tuple else tensors[only]

    return take


def _at(places: tuple[int, ...]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What gives the items of these places."""
    if len(places) > 1:
        return itemgetter(*places)
    if not places:
        return lambda _: ()
    (place,) = places
    return lambda items: (items[place],)


def _meet(addresses: Sequence[int], spans: Spans) -> bool:
    """Whether the bytes between the ends of one that is written and of another may be the same."""
    here = [addresses[place] for place in spans.places]
    reach = written_reach = -1  # how far those go that begin before
    ends = zip(map(add, here, spans.lows), map(add, here, spans.highs), spans.written, strict=True)
    for low, high, written in sorted(ends):
        if low < (reach if written else written_reach):
            return True
        if high > reach:
            reach = high
        if written:
            written_reach = high
    return False
