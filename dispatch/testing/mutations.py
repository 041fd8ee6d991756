"""Wrong results that an op's cases must reject: how they are held against a check, and those that all ops have.

The `mutations` rooms of the ops make wrong results from a request, in float64; `survivors` rounds each as a library
would, gives it to the case's own check and names those that pass. That needs no GPU: it is about the bounds, and about
operands in which a fault does not show.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.core.precision import FP8_MAX
from dispatch.device.tensor import Tensor
from dispatch.testing.memory import Mismatch, poison

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dispatch.core.host_plan import Formula
    from dispatch.core.request import Operands
    from dispatch.device.layout import Array
    from dispatch.keys import Dtype

    Results = Mapping[str, Array]
    # From a request: the outputs that come out wrong; None where the request has nothing of the kind.
    Mutation = Callable[[Any], Results | None]

__all__ = [
    "Verdict",
    "altered",
    "changed",
    "host_array",
    "lines_out",
    "made",
    "neighbour",
    "of_operand",
    "shared",
    "typical",
    "verdicts",
    "with_fields",
]

FEW = 32  # elements, of which none need be near where its rounding turns


class Verdict(NamedTuple):
    """What became of a mutation; `seen` is None where the result, once rounded, is the right one."""

    mutation: str
    seen: bool | None


def verdicts(
    check: Any,
    named: Callable[[Any, Any], dict[str, Tensor]],
    mutations: Mapping[str, Mutation],
    wanted: Callable[[str], bool] = bool,
) -> Iterator[Verdict]:
    """Whether a check of the host sees each mutation; first, as "none", that it takes the rounded reference.

    `named` gives the outputs of a request by the names of their results; `wanted` says which mutations to try. Where
    the reference is NaN nobody writes, and what was there stays, unless a check says `writes_nan`. One whose
    result is drawn says what may be (`drawn`).
    """
    outputs: Operands = check.request.device.executor().outputs(check.request)
    result = check.request.result(outputs)
    tensors = named(check.request, result)
    drawn = getattr(check, "drawn", None)
    expected = _by_name(check.expected if drawn is None else drawn(np.random.default_rng(0)))
    unwritten = not getattr(check, "writes_nan", False)
    before = {name: (np.isnan(expected[name]) & unwritten, tensor.numpy()) for name, tensor in tensors.items()}
    right = {name: _stored(expected[name], tensor.dtype, *before[name]) for name, tensor in tensors.items()}
    subject = getattr(check, "subject", check.request)
    made_of = ((name, make(subject)) for name, make in mutations.items() if wanted(name))
    allowed = getattr(check, "allowed", {})
    free = {
        name: np.broadcast_to(allowed[name], np.shape(expected[name])) == np.inf
        for name in tensors
        if isinstance(allowed, dict) and np.any(np.asarray(allowed.get(name, 0)) == np.inf)
    }
    of_all = ((name, values) for name, values in shared(expected, tensors, free) if wanted(name))
    for mutation, values in itertools.chain([("none", {})], made_of, of_all):
        if values is None:
            continue
        stored = {
            name: _stored(values[name], tensor.dtype, *before[name]) if name in values else right[name]
            for name, tensor in tensors.items()
        }
        if mutation != "none" and all(_equal(stored[name], right[name]) for name in tensors):
            yield Verdict(mutation, None)
        else:
            yield Verdict(mutation, _rejects(check, result, tensors, stored))
            for name, tensor in tensors.items():  # the next mutation starts from what was there: it may be an operand
                tensor.copy_from(before[name][1])


def _rejects(check: Any, result: Any, tensors: Mapping[str, Tensor], stored: Results) -> bool:
    for name, tensor in tensors.items():
        tensor.copy_from(stored[name])
    try:
        check.verify(result)
    except Mismatch:
        return True
    return False


def _by_name(expected: Any) -> Results:
    """The reference of a check: by name, of one output alone, or of one after the other."""
    if isinstance(expected, list):
        return {f"out[{number}]": values for number, values in enumerate(expected)}
    return {"out": expected} if isinstance(expected, np.ndarray) else dict(expected)


def made(request: Any, result: Any) -> dict[str, Tensor]:
    """The outputs of a request of one cuDNN call by the names of their results."""
    given = list(result) if isinstance(result, tuple) else [result]
    return dict(zip(request.outputs(), given, strict=True))


def altered(evaluate: Formula, request: Any, **fields: Any) -> dict[str, Array]:
    """The outputs of a request with other fields in float64; an array is put into memory that lies as the operand's."""
    others = {n: changed(getattr(request, n), v) if isinstance(v, np.ndarray) else v for n, v in fields.items()}
    with np.errstate(all="ignore"):
        return evaluate(replace(request, **others), EXACT)


def with_fields(formula: Formula, least: int = 0, /, **changes: Callable[[Any], Any]) -> Mutation:
    """The results of requests with other fields, each made from the request.

    None where one is to become None, for there is no such thing, or the first operand has fewer elements than `least`.
    """

    def mutation(request: Any) -> Results | None:
        if getattr(request, request.reads[0]).size < least:
            return None
        fields = {name: change(request) for name, change in changes.items()}
        return None if any(value is None for value in fields.values()) else altered(formula, request, **fields)

    return mutation


