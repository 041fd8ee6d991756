"""Choice of the number of chunks of a product, and of what moves them; one is sent while the next is computed.

More chunks hide more of the transfer, but make products that are too small to be fast, and take the host longer. If the
caller gives no number, the ranks measure several numbers the first time, with each variant (NCCL, copies), and agree on
the one that is fastest on the rank where it is slowest; later calls with the same shapes on the same communicator use
it. Small products are measured as a row of calls without waits, as a model makes them: the host is part of the time of
such a row. On the host, where nothing overlaps, there is one chunk.
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
    from dispatch.device.layout import Array
    from dispatch.parallel.side_stream import SideStream

__all__ = ["cut", "run_in_chunks"]

T = TypeVar("T")
CANDIDATES = (1, 2, 4, 8, 16)
MIN_ROWS = 128  # the fewest rows of a chunk: smaller products do not fill a GPU
TURNS = 4  # measurements of each candidate
ROW, MAX_CALLS = 2e-3, 8  # seconds that a row of calls takes at least, and its largest number of calls
_measured: weakref.WeakKeyDictionary[Communicator, dict[Any, tuple[int, int]]] = weakref.WeakKeyDictionary()


def cut(rows: int, count: int) -> list[slice]:
    """Rows in `count` chunks whose sizes differ by at most one; fewer chunks if there are fewer rows."""
    count = max(1, min(count, rows))
    ends = [rows * number // count for number in range(count + 1)]
    return [slice(first, last) for first, last in itertools.pairwise(ends)]


def run_in_chunks(
    variants: Sequence[Callable[[int], T]], given: int | None, rows: int, key: Any, side: SideStream
) -> T:
    """Call the first variant with the caller's number of chunks, or the variant and number measured for this key."""
    if given is not None:
        return variants[0](check_int("chunks", given, 1))
    counts = [1, *(count for count in CANDIDATES[1:] if rows // count >= MIN_ROWS)]
    candidates = [(variant, count) for variant in range(len(variants)) for count in counts]
    if side.device.is_host or side.comm.size == 1 or len(candidates) == 1:
        return variants[0](1)
    choices = _measured.setdefault(side.comm, {})
    if key not in choices:
        side.refuse_capture("chunks")
        choices[key] = candidates[_fastest([partial(variants[variant], count) for variant, count in candidates], side)]
    variant, count = choices[key]
    return variants[variant](count)


def _fastest(candidates: Sequence[Callable[[], object]], side: SideStream) -> int:
    """The candidate that is fastest on the rank where it is slowest, the same on all ranks. Waits for the GPU."""
    for _ in range(2):  # plans are made in the first turn
        single = np.array([_seconds(run, 1, side) for run in candidates])
    count = min(MAX_CALLS, 1 + int(ROW / _slowest(single, side).min()))  # on all ranks: each call is a collective
    turns = [[_seconds(run, count, side) for run in candidates] for _ in range(TURNS)]
    return int(_slowest(np.min(turns, axis=0), side).argmin())


def _seconds(run: Callable[[], object], count: int, side: SideStream) -> float:
    """The time of each of `count` calls in a row, which all ranks begin together."""
    barrier(comm=side.comm)
    side.main.synchronize()
    begun = time.perf_counter()
    for _ in range(count):
        run()
    side.main.synchronize()
    return (time.perf_counter() - begun) / count


def _slowest(seconds: Array, side: SideStream) -> Array:
    """The largest times of all ranks."""
    return all_reduce(side.device.array(seconds), comm=side.comm, reduce="max").numpy()
