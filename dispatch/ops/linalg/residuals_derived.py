"""The errors of inverses, determinants, norms and least squares, in units of n·eps; see residuals.py.

If a slightly different matrix has a very different correct result, the unit is the effect of such a difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.ops.linalg.derived import InverseKind, LstsqDriver, NormOrder
from dispatch.ops.linalg.exponential_residuals import expm
from dispatch.ops.linalg.multiply import QrSide
from dispatch.ops.linalg.norms import (
    hermitian_matrix,
    norm,
    orthonormality_error,
    scaled_error,
    scaled_iteration_error,
    zero_or_inf,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from dispatch.device.layout import Array

    Ratios: TypeAlias = Iterator[tuple[str, float]]

__all__ = ["DERIVED"]


def _inv(request: Any, a: Array, given: Any, found: Any, eps: float) -> Ratios:
    del given
    x, lower = found["out"], request.assume_a is InverseKind.LOWER
    if request.assume_a is InverseKind.POS:
        a = hermitian_matrix(a, lower=request.lower)
        yield "X - Xᴴ", scaled_error(x - x.conj().T, norm(x), eps, len(a))
    elif request.assume_a is not InverseKind.GEN:
        a = np.tril(a) if lower else np.triu(a)
        yield "what is in the other triangle", zero_or_inf(np.triu(x, 1) if lower else np.tril(x, -1))
    yield "I - A·X", scaled_error(a @ x - np.eye(len(a)), norm(a) * norm(x), eps, len(a))


def _determinant_of(a: Array, value: complex, rounded: float, eps: float) -> float:
    """The error of a determinant in units of the effect of an error of n·eps in the matrix.

    That effect is ‖A‖ times all singular values but the least. `rounded` is a further relative error in eps, of its
    logarithm.
    """
    if not len(a):
        return 0.0 if value == 1 else np.inf
    s = np.linalg.svd(a, compute_uv=False)
    size = norm(a) * float(np.prod(s[:-1])) + rounded * float(np.prod(s))
    error = abs(value - np.linalg.det(a))
    return float(error / max(len(a) * eps * size, np.finfo(np.float64).tiny))


def _det(request: Any, a: Array, given: Any, found: Any, eps: float) -> Ratios:
    del request, given
    yield "the determinant's error", _determinant_of(a, complex(found["det"]), 1.0, eps)


def _slogdet(request: Any, a: Array, given: Any, found: Any, eps: float) -> Ratios:
    """The error of the determinant that both results give, with the matrix scaled so that it is in range."""
    del request, given
    sign, logarithm = complex(found["sign"]), float(found["logabsdet"])
    is_zero = logarithm == -np.inf
    yield "the sign's magnitude", 0.0 if abs(abs(sign) - (not is_zero)) <= 4 * max(1, len(a)) * eps else np.inf
    s = np.linalg.svd(a, compute_uv=False)
    size = float(np.exp(np.log(s).mean())) if len(a) and s[-1] > 0 else 1.0
    value = sign * np.exp(logarithm - len(a) * np.log(size))
    yield "the determinant's error", _determinant_of(a / size, value, 0.0 if is_zero else 1 + abs(logarithm), eps)


def _matrix_norm(request: Any, a: Array, given: Any, found: Any, eps: float) -> Ratios:
    del given
    exact = _norm(a, request.order)
    is_spectral = request.order in (NormOrder.TWO, NormOrder.MIN_TWO, NormOrder.NUC)
    size = norm(a) if is_spectral else exact
    yield "the norm's error", scaled_error(np.atleast_2d(found["norm"] - exact), size, eps, max(1, *a.shape))


def _norm(a: Array, order: NormOrder) -> float:
    """A norm by its definition."""
    if not a.size:
        return 0.0
    magnitudes, s = np.abs(a), np.linalg.svd(a, compute_uv=False)
    columns, rows = magnitudes.sum(axis=0), magnitudes.sum(axis=1)
    exact = {
        NormOrder.FRO: np.sqrt((magnitudes**2).sum()),
        NormOrder.NUC: s.sum(),
        NormOrder.ONE: columns.max(),
        NormOrder.MIN_ONE: columns.min(),
        NormOrder.INF: rows.max(),
        NormOrder.MIN_INF: rows.min(),
        NormOrder.TWO: s[0],
        NormOrder.MIN_TWO: s[-1],
    }
    return float(exact[order])


def _cutoff(request: Any) -> float:
    if request.rtol is not None:
        return float(request.rtol)
    return float(max(request.a.shape[-2:]) * np.finfo(request.a.dtype.numpy).eps)


def _significant(request: Any, a: Array) -> tuple[Array, Array, Array]:
    """U, s and Vᴴ of the singular values of a matrix that are above the cutoff."""
    u, s, vh = np.linalg.svd(a, full_matrices=False)
    count = int((s > _cutoff(request) * s.max(initial=0)).sum())
    return u[:, :count], s[:count], vh[:count]


def _matrix_rank(request: Any, a: Array, given: Any, found: Any, eps: float) -> Ratios:
    del given, eps
    yield "another rank", 0.0 if found["rank"] == len(_significant(request, a)[1]) else np.inf


def _pinv(request: Any, a: Array, given: Any, found: Any, eps: float) -> Ratios:
    """Penrose's four conditions; an error of n·eps in A causes one of n·eps·‖A‖·‖X‖² in X."""
    del given
    x = found["out"]
    most, size, inverse = max(a.shape), norm(a), norm(x)
    # Singular values that count as 0 are left out of the inverse, but are still in the matrix.
    u, s, vh = _significant(request, a)
    approximation = (u * s) @ vh
    yield "A - A·X·A", scaled_error(approximation @ x @ approximation - approximation, size * size * inverse, eps, most)
    yield "X - X·A·X", scaled_error(x @ approximation @ x - x, size * inverse * inverse, eps, most)
    for name, product in (("A·X", approximation @ x), ("X·A", x @ approximation)):
        yield f"{name} - ({name})ᴴ", scaled_error(product - product.conj().T, size * inverse, eps, max(most, 1))


