"""Callbacks of Fourier transforms on the host: in NumPy's words, ready ones, prepared calls, pickles, and refusals."""

import importlib.util
import pickle
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest
from dispatch.keys import HOST
from dispatch.ops.fft.cases import cases
from dispatch.row_check import check_row

Callback = dp.fft.Callback
ROWS = [row for row in dp.TABLE.of("callback_dft") if row.min_arch == HOST]


@pytest.fixture
def dev():
    return dp.device("host")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_passes_its_cases(row, dev, each):
    each(cases(row), lambda case, rng: check_row(row, case, dev, rng))


def complex_normal(rng, shape):
    return rng.standard_normal(shape) + 1j * rng.standard_normal(shape)


def test_every_function_takes_callbacks(dev, rng):
    z = complex_normal(rng, (6, 8))
    window = rng.uniform(0.5, 1.5, 8)
    load = Callback(
        "return x * window[i % n];", lambda x, i, window, n: x * window[i % n], {"window": dev.array(window), "n": 8}
    )
    for name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft", "fftn", "ifftn", "rfftn", "irfftn", "fft2", "rfft2"):
        a = z.real.copy() if name.startswith(("r", "ih")) else z
        expected = getattr(np.fft, name)(a * window)
        got = getattr(dp.fft, name)(dev.array(a), load=load, store=Callback.scale(3.0))
        np.testing.assert_allclose(got.numpy(), 3 * expected, rtol=1e-12, atol=1e-12)
        out = dev.empty(got.shape, got.dtype)
        assert getattr(dp.fft, name)(dev.array(a), load=load, norm="ortho", out=out) is out
        np.testing.assert_allclose(out.numpy(), getattr(np.fft, name)(a * window, norm="ortho"), rtol=1e-12, atol=1e-12)


def test_the_ready_ones(dev, rng):
    x, h = rng.standard_normal((4, 12)), complex_normal(rng, (4, 7))
    a, spectrum = dev.array(x), np.fft.rfft(x)
    fft = dp.fft
    for got, expected in (
        (fft.rfft(a, store=Callback.multiply(dev.array(h))), spectrum * h),
        (fft.rfft(a, store=Callback.multiply(dev.array(h[:1].real.copy()))), spectrum * h[:1].real),
        (fft.rfft(a, load=Callback.window(dev.array(x[0]))), np.fft.rfft(x * x[0])),
        (fft.rfft(a, load=Callback.window(dev.array(x[:, :1]))), np.fft.rfft(x * x[:, :1])),
        (fft.rfft(a, store=Callback.magnitude()), np.abs(spectrum)),
        (fft.rfft(a, store=Callback.real()), spectrum.real),
        (fft.rfft(a, load=Callback.scale(-2.0)), -2 * spectrum),
        (
            fft.irfft(dev.array(h), load=Callback.multiply(dev.array(h)), store=Callback.scale(0.5)),
            np.fft.irfft(h * h) / 2,
        ),
    ):
        assert got.dtype.numpy == expected.dtype
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12, atol=1e-12)


def test_bytes_and_samples_are_converted_in_the_precision_that_is_asked_for(dev, rng):
    picture = rng.integers(0, 256, (6, 10)).astype("u1")
    for precision, kind in (("f32", "c8"), ("f64", "c16"), (None, "c16")):
        got = dp.fft.rfft2(dev.array(picture), load=Callback.from_u8(), precision=precision)
        assert got.dtype.numpy == kind
        np.testing.assert_allclose(got.numpy(), np.fft.rfft2(picture / 255), rtol=1e-5, atol=1e-4)
    samples = np.array([[-32768, 32767, 31745, -1, 0, 5, 1000, -999]], "i2")  # 31745 are the bits of a NaN in f16
    got = dp.fft.rfft(dev.array(samples.view("f2")), load=Callback.from_i16())
    assert got.dtype.numpy == "c8"
    np.testing.assert_allclose(got.numpy(), np.fft.rfft(samples / 32768), rtol=1e-5, atol=1e-5)


