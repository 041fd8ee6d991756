"""Code that all kernels of random numbers share: groups of numbers per thread, their stores, and launches.

A group is a quad of numbers, i.e. one block of Philox. For numbers of 8 bytes a group is half a quad, and two threads
may need the same block. A thread writes a group with one store: with two stores, each would leave gaps between threads
and write memory sectors only partly. The distance between a thread's groups is the number of threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.libraries.nvrtc.kernel import Launch
from dispatch.libraries.nvrtc.philox import QUAD

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["GROUPS", "MAX_BLOCKS", "THREADS", "elements_launch", "groups_launch"]

THREADS = 256
MAX_BLOCKS = 1 << 14  # for more groups than that, threads loop over several groups

# NUMBER is the C type of the dtype. `put` writes the numbers of a group that are inside the result; `at` is the index
# of the first one. Kernels pass `at` and `is_aligned` themselves, so that the compiler can hoist these out of their
# loops.
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
    if (aligned && (Whole)at + (GROUP - 1) < count) {  // a negative index wraps to a large number
        *(Group*)(out + at) = group;
    } else {
#pragma unroll
        for (int j = 0; j < GROUP; ++j)
            if (at + j >= 0 && at + j < (long long)count) out[at + j] = group.at[j];
    }
}
"""


def groups_launch(request: Any, values: Sequence[Any]) -> Launch:
    """A launch with one thread for each group, or for several groups if there are many."""
    per_group = QUAD // 2 if request.kind.itemsize == 8 else QUAD
    groups = request.count and -(-request.count // per_group) + 1  # one more, because the offset may be inside a group
    return _launch(groups, values)


def elements_launch(request: Any, values: Sequence[Any]) -> Launch:
    """A launch with one thread for each element, or for several elements if there are many."""
    return _launch(request.count, values)


def _launch(threads: int, values: Sequence[Any]) -> Launch:
    return Launch((min(-(-threads // THREADS), MAX_BLOCKS),), (THREADS,), tuple(values))
