"""nvJitLink: pieces of intermediate code, or of PTX, become one program, which runs; what is missing is named."""

from __future__ import annotations

from ctypes import c_int, c_void_p

import numpy as np
import pytest

from cudabind import driver, nvjitlink, nvrtc
from cudabind.errors import NvJitLinkError

LIBRARIES = ("cuda", "nvrtc", "nvJitLink")

CALLER = """
__device__ int mixed(int);
extern "C" __global__ void apply(int n, int *x) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = mixed(x[i]);
}
"""
CALLED = "__device__ int mixed(int x) { return 3 * x - 1; }"


def applied(gpu, cubin, x):
    """What the kernel of a linked program makes of an array."""
    module, memory = driver.cuModuleLoadData(cubin), gpu.array(x)
    kernel = driver.cuModuleGetFunction(module, b"apply")
    parameters = ((x.size, memory.ptr), (c_int, c_void_p))
    driver.cuLaunchKernel(kernel, -(-x.size // 64), 1, 1, 64, 1, 1, 0, 0, parameters, 0)
    result = memory.numpy()
    driver.cuModuleUnload(module)
    return result


def test_two_pieces_are_optimized_together_and_run(gpu, rng):
    x = rng.integers(-(1 << 20), 1 << 20, 333).astype(np.int32)
    pieces = [("LTOIR", gpu.lto(CALLER)), ("LTOIR", gpu.lto(CALLED))]
    cubin = nvjitlink.link(pieces, [f"-arch=sm_{gpu.arch}", "-lto"])
    assert np.array_equal(applied(gpu, cubin, x), 3 * x - 1)


def test_ptx_is_linked_call_by_call(gpu, rng):
    x = rng.integers(-(1 << 20), 1 << 20, 200).astype(np.int32)
    options = [f"-arch=sm_{gpu.arch}"]
    handle = nvjitlink.nvJitLinkCreate(len(options), options)
    for name, source in (("caller", CALLER), ("called", CALLED)):
        compiled = nvrtc.compile(source, options=[f"-arch=compute_{gpu.arch}", "-rdc=true"])
        nvjitlink.nvJitLinkAddData(handle, nvjitlink.InputType.PTX, compiled.code, len(compiled.code), name)
    nvjitlink.nvJitLinkComplete(handle)
    cubin = bytearray(nvjitlink.nvJitLinkGetLinkedCubinSize(handle))
    nvjitlink.nvJitLinkGetLinkedCubin(handle, cubin)
    nvjitlink.nvJitLinkDestroy(handle)
    assert np.array_equal(applied(gpu, bytes(cubin), x), 3 * x - 1)


def test_a_function_that_no_piece_has_is_named_in_the_log(gpu):
    with pytest.raises(NvJitLinkError) as caught:
        nvjitlink.link([("LTOIR", gpu.lto(CALLER))], [f"-arch=sm_{gpu.arch}", "-lto"])
    assert caught.value.function == "nvJitLinkComplete"
    assert caught.value.name.startswith("NVJITLINK_ERROR")
    assert "mixed" in caught.value.log
