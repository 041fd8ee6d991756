"""BLAS level 3 in NumPy: for the host's rows in their own precision, as the reference in float64 or complex128."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import values
from dispatch.keys import member
from dispatch.ops.blas.choices import DiagType, FillMode, Operation, SideMode

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.device.layout import Array

__all__ = ["ROUTINES", "full", "solve", "triangle", "turned", "work_with"]


def work_with(request: Any, work: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype to compute in: complex for complex operands."""
    first = getattr(request, request.reads[0])
    return np.result_type(work, np.complex64) if first.dtype.is_complex else work


def turned(matrix: Array, trans: Operation | str) -> Array:
    """op(A), over the last two axes."""
    if trans is Operation.N:
        return matrix
    other = np.swapaxes(matrix, -1, -2)
    return np.asarray(np.conj(other)) if trans is Operation.C else other


def triangle(matrix: Array, uplo: FillMode | str, diag: DiagType | str = DiagType.NON_UNIT) -> Array:
    """A triangle, with zeros in the other one."""
    result = np.tril(matrix) if uplo is FillMode.LOWER else np.triu(matrix)
    if diag is DiagType.UNIT:
        places = np.arange(matrix.shape[-1])
        result[..., places, places] = 1
    return result


def full(matrix: Array, uplo: FillMode | str, *, hermitian: bool) -> Array:
    """The full symmetric or Hermitian matrix for one of its triangles."""
    half = triangle(matrix, uplo)
    strict = np.tril(half, -1) if uplo is FillMode.LOWER else np.triu(half, 1)
    mirrored = half + (np.conj(strict.T) if hermitian else strict.T)
    if hermitian:
        np.fill_diagonal(mirrored, half.diagonal().real)
    return np.asarray(mirrored)


def solve(a: Array, b: Array, *, lower: bool) -> Array:
    """The X of A · X = B for a triangle A, by substitution: it divides by a 0 on the diagonal without raising."""
    x: Array = np.broadcast_to(b, np.broadcast_shapes(a.shape[:-2], b.shape[:-2]) + b.shape[-2:]).copy()
    order = range(a.shape[-1])
    for i in order if lower else reversed(order):
        x[..., i, :] /= a[..., i, i, None]
        rest = slice(i + 1, None) if lower else slice(None, i)
        x[..., rest, :] -= a[..., rest, i, None] * x[..., i, None, :]
    return x


def _added(request: Any, product: Array, work: np.dtype[Any]) -> Array:
    """The product, which includes alpha, plus beta · C; C is not read if beta is 0."""
    return product + scaled(request, "beta", values(request.c, work)) if request.reads_added else product


def scaled(request: Any, name: str, matrix: Array) -> Array:
    """A matrix times a factor; zeros, without reading the matrix, if the factor is 0."""
    factor = request.factor(name)
    return np.zeros_like(matrix) if factor == 0 else matrix.dtype.type(factor) * matrix


def symm(request: Any, work: np.dtype[Any]) -> Array:
    a, b = full(values(request.a, work), request.uplo, hermitian=request.op == "hemm"), values(request.b, work)
    product = a @ b if request.side is SideMode.LEFT else b @ a
    return _added(request, scaled(request, "alpha", product), work)


def rank(request: Any, work: np.dtype[Any]) -> Array:
    """A triangle of a sum of outer products; the other triangle is that of c, or 0."""
    a = values(request.a, work)
    b = values(request.b, work) if "b" in request.reads else a
    adjoint = Operation.C if request.is_hermitian else Operation.T

    def outer(one: Array, other: Array) -> Array:
        if request.trans is Operation.N:
            return np.asarray(one @ turned(other, adjoint))
        return np.asarray(turned(one, adjoint) @ other)

    product = scaled(request, "alpha", outer(a, b))
    if request.op in ("syr2k", "her2k"):
        factor = np.conj(request.factor("alpha")) if request.is_hermitian else request.factor("alpha")
        product = product + (0 if factor == 0 else product.dtype.type(factor) * outer(b, a))
    has_terms = request.factor("alpha") != 0 and 0 not in a.shape
    is_real = request.is_hermitian and (has_terms or request.factor("beta") != 1)  # otherwise c is unchanged
    if request.reads_added:
        added = values(request.c, work)
        if is_real:
            added = added.copy()
            np.fill_diagonal(added, added.diagonal().real)  # a NaN among the imaginary parts is not read
        product = product + scaled(request, "beta", added)
    total = triangle(product, request.uplo)
    if is_real:
        np.fill_diagonal(total, total.diagonal().real)
    if request.c is None:
        return total
    other = values(request.c, work)
    is_kept = np.triu(np.ones(total.shape, bool), 1)
    return np.where(is_kept if request.uplo is FillMode.LOWER else is_kept.T, other, total)


def trmm(request: Any, work: np.dtype[Any]) -> Array:
    a, b = turned(triangle(values(request.a, work), request.uplo, request.diag), request.trans), values(request.b, work)
    return scaled(request, "alpha", a @ b if request.side is SideMode.LEFT else b @ a)


def trsm(request: Any, work: np.dtype[Any]) -> Array:
    a, b = turned(triangle(values(request.a, work), request.uplo, request.diag), request.trans), values(request.b, work)
    lower = (request.uplo is FillMode.LOWER) == (request.trans is Operation.N)
    b = scaled(request, "alpha", b)
    if request.factor("alpha") == 0:
        return b  # zeros, and A is not read
    if request.side is SideMode.LEFT:
        return solve(a, b, lower=lower)
    return np.swapaxes(solve(np.swapaxes(a, -1, -2), np.swapaxes(b, -1, -2), lower=not lower), -1, -2)


def geam(request: Any, work: np.dtype[Any]) -> Array:
    a = scaled(request, "alpha", turned(values(request.a, work), request.trans_a))
    return a + scaled(request, "beta", turned(values(request.b, work), request.trans_b))


def dgmm(request: Any, work: np.dtype[Any]) -> Array:
    a, x = values(request.a, work), values(request.x, work)
    return a * (x[:, None] if member(request.side) is SideMode.LEFT else x)


RANKS = ("syrk", "herk", "syr2k", "her2k", "syrkx", "herkx")
ROUTINES: dict[str, Any] = {
    **dict.fromkeys(("symm", "hemm"), symm),
    **dict.fromkeys(RANKS, rank),
    "trmm": trmm,
    "trsm": trsm,
    "geam": geam,
    "dgmm": dgmm,
}


def evaluate(request: Any, work: np.dtype[Any]) -> Results:
    """The output of a request of level 3, in a working dtype."""
    return {"out": ROUTINES[request.op](request, work_with(request, work))}
