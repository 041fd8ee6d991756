"""Fourier transforms on the GPU: every row through its cases, every size, other addresses, torch's tensors."""

import gc

import numpy as np
import pytest

import dispatch as dp
from cudabind import driver
from dispatch.keys import HOST
from dispatch.libraries.cufft import transforms
from dispatch.ops.fft.cases import cases
from dispatch.row_check import check_row

ROWS = [row for op in ("dft", "half_dft", "dct", "dst", "roll") for row in dp.TABLE.of(op) if row.min_arch != HOST]
EPS = {np.dtype(kind): np.finfo(kind).eps for kind in ("f4", "f8", "c8", "c16")}
BYTES = 36 << 30  # of the largest test


def complex_normal(rng, shape):
    return rng.standard_normal(shape) + 1j * rng.standard_normal(shape)


def off(got, expected):
    """How far a result is off, in units of what its dtype's roundoff may make of a transform of its size."""
    n = max(2, got.shape[-1])
    return np.linalg.norm(got - expected) / (EPS[got.dtype] * np.log2(2 * n) * np.linalg.norm(expected))


def close(got, expected):
    assert got.shape == expected.shape
    assert off(got, expected) <= 4


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_passes_its_cases_or_refuses_them_with_its_reasons(row, gpu, rng, skip_without):
    if not row.on(gpu.arch):
        pytest.skip(f"needs {row.min_arch} or newer, this GPU is {gpu.arch}")
    skip_without(row)
    failed = []
    for case in cases(row):
        try:
            check_row(row, case, gpu, rng)
        except Exception as error:  # noqa: BLE001, PERF203  # whatever it is, the other cases are tried
            failed.append(f"{case.id}: {type(error).__name__}: {error}")
    assert not failed, "\n".join([f"{len(failed)} of {len(cases(row))} cases fail", *failed])


def test_powers_of_2_without_a_factor_are_cufft_s_own_in_f16(gpu, rng):
    name, eps = "f16", 2.0**-11
    for n in (2, 8, 64, 1024, 4096):
        pairs = gpu.array(rng.standard_normal((3, n, 2)), name)
        real = gpu.array(rng.standard_normal((3, n)), name)
        x, y = pairs.numpy().astype("f8"), real.numpy().astype("f8")
        spectrum = np.fft.rfft(y)
        half = gpu.array(np.stack((spectrum.real, spectrum.imag), -1) / n, name)
        z = half.numpy().astype("f8")
        for request, right, steps in (
            (dp.HalfDftRequest(pairs, axes=-1), np.fft.fft(x[..., 0] + 1j * x[..., 1]), ["Transform"]),
            (dp.HalfDftRequest(real, "r2c", axes=-1), spectrum, ["Transform"]),
            (
                dp.HalfDftRequest(half, "c2r", n, -1, inverse=True, norm="forward"),
                n * np.fft.irfft(z[..., 0] + 1j * z[..., 1], n),
                ["Move", "Transform"],
            ),
        ):
            got = dp.run(request).numpy().astype("f8")
            expected = np.stack((right.real, right.imag), -1) if np.iscomplexobj(right) else right
            assert [type(step).__name__ for step in request.bound.plan._steps] == steps, (n, str(request.kind))
            far = np.linalg.norm(got - expected) / (eps * np.log2(2 * n) * np.linalg.norm(expected))
            assert far <= 1, (n, str(request.kind), far)


@pytest.mark.parametrize("kind", ["c8", "c16"])
def test_every_size_from_1_to_4096_there_and_back(gpu, rng, kind):
    failed = []
    for n in range(1, 4097):
        x = complex_normal(rng, (2, n)).astype(kind)
        a = gpu.array(x)
        spectrum = dp.fft.fft(a)
        real = dp.fft.rfft(gpu.array(x.real.copy()))
        results = {
            "fft": (spectrum, np.fft.fft(x.astype("c16"))),
            "there and back": (dp.fft.ifft(spectrum), x),
            "rfft": (real, np.fft.rfft(x.real.astype("f8"))),
            "rfft and irfft": (dp.fft.irfft(real, n), x.real),
        }
        failed += [
            f"{what} of {n}: {got}" for what, pair in results.items() if not (got := off(pair[0].numpy(), pair[1])) <= 4
        ]
        energy = np.linalg.norm(spectrum.numpy().astype("c16")) ** 2
        assert np.isclose(energy, n * np.linalg.norm(x.astype("c16")) ** 2, rtol=1e-4)  # Parseval
    assert not failed, "\n".join([f"{len(failed)} fail", *failed[:40]])


