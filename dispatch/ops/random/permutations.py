"""Random orders, choices and outcomes, in CUDA C++, from streams of words and, of outcomes, binomial numbers."""

from __future__ import annotations

__all__ = ["ORDERS", "ROUNDS", "SMALL"]

SMALL = 1024  # as many are put in order by Fisher and Yates
ROUNDS = 10  # of the Feistel network for more

ORDERS = r"""
// Where a number goes in a random order of n of them: a Feistel network over the next power of 2, until it is below n.
__device__ Whole placed(Whole seed, Whole offset, unsigned replay, Whole number, Whole n)
{
    int bits = 2;
    while ((Whole)1 << bits < n) ++bits;
    const int low_bits = bits / 2;
    const Whole low_mask = ((Whole)1 << low_bits) - 1, high_mask = ((Whole)1 << (bits - low_bits)) - 1;
    do {
        Whole low = number & low_mask, high = number >> low_bits;
        for (unsigned turn = 0; turn < ROUNDS; ++turn) {
            const Whole half = turn % 2 ? high : low, at = offset + half;
            const Block block = philox(turn, (unsigned)at, (unsigned)(at >> 32), 0x80000000u | replay, seed);
            if (turn % 2) low ^= block.at[0] & low_mask;
            else high ^= block.at[0] & high_mask;
        }
        number = high << low_bits | low;
    } while (number >= n);
    return number;
}

// Of few the first ones in a random order, by one thread.
__device__ void ordered(Draw& d, long long* out, Whole count, Whole n)
{
    unsigned short all[SMALL];
    for (unsigned i = 0; i < n; ++i) all[i] = (unsigned short)i;
    for (unsigned i = 0; i < count; ++i) {
        const unsigned j = i + (unsigned)below(d, n - i, (0 - (n - i)) % (n - i));
        const unsigned short drawn = all[j];
        all[j] = all[i];
        out[i] = drawn;
    }
}

// The first of the sums above u times the last one.
__device__ Whole found(Draw& d, const double* sums, Whole n)
{
    const double u = (pair(d) >> 11) * 1.1102230246251565e-16 * sums[n - 1];
    Whole low = 0, high = n - 1;
    while (low < high) {
        const Whole middle = (low + high) / 2;
        if (sums[middle] > u) high = middle;
        else low = middle + 1;
    }
    return low;
}

__device__ void outcomes(Draw& d, const double* p, long long* out, Whole n, double trials)
{
    double left = 1;
    for (Whole k = 0; k < n; ++k) {
        const double share = k + 1 == n ? 1 : left > 0 ? p[k] / left : 0;
        const double of_these = binomial(d, trials, share > 1 ? 1 : share);
        out[k] = (long long)of_these;
        trials -= of_these;
        left -= p[k];
    }
}
"""
