"""The status of a routine, one number for each matrix, and the errors that are raised if it has failed."""

from __future__ import annotations

from typing import Any

from dispatch.checks import check_bool, check_type, shown
from dispatch.core.statuses import nonzero, on_host
from dispatch.errors import BadRequest, LinAlgError
from dispatch.libraries.cusolver.exponential import NOT_FINITE, TOO_LARGE

__all__ = ["NOT_POSITIVE", "ZERO_IN_D", "check_info", "checked"]

NOT_POSITIVE = "the leading minor of order {status} is not positive definite"
SINGULAR = "the matrix is singular: U[{before}, {before}] of its LU factorization is exactly 0"
ZERO_IN_D = "the matrix is singular: D[{before}, {before}] of its L·D·Lᴴ factorization is exactly 0"
UNCONVERGED = "the method did not converge (info {status})"
NOT_FINITE_THERE = "a NaN or an infinity in the matrix causes this"
PAIR = (
    "info is {status}: up to n it did not converge, n + i is that b's leading minor of order i is not positive definite"
)
MEANINGS = {
    "cholesky": (NOT_POSITIVE, "add a multiple of the identity, or use dispatch.linalg.solve, which pivots"),
    "lu_factor": (SINGULAR, "the factors are correct, but no system can be solved with them: check=False returns them"),
    "ldl": (ZERO_IN_D, "the factors are correct, but no system can be solved with them"),
    "solve": (SINGULAR, "use an SVD for the least squares solution: dispatch.linalg.svd"),
    "inv": (SINGULAR, "dispatch.linalg.pinv accepts a matrix of any rank"),
    **dict.fromkeys(
        ("matrix_rank", "pinv", "polar", "lstsq"), (UNCONVERGED, "a NaN or an infinity in the matrix causes this")
    ),
    "expm": ("the denominator of Padé's approximant is singular (info {status})", "scale the matrix"),
    "eigh": (UNCONVERGED, "a NaN or an infinity in the matrix causes this; otherwise try another driver"),
    "generalized_eigh": (PAIR, "b must be positive definite; a NaN or an infinity in a matrix also causes this"),
    "eig": (UNCONVERGED, NOT_FINITE_THERE),
    "randomized_svd": (
        UNCONVERGED,
        "a NaN or an infinity in the matrix causes this; otherwise use dispatch.linalg.svd",
    ),
    "refined_solve": (SINGULAR, "use an SVD for the least squares solution: dispatch.linalg.svd"),
    "refined_lstsq": (
        "the matrix lacks full rank (info {status})",
        "dispatch.linalg.lstsq accepts a matrix of any rank",
    ),
    "svd": (UNCONVERGED, "a NaN or an infinity in the matrix causes this; otherwise try another driver"),
}

# Messages of functions whose statuses have different meanings, by the status.
OF_STATUS = {
    ("expm", TOO_LARGE): (
        "the 1-norm is too large for this number of squarings",
        "use squarings=40 for norms up to 10¹², or scale the matrix (exp(A) is exp(A/2)²), or use scipy.linalg.expm",
    ),
    ("expm", NOT_FINITE): (
        "the 1-norm is NaN or infinite",
        "the matrix contains a NaN or an infinity, or its sums overflow",
    ),
}


def check_info(routine: str, info: Any, *, meaning: str = "", hint: str = "") -> None:
    """Wait for a status, or those of a batch, and raise LinAlgError if one is not 0.

    Args:
        routine: the function that returned it, such as "cholesky" or "solve"; BadRequest lists them for another name.
        info: the status, a tensor of this or of another library.
        meaning, hint: texts that replace those of that function.
    """
    if check_type("routine", routine, str) not in MEANINGS:
        raise BadRequest("routine", shown(routine), f"one of {', '.join(MEANINGS)}")
    statuses = on_host(info)
    if statuses.dtype.kind not in "iu":
        raise BadRequest("info", shown(info), "a status: a tensor of whole numbers")
    if failed := nonzero(statuses):
        first = next(iter(failed.values()))
        message = OF_STATUS.get((routine, first)) or MEANINGS[routine]
        raise LinAlgError(routine, failed, meaning or message[0], hint or message[1])


def checked(routine: str, results: tuple[Any, ...], *, check: bool, **said: str) -> Any:
    """Results that end with a status; the status is removed after it was checked to be 0."""
    check_bool("check", check)
    if not check:
        return results
    *outputs, info = results
    check_info(routine, info, **said)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)
