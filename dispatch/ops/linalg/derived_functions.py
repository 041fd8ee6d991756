"""Inverses, determinants, norms, least squares and exponentials as in SciPy and NumPy; part of `dispatch.linalg`."""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.checks import shown
from dispatch.errors import BadRequest
from dispatch.ops import linalg as ops
from dispatch.ops.linalg.derived import InverseKind, LstsqDriver, NormOrder, check_rtol
from dispatch.ops.linalg.status import NOT_POSITIVE, checked

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["det", "expm", "inv", "lstsq", "matrix_rank", "norm", "pinv", "slogdet"]

ORDERS: Mapping[Any, NormOrder] = {
    None: NormOrder.FRO,
    "fro": NormOrder.FRO,
    "nuc": NormOrder.NUC,
    1: NormOrder.ONE,
    -1: NormOrder.MIN_ONE,
    2: NormOrder.TWO,
    -2: NormOrder.MIN_TWO,
    np.inf: NormOrder.INF,
    -np.inf: NormOrder.MIN_INF,
}
TRIANGLE = "the triangle is singular: its diagonal is exactly 0 at [{before}, {before}]"
ZERO_IN_R = "the matrix lacks full rank: R of its QR factorization is exactly 0 at [{before}, {before}]"


def inv(a: Any, *, assume_a: InverseKind | str = "gen", lower: bool = False, check: bool = True) -> Any:
    """The inverse of a square matrix.

    `assume_a` is "gen", by LU; "pos", by Cholesky of one triangle, the lower one if `lower`; "lower" or "upper" for a
    triangle. SciPy's longer names, such as "lower triangular", are accepted too. With `check=False` it returns
    (inverse, info), and nothing waits.
    """
    results = ops.inv(a, assume_a=assume_a, lower=lower)
    kind = assume_a if isinstance(assume_a, InverseKind) else InverseKind.named(str(assume_a))
    messages = {}
    if kind is InverseKind.POS:
        messages = {"meaning": NOT_POSITIVE, "hint": 'assume_a="gen" accepts any matrix'}
    elif kind is not InverseKind.GEN:
        messages = {"meaning": TRIANGLE, "hint": "dispatch.linalg.pinv accepts a matrix of any rank"}
    return checked("inv", results, check=check, **messages)


def det(a: Any) -> Any:
    """The determinant of a square matrix; it cannot fail."""
    return ops.det(a)


def slogdet(a: Any) -> Any:
    """(sign, logabsdet): the sign of a determinant and the logarithm of its magnitude; it cannot fail."""
    return ops.slogdet(a)


def polar(a: Any, side: ops.QrSide | str = "right", *, check: bool = True) -> Any:
    """(u, p) of A = U·P, or for "left" A = P·U: U has orthonormal columns or rows, P is positive semidefinite."""
    return checked("polar", ops.polar(a, side=side), check=check)


def norm(a: Any, ord: NormOrder | str | float | None = None) -> Any:  # noqa: A002 - NumPy's word
    """A norm of each matrix: None or "fro", "nuc", 1, -1, 2, -2, infinity or -infinity; nothing is checked.

    For 2, -2 and "nuc", which need singular values, NaN means that these did not converge.
    """
    order: Any = ord
    if not isinstance(ord, NormOrder):
        is_valid = ord is None or isinstance(ord, (str, Real))
        order = ORDERS.get(ord) if is_valid and not isinstance(ord, (bool, np.bool_)) else None
        if order is None:
            raise BadRequest("ord", shown(ord), "None, 'fro', 'nuc', 1, -1, 2, -2, inf or -inf")
    return ops.matrix_norm(a, order=order)


def matrix_rank(a: Any, rtol: float | None = None, *, check: bool = True) -> Any:
    """The number of singular values above `rtol` times the largest; by default max(m, n) times the dtype's eps."""
    return checked("matrix_rank", ops.matrix_rank(a, rtol=rtol), check=check)


def pinv(a: Any, rtol: float | None = None, *, check: bool = True) -> Any:
    """The Moore-Penrose inverse; singular values up to `rtol` times the largest count as 0."""
    return checked("pinv", ops.pinv(a, rtol=rtol), check=check)


def lstsq(
    a: Any, b: Any, cond: float | None = None, *, driver: LstsqDriver | str = LstsqDriver.GELSS, check: bool = True
) -> Any:
    """(x, residuals, rank, s) of the least squares problem A·x ≈ b; with `driver="gels"` only (x, residuals).

    Singular values up to `cond` times the largest count as 0, with "gelss" only. Residuals are empty if there are no
    more rows than columns, as in NumPy; unlike in NumPy, they are returned for any rank.
    """
    check_rtol(cond, "cond")
    results = ops.lstsq(a, b, driver=driver, rtol=cond)
    is_svd = len(results) > 3
    messages = {} if is_svd else {"meaning": ZERO_IN_R, "hint": 'driver="gelss" accepts a matrix of any rank'}
    return checked("lstsq", results, check=check, **messages)


def expm(a: Any, squarings: int = 16, *, check: bool = True) -> Any:
    """The exponential of a square matrix, by scaling and squaring.

    `squarings` is the maximum number of squarings: 16 support 1-norms up to 352,000, or 257,000 for f32 and c64; fewer
    take less time. With `check=False` it returns (exponential, info), and nothing waits.
    """
    return checked("expm", ops.expm(a, squarings=squarings), check=check)
