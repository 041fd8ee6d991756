"""BLAS level 1 by kernels of this library, for large dense vectors: `nrm2` and `axpy`.

NVRTC compiles them for the current GPU. Threads read 16 bytes at once if all vectors begin at multiples of 16 bytes,
and several times before they compute. A norm is one launch: each block writes its sum to the plan's memory, and the
last block to finish adds the sums, always in the same order.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind import driver
from dispatch.keys import C64, C128, F16, F32, F64
from dispatch.libraries.nvrtc.launching import LaunchPlan, cleared, number_of
from dispatch.libraries.nvrtc.number_types import NAMES, NUMBERS, VECTORS, WIDEST, fits_vectors
from dispatch.ops.blas.arrangements import misalignment
from dispatch.refusal import SizeReason

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.cuda import CudaDevice
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype

__all__ = [
    "BLOCKS",
    "COUNTER",
    "MIN_ELEMENTS",
    "REAL",
    "THREADS",
    "Choice",
    "choice_of",
    "large_and_dense",
    "most_blocks",
    "numbers_of",
    "own_level1",
]

MIN_ELEMENTS = 1 << 16  # elements; with fewer, any implementation spends most of the time on the launch
THREADS = 256
BLOCKS = 4  # concurrent blocks per multiprocessor: each thread has at most 64 registers
UNROLLED = {"nrm2": 4, "axpy": 2}  # vectors of each operand that a thread reads before it computes
MULTIPROCESSORS = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
REAL = {C64: F32, C128: F64}
PARTS = 3  # sums of a norm in f64: of large, medium and small numbers
COUNTER = 16  # bytes before the sums

COMMON = (
    NUMBERS
    + r"""
typedef NUMBER Number;
typedef SUM T;
typedef unsigned long long Index;
"""
    + VECTORS
)
AXPY = (
    COMMON
    + r"""
