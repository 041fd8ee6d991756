"""Linear algebra named as in SciPy and NumPy, with the status of each routine checked: `dispatch.linalg`.

The functions of `dispatch` itself never wait: the status of a routine is a tensor, `info`, and failed results are NaN.
The functions here wait for that one number and raise LinAlgError if it is not 0. With `check=False` they do not wait,
and return it after the other results. Operands may be tensors of torch, CuPy or JAX, as everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.checks import check_bool, shown
from dispatch.core.request import run
from dispatch.errors import BadRequest, LinAlgError
from dispatch.ops import linalg as ops
from dispatch.ops.linalg.derived_functions import det, expm, inv, lstsq, matrix_rank, norm, pinv, polar, slogdet
from dispatch.ops.linalg.spectral_functions import eig, eigh, eigvals, eigvalsh, randomized_svd, svd, svdvals
from dispatch.ops.linalg.status import NOT_POSITIVE, ZERO_IN_D, check_info, checked

if TYPE_CHECKING:
    from dispatch.ops.linalg.request import MatrixKind

__all__ = [
    "LinAlgError",
    "check_info",
    "cho_solve",
    "cholesky",
    "det",
    "eig",
    "eigh",
    "eigvals",
    "eigvalsh",
    "expm",
    "inv",
    "ldl",
    "lstsq",
    "lu_factor",
    "lu_solve",
    "matrix_rank",
    "norm",
    "orgqr",
    "ormqr",
    "pinv",
    "polar",
    "qr",
    "qr_multiply",
    "randomized_svd",
    "refined_lstsq",
    "refined_solve",
    "slogdet",
    "solve",
    "svd",
    "svdvals",
]


def overwritten(name: str, operand: Any, overwrite: bool) -> Any:
    """The operand as `out` if the argument of that name says to overwrite it, otherwise None."""
    check_bool(name, overwrite)
    return operand if overwrite else None


def check_pair(name: str, given: Any, wanted: str) -> tuple[Any, Any]:
    """A tuple or a list of two; BadRequest for anything else."""
    if not isinstance(given, (tuple, list)) or len(given) != 2:  # a pair
        raise BadRequest(
            name, shown(given) if isinstance(given, (tuple, list)) else f"a {type(given).__name__}", wanted
        )
    return given[0], given[1]


def cholesky(a: Any, lower: bool = False, overwrite_a: bool = False, *, check: bool = True) -> Any:  # SciPy's
    """The factor of A = Uᴴ·U, or of A = L·Lᴴ if `lower`, with zeros in the other triangle; (…, n, n).

    With `overwrite_a` the result is written to the memory of `a`. With `check=False` it returns (factor, info); nothing
    waits.
    """
    results = ops.cholesky(a, lower=lower, out=overwritten("overwrite_a", a, overwrite_a))
    return checked("cholesky", results, check=check)


def cho_solve(c_and_lower: tuple[Any, bool], b: Any, overwrite_b: bool = False) -> Any:  # SciPy's
    """The x of A·x = b from (factor, lower); it cannot fail."""
    c, lower = check_pair("c_and_lower", c_and_lower, "(factor, lower), as in (cholesky(a), False)")
    return ops.cho_solve(c, b, lower=lower, out=overwritten("overwrite_b", b, overwrite_b))


def lu_factor(a: Any, overwrite_a: bool = False, *, check: bool = True) -> Any:  # SciPy's
    """(lu, pivots) of P·A = L·U; the pivots are counted from 1, as in LAPACK and unlike SciPy.

    Only square matrices can be singular: for other shapes no status is checked.
    """
    check_bool("check", check)
    results = ops.lu_factor(a, out=overwritten("overwrite_a", a, overwrite_a))
    shape = results[0].shape
    if check and shape[-1] != shape[-2]:
        return results[:2]
    return checked("lu_factor", results, check=check)


def lu_solve(lu_and_pivots: tuple[Any, Any], b: Any, trans: int = 0, overwrite_b: bool = False) -> Any:  # SciPy's
    """The x of A·x = b, Aᵀ·x = b or Aᴴ·x = b (`trans` 0, 1, 2) from the results of `lu_factor`."""
    lu, pivots = check_pair("lu_and_pivots", lu_and_pivots, "(lu, pivots), as lu_factor returns them")
    return ops.lu_solve(lu, pivots, b, trans=trans, out=overwritten("overwrite_b", b, overwrite_b))


def solve(
    a: Any,
    b: Any,
    lower: bool = False,  # SciPy's
    overwrite_a: bool = False,  # SciPy's; it allows reuse of the memory of `a`, which has no benefit here
    overwrite_b: bool = False,  # SciPy's
    *,
    assume_a: MatrixKind | str = "gen",
    autotune: bool = False,
    check: bool = True,
) -> Any:
    """The x of A·x = b; `assume_a` is "gen", "pos" where A is positive definite, "sym" or "her".

    SciPy's longer names, such as "positive definite", are accepted too. For a positive definite, symmetric or Hermitian
    matrix only one triangle is read. With `overwrite_b` x is written to the memory of `b`.
    """
    check_bool("overwrite_a", overwrite_a)
    out = overwritten("overwrite_b", b, overwrite_b)
    results = ops.solve(a, b, assume_a=assume_a, lower=lower, autotune=autotune, out=out)
    kind = assume_a if isinstance(assume_a, ops.MatrixKind) else ops.MatrixKind.named(str(assume_a))
    messages = {}
    if kind is ops.MatrixKind.POS:
        messages = {"meaning": NOT_POSITIVE, "hint": 'assume_a="gen" accepts any matrix'}
    elif kind is not ops.MatrixKind.GEN:
        messages = {"meaning": ZERO_IN_D}
    return checked("solve", results, check=check, **messages)


def ldl(
    a: Any,
    lower: bool = True,  # SciPy's
    hermitian: bool = True,  # SciPy's
    overwrite_a: bool = False,  # SciPy's; it allows reuse of the memory of `a`, which has no benefit here
) -> Any:
    """(lu, d, perm) of A = lu·d·luᴴ, or lu·d·luᵀ unless `hermitian`; lu[perm] is triangular, and perm counts from 0.

    The factors of a singular matrix are correct too: it cannot fail. `dispatch.ldl` returns them packed as in LAPACK,
    the form that `dispatch.ldl_solve` needs.
    """
    check_bool("overwrite_a", overwrite_a)
    return ops.ldl(a, lower=lower, hermitian=hermitian, expand=True)[:3]


def qr(a: Any, mode: ops.QrMode | str = "reduced") -> Any:
    """(q, r) of A = Q·R; with mode "r" only r, with "raw" LAPACK's (h, tau). It cannot fail.

    The default is NumPy's: Q has min(m, n) columns; SciPy's is "complete", which SciPy calls "full". h is as in SciPy,
    with r in its upper triangle; NumPy's is the transpose; `orgqr` and `ormqr` use both.
    """
    return run(ops.QrRequest(a, mode=mode))


def qr_multiply(a: Any, c: Any, mode: ops.QrSide | str = "right") -> Any:
    """(cq, r): C·Q of A = Q·R, with `mode="left"` Q·C, and R; Q, of min(m, n) columns, is not formed.

    C is (…, p, m), or for "left" (…, min(m, n), p): a vector is one row, or one column. It cannot fail.
    """
    return ops.qr_multiply(a, c, mode=mode)


def orgqr(h: Any, tau: Any, *, columns: int | None = None) -> Any:
    """Q's first `columns`, by default min(m, n), from (h, tau) of `qr` with mode "raw". It cannot fail."""
    return ops.orgqr(h, tau, columns=columns)


def ormqr(h: Any, tau: Any, c: Any, *, side: ops.QrSide | str = "left", adjoint: bool = False) -> Any:
    """Q·C from (h, tau) of `qr` with mode "raw", or for "right" C·Q; with `adjoint` Qᴴ replaces Q. It cannot fail."""
    return ops.ormqr(h, tau, c, side=side, adjoint=adjoint)


def refined_solve(a: Any, b: Any, *, check: bool = True, **choices: Any) -> Any:
    """(x, iterations) of A·x = b by factors of lower precision; `choices` are options of `dispatch.refined_solve`."""
    return checked("refined_solve", ops.refined_solve(a, b, **choices), check=check)


def refined_lstsq(a: Any, b: Any, *, check: bool = True, **choices: Any) -> Any:
    """(x, residuals, iterations) of A·x ≈ b by factors of lower precision; `choices`: see `dispatch.refined_lstsq`."""
    return checked("refined_lstsq", ops.refined_lstsq(a, b, **choices), check=check)
