"""Eigenvalues in SciPy's and NumPy's words: some of them, those of pairs of matrices; refusals and what fails."""

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from cudabind.errors import LibraryNotFound
from dispatch.errors import BadRequest, LinAlgError
from dispatch.keys import C64, C128, F32, F64
from dispatch.libraries.cusolver.copies import options
from dispatch.libraries.cusolver.spectra import (
    SPECTRA,
    ComplexVectors,
    ConvertSygvjStatus,
    FillNanAfterFound,
    MarkUnconverged,
    MatchEigenvectors,
    ZeroNonfinite,
)
from dispatch.libraries.nvrtc.launching import Strides

spec = importlib.util.spec_from_file_location("blocks_on_cpu", Path(__file__).with_name("blocks_on_cpu.py"))
blocks_on_cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(blocks_on_cpu)
KERNELS = [
    step.kernel
    for step in (
        ZeroNonfinite,
        ComplexVectors,
        FillNanAfterFound,
        MarkUnconverged,
        ConvertSygvjStatus,
        MatchEigenvectors,
    )
]
DTYPES = ("f4", "f8", "c8", "c16")


@pytest.fixture
def dev():
    pytest.importorskip("scipy")
    return dp.device("host")


def drawn(rng, dtype, shape):
    a = rng.standard_normal(shape)
    return (a + 1j * rng.standard_normal(shape) if dtype[0] == "c" else a).astype(dtype)


def hermitian(rng, dtype, shape):
    a = drawn(rng, dtype, shape)
    return a + a.conj().mT


def positive(rng, dtype, shape):
    a = drawn(rng, dtype, shape)
    return a @ a.conj().mT + np.eye(shape[-1]).astype(dtype)


def close(got, expected, tolerance=2e-4):
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_some_eigenvalues_are_scipys(dtype, dev, rng):
    from scipy import linalg

    a = hermitian(rng, dtype, (9, 9))
    given, every = dev.array(a), np.linalg.eigvalsh(a)
    w, v = dp.linalg.eigh(given, subset_by_index=[2, 5])
    close(w.numpy(), linalg.eigh(a, subset_by_index=[2, 5])[0])
    close(a @ v.numpy(), v.numpy() * w.numpy(), 1e-3)
    low, high = (every[2] + every[3]) / 2, (every[6] + every[7]) / 2
    w, v = dp.linalg.eigh(given, subset_by_value=(low, high))
    close(w.numpy(), linalg.eigh(a, subset_by_value=(low, high))[0])
    assert (w.shape, v.shape) == ((4,), (9, 4))
    close(dp.linalg.eigvalsh(given, subset_by_value=(low, np.inf)).numpy(), every[3:])
    assert dp.linalg.eigvalsh(given, subset_by_value=(every[-1] + 1, np.inf)).shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("problem", [1, 2, 3])
def test_eigenvalues_of_a_pair_are_scipys(dtype, problem, dev, rng):
    from scipy import linalg

    a, b = hermitian(rng, dtype, (7, 7)), positive(rng, dtype, (7, 7))
    expected = linalg.eigh(a.astype("c16"), b.astype("c16"), type=problem, eigvals_only=True)
    size = np.abs(expected).max()
    for driver in ("syevd", "syevj"):
        w, v = dp.linalg.eigh(dev.array(a), dev.array(b), type=problem, driver=driver)
        close(w.numpy() / size, expected / size)
        metric = np.linalg.inv(b) if problem == 3 else b
        close(v.numpy().conj().T @ metric @ v.numpy(), np.eye(7), 1e-3)
    w = dp.linalg.eigvalsh(dev.array(a), dev.array(b), type=problem, subset_by_index=(1, 3))
    close(w.numpy() / size, expected[1:4] / size)


def test_of_a_batch_nan_stands_behind_what_is_within_the_bounds(dev):
    a = dev.array(np.stack([np.diag([1.0, 2.0, 3.0]), np.diag([4.0, 1.5, 5.0])]))
    w, v, count, info = dp.linalg.eigh(a, subset_by_value=(0, 2.5), check=False)
    assert count.numpy().tolist() == [2, 1]
    assert info.numpy().tolist() == [0, 0]
    np.testing.assert_array_equal(w.numpy(), [[1, 2, np.nan], [1.5, np.nan, np.nan]])
    assert np.isnan(v.numpy()[1, :, 1:]).all()
    kept, _ = dp.linalg.eigh(a, subset_by_value=(0, 2.5))
    assert kept.shape == (2, 3)


