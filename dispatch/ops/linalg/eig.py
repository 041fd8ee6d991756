"""The requests of the eigenvalues of any square matrix, and of the largest singular values by random projection."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.checks import check_int, shown
from dispatch.core.operands import Output, dense
from dispatch.errors import BadRequest
from dispatch.keys import C64, C128, F32, F64
from dispatch.ops.linalg.base import LinalgRequest, by_columns, check_dense, check_matrix, check_square, real_of

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = ["EigRequest", "RandomizedSvdRequest", "complex_of", "oversampled"]

COMPLEX = {F32: C64, F64: C128}


def complex_of(dtype: Dtype) -> Dtype:
    """The complex dtype of the precision of a dtype."""
    return COMPLEX.get(dtype, dtype)


@dataclass(frozen=True, eq=False)
class EigRequest(LinalgRequest["tuple[Tensor, ...]"]):
    """Eigenvalues and eigenvectors of a square matrix: A·V = V·diag(w), by `geev`; returns (w, v, info).

    Attributes:
        a: (…, n, n), real or complex.
        eigvals_only: whether only (w, info) is computed.
        left: whether left eigenvectors are computed too, Uᴴ·A = diag(w)·Uᴴ; it then returns (w, vl, v, info).
        w: (…, n), complex, dense, in no order; for a real matrix the non-real ones are conjugate pairs, the one with
            the positive imaginary part first.
        vl, v: (…, n, n), complex, an eigenvector of norm 1 in each column; by default they are column-major.
        info: i32, one for each matrix: 0, or above 0 if the method did not converge; the other results are then NaN.

    On a GPU left eigenvectors are the right eigenvectors of Aᴴ, by a second `geev`, because cuSOLVER does not compute
    left ones: each eigenvalue in turn is matched with the nearest eigenvalue that remains. The matrices of a batch are
    processed one after another, partly on the host, so the routine cannot be captured. A NaN gives NaN; info may or may
    not be above 0.
    """

    op: ClassVar[str] = "eig"
    reads: ClassVar[tuple[str, ...]] = ("a",)
    writes: ClassVar[tuple[str, ...]] = ("w", "vl", "v", "info")
    a: Tensor
    _: KW_ONLY
    eigvals_only: bool = False
    left: bool = False
    w: Tensor | None = None
    vl: Tensor | None = None
    v: Tensor | None = None
    info: Tensor | None = None

    @property
    def dtypes(self) -> tuple[Dtype | None, ...]:
        return self.a.dtype, complex_of(self.a.dtype)

    def check_fields(self) -> None:
        check_square("a", self.a)
        check_dense("w", self.w)
        check_dense("info", self.info)
        if self.left and self.eigvals_only:
            raise BadRequest("left", "True", "False with eigvals_only=True, which computes no vectors")

    def outputs(self) -> dict[str, Output]:
        kind = complex_of(self.a.dtype)
        names = () if self.eigvals_only else ("vl", "v") if self.left else ("v",)
        outputs = {"w": dense(self.a.shape[:-1], kind)} | {name: by_columns(self.a.shape, kind) for name in names}
        return outputs | {"info": self.info_output()}


@dataclass(frozen=True, eq=False)
class RandomizedSvdRequest(LinalgRequest["tuple[Tensor, ...]"]):
    """Approximate largest singular values and vectors: A ≈ U·diag(s)·Vᴴ, by `gesvdr`; returns (u, s, vh, info).

    Attributes:
        a: (…, m, n).
        rank: k, the number of singular values; less than m and than n.
        oversampling: the number of additional random vectors that A is applied to; rank plus oversampling is less than
            m and than n. None stands for twice the rank, or as many as possible.
        iterations: q, how often A·Aᴴ is applied to the vectors: use more if singular values decay slowly, 0 if they
            decay fast.
        compute_uv: whether u and vh are computed; otherwise it returns (s, info).
        u, vh: (…, m, k) orthonormal columns and (…, k, n) rows; by default u is column-major and vh row-major.
        s: (…, k), real and descending, dense.
        info: i32, one for each matrix: 0, or another number if it failed; the other results are then NaN.

    The approximation error is about the size of the next singular value: only roundoff for a matrix of that rank.
    Roundoff is that of powers of A: up to 30·max(m, n)·eps·‖A‖·(s[0]/s[k-1])^2q in s and in U·diag(s)·Vᴴ, so singular
    values below s[0]·eps^(1/(2q+1)) are lost; U and V are orthonormal nevertheless. On the host s is LAPACK's. The
    matrices of a batch are processed one after another.
    """

    op: ClassVar[str] = "randomized_svd"
    reads: ClassVar[tuple[str, ...]] = ("a",)
    writes: ClassVar[tuple[str, ...]] = ("u", "s", "vh", "info")
    a: Tensor
    rank: int
    _: KW_ONLY
    oversampling: int | None = None
    iterations: int = 2
    compute_uv: bool = True
    u: Tensor | None = None
    s: Tensor | None = None
    vh: Tensor | None = None
    info: Tensor | None = None

    def check_fields(self) -> None:
        check_matrix("a", self.a)
        least = min(self.a.shape[-2:])
        if least < 2:  # a rank of 1 would not be less
            raise BadRequest("a", str(self.a.layout), "at least 2 rows and columns", "dispatch.svd accepts any matrix")
        check_int("rank", self.rank, 1, least - 1)
        check_int("iterations", self.iterations, 0)
        more = self.oversampling
        if more is not None and (type(more) is not int or not 0 <= more < least - self.rank):
            raise BadRequest("oversampling", shown(more), f"0 to {least - self.rank - 1}, with a rank of {self.rank}")
        check_dense("s", self.s)
        check_dense("info", self.info)

    def outputs(self) -> dict[str, Output]:
        (rows, cols), kind = self.a.shape[-2:], self.a.dtype
        s, info = dense((*self.batch, self.rank), real_of(kind)), self.info_output()
        if not self.compute_uv:
            return {"s": s, "info": info}
        u = by_columns((*self.batch, rows, self.rank), kind)
        return {"u": u, "s": s, "vh": dense((*self.batch, self.rank, cols), kind), "info": info}


def oversampled(request: RandomizedSvdRequest) -> int:
    """The number of additional random vectors beyond the rank."""
    if request.oversampling is not None:
        return request.oversampling
    return min(2 * request.rank, min(request.a.shape[-2:]) - request.rank - 1)
