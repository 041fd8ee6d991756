"""L·D·Lᴴ in SciPy's words: against SciPy, what is singular, NaN, refusals; its kernel, run by the CPU."""

import ctypes
import functools
import itertools
import shutil
import subprocess

import numpy as np
import pytest

import dispatch as dp
from cudabind.errors import LibraryNotFound
from dispatch.errors import BadRequest, LinAlgError, NoRow
from dispatch.keys import C64, C128, F32, F64, Arch
from dispatch.libraries.cusolver.copies import options
from dispatch.libraries.cusolver.ldl_expansion import SOURCE
from dispatch.libraries.nvrtc.launching import Strides
from dispatch.ops.linalg.packed import expanded, mirrored
from dispatch.table.select import select

DTYPES = ("f4", "f8", "c8", "c16")
KINDS = list(itertools.product(("f8", "c16"), (True, False), (True, False)))


@pytest.fixture
def dev():
    pytest.importorskip("scipy")
    return dp.device("host")


def drawn(rng, dtype, n, *, lower=True, hermitian=True):
    a = rng.standard_normal((n, n))
    a = (a + 1j * rng.standard_normal((n, n)) if dtype[0] == "c" else a).astype(dtype)
    return mirrored(a, lower=lower, hermitian=hermitian)


def half(a, *, lower):
    return np.where(np.tri(len(a), dtype=bool) if lower else np.tri(len(a), dtype=bool).T, a, np.nan)


