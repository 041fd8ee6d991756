"""cuRAND: the same numbers as on the host and as the published algorithms give, and the moments of distributions."""

from __future__ import annotations

import numpy as np
import pytest

from cudabind.errors import CurandError
from cudabind.sys import curand

LIBRARIES = ("curand",)
RNG = curand.curandRngType_t
LEGACY = curand.curandOrdering_t.CURAND_ORDERING_PSEUDO_LEGACY  # the one order that is promised to stay
SIGMAS = 6  # one failure in 500 million tries


@pytest.fixture
def generator(gpu):
    """`generator(kind, seed)`: a generator on the device, or on the host."""

    def make(kind, seed, create=curand.curandCreateGenerator):
        made = gpu.make(curand.curandGenerator_t, lambda g: create(g, kind), curand.curandDestroyGenerator)
        curand.curandSetPseudoRandomGeneratorSeed(made, seed)
        return made

    return make


@pytest.fixture
def seed(rng):
    return int(rng.integers(1 << 63))


def philox(seed, count):
    """Philox4x32-10 as Salmon et al. published it ("Parallel random numbers: as easy as 1, 2, 3", 2011).

    cuRAND's order: 65536 subsequences take turns, four numbers each; the subsequence is the third word of the counter.
    """
    turn, subsequence = np.divmod(np.arange((count + 3) // 4, dtype=np.uint64), np.uint64(65536))
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = turn, np.zeros_like(turn), subsequence, np.zeros_like(turn)
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        x, y = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (y >> half) ^ c1 ^ np.uint64(keys[0]), y & low, (x >> half) ^ c3 ^ np.uint64(keys[1]), x & low
        keys = [(key + weyl) & 0xFFFFFFFF for key, weyl in zip(keys, (0x9E3779B9, 0xBB67AE85), strict=True)]
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32).ravel()[:count]


def test_philox_is_the_published_algorithm(gpu, generator, seed):
    count = 300_001  # more than one turn of all subsequences, and not a multiple of four
    made, d_out = generator(RNG.CURAND_RNG_PSEUDO_PHILOX4_32_10, seed), gpu.poisoned(count, np.uint32)
    curand.curandSetGeneratorOrdering(made, LEGACY)
    curand.curandGenerate(made, d_out.ptr, count)
    assert np.array_equal(d_out.numpy(), philox(seed, count))


@pytest.mark.parametrize("kind", ["PHILOX4_32_10", "XORWOW", "MRG32K3A", "MTGP32", "MT19937"])
def test_the_device_generates_what_the_host_does(gpu, generator, seed, kind):
    count, kind = 100_000, RNG[f"CURAND_RNG_PSEUDO_{kind}"]
    d_out, out = gpu.poisoned(count, np.float32), np.full(count, np.nan, np.float32)
    device, host = generator(kind, seed), generator(kind, seed, curand.curandCreateGeneratorHost)
    for made, memory in ((device, d_out.ptr), (host, out.ctypes.data)):
        curand.curandSetGeneratorOrdering(made, LEGACY)
        curand.curandGenerateUniform(made, memory, count)
    assert np.array_equal(d_out.numpy(), out)
    assert 0 < out.min() < out.max() <= 1


def test_sobol_points_are_scipys(gpu):
    qmc = pytest.importorskip("scipy.stats", reason="SciPy is not installed").qmc
    dimensions, points = 5, 1024
    made = gpu.make(
        curand.curandGenerator_t,
        lambda g: curand.curandCreateGenerator(g, RNG.CURAND_RNG_QUASI_SOBOL32),
        curand.curandDestroyGenerator,
    )
    curand.curandSetQuasiRandomGeneratorDimensions(made, dimensions)
    d_out = gpu.poisoned((dimensions, points), np.uint32)
    curand.curandGenerate(made, d_out.ptr, dimensions * points)
    expected = qmc.Sobol(dimensions, scramble=False, bits=32).random(points).T * 2.0**32
    assert np.array_equal(d_out.numpy(), expected)


def test_normal_numbers_have_the_moments_that_were_asked_for(gpu, generator, seed, close):
    n, mean, deviation = 1_000_000, 3.0, 0.5
    d_out = gpu.poisoned(n, np.float64)
    curand.curandGenerateNormalDouble(
        generator(RNG.CURAND_RNG_PSEUDO_PHILOX4_32_10, seed), d_out.ptr, n, mean, deviation
    )
    z = (d_out.numpy() - mean) / deviation
    # The first four moments of a normal variable are 0, 1, 0, 3; the variance of its k-th power is E z^2k - (E z^k)^2.
    for power, (expected, variance) in enumerate([(0, 1), (1, 2), (0, 15), (3, 96)], 1):
        close((z**power).mean(), expected, SIGMAS * np.sqrt(variance / n))


def test_log_normal_numbers_are_the_exponents_of_normal_ones(gpu, generator, seed, close):
    n = 10_000
    made = {name: gpu.poisoned(n, np.float32) for name in ("normal", "log")}
    for name, generate in (("normal", curand.curandGenerateNormal), ("log", curand.curandGenerateLogNormal)):
        generate(generator(RNG.CURAND_RNG_PSEUDO_XORWOW, seed), made[name].ptr, n, 0.25, 0.5)
    normal, result = (made[name].numpy().astype(np.float64) for name in ("normal", "log"))
    # exp in f32 doubles the error of its argument, which is a few units in the last place of numbers of up to 4.
    close(result, np.exp(normal), 64 * np.finfo(np.float32).eps * np.exp(normal))


def test_poisson_numbers_have_mean_and_variance_alike(gpu, generator, seed, close):
    n, rate = 1_000_000, 7.5
    d_out = gpu.poisoned(n, np.uint32)
    curand.curandGeneratePoisson(generator(RNG.CURAND_RNG_PSEUDO_PHILOX4_32_10, seed), d_out.ptr, n, rate)
    x = d_out.numpy().astype(np.float64)
    close(x.mean(), rate, SIGMAS * np.sqrt(rate / n))
    close(x.var(), rate, SIGMAS * np.sqrt((rate + 2 * rate**2) / n))


def test_a_count_that_cannot_be_paired_is_refused_by_name(gpu, generator, seed):
    made, d_out = generator(RNG.CURAND_RNG_PSEUDO_XORWOW, seed), gpu.poisoned(3, np.float32)
    with pytest.raises(CurandError) as caught:
        curand.curandGenerateNormal(made, d_out.ptr, 3, 0.0, 1.0)
    assert caught.value.name == "CURAND_STATUS_LENGTH_NOT_MULTIPLE"
    assert caught.value.function == "curandGenerateNormal"
    assert np.isnan(d_out.numpy()).all()
