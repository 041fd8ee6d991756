"""Tensors of torch, CuPy and JAX as operands on the GPU: on their own streams, from their own memory, in order.

A kernel of a sixth of a second is enqueued first where order is tested: whoever did not wait for it, or waited on the
host, is found.
"""

from __future__ import annotations

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX leaves memory for the others
pytestmark = pytest.mark.usefixtures("dev")
CYCLES = 300_000_000
N = 256


@pytest.fixture
def busy(torch):
    """Have torch's current stream sleep, then write; what is enqueued behind it must find what it wrote."""

    def enqueue(target, source):
        torch.cuda._sleep(CYCLES)
        target.copy_(source)

    return enqueue


def near(y, right, bound=1e-3):
    return float((y.double() - right).abs().max()) <= bound * float(right.abs().max())


@pytest.mark.parametrize("side", [False, True])
def test_a_call_is_on_the_current_stream_of_torch(torch, busy, side):
    source = torch.randn(N, N, device="cuda")
    a, b = torch.zeros_like(source), torch.randn(N, N, device="cuda")
    dp.matmul(a, b)  # handles and kernels are there: later calls only enqueue
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        busy(a, source)
        y = dp.matmul(a, b)
        z = y + 1
        assert not stream.query(), "neither torch nor this library has waited"
    stream.synchronize()
    assert type(y) is torch.Tensor
    assert near(z - 1, source.double() @ b.double())


def test_memory_is_that_of_torch_and_is_used_again_in_order(torch, busy):
    """Operands die with the call under way: torch gives their memory out again, behind it."""
    source, b = torch.randn(N, N, device="cuda"), torch.randn(N, N, device="cuda")
    dp.matmul(source, b)
    torch.cuda.synchronize()
    for _ in range(3):
        before = torch.cuda.memory_allocated()
        a = torch.zeros(N, N, device="cuda")
        busy(a, source)
        y = dp.matmul(a, b)
        assert torch.cuda.memory_allocated() >= before + 2 * 4 * N * N
        del a
        junk = [torch.full((N, N), float("nan"), device="cuda") for _ in range(8)]
        assert near(y, source.double() @ b.double())
        del junk, y


def test_shapes_streams_and_threads_that_change(torch):
    def work(seed):
        generator = torch.Generator("cuda").manual_seed(seed)
        streams = [torch.cuda.Stream() for _ in range(2)]
        for turn in range(200):
            n = 16 * (1 + (seed + turn) % 7)
            with torch.cuda.stream(streams[turn % 2]):
                a, b = (torch.randn(n, n, device="cuda", generator=generator) for _ in "ab")
                y = dp.matmul(a, b)
                right = a.double() @ b.double()
                assert near(y, right)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_tensors_of_two_libraries_and_of_ours(dev, torch, cupy, busy):
    source = torch.randn(N, N, device="cuda")
    eye, theirs = torch.eye(N, device="cuda"), cupy.eye(N, dtype=cupy.float32)
    dp.matmul(source, theirs)
    torch.cuda.synchronize()
    for _ in range(3):
        stream, other = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
        target = torch.zeros_like(source)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream), other:
            busy(target, source)
            x = dp.matmul(cupy.asarray(theirs), target)  # on CuPy's stream, behind torch's
            y = dp.matmul(eye, x)  # on torch's, behind CuPy's
            z = dp.matmul(dev.array(np.eye(N, dtype=np.float32)), y)
        assert type(x) is cupy.ndarray
        assert type(y) is type(z) is torch.Tensor
        stream.synchronize()
        assert torch.allclose(z, source, rtol=1e-2, atol=1e-2)


def test_arrays_of_jax():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        pytest.skip(f"JAX sees no GPU: {error}")
    a = jax.numpy.arange(16.0, dtype="float32").reshape(4, 4)
    y = dp.matmul(a, jax.numpy.eye(4, dtype="float32"))
    assert isinstance(y, jax.Array)
    assert np.array_equal(np.asarray(y), np.arange(16).reshape(4, 4))


def test_a_capture_of_torch_takes_the_call_in(torch):
    a, b = torch.randn(N, N, device="cuda"), torch.randn(N, N, device="cuda")
    out = torch.empty_like(a)
    for _ in range(3):
        dp.matmul(a, b, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dp.matmul(a, b, out=out)
    for _ in range(3):
        a.normal_()
        graph.replay()
        assert near(out, a.double() @ b.double())


@pytest.mark.alone
def test_memory_is_flat(torch):
    a, b = torch.randn(N, N, device="cuda"), torch.randn(N, N, device="cuda")
    for _ in range(200):
        dp.matmul(a, b)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0], len(gc.get_objects())
    for _ in range(20_000):
        dp.matmul(a, b)
    torch.cuda.synchronize()
    gc.collect()
    assert torch.cuda.memory_allocated() == before[0]
    assert torch.cuda.mem_get_info()[0] >= before[1] - (8 << 20)
    assert len(gc.get_objects()) < before[2] + 200


def test_supervised_requests_beside_torch(torch):
    done = threading.Event()

    def beside():
        x = torch.randn(N, N, device="cuda")
        while not done.is_set():
            assert torch.equal(x + 0, x)

    with dp.Supervisor("cuda:0", streams=2) as sup, ThreadPoolExecutor(1) as pool:
        other = pool.submit(beside)
        try:
            for _ in range(50):
                a, b = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")
                y = sup.submit(dp.MatmulRequest(a, b)).result()
                assert type(y) is torch.Tensor
                assert near(y, a.double() @ b.double())
        finally:
            done.set()
        other.result()


def test_operands_of_two_devices_are_refused(torch):
    with pytest.raises(BadRequest) as found:
        dp.matmul(torch.randn(4, 4, device="cuda"), torch.randn(4, 4))
    assert found.value.operand == "b"
    with pytest.raises(BadRequest):
        dp.matmul(torch.randn(4, 4, device="cuda"), np.eye(4, dtype=np.float32))
