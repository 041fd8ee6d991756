"""Fourier transforms on the host: every row through its cases, against NumPy's own functions, laws, and refusals."""

from inspect import signature
from itertools import permutations

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest
from dispatch.keys import HOST
from dispatch.ops.fft.cases import cases
from dispatch.row_check import check_row

ROWS = [row for op in ("dft", "dct", "dst", "roll") for row in dp.TABLE.of(op) if row.min_arch == HOST]
EPS = {np.dtype(kind): np.finfo(kind).eps for kind in ("f4", "f8", "c8", "c16")}


@pytest.fixture
def dev():
    return dp.device("host")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_passes_its_cases(row, dev, each):
    each(cases(row), lambda case, rng: check_row(row, case, dev, rng))


def complex_normal(rng, shape):
    return rng.standard_normal(shape) + 1j * rng.standard_normal(shape)


def close(got, expected):
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    n = max(2, expected.size)
    assert np.linalg.norm(got - expected) <= 4 * EPS[expected.dtype] * np.log2(2 * n) * np.linalg.norm(expected)


KINDS = ("f2", "f4", "f8", "c8", "c16", "i1", "u4", "i8", "?")
ONE = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
SEVERAL = ("fftn", "ifftn", "rfftn", "irfftn", "fft2", "ifft2", "rfft2", "irfft2")


def test_the_functions_give_what_numpy_gives_of_every_dtype(dev, rng):
    x = 100 * complex_normal(rng, (4, 6, 5))
    for kind in KINDS:
        a = (x if kind[0] == "c" else x.real).astype(kind)
        for name in (*ONE, *SEVERAL):
            is_real = name.startswith(("r", "ih"))
            if (is_real and kind[0] == "c") or (name.startswith(("irfft", "hfft")) and kind == "f2"):
                continue
            # Of f16 NumPy has factors in f16, too.
            expected = getattr(np.fft, name)(a.astype("f4") if kind == "f2" else a)
            close(getattr(dp.fft, name)(dev.array(a)).numpy(), expected)


def test_the_functions_take_numpys_arguments(dev, rng):
    z = complex_normal(rng, (3, 8, 5))
    for name in ONE:
        a = z.real.copy() if name in ("rfft", "ihfft") else z
        for n in (None, 1, 2, 7, 20):
            for axis in (0, 1, -1):
                for norm in (None, "backward", "ortho", "forward"):
                    close(
                        getattr(dp.fft, name)(dev.array(a), n, axis, norm).numpy(),
                        getattr(np.fft, name)(a, n, axis, norm),
                    )
    for name in SEVERAL:
        a = z.real.copy() if name.startswith("r") else z
        for s, axes in ((None, (0, 2)), ((4, 9), (2, 0)), ((2, -1), (0, 1)), ([3, 4, 6], [1, 2, 0])):
            for norm in ("backward", "ortho", "forward"):
                close(
                    getattr(dp.fft, name)(dev.array(a), s, axes, norm).numpy(), getattr(np.fft, name)(a, s, axes, norm)
                )


def test_every_size_there_and_back(dev, rng):
    sizes = [*range(1, 200), *range(200, 4097, 37), 4096]
    for n in sizes:
        x = complex_normal(rng, n)
        spectrum = dp.fft.fft(dev.array(x))
        close(spectrum.numpy(), np.fft.fft(x))
        close(dp.fft.ifft(spectrum).numpy(), x)
        close(dp.fft.irfft(dp.fft.rfft(dev.array(x.real.copy())), n).numpy(), x.real)
        assert np.isclose(np.linalg.norm(spectrum.numpy()) ** 2, n * np.linalg.norm(x) ** 2)  # Parseval


def lawful(dev, rng, n, kind):
    """A size against SciPy in double precision, there and back, Parseval's law and that of shifts."""
    scipy_fft = pytest.importorskip("scipy.fft")
    x, by = complex_normal(rng, n).astype(kind), int(rng.integers(n))
    wide = scipy_fft.fft(x.astype("c16"))
    spectrum = dp.fft.fft(dev.array(x)).numpy()
    close(spectrum, wide.astype(kind))
    close(dp.fft.ifft(dev.array(spectrum)).numpy(), x)
    real = dp.fft.rfft(dev.array(x.real.copy()))
    close(real.numpy(), scipy_fft.rfft(x.real.astype("f8")).astype(kind))
    close(dp.fft.irfft(real, n).numpy(), x.real)
    energy = np.linalg.norm(spectrum.astype("c16")) ** 2
    assert np.isclose(energy, n * np.linalg.norm(x.astype("c16")) ** 2, rtol=1e-5 if kind == "c8" else 1e-13)
    turned = np.exp(-2j * np.pi * (by * np.arange(n) % n) / n) * wide
    close(dp.fft.fft(dev.array(np.roll(x, by))).numpy(), turned.astype(kind))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "step"), [("c16", 1), ("c8", 11)])
