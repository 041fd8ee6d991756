"""The kernels of numbers that are drawn by rejection: an element a thread, in f64, each with a stream of its own.

The stream of an element is Philox at (block, index, index, 2^31 + replay): no other numbers have the upper bit of a
counter's last word set. Whole numbers of a range of 2^32 at most take one word each, four neighbours those of the block
(2^32 - 1, quad, quad, 2^31 + replay), which no element comes to; an element's own stream is what a word that is one too
many is drawn anew from. `reference_drawn.py` does the same with NumPy, step for step.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from dispatch.keys import F64, I8, I32, I64, U8, U32, U64
from dispatch.libraries.nvrtc.kernel import IdlePlan, Kernel, Launch, loaded
from dispatch.libraries.nvrtc.number_types import NAMES, NUMBERS
from dispatch.libraries.nvrtc.philox import PHILOX, QUAD
from dispatch.ops.random.own import ADVANCE, OPTIONS, NumbersPlan
from dispatch.ops.random.words import WORD, WORDS, is_narrow

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["MODES", "SMALL", "draws_kernel", "nvrtc_draws"]

THREADS = 256
MOST_BLOCKS = 1 << 14
SMALL = 1024  # as many are put in order by Fisher and Yates
ROUNDS = 10  # of the Feistel network for more
MODES = {
    name: number
    for number, name in enumerate(
        (
            *("random_integers", "random_poisson", "random_gamma", "random_beta", "random_binomial"),
            *("random_truncated_normal", "random_permutation", "random_choice", "random_multinomial"),
        )
    )
}
WITH_LIST = ("random_choice", "random_multinomial")
TYPES = {
    I8: "signed char",
    U8: "unsigned char",
    I32: "int",
    U32: "unsigned",
    I64: "long long",
    U64: "unsigned long long",
}

STREAM = r"""
struct Draw {
    Whole seed, index;
    unsigned replay, used;
    Block block;
};

// The next two words of a stream, as the halves of one.
__device__ Whole pair(Draw& d)
{
    if (d.used % 2 == 0)
        d.block = philox(d.used / 2, (unsigned)d.index, (unsigned)(d.index >> 32), 0x80000000u | d.replay, d.seed);
    const unsigned place = d.used++ % 2 * 2;
    return d.block.at[place] | (Whole)d.block.at[place + 1] << 32;
}

// Uniform in (0, 1].
__device__ double unit(Draw& d) { return ((pair(d) >> 11) + 1) * 1.1102230246251565e-16; }

__device__ double gaussian(Draw& d)
{
    const double size = sqrt(-2.0 * log(unit(d)));
#ifdef __CUDACC__
    return size * cospi(2 * unit(d));
#else
    return size * cos(6.283185307179586 * unit(d));
#endif
}

// log(k!) by Stirling's series, from 10 on.
__device__ double log_factorial(double k)
{
    double x = k + 1, passed = 1;
    for (; x < 10; x += 1) passed *= x;
    const double r = 1 / (x * x);
    const double rest = (1.0 / 12 - r * (1.0 / 360 - r * (1.0 / 1260 - r * (1.0 / 1680 - r / 1188)))) / x;
    return (x - 0.5) * log(x) - x + 0.9189385332046727 + rest - log(passed);
}
"""
METHODS = r"""
__device__ double poisson(Draw& d, double lam)
{
    if (lam < 10) {
        const double u = unit(d);
        double p = exp(-lam), sum = p, k = 0;
        while (u > sum && k < 1000) {
            k += 1;
            p *= lam / k;
            sum += p;
        }
        return k;
    }
    const double b = 0.931 + 2.53 * sqrt(lam), a = -0.059 + 0.02483 * b;
    const double inverse = 1.1239 + 1.1328 / (b - 3.4), v_r = 0.9277 - 3.6224 / (b - 2);
    for (;;) {
        const double u = unit(d) - 0.5, v = unit(d), us = 0.5 - (u < 0 ? -u : u);
        const double k = floor((2 * a / us + b) * u + lam + 0.43);
        if (us >= 0.07 && v <= v_r) return k;
        if (k < 0 || (us < 0.013 && v > us)) continue;
        if (log(v * inverse / (a / (us * us) + b)) <= k * log(lam) - lam - log_factorial(k)) return k;
    }
}

__device__ double few(Draw& d, double n, double p)
{
    const double u = unit(d), odds = p / (1 - p);
    double q = exp(n * log(1 - p)), sum = q, k = 0;
    while (u > sum && k < n && k < 1000) {
        k += 1;
        q *= (n - k + 1) / k * odds;
        sum += q;
    }
    return k;
}

