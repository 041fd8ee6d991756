"""The fast path of `call(a=other)`: a prepared call over other operands, without making a request.

If each new operand has the layout of the one that it replaces, and no operand that is written overlaps another, the
call differs from the prepared one only in addresses. As in call_cache.py, a generated function `fast_call` runs it, or
returns CACHE_MISS if a request is needed. The new operands are its parameters; it keeps the others.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import starmap
from keyword import iskeyword
from typing import TYPE_CHECKING, Any, NamedTuple

from dispatch.core.call_cache import (
    CACHE_MISS,
    MAX_FORMS,
    Pair,
    overlap_bounds,
    overlap_condition,
    overlap_pairs,
    tuple_code,
    unpacking_line,
)
from dispatch.device.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Argument, Plan, Request

__all__ = ["fast_call_of"]


class PreparedCallForm(NamedTuple):
    """The new operands of a call and how all operands are used; calls of one form share their generated code.

    The other operands have separate names here, because their names in the request need not be Python identifiers.
    """

    passed: tuple[str, ...]
    kept: tuple[str, ...]
    addresses: tuple[str | None, ...]  # None for an argument that does not change
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    results: tuple[str, ...]
    is_tuple: bool
    pairs: tuple[Pair, ...]  # those with at least one new operand


def fast_call_of(
    request: Request, plan: Plan, arguments: tuple[Argument, ...], result: Any, given: tuple[str, ...]
) -> Callable[..., Any] | None:
    """`fast_call(executor, **operands)` for operands of these names; None if every such call needs a request.

    The request has all its outputs; `arguments` and `result` are those of running the request itself.
    """
    uses = request.tensors()
    tensors = {name: tensor for name, tensor, _ in uses}
    addresses = request.addresses()
    if addresses is None and (named := request.named_arguments()) is not None:
        addresses = tuple(name if name in tensors else None for name in named.order)
    if len(tensors) < len(uses) or not all(map(_is_word, given)):
        return None
    if addresses is None or not tensors.keys() & set(addresses) >= set(given):
        return None
    results = result if isinstance(result, tuple) else (result,)
    written = {id(tensor): name for name, tensor, is_written in uses if is_written}
    if not all(id(tensor) in written for tensor in results) or len(written) < sum(use[2] for use in uses):
        return None
    names = {name: name if name in given else f"_operand_{place}" for place, name in enumerate(tensors)}
    pairs = [pair for pair in overlap_pairs(request) if not {*pair[:2]}.isdisjoint(given)]
    stay = [name for name in tensors if name not in given]
    form = PreparedCallForm(
        passed=given,
        kept=tuple(names[name] for name in stay),
        addresses=tuple(names[name] if name in given else None for name in addresses),
        reads=tuple(names[name] for name, _, is_written in uses if not is_written),
        writes=tuple(names[name] for name, _, is_written in uses if is_written),
        results=tuple(names[written[id(tensor)]] for tensor in results),
        is_tuple=isinstance(result, tuple),
        pairs=tuple((names[one], names[other], in_place) for one, other, in_place in pairs),
    )
    layouts = [tensors[name].layout for name in given]
    kept_tensors = [tensors[name] for name in stay]
    bounds = [overlap_bounds(tensors[one].layout, tensors[other].layout) for one, other, _ in pairs]
    return _maker(form)(plan, arguments, layouts, kept_tensors, *zip(*bounds, strict=True))


def _is_word(name: str) -> bool:
    """Whether the name can be a parameter of the generated code: not "a[0]", and not "_…", which the code uses."""
    return name.isidentifier() and not iskeyword(name) and not name.startswith("_")


@lru_cache(MAX_FORMS)
def _maker(form: PreparedCallForm) -> Callable[..., Callable[..., Any]]:
    """The compiled function that makes a plan's `fast_call` with the operands that it keeps; one for each form."""
    misfits = [f"_type({name}) is not _Tensor or {name}.layout is not _layout_{name}" for name in form.passed]
    places = range(len(form.addresses))
    addresses = [f"_argument_{n}" if name is None else f"_at_{name}" for n, name in enumerate(form.addresses)]
    lines = [
        *unpacking_line("_argument", places, "_arguments"),
        *unpacking_line("_layout", form.passed, "_layouts"),
        f"[{', '.join(form.kept)}] = _stay",
        *(f"_at_{name} = {name}.ptr" for name in form.kept),
        *(
            line
            for end in ("low", "high", "one")
            for line in unpacking_line(f"_{end}", range(len(form.pairs)), f"_{end}s")
        ),
        f"def fast_call(_executor, {', '.join(form.passed)}):",
        f"    if {' or '.join(misfits)}:",
        "        return _CACHE_MISS",
        *(f"    _at_{name} = {name}.ptr" for name in form.passed),
        f"    if {' or '.join(starmap(overlap_condition, enumerate(form.pairs))) or False}:",
        "        return _CACHE_MISS",
        f"    _executor.enqueue(_plan, ({', '.join(addresses)},), {tuple_code(form.reads)}, {tuple_code(form.writes)})",
        f"    return {tuple_code(form.results) if form.is_tuple else form.results[0]}",
        "return fast_call",
    ]
    head = "def make(_plan, _arguments, _layouts, _stay, _lows=(), _highs=(), _ones=()):"
    scope: dict[str, Any] = {"_Tensor": Tensor, "_type": type, "_CACHE_MISS": CACHE_MISS}
    exec("\n    ".join([head, *lines]), scope)
    make: Callable[..., Callable[..., Any]] = scope["make"]
    return make