def test_laws_hold_for_every_size_to_4096(kind, step, dev, rng):
    for n in range(1, 4097, step):
        lawful(dev, rng, n, kind)


@pytest.mark.parametrize(
    "n", [*(2**k for k in (13, 15, 17)), 3**9, 5**6, 7**5, 2 * 3 * 5 * 7 * 11 * 13, 8191, 10007, 46189, 65537]
)
def test_laws_hold_for_powers_primes_and_mixed_radices(n, dev, rng):
    lawful(dev, rng, n, "c16")


@pytest.mark.exhaustive
def test_laws_hold_for_large_powers_of_2(dev, rng):
    for power in range(18, 21):
        lawful(dev, rng, 2**power, "c8")


def test_every_order_of_axes(dev, rng):
    x = complex_normal(rng, (3, 4, 5, 2))
    a, real = dev.array(x), dev.array(x.real.copy())
    for count in range(1, 5):
        for axes in permutations(range(4), count):
            close(dp.fft.fftn(a, axes=axes).numpy(), np.fft.fftn(x, axes=axes))
            close(dp.fft.rfftn(real, axes=axes).numpy(), np.fft.rfftn(x.real, axes=axes))
            close(dp.fft.irfftn(a, axes=axes).numpy(), np.fft.irfftn(x, axes=axes))
            close(dp.fft.ifftn(dp.fft.fftn(a, axes=axes), axes=axes).numpy(), x)


def test_the_arguments_are_numpys_and_scipys():
    scipy_fft, scipy_signal = pytest.importorskip("scipy.fft"), pytest.importorskip("scipy.signal")
    assert set(np.fft.__all__) <= set(dp.fft.__all__)
    without = {"workers", "average"}  # threads of the host; the median of welch's frames
    for theirs, ours, names in (
        (np.fft, dp.fft, np.fft.__all__),
        (scipy_fft, dp.fft, ("dct", "idct", "dst", "idst")),
        (scipy_signal, dp.signal, ("fftconvolve", "oaconvolve", "stft", "istft", "welch")),
    ):
        for name in names:
            wanted, had = (signature(getattr(module, name)).parameters for module in (theirs, ours))
            assert [one for one in wanted if one not in without] == [*had][: len(wanted) - len(without & {*wanted})]
            for one in had.keys() & wanted.keys():
                if one not in ("window", "nperseg"):  # the same, by other names
                    assert had[one].default == wanted[one].default, (name, one)


def test_a_shift_turns_the_spectrum(dev, rng):
    for n, by in ((12, 5), (31, 1), (64, 63)):
        x = complex_normal(rng, n)
        turned = np.exp(-2j * np.pi * (by * np.arange(n) % n) / n) * dp.fft.fft(dev.array(x)).numpy()
        close(dp.fft.fft(dev.array(np.roll(x, by))).numpy(), turned)


def test_what_no_spectrum_of_real_numbers_has_is_not_read(dev, rng):
    for shape, axes in (((5,), (0,)), ((4, 5), (0, 1)), ((3, 4, 5), (2, 0, 1)), ((4, 5), (1, 0))):
        a = complex_normal(rng, shape)
        last = axes[-1]
        for points in (2 * shape[last] - 2, 2 * shape[last] - 1):
            s = [shape[axis] for axis in axes[:-1]] + [points]
            close(dp.fft.irfftn(dev.array(a), s, axes).numpy(), np.fft.irfftn(a, s, axes))
    odd = np.array([1 + 2j, 3 + 4j, 5 + 6j])
    real = np.array([1, 3 + 4j, 5])
    assert (dp.fft.irfft(dev.array(odd)).numpy() == dp.fft.irfft(dev.array(real)).numpy()).all()


def test_a_result_goes_where_it_is_wanted_and_operands_stay(dev, rng):
    x = complex_normal(rng, (4, 6))
    a = dev.array(x)
    out = dev.zeros((4, 6), "c128")
    assert dp.fft.fft(a, out=out) is out
    close(out.numpy(), np.fft.fft(x))
    close(dp.fft.irfft2(a).numpy(), np.fft.irfft2(x))
    assert (a.numpy() == x).all()
    assert dp.fft.ifftn(a, out=a) is a
    close(a.numpy(), np.fft.ifftn(x))


