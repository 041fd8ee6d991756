"""Requests that store a matrix otherwise: sparse to dense, and CSR to CSC and back, which is a transpose, too."""

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

    Of elements that are stored twice any one is taken on a GPU; `sparse_check` counts them.
    """

    op: ClassVar[str] = "sparse_to_dense"
    reads: ClassVar[tuple[str, ...]] = ("values", "rows", "columns")
    _: KW_ONLY
    out: Tensor | None = None

    def outputs(self) -> dict[str, Output]:
        return {"out": dense(self.form.shape, self.values.dtype)}


@dataclass(frozen=True, eq=False)
class Csr2cscRequest(SparseRequest["tuple[Tensor, Tensor, Tensor]"]):
    """The same matrix in CSC where it is given in CSR, and in CSR where it is given in CSC: (values, rows, columns).

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
        made = {"out_values": (count,), "out_rows": (rows,), "out_columns": (columns,)}
        return {
            name: dense(shape, self.values.dtype if name == "out_values" else index) for name, shape in made.items()
        }


@dataclass(frozen=True, eq=False)
class SparseCheckRequest(SparseRequest["Tensor"]):
    """What is wrong with the indices of a sparse matrix: four numbers on the device, all 0 where it is sound.

    They count offsets that fall, or do not begin with the base and end with the number of elements; indices beyond the
    matrix; elements that stand before one of a smaller index of their row (of CSC column); and those that the next one
    has the place of. Nothing is read beyond the tensors, whatever they hold. Where offsets are wrong an element is of
    the line that a bisection of them finds, if that line holds it.

    Attributes:
        out: i64 (4,).
    """

    op: ClassVar[str] = "sparse_check"
    reads: ClassVar[tuple[str, ...]] = ("values", "rows", "columns")
    _: KW_ONLY
    out: Tensor | None = None

    def outputs(self) -> dict[str, Output]:
        return {"out": dense((FLAWS,), I64)}