@pytest.mark.parametrize(("dtype", "lower", "hermitian"), KINDS)
def test_the_factors_are_scipys(dtype, lower, hermitian, dev, rng):
    from scipy import linalg

    for n in (1, 2, 13, 40):
        a = drawn(rng, dtype, n, lower=lower, hermitian=hermitian)
        given = dev.array(half(a, lower=lower))
        expected = linalg.ldl(a, lower=lower, hermitian=hermitian)
        for one, other in zip(dp.linalg.ldl(given, lower, hermitian), expected, strict=True):
            np.testing.assert_allclose(one.numpy(), other, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_systems_of_matrices_that_are_not_definite(dtype, dev, rng):
    tolerance = 1e-9 if dtype in ("f8", "c16") else 2e-3
    for lower, hermitian in itertools.product((True, False), (True, False)):
        a = np.stack([drawn(rng, dtype, 9, hermitian=hermitian) + np.eye(9, dtype=dtype) for _ in range(2)])
        b = rng.standard_normal((2, 9, 3)).astype(dtype)
        given = dev.array(np.stack([half(one, lower=lower) for one in a]).astype(dtype))
        kind = {"lower": lower, "hermitian": hermitian}
        ldu, pivots, info = dp.ldl(given, **kind)
        assert not info.numpy().any()
        expected = np.linalg.solve(a, b)
        x = dp.ldl_solve(ldu, pivots, dev.array(b), **kind).numpy()
        np.testing.assert_allclose(x, expected, rtol=tolerance, atol=tolerance)
        assume = "hermitian" if hermitian else "sym"
        x = dp.linalg.solve(given, dev.array(b), lower, assume_a=assume).numpy()
        np.testing.assert_allclose(x, expected, rtol=tolerance, atol=tolerance)


def test_a_singular_matrix_has_factors_and_no_solution(dev):
    a = np.diag([4.0, -4.0, 0.0, 4.0])
    ldu, _, info = dp.ldl(dev.array(a))
    assert info.numpy() == 3
    np.testing.assert_array_equal(ldu.numpy(), a)
    lu, d, perm = (one.numpy() for one in dp.linalg.ldl(dev.array(a)))
    np.testing.assert_array_equal(lu @ d @ lu.T, a)
    assert perm.tolist() == [0, 1, 2, 3]
    with pytest.raises(LinAlgError, match=r"solve: the matrix is singular: D\[2, 2\] of its L·D·Lᴴ"):
        dp.linalg.solve(dev.array(a), dev.array(np.ones(4)), assume_a="sym")
    x, info = dp.linalg.solve(dev.array(a), dev.array(np.ones(4)), assume_a="her", check=False)
    assert info.numpy() == 3
    assert np.isnan(x.numpy()).all()
    with pytest.raises(LinAlgError, match=r"ldl: the matrix is singular: D\[2, 2\]"):
        dp.linalg.check_info("ldl", dp.ldl(dev.array(a))[2])


def test_what_is_not_finite_stays_in_the_factors(dev, rng):
    for value in (np.nan, np.inf):
        a = drawn(rng, "f8", 5)
        a[3, 1] = value
        ldu, _, info = dp.ldl(dev.array(a))
        assert not np.isfinite(ldu.numpy()).all()
        assert info.numpy() > 0


def test_nothing_is_factorized_of_nothing(dev):
    for shape in ((0, 0), (3, 0, 0), (0, 4, 4)):
        ldu, pivots, info = dp.ldl(dev.zeros(shape))
        assert (ldu.shape, pivots.shape, info.shape) == (shape, shape[:-1], shape[:-2])
        assert not info.numpy().any()


def test_complex_hermitian_matrices_need_cusolver_12_4(dev):
    a, places = dev.zeros((4, 4), "c64"), dev.zeros((4,), "i64")
    requests = {
        "ldl": dp.LdlRequest(a),
        "ldl_solve": dp.LdlSolveRequest(a, places, a),
        "solve": dp.SolveRequest(a, a, assume_a="her"),
    }
    for op, request in requests.items():
        said = (
            r"needs assume_a=SYM, or a real.*'gen'" if op == "solve" else r"needs hermitian=False, .*lu_factor or eigh"
        )
        with pytest.raises(NoRow, match=said) as caught:
            select(request, Arch(90), {"cusolverDn": (12, 0, 4)})
        assert "needs cusolverDn 12.4" in str(caught.value)
        row = select(request, Arch(90), {"cusolverDn": (12, 4, 1)})
        assert row.variant == "Hermitian"
        assert row.function.startswith("cusolverDnXhetr")
    assert select(dp.LdlRequest(a, hermitian=False), Arch(90), {"cusolverDn": (12, 0, 4)}).function.endswith("Csytrf")


def overwritten(dev):
    a = dev.zeros((3, 3))
    dp.ldl(a, expand=True, lu=a)


REFUSED = {
    "as many rows as columns": lambda dev: dp.ldl(dev.zeros((3, 4))),
    "pivots: got i32.3.; expected i64": lambda dev: dp.ldl_solve(
        dev.zeros((3, 3)), dev.zeros((3,), "i32"), dev.zeros((3,))
    ),
    "pivots: got .1, 2, 4.; expected the factors that `ldl` returned": lambda dev: dp.ldl_solve(
        dev.array(np.eye(3)), dev.array(np.array([1, 2, 4])), dev.zeros((3,), "f64")
    ),
    "pivots: got .-2, 2, 3.": lambda dev: dp.ldl_solve(
        dev.array(np.eye(3)), dev.array(np.array([-2, 2, 3])), dev.zeros((3,), "f64")
    ),
    "this ldl has no lu": lambda dev: dp.ldl(dev.zeros((3, 3)), lu=dev.zeros((3, 3))),
    "overlaps a": overwritten,
    "b: got f64.3.; expected f32": lambda dev: dp.ldl_solve(
        dev.zeros((3, 3)), dev.zeros((3,), "i64"), dev.zeros((3,), "f64")
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_bad_input_is_refused_before_a_call(said, dev):
    with pytest.raises(BadRequest, match=said):
        REFUSED[said](dev)


# -- the kernel -------------------------------------------------------------------------------------------------------
BEFORE = """
#include <algorithm>
#include <cstdlib>
#include <cstring>
using std::max; using std::min; using std::abs;
#define __global__
#define __device__ static
#define __shared__ static
#define __align__(n)
struct Three { unsigned x, y; };
static Three threadIdx, blockIdx, blockDim = {1, 1}, gridDim = {1, 1};
static void __syncthreads() {}
static void atomicMin(int* at, int other) { *at = min(*at, other); }
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """`kernels(dtype)`: the kernels, each run by one thread."""
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    pytest.importorskip("scipy")

    @functools.cache
    def compiled(dtype):
        folder = tmp_path_factory.mktemp("ldl")
        # One thread does what the 33rd does on a GPU, too.
        (folder / "k.cpp").write_text(BEFORE + SOURCE.replace("thread == 32", "thread == 0"))
        made = ["g++", "-shared", "-fPIC", "-O0", *options(dtype), str(folder / "k.cpp"), "-o", str(folder / "k.so")]
        subprocess.run(made, check=True, capture_output=True)
        return ctypes.CDLL(str(folder / "k.so"))

    return compiled


@pytest.mark.parametrize("dtype", [F64, C128])
def test_the_kernel_run_by_one_thread_tells_where_d_is_singular(dtype, kernels, rng):
    """Blocks of one row and of two, stored as either triangle has them; a status that is there stays."""
    kind = dtype.numpy
    singular = np.array([[1, 2], [2, 4]]), np.zeros((2, 2)), np.array([[0, 0], [0, 5]])
    for lower, hermitian in itertools.product((True, False), (True, False)):
        packed = rng.standard_normal((8, 6, 6)).astype(kind)  # what is beside the blocks is not looked at
        pivots = np.tile(np.array([1, -3, -3, -5, -5, 6]), (8, 1))
        info, wanted = np.zeros(8, np.int32), np.zeros(8, np.int32)
        packed[1, 0, 0], wanted[1] = 0, 1
        packed[2, 5, 5], wanted[2] = 0, 6
        for number, block in zip((3, 4, 5), singular, strict=True):
            packed[number, 3:5, 3:5], wanted[number] = block, 4
        i = 1j if dtype.is_complex else 1
        packed[6, 1:3, 1:3] = [[1, 2 * i], [-2 * i if hermitian else 2 * i, 4 * i * i if not hermitian else 4]]
        wanted[6] = 2
        packed[7, 0, 0], info[7], wanted[7] = 0, 3, 3
        long, at = ctypes.c_int64, Strides(6, 1, 36)
        source, places, told = (ctypes.c_void_p(one.ctypes.data) for one in (packed, pivots, info))
        kernels(dtype).note_singular_blocks(long(8), source, at, long(6), places, told, long(lower), long(hermitian))
        assert info.tolist() == wanted.tolist()


@pytest.mark.parametrize("dtype", [F64, C128])
def test_the_kernel_run_by_one_thread_takes_the_factors_apart(dtype, kernels, rng):
    kernel = kernels(dtype).expand_ldl
    for n, lower, hermitian in itertools.product((1, 2, 9, 24), (True, False), (True, False)):
        packed, pivots = [], []
        for _ in range(2):
            a = drawn(rng, dtype.numpy.str[1:], n, hermitian=hermitian)
            if n == 9:
                np.fill_diagonal(a, 0)
            out, places, _ = dp.ldl(dp.device("host").array(a), lower=lower, hermitian=hermitian)
            packed.append(out.numpy())
            pivots.append(places.numpy())
        source = np.asarray(packed)
        every = np.asarray(pivots)
        outer, d, order = np.full_like(source, 7), np.full_like(source, 7), np.full_like(every, 7)
        at = Strides(n, 1, n * n)
        long = ctypes.c_int64
        addresses = [ctypes.c_void_p(one.ctypes.data) for one in (source, every, outer, d, order)]
        first, places, one, other, last = addresses
        kernel(long(2), first, at, long(n), places, one, at, other, at, last, long(lower), long(hermitian))
        for number in range(2):
            expected = expanded(source[number], every[number], lower=lower, hermitian=hermitian)
            for found, wanted in zip((outer, d, order), expected, strict=True):
                np.testing.assert_array_equal(found[number], wanted)


@pytest.mark.parametrize("arch", ["sm_80", "sm_100"])
@pytest.mark.parametrize("dtype", [F32, F64, C64, C128])
def test_the_kernel_compiles(dtype, arch):
    nvrtc = pytest.importorskip("cudabind.nvrtc")
    try:
        code = nvrtc.compile(SOURCE, "expansion.cu", (f"-arch={arch}", *options(dtype))).code
    except LibraryNotFound:
        pytest.skip("NVRTC is not installed")
    assert b"expand_ldl" in code


@pytest.mark.parametrize(
    ("routine", "info", "words"),
    [
        ("cholesky", "x", "info: got 'x'; expected a status: a tensor of whole numbers"),
        ("cholesky", None, "info: got None"),
        ("cholesky", 0.5, "info: got 0.5"),
        ("choleski", 0, "routine: got 'choleski'; expected one of cholesky, "),
        (3, 0, "routine: got 3"),
    ],
)
def test_a_status_that_is_none_is_refused(routine, info, words):
    with pytest.raises(BadRequest, match=words):
        dp.linalg.check_info(routine, info)
