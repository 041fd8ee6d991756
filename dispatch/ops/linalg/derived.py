"""The requests that build on factorizations: inverses, determinants, norms, ranks and least squares.

No request calls a library, and nothing waits: a request that may fail reports it in `info`, as in request.py.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.checks import check_number, shown
from dispatch.core.operands import Output, dense
from dispatch.errors import BadRequest
from dispatch.keys import I64, Choice
from dispatch.ops.linalg.base import (
    MATRIX,
    LinalgRequest,
    by_columns,
    check_dense,
    check_matrix,
    check_square,
    real_of,
)

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = [
    "DetRequest",
    "InvRequest",
    "InverseKind",
    "LstsqDriver",
    "LstsqRequest",
    "MatrixNormRequest",
    "MatrixRankRequest",
    "NormOrder",
    "PinvRequest",
    "SlogdetRequest",
]


class InverseKind(Choice):
    """The kind of a matrix: GEN any, POS positive definite, LOWER or UPPER triangular."""

    GEN = 0
    POS = 1
    LOWER = 2
    UPPER = 3

    @staticmethod
    def other_names() -> dict[str, str]:
        return {
            "GENERAL": "GEN",
            "POSITIVEDEFINITE": "POS",
            "LOWERTRIANGULAR": "LOWER",
            "UPPERTRIANGULAR": "UPPER",
            "SPD": "POS",  # cuDSS's name
            "HPD": "POS",
        }

    @staticmethod
    def replacements() -> dict[str, str]:
        names = ("SYM", "SYMMETRIC", "HER", "HERMITIAN")
        sentence = (
            "pass the full matrix with GEN, or use dispatch.solve with the identity matrix as b, which reads one"
            " triangle"
        )
        return dict.fromkeys(names, sentence)


class NormOrder(Choice):
    """A norm: FRO the root of the sum of squares, NUC the sum of singular values, TWO the largest, MIN_TWO the least.

    ONE is the largest and MIN_ONE the smallest absolute column sum; INF and MIN_INF are those of rows.
    """

    FRO = 0
    NUC = 1
    ONE = 2
    MIN_ONE = 3
    INF = 4
    MIN_INF = 5
    TWO = 6
    MIN_TWO = 7


class LstsqDriver(Choice):
    """The method of `lstsq`: GELSS by singular values, for any rank; GELS by QR, for full rank only, and faster."""

    GELSS = 0
    GELS = 1


@dataclass(frozen=True, eq=False)
class InvRequest(LinalgRequest["tuple[Tensor, Tensor]"]):
    """The inverse of a square matrix; returns (out, info).

    Attributes:
        a: (…, n, n); it is copied and not modified.
        assume_a: GEN ("gen", "general") by LU (`getrf`, `trsm`); POS ("pos", "positive definite") by Cholesky (`potrf`,
            `potri`) of the triangle that is read; LOWER and UPPER ("lower", "lower triangular" and so on) for a
            triangle (`trtri`), where the other triangle is not read and is set to zeros.
        lower: with POS, whether the lower triangle is read.
        autotune: if several libraries support it, time them once, use the fastest and remember it on disk.
        library: use only this library: "own", "cublas" or "cusolverDn"; None allows all of them.
        out: the inverse; by default it is column-major.
        info: i32, one for each matrix: 0, or as for `lu_factor` and `cholesky`; for a triangle the index of the first 0
            on its diagonal, counted from 1. If it is not 0, `out` is NaN.
    """

    op: ClassVar[str] = "inv"
    reads: ClassVar[tuple[str, ...]] = ("a",)
    writes: ClassVar[tuple[str, ...]] = ("out", "info")
    a: Tensor
    _: KW_ONLY
    assume_a: InverseKind | str = InverseKind.GEN
    lower: bool = False
    autotune: bool = False
    library: str | None = None
    out: Tensor | None = None
    info: Tensor | None = None

    def check_fields(self) -> None:
        check_square("a", self.a)
        check_dense("info", self.info)

    def outputs(self) -> dict[str, Output]:
        return {"out": by_columns(self.a.shape, self.a.dtype), "info": self.info_output()}


@dataclass(frozen=True, eq=False)
class DetRequest(LinalgRequest["Tensor"]):
    """The determinant of a square matrix, by LU.

    Attributes:
        a: (…, n, n); it is copied and not modified.
        det: one number for each matrix, of a's dtype: 0 for a singular matrix, 1 for an empty one. It overflows to
            infinity only if the determinant itself is too large for the dtype: factors are multiplied in double
            precision, with separate exponents.
    """

    op: ClassVar[str] = "det"
    reads: ClassVar[tuple[str, ...]] = ("a",)
    writes: ClassVar[tuple[str, ...]] = ("det",)
    a: Tensor
    _: KW_ONLY
    det: Tensor | None = None

    def check_fields(self) -> None:
        check_square("a", self.a)
        check_dense("det", self.det)

    def outputs(self) -> dict[str, Output]:
        return {"det": dense(self.batch, self.a.dtype)}


@dataclass(frozen=True, eq=False)
class SlogdetRequest(LinalgRequest["tuple[Tensor, Tensor]"]):
    """The sign of a determinant and the logarithm of its magnitude, by LU; returns (sign, logabsdet).

    Attributes:
        a: (…, n, n); it is copied and not modified.
        sign: of a's dtype: 1, -1, or a complex number of magnitude 1; 0 for a singular matrix.
        logabsdet: real; -infinity for a singular matrix.
    """

    op: ClassVar[str] = "slogdet"
    reads: ClassVar[tuple[str, ...]] = ("a",)
    writes: ClassVar[tuple[str, ...]] = ("sign", "logabsdet")
    a: Tensor
    _: KW_ONLY
    sign: Tensor | None = None
    logabsdet: Tensor | None = None

    def check_fields(self) -> None:
        check_square("a", self.a)
        check_dense("sign", self.sign)
        check_dense("logabsdet", self.logabsdet)

    def outputs(self) -> dict[str, Output]:
        return {"sign": dense(self.batch, self.a.dtype), "logabsdet": dense(self.batch, real_of(self.a.dtype))}


@dataclass(frozen=True, eq=False)
class MatrixNormRequest(LinalgRequest["Tensor"]):
    """A norm of each matrix.

    Attributes:
        a: (…, m, n).
        order: FRO, NUC, ONE, MIN_ONE, INF, MIN_INF, TWO or MIN_TWO; NUC and the last two by singular values (`gesvd`).
        norm: one number for each matrix, real; 0 for a matrix without elements. Squares cannot overflow.

    A NaN in the matrix makes its norm NaN.
    """

    op: ClassVar[str] = "matrix_norm"
    reads: ClassVar[tuple[str, ...]] = ("a",)
    writes: ClassVar[tuple[str, ...]] = ("norm",)
    a: Tensor
    _: KW_ONLY
    order: NormOrder | str = NormOrder.FRO
    norm: Tensor | None = None

    def check_fields(self) -> None:
        check_matrix("a", self.a)
        check_dense("norm", self.norm)

    def outputs(self) -> dict[str, Output]:
        return {"norm": dense(self.batch, real_of(self.a.dtype))}


@dataclass(frozen=True, eq=False)
class MatrixRankRequest(LinalgRequest["tuple[Tensor, Tensor]"]):
    """The number of singular values above a fraction of the largest one (`gesvd`); returns (rank, info).

    Attributes:
        a: (…, m, n).
        rtol: that fraction; by default max(m, n) times the eps of the dtype, as in NumPy.
        rank: i64, one for each matrix.
        info: i32, as for `svd`; if it is not 0 the rank is 0.
    """

    op: ClassVar[str] = "matrix_rank"
    reads: ClassVar[tuple[str, ...]] = ("a",)
    writes: ClassVar[tuple[str, ...]] = ("rank", "info")
    a: Tensor
    _: KW_ONLY
    rtol: float | None = None
    rank: Tensor | None = None
    info: Tensor | None = None

    def check_fields(self) -> None:
        check_matrix("a", self.a)
        check_rtol(self.rtol)
        check_dense("rank", self.rank)
        check_dense("info", self.info)

    @property
    def dtypes(self) -> tuple[Dtype | None, ...]:
        return self.a.dtype, I64

    def outputs(self) -> dict[str, Output]:
        return {"rank": dense(self.batch, I64), "info": self.info_output()}


@dataclass(frozen=True, eq=False)
class PinvRequest(LinalgRequest["tuple[Tensor, Tensor]"]):
    """The Moore-Penrose inverse of a matrix of any rank, by singular values (`gesvd`); returns (out, info).

    Attributes:
        a: (…, m, n); it is copied and not modified.
        rtol: singular values up to this fraction of the largest count as 0; by default max(m, n) times the dtype's eps.
        out: (…, n, m); by default in the memory order of the product.
        info: i32, as for `svd`; if it is not 0, `out` is NaN.
    """

    op: ClassVar[str] = "pinv"
    reads: ClassVar[tuple[str, ...]] = ("a",)
    writes: ClassVar[tuple[str, ...]] = ("out", "info")
    a: Tensor
    _: KW_ONLY
    rtol: float | None = None
    out: Tensor | None = None
    info: Tensor | None = None

    def check_fields(self) -> None:
        check_matrix("a", self.a)
        check_rtol(self.rtol)
        check_dense("info", self.info)

    def outputs(self) -> dict[str, Output]:
        rows, cols = self.a.shape[-2:]
        lay = by_columns if rows >= cols else dense  # for a wide matrix the transposed inverse is computed
        return {"out": lay((*self.batch, cols, rows), self.a.dtype), "info": self.info_output()}


@dataclass(frozen=True, eq=False)
class LstsqRequest(LinalgRequest["tuple[Tensor, ...]"]):
    """The x that minimizes ‖b - A·x‖, and the shortest if several do; returns (out, residuals, …, info).

    Attributes:
        a: (…, m, n); it is copied and not modified.
        b: (…, m, k), or (m,) for one matrix.
        driver: GELSS by singular values (`gesvd`), for any rank, which also returns rank and s; GELS by QR (`geqrf`,
            `ormqr`, `trsm`), with less work, for full rank only: if the rank is deficient up to roundoff x is large,
            and the status does not report it.
        rtol: with GELSS only, singular values up to this fraction of the largest count as 0; by default max(m, n) times
            the dtype's eps.
        autotune: if both cuBLAS and cuSOLVER support the request, time them once, use the faster one and remember it on
            disk.
        out: x, (…, n, k) or (n,).
        residuals: real (…, k), or () for a vector: ‖b - A·x‖² of each column, for any rank. With no more rows than
            columns it is empty, (…, 0), as in NumPy: x then solves the system and the residual would be roundoff.
        rank, s: with GELSS, i64 (…), and the singular values (…, min(m, n)).
        info: i32: 0; with GELSS as for `svd`, with GELS the index of the first exact 0 on R's diagonal, counted from 1.
            If it is not 0, x is NaN.
    """

    op: ClassVar[str] = "lstsq"
    reads: ClassVar[tuple[str, ...]] = ("a", "b")
    writes: ClassVar[tuple[str, ...]] = ("out", "residuals", "rank", "s", "info")
    a: Tensor
    b: Tensor
    _: KW_ONLY
    driver: LstsqDriver | str = LstsqDriver.GELSS
    rtol: float | None = None
    autotune: bool = False
    out: Tensor | None = None
    residuals: Tensor | None = None
    rank: Tensor | None = None
    s: Tensor | None = None
    info: Tensor | None = None

    def check_fields(self) -> None:
        check_matrix("a", self.a)
        check_values(self.b, self.a)
        check_rtol(self.rtol)
        if self.rtol is not None and self.driver is LstsqDriver.GELS:
            raise BadRequest(
                "rtol", shown(self.rtol), "None with driver gels", "only driver gelss uses singular values"
            )
        for name in self.writes[1:]:
            check_dense(name, getattr(self, name))

    def outputs(self) -> dict[str, Output]:
        (rows, cols), dtype = self.a.shape[-2:], self.a.dtype
        is_vector = self.b.ndim == 1
        behind = () if is_vector else self.b.shape[-1:]
        x = dense((cols,), dtype) if is_vector else by_columns((*self.batch, cols, *behind), dtype)
        left = behind if rows > cols else (0,)
        outputs = {"out": x, "residuals": dense((*self.batch, *left), real_of(dtype))}
        if self.driver is LstsqDriver.GELSS:
            outputs["rank"] = dense(self.batch, I64)
            outputs["s"] = dense((*self.batch, min(rows, cols)), real_of(dtype))
        return outputs | {"info": self.info_output()}


def check_rtol(rtol: float | None, name: str = "rtol") -> None:
    """BadRequest unless a fraction of the largest singular value is valid, or None."""
    if rtol is not None:
        check_number(name, rtol, low=0.0, high=1.0)


def check_values(b: Tensor, a: Tensor) -> None:
    """BadRequest unless b has a row for each row of a: (…, m, k), or a vector (m,) for one matrix."""
    rows = a.shape[-2]
    is_vector = b.ndim == 1 and a.ndim == MATRIX
    fits = b.shape == (rows,) if is_vector else b.ndim == a.ndim and b.shape[:-1] == a.shape[:-1]
    if b.dtype is not a.dtype or not fits:
        leading = "".join(f"{extent}, " for extent in a.shape[:-2])
        vector = f", or {a.dtype}[{rows}]" if a.ndim == MATRIX else ""
        expected = f"{a.dtype}[{leading}{rows}, k]{vector}, for a {list(a.shape)}"
        raise BadRequest("b", str(b.layout), expected, "x[..., None] makes each vector a column")
