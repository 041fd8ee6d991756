"""Counts by tables: their probabilities against exact ones, words just at a threshold, kernels and statistics."""

import importlib.util
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.ops.random.alias_table import alias_table, binomial_table, poisson_table, table_of
from dispatch.ops.random.distribution_kernels import draws_kernel
from dispatch.ops.random.reference_distributions import Draws, evaluate_drawn, words_of

spec = importlib.util.spec_from_file_location("random_on_cpu", Path(__file__).with_name("random_on_cpu.py"))
random_on_cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(random_on_cpu)

ONE = 1 << 64


@pytest.fixture
def dev():
    return dp.device("host")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return random_on_cpu.OnCpu(tmp_path_factory.mktemp("random"))


def shares(table):
    """How many of 2^64 words lead to each outcome: counted column by column, as the kernel reads them."""
    count = 1 << table.bits
    upper, other = table.memory[: 2 * count].reshape(-1, 2).T
    thresholds = [int(up) << 32 | int(low) for up, low in zip(upper, table.memory[2 * count :], strict=True)]
    found: dict[int, int] = {}
    for column, (threshold, alias) in enumerate(zip(thresholds, other, strict=True)):
        for outcome, words in ((column, threshold), (int(alias), (ONE >> table.bits) - threshold)):
            if words:
                found[table.first + outcome] = found.get(table.first + outcome, 0) + words
    return found


POISSON = [0.0, 1e-300, 1e-3, 0.7, 4.0, 10.0, 100.0, 12345.6, 40000.0]
BINOMIAL = [(0, 0.3), (7, 0.0), (7, 1.0), (1, 0.5), (20, 0.3), (100, 0.3), (300, 0.9), (160_000, 0.5), (10**6, 1e-5)]
BINOMIAL += [(2**31 - 1, 1e-9), (2**31 - 1, 1 - 1e-9), (2**31 - 1, 1e-300)]


def exact(mpmath, kind, k, *given):
    if kind == "poisson":
        return mpmath.mpf(given[0]) ** k * mpmath.exp(-mpmath.mpf(given[0])) / mpmath.factorial(k)
    n, p = given[0], mpmath.mpf(given[1])
    return mpmath.binomial(n, k) * p**k * (1 - p) ** (n - k)


@pytest.mark.parametrize("given", [*(("poisson", lam) for lam in POISSON), *(("binomial", *one) for one in BINOMIAL)])
def test_the_probabilities_of_a_table_are_the_distributions(given):
    """Each within 2^-64 but for the most likely one, which has what rounding the others has left over."""
    mpmath, stats = pytest.importorskip("mpmath"), pytest.importorskip("scipy.stats")
    kind, *numbers = given
    table = poisson_table(*numbers) if kind == "poisson" else binomial_table(*numbers)
    found = shares(table)
    assert sum(found.values()) == ONE
    assert len(found) <= 1 << table.bits <= 4096
    with mpmath.workdps(60):
        right = {k: exact(mpmath, *given[:1], k, *numbers) * ONE for k in found}
        missing = ONE - sum(right.values())
        off = {k: abs(found[k] - right[k]) for k in found}
        more = [k for k in found if off[k] > 0.51]
        assert len(more) <= 1
        for k in more:
            assert off[k] <= len(found) + 1
            assert found[k] > 0.999 * max(found.values())
        assert -1 < missing < 2 + len(found) / 100  # of outcomes that the table has not, each less than half of one
    k = np.array(sorted(found))
    pmf = stats.poisson(*numbers).pmf(k) if kind == "poisson" else stats.binom(*numbers).pmf(k)
    mine = np.array([found[one] / ONE for one in k.tolist()])
    if kind == "poisson" and numbers[0] <= 100:  # SciPy's own are off by more elsewhere
        assert np.abs(pmf - mine).max() < 64 * 2.0**-50
    np.testing.assert_allclose(mine, pmf, rtol=1e-8, atol=2.0**-50)


def test_columns_are_made_without_rounding():
    for weights in ([1], [1, 1], [3, 0, 5], [1] * 4096, [1, 10**40], [0, 0, 7, 1, 0], list(range(1, 1000))):
        found, total = shares(alias_table(5, weights)), sum(weights)
        assert sum(found.values()) == ONE
        for k, weight in enumerate(weights):
            assert abs(Fraction(found.get(5 + k, 0), ONE) - Fraction(weight, total)) <= Fraction(len(weights) + 1, ONE)


