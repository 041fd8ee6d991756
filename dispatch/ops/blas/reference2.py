"""BLAS level 2 in NumPy: for the host's rows in their own precision, as the reference in float64 or complex128."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import values
from dispatch.ops.blas.choices import FillMode, Operation
from dispatch.ops.blas.reference3 import full, scaled, solve, triangle, turned, work_with

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.device.layout import Array

__all__ = ["evaluate", "matrix_of", "packed", "unbanded", "unpacked"]


def unbanded(ab: Array, m: int, kl: int, ku: int) -> Array:
    """The matrix of m rows whose diagonals are stored: ab[ku + i - j, j] = a[i, j]."""
    n = ab.shape[1]
    matrix = np.zeros((m, n), ab.dtype)
    for diagonal in range(kl + ku + 1):
        below = diagonal - ku
        columns = np.arange(max(0, -below), min(n, m - below))
        matrix[columns + below, columns] = ab[diagonal, columns]
    return matrix


def places_of(n: int, uplo: FillMode | str) -> tuple[Array, Array]:
    """The rows and columns of a triangle's elements, column by column."""
    if uplo is FillMode.LOWER:
        columns, rows = np.triu_indices(n)
        return rows, columns
    columns, rows = np.tril_indices(n)
    return rows, columns


def unpacked(ap: Array, n: int, uplo: FillMode | str) -> Array:
    """The triangle that is packed column by column, with zeros in the other."""
    matrix = np.zeros((n, n), ap.dtype)
    matrix[places_of(n, uplo)] = ap
    return matrix


def packed(matrix: Array, uplo: FillMode | str) -> Array:
    """A triangle column by column."""
    return np.asarray(matrix[places_of(len(matrix), uplo)])


def matrix_of(request: Any, work: np.dtype[Any]) -> Array:
    """The matrix of a request, or its triangle, for any storage format."""
    if "a" in request.reads:
        a = values(request.a, work)
        return a if not hasattr(request, "uplo") else triangle(a, request.uplo)
    if "ap" in request.reads:
        return unpacked(values(request.ap, work), request.x.shape[0], request.uplo)
    ab = values(request.ab, work)
    if request.op == "gbmv":
        return unbanded(ab, request.rows, request.kl, request.ku)
    rows = ab.shape[0]
    kl, ku = (rows - 1, 0) if request.uplo is FillMode.LOWER else (0, rows - 1)
    return unbanded(ab, ab.shape[1], kl, ku)


def multiplied(request: Any, work: np.dtype[Any]) -> Array:
    """alpha · op(A) · x + beta · y."""
    a = matrix_of(request, work)
    if hasattr(request, "uplo"):
        a = full(a, request.uplo, hermitian=request.op.startswith("h"))
    else:
        a = turned(a, request.trans)
    product = scaled(request, "alpha", (a @ values(request.x, work)[..., None])[..., 0])
    return product + scaled(request, "beta", values(request.y, work)) if request.reads_added else product


def of_triangle(request: Any, work: np.dtype[Any]) -> Array:
    """op(A) · x, or its solution."""
    a = turned(triangle(matrix_of(request, work), request.uplo, request.diag), request.trans)
    x = values(request.x, work)
    if request.op.endswith("mv"):
        return np.asarray(a @ x)
    lower = (request.uplo is FillMode.LOWER) == (request.trans is Operation.N)
    return solve(a, x[:, None], lower=lower)[:, 0]


def outer(request: Any, work: np.dtype[Any]) -> Array:
    """alpha · x · yᵀ + A, or a triangle of alpha · x · xᵀ + A and similar updates."""
    is_hermitian = request.op.startswith("h") or request.op == "gerc"
    x = values(request.x, work)
    y = values(request.y, work) if "y" in request.reads else x

    def product(one: Array, other: Array) -> Array:
        return np.outer(one, np.conj(other) if is_hermitian else other)

    total = scaled(request, "alpha", product(x, y))
    alpha = request.factor("alpha")
    if request.op.endswith("2") and alpha:
        total = total + total.dtype.type(np.conj(alpha) if is_hermitian else alpha) * product(y, x)
    if request.op.startswith("ge"):
        return total + values(request.a, work) if request.has_added else total
    before = None
    if request.has_added:
        before = values(getattr(request, request.added), work)
        if request.added == "ap":
            before = unpacked(before, len(x), request.uplo)
        total = total + triangle(before, request.uplo)
    total = triangle(total, request.uplo)
    if is_hermitian and alpha:  # if alpha is 0, A is unchanged, as in LAPACK's BLAS
        np.fill_diagonal(total, total.diagonal().real)
    if request.added == "ap":
        return packed(total, request.uplo)
    if before is None:
        return total
    mask = np.triu(np.ones(total.shape, bool), 1)
    return np.where(mask if request.uplo is FillMode.LOWER else mask.T, before, total)


def evaluate(request: Any, work: np.dtype[Any]) -> Results:
    """The output of a request of level 2, in a working dtype."""
    work = work_with(request, work)
    if "beta" in request.numbers:
        return {"out": multiplied(request, work)}
    return {"out": of_triangle(request, work) if hasattr(request, "diag") else outer(request, work)}
