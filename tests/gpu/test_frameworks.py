"""Tensors of torch, CuPy and JAX as operands on the GPU: on their own streams, from their own memory, in order.

A kernel of a sixth of a second is enqueued first where order is tested: whoever did not wait for it, or waited on the
host, is found.
"""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import dispatch as dp
from dispatch.device import cuda
from dispatch.errors import BadRequest

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


# -- JAX --------------------------------------------------------------------------------------------------------------
def with_axes(jax, *shape, dtype="float32", seed=0):
    """An array of JAX on the GPU, and its elements in float64."""
    made = jax.numpy.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)
    return made, np.asarray(made, np.float64)


def is_right(jax, y, right, bound=2e-2):
    error = np.abs(np.asarray(y, np.float64) - right).max()
    return isinstance(y, jax.Array) and y.devices() == {jax.devices("cuda")[0]} and error <= bound * np.abs(right).max()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_products_and_softmax_of_jax(jax, dtype):
    (a, wide_a), (b, wide_b) = with_axes(jax, 96, 64, dtype=dtype), with_axes(jax, 64, 80, dtype=dtype, seed=1)
    assert is_right(jax, dp.matmul(a, b), wide_a @ wide_b)
    assert is_right(jax, dp.matmul(a, b, epilogue=dp.Epilogue.RELU), np.maximum(wide_a @ wide_b, 0))
    powers = np.exp(wide_a)
    assert is_right(jax, dp.softmax(a), powers / powers.sum(axis=-1, keepdims=True))


def test_fp8_products_of_jax(jax):
    """b's columns are dense where JAX has put it so, and in a view."""
    from jax.experimental.layout import Format, Layout

    a, wide_a = with_axes(jax, 64, 128, dtype="float8_e4m3fn")
    b, wide_b = with_axes(jax, 128, 96, dtype="float8_e4m3fn", seed=1)
    place = jax.sharding.SingleDeviceSharding(jax.devices("cuda")[0])
    for columns in (dp.from_dlpack(b.T).mT, jax.device_put(b, Format(Layout((1, 0)), place))):
        assert is_right(jax, dp.matmul(a, columns), wide_a @ wide_b)


def test_attention_and_convolution_of_jax(jax):
    q, wide = with_axes(jax, 2, 4, 64, 64, dtype="bfloat16")
    scores = wide @ wide.swapaxes(-1, -2) / 8
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    assert is_right(jax, dp.sdpa_fwd(q, q, q), powers / powers.sum(axis=-1, keepdims=True) @ wide)
    x, wide_x = with_axes(jax, 2, 16, 10, 10)
    w, wide_w = with_axes(jax, 8, 16, 3, 3, seed=1)
    windows = np.lib.stride_tricks.sliding_window_view(wide_x, (3, 3), axis=(2, 3))
    assert is_right(jax, dp.conv_fwd(x, w), np.einsum("nchwij,kcij->nkhw", windows, wide_w))


def test_a_call_is_behind_work_of_jax_and_jax_behind_the_call(jax):
    """Whoever did not wait would read zeros, or what was there before."""
    source, wide = with_axes(jax, N, N)
    mean = jax.numpy.full((8192, 8192), 1 / 8192, "float32")

    @jax.jit
    def late(x, source):
        for _ in range(12):
            x = x @ x
        return source + x[:N, :N] * 0

    eye = jax.numpy.eye(N, dtype="float32")
    dp.matmul(late(mean, source), eye).block_until_ready()
    y = dp.matmul(late(mean, source), eye)
    assert is_right(jax, y + 1, wide + 1)
    big = dp.matmul(mean, mean)
    z = dp.matmul(eye, dp.matmul(source, eye)) * 2
    assert is_right(jax, z, 2 * wide)
    assert is_right(jax, big, np.full((8192, 8192), 1 / 8192))


def test_a_result_that_dies_while_jax_reads_it_keeps_its_memory(dev, jax):
    """JAX lets go of an array as its last name goes, which may be before the GPU has come to what reads it."""
    mean = jax.numpy.full((4096, 4096), 1 / 4096, "float32")

    @jax.jit
    def late(x, y):
        for _ in range(24):
            x = x @ x
        return y + x * 0

    late(mean, mean).block_until_ready()
    poison = dev.array(np.full((4096, 4096), np.nan, np.float32))
    for turn in range(4):
        want = np.random.default_rng(turn).integers(1, 9, (4096, 4096)).astype(np.float32)
        y = dp.matmul(jax.numpy.asarray(want), jax.numpy.eye(4096, dtype="float32"))
        y.block_until_ready()
        z = late(mean, y)
        del y
        gc.collect()
        junk = [poison.copy() for _ in range(8)]
        assert np.array_equal(np.asarray(z), want)
        del junk


