"""Tensors to and from torch, CuPy and JAX on the GPU: the same memory, and stream order right on both sides.

Where order is tested, a kernel of a third of a second is enqueued first on the side that gives: whoever did not wait
would read what was there before it.
"""

import gc
import weakref

import numpy as np
import pytest

import dispatch
from dispatch.errors import StaleTensor

CYCLES = 600_000_000  # about a third of a second on any GPU that has rows here
N = 256
DTYPES = ["float32", "float16", "bfloat16", "float64", "int8", "int32", "complex64"]


def warm(dev):
    """An identity matrix, after products with it: handles and kernels are there, so that later calls only enqueue."""
    eye = dev.array(np.eye(N, dtype=np.float32))
    for _ in range(3):
        dispatch.matmul(eye, eye, out=dev.empty((N, N)))
    dev.synchronize()
    return eye


def keep_busy(dev, seconds=0.3):
    """Enqueue products on the current stream that take about so long."""
    big = dev.zeros((8192, 8192))
    out = dev.empty((8192, 8192))
    for _ in range(int(seconds / 0.02)):  # 1.1 TFLOP each
        dispatch.matmul(big, big, out=out)


# -- torch --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [*DTYPES, "bool", "int64", "uint8", "float8_e4m3fn", "float8_e5m2"])
def test_torch_both_ways_is_the_same_memory(dev, torch, name):
    source = torch.ones((4, 6), device="cuda").to(getattr(torch, name)).T
    tensor = dispatch.from_dlpack(source)
    assert (tensor.ptr, tensor.shape, tensor.device) == (source.data_ptr(), (6, 4), dev)
    assert tensor.strides == tuple(stride * source.element_size() for stride in source.stride())
    back = torch.from_dlpack(tensor)
    assert (back.data_ptr(), back.dtype, back.stride()) == (source.data_ptr(), source.dtype, source.stride())
    own = dev.zeros((3, 5), str(tensor.dtype))
    assert torch.from_dlpack(own).data_ptr() == own.ptr


