"""Code generation for list_call_cache.py: the fast path of calls whose operands are one flat list.

`lookup_of` makes the functions that look up a call's `fast_call`, for one pattern of operands; `make_fast_call` makes
it for one plan. Operands are named by position: x0, x1, and so on. This module knows no op, and keeps no tensors and no
requests.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import starmap
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

from dispatch.core.call_cache import (
    CACHE_MISS,
    MAX_FORMS,
    Pair,
    executor_on,
    is_same_choice,
    overlap_condition,
    tuple_code,
    unpacking_line,
)
from dispatch.device.frameworks.framework import ForeignStorage
from dispatch.device.stream import current

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.device.frameworks.framework import Framework

__all__ = ["CallBinding", "CallLookup", "ListCallForm", "Pattern", "Spans", "lookup_of", "make_fast_call"]

ALIGNED = 255  # the bits of an address that count for a layout's alignment
# The kinds of a position; "own" is a tensor of ours, "theirs" an array of another library.
OWN, THEIRS, NUMBER, CHOICE, DEVICE = "own", "theirs", "number", "choice", "device"


class Pattern(NamedTuple):
    """The kind of each position of a call (None if empty), and the library of the "theirs" positions, if any."""

    holds: tuple[str | None, ...]
    framework: Framework | None

    def places(self, *kinds: str) -> tuple[int, ...]:
        return tuple(place for place, kind in enumerate(self.holds) if kind in kinds)


class CallLookup(NamedTuple):
    """The generated functions of one pattern; both take the values at all positions."""

    pattern: Pattern
    run: Callable[..., Any]  # makes the call and returns its result, or CACHE_MISS
    key: Callable[..., tuple[Any, Any]]  # the executor that may cache the call, or None, and the key in its cache


class Spans(NamedTuple):
    """The ranges of bytes of operands, relative to their addresses; operands without elements have none."""

    lows: tuple[int, ...]
    highs: tuple[int, ...]
    written: tuple[bool, ...]


class ListCallForm(NamedTuple):
    """How a call uses the value at each position; calls of one form share their generated code.

    Arguments are named `_at_x0` for the address of an operand, `_at_made_0` for that of an output that is allocated,
    `_number_0` for a number, and `_argument_0` for a constant of all calls; results are named `x0` and `made_0`.
    """

    pattern: Pattern
    unchanged: tuple[int, ...]  # the positions of values that must be the same as when the call was cached
    numbers: tuple[tuple[int, bool], ...]  # positions of numbers that may have any value in a range; whether as ints
    allocated: int  # the number of outputs that are allocated
    arguments: tuple[str, ...]
    constants: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    results: tuple[str, ...]
    is_tuple: bool
    pairs: tuple[Pair, ...]
    spans: tuple[str, ...]  # instead of `pairs` if there are many operands: all addresses
    sized: tuple[int, ...]  # the positions of another library's operands that have elements, and so memory
    unusual: tuple[str, ...]  # conditions, as code, under which memory does not hold the elements


class CallBinding(NamedTuple):
    """A form, and the values that belong to the calls of one plan."""

    form: ListCallForm
    unchanged: tuple[Any, ...]
    ranges: tuple[tuple[float, float], ...]
    allocated: tuple[Any, ...]  # (shape, strides, dtype), or the function of the operands' library that allocates it
    constants: tuple[Any, ...]
    bounds: tuple[tuple[int, int, int | None], ...]
    spans: Spans | None


# -- from operands to a key -------------------------------------------------------------------------------------------
def lookup_of(pattern: Pattern) -> CallLookup:
    """The functions that look up a call of this pattern; a tag in each key distinguishes patterns."""
    own_positions, their_positions = pattern.places(OWN), pattern.places(THEIRS)
    scope: dict[str, Any] = {
        "_current": current,
        "_executor_on": executor_on,
        "_CACHE_MISS": CACHE_MISS,
        "_tag": object(),
    }
    if pattern.framework is None:
        home = [f"x{place}" for place in pattern.places(DEVICE)] or [
            f"x{place}.layout.device" for place in own_positions
        ]
        lines = [
            f"_device = {home[0]}",
            "if _device.is_host:",  # its plans need requests
            "    return {none}",
            "_executor = _current.executor",
            "if _executor is None or _executor.device is not _device:",
            "    _executor = _executor_on(_device)",
        ]
    else:
        code: Any = pattern.framework.code
        scope |= code.scope
        lines = [
            f"_ordinal = {code.ordinal.format(x=f'x{their_positions[0]}')}",
            f"_executor = None if _ordinal < 0 else _current.by_handle.get((_ordinal, {code.handle}))",
            "if _executor is None:",
            "    return {none}",
        ]
    parts = ["_tag"]
    for place, kind in enumerate(pattern.holds):
        if kind == OWN:
            lines += [f"_at_x{place} = x{place}.ptr"]
            parts += [f"x{place}.layout"]
        elif kind == THEIRS:
            lines += [f"_at_x{place} = {code.pointer.format(x=f'x{place}')}"]
            parts += [f"{code.layout.format(x=f'x{place}')}, _at_x{place} & {ALIGNED}"]
        elif kind in (CHOICE, DEVICE):
            parts += [f"x{place}"]
    lines += [f"_key = {tuple_code(parts)}"]
    parameters = [f"x{place}" for place in range(len(pattern.holds))]
    source = [
        f"def run({', '.join(parameters)}):",
        "    try:",
        *(f"        {line.format(none='_CACHE_MISS')}" for line in lines),
        "        _fast_call = _executor.calls.get(_key)",
        "    except Exception:",  # the request explains it
        "        return _CACHE_MISS",
        f"    return _CACHE_MISS if _fast_call is None else _fast_call({', '.join(_passed(pattern))})",
        f"def key({', '.join(parameters)}):",
        *(f"    {line.format(none='None, None')}" for line in lines),
        "    return _executor, _key",
    ]
    exec("\n".join(source), scope)
    return CallLookup(pattern, scope["run"], scope["key"])


def _passed(pattern: Pattern) -> list[str]:
    """The parameters of a `fast_call`: the executor, the value at each position that is used, and the addresses."""
    there = [f"x{place}" for place in pattern.places(OWN, THEIRS, NUMBER, CHOICE)]
    return ["_executor", *there, *(f"_at_x{place}" for place in pattern.places(OWN, THEIRS))]


# -- from a key to a plan ---------------------------------------------------------------------------------------------
def make_fast_call(plan: Any, binding: CallBinding) -> Callable[..., Any]:
    """The `fast_call` of a plan: enqueues it on a call's operands, or returns CACHE_MISS if a request is needed."""
    lows, highs, ones = zip(*binding.bounds, strict=True) if binding.bounds else ((), (), ())
    least, most = zip(*binding.ranges, strict=True) if binding.ranges else ((), ())
    make = _maker(binding.form)
    return make(
        plan, binding.unchanged, least, most, binding.allocated, binding.constants, lows, highs, ones, binding.spans
    )


