"""The cases of sparse vectors: few elements and many, indices of both widths and bases, in place and separate."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.keys import F32, HALF
from dispatch.ops.sparse import vectors
from dispatch.ops.sparse.reference import evaluate
from dispatch.testing.check import ROUNDOFF, Check, GuardedBuffer, MadeCase, place, poison, rounded, with_outputs
from dispatch.testing.mutations import altered

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.keys import Dtype

__all__ = ["VECTORS", "vector_cases"]

VECTORS: dict[str, Any] = {
    kind.op: kind
    for kind in (
        vectors.GatherRequest,
        vectors.ScatterRequest,
        vectors.SparseAxpbyRequest,
        vectors.SparseRotRequest,
        vectors.SpvvRequest,
    )
}
SIZES = ((20, 7), (1, 1), (300, 290), (64, 16), (40, 0), (5, 5), (1000, 3))
FACTORS = ((1.0, 0.0), (0.75, -1.5), (0.0, 0.5), (-2.0, 1.0), (1.0, 1.0))
INDICES = (np.int32, np.int64)


class Form(NamedTuple):
    """A case: elements of the dense vector and of the sparse one, widths, factors, and the layouts."""

    sizes: tuple[int, int]
    base: int
    wide: bool
    alpha: complex
    beta: complex
    apart: bool
    has_out: bool


def vector_cases(row: Row) -> list[MadeCase]:
    """Each size twice, all other properties in turn."""
    op, dtype = row.op, row.dtypes[0]
    listed = []
    for number, sizes in enumerate(SIZES * 2):
        alpha, beta = FACTORS[number % 5]
        turn = 1 - 0.5j if dtype.is_complex and number % 2 else 1
        form = Form(
            sizes, number % 2, number // 2 % 2 == 1, alpha * turn, beta * turn, number % 3 != 0, number % 5 != 3
        )
        listed.append(MadeCase(f"{dtype}-{number}", partial(check, op, dtype, form)))
    return listed


def check(op: str, dtype: Dtype, form: Form, name: str, device: Device, rng: np.random.Generator) -> Check:
    """A request of a form with fresh operands."""
    size, count = form.sizes
    drawn = {each: rng.standard_normal(n) for each, n in (("y", size), ("values", count))}
    if dtype.is_complex:
        drawn = {each: values + 1j * rng.standard_normal(values.shape) for each, values in drawn.items()}
    kind = VECTORS[op]
    unread = op == "sparse_axpby" and not form.beta
    fields: dict[str, Any] = {}
    memories: dict[str, GuardedBuffer] = {}
    for each, values in drawn.items():
        if each in kind.reads:
            array = poison(dtype, values.shape) if unread and each == "y" else values.astype(dtype.numpy)
            memories[each] = place(device, array, None, 2)
            fields[each] = memories[each].view
    places = rng.permutation(size)[:count]
    if count and size // 3 not in places:
        places[0] = size // 3  # includes the element that tests change to NaN
    indices = (places + form.base).astype(INDICES[form.wide])
    fields |= {"indices": place(device, indices, None, 2).view, "base": form.base}
    if op == "sparse_axpby":
        fields |= {"alpha": form.alpha, "beta": form.beta}
    if op == "sparse_rot":
        fields |= {"c": form.alpha, "s": form.beta}
    if op == "spvv":
        fields["conj"] = form.apart
    written: tuple[GuardedBuffer, ...] = ()
    request = kind(**fields)
    if kind.in_place and not form.apart:
        changed = {output: memories[name] for output, name in sorted(kind.in_place)}
        request = request.replace(**{output: memory.view for output, memory in changed.items()})
        written = tuple(changed.values())
    elif form.has_out:
        request, written = with_outputs(request, lambda values: place(device, values, None, 2))
    with np.errstate(all="ignore"):
        expected = evaluate(request, EXACT)
        return Check(name, request, expected, bounds(request, expected), written)


def bounds(request: Any, expected: Results) -> Results:
    """For sums of n products n + 4 roundings of their magnitudes, four times for complex ones; for copies 0.

    For 16 bits these are roundings of f32, and then the result is rounded once.
    """
    if request.op in ("sparse_gather", "sparse_scatter"):
        return {"out": np.zeros(())}
    dtype = request.y.dtype
    unit = ROUNDOFF[F32 if dtype in HALF else dtype][0] * (4 if dtype.is_complex else 1)
    sizes: dict[str, Any] = {each: np.abs(np.asarray(getattr(request, each))) for each in ("values", "y")}
    factors = {each: abs(request.factor(each)) for each in getattr(request, "numbers", ())}
    if request.op == "sparse_rot":
        limits = {}
        for name, sign in (("out_values", 1), ("out_y", -1)):  # a subtracted term adds to the magnitude
            size = np.abs(altered(evaluate, request, **sizes, c=factors["c"], s=sign * factors["s"])[name])
            limits[name] = np.asarray(rounded(5 * unit * size, expected[name], dtype))
        return limits
    terms = request.indices.size if request.op == "spvv" else 1
    size = np.abs(altered(evaluate, request, **sizes, **factors)["out"])
    return {"out": np.asarray(rounded((terms + 4) * unit * size, expected["out"], dtype))}
