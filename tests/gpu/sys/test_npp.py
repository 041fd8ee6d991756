"""NPP: a filter of a picture and sums over a signal, against SciPy and NumPy; its context goes by value."""

from __future__ import annotations

from ctypes import byref, c_size_t

import numpy as np
import pytest

from cudabind import driver
from cudabind.sys import nppc, nppif, npps

LIBRARIES = ("cuda", "nppc", "nppif", "npps")
HEIGHT, WIDTH, MASK = 121, 187, 5


@pytest.fixture
def context(gpu):
    """The GPU's numbers and the default stream, which every call wants."""
    ask, device = driver.cuDeviceGetAttribute, driver.cuDeviceGet(0)
    kinds = driver.CUdevice_attribute
    made = nppc.NppStreamContext()
    made.nCudaDeviceId, made.nStreamFlags = 0, 0
    made.nMultiProcessorCount = ask(kinds.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device)
    made.nMaxThreadsPerMultiProcessor = ask(kinds.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, device)
    made.nMaxThreadsPerBlock = ask(kinds.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, device)
    made.nSharedMemPerBlock = ask(kinds.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, device)
    made.nCudaDevAttrComputeCapabilityMajor = int(gpu.arch[:-1])
    made.nCudaDevAttrComputeCapabilityMinor = int(gpu.arch[-1])
    return made


def test_a_box_filter_is_scipys(gpu, context, rng):
    ndimage = pytest.importorskip("scipy.ndimage", reason="SciPy is not installed")
    x = rng.integers(0, 256, (HEIGHT, WIDTH)).astype(np.uint8)
    d_x, d_y = gpu.array(x), gpu.poisoned(x.shape, np.uint8)
    half = MASK // 2
    inside = nppc.NppiSize(width=WIDTH - 2 * half, height=HEIGHT - 2 * half)  # where the mask stays on the picture
    first = half * WIDTH + half
    size, middle = nppc.NppiSize(width=MASK, height=MASK), nppc.NppiPoint(x=half, y=half)
    nppif.nppiFilterBox_8u_C1R_Ctx(d_x.ptr + first, WIDTH, d_y.ptr + first, WIDTH, inside, size, middle, context)
    exact = ndimage.uniform_filter(x.astype(np.float64), MASK)[half:-half, half:-half]
    assert np.abs(d_y.numpy()[half:-half, half:-half] - exact).max() <= 1  # which way it rounds is its own
    assert (d_y.numpy()[:half] == 0xFF).all()  # nothing is written beside the region


def test_a_sum_is_numpys(gpu, context, rng):
    x = rng.integers(0, 100, 10_007).astype(np.float32)
    d_x, d_sum, size = gpu.array(x), gpu.poisoned(1, np.float32), c_size_t()
    npps.nppsSumGetBufferSize_32f_Ctx(x.size, byref(size), context)
    npps.nppsSum_32f_Ctx(d_x.ptr, x.size, d_sum.ptr, gpu.workspace(size.value), context)
    assert d_sum.numpy()[0] == x.sum(dtype=np.float64)  # below 2^24, so exact in any order