__device__ double many(Draw& d, double n, double p)
{
    const double q = 1 - p, spread = sqrt(n * p * q), b = 1.15 + 2.53 * spread, a = -0.0873 + 0.0248 * b + 0.01 * p;
    const double c = n * p + 0.5, v_r = 0.92 - 4.2 / b, alpha = (2.83 + 5.1 / b) * spread, m = floor((n + 1) * p);
    for (;;) {
        const double u = unit(d) - 0.5, v = unit(d), us = 0.5 - (u < 0 ? -u : u);
        const double k = floor((2 * a / us + b) * u + c);
        if (us >= 0.07 && v <= v_r) return k;
        if (!(k >= 0 && k <= n)) continue;
        const double height = log_factorial(m) + log_factorial(n - m) - log_factorial(k) - log_factorial(n - k);
        if (log(v * alpha / (a / (us * us) + b)) <= height + (k - m) * log(p / q)) return k;
    }
}

__device__ double binomial(Draw& d, double n, double p)
{
    if (n == 0 || p <= 0) return 0;
    if (p >= 1) return n;
    const double less = p > 0.5 ? 1 - p : p, k = n * less < 10 ? few(d, n, less) : many(d, n, less);
    return p > 0.5 ? n - k : k;
}

// A gamma number of a shape of 1 or more.
__device__ double large_gamma(Draw& d, double shape)
{
    const double w = shape - 1.0 / 3, c = 1 / sqrt(9 * w);
    for (;;) {
        const double x = gaussian(d), root = 1 + c * x;
        if (root <= 0) continue;
        const double v = root * root * root, u = unit(d);
        if (u < 1 - 0.0331 * (x * x) * (x * x) || log(u) < 0.5 * x * x + w * (1 - v + log(v))) return w * v;
    }
}

// The logarithm, for of a small shape the number itself may be too small.
__device__ double log_gamma(Draw& d, double shape)
{
    if (shape >= 1) return log(large_gamma(d, shape));
    const double grown = log(large_gamma(d, shape + 1));
    return grown + log(unit(d)) / shape;
}

__device__ double beta(Draw& d, double a, double b)
{
    const double x = log_gamma(d, a), y = log_gamma(d, b);
    return 1 / (1 + exp(y - x));
}

// A normal number from a positive low end on.
__device__ double tail(Draw& d, double low, double high)
{
    const double root = sqrt(low * low + 4), rate = (low + root) / 2;
    const bool wide = high - low > 2 / (low + root) * exp(0.5 - low / (low + root));
    for (;;) {
        const double x = wide ? low - log(unit(d)) / rate : low + (high - low) * unit(d), u = unit(d);
        if (x <= high && u <= exp(wide ? -(x - rate) * (x - rate) / 2 : (low - x) * (low + x) / 2)) return x;
    }
}

__device__ double truncated(Draw& d, double low, double high)
{
    if (low > 0) return tail(d, low, high);
    if (high < 0) return -tail(d, -high, -low);
    if (high - low > 2.5066282746310002) {
        for (;;) {
            const double x = gaussian(d);
            if (x >= low && x <= high) return x;
        }
    }
    for (;;) {
        const double x = low + (high - low) * unit(d), u = unit(d);
        if (u <= exp(-x * x / 2)) return x;
    }
}

// A whole number below `range`, 0 for 2^64: the upper half of a product, whose lower half tells what is one too many.
__device__ Whole below(Draw& d, Whole range)
{
    if (range == 0) return pair(d);
    for (;;) {
        const Whole x = pair(d), low = x & 0xffffffff, high = x >> 32, r_low = range & 0xffffffff, r_high = range >> 32;
        const Whole ll = low * r_low, lh = low * r_high, hl = high * r_low;
        const Whole middle = (ll >> 32) + (lh & 0xffffffff) + (hl & 0xffffffff);
        const Whole rest = x * range;  // the remainder is looked at where it is less than the range, which is rare
        if (rest >= range || rest >= (0 - range) % range)
            return high * r_high + (lh >> 32) + (hl >> 32) + (middle >> 32);
    }
}
"""
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
        const unsigned j = i + (unsigned)below(d, n - i);
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
KERNEL = r"""
typedef NUMBER Number;
#if MODE == 2 || MODE == 3 || MODE == 5
#define STORE(x) write(out[i], (SUM)(x))
#else
#define STORE(x) out[i] = (Number)(x)
#endif

