"""Kernels whose threads wait for each other, compiled by g++: the threads of a block take turns, the blocks follow.

Threads of a warp wait for each other as those of a block do, which is as good where they all come to the same places.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path

from dispatch.libraries.nvrtc.number_types import NUMBERS

spec = importlib.util.spec_from_file_location("kernels_on_cpu", Path(__file__).with_name("kernels_on_cpu.py"))
kernels_on_cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels_on_cpu)

# A thread goes on until `__syncthreads` and is resumed once all others have come there, or to their end.
BEFORE = """
#include <setjmp.h>
#include <stdlib.h>
#include <ucontext.h>
FOR_FLOAT_TOO(fabs)
FOR_FLOAT_TOO(sqrt)
extern "C" double fma(double, double, double), scalbn(double, int);
extern "C" float fmaf(float, float, float), scalbnf(float, int);
extern "C" int ilogb(double), ilogbf(float);
static inline float fma(float x, float y, float z) { return fmaf(x, y, z); }
static inline float scalbn(float x, int by) { return scalbnf(x, by); }
static inline int ilogb(float x) { return ilogbf(x); }
#define __shared__ static
#define __align__(bytes) alignas(bytes)
#define __launch_bounds__(threads, blocks)
static Place gridDim;
// A thread's stack is entered by `setcontext`, which asks the system, once; jumps, which do not, leave and resume it.
static const unsigned MAX_THREADS = 1024, STACK_BYTES = 1 << 16;
static jmp_buf scheduler, resumed[MAX_THREADS];
static bool is_begun[MAX_THREADS], is_done[MAX_THREADS];
static char* const stacks = (char*)malloc(MAX_THREADS * STACK_BYTES);
static void (*body)(const void*);
static const void* values;
static void __syncthreads()
{
    if (!_setjmp(resumed[threadIdx.x])) _longjmp(scheduler, 1);
}
static void __syncwarp() { __syncthreads(); }
static void __threadfence() {}
static unsigned told[1024];
static unsigned __shfl_xor_sync(unsigned, unsigned x, unsigned with)
{
    told[threadIdx.x] = x;
    __syncwarp();
    const unsigned y = told[threadIdx.x ^ with];
    __syncwarp();
    return y;
}
static unsigned __reduce_max_sync(unsigned, unsigned x)
{
    told[threadIdx.x] = x;
    __syncwarp();
    for (unsigned i = 0; i < 32; ++i) x = told[threadIdx.x / 32 * 32 + i] > x ? told[threadIdx.x / 32 * 32 + i] : x;
    __syncwarp();
    return x;
}
static unsigned atomicInc(unsigned* at, unsigned most)
{
    const unsigned old = *at;
    *at = old >= most ? 0 : old + 1;
    return old;
}
static long long __double_as_longlong(double x) { long long bits; memcpy(&bits, &x, 8); return bits; }
static int __double2hiint(double x) { return int(__double_as_longlong(x) >> 32); }
static unsigned __float_as_uint(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }
static float __int_as_float(int bits) { float x; memcpy(&x, &bits, 4); return x; }
static void run_thread()
{
    for (;;) {
        body(values);
        is_done[threadIdx.x] = true;
        __syncthreads();
    }
}
static void begin(char* stack)
{
    static ucontext_t made;
    getcontext(&made);
    made.uc_stack.ss_sp = stack;
    made.uc_stack.ss_size = STACK_BYTES;
    makecontext(&made, run_thread, 0);
    setcontext(&made);
}
static void take_turn(unsigned thread)
{
    threadIdx.x = thread;
    if (_setjmp(scheduler)) return;
    if (is_begun[thread]) _longjmp(resumed[thread], 1);
    is_begun[thread] = true;
    begin(&stacks[thread * STACK_BYTES]);
}
static void run_blocks(unsigned blocks, unsigned threads)
{
    gridDim.x = blocks; blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        memset(is_done, 0, sizeof is_done);
        for (bool go_on = true; go_on;) {
            go_on = false;
            for (unsigned i = 0; i < threads; ++i) {
                if (is_done[i]) continue;
                go_on = true;
                take_turn(i);
            }
        }
    }
}
// All threads of a warp are at the same shuffle, as `__shfl_xor_sync` wants them with a mask of all.
template <class E> static E __shfl_xor_sync(unsigned, E x, unsigned lanes)
{
    static E given[1024];
    given[threadIdx.x] = x;
    __syncthreads();
    const E theirs = given[threadIdx.x ^ lanes];
    __syncthreads();
    return theirs;
}
template <class E> static E __ldcg(const E* at) { return *at; }
"""


# Memory whose size a launch tells.
DYNAMIC = re.compile(r"extern __shared__ (\w+) (\w+)\[\];")
MAX_DYNAMIC = 1 << 17  # bytes


class InBlocks(kernels_on_cpu.OnCpu):
    """Runs kernels over the host's memory; `parameters` are those of the kernel, as it declares them.

    They run for moments and g++ takes most of the time: they are not optimized.
    """

    def launched(self, source, function, options, parameters, grid, given):
        """Launch a kernel with values of ctypes, in so many blocks of so many threads."""
        library = self.compiled(source, function, options, parameters)
        getattr(library, f"run_{function}")(*map(ctypes.c_uint, grid), *given)

    def compiled(self, source, function, options, parameters):
        key = source, function, options
        if key not in self.known:
            names = ", ".join(each.rpartition(" ")[2].lstrip("*") for each in parameters)
            behind = f"""
extern "C" void run_{function}(unsigned blocks, unsigned threads, {", ".join(parameters)})
{{
    auto thread = [=] {{ {function}({names}); }};
    values = &thread;
    body = [](const void* values) {{ (*(decltype(thread)*)values)(); }};
    run_blocks(blocks, threads);
}}
"""
            name = self.folder / f"blocks{len(self.known)}"
            source = DYNAMIC.sub(rf"static \1 \2[{MAX_DYNAMIC} / sizeof(\1)];", source.replace(NUMBERS, ""))
            text = kernels_on_cpu.BEFORE + BEFORE + source + behind
            self.known[key] = ctypes.CDLL(kernels_on_cpu.by_gcc.built(name, text, "-O0", *options))
        return self.known[key]
