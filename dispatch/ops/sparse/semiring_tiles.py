"""How a product over a semiring is split among blocks, and how the threads of a block are laid out over B's columns."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Shape", "Tile", "shape_of", "tile_of"]

LANES = 32  # lanes of a warp
# Work beyond which blocks are twice as large: with fewer they would not fill 132 multiprocessors several times.
TILES = ((2**19, 256), (2**22, 512))
MIN_STEPS, MAX_STEPS = 256, 1024
COLUMNS = 64  # columns of B per unit of work


class Tile(NamedTuple):
    """How the steps of the path are split. The order of sums depends on it, so only a product's extents determine it.

    Attributes:
        steps: of a block.
        element_lanes: of a team; they take turns with the elements of a row.
    """

    steps: int
    element_lanes: int

    @property
    def max_row(self) -> int:
        """Elements of the longest row that one block adds up alone, beyond its own steps."""
        return self.steps // 4


class Shape(NamedTuple):
    """How a team is laid out over the columns of B; no sum depends on it.

    Attributes:
        vector: neighbouring columns of a lane, which it reads from B at once.
        column_lanes: of a team.
    """

    vector: int
    column_lanes: int

    @property
    def wide(self) -> int:
        """The columns of a block."""
        return self.vector * self.column_lanes


def tile_of(rows: int, count: int, columns: int, batch: int = 1) -> Tile:
    """The tile for so many matrices, each with so many rows and elements, and so many columns of B."""
    work = (rows + count) * max(1, columns // COLUMNS) * batch
    steps = next((steps for most, steps in TILES if work <= most), MAX_STEPS)
    while batch > 1 and steps > MIN_STEPS and steps >= 2 * (rows + count):  # a block belongs to one matrix
        steps //= 2
    lanes = 1
    while lanes * 2 * columns <= LANES and lanes * 4 * rows <= count:  # two elements for each lane, on average
        lanes *= 2
    return Tile(steps, lanes)


def shape_of(vector: int, columns: int, element_lanes: int) -> Shape:
    """The lanes for so many columns, few of them idle; more lanes share what is read of A."""
    vectors = -(-columns // vector)
    sizes = [1 << power for power in range(6) if element_lanes << power <= LANES]
    return Shape(vector, min(sizes, key=lambda lanes: (-(-vectors // lanes) * (lanes + 4), -lanes)))