def test_what_is_written_may_be_of_another_dtype(dev, rng):
    x = rng.standard_normal((5, 8))
    clipped = Callback(
        "return (unsigned char)(fmin(fmax(abs(x) * 10, 0.), 255.));",
        lambda x: np.clip(np.abs(x) * 10, 0, 255).astype("u1"),
        dtype="u8",
    )
    got = dp.fft.rfft(dev.array(x), store=clipped)
    assert got.dtype is dp.Dtype.of("u8")
    assert (got.numpy() == np.clip(np.abs(np.fft.rfft(x)) * 10, 0, 255).astype("u1")).all()
    spectrum = dp.fft.irfft(
        dev.array(x), store=Callback("return Complex(x, 2 * x);", lambda x: x * (1 + 2j), dtype="complex")
    )
    np.testing.assert_allclose(spectrum.numpy(), np.fft.irfft(x) * (1 + 2j))


def test_places_and_numbers_are_those_of_the_tensor_whatever_its_strides(dev):
    x = np.arange(24.0).reshape(2, 3, 4)
    seen = {}

    def note(x, i, at, shape):
        seen.update(i=np.array(i), at=[np.broadcast_to(one, shape) for one in at], shape=shape)
        return x

    view = dev.array(x).transpose(2, 0, 1)
    dp.fft.fft(view, 5, load=Callback("return x;", note))
    assert seen["shape"] == (4, 2, 3)
    assert (seen["i"] == np.arange(24).reshape(4, 2, 3)).all()
    assert all((one == other).all() for one, other in zip(seen["at"], np.indices((4, 2, 3)), strict=True))


def test_what_is_filled_up_is_zero_behind_the_callback(dev):
    one = Callback("return x + 1;", lambda x: x + 1)
    x = np.zeros((2, 3))
    expected = np.fft.fft(np.pad(np.ones((2, 3)), ((0, 0), (0, 2))))
    np.testing.assert_allclose(dp.fft.fft(dev.array(x), 5, load=one).numpy(), expected, atol=1e-14)


def test_a_prepared_call_takes_other_operands_of_its_callbacks(dev, rng):
    x, w, v = (rng.standard_normal(n) for n in ((3, 8), 8, 8))
    request = dp.CallbackDftRequest(dev.array(x), "r2c", axes=1, load=Callback.window(dev.array(w)))
    call = dp.prepare(request)
    np.testing.assert_allclose(call().numpy(), np.fft.rfft(x * w))
    np.testing.assert_allclose(call(**{"load.window": dev.array(v)}).numpy(), np.fft.rfft(x * v))
    np.testing.assert_allclose(call(a=dev.array(2 * x)).numpy(), np.fft.rfft(2 * x * w))
    with pytest.raises(BadRequest, match=r"load\.windows"):
        request.replace(**{"load.windows": dev.array(v)})


def test_operands_of_callbacks_are_operands_of_the_request(dev):
    a, w = dev.zeros((4, 8), "c64"), dev.zeros((8,), "f32")
    request = dp.CallbackDftRequest(a, axes=1, load=Callback.window(w))
    assert [(name, written) for name, _, written in request.tensors()] == [("a", False), ("load.window", False)]
    assert "load.window f32[8]" in request.describe()
    assert "window=f32[8]" in repr(request.load)
    with pytest.raises(BadRequest, match=r"out: got memory that overlaps load\.factors; expected memory of its own"):
        dp.callback_dft(dev.zeros((4, 8), "c64"), axes=1, load=Callback.multiply(a), out=a)
    other = dp.CallbackDftRequest(a, axes=1, load=Callback.scale(2.0))
    assert len({request.key(), other.key(), dp.CallbackDftRequest(a, axes=1, load=Callback.scale(2)).key()}) == 2


def test_a_request_with_a_ready_callback_goes_to_a_child_process(rng):
    x, w = rng.standard_normal((3, 8)), rng.standard_normal(8)
    with dp.Supervisor("host", streams=1, isolation="process") as sup:
        window = Callback.window(sup.device.array(w))
        request = dp.CallbackDftRequest(sup.device.array(x), "r2c", axes=1, load=window, store=Callback.magnitude())
        np.testing.assert_allclose(sup.submit(request).result(60).numpy(), np.abs(np.fft.rfft(x * w)))
        lines = dp.CallbackDftRequest(sup.device.array(x), load=Callback("return x;", lambda x: x))
        with pytest.raises(
            BadRequest,
            match="numpy: got a function that cannot be pickled; expected a function that a child process can import",
        ):
            sup.submit(lines).result(60)
    for callback in (Callback.scale(2.0), Callback("return x;", lambda x: x, {"n": np.float32(3), "m": np.int8(-3)})):
        assert pickle.loads(pickle.dumps(callback)).key == callback.key
    assert callback.operands == {"n": 3.0, "m": -3}


