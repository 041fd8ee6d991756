"""Wrong results that the cases of an op must reject: the comparison with a check, and the mutations for all ops.

The `mutations` modules of the ops make wrong results from a request, in float64; `verdicts` rounds each as a library
would, and runs the case's own check on it. That needs no GPU: it tests the bounds, and finds operands that do not
reveal a fault.
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
    # From a request to the wrong outputs by name; None if the mutation does not apply to the request.
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
    "other_alpha",
    "other_beta",
    "shared",
    "typical",
    "verdicts",
    "with_fields",
]

FEW = 32  # elements; with fewer, perhaps none is close enough to a rounding boundary for 1% to show


class Verdict(NamedTuple):
    """Whether the check has rejected a mutation; `seen` is None if the rounded result equals the right one."""

    mutation: str
    seen: bool | None


def verdicts(
    check: Any,
    named: Callable[[Any, Any], dict[str, Tensor]],
    mutations: Mapping[str, Mutation],
    wanted: Callable[[str], bool] = bool,
) -> Iterator[Verdict]:
    """Whether a check on the host rejects each mutation; the first one, "none", is the rounded reference itself.

    `named` returns the outputs of a request by the names of their results; `wanted` selects the mutations to try. Where
    the reference is NaN the op does not write, and the old value stays, unless the check has `writes_nan`. A check of
    random results has `drawn`, a function that returns possible results.
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
    of_op = ((name, make(subject)) for name, make in mutations.items() if wanted(name))
    allowed = getattr(check, "allowed", {})
    free = {
        name: np.broadcast_to(allowed[name], np.shape(expected[name])) == np.inf
        for name in tensors
        if isinstance(allowed, dict) and np.any(np.asarray(allowed.get(name, 0)) == np.inf)
    }
    of_all = ((name, values) for name, values in shared(expected, tensors, free) if wanted(name))
    for mutation, values in itertools.chain([("none", {})], of_op, of_all):
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
            for name, tensor in tensors.items():  # for the next mutation: an output may be an operand, too
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
    """The reference of a check by name; `expected` is a dict, the array of the only output, or a list of arrays."""
    if isinstance(expected, list):
        return {f"out[{number}]": values for number, values in enumerate(expected)}
    return {"out": expected} if isinstance(expected, np.ndarray) else dict(expected)


def made(request: Any, result: Any) -> dict[str, Tensor]:
    """The outputs of a request of one cuDNN call by the names of their results."""
    tensors = list(result) if isinstance(result, tuple) else [result]
    return dict(zip(request.outputs(), tensors, strict=True))


def altered(evaluate: Formula, request: Any, **fields: Any) -> dict[str, Array]:
    """The outputs of a request with other fields, in float64; an array is copied to memory of the operand's layout."""
    others = {n: changed(getattr(request, n), v) if isinstance(v, np.ndarray) else v for n, v in fields.items()}
    with np.errstate(all="ignore"):
        return evaluate(replace(request, **others), EXACT)


def with_fields(formula: Formula, least: int = 0, /, **changes: Callable[[Any], Any]) -> Mutation:
    """The results of requests with other fields, each made from the request.

    None if a new field is None, or if the first operand has fewer elements than `least`.
    """

    def mutation(request: Any) -> Results | None:
        if getattr(request, request.reads[0]).size < least:
            return None
        fields = {name: change(request) for name, change in changes.items()}
        return None if any(value is None for value in fields.values()) else altered(formula, request, **fields)

    return mutation


def other_alpha(request: Any) -> complex | None:
    """Alpha 2% larger, if there is one."""
    return request.factor("alpha") * 1.02 if "alpha" in request.numbers and request.factor("alpha") else None


def other_beta(request: Any) -> complex | None:
    """Beta with the opposite sign, if something is added."""
    return -request.factor("beta") if "beta" in request.numbers and request.factor("beta") else None