def test_a_pair_says_which_minor_of_b_is_not_positive_definite(dev):
    b = np.stack([np.eye(4), np.diag([1.0, 1, -1, 1])])
    a = np.stack([np.eye(4)] * 2)
    with pytest.raises(LinAlgError, match=r"eigh: the leading minor of order 3 .*definite: that of b of matrix \[1\]"):
        dp.linalg.eigh(dev.array(a), dev.array(b))
    with pytest.raises(LinAlgError, match="order 3"):
        dp.linalg.eigvalsh(dev.array(a[1]), dev.array(b[1]), subset_by_index=(0, 1))
    w, _, info = dp.generalized_eigh(dev.array(a), dev.array(b))
    assert info.numpy().tolist() == [0, 7]
    with pytest.raises(LinAlgError, match=r"info is 7: .* b's leading minor of order i is not .* of matrix \[1\]"):
        dp.linalg.check_info("generalized_eigh", info)
    assert np.isnan(w.numpy()).any(axis=1).tolist() == [False, True]
    with pytest.raises(LinAlgError, match="did not converge"):
        dp.linalg.eigh(dev.array(np.full((2, 2), np.nan)), dev.array(np.eye(2)))


REFUSED = {
    "subset_by_index: got .2, 4.; expected .first, last., with 0 <= first <= last < 4": {"subset_by_index": (2, 4)},
    "subset_by_index: got .3, 2.": {"subset_by_index": (3, 2)},
    "subset_by_index: got .0.5, 2.": {"subset_by_index": (0.5, 2)},
    "subset_by_index: got 3": {"subset_by_index": 3},
    "subset_by_value: got .2.0, 1.0.; expected .low, high., with low < high": {"subset_by_value": (2.0, 1.0)},
    "subset_by_value: got .nan, 1.0.": {"subset_by_value": (np.nan, 1.0)},
    "subset_by_value: got 'a'": {"subset_by_value": ("a", 1)},
    "by index or by value, not both": {"subset_by_value": (0, 1), "subset_by_index": (0, 1)},
    "driver: got SYEVJ with a subset": {"subset_by_index": (0, 1), "driver": "syevj"},
    "itype: got 4": {"itype": 4},
    "b: got f32.3, 3.; expected f32.4, 4., as a is": {"b": (3, 3)},
}


@pytest.mark.parametrize("said", REFUSED)
def test_bad_input_is_refused_before_a_call(said, dev):
    choices = dict(REFUSED[said])
    b = dev.zeros(choices.pop("b", (4, 4)))
    with pytest.raises(BadRequest, match=said):
        dp.generalized_eigh(dev.zeros((4, 4)), b, **choices)
    if not choices.keys() & {"itype"} and b.shape == (4, 4):
        with pytest.raises(BadRequest, match=said):
            dp.eigh(dev.zeros((4, 4)), **choices)


# -- any square matrix, and a few singular values ---------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
def test_eigenvalues_of_any_matrix_are_numpys(dtype, dev, rng):
    a = drawn(rng, dtype, (2, 7, 7))
    w, v = dp.linalg.eig(dev.array(a))
    assert w.numpy().dtype == v.numpy().dtype == np.result_type(dtype, "c8")
    close(a @ v.numpy(), v.numpy() * w.numpy()[:, None], 1e-3)
    close(np.linalg.norm(v.numpy(), axis=1), np.ones((2, 7)))
    found = dp.linalg.eigvals(dev.array(a)).numpy()
    for one, expected in zip(found, np.linalg.eigvals(a), strict=True):
        apart = np.abs(one[:, None] - expected)
        assert sorted(apart.argmin(axis=1)) == list(range(7))
        assert apart.min(axis=1).max() < 1e-3


