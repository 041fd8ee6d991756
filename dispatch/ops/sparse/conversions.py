"""Requests that store a matrix in another format: sparse to dense, and CSR to CSC and back, which also transposes."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.core.operands import Output, dense
from dispatch.errors import BadRequest
from dispatch.keys import I64
from dispatch.ops.sparse.base import SparseRequest
from dispatch.ops.sparse.form import SparseFormat

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["Csr2cscRequest", "SparseCheckRequest", "SparseToDenseRequest"]

FLAWS = 4


@dataclass(frozen=True, eq=False)
class SparseToDenseRequest(SparseRequest["Tensor"]):
    """A sparse matrix as a dense one, with zeros where it has no element.

    Attributes:
        out: (m, n), row-major or column-major.

    If elements are stored twice, a GPU writes any one of them; `sparse_check` counts them.
    """

    op: ClassVar[str] = "sparse_to_dense"
    reads: ClassVar[tuple[str, ...]] = ("values", "rows", "columns")
    _: KW_ONLY
    out: Tensor | None = None

    def outputs(self) -> dict[str, Output]:
        return {"out": dense(self.form.shape, self.values.dtype)}


@dataclass(frozen=True, eq=False)
class Csr2cscRequest(SparseRequest["tuple[Tensor, Tensor, Tensor]"]):
    """The same matrix converted from CSR to CSC, or from CSC to CSR: (values, rows, columns).

    Read as the other format, the result is the transposed matrix. Elements of a column keep the order of their rows.

    Attributes:
        out_values, out_rows, out_columns: the result.
    """

    op: ClassVar[str] = "csr2csc"
    reads: ClassVar[tuple[str, ...]] = ("values", "rows", "columns")
    writes: ClassVar[tuple[str, ...]] = ("out_values", "out_rows", "out_columns")
    _: KW_ONLY
    out_values: Tensor | None = None
    out_rows: Tensor | None = None
    out_columns: Tensor | None = None

    def check_operands(self) -> None:
        kind = SparseFormat(self.form.format)  # type: ignore[arg-type]  # it is a member since it was checked
        if kind not in (SparseFormat.CSR, SparseFormat.CSC):
            raise BadRequest("form.format", kind.name, "CSR or CSC")

    @property
    def from_csr(self) -> bool:
        """Whether A is in CSR."""
        return self.form.format == SparseFormat.CSR

    def outputs(self) -> dict[str, Output]:
        (m, n), count, index = self.form.shape, self.values.shape[0], self.rows.dtype
        rows, columns = (count, n + 1) if self.from_csr else (m + 1, count)
        shapes = {"out_values": (count,), "out_rows": (rows,), "out_columns": (columns,)}
        return {
            name: dense(shape, self.values.dtype if name == "out_values" else index) for name, shape in shapes.items()
        }


@dataclass(frozen=True, eq=False)
class SparseCheckRequest(SparseRequest["Tensor"]):
    """The errors in the indices of a sparse matrix: four counts on the device, all 0 if it is valid.

    They count offsets that decrease, or do not begin with the base and end with the number of elements; indices beyond
    the matrix; elements that precede one of a smaller index in their row (for CSC column); and duplicates of the next
    element. Only memory of the tensors is read, whatever they hold. If offsets are wrong, the line of an element is the
    one that a bisection of the offsets finds, provided that this line contains the element.

    Attributes:
        out: i64 (4,).
    """

    op: ClassVar[str] = "sparse_check"
    reads: ClassVar[tuple[str, ...]] = ("values", "rows", "columns")
    _: KW_ONLY
    out: Tensor | None = None

    def outputs(self) -> dict[str, Output]:
        return {"out": dense((FLAWS,), I64)}