def test_a_word_at_a_threshold_is_decided_by_further_bits():
    table = alias_table(0, [1, 2, 4, 8, 16])
    count, shift = 1 << table.bits, 32 - table.bits
    upper, other = table.memory[: 2 * count].reshape(-1, 2).T.astype(np.uint64)
    lower = table.memory[2 * count :].astype(np.uint64)
    column = np.flatnonzero((other != np.arange(count)) & (upper > 0)).astype(np.uint64)
    assert len(column) >= 3
    words = (column << np.uint64(shift)) + upper[column]
    asked = []

    def further(places, by):
        asked.append(len(places))
        return lower[column[places]] + np.uint64(by) if by else lower[column[places]]

    np.testing.assert_array_equal(table.draw(words, lambda at: further(at, 0)), other[column])
    np.testing.assert_array_equal(table.draw(words, lambda at: lower[column[at]] - np.uint64(1)), column)
    np.testing.assert_array_equal(table.draw(words - np.uint64(1), lambda at: further(at, 0)), column)
    assert asked == [len(column), 0]


@pytest.mark.parametrize(
    "request_of",
    [
        lambda dev, **given: dp.RandomPoissonRequest(dev, lam=4.0, **given),
        lambda dev, **given: dp.RandomPoissonRequest(dev, lam=0.0, **given),
        lambda dev, **given: dp.RandomPoissonRequest(dev, lam=100.0, **given),
        lambda dev, **given: dp.RandomPoissonRequest(dev, lam=41_000.0, **given),
        lambda dev, **given: dp.RandomBinomialRequest(dev, n=100, p=0.3, **given),
        lambda dev, **given: dp.RandomBinomialRequest(dev, n=100, p=1.0, out_dtype="i32", **given),
        lambda dev, **given: dp.RandomBinomialRequest(dev, n=2**31 - 1, p=1 - 1e-8, out_dtype="u32", **given),
        lambda dev, **given: dp.RandomBinomialRequest(dev, n=2**31 - 1, p=0.7, **given),
        lambda dev, **given: dp.RandomBinomialRequest(dev, n=10**6, p=0.3, **given),
    ],
)
def test_the_kernels_of_counts_give_numpys(request_of, dev, on_cpu):
    for size, offset in ((50_001, 0), (1003, 6), (1, 2**61 + 3)):
        request = request_of(dev, size=size, seed=9, offset=offset)
        filled = request.replace(out=dev.empty(request.shape, request.kind))
        on_cpu.run(draws_kernel(filled), filled)
        right = evaluate_drawn(request)["out"]
        np.testing.assert_array_equal(filled.out.numpy(), right)
        first = filled.out.numpy().copy()
        on_cpu.run(draws_kernel(filled), filled, grid=(3, 32))
        np.testing.assert_array_equal(filled.out.numpy(), first)


@pytest.mark.parametrize(
    ("kind", "given"), [(dp.RandomPoissonRequest, {"lam": 39_000.0}), (dp.RandomBinomialRequest, {"n": 156_000})]
)
def test_the_kernel_decides_words_at_thresholds_by_the_elements_own_streams(kind, given, dev, on_cpu):
    """Of 4,096 columns one word in 2^20 is at its threshold."""
    request = kind(dev, 4_000_000, 1, **given)
    table = table_of(request)
    assert table.bits == 12
    words = words_of(Draws(1, np.arange(4_000_000)), np.arange(4_000_000))
    threshold = table.memory[:8192:2][words >> np.uint64(20)]
    open_ones = np.flatnonzero((words & np.uint64(0xFFFFF)) == threshold)
    assert len(open_ones) > 3
    filled = request.replace(out=dev.empty(request.shape, request.kind))
    on_cpu.run(draws_kernel(filled), filled)
    np.testing.assert_array_equal(filled.out.numpy(), evaluate_drawn(request)["out"])
    column = words[open_ones] >> np.uint64(20)
    either = np.stack([column, table.memory[1:8192:2][column]]) + table.first
    assert (filled.out.numpy()[open_ones] == either).any(0).all()


def test_tables_end_where_variances_are_large(dev):
    def has(kind, **given):
        return table_of(kind(dev, 1, **given)) is not None

    assert has(dp.RandomPoissonRequest, lam=40_000.0)
    assert not has(dp.RandomPoissonRequest, lam=40_001.0)
    assert has(dp.RandomBinomialRequest, n=160_000, p=0.5)
    assert not has(dp.RandomBinomialRequest, n=2**31 - 1, p=0.5)
    assert has(dp.RandomBinomialRequest, n=2**31 - 1, p=1e-6)
    assert not has(dp.RandomGammaRequest, shape_parameter=2.0)
