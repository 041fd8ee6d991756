"""This library's own kernels of BLAS: compiled for the CPU and run through their rows' cases; extremes; the plan."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from cudabind import driver as real_driver
from cudabind.errors import CudaDriverError, LibraryNotFound
from dispatch.errors import NoRow
from dispatch.keys import C128, F16, F32, F64, HOST, Arch
from dispatch.libraries.nvrtc import launching
from dispatch.libraries.nvrtc.compiled import compiled
from dispatch.ops.blas import level1_kernels
from dispatch.ops.blas.cases import cases
from dispatch.ops.blas.level1_kernels import (
    COUNTER,
    MIN_ELEMENTS,
    THREADS,
    Choice,
    choice_of,
    large_and_dense,
    own_level1,
)
from dispatch.table.own_blas import GPU_ROWS, HOST_ROWS
from dispatch.table.select import select
from dispatch.testing.roundoff import as_on_a_gpu

spec = importlib.util.spec_from_file_location("own_on_cpu", Path(__file__).with_name("own_on_cpu.py"))
own_on_cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(own_on_cpu)

H100 = Arch(90)
ROWS = [row for row in GPU_ROWS if row.op in level1_kernels.SOURCES]
rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
CHOICES = [
    Choice(op, real, n)
    for op in level1_kernels.SOURCES
    for real in level1_kernels.NAMES
    for n in (1, 16 // real.itemsize)
]


@pytest.fixture
def dev():
    return dp.device("host")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return own_on_cpu.blocks_on_cpu.InBlocks(tmp_path_factory.mktemp("blas"))


@pytest.fixture
def executor(on_cpu, monkeypatch):
    """One whose plans launch on the CPU."""
    return own_on_cpu.executor_on(on_cpu, monkeypatch)


def norm(executor, x):
    """That of a vector on the host, by the kernel."""
    request = dp.Nrm2Request(x, out=dp.device("host").zeros((), level1_kernels.REAL.get(x.dtype, x.dtype)))
    own_level1(request, executor, GPU_ROWS[0]).enqueue(request.arguments({}))
    return float(request.out.item())


# -- rows -----------------------------------------------------------------------------------------------------------
@rows
def test_a_plan_run_on_the_cpu_passes_the_cases(row, dev, rng, executor):
    """Each twice, at other addresses and with other numbers, by one plan."""
    vectors = set()
    for case in cases(row):
        with as_on_a_gpu():
            checks = [case.check(dev, rng) for _ in range(2)]
        if large_and_dense(checks[0].request):
            continue
        plan = None
        vectors.add(choice_of(checks[0].request).vector)
        for check in checks:
            outputs = dev.executor().outputs(check.request)
            plan = plan or own_level1(check.request, executor, row)
            plan.enqueue(check.request.arguments(outputs))
            check.verify(check.request.result(outputs))
    assert len(vectors) == (1 if row.dtypes[0] is C128 else 2)  # whose elements are 16 bytes


@rows
def test_large_dense_vectors_are_this_library_s_and_all_others_cublas_s(row, dev):
    dtype = row.dtypes[0]
    kind = dp.AxpyRequest if row.op == "axpy" else dp.Nrm2Request

    def taken(x, arch=H100, **given):
        return select(kind(*([x] * (1 + (row.op == "axpy"))), **given), arch)

    long = dev.zeros((2 * MIN_ELEMENTS,), dtype)
    assert taken(long) is row
    assert taken(long[1 : MIN_ELEMENTS + 1]) is row
    assert taken(long, library="own") is row
    small, dense = (
        "needs vectors of 65536 elements or more, x has 65535",
        "Nearest that works: .*needs x dense, has .*copy it",
    )
    for x, said in ((long[: MIN_ELEMENTS - 1], small), (long[::2], dense), (long[::-1], dense)):
        assert taken(x).library == "cublas"
        with pytest.raises(NoRow, match=said):
            taken(x, library="own")
    assert taken(long, library="cublas").library == "cublas"
    assert taken(long, HOST, library="cublas").stands_for == "cublas"
    assert taken(long, HOST) in HOST_ROWS


def test_what_begins_between_two_elements_is_refused(dev):
    x = dev.zeros((MIN_ELEMENTS + 1,), "f64")
    apart = dp.Tensor(x.storage, x.ptr + 4, dev.layout(F64, (MIN_ELEMENTS,), (1,), x.ptr + 4))
    assert large_and_dense(dp.Nrm2Request(apart)) == "x: needs f64 at multiples of 8 bytes, has 4: copy it"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: f"{choice.op} {choice.real} {choice.vector}")
def test_every_kernel_compiles(choice, arch):
    try:
        assert len(compiled(choice.source, choice.op, (f"-arch={arch}", *choice.options))) > 1000
    except LibraryNotFound as error:
        pytest.skip(str(error))


def test_blocks_are_as_many_as_have_something_to_do_or_are_at_work_at_once():
    assert Choice("nrm2", F32, 4).blocks(MIN_ELEMENTS, 528) == 16
    assert Choice("nrm2", F32, 4).blocks(MIN_ELEMENTS + 1, 528) == 17
    assert Choice("axpy", F16, 8).blocks(1 << 33, 528) == 528
    assert Choice("axpy", F16, 8).blocks(1 << 33, None) == 1 << 21


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("operands", [2, 3])
def test_blocks_of_axpy_go_on_where_the_cache_holds_all_operands(operands, dtype, dev, rng, executor):
    n = MIN_ELEMENTS * 3
    for missing in (0, 1):
        x, y = (dev.array(rng.integers(-3, 4, n), dtype) for _ in range(2))
        expected = 2 * x.numpy() + y.numpy()
        executor.device.l2_bytes = operands * n * x.dtype.itemsize - missing
        request = dp.AxpyRequest(x, y, alpha=2, out=y if operands == 2 else None)
        outputs = dev.executor().outputs(request)
        own_level1(request, executor, ROWS[0]).enqueue(request.arguments(outputs))
        np.testing.assert_array_equal(request.result(outputs).numpy(), expected)
        assert executor.launched[-1] == (
            n * x.dtype.itemsize // (16 * THREADS * level1_kernels.UNROLLED["axpy"]) if missing else 12
        )


def test_blocks_of_a_norm_go_on_whatever_the_cache_holds(dev, executor):
    executor.device.l2_bytes = 0
    norm(executor, dev.zeros((MIN_ELEMENTS * 3,)))
    assert executor.launched == [level1_kernels.BLOCKS * own_on_cpu.PROCESSORS]


def test_a_launch_that_fails_raises_what_the_device_says_of_it(dev, executor, monkeypatch):
    done = []
    executor.stream.done = lambda: done.append(True)
    monkeypatch.setattr(launching.driver.cuLaunchKernel, "unchecked", lambda *_: 701)
    monkeypatch.setattr(launching.driver, "error", real_driver.error, raising=False)
    request = dp.AxpyRequest(*[dev.zeros((MIN_ELEMENTS,))] * 2)
    plan = own_level1(request, executor, ROWS[0])
    with pytest.raises(CudaDriverError, match="cuLaunchKernel failed with CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"):
        plan.enqueue((8, 16, 24, 1.0))
    assert done


# -- norms at the edge ----------------------------------------------------------------------------------------------
SCALES = (1e200, 1e-200, 1e308, 5e-324, 1e-310, 2.0**486, 2.0**-511, 1e150, 1e-155)


@pytest.mark.parametrize("dtype", ["f64", "c128"])
def test_no_norm_overflows_or_vanishes_on_its_way(dtype, dev, rng, executor):
    """One of each scale, and of each two of them, held to sums of Python's whole numbers and fractions."""
    pattern = rng.uniform(0.25, 1, 64)
    for one in SCALES:
        for other in SCALES:
            x = np.zeros(MIN_ELEMENTS * (2 if dtype == "c128" else 1))
            least = min(one, other) if 1e308 in (one, other) else None
            x[100:164], x[40_000:40_064] = pattern * one, pattern[::-1] * other
            if least is not None:  # few of the largest, so that the norm is a number
                x[100:164][2:], x[40_000:40_064][2:] = 0, 0
            found = norm(executor, dev.array(x.view(np.complex128) if dtype == "c128" else x))
            np.testing.assert_allclose(found, math.hypot(*x[x != 0]), rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [np.float32, np.complex64, np.float64, np.complex128])