def test_frequencies_are_numpys(dev):
    for n in (1, 2, 7, 8):
        assert (dp.fft.fftfreq(n, 0.5, device="host").numpy() == np.fft.fftfreq(n, 0.5)).all()
        assert (dp.fft.rfftfreq(n, 0.5, device=dev).numpy() == np.fft.rfftfreq(n, 0.5)).all()
    with pytest.raises(BadRequest, match="n: got 0; expected a whole number from 1"):
        dp.fft.fftfreq(0, device="host")


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"s": 0}, "s: got 0; expected a whole number from 1 to"),
        ({"s": -2}, "s: got -2; expected"),
        ({"s": (4, 0), "axes": (0, 1)}, "s: got 0; expected"),
        ({"s": (2, 3), "axes": (0,)}, r"s: got \(2, 3\); expected a number for each of the 1 axes"),
        ({"s": (2, 3, 4)}, r"s: got \(2, 3, 4\); expected at most 2 numbers"),
        ({"axes": (0, 0)}, r"axes: got \(0, 0\); expected each axis once"),
        ({"axes": (0, -2)}, "expected each axis once"),
        ({"axes": 2}, "axes: got 2; expected a whole number from -2 to 1"),
        ({"norm": "unitary"}, "norm: got 'unitary'; expected a DftNorm: BACKWARD, ORTHO, FORWARD"),
        ({"kind": "c2r", "axes": ()}, "C2R halves the last"),
        ({"kind": "r2c"}, r"a: got c128\[4, 6\]; expected real numbers, for R2C"),
        ({"kind": "half"}, "kind: got 'half'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(choices, words, dev):
    with pytest.raises(BadRequest, match=words):
        dp.dft(dev.zeros((4, 6), "c128"), **choices)


def test_operands_that_cannot_be_are_refused_by_name(dev):
    with pytest.raises(BadRequest, match="a: got 0 elements along axis 1 of a; expected one or more, or s with the"):
        dp.fft.fft(dev.zeros((3, 0)))
    with pytest.raises(BadRequest, match="a: got 1 elements along axis 0 of a; expected two or more, for C2R, or s"):
        dp.fft.irfft(dev.zeros((1,), "c64"))
    with pytest.raises(BadRequest, match="axis: got -1; expected none, because a has no axes"):
        dp.fft.fft(dev.array(np.array(1.0)))
    with pytest.raises(BadRequest, match=r"a: got f8e4m3.* expected c64, c128, f32"):
        dp.fft.fft(dev.zeros((4,), "f8e4m3"))
    with pytest.raises(BadRequest, match=r"a: got f16.* for C2R.*convert it"):
        dp.fft.irfft(dev.zeros((4,), "f16"))
    x = dev.zeros((4, 6), "c64")
    with pytest.raises(BadRequest, match="out: got memory that overlaps a; expected"):
        dp.fft.fft(x[:, :4], out=x[:, 2:])
    with pytest.raises(BadRequest, match=r"out: got c64\[4, 6\]; expected c64\[4, 4\]"):
        dp.fft.rfft(dev.zeros((4, 6)), out=x)


def test_shifts_and_rolls_are_numpys(dev, rng):
    for shape in ((7,), (4, 5), (3, 1, 6)):
        x = rng.standard_normal(shape)
        for axes in (None, 0, (0, -1)[: len(shape)], [0]):
            for name in ("fftshift", "ifftshift"):
                assert (getattr(dp.fft, name)(dev.array(x), axes).numpy() == getattr(np.fft, name)(x, axes)).all()
        for shift, axis in ((3, None), (-8, 0), (2, -1)):
            assert (dp.roll(dev.array(x), shift, axis).numpy() == np.roll(x, shift, axis)).all()


@pytest.mark.parametrize(
    ("shift", "axis", "words"),
    [
        ((1, 2), None, r"shift: got \(1, 2\); expected one number, because axis is None"),
        ((1, 2, 3), (0, 1), r"shift: got \(1, 2, 3\); expected a number, or one for each of the axes \(0, 1\)"),
        (1, (1, -1), r"axis: got \(1, -1\); expected each axis once"),
        (1, 2, "axis: got 2; expected a whole number from -2 to 1"),
        (1.5, 0, "shift: got 1.5"),
    ],
)
def test_a_roll_that_cannot_be_is_refused_by_name(shift, axis, words, dev):
    with pytest.raises(BadRequest, match=words):
        dp.roll(dev.zeros((4, 6)), shift, axis)


def test_cosine_and_sine_transforms_are_scipys(dev, rng):
    scipy_fft = pytest.importorskip("scipy.fft")
    for name in ("dct", "idct", "dst", "idst"):
        for kind in (1, 2, 3, 4):
            for norm in (None, "ortho", "forward"):
                for n, axis, orthogonalize in ((None, -1, None), (5, 0, True), (9, 1, False)):
                    x = rng.standard_normal((4, 7))
                    choices = {"norm": norm, "orthogonalize": orthogonalize}
                    got = getattr(dp.fft, name)(dev.array(x), kind, n, axis, **choices)
                    close(got.numpy(), getattr(scipy_fft, name)(x, kind, n, axis, **choices))


def test_orthogonalize_counts_for_complex_numbers_too(dev, rng):
    scipy_fft = pytest.importorskip("scipy.fft")  # which passes over it there, so that its real transforms are asked
    x = rng.standard_normal(7) + 1j * rng.standard_normal(7)
    for name, kind in (("dct", 1), ("dct", 2), ("idct", 3), ("dst", 2), ("idst", 3)):
        parts = [getattr(scipy_fft, name)(part, kind, orthogonalize=True) for part in (x.real, x.imag)]
        got = getattr(dp.fft, name)(dev.array(x), kind, orthogonalize=True)
        close(got.numpy(), parts[0] + 1j * parts[1])


def test_an_orthogonal_transform_keeps_the_norm_and_is_undone(dev, rng):
    pytest.importorskip("scipy")
    for name, inverse in (("dct", "idct"), ("dst", "idst")):
        for kind in (1, 2, 3, 4):
            for n in (*range(2, 40), 128, 211):
                x = rng.standard_normal(n)
                there = getattr(dp.fft, name)(dev.array(x), kind, norm="ortho")
                assert np.isclose(np.linalg.norm(there.numpy()), np.linalg.norm(x), rtol=1e-13)
                close(getattr(dp.fft, inverse)(there, kind, norm="ortho").numpy(), x)


@pytest.mark.parametrize(
    ("name", "shape", "choices", "words"),
    [
        ("dct", (4, 6), {"type": 5}, "type: got 5; expected a whole number from 1 to 4"),
        ("dct", (4, 1), {"type": 1}, "x: got 1 elements along axis -1 of x; expected 2 or more, for dct of type 1"),
        ("dst", (4, 0), {}, "x: got 0 elements along axis -1 of x; expected 1 or more, for dst of type 2"),
        ("dct", (4, 6), {"type": 1, "n": 1}, "n: got 1; expected a whole number from 2"),
        ("dst", (4, 6), {"axis": 2}, "axis: got 2; expected a whole number from -2 to 1"),
        ("dst", (), {}, r"x: got f32\[\]; expected one axis or more"),
        ("dct", (4, 6), {"norm": "l2"}, "norm: got 'l2'; expected a DftNorm"),
    ],
)
def test_a_cosine_transform_that_cannot_be_is_refused_by_name(name, shape, choices, words, dev):
    with pytest.raises(BadRequest, match=words):
        getattr(dp, name)(dev.zeros(shape), **choices)


def test_factors_are_multiplied_before(dev, rng):
    x, window = rng.standard_normal((3, 8)), rng.standard_normal(8)
    for kind, choices in (("c2c", {"inverse": True}), ("r2c", {"s": 5}), ("c2r", {})):
        got = dp.dft(dev.array(x), kind, axes=1, factors=dev.array(window), **choices)
        close(got.numpy(), dp.dft(dev.array(x * window), kind, axes=1, **choices).numpy())
    a = dev.zeros((4, 6), "f32")
    for factors, words in (
        (dev.zeros((6,), "f64"), r"factors: got f64\[6\]; expected f32 or c64, in which C2C is computed"),
        (dev.zeros((4,), "f32"), r"factors: got f32\[4\]; expected a shape that broadcasts to that of a, \[4, 6\]"),
        (dev.zeros((1, 4, 6), "f32"), "expected a shape that broadcasts"),
    ):
        with pytest.raises(BadRequest, match=words):
            dp.dft(a, factors=factors)
    with pytest.raises(BadRequest, match=r"factors: got c64\[6\]; expected f32, in which R2C is computed"):
        dp.dft(a, "r2c", factors=dev.zeros((6,), "c64"))


@pytest.mark.parametrize("kind", ["f4", "f8", "c8", "c16", "i4"])
def test_convolutions_are_scipys(kind, dev, rng):
    signal = pytest.importorskip("scipy.signal")
    for first, second, axes in (
        ((40,), (7,), None),
        ((7,), (40,), None),
        ((6, 9), (3, 4), None),
        ((6, 9), (6, 4), 1),
        ((6, 9), (1, 4), [1]),
        ((1, 9), (5, 4), (1,)),
        ((4, 5, 6), (2, 5, 3), (2, 0)),
    ):
        x, y = (10 * complex_normal(rng, shape) for shape in (first, second))
        x, y = (one.astype(kind) if kind[0] == "c" else one.real.astype(kind) for one in (x, y))
        # With "same" SciPy cuts what in1 has one of, and in2 more, to one as well.
        for mode in ("full", "valid") if first[0] == 1 else ("full", "same", "valid"):
            got = dp.signal.fftconvolve(dev.array(x), dev.array(y), mode, axes).numpy()
            expected = signal.fftconvolve(x.astype("f8") if kind == "i4" else x, y, mode, axes)
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
            tolerance = 1e-4 if kind in ("f4", "c8") else 1e-12
            np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance * 1000)


