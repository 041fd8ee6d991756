"""Signal functions on the host, against SciPy's: `dispatch.signal`, but for `fftconvolve` (test_fft.py)."""

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest

signal = pytest.importorskip("scipy.signal")
KINDS = ("f4", "f8", "c8", "c16")


@pytest.fixture
def dev():
    return dp.device("host")


def drawn(rng, shape, kind):
    x = 10 * rng.standard_normal(shape)
    return (x + 10j * rng.standard_normal(shape) if kind[0] == "c" else x).astype(kind)


def close(got, expected):
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    eps = np.finfo(expected.dtype).eps
    assert np.linalg.norm(got - expected) <= 100 * eps * np.linalg.norm(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_convolutions_in_pieces_are_scipys(kind, dev, rng):
    for first, second, axes in (
        ((1000,), (7,), None),
        ((7,), (1001,), None),
        ((40,), (7,), None),
        ((300, 200), (3, 4), None),
        ((3, 1000), (3, 11), 1),
        ((3, 1000), (1, 11), -1),
        ((1, 1000), (3, 11), 1),
        ((1000, 2), (5, 2), [0]),
        ((1000, 1), (1, 1), None),
        ((400, 2, 9), (8, 2, 5), (2, 0)),
    ):
        x, y = drawn(rng, first, kind), drawn(rng, second, kind)
        for mode in ("full", "valid") if first[0] == 1 else ("full", "same", "valid"):
            got = dp.signal.oaconvolve(dev.array(x), dev.array(y), mode, axes).numpy()
            close(got, signal.fftconvolve(x, y, mode, axes))
        close(dp.signal.oaconvolve(x, y, axes=axes), signal.fftconvolve(x, y, axes=axes))


def test_a_long_convolution_takes_whole_numbers_and_mixed_operands(dev, rng):
    x, y = rng.integers(-9, 9, 2000), rng.standard_normal(5)
    close(dp.signal.oaconvolve(dev.array(x), dev.array(y)).numpy(), signal.oaconvolve(x.astype("f8"), y))
    close(dp.signal.oaconvolve(y + 1j, x), signal.oaconvolve(y + 1j, x.astype("f8")))
    with pytest.raises(BadRequest, match="in2: got f32; expected numbers whose precision is that of in1"):
        dp.signal.oaconvolve(y, y.astype("f4"))
    with pytest.raises(BadRequest, match="expected one element or more along each of the axes"):
        dp.signal.oaconvolve(y, y[:0])


def test_convolutions_of_torchs_tensors_are_torchs(rng):
    torch = pytest.importorskip("torch")
    x, y = rng.standard_normal(2000), rng.standard_normal(5)
    got = dp.signal.oaconvolve(torch.tensor(x), torch.tensor(y))
    assert isinstance(got, torch.Tensor)
    close(got.numpy(), signal.oaconvolve(x, y))
    for of_torch, expected in zip(dp.signal.welch(torch.tensor(x)), signal.welch(x), strict=True):
        assert isinstance(of_torch, torch.Tensor)
        close(of_torch.numpy(), expected)


FRAMES = (
    {},
    {"nperseg": 32},
    {"nperseg": 31, "noverlap": 20, "nfft": 40},
    {"nperseg": 24, "noverlap": 17, "window": "hamming", "fs": 8000.0},
    {"nperseg": 16, "noverlap": 0, "window": ("kaiser", 4.0)},
    {"window": np.hanning(21) + 0.1, "return_onesided": False},
)


@pytest.mark.parametrize("kind", KINDS)
def test_short_time_transforms_are_scipys(kind, dev, rng):
    for shape, axis in (((300,), -1), ((3, 301), 1), ((257, 2), 0), ((2, 299, 3), -2)):
        x = drawn(rng, shape, kind)
        for given in FRAMES:
            choices = {"axis": axis, **given} | ({"return_onesided": False} if kind[0] == "c" else {})
            for more in ({}, {"scaling": "psd"}, {"padded": False, "boundary": None}):
                expected = signal.stft(x, **{"nperseg": None} | choices | more)
                for got, wanted in zip(dp.signal.stft(dev.array(x), **choices | more), expected, strict=True):
                    close(got.numpy(), wanted)


def test_signals_go_on_beyond_their_ends_as_scipys(rng):
    x = rng.standard_normal((2, 50))
    for boundary in ("zeros", "even", "odd", "constant"):
        for given in ({"nperseg": 20}, {"nperseg": 50}, {"nperseg": 9, "detrend": "constant"}):
            expected = signal.stft(x, boundary=boundary, **given)
            for got, wanted in zip(dp.signal.stft(x, boundary=boundary, **given), expected, strict=True):
                close(got, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_inverse_short_time_transforms_are_scipys_and_give_the_signal_back(kind, dev, rng):
    x = drawn(rng, (3, 301), kind)
    for given in FRAMES:
        sides = kind[0] != "c" and given.get("return_onesided", True)
        forward = {**given, "return_onesided": sides}
        spectra = dp.signal.stft(dev.array(x), **forward)[2]
        back = {name: one for name, one in given.items() if name != "return_onesided"} | {"input_onesided": sides}
        if isinstance(given.get("window"), np.ndarray):
            back["nperseg"] = given["window"].size
        t, got = dp.signal.istft(spectra, **back)
        expected = signal.istft(spectra.numpy(), **back)
        close(t.numpy(), np.arange(expected[1].shape[-1]) / given.get("fs", 1.0))
        real = got.numpy() if kind[0] == "c" or sides else got.numpy().real
        close(got.numpy(), expected[1].astype(got.numpy().dtype))
        close(real[:, :301].astype(kind), x)


@pytest.mark.parametrize("kind", KINDS)
def test_power_spectra_are_scipys(kind, dev, rng):
    for shape, axis in (((300,), -1), ((3, 301), 1), ((257, 2), 0)):
        x = drawn(rng, shape, kind)
        for given in FRAMES:
            choices = {"axis": axis, **given} | ({"return_onesided": False} if kind[0] == "c" else {})
            for more in ({}, {"scaling": "spectrum", "detrend": False}):
                expected = signal.welch(x, **choices | more)
                for got, wanted in zip(dp.signal.welch(dev.array(x), **choices | more), expected, strict=True):
                    close(got.numpy(), wanted)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"nperseg": 8, "noverlap": 8}, "noverlap: got 8; expected less than nperseg, 8"),
        ({"nperseg": 8, "nfft": 7}, "nfft: got 7; expected nperseg, 8, or more"),
        ({"nperseg": 0}, "nperseg: got 0; expected a whole number from 1"),
        ({"nperseg": 8, "window": np.ones(7)}, "nperseg: got 8; expected 7, the length of the window"),
        ({"window": np.ones(70)}, "window: got 70 elements; expected at most 64, the length of the signal"),
        ({"window": "round"}, "window: got 'round'; expected a window name that scipy.signal.get_window accepts"),
        ({"window": np.zeros(8)}, "window: got a window whose sum is 0"),
        ({"axis": 1}, "axis: got 1; expected a whole number from -1 to 0"),
        ({"nperseg": 8, "detrend": "linear"}, "detrend: got 'linear'; expected \"constant\" or False"),
        ({"nperseg": 8, "scaling": "half"}, "scaling: got 'half'; expected a Scaling"),
    ],
)
def test_frames_that_cannot_be_are_refused_by_name(choices, words, dev):
    for function in (dp.signal.stft, dp.signal.welch):
        with pytest.raises(BadRequest, match=words):
            function(dev.zeros((64,)), **choices)