def of_operand(evaluate: Formula, name: str, change: Callable[[Array], Array | None]) -> Mutation:
    """The mutation that changes the values of an operand, if it is given; `change` gets a copy of them."""

    def mutate(request: Any) -> Results | None:
        tensor = getattr(request, name, None)
        values = change(np.array(tensor)) if isinstance(tensor, Tensor) and tensor.size else None
        return None if values is None else altered(evaluate, request, **{name: values})

    return mutate


def shared(
    expected: Results, tensors: Mapping[str, Tensor], free: Results | None = None
) -> Iterator[tuple[str, Results]]:
    """For each output: 1% too large, not written, and along each axis one line replaced by its neighbour.

    `free` marks the elements that an op does not define; a line of only such elements is not replaced.
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
                undefined = None if free is None or name not in free else np.moveaxis(free[name], axis, 0)
                wrong = _one_line(np.moveaxis(values, axis, 0), undefined)
                yield (
                    f"{name}: a line of axis {axis - values.ndim} is its neighbour's",
                    {name: np.moveaxis(wrong, 0, axis)},
                )


def _one_line(lines: Array, nobodys: Array | None) -> Array:
    """The lines with one replaced by the next: a typical one that is not free, because two lines may be equal."""
    with np.errstate(invalid="ignore"):
        differences = np.abs(np.diff(lines.astype(np.result_type(lines, np.float64)), axis=0))
    differences[np.isnan(differences)] = 0
    sizes = differences.reshape(len(lines) - 1, -1).max(axis=1, initial=0)
    if nobodys is not None and not nobodys.all():
        defined = np.flatnonzero(~nobodys[:-1].reshape(len(sizes), -1).all(axis=1))
        line = defined[typical(sizes[defined])] if len(defined) else 0
    else:
        line = typical(sizes)
    wrong = lines.copy()
    wrong[line] = lines[line + 1]
    return np.asarray(wrong)


def typical(sizes: Array) -> int:
    """The index of the median: neither the largest nor a very small one."""
    return int(np.argsort(sizes, kind="stable")[len(sizes) // 2])


def host_array(like: Tensor, values: Array) -> Tensor:
    """Values in the dtype and on the device of an operand."""
    return like.device.array(np.ascontiguousarray(values).astype(like.dtype.numpy))


# -- changed operands ------------------------------------------------------------------------------------
def changed(tensor: Tensor, values: Array) -> Tensor:
    """Other values in memory of the same layout."""
    strides = tensor.layout.strides
    low = sum((e - 1) * min(s, 0) for e, s in zip(tensor.shape, strides, strict=True)) if tensor.size else 0
    high = sum((e - 1) * max(s, 0) for e, s in zip(tensor.shape, strides, strict=True)) if tensor.size else 0
    start = -low * tensor.dtype.itemsize
    whole = tensor.device.zeros((high - low + 1,), tensor.dtype)
    layout = tensor.device.layout(tensor.dtype, tensor.shape, strides, whole.ptr + start)
    view = Tensor(whole.storage, whole.ptr + start, layout)
    view.copy_from(np.ascontiguousarray(values).astype(tensor.dtype.numpy))
    return view


def lines_out(tensor: Tensor, axis: int) -> Array:
    """The values of an operand with zeros in one typical line of an axis."""
    values = np.moveaxis(np.asarray(tensor).copy(), axis, 0)
    sizes = np.abs(values.astype(np.float64)).reshape(len(values), -1).sum(axis=1)
    values[typical(sizes)] = 0
    return np.moveaxis(values, 0, axis)


def neighbour(tensor: Tensor, axis: int) -> Array:
    """The values of an operand, each replaced by its neighbour along an axis."""
    return np.roll(np.asarray(tensor), 1, axis=axis)


def rounded(values: Array, dtype: Dtype) -> Array:
    """Values as an output stores them: rounded to nearest, clipped to the range of fp8 and integer dtypes."""
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
    kept_old = unwritten.reshape(before.shape)
    return np.where(kept_old, before, stored) if kept_old.any() and not kept_old.all() else stored


def _equal(one: Array, other: Array) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())
