"""The inverses of a matrix's diagonal blocks as a preconditioner object: `block_jacobi`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.checks import check_bool, names_arguments
from dispatch.errors import BadRequest, LinAlgError
from dispatch.ops import sparse as ops
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.format_functions import as_sparse
from dispatch.ops.sparse.krylov import MAX_BLOCK
from dispatch.ops.sparse.tensor import SparseTensor, as_tensor

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["BlockJacobi", "block_jacobi"]

NO_INVERSE = "block {number}, from row {row} on, has no inverse: it is singular, or not finite"
HINT = "use another block_size, or a matrix whose blocks are regular, such as A + c·I"


class BlockJacobi:
    """The inverses of the diagonal blocks of A, as the M of `cg`, `bicgstab`, `gmres` and `minres`.

    `inverses` (blocks, block_size, block_size) is on the device of A, and `source` is A. The matrix of the iteration
    may be another one with the same number of rows.
    """

    __slots__ = ("absolute", "block_size", "inverses", "source")

    inverses: Tensor

    def __init__(self, source: SparseTensor, block_size: int, *, absolute: bool, check: bool) -> None:
        self.block_size, self.absolute = block_size, absolute
        self._make(source, check)

    def _make(self, source: SparseTensor, check: bool) -> None:
        check_bool("check", check)
        inverses, info = ops.block_jacobi(*source.parts, block_size=self.block_size, absolute=self.absolute)
        if check and (status := int(info.item())):
            meaning = NO_INVERSE.format(number=status - 1, row=(status - 1) * self.block_size)
            raise LinAlgError("block_jacobi", {(): status}, meaning, HINT)
        self.source, self.inverses = source, as_tensor("inverses", inverses)

    @property
    def shape(self) -> tuple[int, int]:
        return self.source.shape

    def refactorize(self, values: Any, *, check: bool = True) -> BlockJacobi:
        """Replace the inverses by those of other elements of A at the same places; returns self. No change on failure.

        The elements are in the order of A, whatever its format. Their dtype, shape and device are those of the previous
        elements; BadRequest for others.
        """
        old, new = self.source.values, as_tensor("values", values)
        if new.dtype is not old.dtype or new.shape != old.shape or new.device is not old.device:
            raise BadRequest("values", str(new.layout), f"{old.dtype}{list(old.shape)} on {old.device!r}")
        self._make(self.source.with_values(new), check)
        return self

    def __repr__(self) -> str:
        of_what = f"{self.inverses.shape[0]} blocks of {self.block_size} rows"
        return f"BlockJacobi({of_what}{', absolute' if self.absolute else ''}, of {self.source!r})"


@names_arguments
def block_jacobi(A: Any, block_size: int | None = None, *, absolute: bool = False, check: bool = True) -> BlockJacobi:
    """The inverses of the diagonal blocks of A, of `block_size` rows each, by the request `block_jacobi`.

    If `block_size` is left out, which only BSR allows, the blocks are those of A. With `absolute` the absolute values
    of the blocks are inverted, which are positive definite, as `minres` needs them for an indefinite matrix.
    LinAlgError for a block without an inverse, after waiting for the status; with `check=False` there is no check, and
    such an inverse is all NaN.
    """
    matrix = as_sparse(A, "A")
    if block_size is None:
        high, wide = matrix.form.block
        if matrix.format is not SparseFormat.BSR or high != wide:
            wanted = f"the rows of a block, 1 to {MAX_BLOCK}, for {matrix!r}"
            raise BadRequest(
                "block_size", "None", wanted, "pass it, as in block_jacobi(A, 4), or pass BSR with square blocks"
            )
        block_size = high
    return BlockJacobi(matrix, block_size, absolute=absolute, check=check)
