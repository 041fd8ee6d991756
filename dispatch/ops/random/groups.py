"""What all kernels of random numbers have in common: a thread's numbers, how it writes them, and how it is launched.

A group is a quad of numbers, one block of Philox, but of numbers of 8 bytes half of one, and two threads may then need
the same block. A thread writes a group by one store: of two, each would leave gaps between threads, and write
every sector of memory in part. Its groups are as many apart as there are threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.libraries.nvrtc.kernel import Launch
from dispatch.libraries.nvrtc.philox import QUAD

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["GROUPS", "MOST_BLOCKS", "THREADS", "elements_launch", "groups_launch"]

THREADS = 256
MOST_BLOCKS = 1 << 14  # beyond them threads go on with further groups

# NUMBER is the dtype's. `put` writes a group whose first number has place `at` in the result: those that lie in it.
# Kernels say that place and `is_aligned` themselves: as they do, the compiler takes it out of their loops.
GROUPS = r"""
typedef NUMBER Number;
constexpr int GROUP = sizeof(Number) == 8 ? 2 : 4;
struct alignas(GROUP * sizeof(Number)) Group { Number at[GROUP]; };

__device__ bool is_aligned(const Number* out, Whole offset)
{
    return offset % GROUP == 0 && (Whole)out % sizeof(Group) == 0;
}

__device__ void put(Number* out, const Group& group, long long at, Whole count, bool aligned)
{
    if (aligned && (Whole)at + (GROUP - 1) < count) {  // a group before the first is a large number
        *(Group*)(out + at) = group;
    } else {
#pragma unroll
        for (int j = 0; j < GROUP; ++j)
            if (at + j >= 0 && at + j < (long long)count) out[at + j] = group.at[j];
    }
}
"""


def groups_launch(request: Any, values: Sequence[Any]) -> Launch:
    """A thread for each group, and of many for several."""
    per_group = QUAD // 2 if request.kind.itemsize == 8 else QUAD
    groups = request.count and -(-request.count // per_group) + 1  # one more, where the offset is in the middle of one
    return _launch(groups, values)


def elements_launch(request: Any, values: Sequence[Any]) -> Launch:
    """A thread for each element, and of many for several."""
    return _launch(request.count, values)


def _launch(threads: int, values: Sequence[Any]) -> Launch:
    return Launch((min(-(-threads // THREADS), MOST_BLOCKS),), (THREADS,), tuple(values))
