"""NVRTC and the driver: CUDA C++ is compiled, loaded, launched and checked; streams, events, and errors by name."""

from __future__ import annotations

from ctypes import c_float, c_int, c_void_p

import numpy as np
import pytest

from cudabind import driver, nvrtc
from cudabind.errors import CudaDriverError, NvrtcError

LIBRARIES = ("cuda", "nvrtc")
pytestmark = pytest.mark.usefixtures("gpu")

SOURCE = """
template <typename T> __global__ void axpy(int n, T a, const T *x, T *y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}

__constant__ float weights[4];

extern "C" __global__ void weighted(int n, const float *x, float *y) {
    extern __shared__ float tile[];  // one float per thread, and three before them
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    tile[threadIdx.x + 3] = i < n ? x[i] : 0;
    if (threadIdx.x < 3) {
        int before = i - 3;
        tile[threadIdx.x] = before >= 0 ? x[before] : 0;
    }
    __syncthreads();
    if (i >= n) return;
    float sum = 0;
    for (int k = 0; k < 4; ++k) sum += weights[k] * tile[threadIdx.x + k];
    y[i] = sum;
}
"""


@pytest.fixture
def load(gpu):
    """`module, names = load(…)`: SOURCE, compiled for this GPU and loaded; unloaded after the test."""
    modules = []

    def make(names=()):
        compiled = nvrtc.compile(SOURCE, options=[f"-arch=sm_{gpu.arch}"], names=names)
        assert compiled.kind == "cubin"
        modules.append(driver.cuModuleLoadData(compiled.code))
        return modules[-1], compiled.lowered

    yield make
    driver.cuCtxSynchronize()
    for module in modules:
        driver.cuModuleUnload(module)


@pytest.fixture
def stream():
    """A stream that waits for what was enqueued before without one, such as the memset of `gpu.poisoned`."""
    made = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_DEFAULT)
    yield made
    driver.cuStreamDestroy(made)


@pytest.mark.parametrize(("name", "kind", "c_type"), [("float", "f4", c_float), ("int", "i4", c_int)])
def test_a_template_is_instantiated_by_its_name_and_launched(gpu, load, rng, name, kind, c_type):
    n, threads = 1000, 128
    x, y = (rng.integers(-1000, 1000, n).astype(kind) for _ in range(2))
    module, lowered = load([f"axpy<{name}>"])
    kernel = driver.cuModuleGetFunction(module, lowered[f"axpy<{name}>"].encode())
    d_x, d_y = gpu.array(x), gpu.array(y)
    # The values of the parameters, and their C types.
    parameters = ((n, 7, d_x.ptr, d_y.ptr), (c_int, c_type, c_void_p, c_void_p))
    driver.cuLaunchKernel(kernel, -(-n // threads), 1, 1, threads, 1, 1, 0, 0, parameters, 0)
    assert np.array_equal(d_y.numpy(), 7 * x + y)  # whole numbers below 2**24: exact in f32, too


def test_constant_and_shared_memory_on_a_stream(gpu, load, stream, rng, close):
    n, threads = 777, 64
    x, weights = rng.standard_normal(n).astype(np.float32), rng.standard_normal(4).astype(np.float32)
    module, _ = load()
    kernel = driver.cuModuleGetFunction(module, b"weighted")
    address, size = driver.cuModuleGetGlobal(module, b"weights")
    assert size == weights.nbytes
    driver.cuMemcpyHtoDAsync(address, weights.ctypes.data, weights.nbytes, stream)
    d_x, d_y = gpu.array(x), gpu.poisoned(n, np.float32)
    driver.cuLaunchKernel(
        *(kernel, -(-n // threads), 1, 1, threads, 1, 1, 4 * (threads + 3), stream),
        *(((n, d_x.ptr, d_y.ptr), (c_int, c_void_p, c_void_p)), 0),
    )
    driver.cuStreamSynchronize(stream)
    padded = np.concatenate([np.zeros(3), x]).astype(np.float64)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 4)
    bound = 4 * np.finfo(np.float32).eps * (np.abs(windows) @ np.abs(weights))
    close(d_y.numpy(), windows @ weights.astype(np.float64), bound)


def test_one_stream_waits_for_an_event_of_another(gpu, stream, rng):
    n = 1 << 20
    x = rng.integers(0, 1 << 32, n, dtype=np.uint32)
    d_x, d_y, d_z = gpu.array(x), gpu.poisoned(n, np.uint32), gpu.poisoned(n, np.uint32)
    other = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_DEFAULT)
    written = driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
    driver.cuMemcpyDtoDAsync(d_y.ptr, d_x.ptr, d_x.nbytes, stream)
    driver.cuEventRecord(written, stream)
    driver.cuStreamWaitEvent(other, written, 0)
    driver.cuMemcpyDtoDAsync(d_z.ptr, d_y.ptr, d_y.nbytes, other)
    driver.cuStreamSynchronize(other)
    assert np.array_equal(d_z.numpy(), x)
    driver.cuEventDestroy(written)
    driver.cuStreamDestroy(other)


def test_a_launch_with_too_many_threads_is_refused_in_the_drivers_words(load):
    kernel = driver.cuModuleGetFunction(load()[0], b"weighted")
    parameters = ((0, 0, 0), (c_int, c_void_p, c_void_p))
    with pytest.raises(CudaDriverError) as caught:
        driver.cuLaunchKernel(kernel, 1, 1, 1, 4096, 1, 1, 0, 0, parameters, 0)
    assert caught.value.name == "CUDA_ERROR_INVALID_VALUE"
    assert caught.value.function == "cuLaunchKernel"
    assert caught.value.text == "invalid argument"
    assert not caught.value.sticky
    driver.cuCtxSynchronize()  # the context goes on


def test_a_kernel_that_is_not_in_the_module_is_named_not_found(load):
    with pytest.raises(CudaDriverError) as caught:
        driver.cuModuleGetFunction(load()[0], b"nobody")
    assert caught.value.name == "CUDA_ERROR_NOT_FOUND"
    assert caught.value.text


def test_what_does_not_compile_is_raised_with_the_compilers_log(gpu):
    with pytest.raises(NvrtcError) as caught:
        nvrtc.compile("__global__ void broken() { undeclared = 1; }", options=[f"-arch=sm_{gpu.arch}"])
    assert caught.value.name == "NVRTC_ERROR_COMPILATION"
    assert 'identifier "undeclared" is undefined' in caught.value.log
