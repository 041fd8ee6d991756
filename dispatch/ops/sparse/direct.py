"""The request of a system of equations with a sparse matrix that is solved by its factors: cuDSS."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dispatch.checks import check_int
from dispatch.core.matrix_choices import FillMode
from dispatch.core.operands import Output, by_columns, dense
from dispatch.errors import BadRequest
from dispatch.keys import I32, Choice
from dispatch.ops.sparse.base import SparseRequest

if TYPE_CHECKING:
    from dispatch.core.request import Argument, Operands
    from dispatch.device.tensor import Tensor

__all__ = ["SparseKind", "SpsolveRequest"]

MOST_STAMP = 2**53  # which a float holds


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
        return {"GENERAL": "GEN", "POSITIVEDEFINITE": "POS", "SYMMETRIC": "SYM", "HERMITIAN": "HER"}


@dataclass(frozen=True, eq=False)
class SpsolveRequest(SparseRequest["tuple[Tensor, Tensor]"]):
    """The x of A · x = b by a direct method; gives back (x, info).

    A form with a `pattern` has the analysis kept with the plan, which only a call of another layout makes anew;
    without one each call analyses. Values are factorized in each call, unless `stamp` says that they are those of a
    call before. Where it factorizes, the call waits for the status.

    Attributes:
        b: (n,), or (n, k) for several right-hand sides; any strides.
        assume_a: a `SparseKind`.
        uplo: the triangle that alone is stored, of a matrix that is not general; None where both are.
        stamp: a number that stands for the elements of A: who gives one promises that they have not changed since the
            last call with this number and this `values`, and factors are kept.
        out: x, of b's shape; of (n, k) with its columns one behind another.
        info: i32: 0; above 0 where the matrix cannot be factorized so, as one that is not positive definite; below 0
            minus the number of pivots that were too small and were replaced: then x may be far off.
    """

    op: ClassVar[str] = "spsolve"
    reads: ClassVar[tuple[str, ...]] = ("values", "rows", "columns", "b")
    writes: ClassVar[tuple[str, ...]] = ("out", "info")
    b: Tensor
    _: KW_ONLY
    assume_a: SparseKind | str = SparseKind.GEN
    uplo: FillMode | str | None = None
    stamp: int | None = None
    out: Tensor | None = None
    info: Tensor | None = None

    def check_operands(self) -> None:
        m, n = self.form.shape
        if m != n or not n:
            raise BadRequest("form.shape", f"({m}, {n})", "a square matrix of at least one row")
        if self.b.ndim not in (1, 2) or self.b.shape[0] != n or 0 in self.b.shape:
            raise BadRequest("b", str(self.b.layout), f"{self.values.dtype}[{n}] or [{n}, …], as A is [{n}, {n}]")
        if isinstance(self.uplo, FillMode) and self.assume_a is SparseKind.GEN:
            hint = 'assume_a="sym", "her" or "pos"'
            raise BadRequest("uplo", self.uplo.name, "None for a general matrix", hint)
        if self.stamp is not None:
            check_int("stamp", self.stamp, 0, MOST_STAMP)

    def outputs(self) -> dict[str, Output]:
        lay = dense if self.b.ndim == 1 else by_columns
        return {"out": lay(self.b.shape, self.values.dtype), "info": dense((), I32)}

    def attributes(self) -> tuple[Any, ...]:
        return self.form, self.library, self.assume_a, self.uplo

    def arguments(self, outputs: Operands) -> tuple[Argument, ...]:
        return (*super().arguments(outputs), -1.0 if self.stamp is None else float(self.stamp))
