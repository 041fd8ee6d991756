"""The kernel of a dense product at the places of a sparse pattern, in CUDA C++: SDDMM.

A thread holds the sum of one element, whose line it finds by bisection. A group of lanes computes the sums of its
threads one after another: together they read a row of A and a column of B, 16 bytes per lane at once if the layout
permits. The order of a sum is the same in each run. On an H200 cuSPARSE 12.6 took 59 us for 10^5 elements with 64 terms
in f32.

For a batch the threads number the elements of all matrices consecutively, so that small matrices fill blocks as a large
one does: a group may have elements of two matrices, because each thread computes its own row and column addresses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.keys import C64, C128, F32, F64
from dispatch.libraries.nvrtc.number_types import NAMES, NUMBERS

if TYPE_CHECKING:
    from dispatch.keys import Dtype

__all__ = ["NAME", "SOURCE", "THREADS", "options"]

NAME, THREADS = "sample_products", 256
REAL = {C64: F32, C128: F64}
INDICES = {4: "int", 8: "long long"}  # by size in bytes
UNROLLED = 4  # elements of a group whose rows and columns are read at once
BLOCKS = 4  # resident blocks of each multiprocessor: each thread has 64 registers at most

SOURCE = (
    NUMBERS
    + r"""
typedef long long Int;
typedef REAL Real;
struct alignas(sizeof(STORED) * PARTS) Number { STORED part[PARTS]; };
struct alignas(sizeof(Number) * VECTOR) Vector { Number at[VECTOR]; };
struct Sum { Real part[PARTS]; };
struct BatchStrides { Int added, owners, places, x, y, out; };

__device__ void add_product(Sum& sum, const Number& x, const Number& y)
{
    const Real a = read(x.part[0]), b = read(y.part[0]);
    sum.part[0] = fma(a, b, sum.part[0]);
#if PARTS == 2
    const Real c = read(x.part[1]), d = read(y.part[1]);
    sum.part[0] = fma(-c, d, sum.part[0]);
    sum.part[1] = fma(a, d, fma(c, b, sum.part[1]));
#endif
}

__device__ Sum times(const Sum& factor, const Sum& x)
{
#if PARTS == 2
    return {{factor.part[0] * x.part[0] - factor.part[1] * x.part[1],
             factor.part[0] * x.part[1] + factor.part[1] * x.part[0]}};
#else
    return {{factor.part[0] * x.part[0]}};
#endif
}

// The line that an element is in: the first one that ends behind it.
__device__ Int line_of(const LINE* ends, Int lines, Int base, Int element)
{
    Int low = 0, high = lines - 1;
    while (low < high) {
        const Int middle = (low + high) / 2;
        if ((Int)ends[middle + 1] - base <= element) low = middle + 1; else high = middle;
    }
    return low;
}

// Division of 64 bits takes several times as long as one of 32.
__device__ Int quotient(Int x, Int y) { return (x | y) >> 32 ? x / y : (unsigned)x / (unsigned)y; }

// `pairs`: `owners` has the line of each element, and else where each line begins. Without `added` nothing is.
// `strides`: elements from an operand of one matrix to that of the next, 0 where it is one for all.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) sample_products(
    const Number* added, const LINE* owners, const PLACE* places, const Number* x, const Number* y, Number* out,
    Sum alpha, Sum beta, Int count, Int lines, Int terms, Int x_line, Int y_line, Int base, int pairs, Int batch,
    BatchStrides strides)
{
    const Int thread = (Int)blockIdx.x * THREADS + threadIdx.x;
    const Int number = BATCHED ? quotient(thread, count) : 0, mine = thread - number * count;
    const bool is_there = BATCHED ? number < batch : mine < count;
    const int lane = threadIdx.x % GROUP;
    Int x_at = 0, y_at = 0;
    if (is_there) {
        const LINE* own = owners + number * strides.owners;
        const Int line = pairs ? (Int)own[mine] - base : line_of(own, lines, base, mine);
        x_at = number * strides.x + line * x_line;
        y_at = number * strides.y + ((Int)places[number * strides.places + mine] - base) * y_line;
    }
    Sum kept = {};
#pragma unroll UNROLLED
    for (int turn = 0; turn < GROUP; ++turn) {  // those behind the last element look at the first line and place
        const Number* xs = x + __shfl_sync(0xffffffffu, x_at, turn, GROUP);
        const Number* ys = y + __shfl_sync(0xffffffffu, y_at, turn, GROUP);
        Sum sum = {};
        for (Int at = lane * VECTOR; at < terms; at += GROUP * VECTOR) {
            const Vector one = *(const Vector*)(xs + at), other = *(const Vector*)(ys + at);
            for (int i = 0; i < VECTOR; ++i) add_product(sum, one.at[i], other.at[i]);
        }
        for (int part = 0; part < PARTS; ++part)
            for (int lanes = GROUP / 2; lanes; lanes /= 2)
                sum.part[part] += __shfl_xor_sync(0xffffffffu, sum.part[part], lanes);
        if (turn == lane) kept = sum;
    }
    if (!is_there) return;
    kept = times(alpha, kept);
    if (added) {
        const Number& given = added[number * strides.added + mine];
        Sum before = {};
        for (int part = 0; part < PARTS; ++part) before.part[part] = read(given.part[part]);
        before = times(beta, before);
        for (int part = 0; part < PARTS; ++part) kept.part[part] += before.part[part];
    }
    Number& target = out[number * strides.out + mine];
    for (int part = 0; part < PARTS; ++part) write(target.part[part], kept.part[part]);
}
"""
)


def options(
    dtype: Dtype, line_bytes: int, place_bytes: int, vector: int, group: int, *, batched: bool = False
) -> tuple[str, ...]:
    """NVRTC's options: for a dtype, the bytes of indices, elements that are read at once, and lanes of a group."""
    stored = REAL.get(dtype, dtype)
    words = {
        "STORED": NAMES[stored],
        "REAL": "double" if stored is F64 else "float",
        "PARTS": 2 if dtype.is_complex else 1,
        "LINE": INDICES[line_bytes],
        "PLACE": INDICES[place_bytes],
        "VECTOR": vector,
        "GROUP": group,
        "THREADS": THREADS,
        "UNROLLED": UNROLLED,
        "BLOCKS": BLOCKS,
        "BATCHED": int(batched),
    }
    return "-std=c++17", *(f"-D{name}={word}" for name, word in words.items())
