"""Iterations by SciPy: the host's results. Results are tested against the criterion, in cases_krylov.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import NumpyPlan, work_of
from dispatch.errors import Refused
from dispatch.ops.sparse.krylov import BREAKDOWN, NOT_FINITE, STAGNATED, Preconditioner
from dispatch.ops.sparse.matrix_reference import matrix_of, numbers
from dispatch.ops.sparse.reference import NEEDS_SCIPY
from dispatch.refusal import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.layout import Array

__all__ = ["evaluate_krylov", "norm_of", "preconditioner_function", "preconditioner_matrix", "scipy_krylov"]


class IterationStopped(Exception):  # raised by a callback, to end SciPy's iteration
    """The criterion holds, or x is not finite; `args` are x, the status, and the number of iterations."""


def scipy_krylov(request: Any, executor: object, row: Row) -> NumpyPlan:
    """A plan that iterates with SciPy; Refused if it is not installed, or is older than 1.12."""
    del request, executor
    try:
        import scipy
    except ImportError as error:
        raise Refused(NEEDS_SCIPY, Kind.RULE) from error
    if tuple(map(int, scipy.__version__.split(".")[:2])) < (1, 12):
        raise Refused(f"needs scipy 1.12 or later, has {scipy.__version__}", Kind.RULE)
    return NumpyPlan(row, evaluate_krylov, work_of(row.dtypes[0]))


def preconditioner_matrix(request: Any, matrix: Any) -> Any:
    """M as a matrix: its diagonal or its blocks, from operands or from A; None without M, and for factors."""
    import scipy.sparse as sp

    if request.is_factored:
        return None
    if request.is_blocked:
        return block_diagonal(numbers(request.M, matrix.dtype), len(request.b))
    if request.M is not None:
        return sp.diags_array(numbers(request.M, matrix.dtype), format="csr")
    if request.preconditioner is Preconditioner.NONE:
        return None
    diagonal = matrix.diagonal()
    diagonal = np.where(diagonal == 0, 1, np.abs(diagonal) if request.op == "minres" else diagonal)
    return sp.diags_array(np.asarray(1 / diagonal).astype(matrix.dtype), format="csr")


def block_diagonal(blocks: Array, n: int) -> Any:
    """Blocks (count, size, size) as a matrix of n rows; elements of the last block beyond n are not read."""
    import scipy.sparse as sp

    count, size, _ = blocks.shape
    within = np.arange(size)
    rows = np.arange(count)[:, None, None] * size + within[:, None] + 0 * within
    columns = np.arange(count)[:, None, None] * size + within + 0 * within[:, None]
    is_inside = (rows < n) & (columns < n)
    return sp.csr_array((blocks[is_inside], (rows[is_inside], columns[is_inside])), shape=(n, n))


def preconditioner_function(request: Any, matrix: Any, weights: Any) -> Callable[[Array], Array]:
    """The function that applies M: a product with `preconditioner_matrix`, or solves with incomplete factors."""
    import scipy.sparse as sp
    from scipy.sparse.linalg import spsolve_triangular

    if not request.is_factored:
        return (lambda u: u) if weights is None else (lambda u: np.asarray(weights @ u))
    factors = sp.csr_array((numbers(request.M, matrix.dtype), *csr_indices(request)), shape=matrix.shape)
    if not factors.diagonal().all():  # SciPy refuses zeros, by which a GPU divides
        return lambda u: np.full_like(u, nan_of(u))
    low = sp.tril(factors, format="csr")
    if request.preconditioner is Preconditioner.IC0:
        high = low.conj().T.tocsr()
        return lambda u: np.asarray(spsolve_triangular(high, spsolve_triangular(low, u), lower=False))
    high = sp.triu(factors, format="csr")
    return lambda u: np.asarray(spsolve_triangular(high, spsolve_triangular(low, u, unit_diagonal=True), lower=False))


def csr_indices(request: Any) -> tuple[Array, Array]:
    """Indices and offsets of A in CSR, with base 0."""
    return np.asarray(request.columns) - request.form.base, np.asarray(request.rows) - request.form.base


def norm_of(request: Any, vector: Array, weights: Any) -> float:
    """The norm in which a method measures its criterion."""
    if request.op == "minres" and weights is not None:
        return float(np.sqrt(np.abs((vector * (weights @ vector)).sum())))
    return float(np.linalg.norm(vector))


def evaluate_krylov(request: Any, work: np.dtype[Any]) -> Results:
    """The solution, the status of the iteration, and the norm of b - A·x."""
    a = matrix_of(request, work).tocsr()
    b = numbers(request.b, work)
    start = np.zeros_like(b) if request.x0 is None else numbers(request.x0, work)
    weights = preconditioner_matrix(request, a)
    size = norm_of(request, b, weights)
    if size == 0:
        return results(np.zeros_like(b), 0, 0, 0.0)
    operands = (a.data, b, start, b[:0] if weights is None else weights.data)
    if not all(np.isfinite(part).all() for part in operands):
        return results(np.full_like(b, nan_of(b)), NOT_FINITE, 0, np.nan)
    apply = preconditioner_function(request, a, weights)
    if request.is_factored and not np.isfinite(apply(b)).all():
        return results(np.full_like(b, nan_of(b)), NOT_FINITE, 0, np.nan)
    target = max(request.rtol * size, request.atol)
    if norm_of(request, b - a @ start, weights) <= target:
        return results(start, 0, 0, norm_of(request, b - a @ start, weights))
    x, info, count = METHODS[request.op](request, a, b, start, weights, apply, target)
    if not np.isfinite(x).all():  # SciPy divides by 0
        return results(np.full_like(b, nan_of(b)), BREAKDOWN, count, np.nan)
    left = norm_of(request, b - a @ x, weights)
    # SciPy checks before each iteration, but not after the last one.
    status = 0 if left <= target else info if info in (0, STAGNATED) else BREAKDOWN if info < 0 else count
    return results(x, status, count, left)


def nan_of(b: Array) -> complex:
    """NaN of a dtype; for a complex one in both parts."""
    return complex(np.nan, np.nan) if b.dtype.kind == "c" else np.nan


def results(x: Array, info: int, count: int, residual: float) -> Results:
    """The outputs by name."""
    scalars = {"info": np.int32(info), "iterations": np.int32(count), "residual": np.asarray(residual)}
    return {"out": x, **{name: np.asarray(value) for name, value in scalars.items()}}


def by_scipy(
    request: Any, a: Any, b: Array, start: Array, weights: Any, apply: Callable[[Array], Array], target: float
) -> tuple[Array, int, int]:
    """x of `cg` and `bicgstab`, SciPy's info and the number of iterations."""
    from scipy.sparse import linalg

    count, last = 0, start

    def counting(x: Array) -> None:
        nonlocal count, last
        if not np.isfinite(x).all():  # `cg` divides by 0 and goes on
            raise IterationStopped(last, BREAKDOWN, count)
        count, last = count + 1, x.copy()

    m = None if request.M is None and weights is None else operator_of(a, lambda u: apply(u.ravel()))
    above = np.nextafter(b.real.dtype.type(target), np.inf)  # SciPy ends below its target; so a target of 0 works, too
    choices = {"rtol": 0.0, "atol": float(above), "maxiter": request.limit}
    try:
        x, info = getattr(linalg, request.op)(a, b, start.copy(), M=m, callback=counting, **choices)
    except IterationStopped as stopped:
        x, info, count = stopped.args
    return np.asarray(x), int(info), count


