"""Plans of cuFFT over two GPUs against NumPy in double precision, and what is around them: order, contexts, memory."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from cudabind import driver
from cudabind.sys import cufft
from dispatch.errors import BadRequest, Closed

spec = importlib.util.spec_from_file_location(
    "fft_in_parts", Path(__file__).parents[2] / "dispatch" / "fft_in_parts.py"
)
in_parts = importlib.util.module_from_spec(spec)
spec.loader.exec_module(in_parts)
NUMPY, close, drawn, right = in_parts.NUMPY, in_parts.close, in_parts.drawn, in_parts.right

CUT = [(32, 32), (33, 34), (64, 48), (37, 2038), (1000, 1026), (33, 35, 4), (40, 32, 8), (64, 96, 100), (128, 128, 128)]
ODD = [(33, 37), (45, 2027), (35, 33, 5), (33, 47, 1)]
MIB = 1 << 20


@pytest.fixture
def two(dev):
    """Two GPUs, or one that is named twice; the first one's context is the current one, from here to the end."""
    count = int(driver.cuDeviceGetCount())
    devices = [dev, dp.device("cuda:1") if count > 1 else dev]
    driver.cuCtxSetCurrent(dev.context.handle)
    yield devices
    assert chosen() == 0


def chosen():
    return int(driver.cuCtxGetDevice())


def look_at_parts(plan, whole, devices):
    assert [part.device for part in plan.parts] == list(devices)
    in_parts.look_at_parts(plan, whole)


def poison(plan):
    for part in plan.parts:
        part.copy_from(np.full(part.shape, np.nan))


def there_and_back(plan, x, sizes):
    for turn, norm in enumerate((None, "ortho", "forward")):  # the same plan, with other data each time
        poison(plan)
        given = x * (turn + 1)
        plan.write(given)
        assert np.array_equal(plan.read(), given)
        look_at_parts(plan, given, plan.devices)
        spectrum = plan.forward(norm).read()
        close(spectrum, right(given, sizes, norm))
        look_at_parts(plan, spectrum, plan.devices)
        close(plan.inverse(norm).read(), given)


# -- transforms -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [64, 128, 1024, 1 << 16, 1 << 22])
@pytest.mark.parametrize("dtype", ["c64", "c128"])
def test_one_axis(two, rng, n, dtype):
    with dp.fft.MultiGpuPlan(two, n, dtype) as plan:
        there_and_back(plan, drawn(rng, n, dtype), (n,))


@pytest.mark.parametrize("shape", CUT)
@pytest.mark.parametrize("dtype", NUMPY)
def test_several_axes(two, rng, shape, dtype):
    with dp.fft.MultiGpuPlan(two, shape, dtype) as plan:
        there_and_back(plan, drawn(rng, shape, dtype), shape)


@pytest.mark.parametrize("shape", ODD)
@pytest.mark.parametrize("dtype", ["c64", "c128"])
def test_odd_extents_of_complex_numbers(two, rng, shape, dtype):
    with dp.fft.MultiGpuPlan(two, shape, dtype) as plan:
        there_and_back(plan, drawn(rng, shape, dtype), shape)


@pytest.mark.parametrize("shape", [(8,), (1000,), (1009,), (7,), (24, 20), (5, 9), (33, 31), (8, 9, 10), (7, 6, 5)])
@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("batch", [2, 5])
def test_a_batch(two, rng, shape, dtype, batch):
    with dp.fft.MultiGpuPlan(two, shape, dtype, batch=batch) as plan:
        there_and_back(plan, drawn(rng, (batch, *shape), dtype), shape)


def test_the_other_order_of_gpus(two, rng):
    x = drawn(rng, (33, 40))
    with dp.fft.MultiGpuPlan(two[::-1], x.shape) as plan:
        there_and_back(plan, x, x.shape)