def test_torch_s_tensors_are_taken(rng):
    torch = pytest.importorskip("torch")
    x, w = torch.from_numpy(rng.standard_normal((3, 8))), torch.from_numpy(rng.standard_normal(8))
    got = dp.fft.rfft(x, load=Callback.window(w))
    assert isinstance(got, torch.Tensor)
    torch.testing.assert_close(got, torch.fft.rfft(x * w))


def same(x):
    return x


def needs_more(x, y):
    return x + y


def test_a_function_that_returns_nothing_is_refused():
    nothing = Callback("return x;", lambda x: None if len(x) else x)
    for sides in ({"load": nothing}, {"store": nothing}):
        with pytest.raises(BadRequest, match="a function that returns None"):
            dp.fft.fft(dp.device("host").array(np.ones(4)), **sides)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("", same), "code: got ''; expected lines of CUDA C\\+\\+, such as \"return 2 \\* x;\""),
        (("return x;", 3), "numpy: got 3; expected a function of arrays"),
        (("return x;", same, [1]), r"operands: got \[1\]; expected a mapping of names"),
        (
            ("return x;", same, {"x": 1}),
            "operands: got the name 'x'; expected a name of C\\+\\+ and Python, and none of",
        ),
        (("return x;", same, {"float": 1}), "the name 'float'"),
        (("return x;", same, {"a b": 1}), "the name 'a b'"),
        (("return x;", same, {f"p{n}": n for n in range(20)}), "operands: got 20 operands; expected at most 15"),
        (("return x;", same, {"y": 1}, ("z",)), "broadcast: got 'z'; expected names of operands: y"),
        (("return x;", same, {}, None), "broadcast: got None; expected a tuple of names"),
        (("return x;", same, {}, (), "f8e4m3"), "dtype: got f8e4m3; expected real, complex, or one of"),
        (("return x;", same, {}, (), "number"), "dtype: got 'number'"),
    ],
)
def test_a_callback_that_cannot_be_is_refused_by_name(given, words):
    with pytest.raises(BadRequest, match=words):
        Callback(*given)


def test_callbacks_that_do_not_fit_a_transform_are_refused_by_name(dev):
    a, z = dev.zeros((4, 6), "f32"), dev.zeros((4, 6), "c64")
    strided = dev.zeros((6, 2))[:, 0]

    def through(**operands):
        return Callback("return x;", lambda x: x, operands)

    for x, choices, words in (
        (a, {"load": same}, "load: got <function same.* expected a dispatch.fft.Callback"),
        (a, {"load": through(w=[1, 2])}, r"load\.w: got \[1, 2\]; expected a Tensor, or a number. Hint: use dev.array"),
        (a, {"load": through(w=True)}, r"load\.w: got True; expected a Tensor, or a number"),
        (a, {"store": through(w=2**70)}, r"store\.w: got 1180591620717411303424; expected a whole number of 64 bits"),
        (a, {"load": through(w=dev.zeros((3,), "bf16"))}, r"load\.w: got bf16\[3\].*; expected a tensor of one of"),
        (a, {"load": through(w=strided)}, r"load\.w: got f32\[6\] element strides \(2\); expected elements in C order"),
        (
            a,
            {"load": Callback.window(dev.zeros((4,)))},
            r"load\.window: got f32\[4\]; expected a tensor of a shape that",
        ),
        (
            a,
            {"store": Callback.multiply(2.0)},
            r"store\.factors: got 2.0; expected a tensor of a shape that broadcasts to",
        ),
        (a, {"load": Callback.magnitude()}, "load.dtype: got real; expected None"),
        (
            z,
            {"kind": "r2c"},
            r"a: got c64\[4, 6\]; expected real numbers, for R2C. Hint: pass a load callback that makes them real",
        ),
        (
            z,
            {"kind": "r2c", "load": Callback.scale(2.0)},
            "load: got complex numbers from its NumPy counterpart; expected",
        ),
        (
            a,
            {"store": Callback("return x;", same, dtype="f32")},
            "store: got complex numbers .* expected f32, the numbers that it writes",
        ),
        (
            a,
            {"load": Callback("return x;", lambda x: x[:2])},
            r"load: got shape \[2, 6\] from its NumPy counterpart; exp",
        ),
        (a, {"load": Callback("return x;", needs_more)}, r"numpy: got parameters \['y'\]; expected some of x, raw"),
        (a, {"precision": "f16"}, "precision: got 'f16'; expected f32, f64 or None"),
        (dev.zeros((4,), "f8e4m3"), {"load": Callback.scale(2.0)}, "a: got f8e4m3.*expected c64, c128, f32, f64, f16"),
        (a, {"store": Callback.magnitude(), "out": z}, r"out: got c64\[4, 6\]; expected f32\[4, 6\]"),
    ):
        with pytest.raises(BadRequest, match=words):
            dp.callback_dft(x, **choices)


