"""The request of a polar decomposition; it calls no library."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.ops.linalg.base import LinalgRequest, by_columns, check_dense, check_matrix
from dispatch.ops.linalg.multiply import QrSide as PolarSide

if TYPE_CHECKING:
    from dispatch.core.operands import Output
    from dispatch.device.tensor import Tensor

__all__ = ["PolarRequest", "PolarSide"]


@dataclass(frozen=True, eq=False)
class PolarRequest(LinalgRequest["tuple[Tensor, ...]"]):
    """A = U·P, or A = P·U, by `gesvd` and products; returns (u, p, info).

    Attributes:
        a: (…, m, n).
        side: the side of P: RIGHT of U or LEFT.
        u: (…, m, n), of orthonormal columns, or rows if m < n; by default it is column-major.
        p: (…, n, n) for RIGHT, (…, m, m) for LEFT: Hermitian up to roundoff, without negative eigenvalues.
        info: i32, one for each matrix: 0, or above 0 if `gesvd` did not converge; u and p are then NaN.

    Without full rank U is not unique. A NaN gives NaN; info may or may not be above 0.
    """

    op: ClassVar[str] = "polar"
    reads: ClassVar[tuple[str, ...]] = ("a",)
    writes: ClassVar[tuple[str, ...]] = ("u", "p", "info")
    a: Tensor
    _: KW_ONLY
    side: PolarSide | str = PolarSide.RIGHT
    u: Tensor | None = None
    p: Tensor | None = None
    info: Tensor | None = None

    def check_fields(self) -> None:
        check_matrix("a", self.a)
        check_dense("info", self.info)

    def outputs(self) -> dict[str, Output]:
        (rows, cols), dtype = self.a.shape[-2:], self.a.dtype
        size = cols if self.side is PolarSide.RIGHT else rows
        return {
            "u": by_columns(self.a.shape, dtype),
            "p": by_columns((*self.batch, size, size), dtype),
            "info": self.info_output(),
        }
