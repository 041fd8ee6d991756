"""The requests of eigenvalues and singular values; none calls a library."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.checks import check_int
from dispatch.core.operands import Output, dense, same_as
from dispatch.errors import BadRequest
from dispatch.keys import Choice
from dispatch.ops.linalg.base import LinalgRequest, by_columns, check_dense, check_matrix, check_square, real_of
from dispatch.ops.linalg.subset import check_subset, eigen_outputs

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["EighDriver", "EighRequest", "GeneralizedEighRequest", "SvdDriver", "SvdRequest"]


class EighDriver(Choice):
    """The routine of `eigh`: SYEVD is divide and conquer, SYEVJ is Jacobi's method, often faster on small matrices."""

    SYEVD = 0
    SYEVJ = 1

    @staticmethod
    def other_names() -> dict[str, str]:
        return {"EVD": "SYEVD", "EVJ": "SYEVJ", "HEEVD": "SYEVD", "HEEVJ": "SYEVJ"}


class SvdDriver(Choice):
    """The routine of `svd`: GESVD by QR iteration, GESVDJ by Jacobi's method, GESVDP by a polar decomposition, GESVDA.

    GESVDP is the fastest on large matrices (4 times GESVD for 1024 rows on an H100), but not on singular ones: if a
    singular value is close to 0 the polar decomposition fails, cuSOLVER decomposes a modified matrix, and GESVD repeats
    the work.

    GESVDA computes many tall matrices with few columns in one call, and wide ones by their transposes. It is
    approximate: it uses the eigenvalues of Aᴴ·A, whose error of n·eps·‖A‖² causes an error of n·eps·‖A‖·κ in a singular
    value, where κ is ‖A‖ / s[k-1], of n·eps·κ² in Uᴴ·U, and of (n·eps)^½·‖A‖ in a singular value of 0, whose column of
    U is unspecified.
    """

    GESVD = 0
    GESVDJ = 1
    GESVDP = 2
    GESVDA = 3


@dataclass(frozen=True, eq=False)
class EighRequest(LinalgRequest["tuple[Tensor, ...]"]):
    """Eigenvalues and eigenvectors of a symmetric or Hermitian matrix: A·V = V·diag(w); returns (w, v, info).

    Attributes:
        a: (…, n, n); only one triangle is read.
        lower: whether the lower triangle is read.
        eigvals_only: whether only (w, info) is computed.
        driver: SYEVD or SYEVJ; by default SYEVD, unless `autotune` finds the other one faster.
        autotune: without a driver, time both once, use the faster one and remember it on disk.
        subset_by_index: (first, last), counted from 0: only these k eigenvalues, by `syevdx`.
        subset_by_value: (low, high): the eigenvalues above low, and not above high. They come first, followed by NaN,
            and `count` before info is their number.
        w: (…, k), real and ascending, dense; k is n, unless some are selected by index.
        v: (…, n, k), an orthonormal eigenvector in each column; by default it is column-major.
        count: i64, one for each matrix: the number of eigenvalues in `subset_by_value`.
        info: i32, one for each matrix: 0, or above 0 if the method did not converge; w and v are then NaN.

    SYEVD and SYEVJ compute all matrices of a batch at once, unless some eigenvalues are selected. These routines may
    synchronize with the GPU while they run, so they cannot be captured. A NaN gives NaN; info may or may not be above
    0.
    """

    op: ClassVar[str] = "eigh"
    reads: ClassVar[tuple[str, ...]] = ("a",)
    writes: ClassVar[tuple[str, ...]] = ("w", "v", "count", "info")
    a: Tensor
    _: KW_ONLY
    lower: bool = True
    eigvals_only: bool = False
    driver: EighDriver | str | None = None
    autotune: bool = False
    subset_by_index: tuple[int, ...] | None = None
    subset_by_value: tuple[float, ...] | None = None
    w: Tensor | None = None
    v: Tensor | None = None
    count: Tensor | None = None
    info: Tensor | None = None

    def check_fields(self) -> None:
        check_square("a", self.a)
        check_eigen(self)

    def outputs(self) -> dict[str, Output]:
        return eigen_outputs(self)


def check_eigen(request: EighRequest | GeneralizedEighRequest) -> None:
    """BadRequest for a subset that is invalid or that the driver does not support, or for non-dense outputs."""
    check_subset(request)
    if request.driver is EighDriver.SYEVJ and (request.subset_by_index or request.subset_by_value):
        hint = 'driver="syevd" computes a subset of the eigenvalues'
        raise BadRequest(
            "driver", "SYEVJ with a subset", "SYEVD, because Jacobi's method computes all eigenvalues", hint
        )
    for name in ("w", "count", "info"):
        check_dense(name, getattr(request, name))