@lru_cache(MAX_FORMS)
def _maker(form: ListCallForm) -> Callable[..., Callable[..., Any]]:
    pattern, framework = form.pattern, form.pattern.framework
    held = [f"_held_{place}" for place in form.unchanged]
    current = [f"x{place}" for place in form.unchanged]
    lines = []
    if held:
        lines += [
            f"nonlocal {', '.join(held)}",
            f"if not ({' and '.join(f'{one} is {other}' for one, other in zip(current, held, strict=True))}):",
            f"    if not _same({tuple_code(held)}, {tuple_code(current)}):",
            "        return _CACHE_MISS",
            f"    {', '.join(held)}, = {', '.join(current)},",  # the next call is likely to have these objects
        ]
    scope: dict[str, Any] = {
        "_CACHE_MISS": CACHE_MISS,
        "_ForeignStorage": ForeignStorage,
        "_same": is_same_choice,
        "_meet": _meet,
    }
    conditions = [f"not (_least_{place} <= x{place} <= _most_{place})" for place, _ in form.numbers]
    conditions += starmap(overlap_condition, enumerate(form.pairs))
    if form.spans:
        conditions += [f"_meet({tuple_code(form.spans)}, _spans)"]
    if framework is None:
        conditions[:0] = [f"x{place}.storage.__class__ is _ForeignStorage" for place in pattern.places(OWN)]
    else:
        lines += ["_stream = _executor.stream"] if pattern.places(OWN) else []
        conditions[:0] = _conditions_of_theirs(form, scope)
    if conditions:
        lines += [f"if {' or '.join(conditions)}:", "    return _CACHE_MISS"]
    lines += _made(form)
    lines += [f"_number_{place} = x{place}" if is_whole else f"_number_{place} = float(x{place}) + 0.0"
              for place, is_whole in form.numbers]  # fmt: skip
    if framework is None:
        used = f"{tuple_code(form.reads)}, {tuple_code(form.writes)}"
        lines += [f"_executor.enqueue(_plan, {tuple_code(form.arguments)}, {used})"]
    else:
        lines += [f"_executor.enqueue_at(_plan, {tuple_code(form.arguments)})"]
        lines += [f"_written({name})" for name in form.writes if name.startswith("x")]
    lines += [f"return {tuple_code(form.results) if form.is_tuple else form.results[0]}"]
    numbers = [place for place, _ in form.numbers]
    unpacked = [
        *unpacking_line("_held", form.unchanged, "_choices"),
        *unpacking_line("_least", numbers, "_leasts"),
        *unpacking_line("_most", numbers, "_mosts"),
        *unpacking_line("_make", range(form.allocated), "_outputs"),
        *unpacking_line("_argument", range(form.constants), "_constants"),
        *(
            line
            for end in ("low", "high", "one")
            for line in unpacking_line(f"_{end}", range(len(form.pairs)), f"_{end}s")
        ),
    ]
    source = [
        "def make(_plan, _choices, _leasts, _mosts, _outputs, _constants, _lows, _highs, _ones, _spans):",
        *(f"    {line}" for line in unpacked),
        f"    def fast_call({', '.join(_passed(pattern))}):",
        *(f"        {line}" for line in lines),
        "    return fast_call",
    ]
    exec("\n".join(source), scope)
    make: Callable[..., Callable[..., Any]] = scope["make"]
    return make


