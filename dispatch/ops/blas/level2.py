"""The requests of BLAS level 2 that multiply or solve: `cublas2.py` calls cuBLAS, `reference2.py` is NumPy.

Follows https://docs.nvidia.com/cuda/cublas/#cublas-level-2-function-reference. Vectors may have any step except 0,
including negative steps. Bands are stored as in `scipy.linalg.solve_banded`, ab[ku + i - j, j] = a[i, j], and packed
triangles column by column, as in LAPACK.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from math import isqrt
from typing import TYPE_CHECKING, ClassVar

from numpy import broadcast_shapes

from dispatch.checks import check_int
from dispatch.core.operands import Output, dense
from dispatch.core.request import Unpacked
from dispatch.errors import BadRequest
from dispatch.keys import F32, HALF
from dispatch.ops.blas.base import BlasRequest, Number, ScaledRequest, Shape, dims, length
from dispatch.ops.blas.choices import DiagType, FillMode, Operation

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype


__all__ = ["GbmvRequest", "GemvRequest", "HbmvRequest", "HemvRequest", "HpmvRequest", "SbmvRequest", "SpmvRequest"]
__all__ += ["SymvRequest", "TbmvRequest", "TbsvRequest", "TpmvRequest", "TpsvRequest", "TrmvRequest", "TrsvRequest"]
__all__ += ["order_of_packed"]


def order_of_packed(name: str, tensor: Tensor) -> int:
    """The number of rows of a matrix whose packed triangle has this many elements."""
    count = length(name, tensor)
    n = (isqrt(8 * count + 1) - 1) // 2
    if n * (n + 1) // 2 != count:
        raise BadRequest(name, str(tensor.layout), "n · (n + 1) / 2 elements, the triangle of a matrix")
    return n


# -- a matrix times a vector -----------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class ProductRequest(ScaledRequest):
    """A matrix times a vector, optionally added to another vector.

    Attributes:
        x: the vector, as long as op(A) has columns.
        y: added as beta · y, of out's length; it may be `out` itself, and is not read if beta is 0.
        beta: a number; by default 1 if there is a y. Without y it is 0.
        out: the result, as long as op(A) has rows.
    """

    added: ClassVar[str] = "y"
    numbers: ClassVar[tuple[str, ...]] = ("alpha", "beta")
    unpacked: ClassVar[Unpacked | None] = Unpacked(numbers=("alpha", "beta"))
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "y")})
    _: KW_ONLY
    y: Tensor | None = None
    beta: Number | None = None
    out: Tensor | None = None

    def outputs(self) -> dict[str, Output]:
        first: Tensor = getattr(self, self.reads[0])
        return {"out": dense(self.extents()["out"], first.dtype)}


@dataclass(frozen=True, eq=False)
class GemvRequest(ProductRequest):
    """y = alpha · op(A) · x + beta · y, over leading axes for each matrix and vector.

    Attributes:
        a: (…, m, n); its leading axes and those of x broadcast; pass a single matrix for many vectors as a[None].
        x: (…, n), or (…, m) for a `trans` other than "n".
        y: added as beta · y, of out's shape; it may be `out` itself, and is not read if beta is 0.
        out: (…, m), or (…, n) for a `trans` other than "n".
        trans: op: "n" for A, "t" for Aᵀ, "c" for Aᴴ.

    For f16 and bf16, y and out may be f32: the result has the dtype of out, otherwise of y, otherwise of a. Everything
    is computed in f32.
    """

    op: ClassVar[str] = "gemv"
    reads: ClassVar[tuple[str, ...]] = ("a", "x", "y")
    mixed: ClassVar[tuple[str, ...]] = ("y",)
    a: Tensor
    x: Tensor
    _: KW_ONLY
    trans: Operation | str = Operation.N

    def extents(self) -> dict[str, Shape]:
        if self.a.ndim < 2:
            dims("a", self.a)
        if self.x.ndim < 1:
            length("x", self.x)
        m, n = self.a.shape[-2:]
        long, short = (m, n) if self.trans is Operation.N else (n, m)
        a_batch, x_batch = self.a.shape[:-2], self.x.shape[:-1]
        try:
            batch = tuple(broadcast_shapes(a_batch, x_batch))
        except (ValueError, RuntimeError):  # RuntimeError beyond 32 axes
            expected = f"leading axes that broadcast to those of a, {list(a_batch)}"
            raise BadRequest("x", str(self.x.layout), expected) from None
        if not a_batch and x_batch:
            raise BadRequest("x", str(self.x.layout), f"{self.x.dtype}[{short}]", "a[None] adds a leading axis")
        return {"a": self.a.shape, "x": (*x_batch, short), "y": (*batch, long), "out": (*batch, long)}

    def dtype_of(self, name: str) -> Dtype:
        if name in ("y", "out") and self.a.dtype in HALF:
            like = self.out if self.out is not None else self.y
            return F32 if like is not None and like.dtype is F32 else self.a.dtype
        return self.a.dtype

    def outputs(self) -> dict[str, Output]:
        return {"out": dense(self.extents()["out"], self.dtype_of("out"))}


@dataclass(frozen=True, eq=False)
class GbmvRequest(ProductRequest):
    """y = alpha · op(A) · x + beta · y, where A has kl diagonals below the main one and ku above it.

    Attributes:
        ab: (kl + ku + 1, n), column-major: the diagonals of A, the uppermost first, ab[ku + i - j, j] = a[i, j].
        kl, ku: the diagonals below and above the main one.
        m: the rows of A; None for n.
        trans: op: "n" for A, "t" for Aᵀ, "c" for Aᴴ.
    """

    op: ClassVar[str] = "gbmv"
    reads: ClassVar[tuple[str, ...]] = ("ab", "x", "y")
    ab: Tensor
    x: Tensor
    _: KW_ONLY
    kl: int
    ku: int
    m: int | None = None
    trans: Operation | str = Operation.N

    @property
    def rows(self) -> int:
        """The rows of A."""
        return self.ab.shape[-1] if self.m is None else self.m

    def extents(self) -> dict[str, Shape]:
        for name in ("kl", "ku", *(("m",) if self.m is not None else ())):
            check_int(name, getattr(self, name), 0)
        _, n = dims("ab", self.ab)
        long, short = (self.rows, n) if self.trans is Operation.N else (n, self.rows)
        return {"ab": (self.kl + self.ku + 1, n), "x": (short,), "y": (long,), "out": (long,)}


@dataclass(frozen=True, eq=False)
class SymmetricProductRequest(ProductRequest):
    """A symmetric or Hermitian matrix times a vector.

    Attributes:
        uplo: which triangle of A is read, or stored: "lower" or "upper".
    """

    _: KW_ONLY
    uplo: FillMode | str = FillMode.LOWER


@dataclass(frozen=True, eq=False)
class SymvRequest(SymmetricProductRequest):
    """y = alpha · A · x + beta · y, where A is symmetric.

    Attributes:
        a: (n, n); only its triangle `uplo` is read.
    """

    op: ClassVar[str] = "symv"
    reads: ClassVar[tuple[str, ...]] = ("a", "x", "y")
    a: Tensor
    x: Tensor

    def extents(self) -> dict[str, Shape]:
        _, n = dims("a", self.a)
        return {"a": (n, n), "x": (n,), "y": (n,), "out": (n,)}


@dataclass(frozen=True, eq=False)
class HemvRequest(SymvRequest):
    """y = alpha · A · x + beta · y, where A is Hermitian; only complex matrices.

    The imaginary parts of A's diagonal are treated as 0.
    """

    op: ClassVar[str] = "hemv"


@dataclass(frozen=True, eq=False)
class SbmvRequest(SymmetricProductRequest):
    """y = alpha · A · x + beta · y, where A is symmetric with k diagonals on either side of the main one.

    Attributes:
        ab: (k + 1, n), column-major: the main diagonal and those below, ab[i - j, j] = a[i, j]; for uplo "upper" those
            above, ab[k + i - j, j] = a[i, j].
    """

    op: ClassVar[str] = "sbmv"
    reads: ClassVar[tuple[str, ...]] = ("ab", "x", "y")
    ab: Tensor
    x: Tensor

    def extents(self) -> dict[str, Shape]:
        rows, n = dims("ab", self.ab)
        return {"ab": (max(rows, 1), n), "x": (n,), "y": (n,), "out": (n,)}


@dataclass(frozen=True, eq=False)
class HbmvRequest(SbmvRequest):
    """y = alpha · A · x + beta · y, where A is Hermitian with k diagonals on either side; only complex matrices.

    The imaginary parts of A's diagonal are treated as 0.
    """

    op: ClassVar[str] = "hbmv"


@dataclass(frozen=True, eq=False)
class SpmvRequest(SymmetricProductRequest):
    """y = alpha · A · x + beta · y, where A is symmetric and its triangle packed.

    Attributes:
        ap: (n · (n + 1) / 2,), dense: the columns of the triangle, contiguous.
    """

    op: ClassVar[str] = "spmv"
    reads: ClassVar[tuple[str, ...]] = ("ap", "x", "y")
    ap: Tensor
    x: Tensor

    def extents(self) -> dict[str, Shape]:
        n = order_of_packed("ap", self.ap)
        return {"ap": self.ap.shape, "x": (n,), "y": (n,), "out": (n,)}


@dataclass(frozen=True, eq=False)
class HpmvRequest(SpmvRequest):
    """y = alpha · A · x + beta · y, where A is Hermitian and its triangle packed; only complex matrices.

    The imaginary parts of A's diagonal are treated as 0.
    """

    op: ClassVar[str] = "hpmv"


# -- a triangle with a vector ----------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class TriangleRequest(BlasRequest):
    """A triangular matrix with a vector; op(A) is A, Aᵀ or Aᴴ.

    Attributes:
        x: the vector; it may be `out` itself.
        uplo: which triangle of A is read, or stored: "lower" or "upper".
        trans: op: "n" for A, "t" for Aᵀ, "c" for Aᴴ.
        diag: "unit" treats the diagonal of A as ones, and does not read it.
        out: the result, of x's length.
    """

    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "x")})
    _: KW_ONLY
    uplo: FillMode | str = FillMode.LOWER
    trans: Operation | str = Operation.N
    diag: DiagType | str = DiagType.NON_UNIT
    out: Tensor | None = None

    def outputs(self) -> dict[str, Output]:
        first: Tensor = getattr(self, self.reads[0])
        return {"out": dense(self.extents()["out"], first.dtype)}


@dataclass(frozen=True, eq=False)
class TrmvRequest(TriangleRequest):
    """op(A) · x, where A is triangular.

    Attributes:
        a: (n, n); only its triangle `uplo` is read.
    """

    op: ClassVar[str] = "trmv"
    reads: ClassVar[tuple[str, ...]] = ("a", "x")
    a: Tensor
    x: Tensor

    def extents(self) -> dict[str, Shape]:
        _, n = dims("a", self.a)
        return {"a": (n, n), "x": (n,), "out": (n,)}


@dataclass(frozen=True, eq=False)
class TrsvRequest(TrmvRequest):
    """The vector b for which op(A) · b = x, where A is triangular.

    A singular A is not detected: a 0 on its diagonal gives infinities and NaN.
    """

    op: ClassVar[str] = "trsv"


@dataclass(frozen=True, eq=False)
class TbmvRequest(TriangleRequest):
    """op(A) · x, where A is triangular with k diagonals next to the main one.

    Attributes:
        ab: (k + 1, n), column-major: the main diagonal and those below, ab[i - j, j] = a[i, j]; for uplo "upper" those
            above, ab[k + i - j, j] = a[i, j].
    """

    op: ClassVar[str] = "tbmv"
    reads: ClassVar[tuple[str, ...]] = ("ab", "x")
    ab: Tensor
    x: Tensor

    def extents(self) -> dict[str, Shape]:
        rows, n = dims("ab", self.ab)
        return {"ab": (max(rows, 1), n), "x": (n,), "out": (n,)}


@dataclass(frozen=True, eq=False)
class TbsvRequest(TbmvRequest):
    """The vector b for which op(A) · b = x, where A is triangular with k diagonals next to the main one.

    A singular A is not detected: a 0 on its diagonal gives infinities and NaN.
    """

    op: ClassVar[str] = "tbsv"


@dataclass(frozen=True, eq=False)
class TpmvRequest(TriangleRequest):
    """op(A) · x, where A is triangular and packed.

    Attributes:
        ap: (n · (n + 1) / 2,), dense: the columns of the triangle, contiguous.
    """

    op: ClassVar[str] = "tpmv"
    reads: ClassVar[tuple[str, ...]] = ("ap", "x")
    ap: Tensor
    x: Tensor

    def extents(self) -> dict[str, Shape]:
        n = order_of_packed("ap", self.ap)
        return {"ap": self.ap.shape, "x": (n,), "out": (n,)}


@dataclass(frozen=True, eq=False)
class TpsvRequest(TpmvRequest):
    """The vector b for which op(A) · b = x, where A is triangular and packed.

    A singular A is not detected: a 0 on its diagonal gives infinities and NaN.
    """

    op: ClassVar[str] = "tpsv"
