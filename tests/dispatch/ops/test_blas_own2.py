"""This library's kernel for symmetric matrices: run by the CPU through its rows' cases, of few rows, too; the plan."""

import importlib.util
import itertools
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from cudabind.errors import LibraryNotFound
from dispatch.errors import NoRow
from dispatch.keys import C64, C128, F32, F64, HOST, Arch
from dispatch.libraries.nvrtc.compiled import compiled
from dispatch.ops.blas import symmetric_kernels
from dispatch.ops.blas.cases import cases
from dispatch.ops.blas.cases2 import Form, check
from dispatch.ops.blas.choices import FillMode
from dispatch.ops.blas.symmetric_kernels import MAX_ROWS, MIN_ROWS, Choice, choice_of, large_and_in_lines, own_symmetric
from dispatch.table.own_blas import GPU_ROWS, HOST_ROWS
from dispatch.table.select import select
from dispatch.testing.roundoff import as_on_a_gpu

spec = importlib.util.spec_from_file_location("own_on_cpu", Path(__file__).with_name("own_on_cpu.py"))
own_on_cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(own_on_cpu)

H100 = Arch(90)
ROWS = [row for row in GPU_ROWS if row.op in ("symv", "hemv")]
rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
SIZES = (1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 257)
CHOICES = [
    Choice(dtype, hermitian, *flags)
    for dtype in (F32, F64, C64, C128)
    for hermitian in (False, True)[: 1 + dtype.is_complex]
    for flags in itertools.product((True, False), repeat=3)
    if dtype is not C128 or flags[2]  # whose elements are 16 bytes
]


@pytest.fixture
def dev():
    return dp.device("host")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return own_on_cpu.blocks_on_cpu.InBlocks(tmp_path_factory.mktemp("symmetric"))


@pytest.fixture
def executor(on_cpu, monkeypatch):
    """One whose plans launch on the CPU."""
    return own_on_cpu.executor_on(on_cpu, monkeypatch)


def run(request, executor, dev):
    """What the kernel gives for a request of the host."""
    outputs = dev.executor().outputs(request)
    own_symmetric(request, executor, ROWS[0]).enqueue(request.arguments(outputs))
    return request.result(outputs)


# -- rows -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.name, marks=[pytest.mark.compiles] if number else []) for number, row in enumerate(ROWS)],
)
def test_a_plan_run_on_the_cpu_passes_the_cases(row, dev, rng, executor):
    """Each twice, at other addresses and with other numbers, by one plan."""
    chosen = set()
    for case in cases(row):
        with as_on_a_gpu():
            checks = [case.check(dev, rng) for _ in range(2)]
        assert large_and_in_lines(checks[0].request) == ""
        plan = own_symmetric(checks[0].request, executor, row)
        chosen.add(choice_of(checks[0].request))
        for one in checks:
            outputs = dev.executor().outputs(one.request)
            plan.enqueue(one.request.arguments(outputs))
            one.verify(one.request.result(outputs))
    assert chosen == {one for one in CHOICES if one.dtype is row.dtypes[0] and one.hermitian is (row.op == "hemv")}


@rows
def test_large_matrices_are_this_library_s_and_all_others_cublas_s(row, dev):
    dtype, kind = row.dtypes[0], dp.SymvRequest if row.op == "symv" else dp.HemvRequest

    def taken(n, arch=H100, **given):
        return select(kind(dev.empty((n, n), dtype), dev.zeros((n,), dtype), **given), arch)

    for n in (MIN_ROWS, MAX_ROWS):
        assert taken(n) is row
        assert taken(n, library="own") is row
        assert taken(n, HOST) in HOST_ROWS
        assert taken(n, library="cublas").library == "cublas"
    for n in (MIN_ROWS - 1, MAX_ROWS + 1):
        assert taken(n).library == "cublas"
        with pytest.raises(NoRow, match="needs 256 to 6144 rows, a is"):
            taken(n, library="own")


def test_what_the_kernel_cannot_read_is_refused_with_its_reason(dev):
    n = MIN_ROWS
    a, x = dev.zeros((2 * n, 2 * n)), dev.zeros((2 * n,))
    broadcast = dp.from_dlpack(np.broadcast_to(dev.zeros((1,)).numpy(), (n,)))
    shifted = dp.Tensor(x.storage, x.ptr + 2, dev.layout(F32, (n,), (1,), x.ptr + 2))
    for request, reason in (
        (dp.SymvRequest(a[::2, ::2], x[:n]), "needs a row-major or column-major, with adjacent elements in each line"),
        (dp.SymvRequest(a[:n, :n], broadcast), "needs x with a stride other than 0"),
        (dp.SymvRequest(a[:n, :n], shifted), "x: needs f32 at multiples of 4 bytes, has 2: copy it"),
        (dp.SymvRequest(a[:n, :n], x[:n], y=shifted, beta=1), "y: needs f32 at multiples of 4 bytes"),
    ):
        assert large_and_in_lines(request).startswith(reason)
    for request in (dp.SymvRequest(a[:n, :n], x[::-2]), dp.SymvRequest(a[n:, n:].mT, x[:n], y=x[n:], out=x[n:])):
        assert large_and_in_lines(request) == ""


