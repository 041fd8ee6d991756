"""Plans of this library's product of a sparse matrix and a vector, whose launches the CPU carries out."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from dispatch.libraries.nvrtc import launching
from dispatch.ops.sparse import product_kernels

spec = importlib.util.spec_from_file_location("blocks_on_cpu", Path(__file__).with_name("blocks_on_cpu.py"))
blocks_on_cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(blocks_on_cpu)

# Blocks come one after another, in an order that is set: as they are, the last one first, or every other one first.
BEFORE = """
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
static unsigned how;
static unsigned further;
extern "C" void order_blocks(unsigned order, unsigned from) { how = order; further = from; }
static Place its_place()
{
    const unsigned n = gridDim.x, x = blockIdx.x;
    return {further + (how == 0 ? x : how == 1 ? n - 1 - x : 2 * x < n ? 2 * x : (2 * x - n) | 1), 0};
}
#define blockIdx its_place()
template <class E> static E min(E x, E y) { return x < y ? x : y; }
template <class E> static E max(E x, E y) { return x > y ? x : y; }
template <class E> static E __ldcs(const E* at) { return *at; }
static int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
static int __syncthreads_count(int is_one)
{
    static int count, round[MAX_THREADS];
    round[threadIdx.x] = is_one != 0;
    __syncthreads();
    count = 0;
    for (unsigned i = 0; i < blockDim.x; ++i) count += round[i];
    __syncthreads();
    return count;
}
static unsigned __ballot_sync(unsigned, int is_one)
{
    static int given[MAX_THREADS];
    given[threadIdx.x] = is_one != 0;
    __syncthreads();
    unsigned found = 0;
    for (unsigned i = 0; i < 32; ++i) found |= unsigned(given[threadIdx.x / 32 * 32 + i]) << i;
    __syncthreads();
    return found;
}
template <class E> static E __shfl_up_sync(unsigned, E x, unsigned by)
{
    static E given[MAX_THREADS];
    given[threadIdx.x] = x;
    __syncthreads();
    const E theirs = threadIdx.x % 32 >= by ? given[threadIdx.x - by] : x;
    __syncthreads();
    return theirs;
}
"""
PARAMETERS = (
    *("const Number* first", "const LINE* offsets", "const PLACE* columns", "const Number* x", "const Result* y"),
    *("Result* out", "Sum alpha", "Sum beta", "Int rows", "Int count", "Int base", "Int x_step", "Int y_step"),
    *("Int out_step", "int ahead", "unsigned* done", "Int* long_rows", "Sum* heads", "Sum* tails"),
)
FORWARD, BACKWARD, BY_TURNS = range(3)
GUARD = 64  # bytes behind the memory of a plan, which nothing writes


def executor_on(on_cpu, monkeypatch):
    """An executor of a GPU; `made` has the memory of plans, `launched` the options and blocks of each launch.

    `given` is what the kernel was last given; `order` that of the blocks, and `first` the number of the first of them.
    """
    sources = []

    def loaded(source, function, options, _):
        assert (source, function) == (product_kernels.SOURCE, product_kernels.NAME)
        sources.append(options)
        return len(sources)

    def launch(function, blocks, *rest):
        *extents, target, pointers, _ = rest
        options = sources[function.value - 1]
        words = dict(option[2:].split("=") for option in options[1:])
        assert tuple(extents) == (1, 1, int(words["THREADS"]), 1, 1, 0)
        assert target is made.target
        real = ctypes.c_double if words["REAL"] == "double" else ctypes.c_float
        sum_of = type("Sum", (ctypes.Structure,), {"_fields_": [("part", real * int(words["PARTS"]))]})
        by_value = {"Sum": sum_of, "Int": ctypes.c_int64, "int": ctypes.c_int}
        kinds = [by_value.get(one.rpartition(" ")[0], ctypes.c_void_p) for one in PARAMETERS]
        given = [kind.from_address(at) for kind, at in zip(kinds, pointers, strict=True)]
        launched(options, blocks, given)
        return 0

    def launched(options, blocks, given):
        threads = int(dict(option[2:].split("=") for option in options[1:])["THREADS"])
        kernel = (BEFORE + product_kernels.SOURCE, product_kernels.NAME, options, PARAMETERS)
        on_cpu.compiled(*kernel).order_blocks(ctypes.c_uint(made.order), ctypes.c_uint(made.first))
        on_cpu.launched(*kernel, (blocks, threads), given)
        made.given = given
        made.launched.append((options, blocks))

    def empty(shape, _, dtype):
        memory = np.full((shape[0] + GUARD,), 0xFF, dtype.numpy)
        made.made.append(memory)
        return SimpleNamespace(ptr=memory.ctypes.data, held=memory)

    driver = SimpleNamespace(
        cuMemsetD8Async=lambda to, value, count, _: ctypes.memset(to, value, count),
        cuLaunchKernel=SimpleNamespace(unchecked=launch),
    )
    monkeypatch.setattr(launching, "driver", driver)
    monkeypatch.setattr(launching, "loaded", loaded)
    made = SimpleNamespace(
        device=None,
        stream=SimpleNamespace(c_handle=ctypes.c_void_p()),
        target=ctypes.c_void_p(),
        empty=empty,
        run=launched,
        made=[],
        launched=[],
        given=(),
        order=FORWARD,
        first=0,
    )
    return made
