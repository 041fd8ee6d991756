"""Results derived from factorizations, by LAPACK through SciPy: by name, for one matrix at a time or for all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.ops.linalg.derived import InverseKind, LstsqDriver, NormOrder
from dispatch.ops.linalg.exponential_reference import expm
from dispatch.ops.linalg.multiply import QrSide
from dispatch.ops.linalg.spectral_reference import FAILED, lapack

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.device.layout import Array

__all__ = ["BATCHED", "DERIVED"]

WORK = 64  # columns of LAPACK's workspace
MAX_FACTORS = 512  # factors of at least 0.5: the product with one more factor is above 2^-514
FARTHEST = 10_000  # the largest exponent that matters: any number of f64 times 2^10,000 is infinite or 0
ORDERS: dict[NormOrder, Any] = {
    NormOrder.FRO: "fro",
    NormOrder.NUC: "nuc",
    NormOrder.ONE: 1,
    NormOrder.MIN_ONE: -1,
    NormOrder.INF: np.inf,
    NormOrder.MIN_INF: -np.inf,
    NormOrder.TWO: 2,
    NormOrder.MIN_TWO: -2,
}


def _inv(request: Any, a: Array) -> dict[str, Any]:
    if not a.size:
        return {"out": a, "info": 0}
    if request.assume_a is InverseKind.GEN:
        lu, pivots, info = lapack("getrf", a.dtype)(a)
        out = a if info else lapack("getrs", a.dtype)(lu, pivots, np.eye(len(a), dtype=a.dtype))[0]
        return {"out": out, "info": info}
    if request.assume_a is InverseKind.POS:
        c, info = lapack("potrf", a.dtype)(a, lower=request.lower)
        half = a if info else lapack("potri", a.dtype)(c, lower=request.lower)[0]
        strict = np.tril(half, -1) if request.lower else np.triu(half, 1)
        return {"out": strict + strict.conj().T + np.diag(np.diag(half).real), "info": info}
    lower = request.assume_a is InverseKind.LOWER
    out, info = lapack("trtri", a.dtype)(np.tril(a) if lower else np.triu(a), lower=lower)
    return {"out": out, "info": info}


def _diagonals(a: Array) -> Array:
    """The diagonals of U of P·A = L·U for a batch of matrices, with the sign changed for each row exchange."""
    factors = np.ones(a.shape[:-1], a.dtype)
    for place in np.ndindex(a.shape[:-2]) if a.size else ():
        lu, pivots, _ = lapack("getrf", a.dtype)(a[place])
        factors[place] = np.where(pivots == np.arange(len(pivots)), 1, -1) * np.diag(lu)
    return factors.astype(np.result_type(a.dtype, np.float64))


def _scaled(numbers: Array) -> tuple[Array, Array]:
    """Numbers whose larger part is in [0.5, 1), and the exponents of 2 to multiply them by.

    Numbers that are 0, infinite or NaN are unchanged.
    """
    is_complex = numbers.dtype.kind == "c"
    size = np.maximum(np.abs(numbers.real), np.abs(numbers.imag)) if is_complex else numbers
    mantissa, power = np.frexp(size)
    power = np.where(np.isfinite(size), power, 0)  # in C it is unspecified for infinities and NaN
    return _times_power(numbers, -power) if is_complex else mantissa, power.astype(np.int64)


def _times_power(numbers: Array, power: Array) -> Array:
    """Numbers times 2^power, each rounded once: a part that is too large becomes infinite, one that is too small 0."""
    power = np.clip(power, -FARTHEST, FARTHEST).astype(np.int32)
    result = np.empty_like(numbers)
    result.real = np.ldexp(numbers.real, power)
    if numbers.dtype.kind == "c":
        result.imag = np.ldexp(numbers.imag, power)
    return result


def _product(factors: Array) -> tuple[Array, Array]:
    """The products along the last axis, and the exponents of 2 to multiply them by: nothing overflows."""
    numbers, powers = _scaled(factors)
    product, power = np.ones(factors.shape[:-1], factors.dtype), powers.sum(axis=-1)
    for first in range(0, factors.shape[-1], MAX_FACTORS):
        product, further = _scaled(product * numbers[..., first : first + MAX_FACTORS].prod(axis=-1))
        power = power + further
    return product, power


def _slogdet(request: Any, a: Array) -> dict[str, Any]:
    del request
    numbers, power = _product(_diagonals(a))
    size = np.abs(numbers)
    sign = numbers / np.where(size > 0, size, 1) if a.dtype.kind == "c" else np.sign(numbers)
    return {"sign": sign, "logabsdet": np.log(size) + power * np.log(2)}


def _det(request: Any, a: Array) -> dict[str, Any]:
    del request
    wide = a.astype(np.result_type(a.dtype, np.float64))  # as on a GPU: infinite only if the result is too large
    return {"det": _times_power(*_product(_diagonals(wide))) + 0.0}  # -0 of a singular matrix becomes 0


def _matrix_norm(request: Any, a: Array) -> dict[str, Any]:
    if not a.size:
        return {"norm": 0}
    is_spectral = request.order in (NormOrder.NUC, NormOrder.TWO, NormOrder.MIN_TWO)
    if np.isnan(a).any() or (is_spectral and not np.isfinite(a).all()):
        return {"norm": np.nan}
    wide = a if is_spectral else a.astype(np.result_type(a.dtype, np.float64))
    largest = float(np.abs(wide).max())
    if request.order is NormOrder.FRO and 0 < largest < np.inf:
        return {"norm": np.linalg.norm(wide / largest) * largest}  # no square overflows
    return {"norm": np.linalg.norm(wide, ORDERS[request.order])}


def _cutoff(request: Any, a: Array) -> float:
    """The fraction of the largest singular value up to which others count as 0, for the dtype of the operand."""
    if request.rtol is not None:
        return float(request.rtol)
    return float(max(a.shape) * np.finfo(request.a.dtype.numpy).eps)


def _decomposed(a: Array) -> tuple[Array, Array, Array, int]:
    if not np.isfinite(a).all():
        return a, np.full(min(a.shape), np.nan), a, FAILED
    u, s, vh, info = lapack("gesvd", a.dtype)(a, full_matrices=False)
    return u, s, vh, info


def _reciprocals(s: Array, share: float) -> tuple[Array, int]:
    significant = s > share * s[0]
    return np.divide(1, s, out=np.zeros_like(s), where=significant), int(significant.sum())


def _matrix_rank(request: Any, a: Array) -> dict[str, Any]:
    if not a.size:
        return {"rank": 0, "info": 0}
    _, s, _, info = _decomposed(a)
    return {"rank": 0 if info else _reciprocals(s, _cutoff(request, a))[1], "info": info}


def _pinv(request: Any, a: Array) -> dict[str, Any]:
    if not a.size:
        return {"out": a.T, "info": 0}
    u, s, vh, info = _decomposed(a)
    if info:
        return {"out": 0, "info": info}
    factors, _ = _reciprocals(s, _cutoff(request, a))
    return {"out": (vh.conj().T * factors) @ u.conj().T, "info": 0}


def _polar(request: Any, a: Array) -> dict[str, Any]:
    is_right = request.side is QrSide.RIGHT
    if not a.size:
        return {"u": a, "p": np.zeros((a.shape[is_right],) * 2), "info": 0}
    w, s, vh, info = _decomposed(a)
    if info:
        return {"u": 0, "p": 0, "info": info}
    return {"u": w @ vh, "p": (vh.conj().T * s) @ vh if is_right else (w * s) @ w.conj().T, "info": 0}


def _lstsq(request: Any, a: Array, b: Array) -> dict[str, Any]:
    cols, least = a.shape[1], min(a.shape)
    side = b[:, None] if b.ndim == 1 else b
    nothing = {"rank": 0, "s": np.zeros(least), "info": 0}
    x = np.zeros((cols, side.shape[1]), a.dtype)
    if request.driver is LstsqDriver.GELSS and a.size:
        u, s, vh, info = _decomposed(a)
        if info:
            return {**dict.fromkeys(("out", "residuals", "s", "rank"), 0), "info": info}
        factors, rank = _reciprocals(s, _cutoff(request, a))
        nothing |= {"rank": rank, "s": s}
        x = vh.conj().T @ (factors[:, None] * (u.conj().T @ side))
    elif a.size and side.size:
        x, nothing["info"] = _by_reflections(a, side)
    left = (np.abs(side - a @ x) ** 2).sum(axis=0)
    residuals = np.zeros(0) if len(a) <= cols else left[0] if b.ndim == 1 else left
    return {"out": x[:, 0] if b.ndim == 1 else x, "residuals": residuals, **nothing}


def _by_reflections(a: Array, b: Array) -> tuple[Array, int]:
    rows, cols = a.shape
    source = a if rows >= cols else a.conj().T
    q, r = np.linalg.qr(source)
    zeros = np.flatnonzero(np.diag(r) == 0)
    if zeros.size:
        return np.zeros((cols, b.shape[1]), a.dtype), int(zeros[0]) + 1
    solved = lapack("trtrs", a.dtype)
    if rows >= cols:
        return solved(r, q.conj().T @ b)[0], 0
    return q @ solved(r, b, trans=2)[0], 0


def _qr_multiply(request: Any, a: Array, c: Array) -> dict[str, Any]:
    is_left = request.mode is QrSide.LEFT
    if not a.size:
        extents = (len(a), c.shape[1]) if is_left else (len(c), 0)
        return {"out": np.zeros(extents), "r": np.zeros((0, a.shape[1]))}
    q, r = np.linalg.qr(a)
    return {"out": q @ c if is_left else c @ q, "r": r}


def _orgqr(request: Any, h: Array, tau: Array) -> dict[str, Any]:
    rows, columns = request.outputs()["q"].shape[-2:]
    if not tau.size:
        return {"q": np.eye(rows, columns)}
    work = np.zeros((rows, columns), h.dtype, order="F")
    work[:, : len(tau)] = h[:, : len(tau)]
    return {"q": lapack("ungqr" if h.dtype.kind == "c" else "orgqr", h.dtype)(work, tau)[0]}


def _ormqr(request: Any, h: Array, tau: Array, c: Array) -> dict[str, Any]:
    if not tau.size or not c.size:
        return {"out": c}
    is_complex = h.dtype.kind == "c"
    words = ("L" if request.side is QrSide.LEFT else "R", ("C" if is_complex else "T") if request.adjoint else "N")
    name = "unmqr" if is_complex else "ormqr"
    return {"out": lapack(name, h.dtype)(*words, h[:, : len(tau)], tau, c, max(c.shape) * WORK)[0]}


DERIVED: dict[str, Callable[..., dict[str, Any]]] = {
    "inv": _inv,
    "matrix_norm": _matrix_norm,
    "matrix_rank": _matrix_rank,
    "pinv": _pinv,
    "polar": _polar,
    "lstsq": _lstsq,
    "qr_multiply": _qr_multiply,
    "orgqr": _orgqr,
    "ormqr": _ormqr,
    "expm": expm,
}

BATCHED: dict[str, Callable[..., dict[str, Any]]] = {"det": _det, "slogdet": _slogdet}  # for all matrices at once