def test_one_gpu_named_twice(dev, rng):
    """As NVIDIA's samples do where there is one GPU."""
    for shape, dtype in ((1024, "c64"), ((33, 34), "c64"), ((64, 40, 8), "f32")):
        sizes = (shape,) if isinstance(shape, int) else shape
        with dp.fft.MultiGpuPlan([dev, dev], shape, dtype) as plan:
            there_and_back(plan, drawn(rng, sizes, dtype), sizes)


def test_an_inverse_alone_and_transforms_of_transforms(two, rng):
    x = drawn(rng, (32, 40), "c128")
    with dp.fft.MultiGpuPlan(two, x.shape, "c128") as plan:
        close(plan.write(x).inverse().read(), np.fft.ifftn(x))
        close(plan.write(x).forward().forward().read(), np.fft.fftn(np.fft.fftn(x)))
    line = drawn(rng, 1 << 12, "c128")
    with dp.fft.MultiGpuPlan(two, line.size, "c128") as plan:
        close(plan.write(line).inverse().read(), np.fft.ifft(line))
        for _ in range(3):  # each in natural order first, in one of two memories
            plan.forward().inverse()
        close(plan.read(), np.fft.ifft(line))


@pytest.mark.parametrize("shape", [(33, 34), (40, 32, 8)])
def test_half_a_spectrum_is_written_too(two, rng, shape):
    x = drawn(rng, shape, "f64")
    half = np.fft.rfftn(x)
    with dp.fft.MultiGpuPlan(two, shape, "f64") as plan:
        plan.write(half)
        assert np.array_equal(plan.read(), half)
        look_at_parts(plan, half, two)
        with pytest.raises(BadRequest, match="forward: got a plan that holds c128"):
            plan.forward()
        close(plan.inverse().read(), x)
    with dp.fft.MultiGpuPlan(two, shape[1:], "f64", batch=shape[0]) as plan:
        close(plan.write(np.fft.rfftn(x, axes=range(1, x.ndim))).inverse().read(), x)


def test_parts_lie_as_cufft_gathers_them(two, rng):
    """cufftXtMemcpy brings what a transform leaves into natural order on the host, whatever this library thinks."""
    for shape, dtype in ((1 << 12, "c64"), ((33, 34), "c64"), ((33, 35, 6), "c128"), ((34, 33, 8), "f32")):
        sizes = (shape,) if isinstance(shape, int) else shape
        with dp.fft.MultiGpuPlan(two, shape, dtype) as plan:
            plan.write(drawn(rng, sizes, dtype)).forward()
            ours, theirs = plan.read(), np.zeros(plan.shape, plan.dtype.numpy)
            with two[0].context:
                cufft.cufftXtMemcpy(
                    plan._xt._handles.handles[0],
                    theirs.ctypes.data,
                    plan._xt._memory.address,
                    cufft.cufftXtCopyType.CUFFT_COPY_DEVICE_TO_HOST,
                )
            assert np.array_equal(ours, theirs), (shape, dtype)


def test_two_plans_at_once(two, rng):
    x, y = drawn(rng, (256, 260)), drawn(rng, (6, 1000), "f64")
    with dp.fft.MultiGpuPlan(two, x.shape) as one, dp.fft.MultiGpuPlan(two[::-1], 1000, "f64", batch=6) as other:
        for turn in range(1, 6):
            one.write(turn * x)
            other.write(turn * y)
            one.forward()
            other.forward()
            close(other.read(), right(turn * y, (1000,)))
            close(one.read(), right(turn * x, x.shape))


# -- operands and results ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("shape", "dtype"), [(1 << 12, "c64"), ((66, 70), "c128"), ((66, 70), "f32"), ((34, 36, 8), "f64")]
)
def test_tensors_of_any_device(two, rng, shape, dtype):
    sizes = (shape,) if isinstance(shape, int) else shape
    x = drawn(rng, sizes, dtype)
    with dp.fft.MultiGpuPlan(two, shape, dtype) as plan:
        for device in (*two, dp.device("host")):
            poison(plan)
            plan.write(device.array(x))  # which is let go of at once
            out = device.array(np.full(x.shape, np.nan, x.dtype))
            assert plan.read(out=out) is out
            assert np.array_equal(out.numpy(), x)
            plan.forward()
            spectrum = device.array(np.full(plan.shape, np.nan, plan.dtype.numpy))
            close(plan.read(out=spectrum).numpy(), right(x, sizes))
            plan.write(spectrum)
            assert np.array_equal(plan.read(), spectrum.numpy())
            if x.ndim > 1:
                plan.write(device.array(np.ascontiguousarray(x.T)).T if x.ndim == 2 else device.array(x))
                assert np.array_equal(plan.read(), x)
    assert chosen() == 0