@pytest.mark.parametrize("power", range(13, 27))
def test_large_powers_of_2_and_their_neighbours(gpu, rng, power):
    for n in (2**power, 2**power - 1 if power < 21 else 3 * 2 ** (power - 2)):
        x = complex_normal(rng, n).astype("c8")
        spectrum = dp.fft.fft(gpu.array(x))
        close(spectrum.numpy(), np.fft.fft(x.astype("c16")))
        close(dp.fft.ifft(spectrum).numpy(), x)


def test_every_order_of_axes(gpu, rng):
    from itertools import permutations

    x = complex_normal(rng, (5, 6, 7, 8))
    a = gpu.array(x)
    for count in range(1, 5):
        for axes in permutations(range(4), count):
            for name in ("fftn", "irfftn"):
                close(getattr(dp.fft, name)(a, axes=axes).numpy(), getattr(np.fft, name)(x, axes=axes))
            close(dp.fft.rfftn(gpu.array(x.real.copy()), axes=axes).numpy(), np.fft.rfftn(x.real, axes=axes))
            y = gpu.array(x.transpose(*axes, *(axis for axis in range(4) if axis not in axes)))
            close(dp.fft.fft2(y, axes=(0, 1)).numpy(), np.fft.fft2(y.numpy(), axes=(0, 1)))


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("fft", (1024,), "c8"),
        ("ifft", (7, 61), "c16"),
        ("rfft", (5, 1000), "f4"),
        ("irfft2", (6, 20, 33), "c8"),
        ("fftn", (3, 4, 5, 6, 8), "c16"),
        ("hfft", (4, 65), "c16"),
        ("fft2", (8, 30, 40), "f2"),
    ],
)
def test_repeated_calls_at_other_addresses(gpu, rng, name, shape, kind):
    """The library's own call at first, the relocated graph from some tens of calls on."""
    for turn in range(150):
        x = (complex_normal(rng, shape) if kind[0] == "c" else rng.standard_normal(shape)).astype(kind)
        spare = gpu.empty((1 + turn % 5, 97), "f32")
        a = gpu.array(x)
        wide = x.astype("c16" if kind[0] == "c" else "f8")
        close(getattr(dp.fft, name)(a).numpy(), getattr(np.fft, name)(wide))
        assert (a.numpy() == x).all()
        del spare
    stats = gpu.executor().relocation_stats()
    assert stats["differed"] == 0
    assert stats["relocated"] > 0


def test_many_shapes_in_flight_share_their_memory(gpu, rng):
    operands = [complex_normal(rng, (n % 7 + 1, n)).astype("c8") for n in range(500, 700, 7)]
    for _ in range(3):
        results = [dp.fft.ifft(dp.fft.fft(gpu.array(x), axis=0), axis=0) for x in operands]
        for x, result in zip(operands, results, strict=True):
            assert np.abs(result.numpy() - x).max() < 1e-5


def test_plans_of_cufft_stay_within_their_limit(gpu, monkeypatch):
    gpu.executor().forget()
    gc.collect()
    account = gpu.executor().handles.get("cufft")
    others = 0 if account is None else account.nbytes  # of plans that somebody has, such as the frames of a failed test
    monkeypatch.setattr(transforms, "LIMIT", 40 << 20)
    for n in range(2, 300):
        x = gpu.zeros((2, n), "c64")
        assert dp.fft.fft(x).shape == (2, n)
    gpu.synchronize()
    assert sum(transforms.estimated_bytes(entry[0].problem) for entry in gpu.idle["cufft"]) <= (41 << 20)
    assert gpu.executor().handles["cufft"].nbytes <= others + (41 << 20), others


