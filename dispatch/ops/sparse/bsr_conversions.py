"""Requests between CSR and BSR: count the blocks of a matrix in CSR, create them, and expand blocks to CSR.

Only the device knows how many blocks have an element, so there is a request that counts them, and one that is passed
the count, as for dense matrices. The formats follow https://docs.nvidia.com/cuda/cusparse/#cusparse-storage-formats.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dispatch.checks import check_int, shown
from dispatch.core.operands import Output, dense
from dispatch.core.request import R_co
from dispatch.errors import BadRequest
from dispatch.keys import I32, I64
from dispatch.ops.sparse.base import SparseRequest
from dispatch.ops.sparse.form import SparseFormat

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["Bsr2csrRequest", "Csr2bsrNnzRequest", "Csr2bsrRequest", "check_block", "refuse_count"]

MAX_EXTENT, MAX_I32 = 2**48, np.iinfo(np.int32).max


def check_block(name: str, given: object, shape: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of a block; BadRequest unless they are a pair that divides a matrix's extents."""
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise BadRequest(name, shown(given), "rows and columns of a block, such as (2, 2)")
    high, wide = (check_int(name, extent, 1, MAX_EXTENT) for extent in given)
    if shape[0] % high or shape[1] % wide:
        hint = "pad the matrix with zeros, or choose another block"
        raise BadRequest(name, shown(given), f"rows and columns that divide those of a matrix {list(shape)}", hint)
    return high, wide


def refuse_count(nnzb: int, found: int) -> None:
    """BadRequest if `csr2bsr_nnz` counts another number of blocks, or if rows are unsorted and there is no count."""
    if found < 0:
        hint = "dispatch.sparse.sort(a), or a.sort_indices() of SciPy or CuPy"
        raise BadRequest("columns", f"{-found} unsorted elements", "sorted elements in each row", hint)
    if nnzb != found:
        raise BadRequest("nnzb", str(nnzb), f"{found}, the number that csr2bsr_nnz counts")


@dataclass(frozen=True, eq=False)
class BlockedRequest(SparseRequest[R_co]):
    """A matrix A in CSR, to be divided into blocks; a block exists if A stores an element in it, even one that is 0.

    Follows https://docs.nvidia.com/cuda/cusparse/#cusparse-storage-formats, by kernels of this library. Indices beyond
    the matrix are read beyond other operands: `sparse_check` finds them before.

    Attributes:
        values: the elements of A, of f32 f64 c64 c128 f16 bf16.
        rows, columns: i32 or i64, independently. The columns of a row are sorted; duplicate elements are allowed.
        form: that of A, which is in CSR.
        block: rows and columns of a block, which divide those of A.
    """

    reads: ClassVar[tuple[str, ...]] = ("values", "rows", "columns")
    _: KW_ONLY
    block: tuple[int, int]

    def check_operands(self) -> None:
        kind = SparseFormat(self.form.format)  # type: ignore[arg-type]  # it is a member since it was checked
        if kind is not SparseFormat.CSR:
            raise BadRequest("form.format", kind.name, "CSR", "dispatch.sparse.tocsr converts to CSR")
        object.__setattr__(self, "block", check_block("block", self.block, self.form.shape))

    @property
    def lines(self) -> int:
        """The number of rows of blocks."""
        return self.form.shape[0] // self.block[0]


@dataclass(frozen=True, eq=False)
class Csr2bsrNnzRequest(BlockedRequest["Tensor"]):
    """How many blocks of a matrix in CSR have an element: one i64 on the device. The elements are not read.

    If rows are not sorted it is negative: minus the number of elements that precede a smaller column of their row.

    Attributes:
        out: i64 (1,).
    """

    op: ClassVar[str] = "csr2bsr_nnz"
    _: KW_ONLY
    out: Tensor | None = None

    def outputs(self) -> dict[str, Output]:
        return {"out": dense((1,), I64)}


@dataclass(frozen=True, eq=False)
class Csr2bsrRequest(BlockedRequest["tuple[Tensor, Tensor, Tensor]"]):
    """A matrix in CSR as BSR: (values, rows, columns). Blocks are sorted in each row; elements that A lacks are 0.

    The host compares `nnzb` with the actual number during the enqueue, and so waits for all earlier work on its stream.
    Duplicate elements are added up, those of f16 and bf16 in f32. The same bits come in each run.

    Attributes:
        nnzb: how many blocks there are, as `csr2bsr_nnz` counts them. Another number raises BadRequest in the call, and
            so do unsorted columns; then nothing is written.
        out_values: (nnzb, block rows, block columns).
        out_rows: (rows of blocks + 1,), of the dtype and base of `rows`.
        out_columns: (nnzb,), of the dtype of `columns`.
    """

    op: ClassVar[str] = "csr2bsr"
    writes: ClassVar[tuple[str, ...]] = ("out_values", "out_rows", "out_columns")
    _: KW_ONLY
    nnzb: int
    out_values: Tensor | None = None
    out_rows: Tensor | None = None
    out_columns: Tensor | None = None

    def check_operands(self) -> None:
        super().check_operands()
        check_int("nnzb", self.nnzb, 0, self.values.shape[0])

    def outputs(self) -> dict[str, Output]:
        return {
            "out_values": dense((self.nnzb, *self.block), self.values.dtype),
            "out_rows": dense((self.lines + 1,), self.rows.dtype),
            "out_columns": dense((self.nnzb,), self.columns.dtype),
        }


@dataclass(frozen=True, eq=False)
class Bsr2csrRequest(SparseRequest["tuple[Tensor, Tensor, Tensor]"]):
    """A matrix in BSR as CSR, with every element of every block, including zeros: (values, rows, columns).

    The places follow from those of the blocks, so nothing is counted, and nothing waits. The elements of a row come in
    the order of its blocks. Follows https://docs.nvidia.com/cuda/cusparse/#cusparse-storage-formats, by a kernel of
    this library.

    Attributes:
        values: (blocks, block rows, block columns), of f32 f64 c64 c128 f16 bf16.
        rows, columns: i32 or i64, independently. BadRequest if i32 is too narrow for the number of elements or columns.
        form: that of A, which is in BSR.
        out_values: (nnz,), with as many elements as `values`.
        out_rows: (m + 1,), of the dtype and base of `rows`.
        out_columns: (nnz,), of the dtype of `columns`.
    """

    op: ClassVar[str] = "bsr2csr"
    reads: ClassVar[tuple[str, ...]] = ("values", "rows", "columns")
    writes: ClassVar[tuple[str, ...]] = ("out_values", "out_rows", "out_columns")
    _: KW_ONLY
    out_values: Tensor | None = None
    out_rows: Tensor | None = None
    out_columns: Tensor | None = None

    def check_operands(self) -> None:
        kind = SparseFormat(self.form.format)  # type: ignore[arg-type]  # it is a member since it was checked
        if kind is not SparseFormat.BSR:
            raise BadRequest("form.format", kind.name, "BSR", "dispatch.sparse.tocsr accepts any format")
        counted = {"rows": (self.values.size, "elements"), "columns": (self.form.shape[1], "columns")}
        for name, (count, what) in counted.items():
            part: Tensor = getattr(self, name)
            if part.dtype is I32 and count + self.form.base > MAX_I32:
                raise BadRequest(name, str(part.layout), f"i64, because there are {count} {what}", 'x.astype("i64")')

    def outputs(self) -> dict[str, Output]:
        count = self.values.size
        return {
            "out_values": dense((count,), self.values.dtype),
            "out_rows": dense((self.form.shape[0] + 1,), self.rows.dtype),
            "out_columns": dense((count,), self.columns.dtype),
        }
