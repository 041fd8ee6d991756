"""Requests of incomplete factorizations, whose factors have elements only where the matrix has: ILU(0) and IC(0)."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.core.operands import Output, dense
from dispatch.errors import BadRequest
from dispatch.keys import I32
from dispatch.ops.sparse.base import SparseRequest
from dispatch.ops.sparse.form import SparseFormat

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["Ic0Request", "Ilu0Request"]


@dataclass(frozen=True, eq=False)
class IncompleteRequest(SparseRequest["tuple[Tensor, Tensor]"]):
    """The factors of a square matrix in CSR, at its own places; returns (values, info).

    Columns are sorted in each row, without duplicates (`sparse_sort` sorts), and every diagonal element is stored. If
    the form has a `pattern`, the analysis is kept with the plan; without one each call analyses. The call waits for the
    GPU, because cuSPARSE reports pivots on the host.

    Attributes:
        out: the values of the factors, at the places of A's elements; it may be `values` itself.
        info: i32: 0, or 1 + the row whose diagonal element is not stored, or whose pivot is 0; then `out` is NaN.
    """

    reads: ClassVar[tuple[str, ...]] = ("values", "rows", "columns")
    writes: ClassVar[tuple[str, ...]] = ("out", "info")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "values")})
    _: KW_ONLY
    out: Tensor | None = None
    info: Tensor | None = None

    def check_operands(self) -> None:
        kind = SparseFormat(self.form.format)  # type: ignore[arg-type]  # it is a member since it was checked
        if kind is not SparseFormat.CSR:
            hint = "csr2csc converts from CSC" if kind is SparseFormat.CSC else ""
            raise BadRequest("form.format", kind.name, "CSR", hint)
        m, n = self.form.shape
        if m != n or not n:
            raise BadRequest("form.shape", f"({m}, {n})", "a square matrix of at least one row")

    def outputs(self) -> dict[str, Output]:
        return {"out": dense(self.values.shape, self.values.dtype), "info": dense((), I32)}


@dataclass(frozen=True, eq=False)
class Ilu0Request(IncompleteRequest):
    """L and U of A ≈ L · U without fill: L has ones on its diagonal, which are not stored; cuSPARSE's csrilu02."""

    op: ClassVar[str] = "ilu0"


@dataclass(frozen=True, eq=False)
class Ic0Request(IncompleteRequest):
    """L of A ≈ L · Lᴴ without fill, for a Hermitian positive definite A; reads the lower triangle of A: csric02.

    Elements stored above the diagonal are not read, and those of the result have no meaning. A negative pivot
    produces NaN, and may leave `info` at 0.
    """

    op: ClassVar[str] = "ic0"
