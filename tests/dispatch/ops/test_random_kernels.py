"""Kernels of numbers drawn element by element, run on the CPU over many elements: they are NumPy's, step for step."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.ops.random.draws import draws_kernel
from dispatch.ops.random.reference_drawn import Draws, evaluate_drawn, words_of

spec = importlib.util.spec_from_file_location("random_on_cpu", Path(__file__).with_name("random_on_cpu.py"))
random_on_cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(random_on_cpu)


@pytest.fixture
def dev():
    return dp.device("host")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return random_on_cpu.OnCpu(tmp_path_factory.mktemp("random"))


def drawn_by_kernel(on_cpu, request, **choices):
    """The numbers that a request's kernel gives."""
    filled = request.replace(out=request.device.empty(request.shape, request.kind))
    on_cpu.run(draws_kernel(filled), filled, **choices)
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