@pytest.mark.parametrize("number", [0, 1])
def test_torch_s_tensors_with_work_that_is_pending(two, rng, torch, number):
    x = drawn(rng, (1024, 1030))
    expected = right(50 * x, x.shape)
    torch.cuda.set_device(0)
    number = two[number].ordinal
    stream = torch.cuda.Stream(number)
    with dp.fft.MultiGpuPlan(two, x.shape) as plan, torch.cuda.stream(stream):
        source = torch.from_numpy(x).to(f"cuda:{number}")
        given = torch.zeros_like(source)
        for _ in range(50):
            given += source
        plan.write(given)
        given.zero_()  # behind what has read it
        plan.forward()
        out = torch.full_like(source, float("nan"))
        assert plan.read(out=out) is out
        doubled = out + out  # behind what has written it
        plan.inverse()  # behind what has read the parts
        close(doubled.cpu().numpy(), 2 * expected)
        close(plan.read(), 50 * x)
    torch.cuda.set_device(0)


def test_cupy_s_arrays(two, rng, cupy):
    x = drawn(rng, (128, 130))
    with dp.fft.MultiGpuPlan(two, x.shape) as plan, cupy.cuda.Device(two[1].ordinal):
        plan.write(cupy.asarray(x)).forward()
        out = cupy.zeros(x.shape, x.dtype)
        close(cupy.asnumpy(plan.read(out=out)), right(x, x.shape))


def test_parts_are_ordered_with_streams(two, rng):
    """Written and read on other streams, without waiting for anything."""
    x = drawn(rng, (512, 516))
    others = [device.stream() for device in two]
    with dp.fft.MultiGpuPlan(two, x.shape) as plan:
        plan.write(x)
        for turn in range(2, 12):
            # `factors` multiplies element by element: a kernel of each part's own GPU, on another stream.
            plan.write(x)
            for other, part in zip(others, plan.parts, strict=True):
                with other:
                    scale = part.device.array(np.float32(turn))
                    dp.dft(part, "c2c", axes=(), factors=scale, out=part)
            plan.forward()
            copies = []
            for other, part in zip(others, plan.parts, strict=True):
                with other:
                    copies.append(part.copy())
            pieces = plan.split(right(turn * x, x.shape))
            plan.inverse()
            for copy, piece in zip(copies, pieces, strict=True):
                close(copy.numpy(), piece)
            close(plan.read(), turn * x)


def test_a_filter_in_parts(two, rng):
    x, factors = drawn(rng, (64, 96, 48), "f32"), rng.standard_normal((64, 96, 25)).astype("f4")
    with dp.fft.MultiGpuPlan(two, x.shape, "f32") as plan:
        plan.write(x).forward()
        for part, piece in zip(plan.parts, plan.split(factors), strict=True):
            dp.dft(part, "c2c", axes=(), factors=part.device.array(piece), out=part)
        expected = np.fft.irfftn(np.fft.rfftn(x.astype("f8")) * factors, x.shape, axes=(0, 1, 2))
        found = plan.inverse().read()
        assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)