def test_convolutions_that_cannot_be_are_refused_by_name(dev):
    x = dev.zeros((4, 6))
    for other, choices, words in (
        (dev.zeros((3,)), {}, "in2: got 1 axes; expected 2, the number of axes of in1"),
        (dev.zeros((3, 7)), {"mode": "valid"}, r"in2: got \[3, 7\]; expected extents that are all at most, or"),
        (dev.zeros((3, 2)), {"axes": 1}, r"in2: got \[3, 2\]; expected in1's extents, \[4, 6\], along the other axes"),
        (dev.zeros((3, 2)), {"axes": (0, 0)}, r"axes: got \(0, 0\); expected at least one axis, and each once"),
        (dev.zeros((3, 2)), {"axes": 2}, "axes: got 2; expected a whole number from -2 to 1"),
        (dev.zeros((3, 2), "f64"), {}, "in2: got f64; expected numbers whose precision is that of in1, f32"),
        (dev.zeros((3, 2)), {"mode": "half"}, "mode: got 'half'; expected a ConvolutionMode: FULL, SAME, VALID"),
        (dev.zeros((0, 2)), {}, "expected one element or more along each of the axes"),
    ):
        with pytest.raises(BadRequest, match=words):
            dp.signal.fftconvolve(x, other, **choices)


