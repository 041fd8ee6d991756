"""The requests of Q from Householder reflectors, as returned by `qr` with mode RAW: Q itself, and products with it."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.checks import check_int
from dispatch.core.operand_checks import check_extents
from dispatch.errors import BadRequest
from dispatch.ops.linalg.base import LinalgRequest, by_columns, check_dense, check_matrix
from dispatch.ops.linalg.multiply import QrSide

if TYPE_CHECKING:
    from dispatch.core.operands import Output
    from dispatch.device.tensor import Tensor

__all__ = ["OrgqrRequest", "OrmqrRequest"]


def check_reflectors(h: Tensor, tau: Tensor) -> None:
    """BadRequest unless there is a factor for each reflector, and no more factors than rows or columns of h."""
    check_matrix("h", h)
    least = min(h.shape[-2:])
    if tau.ndim != h.ndim - 1 or tau.shape[:-1] != h.shape[:-2] or tau.shape[-1] > least:
        leading = "".join(f"{extent}, " for extent in h.shape[:-2])
        expected = f"{h.dtype}[{leading}k], of k up to {least}, for h {list(h.shape)}"
        raise BadRequest("tau", str(tau.layout), expected, "qr(a, mode='raw') returns both")
    check_dense("tau", tau, h.dtype, tau.shape)


@dataclass(frozen=True, eq=False)
class OrgqrRequest(LinalgRequest["Tensor"]):
    """The first columns of Q, by `orgqr` or `ungqr`: Q is I - tau[0]·v₀·v₀ᴴ, times I - tau[1]·v₁·v₁ᴴ, and so on.

    Attributes:
        h: (…, m, n); vector i is in column i below the diagonal, with an implied 1 before it; the rest is not read.
        tau: (…, k), dense; k is min(m, n) or less.
        columns: the number of columns of Q, from k to m; None for min(m, n).
        q: (…, m, columns), orthonormal; by default it is column-major.

    A NaN spreads into every result that depends on it. The matrices of a batch are processed one after another.
    """

    op: ClassVar[str] = "orgqr"
    reads: ClassVar[tuple[str, ...]] = ("h", "tau")
    writes: ClassVar[tuple[str, ...]] = ("q",)
    h: Tensor
    tau: Tensor
    _: KW_ONLY
    columns: int | None = None
    q: Tensor | None = None

    def check_fields(self) -> None:
        check_reflectors(self.h, self.tau)
        if self.columns is not None:
            check_int("columns", self.columns, self.tau.shape[-1], self.h.shape[-2])

    def outputs(self) -> dict[str, Output]:
        rows, columns = self.h.shape[-2:]
        count = min(rows, columns) if self.columns is None else self.columns
        return {"q": by_columns((*self.batch, rows, count), self.h.dtype)}


@dataclass(frozen=True, eq=False)
class OrmqrRequest(LinalgRequest["Tensor"]):
    """Q·C, Qᴴ·C, C·Q or C·Qᴴ with the full Q, of m rows and columns, by `ormqr` or `unmqr`; Q is not formed.

    Attributes:
        h, tau: as for `orgqr`.
        c: (…, m, p) for LEFT, (…, p, m) for RIGHT.
        side: the side of Q: LEFT of C or RIGHT.
        adjoint: whether Qᴴ is used, which is Q⁻¹.
        out: of c's shape; it may be `c` itself. By default it is column-major.

    A NaN spreads into every result that depends on it. The matrices of a batch are processed one after another.
    """

    op: ClassVar[str] = "ormqr"
    reads: ClassVar[tuple[str, ...]] = ("h", "tau", "c")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "c")})
    h: Tensor
    tau: Tensor
    c: Tensor
    _: KW_ONLY
    side: QrSide | str = QrSide.LEFT
    adjoint: bool = False
    out: Tensor | None = None

    def check_fields(self) -> None:
        check_reflectors(self.h, self.tau)
        h, c, rows = self.h, self.c, self.h.shape[-2]
        is_left = self.side is QrSide.LEFT
        actual = c.shape[-2:-1] if is_left else c.shape[-1:]
        if c.dtype is not h.dtype or c.ndim != h.ndim or c.shape[:-2] != h.shape[:-2] or actual != (rows,):
            leading = "".join(f"{extent}, " for extent in h.shape[:-2])
            expected = f"{h.dtype}[{leading}{f'{rows}, p' if is_left else f'p, {rows}'}]"
            raise BadRequest("c", str(c.layout), f"{expected}, for {'Q·C' if is_left else 'C·Q'} of h {list(h.shape)}")
        check_extents("c", c)

    def outputs(self) -> dict[str, Output]:
        return {"out": by_columns(self.c.shape, self.c.dtype)}
