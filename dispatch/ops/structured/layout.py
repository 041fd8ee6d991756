"""The layout of matrices in memory, and the host's layout of compressed ones.

The host stores, matrix by matrix, the remaining elements, row by row, followed by a half byte for each group: the index
of the first remaining element within the group and, times four, that of the second. Only cuSPARSELt knows its own
layout.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from dispatch.errors import BadRequest
from dispatch.keys import Dtype
from dispatch.ops.structured.form import group_of

if TYPE_CHECKING:
    from dispatch.device.layout import Array, Layout
    from dispatch.ops.structured.form import StructuredForm

__all__ = ["host_bytes", "is_row_major", "leading_dimension", "pack", "unpack"]


def leading_dimension(layout: Layout, *, by_rows: bool) -> int | None:
    """The leading dimension of the matrices of a row-major or column-major operand; None for other layouts."""
    m, n = layout.shape[-2:]
    row, column = layout.strides[-2:]
    if not by_rows:
        m, n, row, column = n, m, column, row
    if (column == 1 or n <= 1) and (row >= max(1, n) or m <= 1):
        return max(1, n) if m <= 1 else row
    return None


def is_row_major(layout: Layout) -> bool:
    """Whether matrices are row-major; ones that are also column-major count as row-major."""
    return leading_dimension(layout, by_rows=True) is not None or leading_dimension(layout, by_rows=False) is None


def host_bytes(shape: tuple[int, ...], dtype: Dtype) -> int:
    """The bytes of compressed matrices on the host."""
    group, stored = group_of(dtype)
    groups = math.prod(shape) // group
    return groups * stored * dtype.itemsize + groups // 2


def pack(dense: Array) -> Array:
    """Structured matrices as the host's bytes; BadRequest if a group has too many nonzero elements."""
    group, stored = group_of(Dtype.of(dense.dtype))
    groups = dense.reshape(-1, group)
    there = groups.astype(np.float64) != 0
    if (too_many := int((there.sum(1) > stored).sum())) > 0:
        raise BadRequest(
            "a", f"{too_many} groups with more nonzeros", f"{stored} of {group} along the columns", "prune_2_4(a)"
        )
    places = np.sort(np.argsort(~there, axis=1, kind="stable")[:, :stored], axis=1)
    elements = np.take_along_axis(groups, places, 1)
    nibbles = (places << 2 * np.arange(stored)).sum(1).astype(np.uint8)
    count = math.prod(dense.shape[:-2])
    parts = (np.ascontiguousarray(elements).view(np.uint8), nibbles[::2] | nibbles[1::2] << 4)
    return np.concatenate([part.reshape(count, -1) for part in parts], axis=1).reshape(-1)


def unpack(data: Array, form: StructuredForm) -> Array:
    """The matrices of the host's bytes."""
    dtype = Dtype.of(form.dtype)
    group, stored = group_of(dtype)
    groups = math.prod(form.shape) // group
    count = math.prod(form.shape[:-2])
    split = data.reshape(count, -1)
    behind = groups // count * stored * dtype.itemsize
    elements = np.ascontiguousarray(split[:, :behind]).reshape(-1).view(dtype.numpy).reshape(groups, stored)
    halves = split[:, behind:].reshape(-1)
    nibbles = np.stack([halves & 15, halves >> 4], 1).reshape(-1).astype(np.int64)
    places = nibbles[:, None] >> 2 * np.arange(stored) & 3
    if (places >= group).any():
        raise BadRequest("a", "indices beyond a group", "bytes that compress_2_4 returned")
    dense = np.zeros((groups, group), dtype.numpy)
    np.put_along_axis(dense, places, elements, 1)
    return dense.reshape(form.shape)
