"""Errors in units of n·eps, and the full matrices of triangles; all in double precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dispatch.device.layout import Array

__all__ = [
    "THRESHOLD",
    "hermitian_matrix",
    "norm",
    "orthonormality_error",
    "scaled_error",
    "scaled_iteration_error",
    "solve_errors",
    "standard_form",
    "zero_or_inf",
]

THRESHOLD = 30.0  # the limit of LAPACK's test programs


def hermitian_matrix(a: Array, *, lower: bool) -> Array:
    """The Hermitian matrix for one of its triangles; its diagonal is real."""
    below = a if lower else a.conj().T
    strict = np.where(np.tri(len(a), k=-1, dtype=np.bool_), below, 0)
    matrix: Array = strict + strict.conj().T + np.diag(np.diag(a).real)
    return matrix


def norm(x: Array) -> float:
    """The largest absolute column sum."""
    return float(np.abs(x).sum(axis=0).max()) if x.size else 0.0


def scaled_error(error: Array, size: float, eps: float, n: int) -> float:
    """An error in units of n·eps of a size."""
    return 0.0 if not error.size else float(norm(error) / max(n * eps * size, np.finfo(np.float64).tiny))


def scaled_iteration_error(error: Array, size: float, eps: float, n: int) -> float:
    """An error in units of n·eps of a size, without the part where the QR iteration of a bidiagonal matrix ends.

    LAPACK's bdsqr neglects numbers below max(10, min(100, eps^(-1/8))) eps relative to their neighbours, for any n: 99
    roundoffs of f64, 10 of f32. For 30,000 matrices of 5 rows with repeated singular values LAPACK's own residuals were
    above 30 n·eps in 3 cases, at most 32.8. Its test programs allow 50, with an eps that is twice this one.
    """
    ends = max(10.0, min(100.0, float(eps**-0.125)))
    return scaled_error(error, size, eps, n) * n / (n + ends / THRESHOLD)


def orthonormality_error(x: Array, eps: float) -> float:
    """The distance of columns from orthonormality."""
    return scaled_error(x.conj().T @ x - np.eye(x.shape[1]), 1.0, eps, max(x.shape))


def zero_or_inf(x: Array) -> float:
    """0 if all are 0, otherwise infinity."""
    return 0.0 if not x.any() else np.inf


def standard_form(a: Array, b: Array, problem: int) -> Array:
    """The Hermitian matrix with the eigenvalues of a pair: L⁻¹·A·L⁻ᴴ for problem 1, otherwise Lᴴ·A·L; B = L·Lᴴ."""
    factor = np.linalg.cholesky(b)
    if problem == 1:
        half_way = np.linalg.solve(factor, a)
        product = np.linalg.solve(factor, half_way.conj().T)
    else:
        product = factor.conj().T @ a @ factor
    matrix: Array = (product + product.conj().T) / 2
    return matrix


def solve_errors(a: Array, b: Array, x: Array, eps: float) -> Iterator[tuple[str, float]]:
    """The residual of A·x = b, for each column."""
    b, x = (one[:, None] if one.ndim == 1 else one for one in (b, x))
    size, left = norm(a), a @ x - b
    for column in range(x.shape[1]):
        one = slice(column, column + 1)
        yield f"b - A·x, column {column},", scaled_error(left[:, one], size * norm(x[:, one]), eps, len(a))
