"""The request of the exponential of a matrix, and the constants of its method."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.checks import check_int
from dispatch.keys import F32, F64
from dispatch.ops.linalg.base import LinalgRequest, by_columns, check_dense, check_square, real_of

if TYPE_CHECKING:
    from dispatch.core.operands import Output
    from dispatch.device.tensor import Tensor

__all__ = ["MAX_SQUARINGS", "THETA", "ExpmRequest", "largest_norm"]

MAX_SQUARINGS = 64
# The largest norm at which Padé's approximant of degree 13 (in single precision of degree 7) equals the exponential of
# a matrix with an error of at most roundoff: Higham, The scaling and squaring method for the matrix exponential
# revisited, SIAM J. Matrix Anal. Appl. 26 (2005), table 2.3.
THETA = {F64: 5.371920351148152, F32: 3.925724783138660}


@dataclass(frozen=True, eq=False)
class ExpmRequest(LinalgRequest["tuple[Tensor, Tensor]"]):
    """The exponential of a square matrix, I + A + A²/2 + A³/6 + …, by scaling and squaring; returns (out, info).

    Attributes:
        a: (…, n, n); it is copied and not modified.
        squarings: the number of squarings, 0 to 64. A matrix is divided by the power of 2 that makes its 1-norm 5.37 or
            less (3.92 in single precision), and its exponential is squared as often; 16 squarings support norms up to
            352,000 (257,000). All of them are computed, and each matrix uses only as many as it needs: if norms are
            small, fewer squarings take less time, down to a third.
        out: the exponential; by default it is column-major.
        info: i32, one for each matrix: 0; 1 if there are too few squarings for its norm; 2 if the norm is not finite,
            because the matrix has a NaN or an infinity; 2 + i if the i-th pivot of the approximant's denominator is
            exactly 0, which is not known to occur for any matrix. If it is not 0, `out` is NaN.

    If the exponential is too large for the dtype, `out` has infinities, or NaN where infinities combine, and info is 0.
    """

    op: ClassVar[str] = "expm"
    reads: ClassVar[tuple[str, ...]] = ("a",)
    writes: ClassVar[tuple[str, ...]] = ("out", "info")
    a: Tensor
    _: KW_ONLY
    squarings: int = 16
    out: Tensor | None = None
    info: Tensor | None = None

    def check_fields(self) -> None:
        check_square("a", self.a)
        check_int("squarings", self.squarings, 0, MAX_SQUARINGS)
        check_dense("info", self.info)

    def outputs(self) -> dict[str, Output]:
        return {"out": by_columns(self.a.shape, self.a.dtype), "info": self.info_output()}


def largest_norm(request: ExpmRequest) -> float:
    """The largest 1-norm of a matrix for which the request has enough squarings."""
    return THETA[real_of(request.a.dtype)] * 2.0**request.squarings