def test_the_eigenvalues_of_a_rotation_are_a_pair_the_positive_imaginary_part_first(dev):
    w, v = dp.linalg.eig(dev.array([[0.0, -2.0], [2.0, 0.0]]))
    np.testing.assert_allclose(w.numpy(), [2j, -2j], atol=1e-12)
    assert (v.numpy()[:, 0] == v.numpy()[:, 1].conj()).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_left_eigenvectors_are_those_of_the_conjugate_transpose(dtype, dev, rng):
    a = drawn(rng, dtype, (2, 5, 5))
    w, u, v = (one.numpy() for one in dp.linalg.eig(dev.array(a), left=True))
    close(u.conj().mT @ a, w[..., None] * u.conj().mT, 1e-3)
    close(a @ v, v * w[:, None], 1e-3)
    products = u.conj().mT @ v  # of other eigenvalues they are orthogonal to the right ones
    close(products, products * np.eye(5), 1e-3)
    alone = [one.numpy() for one in dp.linalg.eig(dev.array(a), left=True, right=False)]
    assert all((one == other).all() for one, other in zip(alone, (w, u), strict=True))
    assert (dp.linalg.eig(dev.array(a), right=False).numpy().shape) == w.shape
    assert [one.shape for one in dp.eig(dev.array(a), left=True)] == [(2, 5), (2, 5, 5), (2, 5, 5), (2,)]
    for name, given, wanted in (("right", 1, "a bool"), ("left", None, "a bool")):
        with pytest.raises(BadRequest, match=f"{name}: got {given}; expected {wanted}"):
            dp.linalg.eig(dev.array(a), **{name: given})
    with pytest.raises(BadRequest, match="left: got True; expected False with eigvals_only=True"):
        dp.eig(dev.array(a), left=True, eigvals_only=True)


def test_what_is_not_finite_has_no_eigenvalues(dev):
    a = np.stack([np.eye(3), np.full((3, 3), np.nan)])
    with pytest.raises(LinAlgError, match=r"eig: the method did not converge.* of matrix \[1\]"):
        dp.linalg.eig(dev.array(a))
    w, _, info = dp.linalg.eig(dev.array(a), check=False)
    assert info.numpy().tolist() == [0, 1]
    assert np.isnan(w.numpy()).any(axis=1).tolist() == [False, True]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_matrix_of_small_rank_is_its_largest_singular_values(dtype, dev, rng):
    a = drawn(rng, dtype, (12, 2)) @ drawn(rng, dtype, (2, 9))
    u, s, vh = dp.linalg.randomized_svd(dev.array(a), 2)
    assert (u.shape, s.shape, vh.shape) == ((12, 2), (2,), (2, 9))
    close((u.numpy() * s.numpy()) @ vh.numpy(), a, 1e-3)


@pytest.mark.parametrize(
    ("said", "choices"),
    [
        ("rank: got 4; expected a whole number from 1 to 3", {"rank": 4}),
        ("rank: got 0", {"rank": 0}),
        ("oversampling: got 2; expected 0 to 1, with a rank of 2", {"rank": 2, "oversampling": 2}),
        ("iterations: got -1", {"rank": 2, "iterations": -1}),
    ],
)
def test_a_rank_that_is_none_is_refused(said, choices, dev):
    with pytest.raises(BadRequest, match=said):
        dp.randomized_svd(dev.zeros((4, 6)), **choices)
    with pytest.raises(BadRequest, match="at least 2 rows and columns"):
        dp.randomized_svd(dev.zeros((1, 6)), 1)
    with pytest.raises(BadRequest, match="as many rows as columns"):
        dp.eig(dev.zeros((4, 6)))


@pytest.mark.parametrize("arch", ["sm_80", "sm_100"])
@pytest.mark.parametrize("dtype", [F32, F64, C64, C128])
def test_the_kernels_behind_the_routines_compile(dtype, arch):
    nvrtc = pytest.importorskip("cudabind.nvrtc")
    try:
        code = nvrtc.compile(SPECTRA, "spectra.cu", (f"-arch={arch}", *options(dtype))).code
    except LibraryNotFound:
        pytest.skip("NVRTC is not installed")
    assert all(name.encode() in code for name in KERNELS)


