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
    """The routine of `eigh`: SYEVD divides and conquers, SYEVJ is Jacobi's method, often faster on small matrices."""

    SYEVD = 0
    SYEVJ = 1

    @staticmethod
    def other_names() -> dict[str, str]:
        return {"EVD": "SYEVD", "EVJ": "SYEVJ", "HEEVD": "SYEVD", "HEEVJ": "SYEVJ"}


class SvdDriver(Choice):
    """The routine of `svd`: GESVD by QR iteration, GESVDJ by Jacobi's method, GESVDP by a polar decomposition, GESVDA.

    GESVDP is the fastest on large matrices (4 times GESVD for 1024 rows on an H100), but not on singular ones: where a
    singular value is close to 0 the polar decomposition fails, cuSOLVER decomposes a matrix that is another, and GESVD
    does the work once more.

    GESVDA takes many tall matrices of few columns in one call, and the transposes of wide ones. It is approximate: it
    takes the eigenvalues of Aᴴ·A, whose error of n·eps·‖A‖² is one of n·eps·‖A‖·κ in a singular value, where κ is
    ‖A‖ / s[k-1], one of n·eps·κ² in Uᴴ·U, and in a value of 0 one of (n·eps)^½·‖A‖, of which U is not stated.
    """

    GESVD = 0
    GESVDJ = 1
    GESVDP = 2
    GESVDA = 3


@dataclass(frozen=True, eq=False)
class EighRequest(LinalgRequest["tuple[Tensor, ...]"]):
    """Eigenvalues and eigenvectors of a symmetric or Hermitian matrix: A·V = V·diag(w); gives back (w, v, info).

    Attributes:
        a: (…, n, n), of which one triangle is read.
        lower: whether that is the lower one.
        eigvals_only: whether (w, info) is all that is wanted.
        driver: SYEVD or SYEVJ; left open SYEVD, unless `autotune` finds the other one faster.
        autotune: with the driver left open, time both once, keep the faster, and remember it on disk.
        subset_by_index: (first, last), counted from 0: these eigenvalues alone, by `syevdx`; k of them come out.
        subset_by_value: (low, high): the eigenvalues above low, and not above high. What is found comes first, NaN
            behind it, and `count` in front of info says how many.
        w: (…, k), real and ascending, dense; k is n, unless some are chosen by index.
        v: (…, n, k), an orthonormal eigenvector in each column; left open, these lie one behind another.
        count: i64, one for each matrix: how many eigenvalues are in `subset_by_value`.
        info: i32, one for each matrix: 0, or above 0 where the method did not converge, and then w and v are NaN.

    Of several matrices SYEVD and SYEVJ take all at once, unless some eigenvalues are chosen. These routines may look at
    the GPU while they run, so that they cannot be captured. A NaN gives NaN, with an info above 0 or without.
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
    """BadRequest for a subset that is none, or that the driver cannot find, and for outputs that are not dense."""
    check_subset(request)
    if request.driver is EighDriver.SYEVJ and (request.subset_by_index or request.subset_by_value):
        hint = 'driver="syevd" finds some of the eigenvalues'
        raise BadRequest("driver", "SYEVJ with a subset", "SYEVD, for Jacobi's method finds all", hint)
    for name in ("w", "count", "info"):
        check_dense(name, getattr(request, name))


@dataclass(frozen=True, eq=False)
class GeneralizedEighRequest(LinalgRequest["tuple[Tensor, ...]"]):
    """Eigenvalues and eigenvectors of a symmetric or Hermitian A with a positive definite B; gives back (w, v, info).

    Attributes:
        a: (…, n, n), of which one triangle is read.
        b: (…, n, n), positive definite, of which the same triangle is read.
        itype: what is solved: 1 A·v = w·B·v, 2 A·B·v = w·v, 3 B·A·v = w·v.
        lower: whether it is the lower triangle.
        eigvals_only: whether (w, info) is all that is wanted.
        driver: SYEVD, by `sygvd`, or SYEVJ, by `sygvj`; left open SYEVD, unless `autotune` finds the other one faster.
        autotune: with the driver left open, time both once, keep the faster, and remember it on disk.
        subset_by_index: (first, last), counted from 0: these eigenvalues alone, by `sygvdx`; k of them come out.
        subset_by_value: (low, high): the eigenvalues above low, and not above high. What is found comes first, NaN
            behind it, and `count` in front of info says how many.
        w: (…, k), real and ascending, dense; k is n, unless some are chosen by index.
        v: (…, n, k), an eigenvector in each column: Vᴴ·B·V is the identity, for itype 3 Vᴴ·B⁻¹·V.
        count: i64, one for each matrix: how many eigenvalues are in `subset_by_value`.
        info: i32, one for each matrix: 0; up to n where the method did not converge; n + i where the leading minor of
            order i of b is not positive definite. Where it is not 0, w and v are NaN.

    Residuals grow with the condition of B, whose Cholesky factor transforms the problem. The matrices of a batch are
    taken one after another. These routines may look at the GPU while they run, so that they cannot be captured.
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
    """Singular values and vectors: A = U·diag(s)·Vᴴ; gives back (u, s, vh, info).

    Attributes:
        a: (…, m, n); k is the smaller of the two.
        full_matrices: whether u is (…, m, m) and vh (…, n, n); else (…, m, k) and (…, k, n).
        compute_uv: whether u and vh are wanted; else (s, info) comes back.
        driver: GESVD, GESVDJ, GESVDP or GESVDA; left open GESVD, of many matrices of up to 32 rows and columns GESVDJ,
            unless `autotune` finds another one of the first three faster.
        autotune: with the driver left open, time these three once, keep the fastest, and remember it on disk. GESVDA is
            not among them, for its results are held to another bound.
        u, vh: orthonormal columns, and rows; left open, they lie in memory as the routine leaves them.
        s: (…, k), real and descending, dense.
        info: i32, one for each matrix: 0, or above 0 where the method did not converge, and then the rest is NaN.

    Of several matrices of up to 32 rows and columns GESVDJ takes all at once; of any GESVDA does, which has no more
    than k vectors: it refuses `full_matrices`, unless they are square. These routines may look at the GPU while
    they run, so that they cannot be captured. A NaN gives NaN, with an info above 0 or without.
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
        found = {"s": dense((*self.batch, least), real_of(self.a.dtype)), "info": self.info_output()}
        if not self.compute_uv:
            return found
        u = (*self.batch, rows, rows if self.full_matrices else least)
        vh = (*self.batch, cols if self.full_matrices else least, cols)
        # A wide matrix is transposed on its way: the left vectors of that are our right ones, by rows.
        lay = by_columns if rows >= cols else dense
        return {"u": lay(u, self.a.dtype), "s": found["s"], "vh": lay(vh, self.a.dtype), "info": found["info"]}