def test_all_elements_may_be_as_large_or_small_as_they_can(dtype, dev, executor):
    info = np.finfo(dtype)
    for value in (float(info.max) / 300, float(info.tiny), float(info.smallest_subnormal), 0.0):
        found = norm(executor, dev.array(np.full(MIN_ELEMENTS, value, dtype)))
        assert found == pytest.approx(256 * float(info.dtype.type(value)), rel=1e-6, abs=0)
    assert norm(executor, dev.array(np.full(MIN_ELEMENTS, info.max, dtype))) == math.inf


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64", "c64", "c128"])
def test_nan_and_infinities_come_through(dtype, dev, executor):
    for place in (0, 65_535, 65_540):
        x = np.ones(MIN_ELEMENTS + 5)
        x[place] = np.nan
        assert math.isnan(norm(executor, dev.array(x).astype(dtype)))
        x[place] = -np.inf
        assert norm(executor, dev.array(x).astype(dtype)) == math.inf
        x[7] = np.nan
        assert math.isnan(norm(executor, dev.array(x).astype(dtype)))


def test_a_sum_is_the_same_each_time_and_its_counter_is_0_again(dev, rng, executor):
    x = dev.array(rng.standard_normal(MIN_ELEMENTS * 3))
    request = dp.Nrm2Request(x, out=dev.zeros((), "f64"))
    plan = own_level1(request, executor, GPU_ROWS[0])
    found = set()
    for _ in range(3):
        plan.enqueue(request.arguments({}))
        found.add(request.out.item())
        assert not executor.made[0][:COUNTER].any()
    assert len(found) == 1
    assert found.pop() == pytest.approx(np.linalg.norm(x.numpy()), rel=1e-14)
    assert THREADS == 256  # a power of two, by which sums are halved


def test_a_factor_is_rounded_once(dev, executor):
    """By a fused multiplication and addition, in single precision for 16 bits."""
    x, y = np.full(MIN_ELEMENTS, 1 + 2.0**-23, np.float32), np.full(MIN_ELEMENTS, -1.0, np.float32)
    request = dp.AxpyRequest(dev.array(x), dev.array(y), alpha=1 - 2.0**-23, out=dev.zeros((MIN_ELEMENTS,), "f32"))
    own_level1(request, executor, GPU_ROWS[0]).enqueue(request.arguments({}))
    assert set(request.out.numpy().tolist()) == {-(2.0**-46)}
