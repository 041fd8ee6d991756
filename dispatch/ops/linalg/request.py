"""The requests of factorizations and systems of equations; none calls a library. spectral.py has eigenvalues and SVD.

Routines that may fail on valid arguments, such as Cholesky on an indefinite matrix, report it in `info`, a status on
the device for each matrix: nothing waits for it. `dispatch.linalg` has the same functions with a check of the status.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dispatch.checks import check_int
from dispatch.core.operands import Output, dense
from dispatch.core.overlap import same_view
from dispatch.keys import I64, Choice
from dispatch.ops.linalg.base import (
    LinalgRequest,
    by_columns,
    check_dense,
    check_matrix,
    check_right_side,
    check_square,
)

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = [
    "ChoSolveRequest",
    "CholeskyRequest",
    "LuFactorRequest",
    "LuSolveRequest",
    "MatrixKind",
    "QrMode",
    "QrRequest",
    "SolveRequest",
]


class MatrixKind(Choice):
    """The kind of a matrix: GEN any, POS positive definite, SYM symmetric, HER Hermitian.

    These are factorized by LU, Cholesky's method, L·D·Lᵀ and L·D·Lᴴ respectively.
    """

    GEN = 0
    POS = 1
    SYM = 2
    HER = 3

    @staticmethod
    def other_names() -> dict[str, str]:
        scipy = {"GENERAL": "GEN", "POSITIVEDEFINITE": "POS", "SYMMETRIC": "SYM", "HERMITIAN": "HER"}
        return scipy | {"SPD": "POS", "HPD": "POS"}  # cuDSS's names

    @staticmethod
    def replacements() -> dict[str, str]:
        triangle = "dispatch.trsm(a, b, uplo={!r}) solves with a triangle"
        lower, upper = (triangle.format(half) for half in ("lower", "upper"))
        return {
            **dict.fromkeys(("LOWER", "LOWERTRIANGULAR"), lower),
            **dict.fromkeys(("UPPER", "UPPERTRIANGULAR"), upper),
            "TRIDIAGONAL": "dispatch.gtsv(dl, d, du, b) solves with three diagonals",
        }


class QrMode(Choice):
    """The results of `qr`: Q and R without what is multiplied by 0, both complete, only R, or LAPACK's own form."""

    REDUCED = 0
    COMPLETE = 1
    R = 2
    RAW = 3

    @staticmethod
    def other_names() -> dict[str, str]:
        return {"ECONOMIC": "REDUCED", "FULL": "COMPLETE"}


@dataclass(frozen=True, eq=False)
class CholeskyRequest(LinalgRequest["tuple[Tensor, Tensor]"]):
    """A = L·Lᴴ of a symmetric or Hermitian positive definite matrix, or A = Uᴴ·U, by `potrf`; returns (out, info).

    Attributes:
        a: (…, n, n); only one triangle is read.
        lower: True reads the lower triangle and computes L; False the upper one and U.
        autotune: if several libraries support it, time them once, use the fastest and remember it on disk.
        library: use only this library: "own" or "cusolverDn"; None allows both.
        out: the factor, with zeros in the other triangle; it may be `a` itself. By default L is column-major and U
            row-major: either way no transposition is needed.
        info: i32, one for each matrix: 0, or the order of the first leading minor that is not positive definite; `out`
            is then NaN.

    A NaN in the triangle that is read gives NaN; info may or may not be above 0. Several small matrices are one call.
    """

    op: ClassVar[str] = "cholesky"
    reads: ClassVar[tuple[str, ...]] = ("a",)
    writes: ClassVar[tuple[str, ...]] = ("out", "info")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "a")})
    a: Tensor
    _: KW_ONLY
    lower: bool = True
    autotune: bool = False
    library: str | None = None
    out: Tensor | None = None
    info: Tensor | None = None

    def check_fields(self) -> None:
        check_square("a", self.a)
        check_dense("info", self.info)

    def outputs(self) -> dict[str, Output]:
        lay = by_columns if self.lower else dense
        return {"out": lay(self.a.shape, self.a.dtype), "info": self.info_output()}

    def attributes(self) -> tuple[Any, ...]:
        return *super().attributes(), self.is_in_place

    @property
    def is_in_place(self) -> bool:
        """Whether the matrix is overwritten; no other memory is then allocated for the result."""
        return self.out is not None and same_view(self.out, self.a)


