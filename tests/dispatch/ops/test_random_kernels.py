"""Kernels of numbers drawn element by element, run on the CPU over many elements: they are NumPy's, step for step."""

import importlib.util
import itertools
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.libraries.nvrtc.kernel import Kernel
from dispatch.ops.random import philox_kernels, single_precision
from dispatch.ops.random.distribution_kernels import draws_kernel
from dispatch.ops.random.reference import evaluate
from dispatch.ops.random.reference_distributions import Draws, evaluate_drawn, words_of
from dispatch.ops.random.single_precision import is_single

spec = importlib.util.spec_from_file_location("random_on_cpu", Path(__file__).with_name("random_on_cpu.py"))
random_on_cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(random_on_cpu)


@pytest.fixture
def dev():
    return dp.device("host")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return random_on_cpu.OnCpu(tmp_path_factory.mktemp("random"))


def drawn_by_kernel(on_cpu, request, options=(), **choices):
    """The numbers that a request's kernel gives."""
    filled = request.replace(out=request.device.empty(request.shape, request.kind))
    kernel = draws_kernel(filled)
    on_cpu.run(Kernel(kernel.source, kernel.function, kernel.launch, (*kernel.options, *options)), filled, **choices)
    return filled.out.numpy()


@pytest.mark.parametrize("count", [3, 1000, 3 << 30, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, 3 << 61, 1 << 63, 1 << 64])
def test_whole_numbers_of_any_range_are_numpys(count, dev, on_cpu):
    for dtype, low in (("u64", 0), ("u64", 2**64 - count), ("i64", -(2**63)), ("u32", 0), ("i32", -(2**31))):
        if count > 2 ** dp.Dtype.of(dtype).bits:
            continue
        request = dp.RandomIntegersRequest(dev, 20_001, 5, 2, low=low, high=low + count, out_dtype=dtype)
        right = evaluate_drawn(request)["out"]
        np.testing.assert_array_equal(drawn_by_kernel(on_cpu, request), right)
        assert right.min() >= low
        assert right.max() <= low + count - 1


def test_a_word_that_is_one_too_many_for_a_range_is_drawn_anew(dev, on_cpu):
    """Of 3 * 2^30 a quarter of all words is: the numbers are as likely all the same."""
    request = dp.RandomIntegersRequest(dev, 300_000, 5, high=3 << 30, out_dtype="u32")
    found = drawn_by_kernel(on_cpu, request)
    words = words_of(Draws(5, np.arange(300_000)), np.arange(300_000))
    at_once = (words * np.uint64(3 << 30) & np.uint64(0xFFFFFFFF)) >= 1 << 30
    assert 0.74 < at_once.mean() < 0.76
    np.testing.assert_array_equal(found[at_once], (words * np.uint64(3 << 30) >> np.uint64(32))[at_once])
    counts = np.bincount(found >> 28, minlength=12)
    assert abs(counts - 25_000).max() < 5 * np.sqrt(25_000)
    assert len(np.unique(found[~at_once])) > 0.99 * (~at_once).sum()


def test_whole_numbers_follow_from_seed_and_place_alone(dev, on_cpu):
    for high, dtype in ((3 << 30, "u32"), (3 << 61, "i64"), (1000, "i64")):
        request = dp.RandomIntegersRequest(dev, 1003, 5, 6, high=high, out_dtype=dtype)
        whole = drawn_by_kernel(on_cpu, request)
        np.testing.assert_array_equal(drawn_by_kernel(on_cpu, request, grid=(3, 32)), whole)
        part = request.replace(size=500, offset=6 + 401)
        np.testing.assert_array_equal(drawn_by_kernel(on_cpu, part), whole[401:901])
        replays = np.array([1], np.uint32)
        again = drawn_by_kernel(on_cpu, request, replays=replays.ctypes.data)
        assert (again == whole).mean() < 0.02


# -- numbers of 8 bytes, two to a thread ------------------------------------------------------------------------------
WIDE = {
    "bits": (dp.RandomBitsRequest, {"out_dtype": "u64"}),
    "uniform": (dp.RandomUniformRequest, {"out_dtype": "f64", "low": -1.0}),
    "uniform, half open": (dp.RandomUniformRequest, {"out_dtype": "f64", "interval": "[0,1)"}),
    "normal": (dp.RandomNormalRequest, {"out_dtype": "f64"}),
    "lognormal": (dp.RandomLognormalRequest, {"out_dtype": "f64"}),
    "exponential": (dp.RandomExponentialRequest, {"out_dtype": "f64"}),
    "whole numbers of 32 bits": (dp.RandomIntegersRequest, {"high": 3 << 30, "out_dtype": "i64"}),
    "whole numbers of 64 bits": (dp.RandomIntegersRequest, {"high": 3 << 62, "out_dtype": "u64"}),
    "binomial": (dp.RandomBinomialRequest, {"n": 100, "p": 0.3, "out_dtype": "i64"}),
    "narrow whole numbers": (dp.RandomIntegersRequest, {"high": 3 << 30, "out_dtype": "u32"}),
}
UNTOUCHED = 0xA5


