"""Systems of equations with a sparse matrix under SciPy's names, with an optional check of the status."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.checks import check_bool, names_arguments, shown
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, LinAlgError, type_shown
from dispatch.keys import did_you_mean
from dispatch.ops import sparse as ops
from dispatch.ops.sparse.block_jacobi_functions import BlockJacobi, block_jacobi
from dispatch.ops.sparse.direct_functions import csr_values
from dispatch.ops.sparse.format_functions import as_sparse
from dispatch.ops.sparse.incomplete_functions import IncompleteFactors, ic0, ilu0
from dispatch.ops.sparse.krylov import BREAKDOWN, NOT_FINITE, STAGNATED, Preconditioner

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.ops.sparse.tensor import SparseTensor

__all__ = ["LinAlgError", "bicgstab", "cg", "gmres", "minres"]

MEANINGS = {
    BREAKDOWN: (
        "the method broke down: a scalar that it divides by is 0",
        "gmres breaks down only with singular matrices",
    ),
    NOT_FINITE: ("an intermediate result is NaN or infinite", "check A, b and x0"),
    STAGNATED: ("the residual stopped decreasing", "use a larger rtol or f64; the system may have no solution"),
}
UNFINISHED = (
    "the residual is {residual:.3g} after {iterations} iterations",
    "use a larger maxiter, or a preconditioner M",
)


FACTORIZE: dict[Preconditioner, Callable[..., IncompleteFactors]] = {Preconditioner.ILU0: ilu0, Preconditioner.IC0: ic0}
BLOCKS = len(("block", "row", "column"))  # axes
BLOCKS_OR_DIAGONAL = """(blocks, size, size): inverses of the blocks along the diagonal, or (n,): the diagonal of a \
matrix that approximates the inverse of A"""
KINDS_OF_M = f"""None, "jacobi", "ilu0", "ic0", "block_jacobi", the result of ilu0(A), ic0(A) or \
block_jacobi(A, size), {BLOCKS_OR_DIAGONAL}"""
KINDS_OF_MINRES = f"""None, "jacobi", "block_jacobi", the result of block_jacobi(A, size, absolute=True), \
{BLOCKS_OR_DIAGONAL}"""
ONE_LAUNCH = "all iterations are one launch, during which no Python function can run"


def refuse_host(a: Any, callback: Any) -> None:
    """BadRequest for arguments that need the host in each iteration: a callback, or a function in place of a matrix."""
    if callback is not None:
        hint = "maxiter=k with x0=x returns every k-th x"
        raise BadRequest("callback", shown(callback), f"None: {ONE_LAUNCH}", hint)
    if callable(a) or hasattr(a, "matvec"):
        hint = "build its matrix, or write the iteration with requests of dispatch"
        raise BadRequest("A", type_shown(a), f"a sparse matrix: {ONE_LAUNCH}", hint)


def iterate(
    solve: Callable[..., Any],
    a: Any,
    b: Any,
    x0: Any,
    m: Any,
    check: bool,
    callback: Any,
    choices: dict[str, Any],
) -> Any:
    """(x, info) of a request function; with `check` only x, after waiting until its status is known to be 0."""
    check_bool("check", check)
    refuse_host(a, callback)
    matrix = as_sparse(a, "A")
    kind = kind_of_m(m, takes_factors=solve is not ops.minres)
    if kind in FACTORIZE and not isinstance(m, IncompleteFactors):
        m = FACTORIZE[kind](matrix)
        matrix = m.source
    if isinstance(m, IncompleteFactors):
        matrix, m = with_pattern_of(matrix, m), m.matrix.values
    elif isinstance(m, BlockJacobi):
        m = m.inverses
    elif kind is Preconditioner.BLOCK_JACOBI and isinstance(m, (str, Preconditioner)):
        m = block_jacobi(matrix, absolute=solve is ops.minres).inverses  # its "jacobi" uses magnitudes, too
    elif isinstance(m, (str, Preconditioner)):
        m = None
    choices["preconditioner"] = kind
    results = solve(*matrix.parts, b, x0, M=m, **choices)
    if not check:
        return results[:2]
    check_iterations(solve.__name__, *results[1:])
    return results[0]


def kind_of_m(m: Any, *, takes_factors: bool) -> Preconditioner:
    """The kind of M: a preconditioner's name or object, or a tensor; BadRequest for anything else."""
    expected = KINDS_OF_M if takes_factors else KINDS_OF_MINRES
    if isinstance(m, IncompleteFactors):
        kind = Preconditioner[m.kind.upper()]
    elif isinstance(m, BlockJacobi):
        kind = Preconditioner.BLOCK_JACOBI
    elif isinstance(m, (str, Preconditioner)):
        preconditioner = m if isinstance(m, Preconditioner) else Preconditioner.named(str.__str__(m))
        if preconditioner is None:
            raise BadRequest("M", shown(m), expected + did_you_mean(Preconditioner, m))
        kind = preconditioner
    elif m is None or getattr(m, "ndim", 0) == 1:
        kind = Preconditioner.NONE
    elif getattr(m, "ndim", 0) == BLOCKS:
        kind = Preconditioner.BLOCK_JACOBI
    else:
        raise BadRequest("M", type_shown(m), expected)
    if kind.is_factored and not takes_factors:
        raise BadRequest(
            "M", shown(m), expected, "minres does not support incomplete factors; cg, bicgstab and gmres do"
        )
    return kind


