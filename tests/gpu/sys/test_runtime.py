"""The runtime API: memory of every kind, copies of parts, streams and events, a captured graph, and errors by name."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from cudabind import runtime
from cudabind.errors import CudaRuntimeError

LIBRARIES = ("cuda",)  # the runtime is cuda-python's own
pytestmark = pytest.mark.usefixtures("gpu")  # whose context is the runtime's, too
KIND = runtime.cudaMemcpyKind


@pytest.fixture
def device():
    """`device(size)`: device memory of so many bytes, none of them zero."""
    made = []

    def allocate(size):
        made.append(runtime.cudaMalloc(size))
        runtime.cudaMemset(made[-1], 0xFF, size)
        return made[-1]

    yield allocate
    for memory in made:
        runtime.cudaFree(memory)


@pytest.fixture
def stream():
    made = runtime.cudaStreamCreate()
    yield made
    runtime.cudaStreamDestroy(made)


def test_a_part_of_a_matrix_is_copied_in_and_out(device, rng):
    rows, cols, pitch = 33, 17, 64
    x = rng.integers(0, 256, (rows, pitch)).astype(np.uint8)
    memory, back = device(rows * pitch), np.zeros((rows, pitch), np.uint8)
    runtime.cudaMemcpy2D(memory, pitch, x.ctypes.data, pitch, cols, rows, KIND.cudaMemcpyHostToDevice)
    runtime.cudaMemcpy(back.ctypes.data, memory, back.nbytes, KIND.cudaMemcpyDeviceToHost)
    assert np.array_equal(back[:, :cols], x[:, :cols])
    assert (back[:, cols:] == 0xFF).all()


def test_pinned_memory_is_copied_while_the_host_goes_on_and_events_tell_how_long(device, stream, rng):
    size = 8 << 20
    pinned = runtime.cudaHostAlloc(size, runtime.cudaHostAllocDefault)
    host = np.frombuffer((ctypes.c_uint8 * size).from_address(int(pinned)), np.uint8)
    x = host[:] = rng.integers(0, 256, size).astype(np.uint8)
    memory, begin, end = device(size), runtime.cudaEventCreate(), runtime.cudaEventCreate()
    runtime.cudaEventRecord(begin, stream)
    runtime.cudaMemcpyAsync(memory, pinned, size, KIND.cudaMemcpyHostToDevice, stream)
    runtime.cudaMemsetAsync(memory, 7, size // 2, stream)
    runtime.cudaMemcpyAsync(pinned, memory, size, KIND.cudaMemcpyDeviceToHost, stream)
    runtime.cudaEventRecord(end, stream)
    runtime.cudaEventSynchronize(end)
    assert (host[: size // 2] == 7).all()
    assert np.array_equal(host[size // 2 :], x[size // 2 :])
    milliseconds = runtime.cudaEventElapsedTime(begin, end)
    assert 0.05 < milliseconds < 1000, "16 MiB cross the bus at 1 to 300 GB/s, or time is not in milliseconds"
    for event in (begin, end):
        runtime.cudaEventDestroy(event)
    runtime.cudaFreeHost(pinned)


def test_a_captured_graph_runs_again_with_new_data(device, stream, rng):
    x, y = rng.integers(0, 256, (2, 1000)).astype(np.uint8), np.zeros(1000, np.uint8)
    source, target = device(1000), device(1000)
    runtime.cudaStreamBeginCapture(stream, runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)
    runtime.cudaMemcpyAsync(target, source, 1000, KIND.cudaMemcpyDeviceToDevice, stream)
    runtime.cudaMemsetAsync(target, 1, 100, stream)
    graph = runtime.cudaStreamEndCapture(stream)
    executable = runtime.cudaGraphInstantiate(graph, 0)
    for row in x:
        runtime.cudaMemcpy(source, row.ctypes.data, 1000, KIND.cudaMemcpyHostToDevice)
        runtime.cudaGraphLaunch(executable, stream)
        runtime.cudaStreamSynchronize(stream)
        runtime.cudaMemcpy(y.ctypes.data, target, 1000, KIND.cudaMemcpyDeviceToHost)
        assert (y[:100] == 1).all()
        assert np.array_equal(y[100:], row[100:])
    runtime.cudaGraphExecDestroy(executable)
    runtime.cudaGraphDestroy(graph)


def test_memory_comes_from_a_pool_in_the_order_of_a_stream(stream, rng):
    x, y = rng.standard_normal(5000), np.full(5000, np.nan)
    memory = runtime.cudaMallocAsync(x.nbytes, stream)
    runtime.cudaMemcpyAsync(memory, x.ctypes.data, x.nbytes, KIND.cudaMemcpyHostToDevice, stream)
    runtime.cudaMemcpyAsync(y.ctypes.data, memory, y.nbytes, KIND.cudaMemcpyDeviceToHost, stream)
    runtime.cudaFreeAsync(memory, stream)
    runtime.cudaStreamSynchronize(stream)
    assert np.array_equal(y, x)


def test_the_device_tells_what_it_is(gpu):
    properties = runtime.cudaGetDeviceProperties(0)
    assert f"{properties.major}{properties.minor}" == gpu.arch
    free, total = runtime.cudaMemGetInfo()
    assert 0 < free <= total
    assert total == pytest.approx(properties.totalGlobalMem, rel=0.05)


def test_more_memory_than_there_is_is_refused_in_the_runtimes_words():
    with pytest.raises(CudaRuntimeError) as caught:
        runtime.cudaMalloc(1 << 60)
    assert caught.value.name == "cudaErrorMemoryAllocation"
    assert caught.value.function == "cudaMalloc"
    assert caught.value.text == "out of memory"
    assert not caught.value.sticky
    # The runtime remembers it until it is asked; an unchecked launch elsewhere would find it.
    assert runtime.cudaGetLastError() == runtime.cudaError_t.cudaErrorMemoryAllocation
    assert runtime.cudaGetLastError() == runtime.cudaError_t.cudaSuccess
