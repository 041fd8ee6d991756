"""Into how many chunks a product is cut, so that one is sent while the next is computed, and which way they go.

More chunks hide more of the transfer, and make products that are too small to be quick. Where the caller gives no
number, the ranks measure some the first time, for each way that there is, and agree on what the slowest of them was
quickest with; later calls of the same shapes on the same communicator take that. On the host, where nothing overlaps,
it is one chunk.
"""

from __future__ import annotations

import itertools
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dispatch.checks import check_int
from dispatch.ops.collective import all_reduce, barrier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.core.communicator import Communicator
    from dispatch.parallel.beside import Beside

__all__ = ["cut", "in_chunks"]

T = TypeVar("T")
CANDIDATES = (1, 2, 4, 8, 16)
FEWEST = 128  # rows of a chunk that is tried: smaller products leave much of a GPU without work
RUNS = 5  # of each candidate; the first does not count
_measured: weakref.WeakKeyDictionary[Communicator, dict[Any, tuple[int, int]]] = weakref.WeakKeyDictionary()


def cut(rows: int, count: int) -> list[slice]:
    """So many rows in chunks whose sizes differ by one at most; fewer chunks where there are fewer rows."""
    count = max(1, min(count, rows))
    ends = [rows * number // count for number in range(count + 1)]
    return [slice(first, last) for first, last in itertools.pairwise(ends)]


def in_chunks(ways: Sequence[Callable[[int], T]], given: int | None, rows: int, key: Any, beside: Beside) -> T:
    """`way(count)` with the caller's number of chunks and the first way, or with what is measured for such a key."""
    if given is not None:
        return ways[0](check_int("chunks", given, 1))
    counts = [1, *(count for count in CANDIDATES[1:] if rows // count >= FEWEST)]
    candidates = [(way, count) for way in range(len(ways)) for count in counts]
    if beside.device.is_host or beside.comm.size == 1 or len(candidates) == 1:
        return ways[0](1)
    known = _measured.setdefault(beside.comm, {})
    if key not in known:
        beside.refuse_capture("chunks")
        known[key] = candidates[_fastest([partial(ways[way], count) for way, count in candidates], beside)]
    way, count = known[key]
    return ways[way](count)


def _fastest(candidates: Sequence[Callable[[], object]], beside: Beside) -> int:
    """Which candidate is quickest on the rank where it is slowest; the same on all ranks. Waits for the GPU."""
    best = np.full(len(candidates), np.inf)
    for turn in range(RUNS):
        for place, run in enumerate(candidates):
            barrier(comm=beside.comm)
            beside.here.synchronize()
            begun = time.perf_counter()
            run()
            beside.here.synchronize()
            if turn:
                best[place] = min(best[place], time.perf_counter() - begun)
    slowest = all_reduce(beside.device.array(best), comm=beside.comm, reduce="max")
    return int(slowest.numpy().argmin())