def with_pattern_of(matrix: SparseTensor, factors: IncompleteFactors) -> SparseTensor:
    """A matrix in the form of its factors, to use their analyses; BadRequest if its indices differ from theirs."""
    factored, columns = factors.matrix, factors.columns
    if shares_indices(matrix, factored):
        return matrix.with_form(factored.form)
    if columns is not None and shares_indices(matrix, columns):
        return factored.with_values(csr_values(columns, matrix.values))
    hint = "pass as A the object that was passed to ilu0 or ic0, or M.source.with_values(values), by rows"
    raise BadRequest("M", repr(factors), f"factors with the offsets and indices of {matrix!r}", hint)


def shares_indices(one: SparseTensor, other: SparseTensor) -> bool:
    """Whether two matrices have their offsets and indices in the same memory, with the same meaning."""
    pairs = (one.rows, other.rows), (one.columns, other.columns)
    same = all(first.ptr == second.ptr and first.layout == second.layout for first, second in pairs)
    return same and one.form._replace(pattern=other.form.pattern) == other.form


def check_iterations(routine: str, info: Any, iterations: Any, residual: Any) -> None:
    """Wait for the results of an iteration's request, and raise LinAlgError if `info` is not 0."""
    status = int(_number(info))
    if status:
        values = {"residual": float(_number(residual)), "iterations": int(_number(iterations))}
        meaning, hint = MEANINGS.get(status, UNFINISHED)
        raise LinAlgError(routine, {(): status}, meaning.format(**values), hint)


def _number(given: Any) -> Any:
    """A number from a tensor of any library; waits for it."""
    return given.item() if isinstance(given, Tensor) or hasattr(given, "item") else np.asarray(given).item()


@names_arguments
def cg(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    rtol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: Any = None,
    callback: None = None,
    check: bool = False,
) -> Any:
    """(x, info) of A·x = b for a Hermitian positive definite A: the request `cg`, which also returns the iterations.

    `M` is None, "jacobi", or the diagonal of a matrix that approximates the inverse of A. It may also be incomplete
    factors: the result of `ic0(A)` or `ilu0(A)`, or "ic0" or "ilu0", which are computed in each call. Or it is the
    inverses of the blocks along the diagonal: the result of `block_jacobi(A, block_size)`, other blocks (blocks, size,
    size), or for BSR "block_jacobi", which inverts its own blocks in each call. `info` is on the device: 0, the number
    of iterations if these did not suffice, or negative. With `check` the call waits for it, raises LinAlgError if it is
    not 0, and returns only x. SciPy's `callback` is refused, because the host sees no intermediate results.
    """
    return iterate(ops.cg, A, b, x0, M, check, callback, {"rtol": rtol, "atol": atol, "maxiter": maxiter})


@names_arguments
def bicgstab(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    rtol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: Any = None,
    callback: None = None,
    check: bool = False,
) -> Any:
    """Like `cg`, for any A: the request `bicgstab`."""
    return iterate(ops.bicgstab, A, b, x0, M, check, callback, {"rtol": rtol, "atol": atol, "maxiter": maxiter})


@names_arguments
def gmres(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    rtol: float = 1e-5,
    atol: float = 0.0,
    restart: int | None = None,
    maxiter: int | None = None,
    M: Any = None,
    callback: None = None,
    check: bool = False,
) -> Any:
    """Like `cg`, for any A, in cycles of `restart` iterations, 20 if left out: the request `gmres`.

    `maxiter` counts cycles, and info iterations.
    """
    choices = {"rtol": rtol, "atol": atol, "maxiter": maxiter, "restart": 20 if restart is None else restart}
    return iterate(ops.gmres, A, b, x0, M, check, callback, choices)


@names_arguments
def minres(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    rtol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: Any = None,
    callback: None = None,
    check: bool = False,
) -> Any:
    """Like `cg`, for a real symmetric A that may be indefinite: the request `minres`. The criterion is that of `cg`."""
    return iterate(ops.minres, A, b, x0, M, check, callback, {"rtol": rtol, "atol": atol, "maxiter": maxiter})