extern "C" __global__ void FUNCTION(
#if MODE >= 7
    const double* list,
#endif
    Number* out, Whole seed, Whole offset, Whole count, Whole m, Whole n, double a, double b, double c,
    const unsigned* replays)
{
    const Whole step = (Whole)gridDim.x * blockDim.x;
    const unsigned replay = replays ? *replays : 0;
    for (Whole i = (Whole)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        Draw d;
        d.seed = seed;
        d.index = offset + i;
        d.replay = replay;
        d.used = 0;
#if MODE == 0
        STORE(m + below(d, n));
#elif MODE == 1
        STORE(poisson(d, a));
#elif MODE == 2
        STORE(a > 0 ? exp(log_gamma(d, a)) * b : 0.0);
#elif MODE == 3
        STORE(beta(d, a, b));
#elif MODE == 4
        STORE(binomial(d, (double)n, a));
#elif MODE == 5
        STORE(b + c * truncated(d, __longlong_as_double(m), a));
#elif MODE == 6
        if (n > SMALL) STORE(placed(seed, offset, replay, i, n));
        else if (i == 0) ordered(d, out, count, n);
#elif MODE == 7
        STORE(found(d, list, n));
#else
        outcomes(d, list, out + i * n, n, a);
#endif
    }
}
"""
SOURCE = NUMBERS + PHILOX + STREAM + METHODS + ORDERS + KERNEL
OF_WORDS = NUMBERS + PHILOX + STREAM + METHODS + WORDS  # of whole numbers of a range of 2^32 at most


def nvrtc_draws(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request: one launch."""
    kernel = draws_kernel(request)
    launch = kernel.launch(request)
    if 0 in launch.grid:
        return IdlePlan(row, capture_safe=False)
    device = executor.device
    function = loaded(kernel.source, kernel.function, kernel.options, device)
    advance = partial(loaded, ADVANCE, "advance", OPTIONS, device)
    return NumbersPlan(executor, row, function, launch, advance, addresses=len(request.reads) + 1)


def draws_kernel(request: Any) -> Kernel:
    """The kernel for a request's op and dtype."""
    return _kernel(request.op, request.kind, is_narrow(request))


@cache
def _kernel(op: str, kind: Any, narrow: bool) -> Kernel:
    chosen = {
        "NUMBER": (TYPES | NAMES)[kind],
        "SUM": "double" if kind is F64 else "float",
        "MODE": MODES[op],
        "FUNCTION": op,
        "SMALL": SMALL,
        "ROUNDS": ROUNDS,
    }
    options = (*OPTIONS, *(f"-D{name}={value}" for name, value in chosen.items()))
    return Kernel(OF_WORDS if narrow else SOURCE, op, launch_of, options)


def launch_of(request: Any) -> Launch:
    """A thread for each element, or for each quad where neighbours share a block; and of many for several."""
    threads = request.count and -(-request.count // QUAD) + 1 if is_narrow(request) else request.count
    blocks = min(-(-threads // THREADS), MOST_BLOCKS)
    m, n, a, b, c = numbers_of(request)
    values = (*(ctypes.c_uint64(one % 2**64) for one in (request.count, m, n)), *map(ctypes.c_double, (a, b, c)))
    return Launch((blocks,), (THREADS,), values)


def numbers_of(request: Any) -> tuple[int, int, float, float, float]:
    """What the kernel of an op takes: two whole numbers, and three others."""
    op = request.op
    if op == "random_integers":
        count = request.high - request.low
        return request.low, count, float(WORD % count), 0.0, 0.0
    if op == "random_poisson":
        return 0, 0, float(request.lam), 0.0, 0.0
    if op == "random_gamma":
        return 0, 0, float(request.shape_parameter), float(request.scale), 0.0
    if op == "random_beta":
        return 0, 0, float(request.a), float(request.b), 0.0
    if op == "random_binomial":
        return 0, request.n, float(request.p), 0.0, 0.0
    if op == "random_truncated_normal":
        low, high = request.standard
        (bits,) = struct.unpack("<Q", struct.pack("<d", low))
        return bits, 0, high, float(request.mean), float(request.std)
    if op == "random_permutation":
        return 0, request.population, 0.0, 0.0, 0.0
    listed = getattr(request, request.reads[0]).size
    return 0, listed, float(getattr(request, "n", 0)), 0.0, 0.0
