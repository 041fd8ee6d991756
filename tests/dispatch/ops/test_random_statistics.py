"""Random numbers against their papers and their distributions; tests that a bad generator fails."""

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest

stats = pytest.importorskip("scipy.stats")

N = 20_000
MIN_P_VALUE = (
    1e-4  # a p-value below says that the numbers are not so distributed: seeds are fixed, and so is what is found
)


@pytest.fixture
def dev():
    return dp.device("host")


@pytest.fixture
def gen(dev):
    return dp.random.Generator(2024, device=dev)


# -- known answers ----------------------------------------------------------------------------------------------------
def xorwow(seed, count):
    """Marsaglia, "Xorshift RNGs", 2003, with cuRAND's way from a seed to its state (`curand_kernel.h`)."""
    mask = 0xFFFFFFFF
    one, two = (seed & mask) ^ 0xAAD26B49, (seed >> 32) ^ 0xF7DCEFDD
    t0, t1 = 1099087573 * one & mask, 2591861531 * two & mask
    d = 6615241 + t1 + t0
    v = [123456789 + t0 & mask, 362436069 ^ t0, 521288629 + t1 & mask, 88675123 ^ t1, 5783321 + t0 & mask]
    for _ in range(count):
        t = v[0] ^ v[0] >> 2
        v = [*v[1:], v[4] ^ v[4] << 4 & mask ^ t ^ t << 1 & mask]
        d += 362437
        yield v[4] + d & mask


def mrg32k3a(count):
    """L'Ecuyer, "Good parameters and implementations for combined multiple recursive generators", 1999."""
    m, n = 4294967087, 4294944443
    a, b = [12345] * 3, [12345] * 3
    for _ in range(count):
        a = [*a[1:], (1403580 * a[1] - 810728 * a[0]) % m]
        b = [*b[1:], (527612 * b[2] - 1370589 * b[0]) % n]
        yield ((a[2] - b[2]) % m or m) / (m + 1)


def test_xorwow_is_that_of_its_paper(dev):
    seed = 5 << 32 | 77
    found = dp.random_bits(dev, 4096 * 7 + 1, seed, bit_generator="xorwow").numpy()[::4096]  # those of one subsequence
    assert found.tolist() == list(xorwow(seed, 8))


def test_mrg32k3a_is_that_of_its_paper(dev):
    given = {"bit_generator": "mrg32k3a", "ordering": "legacy", "out_dtype": "f64"}
    found = dp.random_uniform(dev, 4096 * 7 + 1, 0, **given).numpy()[::4096]
    np.testing.assert_allclose(found, list(mrg32k3a(8)), atol=2.0**-32)


@pytest.mark.exhaustive
def test_mt19937_is_numpys(dev):
    """The one test of it here: its states for 8,192 parts of the sequence take the host seconds."""
    right = np.random.RandomState(1234).randint(0, 2**32, 8, dtype=np.uint32)
    generator = dp.random.Generator(1234, "mt19937", device=dev)
    whole = generator.bits(7 * 65536 + 1).numpy()
    np.testing.assert_array_equal(whole[::65536], right)
    requests = [generator.requests.random(size) for size in (4, 6)]
    assert [request.offset for request in requests] == [458753, 458757]


@pytest.mark.parametrize("name", ["sobol32", "sobol64"])
def test_sobols_points_are_scipys(name, dev):
    points = dp.random.Generator(bit_generator=name, dimensions=40, device=dev).random((40, 256), "f64").numpy()
    right = stats.qmc.Sobol(40, scramble=False).random(256).T
    np.testing.assert_allclose(points, right, atol=2.0**-31)


