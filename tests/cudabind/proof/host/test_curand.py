"""cuRAND's host generators: against NumPy's and SciPy's, against a paper's algorithm, and by their distributions."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from scipy import special, stats
from scipy.stats import qmc

from cudabind.errors import CurandError
from cudabind.sys import curand
from cudabind.sys.curand import curandDirectionVectorSet as Vectors
from cudabind.sys.curand import curandRngType as Kind

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, Any]
SEED = 1234
PSEUDO = [kind for kind in Kind if kind // 100 == 1]
QUASI = [kind for kind in Kind if kind // 100 == 2]
IN_64_BITS = (Kind.CURAND_RNG_QUASI_SOBOL64, Kind.CURAND_RNG_QUASI_SCRAMBLED_SOBOL64)
COUNT = 1 << 18
MT19937_CHUNK = 65536


@pytest.fixture(autouse=True)
def _installed(need: Callable[..., None]) -> None:
    need("curand")


@pytest.fixture(scope="module")
def mt19937(need: Callable[..., None]) -> Any:
    """A generator whose state takes seconds to make, and the numbers that it began with."""
    need("curand")
    handle = curand.curandGenerator_t()
    curand.curandCreateGeneratorHost(ctypes.byref(handle), Kind.CURAND_RNG_PSEUDO_MT19937)
    curand.curandSetPseudoRandomGeneratorSeed(handle, SEED)
    yield handle, drawn(np.uint32, MT19937_CHUNK * 15, curand.curandGenerate, handle)
    curand.curandDestroyGenerator(handle)


@pytest.fixture
def generator() -> Any:
    """Makes host generators, and destroys them after the test."""
    made: list[curand.curandGenerator_t] = []

    def make(kind: Kind, seed: int = SEED, dimensions: int = 1) -> curand.curandGenerator_t:
        handle = curand.curandGenerator_t()
        curand.curandCreateGeneratorHost(ctypes.byref(handle), kind)
        made.append(handle)
        if kind in QUASI:
            curand.curandSetQuasiRandomGeneratorDimensions(handle, dimensions)
        else:
            curand.curandSetPseudoRandomGeneratorSeed(handle, seed)
        return handle

    yield make
    for handle in made:
        curand.curandDestroyGenerator(handle)


def drawn(dtype: Any, count: int, generate: Any, handle: curand.curandGenerator_t, *parameters: float) -> Array:
    """What a function of cuRAND writes, into memory that holds ones in every bit beforehand."""
    out = np.full(count * np.dtype(dtype).itemsize, 0xFF, np.uint8).view(dtype)
    generate(handle, out.ctypes.data, out.size, *parameters)
    return out


def philox4x32(counter: list[Array], key: tuple[int, int], rounds: int = 10) -> Array:
    """Philox 4x32 as its paper has it (Salmon et al., Parallel random numbers: as easy as 1, 2, 3; 2011)."""
    a, b, c, d = (np.asarray(word, np.uint64) for word in counter)
    for turn in range(rounds):
        k0, k1 = ((word + turn * weyl) % 2**32 for word, weyl in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True))
        left, right = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (right >> 32) ^ b ^ k0, right % 2**32, (left >> 32) ^ d ^ k1, left % 2**32
    return np.stack([a, b, c, d], axis=-1).astype(np.uint32)


def test_philox_is_the_papers(generator: Any) -> None:
    zero = [np.zeros(1, np.uint64)] * 4
    assert philox4x32(zero, (0, 0)).tolist() == [[0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]]  # Random123's own
    got = drawn(np.uint32, 1 << 20, curand.curandGenerate, generator(Kind.CURAND_RNG_PSEUDO_PHILOX4_32_10))
    # cuRAND deals to 65536 streams in turn: the stream is the counter's third word, its numbers go by the first.
    n = np.arange(got.size // 4, dtype=np.uint64)
    assert np.array_equal(got, philox4x32([n // 65536, 0 * n, n % 65536, 0 * n], (SEED, 0)).ravel())


def test_mt19937_is_numpys(mt19937: Any) -> None:
    chunk, (_, got) = MT19937_CHUNK, mt19937
    numpys = np.random.MT19937()
    numpys._legacy_seeding(SEED)
    expected = numpys.random_raw(1 + 2 * 56).astype(np.uint32)
    # cuRAND cuts the sequence into 8192 streams. Measured: of the first one, number 0 comes first, and then 56 at a
    # time lie in the next seven chunks, one in each in turn.
    period, within = np.divmod(np.arange(expected.size - 1), 56)
    places = chunk * (7 * period + 1 + within % 7) + within // 7
    assert np.array_equal(got[np.concatenate([[0], places])], expected)


@pytest.mark.parametrize("dimensions", [1, 2, 40])
@pytest.mark.parametrize("bits", [32, 64])
def test_sobols_sequence_is_scipys(generator: Any, bits: int, dimensions: int) -> None:
    points = 4096
    handle = generator(Kind[f"CURAND_RNG_QUASI_SOBOL{bits}"], dimensions=dimensions)
    generate = curand.curandGenerate if bits == 32 else curand.curandGenerateLongLong
    got = drawn(f"uint{bits}", dimensions * points, generate, handle).reshape(dimensions, points)
    expected = qmc.Sobol(dimensions, scramble=False, bits=bits).random(points).T
    assert np.array_equal(got / 2.0**bits, expected)


@pytest.mark.parametrize("bits", [32, 64])
def test_scrambled_sobol_is_made_of_the_librarys_own_tables(generator: Any, bits: int) -> None:
    """Points by Gray code from the direction vectors and the constants, which other functions hand out."""
    dimensions, points = 3, 1024
    kind = ctypes.c_uint32 if bits == 32 else ctypes.c_uint64
    vectors, constants = ctypes.POINTER(kind)(), ctypes.POINTER(kind)()
    getattr(curand, f"curandGetDirectionVectors{bits}")(
        ctypes.byref(vectors), Vectors[f"CURAND_SCRAMBLED_DIRECTION_VECTORS_{bits}_JOEKUO6"]
    )
    getattr(curand, f"curandGetScrambleConstants{bits}")(ctypes.byref(constants))
    expected = np.zeros((dimensions, points), f"uint{bits}")
    for dimension in range(dimensions):
        expected[dimension, 0] = constants[dimension]
        for point in range(1, points):
            lowest_one = (point & -point).bit_length() - 1
            expected[dimension, point] = int(expected[dimension, point - 1]) ^ vectors[dimension * bits + lowest_one]
    handle = generator(Kind[f"CURAND_RNG_QUASI_SCRAMBLED_SOBOL{bits}"], dimensions=dimensions)
    generate = curand.curandGenerate if bits == 32 else curand.curandGenerateLongLong
    got = drawn(f"uint{bits}", dimensions * points, generate, handle).reshape(dimensions, points)
    assert np.array_equal(got, expected)


# Six thousandths of a percent of sound generators would miss 4 standard errors; the seed is fixed, so these do not.
def near(mean: float, expected: float, deviation: float, count: int = COUNT) -> bool:
    return abs(mean - expected) < 4 * deviation / math.sqrt(count)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=kind.name, marks=[pytest.mark.exhaustive] if kind.name.endswith("MT19937") else [])
        for kind in PSEUDO  # the state of MT19937 takes seconds to make, and is proven above
    ],
)
def test_pseudorandom_numbers_are_distributed_as_asked(
    generator: Any, kind: Kind, request: pytest.FixtureRequest
) -> None:
    is_slow = kind == Kind.CURAND_RNG_PSEUDO_MT19937
    handle = request.getfixturevalue("mt19937")[0] if is_slow else generator(kind)
    bits = drawn(np.uint32, COUNT, curand.curandGenerate, handle)
    ones = np.unpackbits(bits.view(np.uint8)).reshape(COUNT, 32).mean(axis=0)
    assert all(near(mean, 0.5, 0.5) for mean in ones)
    for dtype, suffix in [(np.float32, ""), (np.float64, "Double")]:
        uniform = drawn(dtype, COUNT, getattr(curand, f"curandGenerateUniform{suffix}"), handle)
        assert 0 < uniform.min() <= uniform.max() <= 1  # cuRAND leaves out 0, not 1
        assert stats.kstest(uniform.astype(np.float64), "uniform").pvalue > 1e-3
        normal = drawn(dtype, COUNT, getattr(curand, f"curandGenerateNormal{suffix}"), handle, 3.0, 2.0)
        assert stats.kstest((normal.astype(np.float64) - 3) / 2, "norm").pvalue > 1e-3
        log_normal = drawn(dtype, COUNT, getattr(curand, f"curandGenerateLogNormal{suffix}"), handle, 0.5, 0.25)
        assert stats.kstest(log_normal.astype(np.float64), "lognorm", (0.25, 0, math.exp(0.5))).pvalue > 1e-3
    poisson = drawn(np.uint32, COUNT, curand.curandGeneratePoisson, handle, 7.5)
    assert near(poisson.mean(), 7.5, math.sqrt(7.5))
    assert near(((poisson - 7.5) ** 2).mean(), 7.5, math.sqrt(7.5 + 2 * 7.5**2))


@pytest.mark.parametrize("kind", QUASI, ids=lambda kind: kind.name)
def test_quasirandom_normals_are_the_inverse_of_uniforms(generator: Any, kind: Kind) -> None:
    points = 4096
    uniform = drawn(np.float64, points, curand.curandGenerateUniformDouble, generator(kind))
    # One point falls into each of as many equal cells: that is what the sequence is for.
    assert np.array_equal(np.sort(np.minimum((uniform * points).astype(int), points - 1)), np.arange(points))
    normal = drawn(np.float64, points, curand.curandGenerateNormalDouble, generator(kind), 0.0, 1.0)
    assert uniform[0] > 0  # where Sobol's own first point is 0, so what stands for it is cuRAND's choice
    np.testing.assert_allclose(normal[1:], special.ndtri(uniform[1:]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [Kind.CURAND_RNG_PSEUDO_XORWOW, *QUASI], ids=lambda kind: kind.name)
def test_log_normals_are_the_exponentials_of_normals(generator: Any, kind: Kind) -> None:
    normal = drawn(np.float64, 4096, curand.curandGenerateNormalDouble, generator(kind), 0.5, 0.25)
    log_normal = drawn(np.float64, 4096, curand.curandGenerateLogNormalDouble, generator(kind), 0.5, 0.25)
    np.testing.assert_allclose(log_normal, np.exp(normal), rtol=1e-12)


@pytest.mark.parametrize("kind", [Kind.CURAND_RNG_PSEUDO_PHILOX4_32_10, Kind.CURAND_RNG_PSEUDO_MRG32K3A])
def test_a_seed_begins_a_sequence_and_an_offset_goes_on_in_it(generator: Any, kind: Kind) -> None:
    whole = drawn(np.uint32, 4096, curand.curandGenerate, generator(kind))
    handle = generator(kind)
    curand.curandSetGeneratorOffset(handle, 1000)
    assert np.array_equal(drawn(np.uint32, 3096, curand.curandGenerate, handle), whole[1000:])
    assert not np.array_equal(drawn(np.uint32, 4096, curand.curandGenerate, generator(kind, seed=SEED + 1)), whole)


@pytest.mark.parametrize("kind", [*PSEUDO, *QUASI], ids=lambda kind: kind.name)
def test_output_of_another_width_is_refused(generator: Any, kind: Kind) -> None:
    out = np.zeros(8, np.uint64)
    generate = curand.curandGenerate if kind in IN_64_BITS else curand.curandGenerateLongLong
    with pytest.raises(CurandError) as caught:
        generate(generator(kind), out.ctypes.data, out.size)
    assert (caught.value.status, caught.value.name) == (103, "CURAND_STATUS_TYPE_ERROR")
    assert not out.any()