def test_a_bf16_product_of_torch_tensors(torch):
    a, b = (torch.randn((N, N), device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty((N, N), device="cuda", dtype=torch.bfloat16)
    taken = dispatch.matmul(*map(dispatch.from_dlpack, (a, b)), out=dispatch.from_dlpack(out))
    result = torch.from_dlpack(taken)
    assert result.data_ptr() == out.data_ptr()
    expected = a.double() @ b.double()
    assert (result.double() - expected).abs().max() <= expected.abs().max() * 2**-8 + 1e-3


def test_our_stream_waits_for_torch(dev, torch):
    eye = warm(dev)
    side = torch.cuda.Stream()
    x = torch.zeros((N, N), device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
        x.fill_(3.0)
        taken = dispatch.from_dlpack(x)
    out = dispatch.matmul(taken, eye)
    assert not side.query()  # nobody has waited on the host
    np.testing.assert_array_equal(out.numpy(), np.full((N, N), 3.0, np.float32))


@pytest.mark.parametrize("own_stream", [False, True])
def test_torch_waits_for_our_stream(dev, torch, own_stream):
    eye = warm(dev)
    x = dev.array(np.full((N, N), 5.0, np.float32))
    out = dev.zeros((N, N))
    dev.synchronize()
    keep_busy(dev)
    dispatch.matmul(x, eye, out=out)
    stream = torch.cuda.Stream() if own_stream else torch.cuda.default_stream()
    with torch.cuda.stream(stream):
        copied = torch.from_dlpack(out).clone()
    stream.synchronize()
    assert bool((copied == 5.0).all())


def test_memory_lent_to_torch_is_not_reused_while_torch_reads_it(dev, torch):
    ones = dev.array(np.ones((N, N), np.float32))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        borrowed = torch.from_dlpack(ones)
        torch.cuda._sleep(CYCLES)
        copied = borrowed * 2
    del ones, borrowed
    gc.collect()
    junk = [dev.array(np.full((N, N), 9.0, np.float32)) for _ in range(8)]
    side.synchronize()
    assert len(junk) == 8
    assert bool((copied == 2.0).all())


def test_an_error_of_torch_stays_as_it_is_and_the_memory_comes_back(dev, torch):
    """What is borrowed for the call alone dies while torch's exception is on its way."""
    tensor = dev.zeros((N, N))
    storage = weakref.ref(tensor.storage)
    with pytest.raises(TypeError) as raised:
        torch.add(torch.from_dlpack(tensor), "x")
    assert raised.value.__cause__ is None
    del tensor, raised
    gc.collect()
    assert storage() is None


def test_working_on_torchs_own_stream_needs_no_exchange_of_order(dev, torch):
    eye = warm(dev)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), dispatch.Stream.from_handle(dev, side.cuda_stream):
        x = torch.zeros((N, N), device="cuda")
        torch.cuda._sleep(CYCLES)
        x.fill_(2.0)
        out = torch.from_dlpack(dispatch.matmul(dispatch.from_dlpack(x), eye))
        doubled = out * 2
    side.synchronize()
    assert bool((doubled == 4.0).all())


def test_a_stale_tensor_is_not_lent(torch):
    dev = dispatch.device("cuda:0")
    tensor = dev.zeros((4, 4))
    dev.close()
    with pytest.raises(StaleTensor):
        torch.from_dlpack(tensor)
    assert dispatch.device("cuda:0").zeros((4, 4)).numpy().sum() == 0


# -- CuPy ---------------------------------------------------------------------------------------------------------
SPIN = r"""
extern "C" __global__ void spin_then_fill(float* x, long long n, long long cycles, float value) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
    for (long long i = threadIdx.x; i < n; i += blockDim.x) x[i] = value;
}
"""


@pytest.mark.parametrize("name", [name for name in DTYPES if name != "bfloat16"])
def test_cupy_both_ways_is_the_same_memory(dev, cupy, name):
    source = cupy.ones((4, 6), name)[:, 1:5].T
    for take in (dispatch.from_dlpack, dispatch.from_cuda_array_interface):
        tensor = take(source)
        assert (tensor.ptr, tensor.shape, tensor.strides) == (source.data.ptr, source.shape, source.strides)
    own = dev.array(np.arange(12).reshape(3, 4), name)
    for given in (cupy.from_dlpack(own.T), cupy.asarray(own.T)):
        assert (given.data.ptr, given.shape, given.strides) == (own.ptr, (4, 3), own.T.strides)
        np.testing.assert_array_equal(given.get(), own.numpy().T)


@pytest.mark.parametrize(
    "take", [dispatch.from_dlpack, dispatch.from_cuda_array_interface], ids=["dlpack", "interface"]
)
def test_our_stream_waits_for_cupy(dev, cupy, take):
    eye = warm(dev)
    kernel = cupy.RawKernel(SPIN, "spin_then_fill")
    x = cupy.zeros((N, N), cupy.float32)
    kernel((1,), (256,), (x, N * N, 1, np.float32(0)))
    cupy.cuda.Device().synchronize()
    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        kernel((1,), (256,), (x, N * N, CYCLES, np.float32(3)))
        taken = take(x)
    out = dispatch.matmul(taken, eye)
    assert not side.done
    np.testing.assert_array_equal(out.numpy(), np.full((N, N), 3.0, np.float32))


@pytest.mark.parametrize("give", ["from_dlpack", "asarray"])
def test_cupy_waits_for_our_stream(dev, cupy, give):
    eye = warm(dev)
    x, out = dev.array(np.full((N, N), 5.0, np.float32)), dev.zeros((N, N))
    dev.synchronize()
    keep_busy(dev)
    dispatch.matmul(x, eye, out=out)
    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        copied = getattr(cupy, give)(out) + 1
    side.synchronize()
    np.testing.assert_array_equal(copied.get(), np.full((N, N), 6.0, np.float32))


# -- JAX ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "int8", "int32", "complex64"])
def test_jax_both_ways_is_the_same_memory(dev, jax, name):
    source = jax.numpy.ones((128, 64), name)
    tensor = dispatch.from_dlpack(source)
    assert tensor.ptr == source.unsafe_buffer_pointer()
    assert (tensor.shape, tensor.dtype) == ((128, 64), np.dtype(source.dtype))
    own = dev.array(np.arange(128).reshape(2, 64), str(tensor.dtype))
    given = jax.dlpack.from_dlpack(own)
    assert given.unsafe_buffer_pointer() == own.ptr
    np.testing.assert_array_equal(np.asarray(given), own.numpy())


def test_our_stream_waits_for_jax(dev, jax):
    eye = warm(dev)
    big = jax.numpy.full((8192, 8192), 0.5, jax.numpy.float32)

    @jax.jit
    def slow(x):
        for _ in range(12):
            x = x @ x * 0 + 0.5
        return x[:N, :N] * 6

    slow(big).block_until_ready()  # compiled
    out = dispatch.matmul(dispatch.from_dlpack(slow(big)), eye)
    np.testing.assert_array_equal(out.numpy(), np.full((N, N), 3.0, np.float32))


def test_jax_waits_for_our_stream(dev, jax):
    eye = warm(dev)
    x, out = dev.array(np.full((N, N), 5.0, np.float32)), dev.zeros((N, N))
    dev.synchronize()
    keep_busy(dev)
    dispatch.matmul(x, eye, out=out)
    np.testing.assert_array_equal(np.asarray(jax.dlpack.from_dlpack(out) + 1), np.full((N, N), 6.0, np.float32))


# -- NumPy --------------------------------------------------------------------------------------------------------
def test_numpy_gets_a_copy_once_the_work_is_done(dev):
    eye = warm(dev)
    x, out = dev.array(np.full((N, N), 5.0, np.float32)), dev.zeros((N, N))
    keep_busy(dev)
    dispatch.matmul(x, eye, out=out)
    np.testing.assert_array_equal(np.asarray(out), np.full((N, N), 5.0, np.float32))
    with pytest.raises((BufferError, TypeError, RuntimeError)):
        np.from_dlpack(out)
    with pytest.raises(ValueError, match="without a copy"):
        np.array(out, copy=False)
