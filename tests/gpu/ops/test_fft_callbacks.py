"""Transforms with callbacks on the GPU: every row through its cases, by cuFFT's callbacks and as passes around it.

Large sizes and those that take several kernels of cuFFT, operands at other addresses while earlier calls still run, in
captured graphs, on several streams; what does not compile; and the same as without callbacks.
"""

import gc

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest
from dispatch.keys import HOST
from dispatch.libraries.cufft.callbacks import CallbackPass, FusedTransform, why_not
from dispatch.ops.fft import cufft_callback
from dispatch.ops.fft.cases import cases
from dispatch.row_check import check_row

Callback = dp.fft.Callback
ROWS = [row for row in dp.TABLE.of("callback_dft") if row.min_arch != HOST]
EPS = {np.dtype(kind): np.finfo(kind).eps for kind in ("f4", "f8", "c8", "c16")}


def complex_normal(rng, shape):
    return rng.standard_normal(shape) + 1j * rng.standard_normal(shape)


def close(got, expected):
    assert got.shape == expected.shape
    n = max(2, expected.size)
    off = np.linalg.norm(got - expected)
    assert off <= 4 * EPS[got.dtype] * np.log2(2 * n) * np.linalg.norm(expected)


@pytest.fixture
def fused(monkeypatch):
    """All that cuFFT takes, also where passes are faster."""
    if why_not():
        pytest.skip(why_not())
    monkeypatch.setattr(cufft_callback, "slower", lambda _: "")


