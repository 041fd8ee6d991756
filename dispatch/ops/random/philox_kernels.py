"""Random numbers by kernels of this library: Philox, in the order of cuRAND's host API.

A number depends only on seed, offset and its index, not on the grid. If the caller captures the call into a graph, all
replays would give the same numbers. Therefore the captured kernel reads a replay counter from memory, and a second
kernel of one thread increments it. The counter is the last word of Philox's counter, so no two replays, and no replay
and another call, share any bits. The first replay gives the same numbers as an uncaptured call.
"""

from __future__ import annotations

import ctypes
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from cudabind import driver
from dispatch.core.request import IdlePlan, Plan
from dispatch.keys import BF16, F16, F64, U32, U64
from dispatch.libraries.nvrtc.kernel import Kernel, Launch, loaded
from dispatch.libraries.nvrtc.launching import check
from dispatch.libraries.nvrtc.number_types import NAMES, NUMBERS
from dispatch.libraries.nvrtc.philox import PHILOX
from dispatch.ops.random.groups import GROUPS, groups_launch
from dispatch.ops.random.reference import words_each

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Argument
    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["NumbersPlan", "defined", "kernel_of", "nvrtc_random", "plan_of", "values_of"]

MODES = {"random_bits": 0, "random_uniform": 1, "random_normal": 2, "random_lognormal": 3, "random_exponential": 4}
TYPES = NAMES | {U32: "unsigned", U64: "unsigned long long"}

KERNEL = r"""
typedef SUM T;

// As in cuRAND: fast sine and cosine instructions in float, precise functions in double.
__device__ void sine_cosine(float angle, float& sine, float& cosine)
{
#ifdef __CUDACC__
    __sincosf(angle, &sine, &cosine);
#else
    sine = sinf(angle);
    cosine = cosf(angle);
#endif
}

// The square root of a normal (not subnormal) number, within one unit in the last place.
__device__ float root(float x)
{
#ifdef __CUDACC__
    float y;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return sqrtf(x);
#endif
}

// -log(x) for 0 < x <= 1: in float the fast instruction (error at most 1.7e-7 if the result is below 0.7), in double
// the precise function.
__device__ float minus_log(float x)
{
#ifdef __CUDACC__
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    y *= 0.69314718f;
#else
    const float y = logf(x);
#endif
    return y < 0 ? -y : y;
}
__device__ double minus_log(double x) { return -log(x); }

__device__ float unit(unsigned word) { return word * 2.3283064e-10f + 2.3283064e-10f / 2; }

__device__ double unit(unsigned low, unsigned high)
{
    return (low ^ (Whole)high << 21) * 1.1102230246251565e-16 + 1.1102230246251565e-16 / 2;
}

#if WORDS == 2
__device__ double one_of(const unsigned* w, int j) { return unit(w[2 * j], w[2 * j + 1]); }

__device__ void uniform(const unsigned* w, double* numbers)
{
    for (int j = 0; j < GROUP; ++j)
        numbers[j] = HALF_OPEN ? (w[2 * j] ^ (Whole)w[2 * j + 1] << 21) * 1.1102230246251565e-16
                            : unit(w[2 * j], w[2 * j + 1]);
}

__device__ void normal(const unsigned* w, double* numbers)
{
    for (int j = 0; j < GROUP; j += 2) {
        const double size = sqrt(-2.0 * log(one_of(w, j))), angle = 2 * one_of(w, j + 1);
#ifdef __CUDACC__
        sincospi(angle, &numbers[j], &numbers[j + 1]);
#else
        numbers[j] = sin(angle * 3.14159265358979323846);
        numbers[j + 1] = cos(angle * 3.14159265358979323846);
#endif
        numbers[j] *= size;
        numbers[j + 1] *= size;
    }
}
#else
__device__ float one_of(const unsigned* w, int j) { return unit(w[j]); }

__device__ void uniform(const unsigned* w, float* numbers)
{
    const bool by_steps = HALF_OPEN || STEPS < 24;
    for (int j = 0; j < GROUP; ++j)
        numbers[j] = by_steps ? ((w[j] >> (32 - STEPS)) + !HALF_OPEN) * (1.0f / (1 << STEPS)) : unit(w[j]);
}

__device__ void normal(const unsigned* w, float* numbers)
{
    for (int j = 0; j < GROUP; j += 2) {
        const float size = root(-2.0f * logf(unit(w[j])));
        const float angle = w[j + 1] * (2.3283064e-10f * 6.2831855f) + (2.3283064e-10f * 6.2831855f / 2);
        sine_cosine(angle, numbers[j], numbers[j + 1]);
        numbers[j] *= size;
        numbers[j + 1] *= size;
    }
}
#endif

// The numbers from a block of words: `a` and `b` are low and high, mean and std, or the scale.
__device__ void make(const unsigned* w, Group& group, T a, T b)
{
#if MODE == 0
    for (int j = 0; j < GROUP; ++j)
        group.at[j] = WORDS == 1 ? (Number)w[j] : (Number)(w[WORDS * j] | (Whole)w[WORDS * j + WORDS - 1] << 32);
#else
    T numbers[GROUP];
    if (MODE == 1) {
        uniform(w, numbers);
        if (a != 0 || b != 1)
            for (int j = 0; j < GROUP; ++j) numbers[j] = a + (b - a) * numbers[j];
    } else if (MODE == 4) {
        for (int j = 0; j < GROUP; ++j) numbers[j] = minus_log(one_of(w, j)) * a;
    } else {
        normal(w, numbers);
        for (int j = 0; j < GROUP; ++j) {
            numbers[j] = numbers[j] * b + a;
            if (MODE == 3) numbers[j] = exp(numbers[j]);
        }
    }
    for (int j = 0; j < GROUP; ++j) write(group.at[j], numbers[j]);
#endif
}

extern "C" __global__ void FUNCTION(
    Number* out, Whole seed, Whole offset, Whole count, double a, double b, const unsigned* replays)
{
    const Whole first = offset / GROUP, end = (offset + count + GROUP - 1) / GROUP;
    const unsigned skip = (unsigned)(offset % GROUP), replay = replays ? *replays : 0;
    const bool aligned = is_aligned(out, offset);
    const Whole step = (Whole)gridDim.x * blockDim.x;
    for (Whole g = first + (Whole)blockIdx.x * blockDim.x + threadIdx.x; g < end; g += step) {
        const Whole q = g / WORDS;
        const Block block = block_of(q, (q >> 16) * WORDS + g % WORDS, replay, seed);
        Group group;
        make(block.at, group, (T)a, (T)b);
        put(out, group, (long long)(g - first) * GROUP - skip, count, aligned);
    }
}
"""
SOURCE = NUMBERS + PHILOX + GROUPS + KERNEL
ADVANCE = 'extern "C" __global__ void advance(unsigned* replays) { *replays = (*replays + 1) & 0x7fffffff; }\n'
OPTIONS = ("-std=c++17",)