@dataclass(frozen=True, eq=False)
class ChoSolveRequest(LinalgRequest["Tensor"]):
    """The x of A·x = b from the factor of `cholesky`, by `potrs`.

    Attributes:
        c: (…, n, n), the factor; only one triangle is read.
        b: (…, n, k), or (n,) for one matrix.
        lower: whether c is L of A = L·Lᴴ; otherwise it is U of A = Uᴴ·U.
        autotune: if several libraries support it, time them once, use the fastest and remember it on disk.
        library: use only this library: "own", "cublas" or "cusolverDn"; None allows all of them.
        out: x, of b's shape; it may be `b` itself. By default it is column-major.

    A factor with 0 on its diagonal gives infinities and NaN. A complex row-major factor is copied.
    """

    op: ClassVar[str] = "cho_solve"
    reads: ClassVar[tuple[str, ...]] = ("c", "b")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "b")})
    c: Tensor
    b: Tensor
    _: KW_ONLY
    lower: bool = True
    autotune: bool = False
    library: str | None = None
    out: Tensor | None = None

    def check_fields(self) -> None:
        check_square("c", self.c)
        check_right_side("b", self.b, "c", self.c)

    def outputs(self) -> dict[str, Output]:
        return {"out": right_side(self.b)}


@dataclass(frozen=True, eq=False)
class LuFactorRequest(LinalgRequest["tuple[Tensor, Tensor, Tensor]"]):
    """P·A = L·U with partial pivoting, by `getrf`; returns (out, pivots, info).

    Attributes:
        a: (…, m, n).
        autotune: if several libraries support it, time them once, use the fastest and remember it on disk.
        library: use only this library: "own", "cublas" or "cusolverDn"; None allows all of them.
        out: U, and below its diagonal L without its unit diagonal; it may be `a` itself. By default it is column-major.
        pivots: i64 (…, min(m, n)), as LAPACK counts: row i was exchanged with row pivots[i] - 1, for i = 0, 1, …
            (SciPy's pivots are these minus 1.)
        info: i32, one for each matrix: 0, or the first i for which U[i - 1, i - 1] is exactly 0; the factors are then
            still correct, but nothing can be solved with them.

    A NaN spreads into the factors. A row-major matrix is transposed on a copy, because LAPACK is column-major.
    """

    op: ClassVar[str] = "lu_factor"
    reads: ClassVar[tuple[str, ...]] = ("a",)
    writes: ClassVar[tuple[str, ...]] = ("out", "pivots", "info")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "a")})
    a: Tensor
    _: KW_ONLY
    autotune: bool = False
    library: str | None = None
    out: Tensor | None = None
    pivots: Tensor | None = None
    info: Tensor | None = None

    def check_fields(self) -> None:
        check_matrix("a", self.a)
        check_dense("pivots", self.pivots)
        check_dense("info", self.info)

    def outputs(self) -> dict[str, Output]:
        pivots = dense((*self.batch, min(self.a.shape[-2:])), I64)
        return {"out": by_columns(self.a.shape, self.a.dtype), "pivots": pivots, "info": self.info_output()}


@dataclass(frozen=True, eq=False)
class LuSolveRequest(LinalgRequest["Tensor"]):
    """The x of A·x = b, Aᵀ·x = b or Aᴴ·x = b from the factors of `lu_factor`, by `trsm`.

    Attributes:
        lu: (…, n, n), the factors; they are copied unless they are column-major.
        pivots: i64 (…, n), dense, counted from 1. On a GPU they cannot be checked: pivots that are not from `lu_factor`
            are an error that may end the process.
        b: (…, n, k), or (n,) for one matrix.
        trans: 0 for A, 1 for its transpose, 2 for its conjugate transpose.
        autotune: if several libraries support it, time them once, use the fastest and remember it on disk.
        library: use only this library: "own" or "cublas"; None allows both.
        out: x, of b's shape; it may be `b` itself. By default it is column-major.

    Factors with 0 on the diagonal of U give infinities and NaN.
    """

    op: ClassVar[str] = "lu_solve"
    reads: ClassVar[tuple[str, ...]] = ("lu", "pivots", "b")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "b")})
    lu: Tensor
    pivots: Tensor
    b: Tensor
    _: KW_ONLY
    trans: int = 0
    autotune: bool = False
    library: str | None = None
    out: Tensor | None = None

    def check_fields(self) -> None:
        check_square("lu", self.lu)
        check_dense("pivots", self.pivots, I64, self.lu.shape[:-1])
        check_right_side("b", self.b, "lu", self.lu)
        check_int("trans", self.trans, 0, 2)

    def outputs(self) -> dict[str, Output]:
        return {"out": right_side(self.b)}