@pytest.mark.parametrize("name", WIDE)
def test_any_part_of_a_sequence_is_written_and_nothing_beside_it(name, dev, on_cpu):
    """From the middle of pairs and quads, few numbers or many, into memory that allows stores of 16 bytes or does not.

    Quads from 65,536 on are of the first subsequence again. By as many threads as a GPU has, and by fewer.
    """
    kind, given = WIDE[name]
    op, size = kind.op, dp.Dtype.of(given["out_dtype"]).itemsize
    for base in (0, 4 * 65_536 - 8):
        request = kind(dev, 32, 7, base, **given)
        whole = (evaluate if op in philox_kernels.MODES else evaluate_drawn)(request)["out"]
        for offset, count, shift in itertools.product(range(5), (1, 2, 3, 4, 5, 7, 8, 17), (0, 1)):
            memory = np.full(count * size + 64, UNTOUCHED, np.uint8)
            start = -memory.ctypes.data % 16 + 16 + shift * size
            place = memory[start : start + count * size].view(whole.dtype)
            request = kind(dev, count, 7, base + offset, **given)
            filled = request.replace(out=dp.from_dlpack(place))
            kernel = philox_kernels.kernel_of(filled) if op in philox_kernels.MODES else draws_kernel(filled)
            for grid in (None, (1, 2)):
                memory[:] = UNTOUCHED
                on_cpu.run(kernel, filled, grid=grid)
                right = whole[offset : offset + count]
                if whole.dtype.kind == "f":
                    np.testing.assert_allclose(place, right, rtol=1e-14, atol=1e-15)
                else:
                    np.testing.assert_array_equal(place, right)
                assert (memory[:start] == UNTOUCHED).all()
                assert (memory[start + count * size :] == UNTOUCHED).all()


# -- rejection in f32 -------------------------------------------------------------------------------------------------
SINGLES = {
    "gamma of a large shape": (dp.RandomGammaRequest, {"shape_parameter": 2.5, "scale": 3.0}),
    "gamma of shape 1": (dp.RandomGammaRequest, {"shape_parameter": 1.0}),
    "gamma of a small shape": (dp.RandomGammaRequest, {"shape_parameter": 0.3}),
    "gamma of the least shape": (dp.RandomGammaRequest, {"shape_parameter": 0.05}),
    "gamma of shape 50": (dp.RandomGammaRequest, {"shape_parameter": 50.0}),
    "gamma of shape 51": (dp.RandomGammaRequest, {"shape_parameter": 51.0, "scale": 1e-5}),
    "gamma of a huge shape": (dp.RandomGammaRequest, {"shape_parameter": 1e12}),
    "beta": (dp.RandomBetaRequest, {"a": 2.0, "b": 3.0}),
    "beta of small shapes": (dp.RandomBetaRequest, {"a": 0.3, "b": 0.2}),
    "beta of the least shapes": (dp.RandomBetaRequest, {"a": 0.05, "b": 0.05}),
    "beta of a small and a large shape": (dp.RandomBetaRequest, {"a": 40.0, "b": 0.7}),
    "truncated": (dp.RandomTruncatedNormalRequest, {}),
    "truncated, half": (dp.RandomTruncatedNormalRequest, {"low": 0.0, "high": np.inf}),
    "truncated, moved": (dp.RandomTruncatedNormalRequest, {"low": -1.0, "high": 7.0, "mean": 1.0, "std": 2.0}),
    "truncated, narrow": (dp.RandomTruncatedNormalRequest, {"low": -0.5, "high": 1.0}),
    "truncated, exponential": (dp.RandomTruncatedNormalRequest, {"low": 1.5, "high": 9.0, "mean": 1.0}),
    "truncated, exponential, ends": (dp.RandomTruncatedNormalRequest, {"low": 0.2, "high": 2.5}),
    "truncated, far": (dp.RandomTruncatedNormalRequest, {"low": 30.0, "high": np.inf}),
    "truncated, very far": (dp.RandomTruncatedNormalRequest, {"low": -np.inf, "high": -1e6}),
    "truncated, uniform below": (dp.RandomTruncatedNormalRequest, {"low": -3.5, "high": -3.3}),
}
MANY = 400_000


