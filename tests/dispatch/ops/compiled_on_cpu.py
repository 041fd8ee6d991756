"""Plans of this library's kernels that a caller's operators are compiled into, whose launches the CPU carries out."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from dispatch.libraries.cusparse import calls
from dispatch.libraries.nvrtc import launching
from dispatch.ops.sparse import own_matrix, semiring_kernels
from dispatch.ops.sparse.plain_operators import BatchStrides


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


products_on_cpu = loaded(Path(__file__).with_name("products_on_cpu.py"))
stand_in = loaded(Path(__file__).parents[1] / "cusparse_stand_in.py")  # whose copies are NumPy's
blocks_on_cpu = products_on_cpu.blocks_on_cpu

# Warps and teams go their own ways here: each waits for its own threads alone, and all of a block for all.
BEFORE = """
#undef __device__
#define __device__
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct double2 { double x, y; };
extern "C" double hypot(double, double); extern "C" float hypotf(float, float);
static inline float hypot(float x, float y) { return hypotf(x, y); }
static unsigned how;
extern "C" void order_blocks(unsigned order, unsigned) { how = order; }
static Place its_place()
{
    const unsigned n = gridDim.x, x = blockIdx.x;
    return {how == 0 ? x : how == 1 ? n - 1 - x : 2 * x < n ? 2 * x : (2 * x - n) | 1, 0};
}
#define blockIdx its_place()
static void wait_at(unsigned place, unsigned count)
{
    static unsigned there[MAX_THREADS + 1], turns[MAX_THREADS + 1];
    const unsigned turn = turns[place];
    if (++there[place] == count) there[place] = 0, ++turns[place];
    else while (turns[place] == turn) __syncthreads();
}
#define __syncthreads() wait_at(MAX_THREADS, blockDim.x)
static void of_some(unsigned lanes)
{
    wait_at(threadIdx.x / 32 * 32 + __builtin_ctz(lanes), __builtin_popcount(lanes));
}
template <class E> static E __ldcs(const E* at) { return *at; }
template <class E> static E __ldg(const E* at) { return *at; }
static int __popc(unsigned x) { return __builtin_popcount(x); }
static int atomicAdd(int* at, int x) { const int old = *at; *at += x; return old; }
template <class E> static E of_thread(unsigned lanes, E x, unsigned thread)
{
    static E given[MAX_THREADS];
    given[threadIdx.x] = x;
    of_some(lanes);
    const E theirs = given[thread];
    of_some(lanes);
    return theirs;
}
static unsigned __ballot_sync(unsigned lanes, int is_one)
{
    unsigned found = 0;
    for (unsigned i = 0; i < 32; ++i) found |= of_thread(lanes, unsigned(is_one != 0), threadIdx.x / 32 * 32 + i) << i;
    return found;
}
template <class E> static E __shfl_sync(unsigned lanes, E x, int from, int width)
{
    return of_thread(lanes, x, threadIdx.x / width * width + from);
}
template <class E> static E __shfl_down_sync(unsigned lanes, E x, int by, int width)
{
    return of_thread(lanes, x, threadIdx.x % width + by < unsigned(width) ? threadIdx.x + by : threadIdx.x);
}
"""
PARAMETERS = (
    *("const Element* first", "const Line* offsets", "const Column* places", "const Element* b", "const Result* c"),
    *("Result* out", "Int rows", "Int count", "Int base", "Int columns", "Int b_row", "Int b_column", "Int c_row"),
    *("Int c_column", "Int out_row", "Int out_column", "int count_of_blocks", "unsigned* arrived", "Sum* pieces"),
)
RESULT = PARAMETERS.index("Result* out") + 1  # parameters, behind which plain products have their factors
FACTORS = ("Sum alpha", "Sum beta")
OF_BATCH = ("int tiles", "operators::BatchStrides strides")
# In front of the other kernel, all of whose threads wait for all.
BEFORE_PRODUCT = """
#undef __device__
#define __device__
struct float2 { float x, y; };
struct double2 { double x, y; };
extern "C" double hypot(double, double); extern "C" float hypotf(float, float);
static inline float hypot(float x, float y) { return hypotf(x, y); }
"""


def parameters_of(source):
    """Those that a kernel of `semiring_kernels` has, with factors and for a batch."""
    has_factors, is_batch = (f"{name}," in source for name in (FACTORS[1], "int tiles"))
    factors, behind = FACTORS if has_factors else (), OF_BATCH if is_batch else ()
    return (*PARAMETERS[:RESULT], *factors, *PARAMETERS[RESULT:], *behind)


def numbers_of(source):
    """What it takes by value, by the names of the types."""
    real = {"float": ctypes.c_float, "double": ctypes.c_double}[re.search(r"typedef (\w+) Real;", source)[1]]
    pair = type("Sum", (ctypes.Structure,), {"_fields_": [("part", real * 2)]})
    of_sums = pair if "struct alignas(2 * sizeof(Real)) Complex" in source else real
    return {"Sum": of_sums, "Int": ctypes.c_int64, "int": ctypes.c_int, "operators::BatchStrides": BatchStrides}


def executor_on(on_cpu, monkeypatch):
    """An executor of a GPU; `launched` has the blocks of each launch, `made` the memory of plans, `order` the blocks'.

    `altered` makes another source of one, to see whether that is found.
    """
    sources = []

    def loaded(source, function, options, _):
        sources.append((made.altered(source), function, options))
        return len(sources)

    def launch(function, blocks, *rest):
        *extents, target, pointers, _ = rest
        source, name, options = sources[function.value - 1]
        assert extents[:2] == [1, 1]
        assert extents[3:] == [1, 1, 0]
        assert target is made.target
        if name == semiring_kernels.NAME:
            text, parameters, by_value = BEFORE + source, parameters_of(source), numbers_of(source)
        else:
            text, parameters = BEFORE_PRODUCT + products_on_cpu.BEFORE + source, products_on_cpu.PARAMETERS
            by_value = {"Sum": sum_of(source, options), "Int": ctypes.c_int64, "int": ctypes.c_int}
        kinds = [by_value.get(one.rpartition(" ")[0], ctypes.c_void_p) for one in parameters]
        given = [kind.from_address(at) for kind, at in zip(kinds, pointers, strict=True)]
        kept = tuple(one for one in options if one.startswith(("-std", "-D")))
        library = on_cpu.compiled(text, name, kept, parameters)
        library.order_blocks(ctypes.c_uint(made.order), ctypes.c_uint(0))
        on_cpu.launched(text, name, kept, parameters, (blocks, extents[2]), given)
        made.launched.append(blocks)
        return 0

    def sum_of(source, options):
        defined = [one.removeprefix("-D").replace("=", " ", 1) for one in options if one.startswith("-D")]
        defined += [line.removeprefix("#define ") for line in source.splitlines() if line.startswith("#define ")]
        words = dict(one.split(" ", 1) for one in defined)
        real = ctypes.c_double if words["REAL"] == "double" else ctypes.c_float
        return type("Sum", (ctypes.Structure,), {"_fields_": [("part", real * int(words["PARTS"]))]})

    def empty(shape, _, dtype):
        memory = np.full((shape[0] + products_on_cpu.GUARD,), 0xFF, dtype.numpy)
        made.made.append(memory)
        return SimpleNamespace(ptr=memory.ctypes.data, held=memory)

    driver = SimpleNamespace(
        cuMemsetD8Async=lambda to, value, count, _: ctypes.memset(to, value, count),
        cuLaunchKernel=SimpleNamespace(unchecked=launch),
    )
    monkeypatch.setattr(launching, "driver", driver)
    monkeypatch.setattr(launching, "loaded", loaded)
    monkeypatch.setattr(calls, "Copy", stand_in.Copy)
    monkeypatch.setattr(calls, "handle_of", lambda _: stand_in.Handle())
    made = SimpleNamespace(
        device=None,
        workspace=SimpleNamespace(c_ptr=ctypes.c_void_p(stand_in.PLACEHOLDER)),
        stream=SimpleNamespace(c_handle=ctypes.c_void_p()),
        target=ctypes.c_void_p(),
        empty=empty,
        altered=lambda source: source,
        made=[],
        launched=[],
        order=0,
    )
    return made


def small_blocks(monkeypatch, tile):
    """Blocks of 64 threads and few steps, in which rows of more than 8 elements are long."""
    monkeypatch.setattr(own_matrix, "tile_of", lambda *_: tile)
    for module in (own_matrix, semiring_kernels):
        monkeypatch.setattr(module, "THREADS", 64)
    monkeypatch.setattr(semiring_kernels, "LONG", 8)
