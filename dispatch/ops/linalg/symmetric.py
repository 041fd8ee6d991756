"""The requests of symmetric and Hermitian indefinite matrices: L·D·Lᵀ and L·D·Lᴴ by Bunch and Kaufman's pivoting."""

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
    """A = L·D·Lᴴ, or U·D·Uᴴ, of a matrix that need not be definite, by `sytrf`; gives back (out, pivots, info).

    D has blocks of one or two rows on its diagonal, L is a triangle of ones on its diagonal with its rows exchanged.

    Attributes:
        a: (…, n, n), of which one triangle is read.
        lower: whether that is the lower one, and L comes out; else the upper one, and U.
        hermitian: whether the other triangle is the conjugate of it; else A is symmetric, A = L·D·Lᵀ. Of real matrices
            both are the same. Of complex ones that are Hermitian cuSOLVER has a routine from 12.4 on.
        expand: gives back (lu, d, perm, info) instead, as `scipy.linalg.ldl` does.
        out: D's blocks and L's columns in one triangle, as LAPACK packs them, and zeros in the other one; it may be `a`
            itself. Left open, its columns lie one behind another.
        pivots: i64 (…, n), as LAPACK counts: of a positive one, p, row i was exchanged with row p - 1; two that are -p
            beside one another are a block of two rows, whose second (of U its first) was exchanged with row p - 1.
        lu, d: (…, n, n), of A = lu·d·luᴴ; left open, their columns lie one behind another.
        perm: i64 (…, n), dense, counted from 0: the rows perm[0], perm[1], … of lu are a triangle.
        info: i32, one for each matrix: 0, or an i for which D[i - 1, i - 1] is exactly 0; the factors are right even
            so, but nothing can be solved with them.

    A NaN stays in the factors, with an info above 0 or without. The matrices of a batch are taken one after another.
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
    """The x of A·x = b from the factors that `ldl` gives, by `sytrs`.

    Attributes:
        ldu: (…, n, n), the factors, of which one triangle is read; copied where its columns do not lie one behind
            another.
        pivots: i64 (…, n), dense, counted from 1. On a GPU nobody can check them: others than `ldl` gives are an error
            that may end the process.
        b: (…, n, k), or (n,) for one matrix.
        lower, hermitian: as they were given to `ldl`.
        out: x, of b's shape; it may be `b` itself. Left open, its columns lie one behind another.

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
