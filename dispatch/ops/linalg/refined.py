"""The requests of systems and least squares with factors of lower precision and iterative refinement.

They are separate ops, not options of `solve` and `lstsq`: they also return the number of steps, and they wait.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.checks import check_int
from dispatch.core.operands import Output, dense
from dispatch.errors import BadRequest
from dispatch.keys import C128, F64, I32, Choice, member
from dispatch.ops.linalg.base import (
    LinalgRequest,
    check_dense,
    check_matrix,
    check_right_side,
    check_square,
    real_of,
)
from dispatch.ops.linalg.derived import LstsqDriver, check_values
from dispatch.ops.linalg.request import MatrixKind, right_side

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["FactorPrecision", "RefinedLstsqRequest", "RefinedSolveRequest", "Refinement", "precision_of"]

MAX_STEPS = 2**31 - 1
VECTOR = 1  # axes


class FactorPrecision(Choice):
    """The precision of the factors: F32, only for f64 and c128; TF32, with 11 bits; BF16, with 8; F16, with 11.

    F16 overflows above 65504; the others have the range of single precision.
    """

    F32 = 0
    TF32 = 1
    BF16 = 2
    F16 = 3


class Refinement(Choice):
    """The refinement method: GMRES, also for badly conditioned matrices; CLASSICAL, by residuals.

    GMRES supports one right-hand side, and on a GPU only square matrices.
    """

    GMRES = 0
    CLASSICAL = 1


@dataclass(frozen=True, eq=False)
class RefinedSolveRequest(LinalgRequest["tuple[Tensor, Tensor, Tensor]"]):
    """The x of A·x = b by LU in lower precision and iterative refinement, by `IRSXgesv`.

    It returns (out, iterations, info).

    Attributes:
        a: (…, n, n); it is copied and not modified.
        b: (…, n, k), or (n,) for one matrix.
        precision: the precision of the factors: F32, TF32, BF16 or F16; by default F32 for f64 and c128, otherwise
            TF32.
        refinement: GMRES or CLASSICAL; by default GMRES for one right-hand side, which is its limit, otherwise
            CLASSICAL.
        max_iterations: the maximum number of steps.
        out: x, of b's shape, as exact as that of `solve`; by default it is column-major.
        iterations: i32, one for each matrix: the number of steps; below 0 if they did not converge, because of the
            condition of A or its range, and A was factorized again in its own precision.
        info: i32, one for each matrix: 0, or as for `lu_factor`; x is then NaN.

    It is intended to be faster than `solve` for large matrices of moderate condition; if it falls back it is slower.
    The matrices of a batch are processed one after another. The host reads the result of each step, so a call waits for
    the GPU and cannot be captured, and autotune never selects it instead of `solve`. On the host x is LAPACK's, with 0
    steps.
    """

    op: ClassVar[str] = "refined_solve"
    reads: ClassVar[tuple[str, ...]] = ("a", "b")
    writes: ClassVar[tuple[str, ...]] = ("out", "iterations", "info")
    assume_a: ClassVar[MatrixKind] = MatrixKind.GEN
    a: Tensor
    b: Tensor
    _: KW_ONLY
    precision: FactorPrecision | str | None = None
    refinement: Refinement | str | None = None
    max_iterations: int = 50
    out: Tensor | None = None
    iterations: Tensor | None = None
    info: Tensor | None = None

    def check_fields(self) -> None:
        check_square("a", self.a)
        check_right_side("b", self.b, "a", self.a)
        check_refinement(self)

    def outputs(self) -> dict[str, Output]:
        return {"out": right_side(self.b), "iterations": dense(self.batch, I32), "info": self.info_output()}


@dataclass(frozen=True, eq=False)
class RefinedLstsqRequest(LinalgRequest["tuple[Tensor, Tensor, Tensor, Tensor]"]):
    """The x that minimizes ‖b - A·x‖, by QR in lower precision and iterative refinement (`IRSXgels`).

    It returns (out, residuals, iterations, info).

    Attributes:
        a: (…, m, n) of full rank, with at least as many rows as columns; it is copied and not modified.
        b: (…, m, k), or (m,) for one matrix.
        precision, max_iterations: as for `refined_solve`.
        refinement: GMRES or CLASSICAL; by default GMRES for square matrices and one right-hand side, which is its limit
            on a GPU, otherwise CLASSICAL.
        out: x, (…, n, k) or (n,).
        residuals: real (…, k), or () for a vector: ‖b - A·x‖² of each column; empty, (…, 0), for square matrices.
        iterations: as for `refined_solve`.
        info: i32, one for each matrix: 0, or another number for one that lacks full rank; x is then NaN. On a GPU it is
            cuSOLVER's, which need not be an index: -30 for a matrix of zeros.

    As for `refined_solve`, a call waits for the GPU.
    """

    op: ClassVar[str] = "refined_lstsq"
    reads: ClassVar[tuple[str, ...]] = ("a", "b")
    writes: ClassVar[tuple[str, ...]] = ("out", "residuals", "iterations", "info")
    driver: ClassVar[LstsqDriver] = LstsqDriver.GELS
    rtol: ClassVar[None] = None
    a: Tensor
    b: Tensor
    _: KW_ONLY
    precision: FactorPrecision | str | None = None
    refinement: Refinement | str | None = None
    max_iterations: int = 50
    out: Tensor | None = None
    residuals: Tensor | None = None
    iterations: Tensor | None = None
    info: Tensor | None = None

    def check_fields(self) -> None:
        check_matrix("a", self.a)
        check_values(self.b, self.a)
        rows, columns = self.a.shape[-2:]
        if rows < columns:
            raise BadRequest(
                "a", str(self.a.layout), "at least as many rows as columns", "dispatch.lstsq accepts other shapes"
            )
        check_dense("residuals", self.residuals)
        check_refinement(self)

    def outputs(self) -> dict[str, Output]:
        rows, cols = self.a.shape[-2:]
        behind = () if self.b.ndim == VECTOR else self.b.shape[-1:]
        x = right_side(self.b, rows=cols)
        left = dense((*self.batch, *(behind if rows > cols else (0,))), real_of(self.a.dtype))
        return {"out": x, "residuals": left, "iterations": dense(self.batch, I32), "info": self.info_output()}


def precision_of(request: RefinedSolveRequest | RefinedLstsqRequest) -> FactorPrecision:
    """The precision of the factors."""
    if request.precision is not None:
        return member(request.precision)
    return FactorPrecision.F32 if request.a.dtype in (F64, C128) else FactorPrecision.TF32


def check_refinement(request: RefinedSolveRequest | RefinedLstsqRequest) -> None:
    """BadRequest for a precision that is not lower, a method that needs one right-hand side, or non-dense outputs."""
    if request.precision is FactorPrecision.F32 and request.a.dtype not in (F64, C128):
        raise BadRequest("precision", "F32", f"a precision below that of {request.a.dtype}: TF32, BF16 or F16")
    several = request.b.ndim > VECTOR and request.b.shape[-1] > 1
    if request.refinement is Refinement.GMRES and several:
        hint = 'refinement="classical" accepts several'
        raise BadRequest(
            "refinement", f"GMRES with {request.b.shape[-1]} right-hand sides", "one right-hand side", hint
        )
    check_int("max_iterations", request.max_iterations, 1, MAX_STEPS)
    check_dense("iterations", request.iterations)
    check_dense("info", request.info)