def test_more_elements_than_32_bits_count(gpu):
    gc.collect()
    gpu.synchronize()
    with gpu.context:
        free, _ = driver.cuMemGetInfo()
    if free < BYTES:
        pytest.skip(f"needs {BYTES >> 30} GiB of free memory")
    rows, n = (1 << 16) + 1, 1 << 15
    x = gpu.zeros((rows, n), "c64")
    last = np.exp(2j * np.pi * 5 * np.arange(n) / n).astype("c8")
    x[rows - 1].copy_from(last)
    dp.fft.fft(x, out=x)
    found = x[rows - 1].numpy()
    assert abs(found[5] - n) < 1e-2 * n
    assert np.abs(np.delete(found, 5)).max() < 1e-2 * n
    assert not x[rows - 2].numpy().any()
    dp.fft.ifft(x, out=x)
    assert np.abs(x[rows - 1].numpy() - last).max() < 1e-5


@pytest.mark.parametrize("shape", [(4, 64), (3, 5, 30), (2, 6, 10, 12)])
def test_torch_s_tensors_come_back_as_torch_s(torch, shape):
    x = torch.randn(shape, device="cuda", dtype=torch.complex128)
    for _ in range(3):
        spectrum = dp.fft.fftn(x)
        assert isinstance(spectrum, torch.Tensor)
        torch.testing.assert_close(spectrum, torch.fft.fftn(x))
        torch.testing.assert_close(dp.fft.ifftn(spectrum), x)
        torch.testing.assert_close(dp.fft.rfft(x.real, norm="ortho"), torch.fft.rfft(x.real, norm="ortho"))
        close(dp.fft.irfftn(x).cpu().numpy(), np.fft.irfftn(x.cpu().numpy()))
        torch.testing.assert_close(dp.fft.fft(x.mT, axis=-2), torch.fft.fft(x.mT, dim=-2))


def test_a_gpu_gives_the_hosts_results(gpu, rng):
    x = complex_normal(rng, (4, 6, 9))
    for name in ("fftn", "ifft2", "irfftn", "hfft", "ifft"):
        there, here = (getattr(dp.fft, name)(device.array(x)) for device in (gpu, dp.device("host")))
        close(there.numpy(), here.numpy())


@pytest.mark.parametrize("name", ["dct", "idct", "dst", "idst"])
def test_cosine_and_sine_transforms_of_many_sizes(gpu, rng, name):
    scipy_fft = pytest.importorskip("scipy.fft")
    for kind in (1, 2, 3, 4):
        for n in (*range(2, 66), 127, 1000, 4096, 10007, 1 << 20):
            for dtype in ("f4", "f8"):
                x = rng.standard_normal((2, n)).astype(dtype)
                got = getattr(dp.fft, name)(gpu.array(x), kind, norm="ortho").numpy()
                close(got, getattr(scipy_fft, name)(x.astype("f8"), kind, norm="ortho"))


@pytest.mark.parametrize("kind", ["f4", "f8", "c8", "c16"])
def test_convolutions_are_scipys(gpu, rng, kind):
    signal = pytest.importorskip("scipy.signal")
    for first, second, axes in (
        ((100_000,), (501,), None),
        ((300, 400), (31, 17), None),
        ((40, 1000), (1, 64), (1,)),
        ((8, 30, 40), (3, 30, 5), (2, 0)),
    ):
        x, y = (complex_normal(rng, shape) for shape in (first, second))
        x, y = (one if kind[0] == "c" else one.real for one in (x, y))
        for mode in ("full", "same", "valid"):
            got = dp.signal.fftconvolve(gpu.array(x.astype(kind)), gpu.array(y.astype(kind)), mode, axes).numpy()
            expected = signal.fftconvolve(x, y, mode, axes)
            assert got.shape == expected.shape
            assert np.linalg.norm(got - expected) <= 100 * EPS[got.dtype] * np.linalg.norm(expected)