ON_CPU = """
#include <cmath>
using std::hypot;
#define __global__
#define __shared__ static
#define __align__(bytes) alignas(bytes)
static float __int_as_float(int) { return std::nanf(""); }
struct Place { unsigned x, y; };
static const Place threadIdx = {0, 0}, blockIdx = {0, 0}, blockDim = {1, 1}, gridDim = {1, 1};
static void __syncthreads() {}
"""


@pytest.mark.parametrize("dtype", [C64, C128])
def test_each_eigenvalue_takes_the_nearest_that_is_left(dtype, tmp_path, rng):
    """The kernel itself, compiled for the CPU and run by one thread."""
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    (tmp_path / "spectra.cpp").write_text(ON_CPU + SPECTRA.replace("#define NAN", "#undef NAN\n#define NAN"))
    command = ["g++", *options(dtype), "-shared", "-fPIC", "spectra.cpp", "-o", "spectra.so"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[:2000]
    kernel = ctypes.CDLL(str(tmp_path / "spectra.so")).match_eigenvectors
    n, kind = 9, dtype.numpy
    values, source = (drawn(rng, "c16", shape).astype(kind) for shape in ((3, n), (3, n, n)))
    values[0, 3] = values[0, 5]  # twice there
    values[2, 4] = np.nan
    orders = [rng.permutation(n) for _ in range(3)]
    others = np.stack([one[order].conj() * (1 + 1e-6) for one, order in zip(values, orders, strict=True)]).astype(kind)
    info, status = np.array([0, 2, 0], np.int32), np.array([0, 1, 7], np.int32)
    target = np.zeros((3, n, n), kind)
    pointers = [ctypes.c_void_p(one.ctypes.data) for one in (values, others, source, target, info, status)]
    strides = [Strides(1, n, n * n), Strides(n, 1, n * n)]  # from columns to rows
    kernel(*pointers, ctypes.c_int64(n), ctypes.c_int64(3), *strides)
    assert info.tolist() == [0, 2, 7]
    for number in range(2):
        taken = [int((source[number] == target[number][:, i]).all(axis=1).argmax()) for i in range(n)]
        assert sorted(taken) == list(range(n))
        np.testing.assert_array_equal(values[number][orders[number]][taken], values[number])


@pytest.mark.parametrize("dtype", [F32, C128])
def test_matrices_that_are_not_finite_are_cleared_whole_and_no_others(dtype, tmp_path, rng):
    """The kernels by blocks of several threads that wait for each other."""
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    source = 'extern "C" double hypot(double, double);' + SPECTRA
    blocks = blocks_on_cpu.InBlocks(tmp_path)
    bad = [1, 4, 6]
    # By columns with a gap behind each and behind each matrix, in which a NaN is nobody's.
    room = drawn(rng, "c16" if dtype is C128 else "f4", (7, 4, 6))
    room[:, :, 5] = np.nan
    a, given = room[:, :, :5].mT, room.copy()
    a[1, 4, 3], a[4, 0, 0], a[6, 2, 1] = np.nan, np.inf, -np.inf
    if dtype is C128:
        a[4, 0, 0] = complex(0, np.inf)
    flags, info = np.full(7, 9, np.int32), np.array([0, 0, 3, 0, 2, 0, 0], np.int32)
    values = (ctypes.c_void_p(room.ctypes.data), ctypes.c_void_p(flags.ctypes.data), *map(ctypes.c_int64, (5, 4, 7)))
    parameters = ["Element* source", "int* flags", "Int rows", "Int cols", "Int batch", "Strides at"]
    blocks.launched(source, "zero_nonfinite", options(dtype), parameters, (3, 32), (*values, Strides(1, 6, 24)))
    assert np.flatnonzero(flags).tolist() == bad
    assert set(flags.tolist()) == {0, 1}
    given[bad, :, :5] = 0
    np.testing.assert_array_equal(room, given)
    values = (ctypes.c_void_p(info.ctypes.data), ctypes.c_void_p(flags.ctypes.data), ctypes.c_int64(7))
    parameters = ["int* info", "const int* flags", "Int batch"]
    blocks = blocks_on_cpu.InBlocks(tmp_path / "mark")
    blocks.folder.mkdir()
    blocks.launched(source, "mark_unconverged", options(dtype), parameters, (1, 32), values)
    assert info.tolist() == [0, 1, 3, 0, 1, 0, 1]