__device__ void change(const Number& x, const Number& y, Number& out, T alpha)
{
    write(out, fma(alpha, T(read(x)), T(read(y))));
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
axpy(const Number* x, const Number* y, Number* out, T alpha, Index n)
{
    const Vector<Number> *xs = (const Vector<Number>*)x, *ys = (const Vector<Number>*)y;
    Vector<Number>* outs = (Vector<Number>*)out;
    const Index tile = THREADS * UNROLLED, vectors = n / VECTOR;
    for (Index first = blockIdx.x * tile; first < vectors; first += gridDim.x * tile) {
        const Index at = first + threadIdx.x;
        Vector<Number> a[UNROLLED], b[UNROLLED];
#pragma unroll
        for (int i = 0; i < UNROLLED; ++i)
            if (const Index j = at + i * THREADS; j < vectors) a[i] = xs[j], b[i] = ys[j];
#pragma unroll
        for (int i = 0; i < UNROLLED; ++i) {
            for (int j = 0; j < VECTOR; ++j) change(a[i].at[j], b[i].at[j], b[i].at[j], alpha);
            if (at + i * THREADS < vectors) outs[at + i * THREADS] = b[i];
        }
    }
    const Index last = vectors * VECTOR + threadIdx.x;
    if (blockIdx.x == 0 && last < n) change(x[last], y[last], out[last], alpha);
}
"""
)
# Squares of f32 neither overflow nor underflow in double precision, nor do squares of f16 in single precision. For f64
# the large and the small numbers are scaled by powers of two and summed separately, after J. L. Blue and E. Anderson
# (https://doi.org/10.1145/3061665): the sum of the medium ones neither overflows nor loses precision.
NRM2 = (
    COMMON
    + r"""
struct Sum { T part[PARTS]; };

__device__ void add(Sum& sum, T x)
{
    const int middle = PARTS / 2;
#if PARTS == 3
    const int size = __double2hiint(x) & 0x7fffffff;  // the exponent's bits first
    if (size >= (1023 + 486) << 20) {  // infinities and NaN, too
        x *= 0x1p-600;
        sum.part[0] = fma(x, x, sum.part[0]);
        return;
    }
    if (size < (1023 - 511) << 20) {
        x *= 0x1p600;
        sum.part[2] = fma(x, x, sum.part[2]);
        return;
    }
#endif
    sum.part[middle] = fma(x, x, sum.part[middle]);
}

__device__ T root(const Sum& sum)
{
    const T middle = sum.part[PARTS / 2];
#if PARTS == 3
    const T large = sum.part[0], small = sum.part[2];
    if (!(large == 0)) return sqrt(large + middle * 0x1p-600 * 0x1p-600) * 0x1p600;
    if (middle == 0) return sqrt(small) * 0x1p-600;
    return sqrt(middle + small * 0x1p-600 * 0x1p-600);
#else
    return sqrt(middle);
#endif
}

// The sum of all threads' sums, which the first one is given.
__device__ Sum together(const Sum& mine)
{
    __shared__ Sum sums[THREADS];
    const unsigned thread = threadIdx.x;
    sums[thread] = mine;
    for (unsigned half = THREADS / 2; half; half /= 2) {
        __syncthreads();
        if (thread < half)
            for (int i = 0; i < PARTS; ++i) sums[thread].part[i] += sums[thread + half].part[i];
    }
    return sums[thread];
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
nrm2(const Number* x, Number* out, Index n, unsigned* done, T* partial)
{
    __shared__ bool is_last;
    const Index tile = THREADS * UNROLLED, vectors = n / VECTOR;
    const Vector<Number>* xs = (const Vector<Number>*)x;
    Sum sum = {};
    for (Index first = blockIdx.x * tile; first < vectors; first += gridDim.x * tile) {
        const Index at = first + threadIdx.x;
        Vector<Number> a[UNROLLED];
#pragma unroll
        for (int i = 0; i < UNROLLED; ++i) {
            a[i] = {};
            if (at + i * THREADS < vectors) a[i] = xs[at + i * THREADS];
        }
#pragma unroll
        for (int i = 0; i < UNROLLED; ++i)
            for (int j = 0; j < VECTOR; ++j) add(sum, read(a[i].at[j]));
    }
    const Index last = vectors * VECTOR + threadIdx.x;
    if (blockIdx.x == 0 && last < n) add(sum, read(x[last]));
    sum = together(sum);
    if (threadIdx.x == 0) {
        for (int i = 0; i < PARTS; ++i) partial[blockIdx.x * PARTS + i] = sum.part[i];
        __threadfence();
        is_last = atomicInc(done, gridDim.x - 1) == gridDim.x - 1;  // which makes it 0 again
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    sum = {};
    for (unsigned block = threadIdx.x; block < gridDim.x; block += THREADS)
        for (int i = 0; i < PARTS; ++i) sum.part[i] += ((volatile T*)partial)[block * PARTS + i];
    sum = together(sum);
    if (threadIdx.x == 0) write(*out, root(sum));
}
"""
)
SOURCES = {"axpy": AXPY, "nrm2": NRM2}


def large_and_dense(request: Any) -> str:
    """Rule: dense vectors with many elements."""
    for name in (*request.reads, *request.writes):
        layout = request.layout_of(name)
        if text := misalignment(layout):
            return f"{name}: {text}"
        if layout.shape and layout.shape[0] < MIN_ELEMENTS:
            return SizeReason(f"needs vectors of {MIN_ELEMENTS} elements or more, {name} has {layout.shape[0]}")
        if layout.shape and layout.strides[0] != 1:
            return f"needs {name} dense, has {layout}: copy it"
    return ""


class Choice(NamedTuple):
    """A kernel: its op, the dtype of the real numbers that it reads, and how many of them it reads at once."""

    op: str
    real: Dtype
    vector: int

    @property
    def source(self) -> str:
        return SOURCES[self.op]

    @property
    def sums(self) -> Dtype:
        """The compute dtype."""
        return F64 if self.real is F64 or (self.op == "nrm2" and self.real is not F16) else F32

    @property
    def parts(self) -> int:
        """The number of partial sums of a norm."""
        return PARTS if self.real is F64 else 1

    @property
    def options(self) -> tuple[str, ...]:
        """NVRTC's options, except the architecture."""
        chosen = {
            "NUMBER": NAMES[self.real],
            "SUM": NAMES[self.sums],
            "PARTS": self.parts,
            "VECTOR": self.vector,
            "UNROLLED": UNROLLED[self.op],
            "THREADS": THREADS,
            "BLOCKS": BLOCKS,
        }
        return ("-std=c++17", *(f"-D{name}={value}" for name, value in chosen.items()))

    def blocks(self, numbers: int, most: int | None) -> int:
        """The number of blocks of a launch: no more than there are tiles, and no more than `most`."""
        tile = THREADS * UNROLLED[self.op] * self.vector
        tiles = max(-(-numbers // tile), 1)
        return tiles if most is None else min(tiles, most)


def choice_of(request: Any) -> Choice:
    """The kernel for a request's dtype and alignment."""
    dtype = request.x.dtype
    real = REAL.get(dtype, dtype)
    layouts = [request.layout_of(name) for name in (*request.reads, *request.writes)]
    fits = all(fits_vectors(layout, WIDEST // dtype.itemsize) for layout in layouts if layout.shape)
    return Choice(request.op, real, WIDEST // real.itemsize if fits else 1)


def numbers_of(request: Any) -> int:
    """The number of real numbers in each vector."""
    count: int = request.x.size * (2 if request.x.dtype.is_complex else 1)
    return count


def most_blocks(request: Any, device: CudaDevice) -> int | None:
    """The number of blocks that loop over tiles, as many as can run concurrently; None if each block has one tile.

    An `axpy` uses one tile per block if the L2 cache cannot hold all its operands. On an H100, whose cache has 50 MB,
    one of 4.2M f32 in place, 33.5 MB, took 7.9 µs with blocks that loop and 11.0 with one tile per block (torch 11.1,
    cuBLAS 13.4); one of 16.8M, 134 MB, took 72.3 and 69.4 (torch 69.5, cuBLAS 77.2).
    """
    if request.op == "axpy":
        operands = 3 if request.out is None else 2  # an `out` of the caller usually is y
        if operands * request.x.size * request.x.dtype.itemsize > device.l2_bytes:
            return None
    return BLOCKS * device.attribute(MULTIPROCESSORS)


def own_level1(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request: one launch."""
    choice, numbers = choice_of(request), numbers_of(request)
    blocks = choice.blocks(numbers, most_blocks(request, executor.device))
    slots: list[Any] = [ctypes.c_void_p() for _ in (*request.reads, *request.writes)]
    arguments: list[Any] = [ctypes.c_uint64(numbers)]
    scratch = None
    if choice.op == "axpy":
        slots.append(number_of(choice.sums))
    else:
        scratch = cleared(executor, COUNTER, blocks * choice.parts * choice.sums.itemsize)
        arguments += [ctypes.c_void_p(scratch.ptr), ctypes.c_void_p(scratch.ptr + COUNTER)]
    filled = [(slot, place) for place, slot in enumerate(slots)]
    kernel = choice.source, choice.op, choice.options
    return LaunchPlan(executor, row, kernel, (blocks, THREADS), filled, arguments, scratch)
