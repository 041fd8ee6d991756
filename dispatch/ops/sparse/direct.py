"""The requests that solve systems of equations with sparse matrices by factorization: cuDSS."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dispatch.checks import check_int
from dispatch.core.matrix_choices import FillMode
from dispatch.core.operands import Output, by_columns, dense
from dispatch.core.request import NamedArguments, Number, Unpacked
from dispatch.errors import BadRequest
from dispatch.keys import C128, F64, I32, Choice
from dispatch.ops.sparse.base import SparseRequest
from dispatch.ops.sparse.form import SparseFormat, check_form, check_parts

if TYPE_CHECKING:
    from dispatch.core.request import Argument, Operands
    from dispatch.device.tensor import Tensor

__all__ = ["BatchedSpsolveRequest", "SparseFactorMemory", "SparseFactorPrecision", "SparseKind", "SpsolveRequest"]

MAX_STAMP = 2**62
MAX_BYTES = 2**62
MAX_REFINEMENTS = 2**31 - 1
MAX_BATCH = 2**31 - 1


class SparseKind(Choice):
    """What is known of a matrix: GEN nothing, SYM and HER that it is symmetric or Hermitian, POS positive definite too.

    It is factorized as L·U, L·D·Lᵀ, L·D·Lᴴ or L·Lᴴ.
    """

    GEN = 0
    SYM = 1
    HER = 2
    POS = 3

    @staticmethod
    def other_names() -> dict[str, str]:
        scipy = {"GENERAL": "GEN", "POSITIVEDEFINITE": "POS", "SYMMETRIC": "SYM", "HERMITIAN": "HER"}
        return scipy | {"SPD": "POS", "HPD": "POS"}  # cuDSS's


class SparseFactorMemory(Choice):
    """Where factors are: DEVICE, in the GPU's memory; HYBRID, in the host's, with a part at a time in the GPU's."""

    DEVICE = 0
    HYBRID = 1


class SparseFactorPrecision(Choice):
    """The precision of the factors of a matrix of f64 or c128, if it is not the matrix's own: F32."""

    F32 = 0


@dataclass(frozen=True, eq=False)
class SpsolveRequest(SparseRequest["tuple[Tensor, Tensor]"]):
    """The x of A · x = b by a direct method; returns (x, info).

    If the form has a `pattern`, the analysis is kept with the plan, and repeated only for a call with another layout;
    without one each call analyses. Each call factorizes the values, unless `stamp` says that they are those of an
    earlier call. A call that factorizes waits for the status.

    Attributes:
        b: (n,), or (n, k) for several right-hand sides; any strides.
        assume_a: a `SparseKind`.
        uplo: the only triangle that is stored, of a matrix that is not general; None if both are.
        stamp: a number that identifies the elements of A: the caller promises that they have not changed since the last
            call with this number and this `values`, so that the factors are reused.
        memory: a `SparseFactorMemory`. HYBRID is for factors that do not fit in the GPU's memory; it is slower if they
            do.
        device_memory: with HYBRID, the limit in bytes of the GPU memory to use; None leaves it to cuDSS.
        refinements: how many steps of iterative refinement each solve does: None for none, and with `precision` at
            most ten times.
        precision: F32 for factors of f32, or c64, of a matrix of f64, or c128, which are half as large. Residuals are
            computed in f64, and the solution is corrected until it is as exact as without this choice. If the matrix is
            too ill-conditioned for that, or a pivot too small, it is factorized again in its own precision; the status
            is that of the factors that x was computed with. A solve waits for each correction. The host ignores this
            choice.
        out: x, of b's shape; of (n, k) with contiguous columns.
        info: i32: 0; positive if the matrix cannot be factorized, for example because it is not positive definite;
            negative if pivots were too small and were replaced: minus their number. Then x may be far off.
    """

    op: ClassVar[str] = "spsolve"
    unpacked: ClassVar[Unpacked | None] = Unpacked(numbers=("stamp",))
    reads: ClassVar[tuple[str, ...]] = ("values", "rows", "columns", "b")
    writes: ClassVar[tuple[str, ...]] = ("out", "info")
    b: Tensor
    _: KW_ONLY
    assume_a: SparseKind | str = SparseKind.GEN
    uplo: FillMode | str | None = None
    stamp: int | None = None
    memory: SparseFactorMemory | str = SparseFactorMemory.DEVICE
    device_memory: int | None = None
    refinements: int | None = None
    precision: SparseFactorPrecision | str | None = None
    out: Tensor | None = None
    info: Tensor | None = None

    @property
    def is_hybrid(self) -> bool:
        """Whether factors are in the host's memory."""
        return self.memory is SparseFactorMemory.HYBRID

    def check_operands(self) -> None:
        n = self.check_square()
        if self.b.ndim not in (1, 2) or self.b.shape[0] != n or 0 in self.b.shape:
            wanted = f"{self.values.dtype}[{n}] or [{n}, 1 or more], because A is [{n}, {n}]"
            raise BadRequest("b", str(self.b.layout), wanted)
        self.check_choices()

    def check_square(self) -> int:
        """The number of rows of the matrix; BadRequest if it is not square, or has none."""
        m, n = self.form.shape
        if m != n or not n:
            raise BadRequest("form.shape", f"({m}, {n})", "a square matrix of at least one row")
        return n

    def check_choices(self) -> None:
        """Raise BadRequest for choices that do not fit each other, or the dtype."""
        if isinstance(self.uplo, FillMode) and self.assume_a is SparseKind.GEN:
            hint = 'assume_a="sym", "her" or "pos"'
            raise BadRequest("uplo", self.uplo.name, "None for a general matrix", hint)
        if self.stamp is not None:
            check_int("stamp", self.stamp, 0, MAX_STAMP)
        if self.device_memory is not None:
            if not self.is_hybrid:
                wanted = "None, because all factors are in the GPU's memory"
                raise BadRequest("device_memory", str(self.device_memory), wanted, 'memory="hybrid"')
            check_int("device_memory", self.device_memory, 1, MAX_BYTES)
        if self.refinements is not None:
            check_int("refinements", self.refinements, 0, MAX_REFINEMENTS)
        if self.precision is not None and self.values.dtype not in (F64, C128):
            raise BadRequest(
                "precision", "F32", f"None for {self.values.dtype}", "only f64 and c128 have a lower precision"
            )

    def outputs(self) -> dict[str, Output]:
        lay = dense if self.b.ndim == 1 else by_columns
        return {"out": lay(self.b.shape, self.values.dtype), "info": dense((), I32)}

    def attributes(self) -> tuple[Any, ...]:
        choices = self.memory, self.device_memory, self.refinements, self.precision
        return self.form, self.library, self.assume_a, self.uplo, *choices, self.stamp is None

    def arguments(self, outputs: Operands) -> tuple[Argument, ...]:
        return (*super().arguments(outputs), -1.0 if self.stamp is None else self.stamp)

    def named_arguments(self) -> NamedArguments:
        free = {} if self.stamp is None else {"stamp": Number(0, MAX_STAMP, is_whole=True)}
        return NamedArguments((*self.reads, *self.writes, "stamp"), free, self.in_place)


