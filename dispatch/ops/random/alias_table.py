"""Counts of given parameters by a table: Walker's alias method, with probabilities that are right to 2^-64 each.

A table has a power of 2 of columns, all as likely. A column is one outcome or another, by a threshold: so a count takes
one word, whose upper bits choose the column, and one look-up, whatever its distribution is. What is left of the word is
compared with the upper bits of the threshold; where these are equal, once in 2^20 words or less often, 32 bits more of
the element's own stream decide. So a count is drawn from 64 bits, though it seldom takes more than 32.

The probabilities are whole numbers of 2^-64 that sum to 1, computed as such, by their ratios from the most likely
outcome on; outcomes less likely than half of one are left out. Walker's columns are made of them without rounding
(Vose, "A linear algorithm for generating random numbers with a given distribution", 1991). All devices have the same.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dispatch.device.layout import Array

__all__ = ["ALIAS", "AliasTable", "alias_table", "table_of"]

WORD_BITS, TOTAL_BITS = 32, 64
LARGEST_VARIANCE = 200.0**2  # nine standard deviations on either side are less than 4,096 outcomes
PRECISION = 160  # bits of the most likely outcome's weight
KEPT = 32  # tables at a time

ALIAS = r"""
struct alignas(8) Column { unsigned threshold, other; };

// Decides those counts of a group whose bits are in `open`, where they lie, by 32 bits of each element's own stream.
__device__ void decide(
    Number* out, unsigned open, Whole g, unsigned replay, Whole seed, Whole offset, Whole count, Whole first,
    unsigned shift, const Column* columns)
{
    const unsigned* rests = (const unsigned*)(columns + ((Whole)1 << (32 - shift)));
    const Block block = at_place(0xffffffffu, g / (4 / GROUP), replay, seed);
#pragma unroll 1
    for (unsigned j = 0; open >> j; ++j) {
        const Whole index = GROUP * g + j, at = index - offset;
        if (!(open >> j & 1) || at >= count) continue;  // one before the first is a large number
        const bool odd = index & 1;
        const unsigned word = index & 2 ? (odd ? block.at[3] : block.at[2]) : odd ? block.at[1] : block.at[0];
        const unsigned column = word >> shift, further = at_place(0, index, replay, seed).at[0];
        out[at] = sum(first, further < rests[column] ? column : columns[column].other);
    }
}

