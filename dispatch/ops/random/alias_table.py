"""Poisson and binomial numbers by table: Walker's alias method, with each probability exact to 2^-64.

A table has a power of 2 of equally likely columns. Each column holds two outcomes and a threshold that selects one of
them. So a number takes one word, whose upper bits select the column, and one table lookup, for every distribution. The
remaining bits of the word are compared with the upper bits of the threshold. If they are equal, once in 2^20 words or
less often, 32 further bits of the element's own stream decide. So a number is drawn with 64 bits of precision, but
rarely takes more than 32.

The probabilities are integer multiples of 2^-64 that sum to 1. They are computed as integers from the ratios of
neighbouring outcomes, starting at the most likely one; outcomes less likely than half of 2^-64 are omitted. Walker's
columns are computed from them without rounding (Vose, "A linear algorithm for generating random numbers with a given
distribution", 1991). All devices use the same table.
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
MAX_VARIANCE = 200.0**2  # nine standard deviations on either side are less than 4,096 outcomes
PRECISION = 160  # bits of the most likely outcome's weight
CACHED_TABLES = 32

ALIAS = r"""
struct alignas(8) Column { unsigned threshold, other; };

// Resolves the numbers of a group whose bits are set in `undecided`, with 32 bits of each element's own stream. The
// results are written to memory.
__device__ void resolve(
    Number* out, unsigned undecided, Whole g, unsigned replay, Whole seed, Whole offset, Whole count, Whole first,
    unsigned shift, const Column* columns)
{
    const unsigned* rests = (const unsigned*)(columns + ((Whole)1 << (32 - shift)));
    const Block block = at_place(0xffffffffu, g / (4 / GROUP), replay, seed);
#pragma unroll 1
    for (unsigned j = 0; undecided >> j; ++j) {
        const Whole index = GROUP * g + j, at = index - offset;
        if (!(undecided >> j & 1) || at >= count) continue;  // an index before the first wraps to a large number
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
        unsigned undecided = 0;
        Group group;
#pragma unroll
        for (int j = 0; j < GROUP; ++j) {
            const unsigned column = words[j] >> shift, rest = words[j] & mask;
            const Column entry = columns[column];
            if (rest == entry.threshold) undecided |= 1u << j;
            group.at[j] = sum(first, rest < entry.threshold ? column : entry.other);
        }
        put(out, group, (long long)(GROUP * g - offset), count, is_aligned(out, offset));
        if (undecided) resolve(out, undecided, g, replay, seed, offset, count, first, shift, columns);
    }
}
"""


class AliasTable(NamedTuple):
    """A table as a kernel reads it.

    Attributes:
        first: the outcome of column 0; the outcome of column k is first + k.
        bits: the number of bits of a column index.
        memory: u32; for each column the upper bits of its threshold (as many as remain in a word) and the index of the
            column of its second outcome; after all of these, the lower 32 bits of each threshold.
    """

    first: int
    bits: int
    memory: Array

    def draw(self, words: Array, further: Callable[[Array], Array]) -> Array:
        """The numbers for words of 32 bits; `further` returns 32 more bits for the elements at these indices."""
        shift = np.uint64(WORD_BITS - self.bits)
        column, rest = words >> shift, words & ((np.uint64(1) << shift) - np.uint64(1))
        columns, lower = self.memory[: 2 << self.bits].reshape(-1, 2), self.memory[2 << self.bits :]
        threshold, other = columns[column].T
        is_first_outcome, undecided = rest < threshold, np.flatnonzero(rest == threshold)
        is_first_outcome[undecided] = further(undecided) < lower[column[undecided]]
        return np.asarray(np.where(is_first_outcome, column, other).astype(np.int64) + self.first)


def table_of(request: Any) -> AliasTable | None:
    """The table of a request for Poisson or binomial numbers; None if their variance is too large, or for other ops."""
    if request.op == "random_poisson":
        lam = float(request.lam)
        return poisson_table(lam) if lam <= MAX_VARIANCE else None
    if request.op == "random_binomial":
        n, p = int(request.n), float(request.p)
        return binomial_table(n, p) if n * p * (1 - p) <= MAX_VARIANCE else None
    return None


@lru_cache(CACHED_TABLES)
def poisson_table(lam: float) -> AliasTable:
    """The table of a Poisson distribution."""
    times, over = lam.as_integer_ratio()
    return alias_table(*weighted(int(lam), None, lambda k: (times, over * k)))


@lru_cache(CACHED_TABLES)
def binomial_table(n: int, p: float) -> AliasTable:
    """The table of a binomial distribution."""
    times, whole = p.as_integer_ratio()
    if times == whole:
        return alias_table(n, [1])
    mode = min(n, int((n + 1) * Fraction(p)))
    return alias_table(*weighted(mode, n, lambda k: ((n - k + 1) * times, k * (whole - times))))


def weighted(mode: int, most: int | None, ratio: Callable[[int], tuple[int, int]]) -> tuple[int, list[int]]:
    """The first outcome and the weights of all; `ratio(k)` is the weight of k over that of k - 1, as a fraction."""
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
    """Each weight's probability in units of 2^-64; the most likely outcome gets the remainder of the rounding."""
    total, whole = sum(weights), 1 << TOTAL_BITS
    shares = [(2 * whole * weight + total) // (2 * total) for weight in weights]
    shares[weights.index(max(weights))] += whole - sum(shares)
    return shares


def alias_table(first: int, weights: list[int]) -> AliasTable:
    """The table of the outcomes first, first + 1, …; the weights need not be normalized."""
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