def test_sobols_points_lie_evenly(dev):
    def spread(name, **given):
        points = dp.random.Generator(bit_generator=name, device=dev, **given).random((2, 512), "f64")
        return stats.qmc.discrepancy(np.ascontiguousarray(points.numpy().T) * (1 - 1e-12))

    quasi = [spread(name, dimensions=2) for name in ("sobol32", "scrambled_sobol32", "sobol64", "scrambled_sobol64")]
    assert max(quasi) < 1e-4 < stats.qmc.discrepancy(np.random.default_rng(1).random((512, 2)))


# -- distributions ----------------------------------------------------------------------------------------------------
CONTINUOUS = {
    "uniform": (lambda g, dtype: g.uniform(-2, 5, N, dtype), stats.uniform(-2, 7)),
    "normal": (lambda g, dtype: g.normal(1, 3, N, dtype), stats.norm(1, 3)),
    "lognormal": (lambda g, dtype: g.lognormal(0.5, 0.7, N, dtype), stats.lognorm(0.7, scale=np.exp(0.5))),
    "exponential": (lambda g, dtype: g.exponential(2.5, N, dtype), stats.expon(scale=2.5)),
    "gamma of a large shape": (lambda g, dtype: g.gamma(7.5, 2, N, dtype), stats.gamma(7.5, scale=2)),
    "gamma of a small shape": (lambda g, dtype: g.standard_gamma(0.4, N, dtype), stats.gamma(0.4)),
    "gamma of the smallest shape in f32": (lambda g, dtype: g.standard_gamma(0.05, N, dtype), stats.gamma(0.05)),
    "gamma of a scale beyond f32": (lambda g, dtype: g.gamma(2, 1e33, N, dtype), stats.gamma(2, scale=1e33)),
    "gamma of a huge shape": (lambda g, dtype: g.standard_gamma(3e4, N, dtype), stats.gamma(3e4)),
    "gamma of shape 1": (lambda g, dtype: g.gamma(1, size=N, dtype=dtype), stats.expon()),
    "chi-square": (lambda g, dtype: g.chisquare(3, N, dtype), stats.chi2(3)),
    "beta": (lambda g, dtype: g.beta(2, 5, N, dtype), stats.beta(2, 5)),
    "beta of large shapes": (lambda g, dtype: g.beta(300, 70, N, dtype), stats.beta(300, 70)),
    "beta of a small and a large shape": (lambda g, dtype: g.beta(0.4, 6, N, dtype), stats.beta(0.4, 6)),
    "beta of small shapes": (lambda g, dtype: g.beta(0.5, 0.3, N, dtype), stats.beta(0.5, 0.3)),
    "truncated": (lambda g, dtype: g.truncated_normal(size=N, dtype=dtype), stats.truncnorm(-2, 2)),
    "truncated, half": (lambda g, dtype: g.truncated_normal(0, np.inf, size=N, dtype=dtype), stats.halfnorm()),
    "truncated, wide": (lambda g, dtype: g.truncated_normal(-6, 1, size=N, dtype=dtype), stats.truncnorm(-6, 1)),
    "truncated, narrow tail": (
        lambda g, dtype: g.truncated_normal(0.3, 0.9, size=N, dtype=dtype),
        stats.truncnorm(0.3, 0.9),
    ),
    "truncated, narrow": (lambda g, dtype: g.truncated_normal(-0.5, 1, size=N, dtype=dtype), stats.truncnorm(-0.5, 1)),
    "truncated, tail": (
        lambda g, dtype: g.truncated_normal(3, np.inf, size=N, dtype=dtype),
        stats.truncnorm(3, np.inf),
    ),
    "truncated, below": (lambda g, dtype: g.truncated_normal(-3.5, -3, size=N, dtype=dtype), stats.truncnorm(-3.5, -3)),
    "truncated, moved": (
        lambda g, dtype: g.truncated_normal(0, 4, 1, 2, N, dtype),
        stats.truncnorm(-0.5, 1.5, loc=1, scale=2),
    ),
}


