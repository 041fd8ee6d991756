"""Fourier transforms of 16 bits a part: on the host, as plans by way of f32 over a stand-in for cuFFT, and refusals."""

import importlib.util
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import HOST, Arch
from dispatch.libraries.cufft import transforms
from dispatch.ops.fft.cases import cases
from dispatch.ops.fft.cufft_half import HalfSteps
from dispatch.row_check import check_row
from dispatch.table.select import select


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stand_in = loaded(Path(__file__).parents[1] / "cufft_stand_in.py")
kernels_on_cpu = loaded(Path(__file__).with_name("kernels_on_cpu.py"))
ROWS = dp.TABLE.of("half_dft")
DTYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    return stand_in.Kernels(tmp_path_factory.mktemp("moves"), kernels_on_cpu.BEFORE)


@pytest.fixture
def executor(monkeypatch, kernels):
    return stand_in.executor_of(monkeypatch, kernels)


@pytest.mark.parametrize("row", [row for row in ROWS if row.min_arch == HOST], ids=lambda row: row.name)
def test_a_row_passes_its_cases(row, each):
    each(cases(row), lambda case, rng: check_row(row, case, dp.device("host"), rng))


@pytest.mark.parametrize("row", [row for row in ROWS if row.min_arch != HOST], ids=lambda row: row.name)
def test_what_cufft_has_not_in_16_bits_goes_by_way_of_f32(row, executor, each):
    def verified(case, rng):
        check = case.check(dp.device("host"), rng)
        request = check.request
        plan = row.call(request, executor, row)
        outputs = request.device.executor().outputs(request)
        before = np.array(request.a)
        plan.enqueue(request.arguments(outputs))
        check.verify(request.result(outputs))
        if request.out is None or request.out.ptr != request.a.ptr:
            np.testing.assert_array_equal(np.asarray(request.a), before)

    each(cases(row), verified)


def problems(monkeypatch, executor, x, **choices):
    """What plans of cuFFT are made for, and what is enqueued, where it has plans in 16 bits."""
    made = []
    monkeypatch.setattr(
        transforms,
        "make_plan",
        lambda problem, *_: made.append(problem) or transforms.CachedPlan(problem, 1, 256, (), None),
    )
    request = dp.HalfDftRequest(x, **choices)
    steps = HalfSteps(request, executor, select(request, Arch(90)))
    return steps.in_16_bits(), made, [type(step).__name__ for step in steps._steps]


def test_powers_of_2_are_cufft_s_own_in_16_bits(monkeypatch, executor):
    dev = dp.device("host")
    pairs, real = dev.zeros((6, 32, 2), "f16"), dev.zeros((6, 32), "f16")
    has, made, steps = problems(monkeypatch, executor, pairs, axes=1)
    assert (has, steps) == (True, ["Transform"])
    assert made == [((32,), (32,), 1, 32, 6, (32,), 1, 32, 6, 6, 6)]  # CUDA_C_16F is 6
    has, made, steps = problems(monkeypatch, executor, real, kind="r2c", axes=1)
    assert (has, steps) == (True, ["Transform"])
    assert made == [((32,), (32,), 1, 32, 2, (17,), 1, 17, 6, 6, 6)]  # CUDA_R_16F is 2
    has, made, steps = problems(monkeypatch, executor, pairs, kind="c2r", axes=1, s=64, norm="forward", inverse=True)
    assert (has, steps) == (True, ["Move", "Transform"])
    assert made == [((64,), (33,), 1, 33, 6, (64,), 1, 64, 2, 6, 6)]
    for x, choices in (
        (pairs, {"axes": 0}),  # 6 points
        (dev.zeros((6, 32, 2), "bf16"), {"axes": 1}),
        (pairs, {"axes": 1, "inverse": True}),  # a factor
        (pairs, {"axes": 1, "s": 64}),  # filled up
        (real, {"kind": "r2c", "axes": 1, "inverse": True, "norm": "forward"}),  # conjugates
        (real[:, ::4], {"kind": "r2c", "axes": 1}),  # real numbers apart
    ):
        assert problems(monkeypatch, executor, x, **choices) == (False, [], []), choices


@pytest.mark.parametrize("name", DTYPES)
def test_it_is_numpy_s_transform_rounded_once(name, rng):
    dev, kind = dp.device("host"), DTYPES[name]
    x = rng.standard_normal((3, 24, 2)).astype(kind)
    whole = x[..., 0].astype("f8") + 1j * x[..., 1].astype("f8")
    for inverse, right in ((False, np.fft.fft(whole)), (True, np.fft.ifft(whole))):
        got = dp.half_dft(dev.array(x), axes=-1, inverse=inverse).numpy()
        expected = np.stack((right.real, right.imag), -1)
        np.testing.assert_allclose(got.astype("f8"), expected, rtol=2 * float(ml_dtypes.finfo(kind).eps), atol=1e-5)
    real = rng.standard_normal((4, 10)).astype(kind)
    half = dp.half_dft(dev.array(real), "r2c", axes=-1)
    assert (half.shape, half.dtype) == ((4, 6, 2), name)
    back = dp.half_dft(half, "c2r", 10, -1, inverse=True)
    np.testing.assert_allclose(back.numpy().astype("f8"), real.astype("f8"), atol=8 * float(ml_dtypes.finfo(kind).eps))


def test_what_is_refused_says_what_to_do():
    dev = dp.device("host")
    with pytest.raises(BadRequest, match=r"a: got f32.*f16 or bf16.*use dft"):
        dp.half_dft(dev.zeros((4, 2), "f32"))
    with pytest.raises(BadRequest, match=r"a last axis of two.*view_as_real"):
        dp.half_dft(dev.zeros((4, 8), "f16"))
    with pytest.raises(BadRequest, match="axes"):
        dp.half_dft(dev.zeros((4, 2), "f16"), axes=1)
    with pytest.raises(BadRequest, match="out"):
        dp.half_dft(dev.zeros((8, 4, 2), "f16"), out=dev.zeros((8, 4), "f16"))
    apart = dp.HalfDftRequest(dev.zeros((2, 8), "f16").T)
    with pytest.raises(NoRow, match="adjacent"):
        select(apart, Arch(90))


def test_a_pair_begins_at_a_multiple_of_4_bytes_on_every_device():
    dev = dp.device("host")
    x = dev.zeros((34,), "f16")
    odd, even = (x[start : start + 32].reshape((16, 2)) for start in (1, 2))
    for kind in ("c2c", "c2r"):
        with pytest.raises(NoRow, match="of a at multiples of 4 bytes"):
            dp.half_dft(odd, kind, axes=-1)
        dp.half_dft(even, kind, axes=-1)
        dp.half_dft(odd.copy(), kind, axes=-1)
    with pytest.raises(NoRow, match="of out at multiples of 4 bytes"):
        dp.half_dft(dev.zeros((16, 2), "f16"), axes=-1, out=odd)
    assert dp.half_dft(x[1:33], "r2c").shape == (17, 2)
    assert "each pair at a multiple of 4 bytes" in dp.half_dft.__doc__
