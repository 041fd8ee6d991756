"""Convolutions, frames and random numbers in SciPy's and NumPy's words: shapes that broadcast, what errors name."""

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest

signal = pytest.importorskip("scipy.signal")


def test_convolutions_of_shapes_that_broadcast_are_scipys(rng):
    tried = 0
    while tried < 400:
        rank = int(rng.integers(1, 4))
        first, second = (rng.choice([1, 1, 2, 3, 5], rank).tolist() for _ in range(2))
        axes = None if rng.random() < 0.5 else tuple(range(int(rng.integers(1, rank + 1))))
        mode = str(rng.choice(["full", "same", "valid"]))
        beside = [axis for axis in range(rank) if axes is not None and axis not in axes]
        if mode == "same" and any(first[axis] != second[axis] for axis in beside):
            continue  # SciPy cuts such axes to in1's extent; docs/fft.md says that ours are left
        if len({first[axis] > second[axis] for axis in beside if first[axis] != second[axis]}) > 1:
            continue  # each has one element along an axis: refused, as the page says
        a, b = rng.standard_normal(first), rng.standard_normal(second)
        try:
            expected = signal.fftconvolve(a, b, mode, axes=axes)
        except ValueError:
            continue
        found = np.asarray(dp.signal.fftconvolve(a, b, mode, axes=axes))
        assert found.shape == expected.shape, (first, second, axes, mode)
        np.testing.assert_allclose(found, expected, atol=1e-10)
        tried += 1


def test_what_a_signal_lacks_is_named():
    generator = dp.random.Generator(1, device="host")
    scaled = dp.fft.Callback("return x * at[0];", lambda x, where: x * where)
    spectrum = dp.signal.stft(np.ones(64), nperseg=8, noverlap=7, boundary=None)[2]
    for call, words in (
        (
            lambda: dp.signal.fftconvolve(np.ones((0, 3)), np.ones((1, 3)), axes=-1),
            r"in1 \[0, 3\]; expected one element or more",
        ),
        (lambda: generator.multinomial(3, np.array([0.5 + 2j, 0.5 - 1j])), "pvals: got an array of complex128"),
        (lambda: generator.choice(2, 3, p=[0.5 + 2j, 0.5]), "p: got an array of complex128"),
        (lambda: generator.chisquare(1e31, 3), "df: got 1e"),
        (lambda: dp.fft.fft(np.ones(8), load=scaled), "expected some of x, raw, i, at, shape"),
        (lambda: dp.signal.istft(spectrum, nperseg=8, noverlap=7, boundary=False), "Hint: with boundary=True"),
    ):
        with pytest.raises(BadRequest, match=words):
            call()


def test_a_spectrum_without_two_axes_is_refused_by_its_name():
    with pytest.raises(BadRequest, match=r"Zxx: got c64\[3\]; expected two axes or more: of frequencies and of times"):
        dp.signal.istft(dp.device("host").array([1, 2, 3], "c64"))