def by_minres(
    request: Any, a: Any, b: Array, start: Array, weights: Any, apply: Callable[[Array], Array], target: float
) -> tuple[Array, int, int]:
    """The x of the least residual, whether it stopped decreasing, and the number of iterations.

    SciPy's criterion is different, and without it SciPy continues along the null space of a singular matrix. So a
    callback ends it, under the kernels' condition: r is almost orthogonal to the range of A.
    """
    from scipy.sparse import linalg

    if not is_positive(request, weights):
        return start, BREAKDOWN, 0
    weighted = a if weights is None else weights @ a
    norm_of_a = float(np.sqrt(weighted.multiply(weighted.T).sum()))  # ‖M^½·A·M^½‖, of Frobenius
    least = max(64 * float(np.finfo(b.dtype).eps), 1e-3 * request.rtol)
    count, best, least_norm = 0, start, norm_of(request, b - a @ start, weights)

    def counting(x: Array) -> None:
        nonlocal count, best, least_norm
        if not np.isfinite(x).all():
            raise IterationStopped(best, BREAKDOWN, count)
        count += 1
        left = b - a @ x
        norm = norm_of(request, left, weights)
        if norm < least_norm:
            best, least_norm = x.copy(), norm
        if norm <= target:
            raise IterationStopped(best, 0, count)
        if norm_of(request, a @ apply(left), weights) <= least * norm_of_a * norm or norm > 2 * least_norm:
            raise IterationStopped(best, STAGNATED, count)

    m = None if weights is None else operator_of(a, lambda u: apply(u.ravel()))
    try:
        linalg.minres(a, b, start.copy(), M=m, maxiter=request.limit, callback=counting, rtol=0.0)
    except IterationStopped as stopped:
        x, info, count = stopped.args
        return x, info, count
    return best, 0 if least_norm <= target else STAGNATED if count < request.limit else count, count


