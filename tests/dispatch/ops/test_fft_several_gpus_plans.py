"""Plans of cuFFT over two GPUs, over stand-ins for the driver and the library: calls, order, contexts, memory."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from cudabind.errors import CufftError
from dispatch.device.cuda import CudaDevice
from dispatch.errors import BadRequest, OutOfMemory, Refused, StaleTensor
from dispatch.libraries.cufft import peer_copies, xt_plan
from dispatch.ops.fft import multi_gpu


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stand_in_xt = loaded(Path(__file__).parents[1] / "cufft_xt_stand_in.py")
in_parts = loaded(Path(__file__).parents[1] / "fft_in_parts.py")
close, drawn, right, there_and_back = in_parts.close, in_parts.drawn, in_parts.right, in_parts.there_and_back


@pytest.fixture
def gpus(stand_in, monkeypatch):
    """`gpus(work)` calls `work(two devices, library)` on a thread of its own, and looks at the driver then."""
    driver = stand_in(2)
    monkeypatch.setattr(peer_copies, "driver", driver)
    library = stand_in_xt.install(monkeypatch, driver, [xt_plan])

    def multiplied(part, _, *, axes, factors, out):
        """What the request is: the factor over each element, on the current stream."""
        assert (axes, out.ptr) == ((), part.ptr)
        stream = part.device.executor().stream
        part.storage.use(stream, write=True)
        driver.step(stream.c_handle.value, part.ptr)
        flat = np.frombuffer((ctypes.c_char * part.nbytes).from_address(part.ptr), factors.dtype.numpy)
        flat *= factors.numpy()

    monkeypatch.setattr(multi_gpu, "dft", multiplied)

    def run(work):
        def guarded():
            devices = [CudaDevice(0, 1), CudaDevice(1, 1)]
            driver.stack[:] = [driver.contexts[0]]
            work(devices, library)
            gc.collect()
            assert driver.stack == [driver.contexts[0]], "the current context is what it was"
            for device in devices:
                device.synchronize()
                with xt_plan.relaxed():
                    device.releases.collect()
            assert (library.plans, library.descriptors, library.early) == ({}, {}, [])

        with ThreadPoolExecutor(1) as pool:
            pool.submit(guarded).result()
        assert (driver.touched, driver.early, driver.lost) == ([], [], [])

    return run


@pytest.mark.parametrize(
    ("shape", "dtype", "batch"),
    [
        (64, "c64", None),
        (1024, "c128", None),
        ((33, 34), "c64", None),
        ((33, 34), "f32", None),
        ((34, 33, 5), "c128", None),
        ((34, 33, 4), "f64", None),
        (7, "c64", 5),
        ((3, 5), "f64", 3),
    ],
)
def test_two_gpus(gpus, rng, shape, dtype, batch):
    sizes = (shape,) if isinstance(shape, int) else shape
    x = drawn(rng, sizes if batch is None else (batch, *sizes), dtype)

    def work(devices, library):
        with dp.fft.MultiGpuPlan(devices, shape, dtype, batch=batch) as plan:
            there_and_back(plan, x, sizes)
            # Tensors of either GPU, and of the host, are handed out, and gathered into.
            for device in (*devices, dp.device("host")):
                given, out = device.array(x), device.empty(x.shape, dtype)
                plan.write(given)
                given = None
                assert plan.read(out=out) is out
                assert np.array_equal(out.numpy(), x)
                made = plan.forward().read()
                out = device.empty(made.shape, made.dtype)
                assert np.array_equal(plan.read(out=out).numpy(), made)
                close(made, right(x, sizes))
                close(plan.inverse().read(), x)
            assert library.called.count("cufftXtMalloc") == (2 if batch is None and len(sizes) == 1 else 1)
        assert not library.plans
        assert not library.descriptors

    gpus(work)


def test_parts_are_ordered_with_streams(gpus, rng):
    x = drawn(rng, (33, 34))

    def work(devices, library):
        plan = dp.fft.MultiGpuPlan(devices, x.shape)
        others = [device.stream() for device in devices]
        plan.write(x)
        for other, part, piece in zip(others, plan.parts, plan.split(2 * x), strict=True):
            with other:
                part.copy_from(piece)
        close(plan.forward().read(), right(2 * x, x.shape))
        for other, part in zip(others, plan.parts, strict=True):
            with other:
                part.numpy()
        kept = plan.parts[1]
        plan.close()
        assert len(library.descriptors) == 1, "a tensor keeps the memory"
        assert len(library.plans) == 1, "and that its plan"
        expected = np.fft.fftn(2 * x)[:, 17:]
        assert np.allclose(kept.numpy(), expected, atol=1e-3)

    gpus(work)


def test_a_plan_that_nobody_closes_goes(gpus, rng):
    x = drawn(rng, (33, 34))

    def work(devices, library):
        dp.fft.MultiGpuPlan(devices, x.shape).write(x).forward()
        with pytest.raises(KeyError), dp.fft.MultiGpuPlan(devices, 64):
            raise KeyError
        assert len(library.plans) <= 1

    gpus(work)


def test_two_plans_at_once(gpus, rng):
    x, y = drawn(rng, (33, 34)), drawn(rng, (2, 40), "f32")

    def work(devices, _):
        with dp.fft.MultiGpuPlan(devices, x.shape) as one, dp.fft.MultiGpuPlan(devices, 40, "f32", batch=2) as other:
            one.write(x)
            other.write(y)
            one.forward()
            other.forward()
            close(one.read(), right(x, x.shape))
            close(other.read(), right(y, (40,)))

    gpus(work)


def test_one_gpu_may_be_named_twice(gpus, rng):
    x = drawn(rng, (33, 34))

    def work(devices, _):
        with dp.fft.MultiGpuPlan([devices[1]] * 2, x.shape) as plan:
            there_and_back(plan, x, x.shape)

    gpus(work)


def test_what_cufft_refuses_says_what_to_do(gpus):
    def work(devices, library):
        library.failing["cufftXtMakePlanMany"] = 16
        with pytest.raises(Refused, match=r"no plan for 1 transform\(s\) of \[33, 34\] over cuda:0, cuda:1.*Hint"):
            dp.fft.MultiGpuPlan(devices, (33, 34))
        library.failing["cufftXtMalloc"] = 2  # once, then what is kept for later has been given back
        dp.fft.MultiGpuPlan(devices, (33, 34)).close()
        library.failing["cufftXtExecDescriptor"] = 6
        with dp.fft.MultiGpuPlan(devices, (33, 34)) as plan, pytest.raises(CufftError, match="EXEC_FAILED"):
            plan.forward()

    gpus(work)


def test_a_gpu_without_room(gpus, monkeypatch):
    def work(devices, library):
        monkeypatch.setattr(library, "_XtMakePlanMany", lambda *_: 2)
        with pytest.raises(OutOfMemory, match=r"cuFFT has not enough memory for 1 transform.*cuda:1: .* MiB are free"):
            dp.fft.MultiGpuPlan(devices, (33, 34))

    gpus(work)


def test_gpus_of_two_architectures_and_the_host_beside_one(gpus):
    def work(devices, library):
        with pytest.raises(BadRequest, match="only GPUs, or only the host, repeated"):
            dp.fft.MultiGpuPlan([devices[0], "host"], (33, 34))
        devices[1].arch = dp.Arch(90)
        with pytest.raises(BadRequest, match="GPUs of one architecture"):
            dp.fft.MultiGpuPlan(devices, (33, 34))
        assert not library.called

    gpus(work)


def test_a_device_that_was_closed(stand_in, monkeypatch):
    driver = stand_in(2)
    library = stand_in_xt.install(monkeypatch, driver, [xt_plan])

    def work():
        devices = [CudaDevice(0, 1), CudaDevice(1, 1)]
        plan = dp.fft.MultiGpuPlan(devices, (33, 34))
        devices[1].close()
        with pytest.raises(StaleTensor):
            plan.forward()
        plan.close()
        assert "cufftXtFree" not in library.called

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def test_the_real_library_takes_the_calls():
    """Of no plan: the arguments are of the types that its functions have."""
    from cudabind.errors import LibraryNotFound
    from cudabind.sys import cufft

    c = ctypes
    try:
        cufft.cufftGetVersion(c.byref(c.c_int()))
    except LibraryNotFound as error:
        pytest.skip(str(error))
    found, kind = c.byref(cufft.cudaLibXtDesc()), cufft.cudaDataType_t
    layouts = None, 1, 0, kind(4), None, 1, 0, kind(4)
    for call in (
        lambda: cufft.cufftSetStream(7, cufft.cudaStream_t(5)),
        lambda: cufft.cufftXtSetGPUs(7, 2, (c.c_int32 * 2)(0, 1)),
        lambda: cufft.cufftXtMakePlanMany(7, 1, (c.c_int64 * 1)(64), *layouts, 1, (c.c_size_t * 2)(), kind(4)),
        lambda: cufft.cufftXtMalloc(7, c.byref(c.c_void_p()), xt_plan.NATURAL),
        lambda: cufft.cufftXtQueryPlan(7, c.byref(cufft.cufftXt1dFactors()), cufft.cufftXtQueryType(0)),
        lambda: cufft.cufftXtExecDescriptor(7, found, found, cufft.CUFFT_FORWARD),
    ):
        with pytest.raises(CufftError, match="CUFFT_INVALID_PLAN"):
            call()
    for bare in (
        cufft.cufftXtExecDescriptor.unchecked(7, found, found, c.c_int(cufft.CUFFT_INVERSE)),
        cufft.cufftXtMemcpy.unchecked(7, c.c_void_p(0), c.c_void_p(0), c.c_int(2)),
    ):
        assert bare == cufft.cufftResult.CUFFT_INVALID_PLAN


def test_a_plan_is_destroyed_once_the_others_on_its_gpus_are_idle(gpus, rng, monkeypatch):
    def work(devices, library):
        one, other = (dp.fft.MultiGpuPlan(devices, 64) for _ in range(2))
        one.write(drawn(rng, (64,), "c64")).forward()
        kind, awaited = type(one._xt.streams[0]), []
        synchronize = kind.synchronize
        note = lambda stream: (awaited.append(stream.c_handle.value), synchronize(stream))[1]  # noqa: E731
        monkeypatch.setattr(kind, "synchronize", note)
        plans = len(library.plans)
        del other
        gc.collect()
        for device in devices:
            device.releases.collect()
        assert len(library.plans) < plans
        assert {stream.c_handle.value for stream in one._xt.streams} <= {*awaited}
        one.inverse().close()  # GPUs see one another's memory as before

    gpus(work)