# -- contexts and memory ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", [0, 1])
def test_the_current_context_stays(two, rng, number):
    x = drawn(rng, (64, 66))
    driver.cuCtxSetCurrent(two[number].context.handle)
    number = two[number].ordinal
    try:
        for shape in (x.shape, 1 << 12):
            given = x if shape == x.shape else drawn(rng, shape)
            plan = dp.fft.MultiGpuPlan(two, shape)
            steps = (
                lambda plan=plan, given=given: plan.write(given),
                plan.forward,
                plan.inverse,
                plan.forward,
                plan.read,
                lambda plan=plan, given=given: plan.write(two[1].array(given)),
                lambda plan=plan: plan.read(two[0].empty(plan.shape, "c64")),
                plan.close,
            )
            assert chosen() == number
            for step in steps:
                step()
                assert chosen() == number
            made = dp.fft.MultiGpuPlan(two, shape)
            del made, plan, steps
            gc.collect()
            assert chosen() == number
    finally:
        driver.cuCtxSetCurrent(two[0].context.handle)


def test_torch_s_choice_of_a_gpu_stays(two, rng, torch):
    torch.cuda.set_device(0)
    x = drawn(rng, (64, 66))
    with dp.fft.MultiGpuPlan(two, x.shape) as plan:
        plan.write(x).forward().read()
        assert torch.cuda.current_device() == 0
    assert torch.cuda.current_device() == 0
    assert torch.ones(3, device="cuda").device.index == 0


def free(devices):
    """Bytes of each GPU, once nothing waits to be let go of."""
    for _ in range(2):  # memory goes once both are done with it
        for device in devices:
            device.synchronize()
            device.trim()
    found = []
    for device in devices:
        with device.context:
            found.append(int(driver.cuMemGetInfo()[0]))
    return found


def left_by_an_error(devices, shape):
    with dp.fft.MultiGpuPlan(devices, shape) as plan:
        plan.forward()
        raise KeyError


@pytest.mark.parametrize("how", ["close", "error", "collected", "one axis"])
def test_memory_is_given_back(two, how):
    shape = 1 << 24 if how == "one axis" else (4096, 4096)  # 128 MiB
    with dp.fft.MultiGpuPlan(two, shape) as plan:  # what cuFFT keeps for its kernels is there then
        plan.forward().inverse()
    del plan
    before = free(two)
    for _ in range(3):
        if how == "error":
            with pytest.raises(KeyError):
                left_by_an_error(two, shape)
        else:
            plan = dp.fft.MultiGpuPlan(two, shape)
            plan.forward().inverse()
            if how != "collected":
                plan.close()
                plan.close()
            del plan
        gc.collect()
        for left, now in zip(before, free(two), strict=True):
            assert now >= left - 16 * MIB


def test_a_part_that_is_kept_keeps_its_memory(two, rng):
    x = drawn(rng, (64, 66))
    with dp.fft.MultiGpuPlan(two, x.shape) as plan:
        plan.write(x)
        kept = plan.parts
    with pytest.raises(Closed):
        plan.forward()
    others = [dp.fft.MultiGpuPlan(two, x.shape).write(np.zeros_like(x)) for _ in range(3)]
    assert np.array_equal(np.concatenate([part.numpy() for part in kept]), x)
    for other in others:
        other.close()


def test_many_plans(two, rng):
    x = drawn(rng, (32, 34))
    for _ in range(40):
        with dp.fft.MultiGpuPlan(two, x.shape) as plan:
            close(plan.write(x).forward().read(), right(x, x.shape))


def test_a_descriptor_is_as_the_binding_has_it(two):
    with dp.fft.MultiGpuPlan(two, (64, 64)) as plan:
        memory = plan._xt._memory
        whole = cufft.cudaXtDesc.from_address(memory.descriptor.descriptor)
        assert (whole.nGPUs, list(whole.GPUs[:2])) == (2, [device.ordinal for device in two])
        assert all(size >= 64 * 64 * 8 // 2 for size in memory.sizes)
        for device, address in zip(two, memory.addresses, strict=True):
            attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_CONTEXT  # cuda-python says 0 of any ordinal
            assert int(driver.cuPointerGetAttribute(attribute, address)) == int(device.context.handle)
        assert ctypes.sizeof(cufft.cudaXtDesc) == 8 + 64 * 4 + 2 * 64 * 8 + 8
