"""The clock cycles of a step of a network on some warps of a block, and its fastest tiling.

Three things are counted: loads of shared memory (a multiprocessor loads 128 bytes per cycle); products (it issues four
for 32 lanes per cycle); and latencies, if there are too few threads to hide them. All figures
here are estimates for one multiprocessor; those of the whole launch are in network_rules.py.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CYCLES_PER_US", "Tiling", "choose_tiling", "copy_cycles", "round_cycles"]

# Counted cycles per microsecond: fitted to 52 networks on an H200, which took 0.75 to 1.9 times as long.
CYCLES_PER_US = 690
LANES, SCHEDULERS = 32, 4
TILES = ((1, 1), (1, 4), (2, 2), (4, 4))  # elements of the result that a thread computes, by rows and columns
PASS_CYCLES, AXIS_CYCLES = 110, 25  # cycles before the first term, and for each axis that a result is written along
TERM_LATENCY = 11  # cycles that a thread waits in each term, at least
SHUFFLE_CYCLES = 30
BARRIER_CYCLES, BARRIER_CYCLES_PER_WARP = 30, 4  # cycles of a barrier, and for each warp more
COPIES_IN_FLIGHT = 8  # that a warp has at a time
COPY_LATENCY, COPY_CYCLES = 900, 12  # cycles until the copies of a pass have arrived, and for each one more


class Tiling(NamedTuple):
    """How a step is computed: the tile of a thread, how many lanes share the terms of an element, and the cycles."""

    tile: int
    split: int  # 2^split lanes
    cycles: float
    loads: float  # cycles in which shared memory is read


def choose_tiling(shape: tuple[int, int, int, int], width: int, warps: int, axes: int, *, alone: bool) -> Tiling:
    """The fastest tiling of a step on some warps.

    Args:
        shape: the extents of the batch, the rows, the columns and the terms.
        width: bytes of an element in the type that is computed in.
        warps: how many warps compute the step.
        axes: how many axes the result has in memory.
        alone: whether there is only one operand, which is summed.
    """
    batch, rows, columns, terms = shape
    tilings = []
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
        term = max(TERM_LATENCY + 2 * high * wide * words / SCHEDULERS, busy * max(loads, products))
        cycles = passes * (PASS_CYCLES + AXIS_CYCLES * axes * high * wide / 2 + term * each + SHUFFLE_CYCLES * split)
        tilings.append(Tiling(tile, split, cycles, passes * busy * loads * each))
    return min(tilings, key=lambda tiling: tiling.cycles)


def round_cycles(tilings: list[Tiling], warps: int) -> float:
    """The cycles of steps that run concurrently, and of the barrier after them."""
    slowest = max((tiling.cycles for tiling in tilings), default=0.0)
    return max(slowest, sum(tiling.loads for tiling in tilings)) + BARRIER_CYCLES + BARRIER_CYCLES_PER_WARP * warps


def copy_cycles(chunks: int, warps: int) -> float:
    """The cycles until that many chunks of 32 elements are in shared memory."""
    passes = -(-chunks // (warps * COPIES_IN_FLIGHT))
    return passes * COPY_LATENCY + COPY_CYCLES * chunks / SCHEDULERS
