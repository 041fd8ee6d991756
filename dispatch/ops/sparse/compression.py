"""Requests that find or convert a matrix's pattern: dense to sparse, and sorted row indices to offsets and back.

Only the device knows how many elements of a dense matrix are nonzero, so there is a request that counts them, and one
that is passed the count, as with products of sparse matrices.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dispatch.checks import check_dtype, check_int
from dispatch.core.operands import OperandRequest, Output, dense
from dispatch.core.request import R_co
from dispatch.errors import BadRequest
from dispatch.keys import I32, I64, Dtype
from dispatch.ops.sparse.form import SparseFormat

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["Coo2csrRequest", "Csr2cooRequest", "DenseNnzRequest", "DenseToSparseRequest"]


@dataclass(frozen=True, eq=False)
class DenseRequest(OperandRequest[R_co]):
    """A dense matrix, of which the elements other than 0 and -0 are wanted; NaN counts as one of them.

    Attributes:
        a: (m, n), of any strides.
        library: only rows of this library are considered, "own"; None considers all, in the table's order.
    """

    reads: ClassVar[tuple[str, ...]] = ("a",)
    a: Tensor
    _: KW_ONLY
    library: str | None = None

    def check_fields(self) -> None:
        if self.a.ndim != 2:
            raise BadRequest("a", str(self.a.layout), "a matrix, with two axes")


@dataclass(frozen=True, eq=False)
class DenseNnzRequest(DenseRequest["Tensor"]):
    """How many elements of a dense matrix are other than 0: one i64 on the device.

    Attributes:
        out: i64 (1,).
    """

    op: ClassVar[str] = "dense_nnz"
    _: KW_ONLY
    out: Tensor | None = None

    def outputs(self) -> dict[str, Output]:
        return {"out": dense((1,), I64)}


@dataclass(frozen=True, eq=False)
class DenseToSparseRequest(DenseRequest["tuple[Tensor, Tensor, Tensor]"]):
    """The elements of a dense matrix that are other than 0: (values, rows, columns), sorted in each line.

    The host compares `nnz` with the actual number during the enqueue, and so waits for all earlier work on its stream.
    The same bits come in each run.

    Attributes:
        nnz: how many there are, as `dense_nnz` counts them; another number raises BadRequest in the call, and then
            nothing is written.
        format: CSR, CSC or COO.
        index_dtype: i32 or i64.
        out_values, out_rows, out_columns: the result.
    """

    op: ClassVar[str] = "dense_to_sparse"
    writes: ClassVar[tuple[str, ...]] = ("out_values", "out_rows", "out_columns")
    _: KW_ONLY
    nnz: int
    format: SparseFormat | str = SparseFormat.CSR
    index_dtype: Any = I32
    out_values: Tensor | None = None
    out_rows: Tensor | None = None
    out_columns: Tensor | None = None

    def check_fields(self) -> None:
        super().check_fields()
        check_int("nnz", self.nnz, 0, self.a.size)
        check_dtype("index_dtype", self.index_dtype)
        if Dtype.of(self.index_dtype) not in (I32, I64):
            raise BadRequest("index_dtype", str(self.index_dtype), "i32 or i64")
        if self.format is SparseFormat.BSR:
            raise BadRequest("format", "BSR", "CSR, CSC or COO")

    def attributes(self) -> tuple[Any, ...]:
        return (self.library, self.nnz, self.format, Dtype.of(self.index_dtype).name)

    def outputs(self) -> dict[str, Output]:
        m, n = self.a.shape
        rows = m + 1 if self.format is SparseFormat.CSR else self.nnz
        columns = n + 1 if self.format is SparseFormat.CSC else self.nnz
        index = Dtype.of(self.index_dtype)
        shapes = {"out_rows": (rows,), "out_columns": (columns,)}
        return {"out_values": dense((self.nnz,), self.a.dtype), **{n: dense(s, index) for n, s in shapes.items()}}


@dataclass(frozen=True, eq=False)
class LinesRequest(OperandRequest["Tensor"]):
    """The rows of elements, or the columns, as offsets or as indices.

    Attributes:
        base: the number of the first row, and of the first element: 0 or 1.
        library: only rows of this library are considered, "cusparse"; None considers all, in the table's order.
        out: the result, of the dtype of `rows`.
    """

    reads: ClassVar[tuple[str, ...]] = ("rows",)
    rows: Tensor
    _: KW_ONLY
    base: int = 0
    library: str | None = None
    out: Tensor | None = None

    def check_fields(self) -> None:
        check_int("base", self.base, 0, 1)
        rows = self.rows
        if rows.ndim != 1 or (rows.size > 1 and not rows.layout.is_contiguous):
            raise BadRequest("rows", str(rows.layout), "a dense vector", "x.copy() makes it dense")
        if self.out is not None and self.out.size > 1 and not self.out.layout.is_contiguous:
            raise BadRequest("out", str(self.out.layout), "a dense vector", "leave out=None to have it allocated")


@dataclass(frozen=True, eq=False)
class Coo2csrRequest(LinesRequest):
    """Where each row begins, of a matrix in COO: rows (nnz,) become offsets (m + 1,), as CSR has them.

    Attributes:
        rows: the row of each element, sorted.
        m: the rows of the matrix.
    """

    op: ClassVar[str] = "coo2csr"
    _: KW_ONLY
    m: int

    def check_fields(self) -> None:
        super().check_fields()
        check_int("m", self.m, 0, 2**31 - 2)

    def outputs(self) -> dict[str, Output]:
        return {"out": dense((self.m + 1,), self.rows.dtype)}


@dataclass(frozen=True, eq=False)
class Csr2cooRequest(LinesRequest):
    """The row of each element, of a matrix in CSR: offsets (m + 1,) become rows (nnz,), as COO has them.

    Attributes:
        rows: where each row begins, and where the last one ends; they are not checked against nnz.
        nnz: how many elements there are.
    """

    op: ClassVar[str] = "csr2coo"
    _: KW_ONLY
    nnz: int

    def check_fields(self) -> None:
        super().check_fields()
        check_int("nnz", self.nnz, 0, 2**31 - 2)
        if not self.rows.size:
            raise BadRequest("rows", str(self.rows.layout), "offsets, one more than there are rows")

    def outputs(self) -> dict[str, Output]:
        return {"out": dense((self.nnz,), self.rows.dtype)}
