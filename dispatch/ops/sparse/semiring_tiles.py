"""How a product over a semiring is split among blocks, and how the threads of one lie over the columns of B."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Shape", "Tile", "shape_of", "tile_of"]

LANES = 32  # of a warp
# Work beyond which blocks are twice as large: with fewer they would not fill 132 multiprocessors several times.
TILES = ((2**19, 256), (2**22, 512))
LEAST_STEPS, MOST_STEPS = 256, 1024
COLUMNS = 64  # of B, which are one unit of work


class Tile(NamedTuple):
    """How the steps of the path are split; sums follow it, so that nothing but a product's extents may choose it.

    Attributes:
        steps: of a block.
        element_lanes: of a team, which take turns with the elements of a row.
    """

    steps: int
    element_lanes: int

    @property
    def max_row(self) -> int:
        """Elements of the longest row that one block adds up alone, beyond its own steps."""
        return self.steps // 4


class Shape(NamedTuple):
    """How a team lies over the columns of B, on which no sum depends.

    Attributes:
        vector: neighbouring columns of a lane, which B is read by at once.
        column_lanes: of a team.
    """

    vector: int
    column_lanes: int

    @property
    def wide(self) -> int:
        """Columns of a block."""
        return self.vector * self.column_lanes


def tile_of(rows: int, count: int, columns: int, batch: int = 1) -> Tile:
    """The tile for a matrix with so many rows and elements, or as many of them, and so many columns of B."""
    work = (rows + count) * max(1, columns // COLUMNS) * batch
    steps = next((steps for most, steps in TILES if work <= most), MOST_STEPS)
    while batch > 1 and steps > LEAST_STEPS and steps >= 2 * (rows + count):  # a block has one matrix alone
        steps //= 2
    lanes = 1
    while lanes * 2 * columns <= LANES and lanes * 4 * rows <= count:  # two elements for each lane, on average
        lanes *= 2
    return Tile(steps, lanes)


def shape_of(vector: int, columns: int, element_lanes: int) -> Shape:
    """The lanes for so many columns, of which few are idle; more of them share what is read of A."""
    vectors = -(-columns // vector)
    sizes = [1 << power for power in range(6) if element_lanes << power <= LANES]
    return Shape(vector, min(sizes, key=lambda lanes: (-(-vectors // lanes) * (lanes + 4), -lanes)))
