"""The requests of symmetric and Hermitian indefinite matrices: L·D·Lᵀ and L·D·Lᴴ by Bunch-Kaufman pivoting."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.core.operands import Output, dense
from dispatch.keys import I64
from dispatch.ops.linalg.base import LinalgRequest, by_columns, check_dense, check_right_side, check_square
from dispatch.ops.linalg.request import right_side

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["LdlRequest", "LdlSolveRequest"]


@dataclass(frozen=True, eq=False)
class LdlRequest(LinalgRequest["tuple[Tensor, ...]"]):
    """A = L·D·Lᴴ, or U·D·Uᴴ, of a matrix that need not be definite, by `sytrf`; returns (out, pivots, info).

    D has blocks of one or two rows on its diagonal, L is a unit triangular matrix with exchanged rows.

    Attributes:
        a: (…, n, n); only one triangle is read.
        lower: True reads the lower triangle and computes L; False the upper one and U.
        hermitian: whether the other triangle is the conjugate transpose; otherwise A is symmetric, A = L·D·Lᵀ. For real
            matrices both are the same. For complex Hermitian matrices cuSOLVER has a routine from 12.4 on.
        expand: whether it returns (lu, d, perm, info) instead, as `scipy.linalg.ldl` does.
        out: D's blocks and L's columns in one triangle, packed as in LAPACK, and zeros in the other one; it may be `a`
            itself. By default it is column-major.
        pivots: i64 (…, n), as LAPACK counts: a positive p means that row i was exchanged with row p - 1; two adjacent
            -p are a block of two rows, whose second row (for U the first) was exchanged with row p - 1.
        lu, d: (…, n, n), of A = lu·d·luᴴ; by default they are column-major.
        perm: i64 (…, n), dense, counted from 0: the rows perm[0], perm[1], … of lu are triangular.
        info: i32, one for each matrix: 0, or an i for which D[i - 1, i - 1] is exactly 0; the factors are then still
            correct, but nothing can be solved with them.

    A NaN stays in the factors; info may or may not be above 0. The matrices of a batch are processed one after another.
    """

    op: ClassVar[str] = "ldl"
    reads: ClassVar[tuple[str, ...]] = ("a",)
    writes: ClassVar[tuple[str, ...]] = ("out", "pivots", "lu", "d", "perm", "info")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "a")})
    a: Tensor
    _: KW_ONLY
    lower: bool = True
    hermitian: bool = True
    expand: bool = False
    out: Tensor | None = None
    pivots: Tensor | None = None
    lu: Tensor | None = None
    d: Tensor | None = None
    perm: Tensor | None = None
    info: Tensor | None = None

    def check_fields(self) -> None:
        check_square("a", self.a)
        for name in ("pivots", "perm", "info"):
            check_dense(name, getattr(self, name))

    def outputs(self) -> dict[str, Output]:
        matrix, places = by_columns(self.a.shape, self.a.dtype), dense(self.a.shape[:-1], I64)
        if self.expand:
            return {"lu": matrix, "d": matrix, "perm": places, "info": self.info_output()}
        return {"out": matrix, "pivots": places, "info": self.info_output()}


@dataclass(frozen=True, eq=False)
class LdlSolveRequest(LinalgRequest["Tensor"]):
    """The x of A·x = b from the factors of `ldl`, by `sytrs`.

    Attributes:
        ldu: (…, n, n), the factors; only one triangle is read. They are copied unless they are column-major.
        pivots: i64 (…, n), dense, counted from 1. On a GPU they cannot be checked: pivots that are not from `ldl` are
            an error that may end the process.
        b: (…, n, k), or (n,) for one matrix.
        lower, hermitian: the same values as for `ldl`.
        out: x, of b's shape; it may be `b` itself. By default it is column-major.

    A D with 0 on its diagonal gives infinities and NaN.
    """

    op: ClassVar[str] = "ldl_solve"
    reads: ClassVar[tuple[str, ...]] = ("ldu", "pivots", "b")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "b")})
    ldu: Tensor
    pivots: Tensor
    b: Tensor
    _: KW_ONLY
    lower: bool = True
    hermitian: bool = True
    out: Tensor | None = None

    def check_fields(self) -> None:
        check_square("ldu", self.ldu)
        check_dense("pivots", self.pivots, I64, self.ldu.shape[:-1])
        check_right_side("b", self.b, "ldu", self.ldu)

    def outputs(self) -> dict[str, Output]:
        return {"out": right_side(self.b)}
