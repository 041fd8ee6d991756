"""How long a step of a network takes a part of one block, in clock cycles, and which way it is carried out.

What is counted: the loads of shared memory, of which a multiprocessor makes one of 128 bytes in a cycle; the products,
of which it begins four for 32 lanes; and what a thread waits for where there are too few of them. All figures here are
estimates for one multiprocessor, and those of the whole launch in network_rules.py.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CLOCK", "Way", "copies", "round_of", "way_of"]

# Cycles, as they are counted here, of a microsecond: fitted to 52 networks on an H200, which took 0.75 to 1.9 as long.
CLOCK = 690
LANES, SCHEDULERS = 32, 4
TILES = ((1, 1), (1, 4), (2, 2), (4, 4))  # elements of the result that a thread has, by rows and columns
BEGIN, AXIS = 110, 25  # cycles before the first term, and for each axis of where a result goes
TERM = 11  # that a thread waits in each term, at least
SHUFFLE = 30
BARRIER, OF_WARP = 30, 4  # cycles of a barrier, and for each warp more
COPIES, ON_THE_WAY, FETCH = 8, 900, 12  # copies of a warp at once, cycles until they are there, and of each one


class Way(NamedTuple):
    """How a step is carried out: the tile of a thread, how many lanes share an element's terms, and the cycles."""

    tile: int
    split: int  # 2^split lanes
    cycles: float
    loads: float  # cycles in which shared memory is read


def way_of(shape: tuple[int, int, int, int], width: int, warps: int, axes: int, *, alone: bool) -> Way:
    """The fastest way of a step of (batch, rows, columns, terms) by so many warps.

    Args:
        shape: extents.
        width: bytes of an element as it is computed with.
        warps: those that carry it out.
        axes: of the result in memory.
        alone: whether there is one operand, which is summed up.
    """
    batch, rows, columns, terms = shape
    ways = []
    for tile, (high, wide) in enumerate(TILES):
        if tile and (alone or high > rows or wide > columns or (high * wide * width > 128)):
            continue
        items = batch * -(-rows // high) * -(-columns // wide)
        split = 0
        if not tile:
            while 2 << split <= min(LANES, terms) and items << (split + 1) <= LANES * warps:
                split += 1
        passes = -(-(items << split) // (LANES * warps)) if items else 0
        each = -(-terms // (1 << split))
        words = width / 4
        loads = (high + wide - alone) * words
        products = high * wide * {4: 1, 8: 2, 16: 8}[width] / SCHEDULERS
        busy = min(warps, -(-(items << split) // LANES))
        term = max(TERM + 2 * high * wide * words / SCHEDULERS, busy * max(loads, products))
        cycles = passes * (BEGIN + AXIS * axes * high * wide / 2 + term * each + SHUFFLE * split)
        ways.append(Way(tile, split, cycles, passes * busy * loads * each))
    return min(ways, key=lambda way: way.cycles)


def round_of(ways: list[Way], warps: int) -> float:
    """The cycles of steps beside each other, and of the barrier behind them."""
    slowest = max((way.cycles for way in ways), default=0.0)
    return max(slowest, sum(way.loads for way in ways)) + BARRIER + OF_WARP * warps


def copies(chunks: int, warps: int) -> float:
    """The cycles until so many times 32 elements are in shared memory."""
    passes = -(-chunks // (warps * COPIES))
    return passes * ON_THE_WAY + FETCH * chunks / SCHEDULERS
