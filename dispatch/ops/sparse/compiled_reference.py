"""Products with the caller's operators by NumPy: the host's results, and the expected ones in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import numpy_call
from dispatch.ops.sparse.matrix_reference import coordinates, numbers, scaled

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.host_plan import Results
    from dispatch.device.layout import Array
    from dispatch.ops.sparse.semirings import Semiring

__all__ = ["COMPILED", "numpy_compiled"]

CHUNK = 1 << 22  # products computed at a time


def multiply_over_semiring(request: Any, work: np.dtype[Any]) -> Results:
    """The product over a semiring, computed for some columns of B at a time."""
    m, semiring = request.form.shape[0], request.ring
    row, column = coordinates(request.form, request.rows, request.columns)
    a, b = numbers(request.values, work)[:, None], numbers(request.b, work)
    lengths = np.bincount(row, minlength=m)
    out = np.empty((m, b.shape[1]), b.dtype)
    step = max(1, CHUNK // max(1, len(row)))
    for first in range(0, b.shape[1], step):
        part = slice(first, first + step)
        right = b[column, part]
        products = semiring.multiply.of("semiring.multiply", np.broadcast_to(a, right.shape), right)
        out[:, part] = sum_rows(semiring, products, lengths)
    added = None if request.c is None else numbers(request.c, work)
    if semiring.epilogue is not None:
        c = np.zeros_like(out) if added is None else added
        out = semiring.epilogue.of("semiring.epilogue", out, c)
    elif added is not None:
        out = semiring.add.of("semiring.add", out, added)
    return {"out": out}


def sum_rows(semiring: Semiring, products: Array, lengths: Array) -> Array:
    """The sum of each row's products, by repeatedly adding neighbours until one is left."""
    sums = np.full((len(lengths), products.shape[1]), semiring.identity, products.dtype)
    there = lengths > 0
    lengths = lengths[there]
    while lengths.max(initial=0) > 1:
        place = np.arange(len(products)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        first = np.flatnonzero(place % 2 == 0)
        paired = place[first] + 1 < np.repeat(lengths, lengths)[first]
        others, both = products[first], first[paired]
        others[paired] = semiring.add.of("semiring.add", products[both], products[both + 1])
        products, lengths = others, (lengths + 1) // 2
    sums[there] = products
    return sums


def multiply_with_epilogue(request: Any, work: np.dtype[Any]) -> Results:
    """A · x, with the epilogue applied to each sum."""
    row, column = coordinates(request.form, request.rows, request.columns)
    values, x = numbers(request.values, work), numbers(request.x, work)
    sums = np.zeros(request.form.shape[0], x.dtype)
    np.add.at(sums, row, values * x[column])
    sums = scaled(request, "alpha", sums)
    if request.reads_added:
        sums = sums + scaled(request, "beta", numbers(request.y, work))
    if request.epilogue is not None:
        sums = request.epilogue.of("epilogue", np.arange(len(sums)), sums)
    return {"out": sums}


COMPILED: dict[str, Callable[[Any, np.dtype[Any]], Results]] = {
    "spmm_op": multiply_over_semiring,
    "spmv_op": multiply_with_epilogue,
}


def evaluate_compiled(request: Any, work: np.dtype[Any]) -> Results:
    """The output of a product with the caller's operators."""
    return COMPILED[request.op](request, work)


numpy_compiled = numpy_call(evaluate_compiled)
