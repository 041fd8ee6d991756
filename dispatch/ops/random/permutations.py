"""Permutations, choices and multinomial numbers in CUDA C++, from streams of words and binomial numbers."""

from __future__ import annotations

__all__ = ["ORDERS", "ROUNDS", "SMALL"]

SMALL = 1024  # populations up to this size are permuted by a Fisher-Yates shuffle
ROUNDS = 10  # rounds of the Feistel network for larger populations

ORDERS = r"""
// The image of a number under a random permutation of n numbers: a Feistel network over the next power of 2, repeated
// until the result is below n.
__device__ Whole permuted(Whole seed, Whole offset, unsigned replay, Whole number, Whole n)
{
    int bits = 2;
    while ((Whole)1 << bits < n) ++bits;
    const int low_bits = bits / 2;
    const Whole low_mask = ((Whole)1 << low_bits) - 1, high_mask = ((Whole)1 << (bits - low_bits)) - 1;
    do {
        Whole low = number & low_mask, high = number >> low_bits;
        for (unsigned step = 0; step < ROUNDS; ++step) {
            const Whole half = step % 2 ? high : low, at = offset + half;
            const Block block = philox(step, (unsigned)at, (unsigned)(at >> 32), 0x80000000u | replay, seed);
            if (step % 2) low ^= block.at[0] & low_mask;
            else high ^= block.at[0] & high_mask;
        }
        number = high << low_bits | low;
    } while (number >= n);
    return number;
}

// The first `count` numbers of a random permutation of few numbers, by one thread.
__device__ void shuffle(Draw& d, long long* out, Whole count, Whole n)
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

// The index of the first sum above u times the last sum.
__device__ Whole chosen(Draw& d, const double* sums, Whole n)
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

// Multinomial numbers: for each outcome a binomial number of the remaining trials.
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
