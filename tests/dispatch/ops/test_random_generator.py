"""A generator as its users handle it: refused calls, copies, NumPy's integers, probabilities of fewer bits."""

import copy
import pickle

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, NoRow


def generator(seed=7, *args, **choices):
    return dp.random.Generator(seed, *args, device="host", **choices)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda rng: rng.random(3, "i32"), "dtype: got i32"),
        (lambda rng: rng.random(out=[1.0, 2.0]), r"out: got \[1.0, 2.0\]; expected a Tensor"),
        (lambda rng: rng.random(3, out=rng.device.zeros(2)), "out"),
        (lambda rng: rng.normal(scale=-1), "scale: got -1"),
        (lambda rng: rng.normal(np.nan), "loc: got nan"),
        (lambda rng: rng.lognormal(sigma=-1), "sigma: got -1"),
        (lambda rng: rng.gamma(-1), "shape: got -1"),
        (lambda rng: rng.truncated_normal(scale=-1), "scale: got -1"),
        (
            lambda rng: rng.uniform(-3e38, 3e38, 3),
            "high: got 3e[+]38; expected a number whose distance from low f32 can hold",
        ),
        (lambda rng: rng.uniform(0, 1e39, 3), "high: got 1e[+]39"),
        (lambda rng: rng.uniform(0, 1e5, 3, "f16"), "high: got 100000.0; .* 65504"),
        (lambda rng: rng.choice(3, p=[0.5, 0.4, 0.2]), "p: got probabilities that sum to 1.1"),
        (lambda rng: rng.permutation(2.5), "x: got 2.5"),
    ],
)
def test_a_refused_call_names_what_was_given_and_takes_no_numbers(call, said):
    rng, other = generator(), generator()
    other.standard_normal(5)
    rng.standard_normal(5)
    with pytest.raises(BadRequest, match=said):
        call(rng)
    assert rng.state == other.state
    np.testing.assert_array_equal(rng.random(4).numpy(), other.random(4).numpy())


def test_what_no_row_takes_takes_no_numbers_either():
    rng = generator(7, "mt19937")
    with pytest.raises(NoRow, match="bit_generator"):
        rng.gamma(2.0, size=3)
    assert rng.offset == 0


def test_numbers_that_another_thread_has_taken_meanwhile_stay_taken(monkeypatch):
    """A place that is given back is the last one, or none."""
    rng = generator()
    way = rng.random.__globals__["UNIFORM"]

    def refuses(*_, **__):
        monkeypatch.undo()
        rng.random(3)  # as another thread would
        raise BadRequest("out_dtype", "nothing", "something")

    monkeypatch.setitem(rng.random.__globals__, "UNIFORM", (refuses, way[1]))
    with pytest.raises(BadRequest, match=r"^dtype"):
        rng.random(2)
    assert rng.offset == 5


def test_the_widest_uniform_numbers_that_a_dtype_holds_are_finite():
    for dtype, most in (("f16", 65504.0), ("bf16", 3.3895313892515355e38), ("f32", 3.4028234663852886e38)):
        drawn = generator().uniform(0.0, most, 2000, dtype).numpy().astype(np.float64)
        assert np.isfinite(drawn).all()
        assert 0.45 * most < drawn.mean() < 0.55 * most


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda rng: pickle.loads(pickle.dumps(rng))],
    ids=["copy", "deepcopy", "pickle"],
)
@pytest.mark.parametrize("choices", [{}, {"bit_generator": "sobol32", "dimensions": 3}, {"library": "own"}], ids=str)
def test_a_copy_goes_on_from_where_it_was_made_and_for_itself(copied, choices):
    rng = generator(None if choices.get("dimensions") else 3, **choices)
    size = (rng.dimensions, 4)
    rng.random(size)
    other = copied(rng)
    assert (other.seed, other.offset, other.library, other.device) == (rng.seed, rng.offset, rng.library, rng.device)
    first = other.random(size).numpy()
    np.testing.assert_array_equal(rng.random(size).numpy(), first)
    if not choices.get("dimensions"):
        assert [one.seed for one in other.spawn(2)] == [one.seed for one in rng.spawn(2)]
    made = copied(rng.requests).random(size)
    assert type(made) is dp.RandomUniformRequest
    assert made.offset == rng.offset


def test_numpys_integers_are_integers():
    rng = generator(np.uint64(2**63), offset=np.int32(4))
    assert (rng.seed, rng.offset) == (2**63, 4)
    assert len(rng.spawn(np.int8(2))) == 2
    assert sorted(rng.permutation(np.int64(5)).numpy()) == [0, 1, 2, 3, 4]
    assert rng.choice(np.uint8(1)).numpy() == 0
    assert dp.fft.fftfreq(np.int16(4), device="host").shape == (4,)
    for wrong in (True, np.bool_(True), np.timedelta64(3), np.float64(3)):
        with pytest.raises(BadRequest, match="seed"):
            generator(wrong)


@pytest.mark.parametrize("dtype", ["f2", "f4", dp.keys.BF16.numpy])
def test_probabilities_of_fewer_bits_sum_to_1_as_their_dtype_tells(dtype, rng):
    for _ in range(20):
        p = rng.random(50).astype(dtype)
        p = (p.astype(np.float64) / p.astype(np.float64).sum()).astype(dtype)
        assert generator().choice(50, 7, p=p).shape == (7,)
        assert generator().multinomial(9, p).numpy().sum() == 9
    with pytest.raises(BadRequest, match="sum to"):
        generator().choice(2, p=np.array([0.5, 0.75], dtype))


def test_what_a_generator_is_made_of_stays():
    rng = generator()
    with pytest.raises(AttributeError):
        rng.seed = 5
    for choices, said in (
        ({"library": "foo"}, "library: got 'foo'; expected 'own' or 'curand', or None"),
        ({"library": 5}, "library: got 5"),
        ({"dimensions": 3}, "dimensions: got 3; expected 1: sobol32"),
        ({"bit_generator": "sobol32"}, "seed: got 7; expected None: SOBOL32 has no seed"),
    ):
        with pytest.raises(BadRequest, match=said):
            generator(**choices)
    with pytest.raises(BadRequest, match="device: got 3; expected a Device or its name"):
        dp.random.Generator(1, device=3)