@pytest.mark.parametrize("way", ["callbacks", "passes"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_passes_its_cases(row, way, gpu, rng, skip_without, monkeypatch):
    skip_without(row)
    if way == "callbacks" and why_not():
        pytest.skip(why_not())
    monkeypatch.setattr(cufft_callback, "slower", lambda _: "")
    if way == "passes":
        monkeypatch.setattr(cufft_callback, "why_not", lambda: "not wanted")
    gpu.executor().forget()
    failed = []
    for case in cases(row):
        try:
            check_row(row, case, gpu, rng)
        except Exception as error:  # noqa: BLE001, PERF203  # whatever it is, the other cases are tried
            failed.append(f"{case.id}: {type(error).__name__}: {error}")
    assert not failed, "\n".join([f"{len(failed)} of {len(cases(row))} cases fail", *failed])
    gpu.executor().forget()


def steps(request):
    call = dp.prepare(request)
    call()
    return [type(step) for step in call._bound.plan._steps]


@pytest.mark.usefixtures("fused")
def test_a_transform_with_callbacks_is_one_step(gpu, caplog):
    """Otherwise cuFFT has refused them, and the rows' cases have tried the passes twice."""
    caplog.set_level("INFO", "dispatch")
    window = Callback.window(gpu.zeros((1024,), "f32"))
    request = dp.CallbackDftRequest(gpu.zeros((16, 1024)), "r2c", axes=1, load=window, store=Callback.magnitude())
    found = steps(request)
    if refused := [record.getMessage() for record in caplog.records if "not fused" in record.getMessage()]:
        pytest.skip(f"cuFFT refuses callbacks here, which are passes: {refused[0]}")
    assert found == [FusedTransform]
    request = dp.CallbackDftRequest(gpu.zeros((3, 4, 5, 6), "c64"), load=Callback.scale(2.0))
    assert steps(request)[0] is CallbackPass


# Sizes of one kernel and of several, with and without large primes; two and three axes.
@pytest.mark.parametrize("shape", [(7, 64), (3, 4096), (2, 1 << 17), (1, 1 << 20), (5, 211), (2, 10007), (2, 46189),
                                   (128, 96), (2, 512, 360), (16, 24, 40), (64, 128, 96)])  # fmt: skip
@pytest.mark.parametrize("kind", ["c8", "f4", "f8"])
def test_sizes_of_one_kernel_and_of_several(gpu, rng, shape, kind):
    x = (complex_normal(rng, shape) if kind == "c8" else rng.standard_normal(shape)).astype(kind)
    weights = rng.uniform(0.5, 1.5, 13).astype(kind)
    count = min(len(shape), 3) if len(shape) != 2 or shape[0] > 8 else 1
    axes = tuple(range(-count, 0))
    indexed = Callback(
        "return x * weights[i % n];",
        lambda x, i, weights, n: x * weights[i % n],
        {"weights": gpu.array(weights), "n": 13},
    )
    number = weights[np.arange(x.size).reshape(shape) % 13].astype("c16" if kind == "c8" else "f8")
    name = "fftn" if kind == "c8" else "rfftn"
    spectrum = getattr(np.fft, name)(x * number, axes=axes)
    close(getattr(dp.fft, name)(gpu.array(x), axes=axes, load=indexed).numpy(), spectrum)
    places = np.arange(spectrum.size).reshape(spectrum.shape) % 13
    stored = getattr(dp.fft, name)(gpu.array(x), axes=axes, store=indexed).numpy()
    close(stored, getattr(np.fft, name)(x, axes=axes) * weights[places])
    back = "ifftn" if kind == "c8" else "irfftn"
    given = spectrum.astype("c16" if kind == "f8" else "c8")
    got = getattr(dp.fft, back)(gpu.array(given), [shape[axis] for axis in axes], axes, store=indexed).numpy()
    close(got, x.astype("c16" if kind == "c8" else "f8") * number**2)


def test_a_large_array_has_a_64_bit_index(gpu):
    gc.collect()
    rows, n = (1 << 16) + 1, 1 << 15  # more elements than 32 bits count, of a byte each
    try:
        x = gpu.zeros((rows, n), "u8")
        x[rows - 1].copy_from(np.full(n, 3, "u1"))
        code = "return i / shape[1] == shape[0] - 1 ? Real(raw) : Real(0);"
        last = Callback(code, lambda x, at, shape: x * (at[0] == shape[0] - 1))
        got = dp.fft.rfft(x, load=last, precision="f32", store=Callback.magnitude())
    except dp.errors.OutOfMemory as error:
        pytest.skip(str(error))
    assert abs(got[rows - 1, 0].numpy() - 3 * n) < 1
    assert not got[rows - 2].numpy().any()


@pytest.mark.parametrize("waits", [True, False])
def test_repeated_calls_at_other_addresses(gpu, rng, waits):
    """cuFFT's own call at first, a relocated graph later; without waits earlier calls still run as operands change."""
    held = []
    for turn in range(150):
        x, w, h = rng.standard_normal((64, 512)), rng.uniform(0.5, 1.5, 512), complex_normal(rng, (64, 257))
        spare = gpu.empty((1 + turn % 5, 97), "f32")
        a, window, multiply = gpu.array(x), Callback.window(gpu.array(w)), Callback.multiply(gpu.array(h))
        held.append((dp.fft.rfft(a, load=window, store=multiply), np.fft.rfft(x * w) * h))
        if waits:
            close(held.pop()[0].numpy(), np.fft.rfft(x * w) * h)
        del spare, a, window, multiply
    for got, expected in held:
        close(got.numpy(), expected)
    assert gpu.executor().relocation_stats()["differed"] == 0


def test_calls_on_several_streams_keep_their_operands(gpu, rng):
    streams = [gpu.stream() for _ in range(4)]
    held = []
    for turn in range(40):
        x, w = rng.standard_normal((32, 256)), rng.standard_normal(256)
        with streams[turn % 4]:
            held.append((dp.fft.rfft(gpu.array(x), load=Callback.window(gpu.array(w))), np.fft.rfft(x * w)))
    for got, expected in held:
        close(got.numpy(), expected)


def test_a_captured_call_follows_what_its_operands_hold(torch):
    x, w = torch.randn(64, 256, device="cuda"), torch.rand(256, device="cuda") + 0.5
    stream = torch.cuda.Stream()
    window = Callback.window(w)
    with torch.cuda.stream(stream):
        for _ in range(3):
            dp.fft.rfft(x, load=window)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = dp.fft.rfft(x, load=window)
    for _ in range(3):
        x.copy_(torch.randn(64, 256, device="cuda"))
        w.copy_(torch.rand(256, device="cuda") + 0.5)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(out, torch.fft.rfft(x * w), rtol=1e-4, atol=1e-3)


def test_a_prepared_call_takes_other_operands(gpu, rng):
    x, w = rng.standard_normal((8, 128)), rng.standard_normal(128)
    request = dp.CallbackDftRequest(gpu.array(x), "r2c", axes=1, load=Callback.window(gpu.array(w)))
    call = dp.prepare(request)
    for _ in range(60):
        w = rng.standard_normal(128)
        close(call(**{"load.window": gpu.array(w)}).numpy(), np.fft.rfft(x * w))


def test_in_place(gpu, rng):
    z = complex_normal(rng, (6, 1000)).astype("c8")
    a = gpu.array(z)
    assert dp.fft.fft(a, load=Callback.scale(2.0), store=Callback.scale(0.5), out=a) is a
    close(a.numpy(), np.fft.fft(z.astype("c16")))


def test_lines_that_do_not_compile_are_shown(gpu):
    w = gpu.zeros((8,), "f32")
    wrong = Callback("Real y = x;\nreturn y * windw[i];", lambda x: x, {"window": w})
    with pytest.raises(
        BadRequest, match=r'line 2, `return y \* windw\[i\];`, does not compile: identifier "windw" is und'
    ):
        dp.fft.rfft(gpu.zeros((4, 8)), load=wrong)
    assert dp.fft.rfft(gpu.zeros((4, 8))).shape == (4, 5)


def test_plans_of_the_same_lines_are_made_once(gpu):
    """To link callbacks takes a second or so: a number that changes is no reason to."""
    import time

    a = gpu.zeros((3, 768), "c64")
    dp.fft.fft(a, load=Callback.scale(1.0))
    gpu.executor().forget()
    gc.collect()
    begun = time.perf_counter()
    for factor in range(2, 6):
        dp.fft.fft(a, load=Callback.scale(float(factor)))
        gpu.executor().forget()
        gc.collect()
    gpu.synchronize()
    assert time.perf_counter() - begun < 1