def test_signals_and_spectra_that_cannot_be_are_refused_by_name(dev):
    with pytest.raises(BadRequest, match="expected one element or more along each axis"):
        dp.signal.stft(dev.zeros((0,)))
    with pytest.raises(BadRequest, match="give every element a nonzero weight"):
        dp.signal.istft(dev.zeros((9, 4), "c64"), noverlap=0)
    with pytest.raises(BadRequest, match=r"Zxx: got f32.*expected c64 or c128"):
        dp.signal.istft(dev.zeros((9, 4)))
    with pytest.warns(UserWarning, match="nperseg 10 is reduced to 1"):
        assert dp.signal.stft(dev.zeros((1,)), nperseg=10)[2].shape == (1, 1)


@pytest.mark.parametrize("kind", ["i4", "i8", "u1", "?", "f2"])
def test_spectra_of_whole_numbers_and_of_16_bits_are_scipys(kind, dev, rng):
    x = rng.integers(0, 9, 700).astype(kind)
    given, same = dev.array(x), x.astype("f4" if kind == "f2" else "f8")
    close(dp.signal.welch(given)[1].numpy(), signal.welch(same)[1])
    for choices in ({"detrend": "constant"}, {"boundary": "odd"}, {"boundary": "odd", "detrend": "constant"}, {}):
        close(dp.signal.stft(given, nperseg=32, **choices)[2].numpy(), signal.stft(same, nperseg=32, **choices)[2])


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_times_of_an_inverse_stand_where_scipy_has_them(order, rng):
    z = signal.stft(rng.standard_normal((2, 104)), nperseg=16)[2].transpose(order)
    times, frequencies = order.index(2), order.index(1)
    expected = signal.istft(z, nperseg=16, time_axis=times, freq_axis=frequencies)[1]
    for by in (0, -3):
        found = dp.signal.istft(z, nperseg=16, time_axis=times + by, freq_axis=frequencies + by)[1]
        close(found, expected)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x, _: dp.signal.stft(x, fs=0), "fs: got 0; expected a finite positive number"),
        (lambda x, _: dp.signal.stft(x, fs=-1), "fs: got -1"),
        (lambda x, _: dp.signal.welch(x, fs=float("nan")), "fs: got nan"),
        (lambda _, z: dp.signal.istft(z, fs=0), "fs: got 0"),
        (lambda _, z: dp.signal.istft(z, time_axis=5), "time_axis: got 5"),
        (lambda _, z: dp.signal.istft(z, boundary=2), "boundary: got 2; expected a bool"),
        (lambda x, _: dp.signal.stft(x, padded=3), "padded: got 3; expected a bool"),
        (lambda x, _: dp.signal.welch(x, return_onesided=2), "return_onesided: got 2; expected a bool"),
        (lambda *_: dp.signal.fftconvolve([1, 2], [3]), "in1: got a list; expected a tensor"),
        (lambda x, _: dp.signal.oaconvolve(x, 2), "in2: got an int; expected a tensor"),
        (lambda x, _: dp.signal.fftconvolve(x[0], x[0]), "in1: got no axes"),
    ],
)
def test_arguments_that_mean_nothing_are_refused_by_name(call, said, dev):
    z = dev.array(signal.stft(np.ones(64), nperseg=16)[2])
    with pytest.raises(BadRequest, match=said):
        call(dev.array(np.ones(64)), z)
