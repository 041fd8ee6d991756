"""The sparse matrices of the cases: their patterns, and how they are stored, with NumPy only.

Random patterns, bands, power laws, blocks, empty rows, one dense row, Poisson's equation in two and three dimensions,
the Laplacian of a graph; and matrices without elements, or without rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.ops.sparse.form import SparseForm, SparseFormat

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.device.layout import Array

__all__ = ["PATTERNS", "SQUARE", "offsets", "places_of", "stored"]

Shape = tuple[int, int]
Mask = Any  # an array of booleans


def random(rng: np.random.Generator, shape: Shape) -> Mask:
    """A fifth of all places."""
    return rng.random(shape) < 0.2


def banded(rng: np.random.Generator, shape: Shape) -> Mask:
    """The diagonals from two below to three above the main one."""
    del rng
    return np.tri(*shape, k=3, dtype=bool) & ~np.tri(*shape, k=-3, dtype=bool)


def power_law(rng: np.random.Generator, shape: Shape) -> Mask:
    """Few rows and columns that have most of the elements."""
    m, n = shape
    weight = 1.5 / np.sqrt(np.outer(rng.permutation(m) + 1.0, rng.permutation(n) + 1.0))
    return rng.random(shape) < weight


def blocks(rng: np.random.Generator, shape: Shape) -> Mask:
    """Dense blocks of four by four."""
    m, n = shape
    coarse = rng.random((-(-m // 4), -(-n // 4))) < 0.3
    return np.kron(coarse, np.ones((4, 4), bool))[:m, :n]


def empty_rows(rng: np.random.Generator, shape: Shape) -> Mask:
    """Every other row is empty, the first and the last ones, too."""
    mask = random(rng, shape)
    mask[::2] = False
    mask[-1:] = False
    return mask


def dense_row(rng: np.random.Generator, shape: Shape) -> Mask:
    """One row has all elements, the others next to none."""
    mask = rng.random(shape) < 0.02
    mask[shape[0] // 2 : shape[0] // 2 + 1] = True
    return mask


def no_elements(rng: np.random.Generator, shape: Shape) -> Mask:
    """No element at all."""
    del rng
    return np.zeros(shape, bool)


def grid(*extents: int) -> Mask:
    """The places of Poisson's equation on a grid: each point and its neighbours along the axes."""
    points = np.indices(extents).reshape(len(extents), -1).T
    return np.abs(points[:, None] - points[None]).sum(axis=2) <= 1


def poisson_2d(rng: np.random.Generator, shape: Shape) -> Mask:
    """Poisson's equation on a grid of 6 by 7, whatever the shape."""
    del rng, shape
    return grid(6, 7)


def poisson_3d(rng: np.random.Generator, shape: Shape) -> Mask:
    """Poisson's equation on a grid of 3 by 4 by 4, whatever the shape."""
    del rng, shape
    return grid(3, 4, 4)


def laplacian(rng: np.random.Generator, shape: Shape) -> Mask:
    """The Laplacian of a random graph: symmetric, with a diagonal."""
    n = max(shape)
    edges = np.triu(rng.random((n, n)) < 0.1, 1)
    return edges | edges.T | np.eye(n, dtype=bool)


PATTERNS: dict[str, Callable[[np.random.Generator, Shape], Mask]] = {
    "random": random,
    "banded": banded,
    "power law": power_law,
    "blocks": blocks,
    "empty rows": empty_rows,
    "dense row": dense_row,
    "2d Poisson": poisson_2d,
    "3d Poisson": poisson_3d,
    "graph Laplacian": laplacian,
    "nothing": no_elements,
}
SQUARE = ("2d Poisson", "3d Poisson", "graph Laplacian")


def places_of(mask: Mask) -> tuple[Array, Array]:
    """The row and the column of each element, row by row."""
    row, column = np.nonzero(mask)
    return row, column


def offsets(lines: Array, count: int) -> Array:
    """The index at which each of the sorted lines begins, and at which the last one ends."""
    return np.concatenate([[0], np.cumsum(np.bincount(lines, minlength=count))])


def stored(
    mask: Mask, drawn: Array, kind: SparseFormat, base: int, index: Any, block: Shape = (1, 1)
) -> tuple[Array, Array, Array, SparseForm]:
    """The values, rows and columns of a matrix in a format, with its form; blocks are stored as a whole."""
    shape: Any = mask.shape
    form = SparseForm(kind, shape, base, block)
    if kind is SparseFormat.BSR:
        high, wide = block
        coarse = mask.reshape(shape[0] // high, high, shape[1] // wide, wide).any(axis=(1, 3))
        row, column = places_of(coarse)
        values = drawn.reshape(shape[0] // high, high, shape[1] // wide, wide).transpose(0, 2, 1, 3)[row, column]
        rows, columns = offsets(row, len(coarse)), column
    else:
        row, column = places_of(mask.T)[::-1] if kind is SparseFormat.CSC else places_of(mask)
        values = drawn[row, column]
        rows = offsets(row, shape[0]) if kind is SparseFormat.CSR else row
        columns = offsets(column, shape[1]) if kind is SparseFormat.CSC else column
    return np.ascontiguousarray(values), (rows + base).astype(index), (columns + base).astype(index), form
