"""A graph that the driver has no memory for is OutOfMemory; what fails for something else keeps its own error."""

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

import dispatch as dp
from cudabind.errors import CudaDriverError
from dispatch.device import shortage
from dispatch.errors import OutOfMemory
from dispatch.execute import cuda_graph

MIB = 1 << 20


def outcome(monkeypatch, status, free):
    """What becomes of a graph where cuGraphInstantiate ends in this status with so many bytes free."""

    def fails(graph, flags):
        assert (graph, flags) == (5, 0)
        raise CudaDriverError("cuda", "cuGraphInstantiate", status, "CUDA_ERROR_OF_A_TEST")

    monkeypatch.setattr(cuda_graph, "relaxed", nullcontext)
    monkeypatch.setattr(cuda_graph, "driver", SimpleNamespace(cuGraphInstantiate=fails))
    monkeypatch.setattr(shortage, "driver", SimpleNamespace(cuMemGetInfo=lambda: (free, 80 << 30)))
    with pytest.raises((CudaDriverError, OutOfMemory)) as caught:
        cuda_graph.instantiated(ctypes.c_void_p(5))
    return caught.value


@pytest.mark.parametrize(("status", "free"), [(701, 8 * MIB), (701, 511 * MIB), (2, 8 * MIB), (2, 4096 * MIB)])
def test_a_graph_without_memory_is_out_of_memory(monkeypatch, status, free):
    error = outcome(monkeypatch, status, free)
    assert isinstance(error, OutOfMemory)
    assert f"{free // MIB:,} of 81,920 MiB are free" in str(error)
    assert f"cuGraphInstantiate failed with CUDA_ERROR_OF_A_TEST ({status})" in str(error)
    assert isinstance(error.__cause__, CudaDriverError)


@pytest.mark.parametrize(("status", "free"), [(701, 512 * MIB), (1, 8 * MIB), (700, 0)])
def test_what_is_not_for_memory_is_the_drivers_own_error(monkeypatch, status, free):
    error = outcome(monkeypatch, status, free)
    assert isinstance(error, CudaDriverError)
    assert error.status == status


@pytest.mark.parametrize(("words", "told"), [("", "out of memory"), ("no 8 GiB", "out of memory: no 8 GiB")])
def test_the_host_says_what_it_lacks_if_numpy_has_said_it(monkeypatch, words, told):
    executor = dp.device("host").executor()

    def fails(*_):
        raise MemoryError(*filter(None, [words]))

    monkeypatch.setattr(executor, "plan", lambda _: SimpleNamespace(run=fails))
    with pytest.raises(OutOfMemory) as caught:
        executor.run_into(None, {})
    assert str(caught.value) == f"the host is {told}"
