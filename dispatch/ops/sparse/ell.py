"""Requests over matrices in sliced and in blocked ELL: rows are padded to one length, by slices or by blocks.

Follows https://docs.nvidia.com/cuda/cusparse/storage-formats.html. The tensors differ from those of a SparseForm, so
these requests are separate; ell_functions.py converts other formats. This file calls no library.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.checks import check_int
from dispatch.core.operands import Output, by_columns, dense
from dispatch.core.request import Unpacked
from dispatch.errors import BadRequest
from dispatch.keys import I32, I64
from dispatch.ops.sparse.base import AlphaRequest, Number, check_added, check_matrix, check_vector, result_dtype
from dispatch.ops.sparse.rules import leading_dimension

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = ["BlockedEllMmRequest", "SellMvRequest"]

MAX_EXTENT = 2**62


@dataclass(frozen=True, eq=False)
class EllRequest(AlphaRequest):
    """A matrix A in a format of padded rows, and factors.

    Attributes:
        values: the elements of A, with zeros as padding of rows.
        columns: i32 or i64, the column of each element, from 0 on; -1 for padding. A column beyond the matrix causes a
            read beyond other operands on a GPU; the host checks.
        beta: a number; None for 1 if something is added.
        library: only rows of this library are considered, "cusparse"; None considers all, in the table's order.

    For f16 and bf16 the result has the dtype of `out`, else of the added operand, else of A; it may be f32. All is
    computed in f32.
    """

    numbers: ClassVar[tuple[str, ...]] = ("alpha", "beta")
    unpacked: ClassVar[Unpacked | None] = Unpacked(numbers=("alpha", "beta"))
    values: Tensor
    _: KW_ONLY
    beta: Number | None = None
    library: str | None = None
    out: Tensor | None = None

    @property
    def out_dtype(self) -> Dtype:
        """The dtype of the result, and of the added operand."""
        return result_dtype(self, self.added)

    def check_fields(self) -> None:
        self.check_parts()
        check_added(self, self.added)
        self.check_factors()

    def check_parts(self) -> None:
        """Raise BadRequest for tensors that are not a matrix of the format, or do not fit it."""

    def check_part(self, name: str, shape: tuple[int | None, ...], *, is_index: bool = True) -> None:
        """BadRequest unless a tensor of the matrix is dense and has these extents; None allows any extent."""
        tensor: Tensor = getattr(self, name)
        fits = tensor.ndim == len(shape) and all(w in (None, e) for w, e in zip(shape, tensor.shape, strict=True))
        if not fits or (is_index and tensor.dtype not in (I32, I64)):
            wanted = ", ".join("…" if extent is None else str(extent) for extent in shape)
            raise BadRequest(name, str(tensor.layout), f"{'i32 or i64' if is_index else 'elements'} [{wanted}]")
        if tensor.layout.size > 1 and not tensor.layout.is_contiguous:
            raise BadRequest(name, str(tensor.layout), "dense memory", "x.copy() makes it dense")


@dataclass(frozen=True, eq=False)
class SellMvRequest(EllRequest):
    """y = alpha · A · x + beta · y of a matrix in sliced ELL: cuSPARSE's SpMV.

    Attributes:
        values, columns: (size,): slice by slice, and within a slice the first element of each of its rows, then the
            second elements, and so on up to the length of its longest row.
        offsets: i32 or i64, where each slice begins in `values`, and where the last one ends: one more than there are
            slices.
        x: (n,).
        m: the rows of A.
        slice_size: the rows of a slice; the last one may have fewer, and is padded.
        nnz: the number of elements without padding, which the library needs.
        y: added as beta · y, of out's shape; it may be `out` itself, and is not read if beta is 0.
        out: (m,).
    """

    op: ClassVar[str] = "sell_mv"
    reads: ClassVar[tuple[str, ...]] = ("values", "offsets", "columns", "x", "y")
    mixed: ClassVar[tuple[str, ...]] = ("offsets", "columns", "y")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "y")})
    added: ClassVar[str] = "y"
    offsets: Tensor
    columns: Tensor
    x: Tensor
    _: KW_ONLY
    m: int
    slice_size: int
    nnz: int
    y: Tensor | None = None

    def check_parts(self) -> None:
        check_int("m", self.m, 0, MAX_EXTENT)
        check_int("slice_size", self.slice_size, 1, MAX_EXTENT)
        self.check_part("values", (None,), is_index=False)
        size = self.values.shape[0]
        check_int("nnz", self.nnz, 0, size)
        self.check_part("columns", (size,))
        self.check_part("offsets", (-(-self.m // self.slice_size) + 1,))
        if self.x.ndim != 1:
            raise BadRequest("x", str(self.x.layout), f"a vector of {self.values.dtype}", "x[:, 0] is a vector")
        check_vector("y", self.y, self.m, f"because A has {self.m} rows")

    def outputs(self) -> dict[str, Output]:
        return {"out": dense((self.m,), self.out_dtype)}


@dataclass(frozen=True, eq=False)
class BlockedEllMmRequest(EllRequest):
    """C = alpha · A · B + beta · C of a matrix in blocked ELL: cuSPARSE's SpMM on tensor cores.

    On a GPU the factors of f32 are rounded to TF32, which has ten bits of fraction; sums are in f32.

    Attributes:
        values: (m, width): the blocks of each row of blocks side by side, padded to one width.
        columns: (m / block, width / block): the block column of each block, or -1.
        b: (n, k); row-major or column-major. n is a multiple of the size of a block.
        c: added as beta · c, of out's shape; it may be `out` itself, and is not read if beta is 0.
        out: (m, k).
    """

    op: ClassVar[str] = "blocked_ell_mm"
    reads: ClassVar[tuple[str, ...]] = ("values", "columns", "b", "c")
    mixed: ClassVar[tuple[str, ...]] = ("columns", "c")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "c")})
    added: ClassVar[str] = "c"
    columns: Tensor
    b: Tensor
    _: KW_ONLY
    c: Tensor | None = None

    @property
    def block(self) -> int:
        """The rows and columns of a block."""
        return self.values.shape[0] // max(1, self.columns.shape[0])

    def check_parts(self) -> None:
        self.check_part("values", (None, None), is_index=False)
        self.check_part("columns", (None, None))
        (m, width), (high, wide) = self.values.shape, self.columns.shape
        if not high or not wide or m % high or width % wide or m // high != width // wide or not m or not width:
            actual = f"{list(self.columns.shape)} blocks in {list(self.values.shape)} values"
            raise BadRequest("columns", actual, "square blocks, as many as in values")
        check_matrix("b", self.b, (None, None), "as many rows as A has columns")
        if self.b.shape[0] % self.block:
            raise BadRequest("b", str(self.b.layout), f"whole blocks of {self.block} rows", "pad it with zeros")
        check_matrix("c", self.c, (m, self.b.shape[1]), "the shape of the result")

    def outputs(self) -> dict[str, Output]:
        make = dense if leading_dimension(self.b.layout, by_rows=True) is not None else by_columns
        return {"out": make((self.values.shape[0], self.b.shape[1]), self.out_dtype)}
