"""Matrices in sliced and in blocked ELL, made of others: `dispatch.sparse.tosell` and `toblocked_ell`.

They are laid out on the host, once, and multiplied on their device as often as one likes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.checks import check_int
from dispatch.device.registry import device as device_of
from dispatch.errors import BadRequest
from dispatch.ops import sparse as ops
from dispatch.ops.sparse.tensor import SparseTensor, taken_in

if TYPE_CHECKING:
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor

__all__ = ["BlockedEllMatrix", "SlicedEllMatrix", "blocks_of", "slices_of", "toblocked_ell", "tosell"]

MAX_SIZE = 2**20


class SlicedEllMatrix(NamedTuple):
    """A matrix in sliced ELL: `a @ x` is the request `sell_mv`."""

    values: Tensor
    offsets: Tensor
    columns: Tensor
    shape: tuple[int, int]
    slice_size: int
    nnz: int

    def __matmul__(self, x: Any) -> Any:
        if x.shape != (self.shape[1],):
            raise BadRequest("x", f"shape {tuple(x.shape)}", f"a vector of {self.shape[1]} elements")
        parts = (self.values, self.offsets, self.columns)
        return ops.sell_mv(*parts, x, m=self.shape[0], slice_size=self.slice_size, nnz=self.nnz)


class BlockedEllMatrix(NamedTuple):
    """A matrix in blocked ELL: `a @ b` is the request `blocked_ell_mm`."""

    values: Tensor
    columns: Tensor
    shape: tuple[int, int]
    block: int

    def __matmul__(self, b: Any) -> Any:
        if b.ndim != 2 or b.shape[0] != self.shape[1]:
            raise BadRequest("b", f"shape {tuple(b.shape)}", f"a matrix of {self.shape[1]} rows")
        return ops.blocked_ell_mm(self.values, self.columns, b)


def tosell(matrix: Any, *, slice_size: int = 32, device: Device | str | None = None) -> SlicedEllMatrix:
    """A dense or a sparse matrix in sliced ELL on a device: its own, if `device` is left open."""
    check_int("slice_size", slice_size, 1, MAX_SIZE)
    dense, home = taken(matrix, device)
    values, offsets, columns = slices_of(dense, slice_size, np.int32)
    nnz, (on_device, ends, places) = int((columns >= 0).sum()), map(home.array, (values, offsets, columns))
    return SlicedEllMatrix(on_device, ends, places, dense.shape, slice_size, nnz)


def toblocked_ell(matrix: Any, *, block: int = 16, device: Device | str | None = None) -> BlockedEllMatrix:
    """A dense or a sparse matrix in blocked ELL on a device: its own, if `device` is left open."""
    check_int("block", block, 2, MAX_SIZE)
    dense, home = taken(matrix, device)
    if any(extent % block or not extent for extent in dense.shape):
        raise BadRequest("matrix", f"shape {dense.shape}", f"whole blocks of {block}", "fill it up with zeros")
    values, columns = blocks_of(dense, block, np.int32)
    return BlockedEllMatrix(home.array(values), home.array(columns), dense.shape, block)


def taken(matrix: Any, device: Device | str | None) -> tuple[Array, Device]:
    """The dense matrix on the host, and where it is to be."""
    if isinstance(matrix, SparseTensor):
        matrix = matrix.todense()
    elif hasattr(matrix, "toarray"):  # SciPy's and CuPy's, of any format
        matrix = matrix.toarray()
    elif str(getattr(matrix, "layout", "")).startswith("torch.sparse"):
        matrix = matrix.to_dense()
    own = taken_in("matrix", np.asarray(matrix) if isinstance(matrix, (list, tuple)) else matrix)
    if own.ndim != 2:
        raise BadRequest("matrix", f"shape {own.shape}", "a matrix, of two axes")
    home = own.device if device is None else device_of(device) if isinstance(device, str) else device
    return own.numpy(), home


def slices_of(dense: Array, size: int, index: Any) -> tuple[Array, Array, Array]:
    """Values, offsets and columns of sliced ELL; of the last slice, which may have fewer rows, padded ones, too."""
    there = dense != 0
    lengths = np.pad(there.sum(1), (0, -len(dense) % size)).reshape(-1, size)
    widths = lengths.max(axis=1, initial=0)
    offsets = np.concatenate([[0], np.cumsum(widths * size)])
    values, columns = np.zeros(offsets[-1], dense.dtype), np.full(offsets[-1], -1, index)
    row, column = np.nonzero(there)
    order = np.arange(len(row)) - np.concatenate([[0], np.cumsum(there.sum(1))])[row]  # within its row
    at = offsets[row // size] + order * size + row % size
    values[at], columns[at] = dense[row, column], column
    return values, offsets.astype(index), columns


def blocks_of(dense: Array, size: int, index: Any) -> tuple[Array, Array]:
    """Values and columns of blocked ELL, as wide as the row of blocks that has most, and one block at least."""
    (m, n), dtype = dense.shape, dense.dtype
    blocks = dense.reshape(m // size, size, n // size, size).transpose(0, 2, 1, 3)
    there = (blocks != 0).any(axis=(2, 3))
    width = max(1, int(there.sum(1).max(initial=0)))
    values, columns = np.zeros((m // size, width, size, size), dtype), np.full((m // size, width), -1, index)
    row, column = np.nonzero(there)
    order = np.arange(len(row)) - np.concatenate([[0], np.cumsum(there.sum(1))])[row]
    values[row, order], columns[row, order] = blocks[row, column], column
    return np.ascontiguousarray(values.transpose(0, 2, 1, 3)).reshape(m, width * size), columns
