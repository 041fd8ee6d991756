"""The requests of eigenvalues and singular values; none calls a library."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.core.operands import Output, dense
from dispatch.keys import Choice
from dispatch.ops.linalg.base import LinalgRequest, by_columns, check_dense, check_matrix, check_square, real_of

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["EighDriver", "EighRequest", "SvdDriver", "SvdRequest"]


class EighDriver(Choice):
    """The routine of `eigh`: SYEVD divides and conquers, SYEVJ is Jacobi's method, often faster on small matrices."""

    SYEVD = 0
    SYEVJ = 1

    @staticmethod
    def other_names() -> dict[str, str]:
        return {"EVD": "SYEVD", "EVJ": "SYEVJ", "HEEVD": "SYEVD", "HEEVJ": "SYEVJ"}


class SvdDriver(Choice):
    """The routine of `svd`: GESVD by QR iteration, GESVDJ by Jacobi's method, GESVDP by a polar decomposition.

    GESVDP is the fastest on large matrices, but not for singular ones: where a singular value is close to 0 the polar
    decomposition fails, and cuSOLVER adds a small matrix first, which shifts the singular values. On an H100 these were
    240 to 510 n·eps·‖A‖ off for rank-deficient matrices of 6 to 11 rows (eps 6e-8 in single precision, 1.1e-16 in
    double); those of full rank are held to the bounds of GESVD. No status tells of it: take it where the rank is full.
    """

    GESVD = 0
    GESVDJ = 1
    GESVDP = 2


@dataclass(frozen=True, eq=False)
class EighRequest(LinalgRequest["tuple[Tensor, ...]"]):
    """Eigenvalues and eigenvectors of a symmetric or Hermitian matrix: A·V = V·diag(w); gives back (w, v, info).

    Attributes:
        a: (…, n, n), of which one triangle is read.
        lower: whether that is the lower one.
        eigvals_only: whether (w, info) is all that is wanted.
        driver: SYEVD or SYEVJ.
        w: (…, n), real and ascending, dense.
        v: (…, n, n), an orthonormal eigenvector in each column; left open, these lie one behind another.
        info: i32, one for each matrix: 0, or above 0 where the method did not converge, and then w and v are NaN.

    Of several matrices SYEVD and SYEVJ take all at once. These routines may look at the GPU while they run, so that
    they cannot be captured. A NaN gives NaN, with an info above 0 or without.
    """

    op: ClassVar[str] = "eigh"
    reads: ClassVar[tuple[str, ...]] = ("a",)
    writes: ClassVar[tuple[str, ...]] = ("w", "v", "info")
    a: Tensor
    _: KW_ONLY
    lower: bool = True
    eigvals_only: bool = False
    driver: EighDriver | str = EighDriver.SYEVD
    w: Tensor | None = None
    v: Tensor | None = None
    info: Tensor | None = None

    def check_fields(self) -> None:
        check_square("a", self.a)
        check_dense("w", self.w)
        check_dense("info", self.info)

    def outputs(self) -> dict[str, Output]:
        found = {"w": dense(self.a.shape[:-1], real_of(self.a.dtype))}
        if not self.eigvals_only:
            found["v"] = by_columns(self.a.shape, self.a.dtype)
        return found | {"info": self.info_output()}


@dataclass(frozen=True, eq=False)
class SvdRequest(LinalgRequest["tuple[Tensor, ...]"]):
    """Singular values and vectors: A = U·diag(s)·Vᴴ; gives back (u, s, vh, info).

    Attributes:
        a: (…, m, n); k is the smaller of the two.
        full_matrices: whether u is (…, m, m) and vh (…, n, n); else (…, m, k) and (…, k, n).
        compute_uv: whether u and vh are wanted; else (s, info) comes back.
        driver: GESVD, GESVDJ or GESVDP.
        u, vh: orthonormal columns, and rows; left open, they lie in memory as the routine leaves them.
        s: (…, k), real and descending, dense.
        info: i32, one for each matrix: 0, or above 0 where the method did not converge, and then the rest is NaN.

    Of several matrices of up to 32 rows and columns GESVDJ takes all at once. These routines may look at the GPU while
    they run, so that they cannot be captured. A NaN gives NaN, with an info above 0 or without.
    """

    op: ClassVar[str] = "svd"
    reads: ClassVar[tuple[str, ...]] = ("a",)
    writes: ClassVar[tuple[str, ...]] = ("u", "s", "vh", "info")
    a: Tensor
    _: KW_ONLY
    full_matrices: bool = True
    compute_uv: bool = True
    driver: SvdDriver | str = SvdDriver.GESVD
    u: Tensor | None = None
    s: Tensor | None = None
    vh: Tensor | None = None
    info: Tensor | None = None

    def check_fields(self) -> None:
        check_matrix("a", self.a)
        check_dense("s", self.s)
        check_dense("info", self.info)

    def outputs(self) -> dict[str, Output]:
        rows, cols = self.a.shape[-2:]
        least = min(rows, cols)
        found = {"s": dense((*self.batch, least), real_of(self.a.dtype)), "info": self.info_output()}
        if not self.compute_uv:
            return found
        u = (*self.batch, rows, rows if self.full_matrices else least)
        vh = (*self.batch, cols if self.full_matrices else least, cols)
        # A wide matrix is transposed on its way: the left vectors of that are our right ones, by rows.
        lay = by_columns if rows >= cols else dense
        return {"u": lay(u, self.a.dtype), "s": found["s"], "vh": lay(vh, self.a.dtype), "info": found["info"]}
