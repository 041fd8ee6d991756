"""The kernel that factorizes singular matrices, compiled for the CPU by g++ and run by one thread, beside LAPACK's."""

import ctypes
import shutil
import subprocess

import numpy as np
import pytest

from cudabind.errors import LibraryNotFound
from dispatch.keys import C64, C128, F32, F64
from dispatch.libraries.cublas.singular import SOURCE
from dispatch.libraries.cusolver.copies import options
from dispatch.libraries.nvrtc.launching import Strides

DTYPES = (F32, F64, C64, C128)
BEFORE = """
#define __global__
#define __device__ static
#define __shared__ static
#define __align__(bytes) alignas(bytes)
struct Place { unsigned x; };
static const Place threadIdx = {0}, blockIdx = {0}, blockDim = {1}, gridDim = {1};
static void __syncthreads() {}
static int __syncthreads_or(int one) { return one; }
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    pytest.importorskip("scipy")
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    folder, found = tmp_path_factory.mktemp("singular"), {}
    for dtype in DTYPES:
        source, library = folder / f"{dtype}.cpp", folder / f"{dtype}.so"
        source.write_text(BEFORE + SOURCE)
        sanitized = ("-fsanitize=undefined", "-fno-sanitize-recover=all", "-static-libubsan")
        command = ["g++", *options(dtype), *sanitized, "-shared", "-fPIC", str(source), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:2000]
        found[dtype] = ctypes.CDLL(str(library)).refactorize_singular
    return found


def strides_of(array):
    batch, row, col = (step // array.itemsize for step in array.strides)
    return Strides(row, col, batch)


def completed(kernel, a, lu, info):
    """What becomes of factors and statuses, and the pivots, which are 0 where nothing was done."""
    pivots, statuses = np.zeros(a.shape[:2], np.int32), np.array(info, np.int32)
    pointers = [ctypes.c_void_p(one.ctypes.data) for one in (a, lu, pivots, statuses)]
    kernel(*pointers, ctypes.c_int64(a.shape[1]), ctypes.c_int64(len(a)), strides_of(a), strides_of(lu))
    return pivots, statuses


def drawn(rng, dtype, shape):
    a = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype.is_complex else 0)
    return a.astype(dtype.numpy)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_singular_matrices_are_factorized_as_lapack_does(dtype, kernels, rng):
    from dispatch.ops.linalg.spectral_reference import lapack

    a = drawn(rng, dtype, (5, 7, 7))
    a[1, :, 2] = 0
    a[2, :, 0] = a[2, :, 6] = 0
    a[3] = 0
    a[4, 3] = 0
    lu = np.full((5, 9, 7), np.nan, dtype.numpy).mT[:, :, :7]  # in columns, with gaps between the matrices
    lu[0] = 8
    pivots, statuses = completed(kernels[dtype], a, lu, (0, 3, 1, 1, 7))
    assert (lu[0] == 8).all()
    assert not pivots[0].any()
    for number in range(1, 5):
        expected, order, status = lapack("getrf", dtype.numpy)(a[number])
        assert statuses[number] == status > 0
        assert pivots[number].tolist() == (order + 1).tolist()
        np.testing.assert_allclose(lu[number], expected, rtol=0, atol=100 * np.finfo(dtype.numpy).eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_zero_on_the_diagonal_is_enough_where_the_status_says_nothing(dtype, kernels, rng):
    a = drawn(rng, dtype, (2, 4, 4))
    a[1, :, 1] = 0
    lu = np.ones_like(a)
    lu[1, 1, 1] = 0
    pivots, statuses = completed(kernels[dtype], a, lu, (0, 0))
    assert statuses.tolist() == [0, 2]
    assert pivots[0].tolist() == [0] * 4
    assert pivots[1].min() >= 1


def test_quotients_of_large_and_small_numbers_neither_overflow_nor_vanish(kernels):
    for scale in (1e-30, 1e30):
        a = np.array([[[1, 1, 0], [2 + 2j, 1, 0], [1j, 1, 0]]], np.complex64) * np.float32(scale)
        lu = np.zeros_like(a)
        _, statuses = completed(kernels[C64], a, lu, (3,))
        assert statuses[0] == 3
        np.testing.assert_allclose(lu[0, 1:, 0] * np.array([1, 1]), a[0, [0, 2], 0] / a[0, 1, 0], rtol=1e-6)


@pytest.mark.parametrize("arch", ["sm_80", "sm_100"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_compiles(dtype, arch):
    nvrtc = pytest.importorskip("cudabind.nvrtc")
    try:
        code = nvrtc.compile(SOURCE, "singular.cu", (f"-arch={arch}", *options(dtype))).code
    except LibraryNotFound:
        pytest.skip("NVRTC is not installed")
    assert b"refactorize_singular" in code
