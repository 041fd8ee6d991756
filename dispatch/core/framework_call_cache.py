"""The fast path of repeated calls over arrays of another library, torch or CuPy: from its tensors to the plan.

As in call_cache.py, a repeated call finds its plan without a request; here it makes no tensors of ours either. The
other library manages memory, its lifetime and the order of its uses, as in its own functions: all operands are its
arrays, the call runs on its current stream, and outputs come from its allocator on that stream. So no use of an operand
is recorded. All other calls go through a request: those with an operand of a third library, on a stream that its
library may destroy, or with an invalid operand.

A `CallLookup` serves all calls of a request class over one library's tensors: it reads everything that a layout depends
on from each operand, and looks up the `fast_call` of a plan by these values. Both are generated from the expressions in
the library's `Code`; this module knows no library and no op. `FunctionCallCache` does the same for a function that
makes views of its operands and a request over these views.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from functools import lru_cache
from itertools import starmap
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from dispatch.core.call_cache import (
    CACHE_MISS,
    MAX_CALLS,
    MAX_FORMS,
    Pair,
    fields_of,
    is_constant,
    is_same_choice,
    overlap_bounds,
    overlap_condition,
    overlap_pairs,
    tuple_code,
    unpacking_line,
)
from dispatch.device.layout import c_strides
from dispatch.device.stream import current

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dispatch.core.request import Request
    from dispatch.device.frameworks.framework import Code, Framework

__all__ = ["CACHE_MISS", "FrameworkCallCache", "FunctionCallCache", "learn", "memory_of"]

ALIGNED = 255  # the bits of an address that count for a layout's alignment


class CallLookup(NamedTuple):
    """The generated functions of a class over one library's operands; both get all operands, then all choices."""

    run: Callable[..., Any]  # makes the call and returns its result, or CACHE_MISS
    key: Callable[..., tuple[Any, Any]]  # the executor that may cache the call, or None, and the key in its cache


class FrameworkCallCache(dict[type, Any]):
    """The `run` of each CallLookup of one request class, by the type of `first`, an operand that every call has."""

    def __init__(self, kind: Any, first: str) -> None:
        self.kind, self.first = kind, first
        self.lookups: dict[str, CallLookup] = {}  # by the name of the library

    def of(self, framework: Framework, code: Code) -> CallLookup:
        lookup = self.lookups.get(framework.name)
        if lookup is None:
            operands, choices = fields_of(self.kind)
            needed = {field.name for field in fields(self.kind) if field.default is MISSING}
            lookup = self.lookups[framework.name] = _lookup(self.kind, self.first, operands, needed, choices, code)
            self.update(dict.fromkeys(code.kinds, lookup.run))
        return lookup


def learn(
    cache: FrameworkCallCache, request: Request[Any], operands: tuple[Any, ...], choices: tuple[Any, ...]
) -> None:
    """Cache a call that went through a request, if the request represents all calls of its layouts and choices.

    `operands` and `choices` are those of the call, in the order of the class's fields.
    """
    memory = _memory_of(request, operands, choices)
    if memory is None:
        return
    key = cache.of(request.framework, request.framework.code).key(*operands, *choices)[1]
    fast_call = _fast_call(request, *fields_of(type(request)), choices, {}, {})
    if fast_call is not None:
        _keep(memory, key, fast_call)


def memory_of(request: Request[Any], operands: Sequence[Any]) -> dict[Any, Callable[..., Any]] | None:
    """The executor's call cache, if the executor can be looked up by its stream handle; None if it cannot.

    Another thread may change the table at any time; the executor then has a new cache, and this one is not read again.
    """
    framework, bound = request.framework, request.bound
    code = None if framework is None else framework.code
    executor: Any = getattr(bound, "executor", None)
    if code is None or executor is None:
        return None
    memory: dict[Any, Callable[..., Any]] = executor.calls
    if executor.plans is not bound.plans or not all(one is None or type(one) in code.kinds for one in operands):
        return None
    device = request.device
    handle = framework.lasting(device)
    if handle is None or handle != (executor.stream.c_handle.value or 0):
        return None
    current.by_handle[device.ordinal, handle] = executor
    return memory


def _memory_of(
    request: Request[Any], operands: tuple[Any, ...], choices: tuple[Any, ...]
) -> dict[Any, Callable[..., Any]] | None:
    """`memory_of`, for a request whose arguments are addresses and whose choices cannot change."""
    if request.addresses() is None or not all(map(is_constant, choices)):
        return None
    return memory_of(request, operands)


def _keep(memory: dict[Any, Callable[..., Any]], key: Any, fast_call: Callable[..., Any]) -> None:
    if len(memory) >= MAX_CALLS:
        memory.pop(next(iter(memory)), None)
    memory[key] = fast_call


def _never(*_: Any) -> Any:
    """The `fast_call` of a call that cannot be repeated in this way."""
    return CACHE_MISS


