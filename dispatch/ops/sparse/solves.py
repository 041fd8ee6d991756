"""Requests that solve systems of equations with a sparse triangle: SpSV for one right-hand side, SpSM for several."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.core.matrix_choices import DiagType, FillMode, Operation
from dispatch.core.operands import Output, dense
from dispatch.errors import BadRequest
from dispatch.ops.sparse.algorithms import SpsvAlgorithm
from dispatch.ops.sparse.base import ScaledSparseRequest, check_matrix, check_vector

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["SpsmRequest", "SpsvRequest", "TriangularRequest"]


@dataclass(frozen=True, eq=False)
class TriangularRequest(ScaledSparseRequest):
    """A triangle of a square matrix A; the other triangle may be stored, but is not read.

    The analysis, which does not depend on the right-hand side, is repeated in each call, unless the form has a
    `pattern`: then it is kept with the plan, and repeated only if `rows` or `columns` are at another address. The
    values, which may differ in each call, are passed to it each time.

    Attributes:
        uplo: which triangle of A: "lower" or "upper".
        diag: "unit" assumes a diagonal of ones, and reads no stored one.
        trans: op: "n" for A, "t" for Aᵀ, "c" for Aᴴ.

    A diagonal element that is 0 or not stored produces infinities and NaN, like a division by 0.
    """

    _: KW_ONLY
    uplo: FillMode | str = FillMode.LOWER
    diag: DiagType | str = DiagType.NON_UNIT
    trans: Operation | str = Operation.N
    out: Tensor | None = None

    def check_square(self) -> int:
        """The order of A; BadRequest if it is not square."""
        m, n = self.form.shape
        if m != n:
            raise BadRequest("form.shape", f"({m}, {n})", "a square matrix")
        return m

    @property
    def same_bits(self) -> bool:
        """Whether the library promises the same bits in each run: for COO they once differed (12.6, H200)."""
        return False


@dataclass(frozen=True, eq=False)
class SpsvRequest(TriangularRequest):
    """Solve op(A) · y = alpha · x for y, where A is a sparse triangle: cuSPARSE's SpSV.

    Attributes:
        x: (n,), the right-hand side.
        out: y, (n,); it may be x itself.
        algorithm: a `SpsvAlgorithm`.
    """

    op: ClassVar[str] = "spsv"
    reads: ClassVar[tuple[str, ...]] = ("values", "rows", "columns", "x")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "x")})
    x: Tensor
    _: KW_ONLY
    algorithm: SpsvAlgorithm | str = SpsvAlgorithm.DEFAULT

    def check_operands(self) -> None:
        check_vector("x", self.x, self.check_square(), "a right-hand side for A")

    def outputs(self) -> dict[str, Output]:
        return {"out": dense(self.x.shape, self.values.dtype)}


@dataclass(frozen=True, eq=False)
class SpsmRequest(TriangularRequest):
    """Solve op(A) · C = alpha · B for C, where A is a sparse triangle: cuSPARSE's SpSM.

    Attributes:
        b: (n, k), the right-hand sides; row-major or column-major.
        out: C, (n, k).
    """

    op: ClassVar[str] = "spsm"
    reads: ClassVar[tuple[str, ...]] = ("values", "rows", "columns", "b")
    b: Tensor

    def check_operands(self) -> None:
        check_matrix("b", self.b, (self.check_square(), None), "right-hand sides for A")

    def outputs(self) -> dict[str, Output]:
        return {"out": dense(self.b.shape, self.values.dtype)}
