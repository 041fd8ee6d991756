"""The inverses of a matrix's diagonal blocks by NumPy: the host's results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import EXACT, numpy_call
from dispatch.ops.sparse.matrix_reference import coordinates, numbers

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.device.layout import Array

__all__ = ["blocks_of", "evaluate", "numpy_block_jacobi", "reciprocals"]

SINGULAR = 2.0**-50  # the least reciprocal condition number, as in the kernel


def blocks_of(request: Any) -> Array:
    """The blocks of a matrix (blocks, size, size) in double precision; elements that the last block lacks are 0."""
    form, size = request.form, int(request.block_size)
    row, column = coordinates(form, request.rows, request.columns)
    high, wide = form.block
    rows = (row[:, None, None] * high + np.arange(high)[:, None] + 0 * np.arange(wide)).ravel()
    columns = (column[:, None, None] * wide + 0 * np.arange(high)[:, None] + np.arange(wide)).ravel()
    values = numbers(request.values, EXACT).reshape(-1)
    is_inside = rows // size == columns // size
    rows, columns, values = rows[is_inside], columns[is_inside], values[is_inside]
    blocks = np.zeros((request.blocks, size, size), values.dtype)
    np.add.at(blocks, (rows // size, rows % size, columns % size), values)
    return blocks


def evaluate(request: Any, work: np.dtype[Any]) -> Results:
    """The inverses, and 1 + the number of the first block without one; the arithmetic is double, whatever the dtype."""
    del work
    blocks, n, size = blocks_of(request), request.form.shape[0], int(request.block_size)
    last, kind = n % size or size, request.values.dtype.numpy
    padding = np.arange(last, size)
    blocks[-1, padding, padding] = 1
    with np.errstate(all="ignore"):
        inverses = (absolutes if request.absolute else reciprocals)(blocks).astype(kind).astype(blocks.dtype)
    flawed = ~np.isfinite(inverses).all(axis=(1, 2))
    inverses[flawed] = complex(np.nan, np.nan) if blocks.dtype.kind == "c" else np.nan
    inverses[-1, last:, :] = inverses[-1, :, last:] = 0
    return {"out": inverses, "info": np.asarray(np.int32(1 + flawed.argmax() if flawed.any() else 0))}


def scales(blocks: Array, axis: int) -> Array:
    """Powers of 2 that scale the largest elements of rows, or columns, to between 0.5 and 1; 1 if all are 0."""
    powers = np.frexp(parts(blocks).max(axis=axis, keepdims=True))[1]
    return np.asarray(np.ldexp(1.0, -np.clip(powers, -1000, 1000)))


def parts(blocks: Array) -> Array:
    """The larger magnitude of the two parts of each element."""
    return np.asarray(np.maximum(np.abs(blocks.real), np.abs(blocks.imag)))


def reciprocals(blocks: Array) -> Array:
    """Inverses of blocks, scaled by rows and columns; NaN for a singular block, and for one that is not finite."""
    sound: Array = np.asarray(np.isfinite(blocks).all(axis=(1, 2)))
    safe = np.where(sound[:, None, None], blocks, np.eye(blocks.shape[-1]))
    by_row = scales(safe, 2)
    by_column = scales(safe * by_row, 1)
    scaled = safe * by_row * by_column
    singular = np.linalg.svd(scaled, compute_uv=False)
    sound &= singular[:, -1] > SINGULAR * singular[:, 0]
    inverses = np.linalg.inv(np.where(sound[:, None, None], scaled, np.eye(blocks.shape[-1])))
    inverses = inverses * by_column.transpose(0, 2, 1) * by_row.transpose(0, 2, 1)
    return np.where(sound[:, None, None], inverses, np.nan)


def absolutes(blocks: Array) -> Array:
    """Inverses of the absolute values of symmetric blocks; NaN as in `reciprocals`."""
    sound: Array = np.asarray(np.isfinite(blocks).all(axis=(1, 2)))
    safe = np.where(sound[:, None, None], blocks, np.eye(blocks.shape[-1]))
    by = scales(safe.reshape(len(safe), 1, -1), 2)
    scaled = safe * by
    values, vectors = np.linalg.eigh((scaled + scaled.transpose(0, 2, 1)) / 2)
    sizes = np.abs(values)
    sound &= sizes.min(axis=1) > blocks.shape[-1] * SINGULAR * sizes.max(axis=1)
    inverses = (vectors / sizes[:, None, :]) @ vectors.transpose(0, 2, 1) * by
    return np.where(sound[:, None, None], (inverses + inverses.transpose(0, 2, 1)) / 2, np.nan)


numpy_block_jacobi = numpy_call(evaluate)
