"""Conversion of LAPACK's packed form of L·D·Lᴴ: its blocks, the row order, and the separate factors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dispatch.device.layout import Array

__all__ = ["are_sound", "blocks", "expanded", "mirrored"]


def mirrored(a: Array, *, lower: bool, hermitian: bool) -> Array:
    """The symmetric or Hermitian matrix for one of its triangles; a Hermitian one has a real diagonal."""
    below = a if lower else a.T
    strict = np.where(np.tri(len(a), k=-1, dtype=np.bool_), below, 0)
    diagonal = np.diag(a)
    if not hermitian:
        return np.asarray(strict + strict.T + np.diag(diagonal))
    mirror = strict if lower else strict.conj()
    return np.asarray(mirror + mirror.conj().T + np.diag(diagonal.real))


def blocks(pivots: Array) -> list[tuple[int, int]]:
    """The first and the last row of each block on D's diagonal."""
    rows, row = [], 0
    while row < len(pivots):
        last = row + (pivots[row] < 0)
        rows.append((row, int(last)))
        row = int(last) + 1
    return rows


def are_sound(pivots: Array, *, lower: bool) -> bool:
    """Whether pivots are rows that elimination has not passed, in pairs if they are negative."""
    n = len(pivots)
    for first, last in blocks(pivots):
        if last >= n or pivots[first] != pivots[last]:
            return False
        other = abs(int(pivots[first])) - 1
        if not (last <= other < n if lower else 0 <= other <= first):
            return False
    return True


def expanded(packed: Array, pivots: Array, *, lower: bool, hermitian: bool) -> tuple[Array, Array, Array]:
    """The outer factor with its rows in A's order, D, and the row order in which the factor is triangular.

    The block that is eliminated last was exchanged last: a column takes part in the exchanges of its own block and of
    those that were eliminated before.
    """
    n = len(packed)
    outer = (np.tril(packed, -1) if lower else np.triu(packed, 1)) + np.eye(n)
    diagonal = np.diag(packed)
    d = np.diag(diagonal.real if hermitian else diagonal).astype(packed.dtype)
    every = blocks(pivots) if lower else blocks(pivots)[::-1]
    order, exchanges = np.arange(n), []
    for first, last in every:
        row = last if lower else first
        exchanges.append((row, abs(int(pivots[row])) - 1, slice(first, n) if lower else slice(0, last + 1)))
        if first != last:
            at = (last, first) if lower else (first, last)
            off_diagonal = packed[at]
            outer[at], d[at] = 0, off_diagonal
            d[at[::-1]] = off_diagonal.conj() if hermitian else off_diagonal
    for row, other, _ in exchanges:
        order[[row, other]] = order[[other, row]]
    for row, other, columns in reversed(exchanges):
        outer[[row, other], columns] = outer[[other, row], columns]
    return outer, d, order
