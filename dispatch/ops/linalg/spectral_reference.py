"""Eigenvalues and singular values of one matrix by LAPACK through SciPy: the host's results, and the reference."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.ops.linalg.spectral import SvdDriver
from dispatch.ops.linalg.subset import subset_slice

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.device.layout import Array

__all__ = ["FAILED", "SPECTRAL", "lapack", "near_one", "times_power"]

FAILED = 1
FAR = 20  # a matrix is scaled if the exponent of its largest number exceeds this


@functools.cache
def lapack(name: str, dtype: np.dtype[Any]) -> Any:
    """A LAPACK routine for a dtype."""
    from scipy.linalg.lapack import get_lapack_funcs

    return get_lapack_funcs((name,), dtype=dtype)[0]


def _is_finite(a: Array, *, lower: bool) -> bool:
    """Whether all elements that are read of a triangle are finite."""
    return bool(np.isfinite(np.tril(a) if lower else np.triu(a)).all())


def chosen(request: Any, w: Array, v: Array, info: int) -> dict[str, Any]:
    """The selected eigenvalues and vectors; those selected by value come first, followed by NaN."""
    if info:
        return {"w": 0, "v": 0, "count": 0, "info": info}
    if request.subset_by_index is None and request.subset_by_value is None:
        return {"w": w, "v": v, "info": 0}
    selection, nan = subset_slice(request, w), complex(np.nan, np.nan) if v.dtype.kind == "c" else np.nan
    count = len(w[selection])
    if request.subset_by_value is None:
        return {"w": w[selection], "v": v[:, selection], "info": 0}
    some, vectors = np.full_like(w, np.nan), np.full_like(v, nan)
    some[:count], vectors[:, :count] = w[selection], v[:, selection]
    return {"w": some, "v": vectors, "count": count, "info": 0}


def _eigh(request: Any, a: Array) -> dict[str, Any]:
    if not a.size:
        return {"w": np.zeros(0), "v": a, "count": 0, "info": 0}
    if not _is_finite(a, lower=request.lower):
        return chosen(request, a, a, FAILED)
    name = "heevd" if a.dtype.kind == "c" else "syevd"
    return chosen(request, *lapack(name, a.dtype)(a, compute_v=not request.eigvals_only, lower=request.lower))


def _generalized_eigh(request: Any, a: Array, b: Array) -> dict[str, Any]:
    if not a.size:
        return {"w": np.zeros(0), "v": a, "count": 0, "info": 0}
    if not all(_is_finite(one, lower=request.lower) for one in (a, b)):
        return chosen(request, a, a, FAILED)
    name, jobz = "hegvd" if a.dtype.kind == "c" else "sygvd", "N" if request.eigvals_only else "V"
    uplo = "L" if request.lower else "U"
    return chosen(request, *lapack(name, a.dtype)(a, b, itype=request.itype, jobz=jobz, uplo=uplo))


def _eig(request: Any, a: Array) -> dict[str, Any]:
    if not a.size:
        return {"w": np.zeros(0), "vl": a, "v": a, "info": 0}
    if not np.isfinite(a).all():
        return {"w": 0, "vl": 0, "v": 0, "info": FAILED}
    flags = {"compute_vl": request.left, "compute_vr": not request.eigvals_only}
    a, exponent = near_one(a)
    if a.dtype.kind == "c":
        w, left, v, info = lapack("geev", a.dtype)(a, **flags)
        return {"w": times_power(w, exponent), "vl": left, "v": v, "info": info}
    real, imag, left, v, info = lapack("geev", a.dtype)(a, **flags)
    w = times_power(real + 1j * imag, exponent)
    if request.eigvals_only:
        return {"w": w, "info": info}
    return {"w": w, "vl": _from_pairs(left, w) if request.left else 0, "v": _from_pairs(v, w), "info": info}


def near_one(a: Array) -> tuple[Array, int]:
    """A matrix, scaled if its numbers are very large or small, and the power of 2 to multiply it by.

    LAPACK scales the matrix for `geev`, but SciPy's build (1.17, OpenBLAS 0.3.30) did not scale the eigenvalues back:
    for 1e15 times a matrix in f32 they were 1,800 times too small.
    """
    exponent = int(np.frexp(np.abs(a).max())[1])
    return (a, 0) if abs(exponent) <= FAR else (times_power(a, -exponent), exponent)


def times_power(a: Array, exponent: int) -> Array:
    """a · 2^exponent, exact unless it leaves the dtype's range."""
    if not exponent:
        return a
    result = np.empty_like(a)
    np.ldexp(a.real, exponent, out=result.real)
    if a.dtype.kind == "c":
        np.ldexp(a.imag, exponent, out=result.imag)
    return result


def _from_pairs(v: Array, w: Array) -> Array:
    """Complex vectors of a real matrix; the real and imaginary parts of a pair are in adjacent columns."""
    first = np.flatnonzero(w.imag > 0)
    vectors = v.astype(w.dtype)
    vectors[:, first] += 1j * v[:, first + 1]
    vectors[:, first + 1] = vectors[:, first].conj()
    return vectors


def _randomized_svd(request: Any, a: Array) -> dict[str, Any]:
    if not np.isfinite(a).all():
        return {"u": 0, "s": 0, "vh": 0, "info": FAILED}
    k = request.rank
    u, s, vh, info = lapack("gesdd", a.dtype)(a, compute_uv=request.compute_uv, full_matrices=False)
    return {"u": u[:, :k], "s": s[:k], "vh": vh[:k], "info": info}


def _svd(request: Any, a: Array) -> dict[str, Any]:
    rows, cols = a.shape
    if not a.size:
        extents = (rows, cols) if request.full_matrices else (0, 0)
        return {"u": np.eye(rows, extents[0]), "s": np.zeros(0), "vh": np.eye(extents[1], cols), "info": 0}
    if not np.isfinite(a).all():
        return {"u": 0, "s": 0, "vh": 0, "info": FAILED}
    name = "gesvd" if request.driver in (None, SvdDriver.GESVD) else "gesdd"
    u, s, vh, info = lapack(name, a.dtype)(a, compute_uv=request.compute_uv, full_matrices=request.full_matrices)
    return {"u": u, "s": s, "vh": vh, "info": info}


SPECTRAL: dict[str, Callable[..., dict[str, Any]]] = {
    "eig": _eig,
    "eigh": _eigh,
    "generalized_eigh": _generalized_eigh,
    "randomized_svd": _randomized_svd,
    "svd": _svd,
}
