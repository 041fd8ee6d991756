"""Kernels of this library compiled for the CPU by g++ and run thread by thread: their indices without a GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
from pathlib import Path

import pytest

from cudabind.errors import LibraryNotFound
from dispatch.libraries.nvrtc.number_types import NUMBERS

spec = importlib.util.spec_from_file_location("by_gcc", Path(__file__).parents[1] / "by_gcc.py")
by_gcc = importlib.util.module_from_spec(spec)
spec.loader.exec_module(by_gcc)

# g++ takes longer to read C++'s own headers than to compile a kernel: what kernels call is declared here.
BEFORE = """
#include <string.h>
#define FOR_FLOAT_TOO(name) \\
    extern "C" double name(double); extern "C" float name##f(float); \\
    static inline float name(float x) { return name##f(x); }
FOR_FLOAT_TOO(exp)
FOR_FLOAT_TOO(erfc)
FOR_FLOAT_TOO(log)
#define __global__
#define __device__ static
struct Place { unsigned x, y; };
static Place threadIdx, blockIdx, blockDim;
struct Half { unsigned short bits; };
struct Brain { unsigned short bits; };
static double read(double x) { return x; }
static void write(double& at, double x) { at = x; }
static float read(float x) { return x; }
static void write(float& at, float x) { at = x; }
static float read(Half x) { _Float16 y; memcpy(&y, &x, 2); return y; }
static void write(Half& at, float x) { _Float16 y = x; memcpy(&at, &y, 2); }
static float read(Brain x) { unsigned bits = unsigned(x.bits) << 16; float y; memcpy(&y, &bits, 4); return y; }
static void write(Brain& at, float x)
{
    unsigned bits;
    memcpy(&bits, &x, 4);
    at.bits = x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fff;
}
"""
BEHIND = """
extern "C" void go_to(unsigned block, unsigned thread, unsigned threads)
{
    blockIdx.x = block; threadIdx.x = thread; blockDim.x = threads;
}
"""


def size_for_sm_90(kernel):
    """The bytes of its code; skips without NVRTC."""
    try:
        return len(kernel.cubin("sm_90"))
    except LibraryNotFound as error:
        pytest.skip(str(error))


class OnCpu:
    """Runs the kernels of requests over the host's memory; each is compiled once."""

    def __init__(self, folder):
        if not shutil.which("g++"):
            pytest.skip("g++ is not installed")
        self.folder, self.known = folder, {}

    def run(self, kernel, request):
        """Launch a kernel over a request whose outputs are all there."""
        launch = kernel.launch(request)
        library = self.library(kernel)
        names = (*request.reads, *request.writes)
        addresses = [ctypes.c_void_p(getattr(request, name).ptr or None) for name in names]
        function = getattr(library, kernel.function)
        (blocks,), (threads,) = launch.grid, launch.block
        for block in range(blocks):
            for thread in range(threads):
                library.go_to(block, thread, threads)
                function(*addresses, *launch.values)

    def library(self, kernel):
        key = kernel.source, kernel.options
        if key not in self.known:
            assert NUMBERS in kernel.source
            name = self.folder / f"kernel{len(self.known)}"
            source = BEFORE + kernel.source.replace(NUMBERS, "") + BEHIND
            self.known[key] = ctypes.CDLL(by_gcc.built(name, source, *kernel.options))
        return self.known[key]