def test_operands_of_jax_may_be_deleted_or_donated_behind_the_call(jax):
    eye = jax.numpy.eye(2048, dtype="float32")
    add = jax.jit(lambda x: x * 0 + 7, donate_argnums=0)
    dp.matmul(eye, eye)
    for turn in range(20):
        x = jax.numpy.full((2048, 2048), turn + 1.0, "float32")
        y = dp.matmul(dp.matmul(x, eye), eye)
        if turn % 2:
            x.delete()
        else:
            try:
                add(x)
            except (
                ValueError,
                jax.errors.JaxRuntimeError,
            ) as error:  # the GPU was slow: x is still held for the call that reads it
                if "external reference" not in str(error):
                    raise
        [jax.numpy.full((2048, 2048), np.nan, "float32") for _ in range(3)]
        assert np.array_equal(np.asarray(y), np.full((2048, 2048), turn + 1.0, np.float32))


def test_a_thousand_calls_of_jax_with_shapes_that_change(jax):
    rng = np.random.default_rng(0)
    for turn in range(1000):
        m, n, k = (8 * int(extent) for extent in rng.integers(1, 9, 3))
        a, b = (jax.device_put(rng.integers(-4, 5, shape).astype(np.float32)) for shape in ((m, k), (k, n)))
        y = dp.matmul(a, b)
        if turn % 10 == 0:
            assert np.array_equal(np.asarray(y), np.asarray(a) @ np.asarray(b))


def test_jax_beside_torch_s_side_streams_and_a_supervisor(jax, torch):
    a, wide_a = with_axes(jax, N, N)
    b, wide_b = with_axes(jax, N, N, seed=1)
    right = wide_a @ wide_b
    done = threading.Event()

    def beside():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x = torch.randn(N, N, device="cuda")
            while not done.is_set():
                assert near(dp.matmul(x, x), x.double() @ x.double())

    def puts():
        while not done.is_set():
            host = np.random.default_rng().standard_normal((N, N)).astype(np.float32)
            assert np.array_equal(np.asarray(jax.device_put(host) + 0), host)

    with dp.Supervisor("cuda:0", streams=2) as sup, ThreadPoolExecutor(2) as pool:
        others = [pool.submit(beside), pool.submit(puts)]
        try:
            for _ in range(50):
                assert is_right(jax, dp.matmul(a, b), right, 1e-3)
                assert is_right(jax, sup.submit(dp.MatmulRequest(a, b)).result(), right, 1e-3)
        finally:
            done.set()
        for other in others:
            other.result()


def test_jax_mixed_with_torch_cupy_and_ours(dev, jax, torch, cupy):
    a, wide = with_axes(jax, N, N)
    for other in (torch.eye(N, device="cuda"), cupy.eye(N, dtype=cupy.float32), dev.array(np.eye(N, dtype=np.float32))):
        assert is_right(jax, dp.matmul(a, other), wide, 1e-3)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.eye(N, device="cuda")
        y = dp.matmul(x, a + 0)
    side.synchronize()
    assert type(y) is torch.Tensor
    assert np.allclose(y.cpu(), wide, atol=1e-3)
    with pytest.raises(BadRequest) as found:
        dp.matmul(a, np.eye(N, dtype=np.float32))
    assert found.value.operand == "b"


@pytest.mark.alone
def test_memory_is_flat_with_arrays_of_jax(jax, torch):
    a, _ = with_axes(jax, N, N)
    for _ in range(200):
        dp.matmul(a, a).block_until_ready()
    gc.collect()
    before = torch.cuda.mem_get_info()[0], len(gc.get_objects())
    for _ in range(20_000):
        y = dp.matmul(a, a)
    y.block_until_ready()
    gc.collect()
    # Results that JAX has borrowed are free once the device was waited for, which is when so much has come together.
    bound = torch.cuda.mem_get_info()[1] // cuda.STUCK + (256 << 20)
    assert torch.cuda.mem_get_info()[0] >= before[0] - bound, "all results together take 5.2 GB"
    dp.device("cuda").synchronize()
    gc.collect()
    assert len(gc.get_objects()) < before[1] + 200


# -- what concerns them all -------------------------------------------------------------------------------------------
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
