"""The errors of eigenvalues and singular values of one matrix, in units of n·eps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.ops.linalg.norms import (
    THRESHOLD,
    hermitian_matrix,
    norm,
    orthonormality_error,
    scaled_error,
    scaled_iteration_error,
    standard_form,
)
from dispatch.ops.linalg.spectral import EighDriver, SvdDriver
from dispatch.ops.linalg.subset import subset_slice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from dispatch.device.layout import Array

    Ratios: TypeAlias = Iterator[tuple[str, float]]

__all__ = ["SPECTRAL"]

# For a repeated eigenvalue any vectors that form a basis are correct: κ(V) may be this many times that of LAPACK's, if
# that is no larger than the second number.
LOOSE, FAR_FROM_DEFECTIVE = 1e3, 1e4
SWEEPS = 12  # the most sweeps of Jacobi's method


def ordered(request: Any, found: Any, exact: Array, size: float, eps: float) -> Ratios:
    """Eigenvalues compared with all that exist: their order, their number, NaN after them, and their distance."""
    w, expected = found["w"], exact[subset_slice(request, exact)]
    if request.subset_by_value is not None:
        count = len(expected)
        yield "another count of eigenvalues than are within the bounds", 0.0 if found["count"] == count else np.inf
        behind = [found["w"][count:], *([] if request.eigvals_only else [found["v"][:, count:]])]
        yield "what is behind the eigenvalues, NaN, for which this", 0.0 if all(map(_all_nan, behind)) else np.inf
        w = w[:count]
    yield "an eigenvalue below the one before", 0.0 if (np.diff(w) >= 0).all() else np.inf
    if request.driver is EighDriver.SYEVJ:
        yield "the largest distance of an eigenvalue", largest_error(w - expected, size, eps, len(exact))
    else:
        yield "the eigenvalues' distance", scaled_error((w - expected)[:, None], size, eps, len(exact))


def largest_error(errors: Array, size: float, eps: float, n: int) -> float:
    """The largest error in units of n·eps of a size; for other methods the sum of all errors must meet that bound.

    Jacobi's method rotates A about n times per sweep, and its rotations are orthogonal except for roundoff: with
    cuSOLVER all values drift in the same direction. On an H100 the largest error was 0.7 to 3.3 n·eps·‖A‖ of the
    spectral norm (matrices of 30 to 515 rows, 6 to 11 sweeps, f32 to c64), whatever tolerance ends the method;
    therefore the sum grows with n.
    """
    return scaled_error(errors[None, :], size, eps, n)


def rotation_error(x: Array, eps: float) -> float:
    """The distance from orthonormality of columns made by Jacobi's rotations, relative to what that many may cause.

    In a sweep a column is rotated with n - 1 others. A rotation with rounded sine and cosine, and rounded products with
    them, changes the length of the column by up to 5 roundoffs. Errors of one pair have the same sign, so they need not
    cancel: up to 5·n·eps per sweep, and cuSOLVER needs 6 to 11 sweeps. On an H100 the error of gesvdj's U for random
    c128 matrices of 515 rows was 18 to 20 n·eps, for torch with the same matrices as well, and 36 in one draw.
    """
    return orthonormality_error(x, eps) * THRESHOLD / (5 * SWEEPS)


def _all_nan(values: Array) -> bool:
    return bool(np.isnan(values).all())


def found_pairs(request: Any, found: Any) -> tuple[Array, Array]:
    """The eigenvalues and vectors that the request returned."""
    count = int(found["count"]) if request.subset_by_value is not None else len(found["w"])
    return found["w"][:count], found["v"][:, :count]


def _eigh(request: Any, a: Array, given: Any, found: Any, eps: float) -> Ratios:
    del given
    exact = np.linalg.eigvalsh(a)
    by_jacobi = request.driver is EighDriver.SYEVJ
    yield from ordered(request, found, exact, np.abs(exact).max(initial=0) if by_jacobi else norm(a), eps)
    if not request.eigvals_only:
        w, v = found_pairs(request, found)
        yield "A·V - V·w", scaled_error(a @ v - v * w, norm(a), eps, len(a))
        yield "I - Vᴴ·V", orthonormality_error(v, eps)


def _generalized_eigh(request: Any, a: Array, given: Any, found: Any, eps: float) -> Ratios:
    """As LAPACK's dsgt01, but the condition of B counts: the routines use its Cholesky factor.

    The bound for eigenvalues is that of LAPACK's Users' Guide, ‖A‖·‖B⁻¹‖ + κ(B)·|w|, with ‖B‖ for problems 2 and 3.
    """
    if not a.size:
        yield from ordered(request, found, np.zeros(0), 0.0, eps)
        return
    b = hermitian_matrix(given["b"], lower=request.lower)
    inverse, condition = np.linalg.inv(b), float(np.linalg.cond(b))
    exact = np.linalg.eigvalsh(standard_form(a, b, request.itype))
    largest = [float(np.linalg.norm(one, 2)) for one in (a, inverse if request.itype == 1 else b)]
    yield from ordered(request, found, exact, largest[0] * largest[1] + condition * np.abs(exact).max(), eps)
    if request.eigvals_only:
        return
    w, v = found_pairs(request, found)
    left, right = {1: (a @ v, b @ v), 2: (a @ b @ v, v), 3: (b @ a @ v, v)}[request.itype]
    size = norm(a) * norm(v) * condition * (1.0 if request.itype == 1 else norm(b))
    yield "what is left of the problem", scaled_error(left - right * w, size, eps, len(a))
    metric = inverse if request.itype == 3 else b  # the third problem
    yield "I - Vᴴ·B·V", scaled_error(v.conj().T @ metric @ v - np.eye(v.shape[1]), condition, eps, len(a))


def _eig(request: Any, a: Array, given: Any, found: Any, eps: float) -> Ratios:
    """As LAPACK's dget22; eigenvalues without vectors must be those of nearby matrices: A - w is nearly singular.

    The sums of w and of w² show that no eigenvalue appears twice in place of another.
    """
    del given
    n, w = len(a), found["w"]
    if not request.a.dtype.is_complex:
        alike = np.array_equal(np.sort_complex(w), np.sort_complex(w.conj()))
        yield "eigenvalues that are no conjugate pairs, for which this", 0.0 if alike else np.inf
    yield (
        "the sum's distance from the trace",
        scaled_error(np.atleast_2d(w.sum() - np.trace(a)), norm(a), eps, max(n, 1)),
    )
    squares = np.atleast_2d((w * w).sum() - np.trace(a @ a))
    yield "the sum of the squares' distance", scaled_error(squares, norm(a) ** 2, eps, max(n, 1))
    if request.eigvals_only:
        for value in w:
            least = np.linalg.svd(a - value * np.eye(n), compute_uv=False)[-1:]
            yield "the least singular value of A - w", scaled_error(least[:, None], norm(a), eps, n)
        return
    v = found["v"]
    yield "A·V - V·w", scaled_error(a @ v - v * w, norm(a), eps, n)
    lengths = np.abs(np.linalg.norm(v, axis=0) - 1).max(initial=0)
    yield "a length of V's columns", float(lengths / max(n * eps, np.finfo(np.float64).tiny))
    if n and (exact := np.linalg.cond(np.linalg.eig(a)[1])) < FAR_FROM_DEFECTIVE:
        yield "V's condition, far above what it may be,", 0.0 if np.linalg.cond(v) <= LOOSE * exact else np.inf
    if request.left and n:
        yield from _left(a, w, found["vl"], eps)


def _left(a: Array, w: Array, u: Array, eps: float) -> Ratios:
    """Left eigenvectors: each must fit an eigenvalue of its own like a right one, and w except for the condition of w.

    That condition is 1/|uᴴ·v|: the distance of an eigenvalue of A from that of a matrix that is off by roundoff.
    """
    n = len(a)
    products = u.conj().T @ a
    values = (products * u.T).sum(axis=1)
    yield (
        "Uᴴ·A - w'·Uᴴ of their own w'",
        scaled_error((products - values[:, None] * u.conj().T).conj().T, norm(a), eps, n),
    )
    lengths = np.abs(np.linalg.norm(u, axis=0) - 1).max()
    yield "a length of U's columns", float(lengths / (n * eps))
    exact, v = np.linalg.eig(a)
    if np.linalg.cond(v) < FAR_FROM_DEFECTIVE:
        conditions = np.linalg.norm(np.linalg.inv(v), axis=1)[np.abs(exact - w[:, None]).argmin(axis=1)]
        distances = np.abs(products - w[:, None] * u.conj().T).sum(axis=1) / conditions
        yield "Uᴴ·A - w·Uᴴ, in units of w's condition,", float(distances.max() / (n * eps * norm(a)))


def _randomized_svd(request: Any, a: Array, given: Any, found: Any, eps: float) -> Ratios:
    """The errors for matrices of the requested rank, where the approximation leaves nothing out.

    Columns (A·Aᴴ)^q·A·Ω contain the last of the k directions s[k-1]^(2q+1) times, plus roundoff of n·eps·s[0]^(2q+1):
    the direction rotates by n·eps·(s[0]/s[k-1])^(2q+1), and loses s[k-1] times that, which in units of n·eps·‖A‖ is
    (s[0]/s[k-1])^2q: 81 if s[0] is 3·s[k-1] and q is 2. The error of cuSOLVER's singular values was 183 (f64) and 222
    (f32) n·eps·‖A‖ on an H100.
    """
    del given
    s, most, k = found["s"], max(a.shape), request.rank
    yield "a singular value above the one before, or below 0,", 0.0 if is_descending(s) else np.inf
    exact = np.linalg.svd(a, compute_uv=False)[:k]
    size = norm(a) * float(exact[0] / exact[-1]) ** (2 * request.iterations)
    yield (
        "the singular values' distance, in units of (s[0]/s[k-1])^2q,",
        scaled_error((s - exact)[:, None], size, eps, most),
    )
    if request.compute_uv:
        u, vh = found["u"], found["vh"]
        yield "A - U·S·Vᴴ, in units of (s[0]/s[k-1])^2q,", scaled_error((u * s) @ vh - a, size, eps, most)
        yield "I - Uᴴ·U", orthonormality_error(u, eps)
        yield "I - V·Vᴴ", orthonormality_error(vh.conj().T, eps)


def is_descending(s: Array) -> bool:
    """Whether singular values are in order, and none is below 0."""
    return bool((np.diff(s) <= 0).all() and (s >= 0).all())


def _approximate_svd(request: Any, a: Array, found: Any, eps: float) -> Ratios:
    """The errors of a decomposition by Aᴴ·A: κ is ‖A‖ over the least singular value, bounded by the roundoff of a 0.

    The error of the eigenvalues, which are the squares of the singular values, is n·eps·‖A‖², and that of the
    singular values n·eps·‖A‖·κ. The columns of U are A·V divided by them: the error of V appears κ² times in Uᴴ·U.
    """
    s, most = found["s"], max(a.shape)
    yield "a singular value above the one before, or below 0,", 0.0 if is_descending(s) else np.inf
    exact, size = np.linalg.svd(a, compute_uv=False), norm(a)
    yield (
        "the distance of the singular values' squares",
        scaled_error((s * s - exact * exact)[:, None], size * size, eps, most),
    )
    if request.compute_uv and a.size:
        largest = 1 / np.sqrt(most * eps)
        condition = min(size / max(float(exact[-1]), np.finfo(np.float64).tiny), largest)
        # If A is wide, Aᵀ = U'·S·V'ᴴ is decomposed, and U' is the transpose of Vᴴ.
        u, v = found["u"], found["vh"].conj().T
        left, right = (u, v) if len(a) >= a.shape[1] else (v, u)
        yield "I - Vᴴ·V", orthonormality_error(right, eps)
        if condition < largest:
            yield "A - U·S·Vᴴ, in units of κ,", scaled_error((u * s) @ v.conj().T - a, size * condition, eps, most)
            yield "I - Uᴴ·U, in units of κ²,", orthonormality_error(left, eps * condition**2)


def _svd(request: Any, a: Array, given: Any, found: Any, eps: float) -> Ratios:
    del given
    if request.driver is SvdDriver.GESVDA:
        yield from _approximate_svd(request, a, found, eps)
        return
    s, most = found["s"], max(a.shape)
    yield "a singular value above the one before, or below 0,", 0.0 if is_descending(s) else np.inf
    exact = np.linalg.svd(a, compute_uv=False)
    if request.driver is SvdDriver.GESVDJ:
        yield "the largest distance of a singular value", largest_error(s - exact, exact.max(initial=0), eps, most)
    else:
        yield "the singular values' distance", scaled_iteration_error((s - exact)[:, None], norm(a), eps, most)
    if request.compute_uv:
        u, vh = found["u"], found["vh"]
        error = (u[:, : len(s)] * s) @ vh[: len(s)] - a
        yield "A - U·S·Vᴴ", scaled_iteration_error(error, norm(a), eps, most)
        orthonormal = rotation_error if request.driver is SvdDriver.GESVDJ else orthonormality_error
        yield "I - Uᴴ·U", orthonormal(u, eps)
        yield "I - V·Vᴴ", orthonormal(vh.conj().T, eps)


SPECTRAL: dict[str, Callable[[Any, Array, Any, Any, float], Any]] = {
    "eig": _eig,
    "eigh": _eigh,
    "generalized_eigh": _generalized_eigh,
    "randomized_svd": _randomized_svd,
    "svd": _svd,
}