def test_fast_lengths_are_the_next_without_a_large_prime():
    assert [dp.signal.next_fast_len(n) for n in (1, 11, 13, 97, 1021, 2**20)] == [1, 12, 14, 98, 1024, 2**20]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: dp.fft.fft(x, n="4"), "n: got '4'; expected a whole number from 1"),
        (lambda x: dp.fft.fft(x, n=[]), r"n: got \[\]"),
        (lambda x: dp.fft.fft(x, n=-1), "n: got -1"),
        (lambda x: dp.fft.irfft(x, -1), "n: got -1"),
        (lambda x: dp.fft.fft(x, axis=9), "axis: got 9; expected a whole number from -1 to 0"),
        (lambda x: dp.fft.fft(x, axis=()), r"axis: got \(\)"),
        (lambda x: dp.fft.fftn(x, axes=(9,)), "axes: got 9"),
        (lambda _: dp.fft.fftshift([1, 2, 3]), "x: got a list; expected a tensor, or an array of another library"),
        (lambda _: dp.fft.fftshift(np.array(5.0)), "x: got no axes"),
        (lambda x: dp.fft.fftshift(x, axes=(0, 0)), r"axes: got \(0, 0\); expected each axis once"),
        (lambda x: dp.fft.ifftshift(x, axes=3), "axes: got 3"),
        (lambda _: dp.fft.fftfreq(8, 0), "d: got 0; expected a finite number other than 0"),
        (lambda _: dp.fft.rfftfreq(8, "a"), "d: got 'a'; expected a number"),
        (lambda _: dp.fft.fftfreq(4, device=5), "device: got 5; expected a Device or its name"),
        (lambda x: dp.fft.dct(x, orthogonalize="no"), "orthogonalize: got 'no'; expected a bool"),
    ],
)
def test_a_refusal_names_the_argument_as_numpy_does(call, said, dev):
    with pytest.raises(BadRequest, match=said):
        call(dev.array(np.arange(6.0)))


@pytest.mark.parametrize("kind", [1, 2, 3, 4])
def test_cosine_transforms_take_arrays_of_others(kind, rng):
    fft = pytest.importorskip("scipy.fft")
    torch = pytest.importorskip("torch")
    x = rng.standard_normal((3, 8))
    for name in ("dct", "dst", "idct", "idst"):
        expected = getattr(fft, name)(x, kind)
        for _ in range(2):
            np.testing.assert_allclose(getattr(dp.fft, name)(x, kind), expected, atol=1e-12)
            np.testing.assert_allclose(getattr(dp.fft, name)(torch.tensor(x), kind), expected, atol=1e-12)