def of_operand(evaluate: Formula, name: str, change: Callable[[Array], Array | None]) -> Mutation:
    """The mutation that changes the values of an operand, a copy of which its function gets, where it is there."""

    def mutate(request: Any) -> Results | None:
        tensor = getattr(request, name, None)
        values = change(np.array(tensor)) if isinstance(tensor, Tensor) and tensor.size else None
        return None if values is None else altered(evaluate, request, **{name: values})

    return mutate


def shared(
    expected: Results, tensors: Mapping[str, Tensor], free: Results | None = None
) -> Iterator[tuple[str, Results]]:
    """Of each output: 1% too large, not written, and along each axis one line that is its neighbour's.

    `free` says where an op leaves open what is there, which is no line to be changed.
    """
    for name, tensor in tensors.items():
        values = np.asarray(expected[name])
        if not values.size:
            continue
        if tensor.dtype.numpy.kind not in "iu":
            few = values.size < FEW
            yield f"{name} {'twice too' if few else '1% too'} large", {name: values * (2.0 if few else 1.01)}
        yield f"{name} not written", {name: poison(tensor.dtype, values.shape)}
        for axis, extent in enumerate(values.shape):
            if extent > 1:
                nobodys = None if free is None or name not in free else np.moveaxis(free[name], axis, 0)
                wrong = _one_line(np.moveaxis(values, axis, 0), nobodys)
                yield (
                    f"{name}: a line of axis {axis - values.ndim} is its neighbour's",
                    {name: np.moveaxis(wrong, 0, axis)},
                )


def _one_line(lines: Array, nobodys: Array | None) -> Array:
    """The lines with one that is like the next: a typical one of those that are not free, for two may be alike."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(np.diff(lines.astype(np.result_type(lines, np.float64)), axis=0))
    apart[np.isnan(apart)] = 0
    sizes = apart.reshape(len(lines) - 1, -1).max(axis=1, initial=0)
    if nobodys is not None and not nobodys.all():
        theirs = np.flatnonzero(~nobodys[:-1].reshape(len(sizes), -1).all(axis=1))
        line = theirs[typical(sizes[theirs])] if len(theirs) else 0
    else:
        line = typical(sizes)
    wrong = lines.copy()
    wrong[line] = lines[line + 1]
    return np.asarray(wrong)


def typical(sizes: Array) -> int:
    """The place of the median: neither the largest nor one that is next to nothing."""
    return int(np.argsort(sizes, kind="stable")[len(sizes) // 2])


def host_array(like: Tensor, values: Array) -> Tensor:
    """Values in the dtype and on the device of an operand."""
    return like.device.array(np.ascontiguousarray(values).astype(like.dtype.numpy))


# -- operands that are changed ------------------------------------------------------------------------------------
def changed(tensor: Tensor, values: Array) -> Tensor:
    """Other values in memory of the same layout."""
    steps = tensor.layout.strides
    low = sum((e - 1) * min(s, 0) for e, s in zip(tensor.shape, steps, strict=True)) if tensor.size else 0
    high = sum((e - 1) * max(s, 0) for e, s in zip(tensor.shape, steps, strict=True)) if tensor.size else 0
    start = -low * tensor.dtype.itemsize
    whole = tensor.device.zeros((high - low + 1,), tensor.dtype)
    layout = tensor.device.layout(tensor.dtype, tensor.shape, steps, whole.ptr + start)
    view = Tensor(whole.storage, whole.ptr + start, layout)
    view.copy_from(np.ascontiguousarray(values).astype(tensor.dtype.numpy))
    return view


def lines_out(tensor: Tensor, axis: int) -> Array:
    """The values of an operand with one line of an axis left out, a typical one."""
    values = np.moveaxis(np.asarray(tensor).copy(), axis, 0)
    sizes = np.abs(values.astype(np.float64)).reshape(len(values), -1).sum(axis=1)
    values[typical(sizes)] = 0
    return np.moveaxis(values, 0, axis)


def neighbour(tensor: Tensor, axis: int) -> Array:
    """The values of an operand, each one that of its neighbour along an axis."""
    return np.roll(np.asarray(tensor), 1, axis=axis)


def rounded(values: Array, dtype: Dtype) -> Array:
    """Values as an output holds them: to nearest, within the range of fp8 and of whole numbers."""
    values = np.asarray(values)
    if values.dtype == dtype.numpy:
        return values
    if dtype in FP8_MAX:
        values = np.where(np.isnan(values), values, np.clip(values, -FP8_MAX[dtype], FP8_MAX[dtype]))
    elif dtype.numpy.kind in "iu":
        limits = np.iinfo(dtype.numpy)
        values = np.clip(np.rint(values), limits.min, limits.max)
    with np.errstate(all="ignore"):
        return np.asarray(values.astype(dtype.numpy))


def _stored(values: Array, dtype: Dtype, unwritten: Array, before: Array) -> Array:
    stored = rounded(values, dtype).reshape(before.shape)
    nobodys = unwritten.reshape(before.shape)
    return np.where(nobodys, before, stored) if nobodys.any() and not nobodys.all() else stored


def _equal(one: Array, other: Array) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())