def is_positive(request: Any, weights: Any) -> bool:
    """Whether M is positive definite."""
    if not request.is_blocked:
        return weights is None or bool((weights.diagonal() > 0).all())
    blocks = numbers(request.M, weights.dtype)
    last = len(request.b) - (len(blocks) - 1) * blocks.shape[-1]
    full_blocks, end = blocks[:-1], blocks[-1:, :last, :last]
    return all((np.linalg.eigvalsh((part + part.transpose(0, 2, 1)) / 2) > 0).all() for part in (full_blocks, end))


def operator_of(a: Any, product: Callable[[Array], Array]) -> Any:
    """A function as SciPy's linear operator, of the size of A."""
    from scipy.sparse.linalg import LinearOperator

    return LinearOperator(a.shape, matvec=product, dtype=a.dtype)


def right_preconditioned(
    request: Any, a: Any, b: Array, start: Array, weights: Any, apply: Callable[[Array], Array], target: float
) -> tuple[Array, int, int]:
    """`gmres` of A·M for the residual of b, so that its residual is the true one, in SciPy's cycles.

    A cycle that SciPy considers its last, or that ends early, is the last one if it does not lower the residual: as in
    the kernels.
    """
    from scipy.sparse import linalg

    del weights
    count, x, last = 0, start, float(np.linalg.norm(b - a @ start))

    def counting(_: float) -> None:
        nonlocal count
        count += 1

    operator = operator_of(a, lambda u: a @ apply(u.ravel()))
    cycle = {"rtol": 0.0, "atol": target, "restart": request.length, "maxiter": 1, "callback_type": "pr_norm"}
    for _ in range(request.limit):
        before = count
        u, claimed = linalg.gmres(operator, b - a @ x, callback=counting, **cycle)
        new = np.asarray(x + apply(u))
        norm = float(np.linalg.norm(b - a @ new))
        if norm <= target:
            return new, 0, count
        is_early = claimed == 0 or count - before < request.length or request.length >= len(b)  # with all vectors
        if is_early and not norm < 0.9 * last:
            return (new if norm < last else x), STAGNATED if claimed == 0 else BREAKDOWN, count
        x, last = new, norm
    return x, count, count


METHODS = {"cg": by_scipy, "bicgstab": by_scipy, "minres": by_minres, "gmres": right_preconditioned}
