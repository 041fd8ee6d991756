"""The kernels that exchange rows, compiled for the CPU by g++: a block's threads run at once, and a warp's meet."""

import ctypes
import shutil
import subprocess

import numpy as np
import pytest

from cudabind.errors import LibraryNotFound
from dispatch.keys import C64, C128, F32, F64
from dispatch.libraries.cusolver.copies import options
from dispatch.libraries.cusolver.row_permutations import MAX_SHARED, SOURCE, PermuteMode
from dispatch.libraries.nvrtc.launching import Strides

DTYPES = (F32, F64, C64, C128)
BEFORE = """
#include <barrier>
#include <cstdlib>
#include <thread>
#include <vector>
#define __global__
#define __device__ static
#define __shared__ static
#define __align__(bytes) alignas(bytes)
using std::abs;
struct Place { unsigned x, y, z; };
static thread_local Place threadIdx;
static Place blockIdx, blockDim, gridDim;
static std::barrier<>* block;
static std::barrier<> warp(32);
static void __syncthreads() { block->arrive_and_wait(); }
static void __syncwarp() { warp.arrive_and_wait(); }
static int __clz(unsigned bits) { return __builtin_clz(bits); }
static unsigned __match_any_sync(unsigned mask, int value)
{
    static int values[32];
    values[threadIdx.x] = value;
    warp.arrive_and_wait();
    unsigned found = 0;
    for (int lane = 0; lane < 32; lane++) found |= unsigned(values[lane] == value) << lane;
    warp.arrive_and_wait();
    return found & mask;
}
"""
BEHIND = """
template <typename Call> static void launch(Place grid, Place threads, Call call)
{
    gridDim = grid, blockDim = threads;
    std::barrier<> all(threads.x * threads.y);
    block = &all;
    for (blockIdx.z = 0; blockIdx.z < grid.z; blockIdx.z++)
    for (blockIdx.y = 0; blockIdx.y < grid.y; blockIdx.y++)
    for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++) {
        std::vector<std::thread> running;
        for (unsigned y = 0; y < threads.y; y++)
            for (unsigned x = 0; x < threads.x; x++)
                running.emplace_back([=] { threadIdx = {x, y, 0}; call(); });
        for (auto& one : running) one.join();
    }
}
extern "C" void run_order(unsigned blocks, const Int* pivots, int* order, int* room, Int n, Int batch)
{
    launch({blocks, 1, 1}, {64, 1, 1}, [=] { permutation_from_pivots(pivots, order, room, n, batch); });
}
extern "C" void run_exchange(
    unsigned x, unsigned y, unsigned z, const Element* source, Element* target, const int* order, Int rows, Int cols,
    Int batch, Strides from, Strides to, int kind)
{
    launch({x, y, z}, {32, 8, 1}, [=] { permute_rows(source, target, order, rows, cols, batch, from, to, kind); });
}
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    folder, found = tmp_path_factory.mktemp("row_permutations"), {}
    for dtype in DTYPES:
        source, library = folder / f"{dtype}.cpp", folder / f"{dtype}.so"
        source.write_text(BEFORE + SOURCE + BEHIND)
        sanitized = ("-fsanitize=undefined", "-fno-sanitize-recover=all", "-static-libubsan")
        command = ["g++", *options(dtype), "-std=c++20", *sanitized, "-pthread", "-shared", "-fPIC"]
        done = subprocess.run([*command, str(source), "-o", str(library)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:2000]
        found[dtype] = ctypes.CDLL(str(library))
    return found


def at(array):
    return ctypes.c_void_p(array.ctypes.data)


def strides_of(array):
    batch, row, col = (step // array.itemsize for step in array.strides)
    return Strides(row, col, batch)


def exchanged(pivots):
    """The order of rows, by one exchange after another."""
    order = list(range(len(pivots)))
    for i, pivot in enumerate(pivots.tolist()):
        order[i], order[pivot - 1] = order[pivot - 1], order[i]
    return order


def ordered(kernels, pivots, blocks=1):
    batch, n = pivots.shape
    order = np.full((batch + 1, n), -7, np.int32)
    room = np.full((batch, n) if n > MAX_SHARED else (0,), 5, np.int32)
    places = [at(one) if one.size else None for one in (pivots, order, room)]
    kernels[F32].run_order(blocks, *places, ctypes.c_int64(n), ctypes.c_int64(batch))
    assert (order[batch] == -7).all()
    return order[:batch]


@pytest.mark.parametrize("n", [1, 2, 5, 31, 32, 33, 64, 100, 1024, 1050, 2100])
def test_pivots_become_the_order_that_their_exchanges_lead_to(n, kernels, rng):
    rows = np.arange(n)
    near = np.minimum(rows + rng.integers(0, 4, n), n - 1)
    far = rows + (rng.random((6, n)) * (n - rows)).astype(np.int64)
    same = np.maximum(rows, n // 2)
    last = np.full(n, n - 1)
    pivots = np.stack([rows, np.minimum(rows + 1, n - 1), near, same, last, *far]) + 1
    found = ordered(kernels, pivots, blocks=4)
    assert found.tolist() == [exchanged(one) for one in pivots]


def test_matrices_whose_rows_a_block_does_not_hold_have_memory_beside(kernels, rng):
    for n in (MAX_SHARED, MAX_SHARED + 1):
        rows = np.arange(n)
        pivots = np.stack([rows + (rng.random(n) * (n - rows)).astype(np.int64), np.minimum(rows + 1, n - 1)]) + 1
        assert ordered(kernels, pivots).tolist() == [exchanged(one) for one in pivots]


def test_what_is_no_pivot_is_no_exchange_and_ends(kernels, rng):
    """What comes from `lu_factor` has none such; but nothing is to be read beyond, and nothing to go round for ever."""
    pivots = rng.integers(-3, 60, (20, 50))
    valid = np.where((pivots <= 50) & (pivots - 1 >= np.arange(50)), pivots, np.arange(50) + 1)
    assert ordered(kernels, pivots).tolist() == [exchanged(one) for one in valid]


@pytest.mark.parametrize("kind", PermuteMode, ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lies", ["CC", "CF", "FC", "FF"])
def test_rows_are_exchanged_as_they_are_copied(lies, dtype, kind, kernels, rng):
    for batch, rows, width, grid in ((1, 1, 1, (1, 1, 1)), (3, 40, 5, (2, 1, 2)), (2, 33, 70, (2, 2, 1))):
        cols = rows if kind is PermuteMode.IDENTITY else width
        values = rng.standard_normal((batch, rows, cols)) + (1j * rng.random((batch, 1, 1)) if dtype.is_complex else 0)
        source, target = (
            (
                np.full((batch, rows, cols + 2), np.nan) if lie == "C" else np.full((batch, cols + 2, rows), np.nan).mT
            ).astype(dtype.numpy, order="K")[:, :, :cols]
            for lie in lies
        )
        source[...] = values
        order = np.stack([rng.permutation(rows) for _ in range(batch)]).astype(np.int32)
        extents = map(ctypes.c_int64, (rows, cols, batch))
        places = (at(source), at(target), at(order))
        kernels[dtype].run_exchange(*grid, *places, *extents, strides_of(source), strides_of(target), int(kind))
        for x, y, rows_of in zip(source, target, order, strict=True):
            if kind is PermuteMode.SCATTER:
                assert (y[rows_of] == x).all()
            else:
                assert (y == (np.eye(rows) if kind is PermuteMode.IDENTITY else x)[rows_of]).all()


@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernels_compile(dtype, arch):
    nvrtc = pytest.importorskip("cudabind.nvrtc")
    try:
        code = nvrtc.compile(SOURCE, "row_permutations.cu", (f"-arch={arch}", *options(dtype))).code
    except LibraryNotFound:
        pytest.skip("NVRTC is not installed")
    assert b"permutation_from_pivots" in code
    assert b"permute_rows" in code
