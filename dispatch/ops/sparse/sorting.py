"""The request that sorts a matrix in COO or CSR, for requests that need sorted elements."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.core.operands import Output, dense
from dispatch.errors import BadRequest
from dispatch.ops.sparse.base import SparseRequest
from dispatch.ops.sparse.form import SparseFormat

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["SparseSortRequest"]


@dataclass(frozen=True, eq=False)
class SparseSortRequest(SparseRequest["tuple[Tensor, Tensor, Tensor]"]):
    """The same matrix with sorted elements: (values, rows, columns), by row, and within a row by column.

    Duplicates are kept, next to each other in any order.

    Attributes:
        rows, columns: i32; for COO in any order, for CSR with columns in any order within each row.
        out_values, out_rows, out_columns: the result.
    """

    op: ClassVar[str] = "sparse_sort"
    reads: ClassVar[tuple[str, ...]] = ("values", "rows", "columns")
    writes: ClassVar[tuple[str, ...]] = ("out_values", "out_rows", "out_columns")
    _: KW_ONLY
    out_values: Tensor | None = None
    out_rows: Tensor | None = None
    out_columns: Tensor | None = None

    def check_operands(self) -> None:
        kind = SparseFormat(self.form.format)  # type: ignore[arg-type]  # it is a member since it was checked
        if kind not in (SparseFormat.COO, SparseFormat.CSR):
            raise BadRequest("form.format", kind.name, "COO or CSR", "a matrix in CSC is the transpose of one in CSR")

    def outputs(self) -> dict[str, Output]:
        return {
            "out_values": dense(self.values.shape, self.values.dtype),
            "out_rows": dense(self.rows.shape, self.rows.dtype),
            "out_columns": dense(self.columns.shape, self.columns.dtype),
        }
