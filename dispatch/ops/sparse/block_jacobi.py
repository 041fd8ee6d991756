"""The request for the inverses of the diagonal blocks of a sparse matrix: a block Jacobi preconditioner."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.checks import check_bool, check_int
from dispatch.core.operands import Output, by_columns, dense
from dispatch.errors import BadRequest
from dispatch.keys import I32
from dispatch.ops.sparse.base import SparseRequest
from dispatch.ops.sparse.krylov import MAX_BLOCK

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["BlockJacobiRequest"]

MAX_BLOCKS = 2**31 - 1


@dataclass(frozen=True, eq=False)
class BlockJacobiRequest(SparseRequest["tuple[Tensor, Tensor]"]):
    """The inverses of the diagonal blocks of a square matrix; returns (blocks, info). Nothing waits for the device.

    Block k covers rows and columns k · block_size up to (k + 1) · block_size, or up to n for the last one. Elements
    that are not stored are 0, elements that are stored twice are added up, and COO is sorted by row. Each block is
    scaled by rows and columns and inverted in double precision, with pivoting, whatever the dtype.

    Follows Saad, Iterative Methods for Sparse Linear Systems, 4.1.1 and 10.2 (block Jacobi), and LAPACK's GEEQU and
    GESVX for the test of singularity: a block is singular if its reciprocal condition number, after scaling, is below
    2^-50 (for absolute values, 2^-50 for each of its rows).

    Attributes:
        block_size: the rows of a block, 1 to 32; the last block has fewer if n is not a multiple. BSR may have blocks
            of another size.
        absolute: invert the absolute value of each block, (B·B)^½ of a symmetric B, which is positive definite even if
            B is indefinite: `minres` needs this for an indefinite matrix. The mean of B and its transpose is used, and
            scaled as a whole. For f32 and f64.
        out: (blocks, block_size, block_size), of any strides; if left out, the columns of each block are contiguous,
            which an iteration reads fastest. The rows and columns that the last block lacks are 0.
        info: i32: 0, or 1 + the number of the first block without an inverse: it is singular, has an element that is
            NaN or infinite, or an inverse that is too large for the dtype. Such a block of `out` is all NaN, so that an
            iteration with it ends with -2.
    """

    op: ClassVar[str] = "block_jacobi"
    reads: ClassVar[tuple[str, ...]] = ("values", "rows", "columns")
    writes: ClassVar[tuple[str, ...]] = ("out", "info")
    _: KW_ONLY
    block_size: int
    absolute: bool = False
    out: Tensor | None = None
    info: Tensor | None = None

    def check_operands(self) -> None:
        m, n = self.form.shape
        if m != n or not n:
            raise BadRequest("form.shape", f"({m}, {n})", "a square matrix of at least one row")
        check_int("block_size", self.block_size, 1, MAX_BLOCK)
        check_bool("absolute", self.absolute)
        if self.absolute and self.values.dtype.is_complex:
            raise BadRequest("absolute", "True", f"False for {self.values.dtype}", "minres supports f32 and f64")
        if self.blocks > MAX_BLOCKS:
            raise BadRequest("block_size", str(self.block_size), f"at most {MAX_BLOCKS} blocks of {n} rows")

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return -(-self.form.shape[0] // int(self.block_size))

    def outputs(self) -> dict[str, Output]:
        size = int(self.block_size)
        return {"out": by_columns((self.blocks, size, size), self.values.dtype), "info": dense((), I32)}