def binned(right, width):
    """The distribution of whole numbers divided by a width."""
    k = np.arange(int(right.ppf(1e-15)) // width - 1, int(right.ppf(1 - 1e-15)) // width + 2)
    p = right.cdf(k * width + width - 1) - right.cdf(k * width - 1)
    return stats.rv_discrete(values=(k, p / p.sum()))


DISCRETE = {
    "integers": (lambda g: g.integers(3, 40, N), stats.randint(3, 40)),
    "integers of 8 bits": (lambda g: g.integers(-100, 100, N, "i8"), stats.randint(-100, 100)),
    "poisson, small": (lambda g: g.poisson(0.7, N), stats.poisson(0.7)),
    "poisson, below 10": (lambda g: g.poisson(9.9, N), stats.poisson(9.9)),
    "poisson, from 10 on": (lambda g: g.poisson(10, N), stats.poisson(10)),
    "poisson, mostly 0": (lambda g: g.poisson(0.01, N), stats.poisson(0.01)),
    "poisson, large": (lambda g: g.poisson(500, N), stats.poisson(500)),
    "poisson, largest of a table": (lambda g: g.poisson(40_000, N).numpy() // 50, binned(stats.poisson(40_000), 50)),
    "poisson, beyond tables": (lambda g: g.poisson(40_001, N).numpy() // 50, binned(stats.poisson(40_001), 50)),
    "binomial, few": (lambda g: g.binomial(20, 0.3, N), stats.binom(20, 0.3)),
    "binomial, many": (lambda g: g.binomial(300, 0.2, N), stats.binom(300, 0.2)),
    "binomial, likely": (lambda g: g.binomial(300, 0.9, N), stats.binom(300, 0.9)),
    "binomial, of many": (lambda g: g.binomial(10**9, 1e-8, N), stats.binom(10**9, 1e-8)),
    "binomial, beyond tables": (
        lambda g: g.binomial(10**6, 0.3, N).numpy() // 100,
        binned(stats.binom(10**6, 0.3), 100),
    ),
    "binomial, likely beyond": (
        lambda g: g.binomial(10**6, 0.8, N).numpy() // 100,
        binned(stats.binom(10**6, 0.8), 100),
    ),
    "choice": (lambda g: g.choice(4, N, p=[0.1, 0.2, 0, 0.7]), stats.rv_discrete(values=([0, 1, 3], [0.1, 0.2, 0.7]))),
}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_numbers_have_their_distribution(name, gen):
    draw, right = CONTINUOUS[name]
    for dtype in ("f32", "f64"):
        x = draw(gen, dtype).numpy().astype(np.float64)
        assert stats.kstest(x, right.cdf).pvalue > MIN_P_VALUE
        assert abs(x.mean() - right.mean()) < 5 * right.std() / np.sqrt(N)


NEIGHBOURS = {
    "integers of a narrow range": lambda g: g.integers(0, 1000, N),
    "integers of a wide range": lambda g: g.integers(0, 3 << 61, N),
    "integers of many drawn anew": lambda g: g.integers(0, 3 << 30, N),
    "poisson": lambda g: g.poisson(4.0, N),
    "binomial": lambda g: g.binomial(100, 0.3, N),
    "gamma": lambda g: g.standard_gamma(2.5, N),
    "gamma of a small shape": lambda g: g.standard_gamma(0.4, N),
    "beta": lambda g: g.beta(2, 3, N),
    "truncated": lambda g: g.truncated_normal(size=N),
    "truncated, tail": lambda g: g.truncated_normal(2, np.inf, size=N),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours_are_independent(name, gen):
    """Of numbers side by side, in a quad and in the next one: their ranks, and pairs of them in cells."""
    x = stats.rankdata(NEIGHBOURS[name](gen).numpy().astype(np.float64) + np.random.default_rng(1).random(N) * 1e-6) / N
    for lag in (1, 2, 3, 4, 8):
        assert abs(np.corrcoef(x[lag:], x[:-lag])[0, 1]) < 4.5 / np.sqrt(N)
    for phase in range(4):  # of the pairs that begin at one place of a quad
        one, other = x[phase : N - 1 : 4], x[phase + 1 :: 4]
        cells = np.histogram2d(one[: len(other)], other[: len(one)], 8, [[0, 1], [0, 1]])[0]
        assert stats.chi2_contingency(cells + 1e-9).pvalue > MIN_P_VALUE


def fit(x, right):
    """The p-value of whole numbers, those that are expected less than 10 times taken together."""
    k = np.arange(int(right.ppf(1e-9)), int(right.ppf(1 - 1e-9)) + 1)
    expected = right.pmf(k) * len(x)
    often = expected >= 10
    found = np.array([(x == value).sum() for value in k[often]])
    rest, wanted = len(x) - found.sum(), len(x) - expected[often].sum()
    if wanted < 1:
        return stats.chisquare(found, expected[often] * found.sum() / expected[often].sum()).pvalue * (rest <= 10)
    return stats.chisquare(np.append(found, rest), np.append(expected[often], wanted)).pvalue


@pytest.mark.parametrize("name", DISCRETE)
def test_whole_numbers_have_their_distribution(name, gen):
    draw, right = DISCRETE[name]
    x = draw(gen)
    x = (x if isinstance(x, np.ndarray) else x.numpy()).astype(np.int64)
    assert fit(x, right) > MIN_P_VALUE
    assert fit(x + max(1, int(0.2 * right.std())), right) < MIN_P_VALUE, "numbers beside the right ones are told"


def test_multinomial_numbers_are_binomial_each_and_sum_to_the_trials(gen):
    x = gen.multinomial(50, [0.2, 0.5, 0, 0.3], 4000).numpy()
    assert (x.sum(1) == 50).all()
    for k, p in enumerate((0.2, 0.5, 0, 0.3)):
        assert fit(x[:, k], stats.binom(50, p)) > MIN_P_VALUE if p else (x[:, k] == 0).all()


@pytest.mark.parametrize("n", [1, 2, 7, 1024, 1025, 5000, 65537])
def test_a_permutation_has_each_number_once(n, gen):
    one, other = gen.permutation(n).numpy(), gen.permutation(n).numpy()
    assert (np.sort(one) == np.arange(n)).all()
    assert (np.sort(other) == np.arange(n)).all()
    assert n < 8 or abs(np.corrcoef(one, other)[0, 1]) < 5 / np.sqrt(n)
    assert n < 8 or abs(np.corrcoef(one, np.arange(n))[0, 1]) < 5 / np.sqrt(n)


def test_all_orders_of_few_are_as_likely_and_places_of_many(gen):
    orders = [tuple(gen.permutation(3).numpy()) for _ in range(1200)]
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    assert len(counts) == 6
    assert stats.chisquare(counts).pvalue > MIN_P_VALUE
    first = [int(gen.choice(2000, 1, replace=False).item()) for _ in range(1000)]
    assert stats.kstest(np.array(first) / 2000, "uniform").pvalue > MIN_P_VALUE
    some = gen.choice(3000, 500, replace=False).numpy()
    assert len(np.unique(some)) == 500
    assert some.max() < 3000


def test_ranges_of_whole_numbers_up_to_all(gen):
    for dtype, low, high in (("u64", 0, 2**64), ("i64", -(2**63), 2**63), ("i32", -(2**31), 2**31), ("u8", 255, 256)):
        x = gen.integers(low, high, 5000, dtype).numpy()
        share = (x.astype(np.float64) - low) / (float(high) - low)
        assert high - low == 1 or stats.kstest(share, "uniform").pvalue > MIN_P_VALUE
        assert x.min() >= low
    assert set(gen.integers(1, 6, 1000, endpoint=True).numpy()) == set(range(1, 7))
    thirds = gen.integers(0, 3 * 2**62, N, "u64").numpy() >> np.uint64(
        62
    )  # of 64 bits taken modulo, 0 is twice as likely
    assert fit(thirds.astype(np.int64), stats.randint(0, 3)) > MIN_P_VALUE


# -- tests of bits, which a bad generator fails -----------------------------------------------------------------------
def p_values(bits):
    """Of words of 32 bits: counts in cells, pairs of neighbours, runs of the lowest bits, and birthday spacings."""
    u = bits / 2.0**32
    pairs = (bits[: len(bits) // 2 * 2].reshape(-1, 2) >> 27).astype(np.int64)
    ones = np.unpackbits((bits & np.uint32(0xFF)).astype(np.uint8)[:, None], axis=1)
    correlation = np.corrcoef(u[1:], u[:-1])[0, 1] * np.sqrt(len(u))
    days = np.sort(bits[: 512 * (len(bits) // 512)].reshape(-1, 512) >> 7, axis=1)
    spacings = np.sort(np.diff(days, axis=1), axis=1)
    repeated = (np.diff(spacings, axis=1) == 0).sum()
    mean = len(days) * 512**3 / (4 * 2.0**25)  # Marsaglia's: Poisson of m^3 / 4n for each year
    runs = (np.diff(ones[:, 7].astype(int)) != 0).sum()
    return {
        "cells": stats.chisquare(np.bincount((bits >> 24).astype(np.int64), minlength=256)).pvalue,
        "pairs": stats.chisquare(np.bincount(pairs[:, 0] * 32 + pairs[:, 1], minlength=1024)).pvalue,
        "low bits": stats.chisquare(np.bincount(np.packbits(ones[:, 7]), minlength=256)).pvalue,
        "runs": 2 * stats.norm.sf(abs(runs - len(bits) / 2) / np.sqrt(len(bits) / 4)),
        "correlation": 2 * stats.norm.sf(abs(correlation)),
        "birthdays": min(1.0, 2 * min(stats.poisson.cdf(repeated, mean), stats.poisson.sf(repeated - 1, mean))),
    }


def linear_congruential(count):
    """The low bits of `rand()` of old: x = 1103515245 x + 12345 modulo 2^32."""
    x, found = 1, np.empty(count, np.uint32)
    for i in range(count):
        x = (1103515245 * x + 12345) & 0xFFFFFFFF
        found[i] = x
    return found


@pytest.mark.parametrize("name", ["philox", "xorwow", "mrg32k3a", "mtgp32"])
def test_bits_pass_and_those_of_another_stream_are_independent(name, dev):
    generator = dp.random.Generator(31, name, device=dev)
    bits = generator.bits(1 << 17).numpy()
    found = p_values(bits)
    assert min(found.values()) > MIN_P_VALUE, found
    others = [child.bits(1 << 14).numpy() for child in generator.spawn(3)] if name != "mrg32k3a" else []
    for other in others:
        assert abs(np.corrcoef(bits[: 1 << 14], other)[0, 1]) < 5 / np.sqrt(1 << 14)
        between = int(np.bitwise_count(bits[: 1 << 14] ^ other).sum())
        assert abs(between - 16 * 2**14) < 5 * np.sqrt(8 * 2**14)


@pytest.mark.parametrize(
    ("make", "failed"),
    [
        (lambda: linear_congruential(1 << 17), {"low bits", "runs"}),
        (lambda: np.arange(1 << 17, dtype=np.uint32) * np.uint32(2654435769), {"pairs", "birthdays"}),
        (lambda: np.random.default_rng(1).integers(0, 2**31, 1 << 17, dtype=np.uint32), {"cells", "pairs"}),
        (lambda: np.repeat(np.random.default_rng(1).integers(0, 2**32, 1 << 16, dtype=np.uint32), 2), {"correlation"}),
        (
            lambda: np.random.default_rng(1).integers(0, 2**18, 1 << 17, dtype=np.uint32) << np.uint32(14),
            {"birthdays"},
        ),
    ],
)
def test_bits_of_a_bad_generator_are_told(make, failed):
    found = p_values(make())
    assert all(found[name] < MIN_P_VALUE for name in failed), found


# -- bad input of the further distributions ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("call", "operand", "expected"),
    [
        (lambda g: g.integers(5, 5, 3), "high", "a whole number from 6"),
        (lambda g: g.integers(0, 300, 3, "u8"), "high", "to 256"),
        (lambda g: g.integers(0, 2**31, 3, "i32", endpoint=True), "high", "endpoint=True has added 1"),
        (lambda g: g.integers(-5, size=3), "low", "a whole number from 1"),
        (lambda g: g.integers(0.5, size=3), "low", "a whole number from 1"),
        (lambda g: g.integers(-1, 3, 3, "u32"), "low", "a whole number from 0"),
        (lambda g: g.integers(0.5, 3, 3), "low", "a whole number"),
        (lambda g: g.gamma(-1.0, size=3), "shape", "0 or more"),
        (lambda g: g.gamma(float("nan"), size=3), "shape", "a finite number"),
        (lambda g: g.beta(0.0, 1.0, 3), "a", "a finite number"),
        (lambda g: g.binomial(-1, 0.5, 3), "n", "a whole number from 0"),
        (lambda g: g.binomial(10, 1.5, 3), "p", "a number from 0 to 1"),
        (lambda g: g.binomial(10, float("nan"), 3), "p", "a number from 0 to 1"),
        (lambda g: g.truncated_normal(2.0, 2.0, size=3), "low", "less than high"),
        (lambda g: g.truncated_normal(float("nan"), 2.0, size=3), "low", "less than high"),
        (lambda g: g.truncated_normal(scale=0.0, size=3), "scale", "a finite number"),
        (lambda g: g.permutation(-3), "x", "a whole number from 0"),
        (lambda g: g.choice(3, 4, replace=False), "size", "none is drawn twice"),
        (lambda g: g.choice(3, 4, p=[0.5, 0.5]), "p", "a = 3 probabilities"),
        (lambda g: g.choice(2, 4, p=[0.5, 0.6]), "p", "sum to 1"),
        (lambda g: g.choice(2, 4, p=[1.5, -0.5]), "p", "numbers from 0 to 1"),
        (lambda g: g.choice(2, 1, replace=False, p=[0.5, 0.5]), "p", "None"),
        (lambda g: g.multinomial(3, [0.5, float("nan")]), "pvals", "numbers from 0 to 1"),
        (lambda g: g.multinomial(3, []), "pvals", "a list of probabilities"),
        (lambda g: g.multinomial(-3, [1.0]), "n", "a whole number from 0"),
    ],
)
def test_parameters_that_are_none_are_refused_by_name(call, operand, expected, gen):
    with pytest.raises(BadRequest) as caught:
        call(gen)
    assert caught.value.operand == operand
    assert expected in caught.value.expected


def test_ends_of_parameters(gen):
    assert (gen.binomial(7, 0.0, 5).numpy() == 0).all()
    assert (gen.binomial(7, 1.0, 5).numpy() == 7).all()
    assert (gen.poisson(0.0, 5).numpy() == 0).all()
    assert (gen.gamma(0.0, size=5).numpy() == 0).all()
    assert (gen.integers(4, 5, 5).numpy() == 4).all()
    assert gen.multinomial(4, [1.0]).numpy().tolist() == [4]
    assert gen.permutation(0).shape == (0,)
    assert gen.choice(1, 3, p=[1.0]).numpy().tolist() == [0, 0, 0]
    beyond = gen.truncated_normal(30, np.inf, size=1000, dtype="f64").numpy()
    assert beyond.min() >= 30
    assert beyond.mean() == pytest.approx(30 + 1 / 30, rel=1e-3)
