"""What comes out of a factorization in SciPy's and NumPy's words, and exponentials: a part of `dispatch.linalg`."""

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

    `assume_a` is "gen", by LU; "pos", by Cholesky, of which one triangle is read, the lower one if `lower`; "lower" or
    "upper" for a triangle. It also takes SciPy's longer names, as "lower triangular". With `check=False` (inverse,
    info) comes back, and nothing waits.
    """
    results = ops.inv(a, assume_a=assume_a, lower=lower)
    kind = assume_a if isinstance(assume_a, InverseKind) else InverseKind.named(str(assume_a))
    said = {}
    if kind is InverseKind.POS:
        said = {"meaning": NOT_POSITIVE, "hint": 'assume_a="gen" takes any matrix'}
    elif kind is not InverseKind.GEN:
        said = {"meaning": TRIANGLE, "hint": "dispatch.linalg.pinv takes a matrix of any rank"}
    return checked("inv", results, check=check, **said)


def det(a: Any) -> Any:
    """The determinant of a square matrix; nothing can fail."""
    return ops.det(a)


def slogdet(a: Any) -> Any:
    """(sign, logabsdet): the sign of a determinant and the logarithm of its magnitude; nothing can fail."""
    return ops.slogdet(a)


def polar(a: Any, side: ops.QrSide | str = "right", *, check: bool = True) -> Any:
    """(u, p) of A = U·P, or for "left" A = P·U: U unitary or half so, P Hermitian without negative eigenvalues."""
    return checked("polar", ops.polar(a, side=side), check=check)


def norm(a: Any, ord: NormOrder | str | float | None = None) -> Any:  # noqa: A002 - NumPy's word
    """A norm of each matrix: None or "fro", "nuc", 1, -1, 2, -2, infinity or -infinity; nothing is checked.

    Of 2, -2 and "nuc", which are made of singular values, NaN says that these did not converge.
    """
    order: Any = ord
    if not isinstance(ord, NormOrder):
        known = ord is None or isinstance(ord, (str, Real))
        order = ORDERS.get(ord) if known and not isinstance(ord, (bool, np.bool_)) else None
        if order is None:
            raise BadRequest("ord", shown(ord), "None, 'fro', 'nuc', 1, -1, 2, -2, inf or -inf")
    return ops.matrix_norm(a, order=order)


def matrix_rank(a: Any, rtol: float | None = None, *, check: bool = True) -> Any:
    """How many singular values are above `rtol` times the largest; left open, max(m, n) times the dtype's eps."""
    return checked("matrix_rank", ops.matrix_rank(a, rtol=rtol), check=check)


def pinv(a: Any, rtol: float | None = None, *, check: bool = True) -> Any:
    """Moore and Penrose's inverse; singular values up to `rtol` times the largest count as 0."""
    return checked("pinv", ops.pinv(a, rtol=rtol), check=check)


def lstsq(
    a: Any, b: Any, cond: float | None = None, *, driver: LstsqDriver | str = LstsqDriver.GELSS, check: bool = True
) -> Any:
    """(x, residuals, rank, s) of the least squares problem A·x ≈ b, with `driver="gels"` (x, residuals) alone.

    Singular values up to `cond` times the largest count as 0, with "gelss" alone. Residuals are empty where there are
    no more rows than columns, as NumPy's are; unlike these, they are there whatever the rank.
    """
    check_rtol(cond, "cond")
    results = ops.lstsq(a, b, driver=driver, rtol=cond)
    is_svd = len(results) > 3
    said = {} if is_svd else {"meaning": ZERO_IN_R, "hint": 'driver="gelss" takes a matrix of any rank'}
    return checked("lstsq", results, check=check, **said)


def expm(a: Any, squarings: int = 16, *, check: bool = True) -> Any:
    """The exponential of a square matrix, by scaling and squaring.

    `squarings` is how many there are at most: 16 take 1-norms up to 352,000, of f32 and c64 257,000; fewer take less
    time. With `check=False` (exponential, info) comes back, and nothing waits.
    """
    return checked("expm", ops.expm(a, squarings=squarings), check=check)