@dataclass(frozen=True, eq=False)
class GeneralizedEighRequest(LinalgRequest["tuple[Tensor, ...]"]):
    """Eigenvalues and eigenvectors of a symmetric or Hermitian A with a positive definite B; returns (w, v, info).

    Attributes:
        a: (…, n, n); only one triangle is read.
        b: (…, n, n), positive definite; the same triangle is read.
        itype: the problem: 1 A·v = w·B·v, 2 A·B·v = w·v, 3 B·A·v = w·v.
        lower: whether the lower triangle is read.
        eigvals_only: whether only (w, info) is computed.
        driver: SYEVD, by `sygvd`, or SYEVJ, by `sygvj`; by default SYEVD, unless `autotune` finds the other one faster.
        autotune: without a driver, time both once, use the faster one and remember it on disk.
        subset_by_index: (first, last), counted from 0: only these k eigenvalues, by `sygvdx`.
        subset_by_value: (low, high): the eigenvalues above low, and not above high. They come first, followed by NaN,
            and `count` before info is their number.
        w: (…, k), real and ascending, dense; k is n, unless some are selected by index.
        v: (…, n, k), an eigenvector in each column: Vᴴ·B·V is the identity, for itype 3 Vᴴ·B⁻¹·V.
        count: i64, one for each matrix: the number of eigenvalues in `subset_by_value`.
        info: i32, one for each matrix: 0; up to n if the method did not converge; n + i if the leading minor of order i
            of b is not positive definite. If it is not 0, w and v are NaN.

    Residuals grow with the condition of B, whose Cholesky factor transforms the problem. The matrices of a batch are
    processed one after another. These routines may synchronize with the GPU while they run, so they cannot be captured.
    """

    op: ClassVar[str] = "generalized_eigh"
    reads: ClassVar[tuple[str, ...]] = ("a", "b")
    writes: ClassVar[tuple[str, ...]] = ("w", "v", "count", "info")
    a: Tensor
    b: Tensor
    _: KW_ONLY
    itype: int = 1
    lower: bool = True
    eigvals_only: bool = False
    driver: EighDriver | str | None = None
    autotune: bool = False
    subset_by_index: tuple[int, ...] | None = None
    subset_by_value: tuple[float, ...] | None = None
    w: Tensor | None = None
    v: Tensor | None = None
    count: Tensor | None = None
    info: Tensor | None = None

    def check_fields(self) -> None:
        check_square("a", self.a)
        same_as("b", self.b, "a", self.a)
        check_int("itype", self.itype, 1, 3)
        check_eigen(self)

    def outputs(self) -> dict[str, Output]:
        return eigen_outputs(self)


@dataclass(frozen=True, eq=False)
class SvdRequest(LinalgRequest["tuple[Tensor, ...]"]):
    """Singular values and vectors: A = U·diag(s)·Vᴴ; returns (u, s, vh, info).

    Attributes:
        a: (…, m, n); k is the smaller of the two.
        full_matrices: whether u is (…, m, m) and vh (…, n, n); otherwise (…, m, k) and (…, k, n).
        compute_uv: whether u and vh are computed; otherwise it returns (s, info).
        driver: GESVD, GESVDJ, GESVDP or GESVDA; by default GESVD, for many matrices of up to 32 rows and columns
            GESVDJ, unless `autotune` finds another one of the first three faster.
        autotune: without a driver, time these three once, use the fastest and remember it on disk. GESVDA is excluded,
            because its results have to meet another bound.
        u, vh: orthonormal columns, and rows; by default in the memory order of the routine.
        s: (…, k), real and descending, dense.
        info: i32, one for each matrix: 0, or above 0 if the method did not converge; the other results are then NaN.

    GESVDJ computes several matrices of up to 32 rows and columns in one call. GESVDA does so for any size, but computes
    at most k vectors: it refuses `full_matrices` unless the matrices are square. These routines may synchronize with
    the GPU while they run, so they cannot be captured. A NaN gives NaN; info may or may not be above 0.
    """

    op: ClassVar[str] = "svd"
    reads: ClassVar[tuple[str, ...]] = ("a",)
    writes: ClassVar[tuple[str, ...]] = ("u", "s", "vh", "info")
    a: Tensor
    _: KW_ONLY
    full_matrices: bool = True
    compute_uv: bool = True
    driver: SvdDriver | str | None = None
    autotune: bool = False
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
        outputs = {"s": dense((*self.batch, least), real_of(self.a.dtype)), "info": self.info_output()}
        if not self.compute_uv:
            return outputs
        u = (*self.batch, rows, rows if self.full_matrices else least)
        vh = (*self.batch, cols if self.full_matrices else least, cols)
        # A wide matrix is transposed: the left vectors of the transpose are the right vectors of A, row-major.
        lay = by_columns if rows >= cols else dense
        return {"u": lay(u, self.a.dtype), "s": outputs["s"], "vh": lay(vh, self.a.dtype), "info": outputs["info"]}
