"""Plans of networks of small tensors, whose one launch the CPU carries out over the host's memory."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from dispatch.ops.contraction import network_kernel, own_network

spec = importlib.util.spec_from_file_location("blocks_on_cpu", Path(__file__).with_name("blocks_on_cpu.py"))
blocks_on_cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(blocks_on_cpu)

# Warps go their own ways within a round: the lanes of one wait for each other alone, and all of a block for all.
BEFORE = """
#undef __device__
#define __device__
#define __grid_constant__
static void wait_at(unsigned place, unsigned count)
{
    static unsigned there[MAX_THREADS_OF_BLOCK + 1], turns[MAX_THREADS_OF_BLOCK + 1];
    const unsigned turn = turns[place];
    if (++there[place] == count) there[place] = 0, ++turns[place];
    else while (turns[place] == turn) __syncthreads();
}
#define __syncthreads() wait_at(MAX_THREADS_OF_BLOCK, blockDim.x)
static unsigned __umulhi(unsigned x, unsigned y) { return (unsigned long long)x * y >> 32; }
template <class E> static E __shfl_down_sync(unsigned, E x, int by, int width)
{
    static E given[MAX_THREADS_OF_BLOCK];
    given[threadIdx.x] = x;
    wait_at(threadIdx.x / 32, 32);
    const E theirs = threadIdx.x % width + by < unsigned(width) ? given[threadIdx.x + by] : x;
    wait_at(threadIdx.x / 32, 32);
    return theirs;
}
"""
PARAMETERS = ("Pointers pointers", "const Axis* program", "int quads", "Number* apart")
GUARD = 64  # bytes behind the memory of a plan, which nothing writes
MAX_SHARED = 100 << 10


class OnCpu(blocks_on_cpu.InBlocks):
    """Compiles with names that the helpers' own do not take."""

    def compiled(self, source, function, options, parameters):
        # The helpers have a constant that is the name of a macro of the kernel's.
        kept = tuple(one for one in options if not one.startswith("-DMAX_THREADS="))
        source = BEFORE.replace("MAX_THREADS_OF_BLOCK", "1024") + source
        return super().compiled(source, function, kept, parameters)


def executor_on(on_cpu, monkeypatch):
    """An executor of a GPU.

    `made` has the memory of plans, `launched` the threads and bytes of shared memory of each launch; `altered` makes
    another source of the kernel's, `shared` are the bytes that a block may have.
    """
    sources, limits = [], {}

    def loaded(source, function, options, _):
        assert (source, function) == (network_kernel.SOURCE, network_kernel.NAME)
        sources.append(options)
        return len(sources)

    def launch(function, *rest):
        *extents, target, pointers, extra = rest
        assert target is made.target
        assert extra is None
        *ones, threads, one, another, shared = extents
        assert (*ones, one, another) == (1,) * 5
        assert shared <= limits[function.value]
        options, source = sources[function.value - 1], made.altered(network_kernel.SOURCE)
        kinds = (own_network.Pointers, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        given = [kind.from_address(at) for kind, at in zip(kinds, pointers, strict=True)]
        on_cpu.launched(source, network_kernel.NAME, options, PARAMETERS, (1, threads), given)
        made.launched.append((threads, shared))
        return 0

    def empty(shape, _, dtype):
        memory = np.full(shape[0] * dtype.itemsize + GUARD, 0xFF, np.uint8)
        made.made.append(memory)
        return SimpleNamespace(ptr=memory.ctypes.data, held=memory)

    own = own_network.driver
    monkeypatch.setattr(
        own_network,
        "driver",
        SimpleNamespace(
            CUfunction_attribute=own.CUfunction_attribute,
            CUdevice_attribute=own.CUdevice_attribute,
            cuFuncSetAttribute=lambda function, _, most: limits.update({function: most}),
            cuMemcpyHtoDAsync=lambda to, source, count, _: ctypes.memmove(to, source, count),
            cuLaunchKernel=SimpleNamespace(unchecked=launch),
        ),
    )
    monkeypatch.setattr(own_network, "loaded", loaded)
    made = SimpleNamespace(
        device=SimpleNamespace(attribute=lambda _: made.shared),
        stream=SimpleNamespace(c_handle=ctypes.c_void_p(), synchronize=lambda: None),
        target=ctypes.c_void_p(),
        empty=empty,
        altered=lambda source: source,
        made=[],
        launched=[],
        shared=MAX_SHARED,
    )
    return made