extern "C" __global__ void FUNCTION(
    Number* out, Whole seed, Whole offset, Whole count, Whole first, Whole bits, const Column* columns,
    const unsigned* replays)
{
    const Whole step = (Whole)gridDim.x * blockDim.x, end = (offset + count + GROUP - 1) / GROUP;
    const unsigned replay = replays ? *replays : 0, shift = 32 - (unsigned)bits, mask = (1u << shift) - 1;
    const Whole begin = (offset / GROUP & IN_PAIRS) + (Whole)blockIdx.x * blockDim.x;
    Held held = {};
    for (Whole g = begin + threadIdx.x; (g & IN_PAIRS) < end; g += step) {
        unsigned words[GROUP];
        words_of(g, step, replay, seed, words, held);
        unsigned open = 0;
        Group group;
#pragma unroll
        for (int j = 0; j < GROUP; ++j) {
            const unsigned column = words[j] >> shift, rest = words[j] & mask;
            const Column found = columns[column];
            if (rest == found.threshold) open |= 1u << j;
            group.at[j] = sum(first, rest < found.threshold ? column : found.other);
        }
        put(out, group, (long long)(GROUP * g - offset), count, is_aligned(out, offset));
        if (open) decide(out, open, g, replay, seed, offset, count, first, shift, columns);
    }
}
"""


class AliasTable(NamedTuple):
    """What a kernel reads.

    Attributes:
        first: the outcome of column 0; that of others is as much more as their number.
        bits: of a column's number.
        memory: u32, of each column the upper bits of its threshold, as many as a word has left, and the number of the
            column whose outcome is its other one; behind them of each the lower 32 bits of its threshold.
    """

    first: int
    bits: int
    memory: Array

    def drawn(self, words: Array, further: Callable[[Array], Array]) -> Array:
        """The counts of words of 32 bits; `further` gives 32 bits more for those of some places."""
        shift = np.uint64(WORD_BITS - self.bits)
        column, rest = words >> shift, words & ((np.uint64(1) << shift) - np.uint64(1))
        columns, lower = self.memory[: 2 << self.bits].reshape(-1, 2), self.memory[2 << self.bits :]
        threshold, other = columns[column].T
        own, open_ones = rest < threshold, np.flatnonzero(rest == threshold)
        own[open_ones] = further(open_ones) < lower[column[open_ones]]
        return np.asarray(np.where(own, column, other).astype(np.int64) + self.first)


def table_of(request: Any) -> AliasTable | None:
    """The table of a request for counts; None where there is none, for their variance is too large for one."""
    if request.op == "random_poisson":
        lam = float(request.lam)
        return poisson_table(lam) if lam <= LARGEST_VARIANCE else None
    if request.op == "random_binomial":
        n, p = int(request.n), float(request.p)
        return binomial_table(n, p) if n * p * (1 - p) <= LARGEST_VARIANCE else None
    return None


@lru_cache(KEPT)
def poisson_table(lam: float) -> AliasTable:
    """Of numbers of events."""
    times, over = lam.as_integer_ratio()
    return alias_table(*weighted(int(lam), None, lambda k: (times, over * k)))


@lru_cache(KEPT)
def binomial_table(n: int, p: float) -> AliasTable:
    """Of numbers of trials that succeed."""
    times, whole = p.as_integer_ratio()
    if times == whole:
        return alias_table(n, [1])
    mode = min(n, int((n + 1) * Fraction(p)))
    return alias_table(*weighted(mode, n, lambda k: ((n - k + 1) * times, k * (whole - times))))


def weighted(mode: int, most: int | None, ratio: Callable[[int], tuple[int, int]]) -> tuple[int, list[int]]:
    """The first outcome and the weights of all: `ratio(k)` is that of k over that of k - 1, as a fraction."""
    start = 1 << PRECISION
    cut = start >> (TOTAL_BITS + 4)

    def below() -> Iterator[int]:
        weight, k = start, mode
        while k > 0:
            times, over = ratio(k)
            weight, k = weight * over // times, k - 1
            if weight < cut:
                return
            yield weight

    def above() -> Iterator[int]:
        weight, k = start, mode
        while most is None or k < most:
            k += 1
            times, over = ratio(k)
            weight = weight * times // over
            if weight < cut:
                return
            yield weight

    before = list(below())
    return mode - len(before), [*reversed(before), start, *above()]


def probabilities(weights: list[int]) -> list[int]:
    """Of each weight its share of all, in units of 2^-64; what rounding leaves over is the most likely outcome's."""
    total, whole = sum(weights), 1 << TOTAL_BITS
    made = [(2 * whole * weight + total) // (2 * total) for weight in weights]
    made[weights.index(max(weights))] += whole - sum(made)
    return made


def alias_table(first: int, weights: list[int]) -> AliasTable:
    """The table of outcomes from the first on, by weights that need not sum to anything."""
    shares = probabilities(weights)
    while not shares[-1]:
        shares.pop()
    skipped = next(k for k, share in enumerate(shares) if share)
    first, shares = first + skipped, shares[skipped:]
    bits = max(1, (len(shares) - 1).bit_length())
    count, full = 1 << bits, 1 << (TOTAL_BITS - bits)
    left = shares + [0] * (count - len(shares))
    threshold, other = [full] * count, list(range(count))
    small = [k for k in range(count) if left[k] < full]
    large = [k for k in range(count) if left[k] > full]
    while small:
        k, donor = small.pop(), large[-1]
        threshold[k], other[k] = left[k], donor
        left[donor] -= full - left[k]
        if left[donor] <= full:
            large.pop()
            if left[donor] < full:
                small.append(donor)
    upper = [share >> WORD_BITS for share in threshold]
    lower = [share & 0xFFFFFFFF for share in threshold]
    columns = np.array([upper, other], np.uint32).T.reshape(-1)
    memory = np.concatenate([columns, np.array(lower, np.uint32)])
    memory.setflags(write=False)
    return AliasTable(first, bits, memory)