class FunctionCallCache:
    """The fast path of a function over one library's tensors that makes one request over views of its operands.

    `run` takes the function's operands and then its choices, and returns the function's result or CACHE_MISS. After a
    CACHE_MISS the function makes the request, runs it, and calls `learn` if the call is not `known`.
    """

    def __init__(self, operands: Sequence[str], choices: Sequence[str], optional: Sequence[str] = ()) -> None:
        self.operands, self.choices = tuple(operands), tuple(choices)
        self._needed = set(operands) - set(optional)
        self._lookup: CallLookup | None = None
        self.run: Callable[..., Any] = _never

    def known(self, *given: Any) -> bool:
        """Whether a call of these layouts and choices is cached, or cached as not repeatable."""
        if self._lookup is None:
            return False
        executor, key = self._lookup.key(*given)
        try:
            return executor is not None and key in executor.calls
        except TypeError:  # a choice without a hash
            return False

    def learn(
        self,
        request: Request[Any],
        views: Mapping[str, str],
        operands: tuple[Any, ...],
        choices: tuple[Any, ...],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        """Cache a call that made this request and ran it.

        `views` maps each operand of the request to the operand of the function that it is a view of. `shapes` has the
        shapes in which the function returns outputs that the request allocates; these are dense, with other shapes.
        """
        memory = _memory_of(request, operands, choices)
        if memory is None:
            return
        if self._lookup is None:
            code = request.framework.code
            self._lookup = _lookup(self, self.operands[0], self.operands, self._needed, self.choices, code)
            self.run = self._lookup.run
        named, adopted = dict(zip(self.operands, operands, strict=True)), request.framework.tensor
        same_memory = all(tensor.ptr == adopted(name, named[views[name]]).ptr for name, tensor, _ in request.tensors())
        fast_call = _fast_call(request, self.operands, self.choices, choices, views, shapes) if same_memory else None
        _keep(memory, self._lookup.key(*operands, *choices)[1], _never if fast_call is None else fast_call)


# -- from operands to a key -------------------------------------------------------------------------------------------
def _lookup(
    tag: Any, first: str, operands: tuple[str, ...], needed: set[str], choices: tuple[str, ...], code: Code
) -> CallLookup:
    lines = [
        f"_ordinal = {code.ordinal.format(x=first)}",
        f"_executor = None if _ordinal < 0 else _current.by_handle.get((_ordinal, {code.handle}))",
        "if _executor is None:",
        "    return {none}",
    ]
    layouts = []
    for name in operands:
        pointer, layout = f"_at_{name} = {code.pointer.format(x=name)}", code.layout.format(x=name)
        if name in needed:  # a nested tuple in the key would cost 0.1 us more
            lines += [pointer]
            layouts += [f"{layout}, _at_{name} & {ALIGNED}"]
        else:
            lines += [
                f"if {name} is None:",
                f"    _at_{name} = _layout_{name} = None",
                "else:",
                f"    {pointer}",
                f"    _layout_{name} = ({layout}, _at_{name} & {ALIGNED})",
            ]
            layouts += [f"_layout_{name}"]
    lines += [f"_key = (_tag, {', '.join((*layouts, *choices))})"]
    arguments = (*operands, *(f"_at_{name}" for name in operands), *choices)
    source = [
        f"def run({', '.join((*operands, *choices))}):",
        "    try:",
        *(f"        {line.format(none='_CACHE_MISS')}" for line in lines),
        "        _fast_call = _executor.calls.get(_key)",
        "    except Exception:",  # the request explains it
        "        return _CACHE_MISS",
        f"    return _CACHE_MISS if _fast_call is None else _fast_call(_executor, {', '.join(arguments)})",
        f"def key({', '.join((*operands, *choices))}):",
        *(f"    {line.format(none='None, None')}" for line in lines),
        "    return _executor, _key",
    ]
    scope: dict[str, Any] = {"_current": current, "_tag": tag, "_CACHE_MISS": CACHE_MISS, **code.scope}
    exec("\n".join(source), scope)
    return CallLookup(scope["run"], scope["key"])


# -- from a key to a plan ---------------------------------------------------------------------------------------------
class FrameworkCallForm(NamedTuple):
    """The operands that a call has and how each is used; calls of one form share their generated code."""

    framework: Framework
    operands: tuple[str, ...]  # all possible operands, in order
    choices: tuple[str, ...]
    passed: tuple[str, ...]
    written: tuple[str, ...]  # those of `passed` that are written
    allocated: tuple[str, ...]  # the outputs that are allocated
    addresses: tuple[str | None, ...]  # None for an argument that is the same in every call
    results: tuple[str, ...]
    is_tuple: bool
    pairs: tuple[Pair, ...]
    sized: tuple[str, ...]  # those of `passed` that have elements, and so memory
    unusual: tuple[str, ...]  # conditions, as code, under which memory does not hold the elements (conjugated views)


def _fast_call(
    request: Request[Any],
    operands: tuple[str, ...],
    choices: tuple[str, ...],
    values: tuple[Any, ...],
    views: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
) -> Callable[..., Any] | None:
    """The `fast_call` of a request's plan for these operands and choices; None if calls may differ in more."""
    framework, device = request.framework, request.device
    uses = {views.get(name, name): (tensor, written) for name, tensor, written in request.tensors()}
    outputs = dict(request.unallocated())
    for name, shape in shapes.items():
        outputs[name] = (shape, c_strides(shape), outputs[name][2])
    makers = [framework.maker(device, *output) for output in outputs.values()]
    if None in makers or not uses.keys() <= set(operands):
        return None
    stand_ins: dict[str, Any] = {name: SimpleNamespace(ptr=0) for name in outputs}
    result = request.result(stand_ins)
    results = result if isinstance(result, tuple) else (result,)
    names = {id(tensor): name for name, (tensor, _) in uses.items()}
    names |= {id(tensor): name for name, tensor in stand_ins.items()}
    if not all(id(one) in names for one in results) or len(names) < len(request.tensors()) + len(outputs):
        return None  # one tensor is given twice: the next call may have two different ones
    guards = {name: framework.guard(tensor.dtype) for name, (tensor, _) in uses.items()}
    places = [views.get(name, name) if name is not None else None for name in request.addresses() or ()]
    pairs = [
        (views.get(one, one), views.get(other, other), in_place) for one, other, in_place in overlap_pairs(request)
    ]
    form = FrameworkCallForm(
        framework=framework,
        operands=operands,
        choices=choices,
        passed=tuple(uses),
        written=tuple(name for name, (_, written) in uses.items() if written),
        allocated=tuple(outputs),
        addresses=tuple(name if name in uses or name in outputs else None for name in places),
        results=tuple(names[id(one)] for one in results),
        is_tuple=isinstance(result, tuple),
        pairs=tuple(pairs),
        sized=tuple(name for name, (tensor, _) in uses.items() if tensor.layout.size),
        unusual=tuple(guard.format(x=name) for name, guard in guards.items() if guard),
    )
    bounds = [overlap_bounds(uses[one][0].layout, uses[other][0].layout) for one, other, _ in form.pairs]
    arguments = request.arguments(stand_ins)
    return _maker(form)(request.bound.plan, values, arguments, makers, *zip(*bounds, strict=True))


@lru_cache(MAX_FORMS)
def _maker(form: FrameworkCallForm) -> Callable[..., Callable[..., Any]]:
    """The compiled function that makes a plan's `fast_call`; one for each form."""
    code: Any = form.framework.code
    operands, outputs = form.passed, form.allocated
    watched = " or ".join(code.watched.format(x=name) for name in operands)
    conditions = [
        *(f"_type({name}) not in _kinds" for name in operands),
        f"({code.watching} and ({watched}))",
        *([f"not ({' and '.join(f'_at_{name}' for name in form.sized)})"] if form.sized else []),
        *form.unusual,
        *starmap(overlap_condition, enumerate(form.pairs)),
    ]
    held = [f"_held_{name}" for name in form.choices]
    lines = []
    if held:
        lines = [
            f"nonlocal {', '.join(held)}",
            f"if not ({' and '.join(f'{name} is _held_{name}' for name in form.choices)}):",
            f"    if not _same(({', '.join(held)},), ({', '.join(form.choices)},)):",
            "        return _CACHE_MISS",
            f"    {', '.join(held)}, = {', '.join(form.choices)},",
        ]
    lines += [f"if {' or '.join(conditions)}:", "    return _CACHE_MISS"]
    for name in outputs:
        lines += [f"{name} = _make_{name}()", f"_at_{name} = {code.pointer.format(x=name)}"]
    if outputs:  # plans rely on the alignment of memory from our own allocator
        lines += [f"if ({' | '.join(f'_at_{name}' for name in outputs)}) & {ALIGNED}:", "    return _CACHE_MISS"]
    places = [f"_argument_{n}" if name is None else f"_at_{name}" for n, name in enumerate(form.addresses)]
    lines += [f"_executor.enqueue_at(_plan, {tuple_code(places)})", *(f"_written({name})" for name in form.written)]
    lines += [f"return {tuple_code(form.results) if form.is_tuple else form.results[0]}"]
    parameters = (*form.operands, *(f"_at_{name}" for name in form.operands), *form.choices)
    source = [
        "def make(_plan, _choices, _arguments, _makers, _lows=(), _highs=(), _ones=()):",
        *(f"    {line}" for line in unpacking_line("_held", form.choices, "_choices")),
        *(f"    {line}" for line in unpacking_line("_argument", range(len(form.addresses)), "_arguments")),
        *(f"    {line}" for line in unpacking_line("_make", outputs, "_makers")),
        *(
            f"    {line}"
            for end in ("low", "high", "one")
            for line in unpacking_line(f"_{end}", range(len(form.pairs)), f"_{end}s")
        ),
        f"    def fast_call(_executor, {', '.join(parameters)}):",
        *(f"        {line}" for line in lines),
        "    return fast_call",
    ]
    scope: dict[str, Any] = {
        "_CACHE_MISS": CACHE_MISS,
        "_kinds": code.kinds,
        "_same": is_same_choice,
        "_type": type,
        "_written": form.framework.written,
    }
    scope |= code.scope
    exec("\n".join(source), scope)
    maker: Callable[..., Callable[..., Any]] = scope["make"]
    return maker