def apart(found, right):
    """How many numbers are others than those of the reference, by more than f32 makes of the same candidates."""
    return int((np.abs(found - right) > 3e-4 * np.abs(right) + 1e-5 * np.abs(right).std() + 1e-37).sum())


@pytest.mark.parametrize("name", SINGLES)
def test_candidates_are_taken_in_f32_as_in_f64(name, dev, on_cpu):
    """Functions of f32 are off here by twice as much as on a GPU; a candidate decided otherwise is another number."""
    kind, given = SINGLES[name]
    request = kind(dev, MANY, 11, 6, **given)
    assert is_single(request)
    right = evaluate_drawn(request)["out"]
    found = drawn_by_kernel(on_cpu, request, options=("-DNOISE=2.0f",)).astype(np.float64)
    assert apart(found, right) == 0
    if request.op == "random_truncated_normal":
        ends = np.array([request.low, request.high]).astype(np.float32)
        assert ends[0] <= found.min()
        assert found.max() <= ends[1]


@pytest.mark.parametrize("name", ["gamma of shape 1", "beta", "truncated, half", "truncated, narrow"])
def test_without_a_margin_some_candidates_are_decided_otherwise(name, dev, on_cpu, monkeypatch):
    monkeypatch.setattr(single_precision, "NEAR", 0.0)
    kind, given = SINGLES[name]
    request = kind(dev, 4 * MANY, 11, 6, **given)
    found = drawn_by_kernel(on_cpu, request, options=("-DMARGIN=0.0f", "-DNOISE=2.0f"))
    assert apart(found.astype(np.float64), evaluate_drawn(request)["out"]) > 0


@pytest.mark.parametrize("name", ["gamma of a large shape", "beta", "truncated", "truncated, narrow"])
def test_numbers_of_fewer_bits_are_those_of_f32_rounded(name, dev, on_cpu):
    kind, given = SINGLES[name]
    wide = drawn_by_kernel(on_cpu, kind(dev, 20_000, 3, **given))
    for dtype in ("f16", "bf16"):
        found = drawn_by_kernel(on_cpu, kind(dev, 20_000, 3, out_dtype=dtype, **given))
        np.testing.assert_array_equal(found, wide.astype(found.dtype))


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (dp.RandomGammaRequest, {"shape_parameter": 0.0}),
        (dp.RandomGammaRequest, {"shape_parameter": 0.01}),
        (dp.RandomGammaRequest, {"shape_parameter": 2.0, "scale": 1e35}),
        (dp.RandomGammaRequest, {"shape_parameter": 2.0, "scale": 0.0}),
        (dp.RandomBetaRequest, {"a": 1e-3, "b": 2.0}),
        (dp.RandomTruncatedNormalRequest, {"low": 1e20, "high": 2e20}),
        (dp.RandomTruncatedNormalRequest, {"mean": 1e35, "std": 1e35, "low": -np.inf, "high": np.inf}),
        (dp.RandomTruncatedNormalRequest, {"std": 1e-35}),
    ],
)
def test_parameters_that_f32_does_not_carry_are_drawn_in_f64(kind, given, dev, on_cpu):
    request = kind(dev, 5000, 11, 6, **given)
    assert not is_single(request)
    assert not is_single(kind(dev, 5, out_dtype="f64"))
    right = evaluate_drawn(request)["out"]
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(drawn_by_kernel(on_cpu, request), right.astype(np.float32), rtol=2e-7)


def test_numbers_drawn_in_f32_follow_from_seed_and_place_alone(dev, on_cpu):
    for name in ("gamma of a large shape", "beta of small shapes", "truncated", "truncated, exponential"):
        kind, given = SINGLES[name]
        request = kind(dev, 1003, 5, 6, **given)
        whole = drawn_by_kernel(on_cpu, request)
        np.testing.assert_array_equal(drawn_by_kernel(on_cpu, request, grid=(3, 32)), whole)
        np.testing.assert_array_equal(drawn_by_kernel(on_cpu, request.replace(size=500, offset=407)), whole[401:901])
        replays = np.array([1], np.uint32)
        assert (drawn_by_kernel(on_cpu, request, replays=replays.ctypes.data) == whole).mean() < 0.02