def test_operands_on_another_device_are_refused(dev):
    from dispatch.device.host import HostDevice

    elsewhere = HostDevice(99)
    with pytest.raises(BadRequest, match=r"load\.window: got a tensor on"):
        dp.callback_dft(dev.zeros((4,)), load=Callback.window(elsewhere.zeros((4,))))


# -- calls that were made before --------------------------------------------------------------------------------------
@pytest.fixture
def gpu():
    """A device with host memory under the name of a GPU, whose executor notes what it is told to enqueue."""
    path = Path(__file__).parents[1] / "call_cache_cases.py"
    spec = importlib.util.spec_from_file_location("call_cache_stand_ins", path)
    stand_ins = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stand_ins)
    device = stand_ins.Gpu()
    yield device
    device.close()


def test_a_repeated_call_makes_no_request(gpu, monkeypatch):
    made, before = [], dp.CallbackDftRequest.__post_init__
    monkeypatch.setattr(dp.CallbackDftRequest, "__post_init__", lambda self: (made.append(self), before(self))[1])
    lines = Callback("return x * w[i % n];", lambda x, i, w, n: x * w[i % n], {"w": gpu.zeros((8,), "f32"), "n": 8})

    def called(a, w, n=8, **choices):
        """What a call enqueues, and whether it has made a request."""
        before = len(made)
        load = Callback(lines.code, lines.numpy, {"w": w, "n": n})
        out = dp.callback_dft(a, axes=1, load=load, **choices)
        plan, arguments, reads, writes = gpu.executor().runs[-1]
        assert writes[-1] is out
        assert arguments == (a.ptr, w.ptr, out.ptr)
        assert [one.ptr for one in reads] == [a.ptr, w.ptr]
        request = dp.CallbackDftRequest(a, axes=1, load=load, **choices)
        assert plan.key == (dp.CallbackDftRequest, *request.key())
        made.pop()
        return len(made) > before

    first = [gpu.zeros((4, 8), "c64") for _ in range(2)]
    weights = [gpu.zeros((8,), "f32") for _ in range(3)]
    assert called(first[0], weights[0])
    assert not called(first[1], weights[1])
    assert not called(first[0], weights[2])
    assert called(first[0], weights[0], n=7)
    assert not called(first[1], weights[1], n=7)
    assert called(first[0], weights[0], n=8.0)  # a Real
    assert called(first[0], gpu.zeros((8,), "f64"))
    assert called(first[0], weights[0], inverse=True)
    assert called(first[0], weights[0], out=first[0])
    assert not called(first[1], weights[1], out=first[1])
    assert not called(first[0], weights[0], out=first[1])
    big = gpu.zeros((64,), "c64")
    inside = big[4:36].reshape((4, 8))
    with pytest.raises(BadRequest, match=r"out: got memory that overlaps"):
        dp.callback_dft(first[0], axes=1, load=Callback(lines.code, lines.numpy, {"w": big[:8], "n": 8}), out=inside)


def test_repeated_calls_of_two_callbacks_look_at_both(gpu):
    a, h = gpu.zeros((4, 8), "f32"), gpu.zeros((5,), "c64")
    runs = gpu.executor().runs
    for store in (Callback.multiply(h), Callback.magnitude(), Callback.scale(2.0), None, Callback.scale(3.0)):
        for _ in range(2):
            dp.fft.rfft(a, load=Callback.scale(0.5), store=store)
            request = dp.CallbackDftRequest(a, "r2c", None, -1, load=Callback.scale(0.5), store=store)
            assert runs[-1][0].key == (dp.CallbackDftRequest, *request.key())
    assert len({id(run[0]) for run in runs}) == 5
    with pytest.raises(BadRequest, match=r"load: got 3; expected a dispatch\.fft\.Callback"):
        dp.callback_dft(a, load=3)
    with pytest.raises(TypeError, match="lode"):
        dp.callback_dft(a, lode=Callback.scale(2.0))
