"""The request of products with Q of A = Q·R, without forming Q."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.core.operand_checks import check_extents
from dispatch.errors import BadRequest
from dispatch.keys import Choice
from dispatch.ops.linalg.base import LinalgRequest, by_columns, check_matrix

if TYPE_CHECKING:
    from dispatch.core.operands import Output
    from dispatch.device.tensor import Tensor

__all__ = ["QrMultiplyRequest", "QrSide"]


class QrSide(Choice):
    """The side of Q in a product: LEFT Q·C, RIGHT C·Q."""

    LEFT = 0
    RIGHT = 1


@dataclass(frozen=True, eq=False)
class QrMultiplyRequest(LinalgRequest["tuple[Tensor, Tensor]"]):
    """Q·C or C·Q, where A = Q·R, by `geqrf` and `ormqr` or `unmqr`, without forming Q; returns (out, r).

    Attributes:
        a: (…, m, n); k is the smaller of the two, and Q has k columns.
        c: (…, k, p) for LEFT, (…, p, m) for RIGHT.
        mode: LEFT or RIGHT.
        out: (…, m, p) for LEFT, (…, p, k) for RIGHT; by default it is column-major.
        r: (…, k, n), an upper triangle; by default it is column-major.

    R's diagonal, and Q's columns with it, may have any sign. A NaN spreads into all results, except that a NaN in the
    last element of a real square matrix spreads into R only. The matrices of a batch are processed one after another.
    """

    op: ClassVar[str] = "qr_multiply"
    reads: ClassVar[tuple[str, ...]] = ("a", "c")
    writes: ClassVar[tuple[str, ...]] = ("out", "r")
    a: Tensor
    c: Tensor
    _: KW_ONLY
    mode: QrSide | str = QrSide.RIGHT
    out: Tensor | None = None
    r: Tensor | None = None

    def check_fields(self) -> None:
        check_matrix("a", self.a)
        a, c, (rows, cols) = self.a, self.c, self.a.shape[-2:]
        is_left = self.mode is QrSide.LEFT
        expected = f"{min(rows, cols)}, p" if is_left else f"p, {rows}"
        actual = c.shape[-2:-1] if is_left else c.shape[-1:]
        sound = c.ndim == a.ndim and c.shape[:-2] == a.shape[:-2] and actual == (min(rows, cols) if is_left else rows,)
        if c.dtype is not a.dtype or not sound:
            leading = "".join(f"{extent}, " for extent in a.shape[:-2])
            product = "Q·C" if is_left else "C·Q"
            raise BadRequest("c", str(c.layout), f"{a.dtype}[{leading}{expected}], for {product} of a {list(a.shape)}")
        check_extents("c", c)

    def outputs(self) -> dict[str, Output]:
        (rows, cols), dtype = self.a.shape[-2:], self.a.dtype
        least = min(rows, cols)
        extents = (rows, self.c.shape[-1]) if self.mode is QrSide.LEFT else (self.c.shape[-2], least)
        return {
            "out": by_columns((*self.batch, *extents), dtype),
            "r": by_columns((*self.batch, least, cols), dtype),
        }