@dataclass(frozen=True, eq=False)
class SolveRequest(LinalgRequest["tuple[Tensor, Tensor]"]):
    """The x of A·x = b, by LU or by the method for the kind of matrix; returns (out, info).

    Attributes:
        a: (…, n, n); it is copied and not modified.
        b: (…, n, k), or (n,) for one matrix.
        assume_a: POS ("pos") if A is symmetric or Hermitian positive definite, SYM or HER ("sym", "her") if it is
            symmetric or Hermitian and need not be definite; only one triangle is then read. For complex HER matrices
            cuSOLVER has the routine from 12.4 on. SciPy's longer names, such as "positive definite", are accepted too.
        lower: with these kinds, whether the lower triangle is read.
        autotune: if several libraries support it, time them once, use the fastest and remember it on disk.
        library: use only this library: "own", "cublas" or "cusolverDn"; None allows all of them.
        out: x, of b's shape; it may be `b` itself. By default it is column-major.
        info: i32, one for each matrix: 0, or as for `lu_factor`, `cholesky` and `ldl`; x is then NaN.
    """

    op: ClassVar[str] = "solve"
    reads: ClassVar[tuple[str, ...]] = ("a", "b")
    writes: ClassVar[tuple[str, ...]] = ("out", "info")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "b")})
    a: Tensor
    b: Tensor
    _: KW_ONLY
    assume_a: MatrixKind | str = MatrixKind.GEN
    lower: bool = False
    autotune: bool = False
    library: str | None = None
    out: Tensor | None = None
    info: Tensor | None = None

    def check_fields(self) -> None:
        check_square("a", self.a)
        check_right_side("b", self.b, "a", self.a)
        check_dense("info", self.info)

    def outputs(self) -> dict[str, Output]:
        return {"out": right_side(self.b), "info": self.info_output()}


@dataclass(frozen=True, eq=False)
class QrRequest(LinalgRequest["Tensor | tuple[Tensor, ...]"]):
    """A = Q·R with orthonormal columns of Q and an upper triangular R, by `geqrf` and `orgqr`.

    Attributes:
        a: (…, m, n); k is the smaller of the two.
        mode: REDUCED returns (q, r) of (…, m, k) and (…, k, n); COMPLETE (q, r) of (…, m, m) and (…, m, n); R only r,
            of (…, k, n); RAW (h, tau), the Householder vectors and R in one matrix as in LAPACK, and their factors.
        autotune: if both cuBLAS and cuSOLVER support the request, time them once, use the faster one and remember it on
            disk.
        q, r, h: by default they are column-major; h may be `a` itself.
        tau: (…, k), dense.

    R's diagonal may have any sign. A NaN spreads into all results, except that one in a column on which no reflection
    depends may spread into R only: from the m-th column on of a real matrix with m ≤ n, after it of a complex one.
    """

    op: ClassVar[str] = "qr"
    reads: ClassVar[tuple[str, ...]] = ("a",)
    writes: ClassVar[tuple[str, ...]] = ("q", "r", "h", "tau")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("h", "a")})
    a: Tensor
    _: KW_ONLY
    mode: QrMode | str = QrMode.REDUCED
    autotune: bool = False
    q: Tensor | None = None
    r: Tensor | None = None
    h: Tensor | None = None
    tau: Tensor | None = None

    def check_fields(self) -> None:
        check_matrix("a", self.a)
        check_dense("tau", self.tau)

    def outputs(self) -> dict[str, Output]:
        (rows, cols), dtype = self.a.shape[-2:], self.a.dtype
        least = min(rows, cols)
        size = rows if self.mode is QrMode.COMPLETE else least
        if self.mode is QrMode.RAW:
            return {"h": by_columns(self.a.shape, dtype), "tau": dense((*self.batch, least), dtype)}
        outputs = {"q": by_columns((*self.batch, rows, size), dtype), "r": by_columns((*self.batch, size, cols), dtype)}
        return {"r": outputs["r"]} if self.mode is QrMode.R else outputs


def right_side(b: Tensor, *, rows: int | None = None) -> Output:
    """x, by default column-major, with as many rows as b, or with `rows`."""
    *batch, count = b.shape if b.ndim == 1 else b.shape[:-1]
    shape = (*batch, count if rows is None else rows, *b.shape[len(batch) + 1 :])
    return dense(shape, b.dtype) if b.ndim == 1 else by_columns(shape, b.dtype)