class NumbersPlan(Plan):
    """One launch of a kernel with the arguments (addresses…, seed, offset, values…, replays)."""

    __slots__ = ("_advance", "_executor", "_kept", "_launch", "_pointers", "_replays", "_slots", "_values")

    def __init__(
        self,
        executor: CudaExecutor,
        row: Row,
        function: int,
        launch: Launch,
        advance: Callable[[], int],
        addresses: int = 1,
    ) -> None:
        super().__init__(row, capture_safe=True)
        self._executor, self._advance, self._values = executor, advance, launch.values
        # One slot for each address, for the seed and for the offset: all are learnt in the same way as addresses.
        self._slots = tuple(ctypes.c_uint64() for _ in range(addresses + 2))
        self._replays = ctypes.c_void_p()
        parameters = (*self._slots, *launch.values, self._replays)
        self._pointers = (ctypes.c_void_p * len(parameters))(*map(ctypes.addressof, parameters))
        fixed = (ctypes.c_void_p(function), *launch.grid, 1, 1, *launch.block, 1, 1, launch.shared, executor.target)
        self._launch: Callable[[], int] = partial(driver.cuLaunchKernel.unchecked, *fixed, self._pointers, None)

    def keep(self, memory: Tensor) -> None:
        """Set memory that the kernel reads, by its last value, and keep it as long as the plan; graphs keep plans."""
        self._kept = memory
        self._values[-1].value = memory.ptr

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        for slot, argument in zip(self._slots, arguments, strict=True):
            slot.value = int(argument.real)
        if self._executor.captured:
            self._enqueue_captured()
            return
        check(self._executor, self._launch())

    def _enqueue_captured(self) -> None:
        """Launch into a caller's capture; the graph's replays are counted in memory that the graph keeps."""
        executor = self._executor
        with executor.preparing():
            count: Tensor = executor.empty((1,), (1,), U32)
            executor.write(count.ptr, 0, U32)
        executor.device.graphs.keep(executor.stream, count)
        pointer = ctypes.c_void_p(count.ptr)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(pointer))
        self._replays.value = count.ptr
        try:
            check(self._executor, self._launch())
        finally:
            self._replays.value = None
        one = (1,) * 6
        function = ctypes.c_void_p(self._advance())
        check(executor, driver.cuLaunchKernel.unchecked(function, *one, 0, executor.target, pointers, None))


def nvrtc_random(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request for Philox: one launch."""
    return plan_of(kernel_of(request), request, executor, row)


def plan_of(kernel: Kernel, request: Any, executor: CudaExecutor, row: Row) -> NumbersPlan | IdlePlan:
    """The plan of a kernel's launch; an idle plan if there is nothing to draw."""
    launch = kernel.launch(request)
    if 0 in launch.grid:
        return IdlePlan(row)
    device = executor.device
    function = loaded(kernel.source, kernel.function, kernel.options, device)
    advance = partial(loaded, ADVANCE, "advance", OPTIONS, device)
    return NumbersPlan(executor, row, function, launch, advance, addresses=len(request.reads) + 1)


def kernel_of(request: Any) -> Kernel:
    """The kernel for a request's op, dtype and interval."""
    is_half_open = getattr(request, "interval", "") == "[0,1)"
    return _kernel(request.op, request.kind, is_half_open)


@cache
def _kernel(op: str, kind: Any, is_half_open: bool) -> Kernel:
    macros = {
        "NUMBER": TYPES[kind],
        "SUM": "double" if kind is F64 else "float",
        "WORDS": words_each(kind),
        "MODE": MODES[op],
        "HALF_OPEN": int(is_half_open),
        "STEPS": {F16: 11, BF16: 8}.get(kind, 24),
        "FUNCTION": op,
    }
    return Kernel(SOURCE, op, launch_of, defined(**macros))


def defined(**macros: Any) -> tuple[str, ...]:
    """NVRTC's options that define these macros."""
    return (*OPTIONS, *(f"-D{name}={value}" for name, value in macros.items()))


def launch_of(request: Any) -> Launch:
    """A launch with a thread for each group."""
    return groups_launch(request, values_of(request))


def values_of(request: Any) -> tuple[Any, ...]:
    """The kernel's arguments after the offset."""
    a, b = (*(float(getattr(request, name)) for name in request.parameters if name != "interval"), 0.0, 0.0)[:2]
    return ctypes.c_uint64(request.count), ctypes.c_double(a), ctypes.c_double(b)
