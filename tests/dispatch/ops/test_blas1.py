"""BLAS level 1 on the host against SciPy, and refusals."""

import numpy as np
import pytest
import scipy.linalg
from scipy.linalg import blas

import dispatch as dp
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import HOST, Arch
from dispatch.table.select import select

GPU = Arch(90)


@pytest.fixture
def dev():
    return dp.device("host")


def test_places_are_counted_from_1(dev):
    x = np.array([0.5, -3, 2, 3])
    assert dp.iamax(dev.array(x)).item() == 2
    assert dp.iamin(dev.array(x)).item() == 1
    assert dp.iamax(dev.array(x[:0])).item() == 0


@pytest.mark.parametrize(("kind", "dtype"), [("s", "f4"), ("d", "f8"), ("c", "c8"), ("z", "c16")])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_places_are_those_of_scipys_blas_the_first_of_equals(dev, rng, kind, dtype, step):
    find = getattr(blas, f"i{kind}amax")
    for _ in range(20):
        x = rng.integers(-3, 4, 24).astype(dtype)  # many are equal
        if x.dtype.kind == "c":
            x += 1j * rng.integers(-3, 4, 24)
        view = dev.array(x)[::step]
        assert dp.iamax(view).item() == find(x, n=-(-24 // step), incx=step) + 1
        sizes = np.abs(x.real) + np.abs(x.imag)
        assert dp.iamin(view).item() == sizes[::step].argmin() + 1


def test_places_from_behind_are_refused_and_of_a_copy_those_of_numpy(dev):
    x = np.array([1.0, -5, 2, 5])
    for find, of_numpy in ((dp.iamax, np.argmax), (dp.iamin, np.argmin)):
        with pytest.raises(NoRow, match=r"needs x with a stride above 0, has .*: copy it"):
            find(dev.array(x)[::-1])
        assert find(dev.array(x[::-1].copy())).item() == of_numpy(np.abs(x[::-1])) + 1


def test_sums_norms_and_products(dev, rng):
    x, y = (rng.standard_normal(9) + 1j * rng.standard_normal(9) for _ in range(2))
    np.testing.assert_allclose(dp.dotc(dev.array(x), dev.array(y)).item(), np.vdot(x, y))
    np.testing.assert_allclose(dp.nrm2(dev.array(x)).item(), np.linalg.norm(x))
    assert dp.nrm2(dev.array(np.full(4, 1e200))).item() == 2e200
    assert dp.nrm2(dev.array(x.astype(np.complex64))).dtype == "f32"
    np.testing.assert_allclose(dp.axpy(dev.array(x), dev.array(y), alpha=2j).numpy(), 2j * x + y)


def test_rotations_are_scipy_s(dev, rng):
    x, y = rng.standard_normal((2, 6))
    c, s, r, z = dp.rotg(dev.array(np.array(3.0)), dev.array(np.array(-4.0)))
    assert (c.item(), s.item()) == pytest.approx(blas.drotg(3, -4))
    assert (r.item(), z.item()) == pytest.approx((-5, 1 / c.item()))
    got = [out.numpy() for out in dp.rot(dev.array(x), dev.array(y), c, s)]
    np.testing.assert_allclose(got, blas.drot(x, y, c.item(), s.item()), rtol=1e-14)
    w, v, sine = x + 1j * y, y - 2j * x, 0.48 + 0.64j
    numbers = (dev.array(np.array(number)) for number in (0.6, sine))
    got = [out.numpy() for out in dp.rot(dev.array(w), dev.array(v), *numbers)]
    np.testing.assert_allclose(got, scipy.linalg.lapack.zrot(w, v, 0.6, sine), rtol=1e-14)
    numbers = (2.0, 3.0, 1.0, 0.5)
    param, *_ = dp.rotmg(*(dev.array(np.array(number)) for number in numbers))
    np.testing.assert_allclose(param.numpy(), blas.drotmg(*numbers))
    got = [out.numpy() for out in dp.rotm(dev.array(x), dev.array(y), param)]
    np.testing.assert_allclose(got, blas.drotm(x, y, param.numpy()), rtol=1e-14)


def test_vectors_are_exchanged_where_they_are(dev):
    x, y = dev.array(np.arange(3.0)), dev.array(np.arange(3.0, 6))
    assert [out.numpy().tolist() for out in dp.swap(x, y)] == [[3, 4, 5], [0, 1, 2]]
    assert dp.swap(x, y, out_x=x, out_y=y)[0] is x
    assert (x.numpy().tolist(), y.numpy().tolist()) == ([3, 4, 5], [0, 1, 2])
    assert dp.copy(x[::-1]).numpy().tolist() == [5, 4, 3]


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_half_precision_is_summed_in_f32(dtype, dev):
    x = dev.array(np.full(5000, 0.25), dtype)
    assert dp.dot(x, x).dtype == dtype
    assert dp.dot(x, x).item() == np.asarray(312.5, x.numpy().dtype)  # in f16 a sum would stay at 128
    assert dp.nrm2(x).item() == np.asarray(np.sqrt(312.5), x.numpy().dtype)
    assert dp.axpy(x, x, alpha=1 + 2**-20).dtype == dtype


def test_what_does_not_fit_is_refused(dev):
    x, z = dev.zeros((3,)), dev.zeros((3,), "c64")
    for make, words in (
        (lambda: dp.AxpyRequest(x, dev.zeros((4,))), "y: got f32[4]; expected f32[3]"),
        (lambda: dp.DotRequest(x, z), "y: got c64[3]; expected f32[3]"),
        (lambda: dp.ScalRequest(dev.zeros((3, 1))), "x: got f32[3, 1]; expected a vector"),
        (lambda: dp.ScalRequest(x, alpha=1j), "alpha: got 1j; expected a real number"),
        (lambda: dp.RotRequest(x, x, x, x), "c: got f32[3]; expected f32[]"),
        (lambda: dp.RotRequest(z, z, dev.zeros((), "c64"), dev.zeros(())), "c: got c64[]; expected f32[]"),
        (lambda: dp.RotRequest(x, x, 0.6, 0.8), "c: got a float; expected a dispatch Tensor"),
        (lambda: dp.RotmRequest(x, x, x), "param: got f32[3]; expected f32[5]"),
        (lambda: dp.RotmRequest(x, x, dev.zeros((10,))[::2]), "expected a dense tensor"),
        (lambda: dp.SwapRequest(x, x, out_x=x), "out_x: got memory that overlaps y"),
        (lambda: dp.RotgRequest(x, x), "a: got f32[3]; expected f32[]"),
        (lambda: dp.Nrm2Request(z, out=dev.zeros((), "c64")), "out: got c64[]; expected f32[]"),
    ):
        with pytest.raises(BadRequest) as error:
            make()
        assert words in str(error.value)
    for request, reason in ((dp.DotRequest(z, z), "c64"), (dp.IamaxRequest(x[::-1]), "x with a stride above 0")):
        with pytest.raises(NoRow, match=reason):
            select(request, GPU)


@pytest.mark.parametrize("where", [HOST, GPU], ids=str)
def test_the_first_that_is_said_of_a_vector_without_steps_is_to_copy_it(where, dev):
    """And not which sizes a kernel for large vectors is for: these no copy changes."""
    y, a = dev.zeros((16,)), dev.zeros((16, 16))
    x = dev.zeros((1,)).strided((16,), (0,))
    for request in (dp.AxpyRequest(x, y), dp.DotRequest(x, y), dp.Nrm2Request(x), dp.SymvRequest(a, x)):
        with pytest.raises(NoRow) as error:
            select(request, where)
        lines = str(error.value).splitlines()
        assert "needs x with a stride other than 0" in lines[1], lines
        assert lines[1].endswith(": copy it")
        assert lines[2].endswith(": copy it")


def test_what_is_too_small_for_the_library_that_is_asked_may_have_another(dev):
    with pytest.raises(NoRow, match=r"Nearest that works: library=None \(now own\)"):
        dp.nrm2(dev.zeros((16,)), library="own")