# -- the kernel -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "arch", [pytest.param(one, marks=pytest.mark.compiles) for one in ("sm_75", "sm_100")] + ["sm_90"]
)
@pytest.mark.parametrize("choice", CHOICES, ids=lambda one: "-".join(map(str, map(int, one[1:]))) + f"-{one.dtype}")
def test_every_kernel_compiles(choice, arch):
    try:
        assert len(compiled(symmetric_kernels.SYMMETRIC, "symmetric", (f"-arch={arch}", *choice.options))) > 1000
    except LibraryNotFound as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", [C64, *(pytest.param(one, marks=pytest.mark.compiles) for one in (F32, F64, C128))])
def test_matrices_of_any_size(dtype, dev, rng, executor):
    """Also such as `large_and_in_lines` leaves to others."""
    for number, n in enumerate(SIZES):
        for uplo, row in itertools.product(FillMode, (True, False)):
            beta, steps = ((0.0, (1, 1)), (1.5, (-1, 2)), (0.0, (3, -2)))[number % 3]
            op = "hemv" if dtype.is_complex and (number + row) % 2 else "symv"
            aligned = (number // 3 + row) % 2 == 0
            form = Form((n, n), (0, 0), {"uplo": uplo}, row, steps, -0.5, beta, "apart", has_out=True, aligned=aligned)
            with as_on_a_gpu():
                one = check(op, dtype, form, f"{n} {uplo.name} {row} {aligned}", dev, rng)
            one.verify(run(one.request, executor, dev))


@pytest.mark.parametrize("uplo", ["lower", "upper"])
def test_each_tile_has_a_block(uplo, dev, executor):
    """Those on the diagonal, which alone have something to do for a factor of 0."""
    n = 64 * 48 - 1
    a, y = dev.empty((n, n)), dev.array(np.arange(n), "f32")
    made = run(dp.SymvRequest(a, y, y=y, alpha=0, beta=2, uplo=uplo), executor, dev)
    np.testing.assert_array_equal(made.numpy(), 2 * np.arange(n))
    assert executor.launched == [48 * 49 // 2]


def test_a_result_is_the_same_each_time_and_counters_are_0_again(dev, rng, executor):
    a, x = dev.array(rng.standard_normal((300, 300))), dev.array(rng.standard_normal(300))
    request = dp.SymvRequest(a, x, out=dev.zeros((300,), "f64"))
    plan = own_symmetric(request, executor, ROWS[0])
    found = set()
    for _ in range(3):
        plan.enqueue(request.arguments({}))
        found.add(request.out.numpy().tobytes())
        assert not executor.made[0][: 5 * symmetric_kernels.COUNTER].any()
    assert len(found) == 1


@pytest.mark.parametrize("dtype", ["f32", "c128"])
def test_what_a_factor_of_0_multiplies_is_not_read(dtype, dev, executor):
    nan, y = dev.array(np.full((300, 300), np.nan), dtype), dev.array(np.arange(300.0), dtype)
    for uplo in ("lower", "upper"):
        for a in (nan, nan.mT):
            made = run(dp.SymvRequest(a, a[0], y=y, alpha=0, beta=2, uplo=uplo), executor, dev)
            np.testing.assert_array_equal(made.numpy(), 2 * np.arange(300))
            made = run(dp.SymvRequest(a, a[0], y=a[1], alpha=0, beta=0, uplo=uplo), executor, dev)
            np.testing.assert_array_equal(made.numpy(), 0)


def test_infinities_and_nan_reach_what_reads_them(dev, rng, executor):
    """An infinite element is no NaN where it meets a 0 that stands in the other triangle."""
    a = rng.uniform(1, 2, (300, 300))
    x = np.ones(300)
    x[130] = np.inf
    for uplo, kept in (("lower", np.tril(a)), ("upper", np.triu(a))):
        made = run(dp.SymvRequest(dev.array(kept), dev.array(x), uplo=uplo), executor, dev).numpy()
        np.testing.assert_array_equal(made, np.inf)
        kept[200, 140] = kept[140, 200] = np.nan
        made = run(dp.SymvRequest(dev.array(kept), dev.array(np.ones(300)), uplo=uplo), executor, dev).numpy()
        assert np.flatnonzero(np.isnan(made)).tolist() == [140, 200]
