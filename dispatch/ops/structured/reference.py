"""Structured matrices in NumPy: the host's results, and the expected ones in float64."""

from __future__ import annotations

from functools import cache
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import NumpyPlan, values, work_of
from dispatch.core.precision import FP8_MAX
from dispatch.keys import I8
from dispatch.ops.structured.form import PruneAlgorithm, group_of
from dispatch.ops.structured.layout import pack, unpack
from dispatch.ops.structured.product import Activation24

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.layout import Array
    from dispatch.keys import Dtype

__all__ = ["clipped", "evaluate", "is_structured", "kept_mask", "multiplied", "numpy_structured", "tiles"]

LARGEST = 1e300  # replaces infinities and NaN in comparisons of magnitudes
GELU_FACTOR, GELU_CUBE = 0.7978845608028654, 0.044715  # sqrt(2 / pi), and the factor of x cubed


def numpy_structured(request: Any, executor: object, row: Row) -> NumpyPlan:
    """A plan that computes with NumPy: integers exactly, and results within their dtype's range."""
    del request, executor
    return NumpyPlan(row, stored_results, np.dtype(np.float64) if row.dtypes[0] is I8 else work_of(row.dtypes[0]))


def evaluate(request: Any, work: np.dtype[Any]) -> Results:
    """The outputs of a request by name, in a working dtype; data that is only moved keeps its dtype."""
    return OPS[request.op](request, work)


def stored_results(request: Any, work: np.dtype[Any]) -> Results:
    """The outputs as an operand stores them: rounded to integers, and clipped to the range of 8 bits."""
    results = evaluate(request, work)
    if request.op != "matmul_2_4":
        return results
    out = clipped(results["out"], request.d_dtype)
    return {"out": np.rint(out) if request.d_dtype.numpy.kind == "i" else out}


def clipped(out: Array, dtype: Dtype) -> Array:
    """Results clipped to the range of integers, or of 8-bit floats, which have no infinities."""
    if dtype.numpy.kind == "i":
        limits = np.iinfo(dtype.numpy)
        return np.clip(out, limits.min, limits.max)
    most = FP8_MAX.get(dtype)
    return out if most is None else np.where(np.isnan(out), out, np.clip(out, -most, most))


# -- structure --------------------------------------------------------------------------------------------------------
def magnitudes(dense: Array) -> Array:
    """Magnitudes for comparisons and sums, in float64; NaN counts as infinity."""
    sizes = np.abs(dense.astype(np.float64))
    return np.nan_to_num(sizes, nan=LARGEST, posinf=LARGEST)


@cache
def tiles(group: int, kept: int) -> Array:
    """The patterns of a tile with so many nonzeros in each row and each column, in lexicographic order, as 0 and 1."""
    lines = [tuple(int(place in chosen) for place in range(group)) for chosen in combinations(range(group), kept)]
    patterns = [
        tile for tile in product(lines, repeat=group) if all(sum(column) == kept for column in zip(*tile, strict=True))
    ]
    return np.array(patterns, np.float64).reshape(len(patterns), group * group)


def kept_mask(dense: Array, algorithm: PruneAlgorithm, group: int, kept: int) -> Array:
    """Which elements of matrices stay."""
    sizes = magnitudes(dense)
    if algorithm is PruneAlgorithm.STRIP:
        strips = sizes.reshape(-1, group)
        order = np.argsort(-strips, axis=1, kind="stable")
        stay = np.zeros(strips.shape, bool)
        np.put_along_axis(stay, order[:, :kept], values=True, axis=1)
        return np.asarray(stay.reshape(dense.shape))
    *batch, m, k = dense.shape
    split = (*batch, m // group, group, k // group, group)
    groups = np.moveaxis(sizes.reshape(split), -3, -2)
    patterns = tiles(group, kept)
    best = patterns[(groups.reshape(-1, group * group) @ patterns.T).argmax(axis=1)]
    return np.asarray(np.moveaxis(best.reshape(groups.shape), -2, -3).reshape(dense.shape) != 0)


def pruned(request: Any, work: np.dtype[Any]) -> Results:
    """The matrices with zeros in place of the smallest elements."""
    del work
    dense = np.asarray(request.a)
    stay = kept_mask(dense, request.algorithm, *group_of(request.a.dtype))
    return {"out": np.where(stay, dense, np.zeros((), dense.dtype))}


def is_structured(dense: Array, group: int, kept: int) -> bool:
    """Whether no group has too many nonzero elements."""
    there = dense.astype(np.float64).reshape(-1, group) != 0
    return bool((there.sum(1) <= kept).all())


def checked(request: Any, work: np.dtype[Any]) -> Results:
    """0 for structured matrices, else 1."""
    del work
    return {"out": np.array([not is_structured(np.asarray(request.a), *group_of(request.a.dtype))], np.int32)}


def compressed(request: Any, work: np.dtype[Any]) -> Results:
    """The host's bytes."""
    del work
    return {"out": pack(np.ascontiguousarray(np.asarray(request.a)))}


# -- products ---------------------------------------------------------------------------------------------------------
def activated(request: Any, x: Array) -> Array:
    """The activation of a product."""
    if request.activation is Activation24.RELU:
        bound = x.dtype.type(request.upper_bound)
        return np.where(np.isnan(x), x, np.where(x <= request.threshold, x.dtype.type(0), np.minimum(x, bound)))
    if request.activation is Activation24.GELU:
        inner = x.dtype.type(GELU_FACTOR) * (x + x.dtype.type(GELU_CUBE) * x**3)
        return np.asarray(x * x.dtype.type(0.5) * (1 + np.tanh(inner)) * x.dtype.type(request.gelu_scaling))
    return x


def multiplied(request: Any, work: np.dtype[Any], dense: Array | None = None) -> Results:
    """A product and its epilogue; of the matrix argument, if the bytes are in a library's layout."""
    a = unpack(np.asarray(request.a), request.form) if dense is None else dense
    result = np.matmul(a.astype(work), values(request.b, work))
    alpha, beta = (work.type(request.factor(name)) for name in ("alpha", "beta"))
    result = result * (alpha if request.alpha_vector is None else values(request.alpha_vector, work)[:, None])
    if request.reads_added:
        factor = beta if request.beta_vector is None else values(request.beta_vector, work)[:, None]
        result = result + factor * values(request.c, work)
    if request.bias is not None:
        result = result + values(request.bias, work)[..., None]
    return {"out": activated(request, np.asarray(result))}


OPS: dict[str, Callable[[Any, np.dtype[Any]], Results]] = {
    "prune_2_4": pruned,
    "check_2_4": checked,
    "compress_2_4": compressed,
    "matmul_2_4": multiplied,
}