@dataclass(frozen=True, eq=False)
class BatchedSpsolveRequest(SpsolveRequest):
    """The x[i] of A[i] · x[i] = b[i], where all A have their elements at the same places; returns (x, info).

    The pattern is analysed once for all. Analyses and factors are kept as those of `spsolve`. If one of the matrices
    cannot be factorized, they are solved one after another, and the status of each shows which failed; others are
    right.

    Attributes:
        values: (batch, nnz), dense: the elements of each A.
        rows, columns: those of one A, in CSR.
        form: that of each A.
        b: (batch, n), or (batch, n, k) for several right-hand sides each; any strides.
        stamp: as in `spsolve`, for all elements of all A.
        out: x, of b's shape, with contiguous columns and matrices.
        info: (batch,) of i32: a status for each A, as in `spsolve`.
    """

    op: ClassVar[str] = "spsolve_batched"

    @property
    def batch(self) -> int:
        """The number of systems."""
        return self.values.shape[0]

    def check_fields(self) -> None:
        object.__setattr__(self, "form", check_form("form", self.form))
        if self.form.format != SparseFormat.CSR:
            kind = SparseFormat(self.form.format)  # type: ignore[arg-type]  # it is a member since it was checked
            raise BadRequest("form.format", kind.name, "CSR", "csr2csc converts from CSC")
        if self.values.ndim != len(("batch", "nnz")) or not 0 < self.batch <= MAX_BATCH:
            hint = "for one matrix use spsolve" if self.values.ndim == 1 else ""
            raise BadRequest("values", str(self.values.layout), "(batch, nnz) of at least one matrix", hint)
        if self.values.size > 1 and not self.values.layout.is_contiguous:
            raise BadRequest("values", str(self.values.layout), "dense memory", "x.copy() makes it dense")
        check_parts(self.form, {"values": self.values[0], "rows": self.rows, "columns": self.columns})
        self.check_operands()

    def check_operands(self) -> None:
        n, shape = self.check_square(), self.b.shape
        if self.b.ndim not in (2, 3) or shape[:2] != (self.batch, n) or 0 in shape:
            wanted = f"{self.values.dtype}[{self.batch}, {n}] or [{self.batch}, {n}, 1 or more]"
            reason = f"because values has {self.batch} matrices of [{n}, {n}]"
            raise BadRequest("b", str(self.b.layout), f"{wanted}, {reason}")
        self.check_choices()

    def outputs(self) -> dict[str, Output]:
        lay = dense if self.b.ndim == len(("batch", "n")) else by_columns
        return {"out": lay(self.b.shape, self.values.dtype), "info": dense((self.batch,), I32)}