def _conditions_of_theirs(form: ListCallForm, scope: dict[str, Any]) -> list[str]:
    """The conditions under which a call needs more than the order of another library's stream and allocator."""
    pattern: Any = form.pattern
    code = pattern.framework.code
    scope |= {**code.scope, "_written": pattern.framework.written, "_framework": pattern.framework}
    arrays = [f"x{place}" for place in pattern.places(THEIRS)]
    conditions = [f"({code.watching} and ({' or '.join(code.watched.format(x=name) for name in arrays)}))"]
    if form.sized:
        conditions += [f"not ({' and '.join(f'_at_x{place}' for place in form.sized)})"]
    for place in pattern.places(OWN):  # only read, used on this stream before, and not of a third library
        storage = f"x{place}.storage"
        conditions += [f"({storage}.owner is not _stream and _stream not in {storage}.readers)"]
        conditions += [f"({storage}.__class__ is _ForeignStorage and {storage}.framework is not _framework)"]
    return [*conditions, *form.unusual]


def _made(form: ListCallForm) -> list[str]:
    """The lines that allocate the outputs that were not given."""
    lines = []
    framework: Any = form.pattern.framework
    pointer = "{x}.ptr" if framework is None else framework.code.pointer
    for number in range(form.allocated):
        allocation = f"_executor.empty(*_make_{number})" if framework is None else f"_make_{number}()"
        lines += [f"made_{number} = {allocation}", f"_at_made_{number} = {pointer.format(x=f'made_{number}')}"]
    if form.allocated and framework is not None:  # plans rely on the alignment of memory from our own allocator
        all_addresses = " | ".join(f"_at_made_{number}" for number in range(form.allocated))
        lines += [f"if ({all_addresses}) & {ALIGNED}:", "    return _CACHE_MISS"]
    return lines


def _meet(addresses: Sequence[int], spans: Spans) -> bool:
    """Whether the bytes of an operand that is written overlap those of another operand."""
    reach = written_reach = -1  # the ends of the earlier ranges: of all, and of the written ones
    ends = zip(map(add, addresses, spans.lows), map(add, addresses, spans.highs), spans.written, strict=True)
    for low, high, written in sorted(ends):
        if low < (reach if written else written_reach):
            return True
        if high > reach:
            reach = high
        if written:
            written_reach = high
    return False
