"""Kernels of random numbers compiled by g++: a loop over blocks and threads in the place of a launch."""

import ctypes
import importlib.util
from pathlib import Path

from dispatch.libraries.nvrtc.number_types import NUMBERS
from dispatch.ops.random.alias_table import table_of

spec = importlib.util.spec_from_file_location("kernels_on_cpu", Path(__file__).with_name("kernels_on_cpu.py"))
kernels_on_cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels_on_cpu)

MORE = "".join(f"FOR_FLOAT_TOO({name})\n" for name in ("sqrt", "sin", "cos", "floor"))
BITS = "static double __longlong_as_double(unsigned long long bits) { double x; memcpy(&x, &bits, 8); return x; }\n"
BEFORE = f"{kernels_on_cpu.BEFORE}{MORE}static Place gridDim;\n{BITS}"


class OnCpu(kernels_on_cpu.OnCpu):
    """Runs the kernels of requests into the memory of their results."""

    def run(self, kernel, request, *, grid=None, replays=None):
        """Launch a kernel over a request; `grid` of other blocks and threads than those of a GPU."""
        launch = kernel.launch(request)
        (blocks,), (threads,) = launch.grid, launch.block
        if grid is not None:
            blocks, threads = grid
        names = (*request.reads, *request.writes)
        addresses = [ctypes.c_void_p(getattr(request, name).ptr) for name in names]
        seed, offset = ctypes.c_uint64(request.seed), ctypes.c_uint64(request.offset)
        table = table_of(request)
        if table is not None:
            launch.values[-1].value = table.memory.ctypes.data
        given = (*addresses, seed, offset, *launch.values, ctypes.c_void_p(replays))
        self.library(kernel, [type(one) for one in given]).launch(blocks, threads, *given)

    def library(self, kernel, kinds):
        key = kernel.source, kernel.options
        if key not in self.known:
            words = {ctypes.c_void_p: "Pointer", ctypes.c_uint64: "unsigned long long", ctypes.c_double: "double"}
            declared = ", ".join(f"{words.get(kind, kind.__name__)} x{place}" for place, kind in enumerate(kinds))
            name = self.folder / f"kernel{len(self.known)}"
            arguments = ", ".join(f"x{place}" for place in range(len(kinds)))
            loop = f"""
struct Pointer {{ void* at; template <class X> operator X*() const {{ return (X*)at; }} }};
extern "C" void launch(unsigned blocks, unsigned threads, {declared})
{{
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) {kernel.function}({arguments});
}}
"""
            text = BEFORE + kernel.source.replace(NUMBERS, "") + loop
            self.known[key] = ctypes.CDLL(kernels_on_cpu.by_gcc.built(name, text, "-O0", *kernel.options))
        return self.known[key]