def _lstsq(request: Any, a: Array, given: Any, found: Any, eps: float) -> Ratios:
    b, x = (one[:, None] if one.ndim == 1 else one for one in (given["b"], found["out"]))
    most = max(*a.shape, 1)
    u, s, vh = _significant(request, a)
    left = b - a @ x
    size = norm(a) * norm(x) + norm(b)
    if len(s):
        condition = s[0] / s[-1]
        # The computed residual is orthogonal to the range of a matrix off by n·eps: its vectors rotate by n·eps·cond.
        yield "Uᴴ·(b - A·x)", scaled_error(u.conj().T @ left, size, eps, most)
        yield "what of x is not A's", scaled_error(x - vh.conj().T @ (vh @ x), condition * norm(x), eps, most)
    else:
        yield "x of nothing", zero_or_inf(x)
    if len(a) > a.shape[1]:
        # An error of n·eps in the residual vector is one in its length; it is not proportional to the square of the
        # length.
        error = np.sqrt(np.abs(np.atleast_1d(found["residuals"]))) - np.linalg.norm(left, axis=0)
        yield "the residuals' error", scaled_error(np.atleast_2d(error), size, eps, most)
    if request.driver is LstsqDriver.GELSS:
        yield "another rank", 0.0 if found["rank"] == len(s) else np.inf
        every = np.linalg.svd(a, compute_uv=False)
        yield "the singular values' distance", scaled_error((found["s"] - every)[:, None], norm(a), eps, most)


def _qr_multiply(request: Any, a: Array, given: Any, found: Any, eps: float) -> Ratios:
    """Properties that hold for any signs of R's rows: Aᴴ·(Q·C) = Rᴴ·C or (C·Q)·R = C·A, and lengths."""
    c, out, r, most = given["c"], found["out"], found["r"], max(*a.shape, 1)
    yield "what is below R's diagonal", zero_or_inf(np.tril(r, -1))
    if not a.size:
        yield "what is made of nothing", zero_or_inf(out)
        return
    yield "Aᴴ·A - Rᴴ·R", scaled_error(r.conj().T @ r - a.conj().T @ a, norm(a) * norm(a.T), eps, most)
    if request.mode is QrSide.RIGHT:
        yield "(C·Q)·R - C·A", scaled_error(out @ r - c @ a, norm(c) * norm(a), eps, most)
        return
    yield "Aᴴ·(Q·C) - Rᴴ·C", scaled_error(a.conj().T @ out - r.conj().T @ c, norm(a.T) * norm(c), eps, most)
    lengths = out.conj().T @ out - c.conj().T @ c
    yield "(Q·C)ᴴ·(Q·C) - Cᴴ·C", scaled_error(lengths, norm(c) * norm(c.T), eps, most)
    if a.shape[0] > a.shape[1] and np.linalg.matrix_rank(a) == a.shape[1]:
        # An error of n·eps in A rotates its range by n·eps·cond.
        q = np.linalg.qr(a)[0]
        size = float(np.linalg.cond(a)) * norm(c)
        yield "what of Q·C is not in A's range", scaled_error(out - q @ (q.conj().T @ out), size, eps, most)


def _polar(request: Any, a: Array, given: Any, found: Any, eps: float) -> Ratios:
    del given
    u, p, most = found["u"], found["p"], max(a.shape)
    product = u @ p if request.side is QrSide.RIGHT else p @ u
    yield "A - U·P", scaled_iteration_error(product - a, norm(a), eps, most)
    yield "I - Uᴴ·U", orthonormality_error(u if len(a) >= a.shape[1] else u.conj().T, eps)
    yield "P - Pᴴ", scaled_error(p - p.conj().T, norm(a), eps, most)
    below = np.minimum(np.linalg.eigvalsh((p + p.conj().T) / 2), 0) if p.size else np.zeros(0)
    yield "an eigenvalue of P below 0", scaled_error(below[:, None], norm(a), eps, most)


DERIVED: dict[str, Callable[[Any, Array, Any, Any, float], Ratios]] = {
    "inv": _inv,
    "det": _det,
    "slogdet": _slogdet,
    "matrix_norm": _matrix_norm,
    "matrix_rank": _matrix_rank,
    "pinv": _pinv,
    "lstsq": _lstsq,
    "qr_multiply": _qr_multiply,
    "polar": _polar,
    "expm": expm,
}
