"""Exponentials of matrices: those that are known, statuses, edges, and the plan with the kernels run on the CPU."""

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from cudabind.errors import LibraryNotFound
from dispatch.errors import BadRequest, LinAlgError
from dispatch.keys import C64, C128, F32, F64, HOST, Arch
from dispatch.libraries.cusolver.copies import options
from dispatch.libraries.cusolver.exponential import SOURCE
from dispatch.libraries.cusolver.reductions import BatchKernelStep
from dispatch.libraries.nvrtc import launching
from dispatch.ops.linalg.cases import cases
from dispatch.ops.linalg.exponential import THETA
from dispatch.ops.linalg.exponential_residuals import series
from dispatch.ops.linalg.residuals import THRESHOLD, residuals
from dispatch.table.select import select

ROWS = [row for row in dp.TABLE if row.op == "expm" and row.min_arch != HOST]
DTYPES = (F32, F64, C64, C128)
KERNELS = ("scale_to", "pade_sums", "sum_and_difference", "keep_squares", "join_status")


@pytest.fixture
def dev():
    pytest.importorskip("scipy")
    return dp.device("host")


def drawn(rng, dtype, shape):
    a = rng.standard_normal(shape)
    return (a + 1j * rng.standard_normal(shape) if dtype[0] == "c" else a).astype(dtype)


def ratio(dev, a):
    """The error in units of what roundoff makes of it."""
    request = dp.ExpmRequest(dev.array(a))
    out, info = dp.run(request)
    found = {"out": out.numpy(), "info": info.numpy()}
    return max(ratio for _, ratio in residuals(request, {"a": a}, found))


# -- what is known ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("dtype", "tolerance"), [("f4", 3e-5), ("f8", 1e-11), ("c8", 3e-5), ("c16", 1e-11)])
def test_exponentials_are_scipys_in_their_dtype(dtype, tolerance, dev, rng):
    from scipy import linalg

    a = drawn(rng, dtype, (2, 3, 6, 6))
    found = dp.linalg.expm(dev.array(a)).numpy()
    assert found.dtype == dtype
    expected = linalg.expm(a.astype(np.result_type(dtype, np.float64)))
    for one, other in zip(found.reshape(6, 6, 6), expected.reshape(6, 6, 6), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * np.abs(other).max())


def test_what_has_a_formula(dev, rng):
    shift = np.eye(6, k=1) * 3
    powers = sum(np.linalg.matrix_power(shift, k) / np.prod(np.arange(1, k + 1.0)) for k in range(6))
    np.testing.assert_allclose(dp.linalg.expm(dev.array(shift)).numpy(), powers, atol=1e-13)
    np.testing.assert_allclose(dp.linalg.expm(dev.zeros((4, 4), "f64")).numpy(), np.eye(4), rtol=0, atol=1e-15)
    values = np.array([-30.0, -1, 0, 0.5, 20])
    found = dp.linalg.expm(dev.array(np.diag(values))).numpy()
    np.testing.assert_allclose(np.diag(found), np.exp(values), rtol=1e-12)
    np.testing.assert_array_equal(found - np.diag(np.diag(found)), 0)
    np.testing.assert_allclose(dp.linalg.expm(dev.array([[np.pi * 1j]])).numpy(), -1, atol=1e-14)
    a = drawn(rng, "c16", (8, 8)) * 5
    u = dp.linalg.expm(dev.array(a - a.conj().T)).numpy()
    np.testing.assert_allclose(u.conj().T @ u, np.eye(8), atol=1e-13)
    turn = dp.linalg.expm(dev.array([[0.0, -1000], [1000, 0]])).numpy()
    exact = [[np.cos(1000), -np.sin(1000)], [np.sin(1000), np.cos(1000)]]
    np.testing.assert_allclose(turn, exact, atol=1e-12)


HARD = {
    "Moler and Van Loan's, by large powers that cancel": [[-49.0, 24], [-64, 31]],
    "of a norm far above its eigenvalues": [[1, 1e4], [0, -1]],
    "of eigenvalues close together": [[1, 1], [0, 1 + 1e-9]],
    "graded": [[0, 1e-8, 0], [-(2e10 + 4e8 / 6) * 1e-8, -3, 2e10 * 1e-8], [200 / 3, 0, -200 / 3]],
    "stiff": [[-200.0, 1, 0], [1, -1, 3], [0, 1, 1e-3]],
}


@pytest.mark.parametrize("kind", HARD)
def test_hard_ones_are_right_against_many_digits_and_so_is_the_series_that_judges(kind, dev):
    mpmath = pytest.importorskip("mpmath")
    a = np.array(HARD[kind])
    with mpmath.workdps(60):
        found = mpmath.expm(mpmath.matrix(a.tolist()), method="taylor").tolist()
    exact = np.array([[float(one) for one in row] for row in found])
    scale = np.linalg.norm(exact, 2) * max(1.0, np.linalg.norm(a, 2)) * 2.0**-53
    assert np.linalg.norm(series(a) - exact, 2) <= len(a) * scale
    assert ratio(dev, a) <= THRESHOLD


def test_fewer_squarings_give_the_same_and_too_few_say_so(dev, rng):
    a = drawn(rng, "f8", (5, 5))
    a *= 0.99 * THETA[F64] * 4 / np.abs(a).sum(axis=0).max()
    first, info = dp.expm(dev.array(a), squarings=2)
    assert info.numpy() == 0
    np.testing.assert_array_equal(first.numpy(), dp.linalg.expm(dev.array(a)).numpy())
    out, info = dp.expm(dev.array(a), squarings=1)
    assert info.numpy() == 1
    assert np.isnan(out.numpy()).all()


# -- statuses ---------------------------------------------------------------------------------------------------------
def test_a_status_says_what_is_wrong_and_what_helps(dev):
    many = np.stack([np.eye(2), 1e6 * np.eye(2), [[0, np.nan], [0, 0]], [[0, 0], [np.inf, 0]]])
    out, info = dp.linalg.expm(dev.array(many), check=False)
    assert info.numpy().tolist() == [0, 1, 2, 2]
    assert np.isnan(out.numpy()).all(axis=(1, 2)).tolist() == [False, True, True, True]
    with pytest.raises(
        LinAlgError, match=r"expm: the 1-norm is too large .* of matrix \[1\] \(3 .*use squarings=40 for"
    ):
        dp.linalg.expm(dev.array(many))
    with pytest.raises(LinAlgError, match=r"expm: the 1-norm is NaN or infinite\. Hint: the matrix contains a NaN"):
        dp.linalg.expm(dev.array(many[2]))
    with pytest.raises(LinAlgError, match=r"denominator of Padé's approximant is singular \(info 5\)"):
        dp.linalg.check_info("expm", dev.array([5], "i32"))
    found = dp.linalg.expm(dev.array([[-1e6, 1e6], [0, -1e6]]), squarings=40).numpy()
    np.testing.assert_array_equal(found, 0)
    large = dev.array(np.full((2, 2), 3e38), "f32")  # whose sums are no f32
    assert dp.expm(large)[1].numpy() == 2


def test_what_is_too_large_for_the_dtype_is_infinite_and_no_failure(dev):
    out, info = dp.expm(dev.array([[[1000.0]], [[-1000.0]]]))
    assert out.numpy().ravel().tolist() == [np.inf, 0]
    assert not info.numpy().any()
    out, info = dp.expm(dev.array([[100.0, 1], [2, 100]], "f32"))
    assert not np.isfinite(out.numpy()).any()
    assert info.numpy() == 0


REFUSED = {
    "as many rows as columns": lambda dev: dp.expm(dev.zeros((3, 4))),
    "squarings: got 65; expected a whole number from 0 to 64": lambda dev: dp.expm(dev.zeros((3, 3)), squarings=65),
    "squarings: got True": lambda dev: dp.expm(dev.zeros((3, 3)), squarings=True),
    "f32, f64, c64 or c128": lambda dev: dp.expm(dev.zeros((3, 3), "f16")),
    "info: got .*i32": lambda dev: dp.expm(dev.zeros((2, 3, 3)), info=dev.zeros((2,), "i64")),
}


@pytest.mark.parametrize("said", REFUSED)
def test_bad_input_is_refused_before_a_call(said, dev):
    with pytest.raises(BadRequest, match=said):
        REFUSED[said](dev)


@pytest.mark.parametrize(
    ("shape", "library"), [((10, 32, 32), "cublas"), ((10, 129, 129), "cusolverDn"), ((32, 32), "cusolverDn")]
)
def test_many_small_ones_go_to_cublas(shape, library):
    assert select(dp.ExpmRequest(dp.device("host").zeros(shape)), Arch(90)).library == library


# -- the plan, with the kernels run on the CPU ------------------------------------------------------------------------
def loaded(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stand_in = loaded("cusolver_stand_in")
products = loaded("cublas_linalg_stand_in")
exponentials = loaded("cusolver_exponential_stand_in")

# All threads of all blocks one after another, with the arguments from where a launch has them.
BEFORE = """
#include <cmath>
#include <utility>
#define __global__
#define __align__(bytes) alignas(bytes)
struct Place { unsigned x, y; };
static Place threadIdx, blockIdx, blockDim, gridDim;
template <class... A, std::size_t... I>
static void call(void (*f)(A...), void** given, std::index_sequence<I...>) { f(*(A*)given[I]...); }
template <class... A> static void each(void (*f)(A...), void** given, unsigned x, unsigned y, unsigned threads)
{
    gridDim = {x, y}, blockDim = {threads, 1};
    for (blockIdx.y = 0; blockIdx.y < y; blockIdx.y++)
    for (blockIdx.x = 0; blockIdx.x < x; blockIdx.x++)
    for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) call(f, given, std::index_sequence_for<A...>{});
}
"""
BEHIND = """
extern "C" void run_{0}(void** given, unsigned x, unsigned y, unsigned threads) {{ each({0}, given, x, y, threads); }}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The kernels as functions of the CPU, by a dtype's options."""
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    folder, found = tmp_path_factory.mktemp("exponential"), {}
    for dtype in DTYPES:
        source, library = folder / f"{dtype}.cpp", folder / f"{dtype}.so"
        source.write_text(BEFORE + SOURCE + "".join(map(BEHIND.format, KERNELS)))
        sanitized = ("-fsanitize=undefined", "-fno-sanitize-recover=all", "-static-libubsan")
        command = ["g++", "-O1", *options(dtype), *sanitized, "-shared", "-fPIC", str(source), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:2000]
        found[options(dtype)] = ctypes.CDLL(str(library))
    return found


@pytest.fixture
def executor(monkeypatch):
    pytest.importorskip("scipy")
    made = stand_in.executor_of(monkeypatch)
    made.batched = products.install(monkeypatch, stand_in)
    exponentials.install(products)
    return made


@pytest.fixture
def on_the_cpu(executor, compiled, monkeypatch):
    """The executor of plans whose launches of these kernels are what a GPU is given; those of others stand in."""

    def launch(function, x, y, *rest):
        _, threads, *_, given, _ = rest
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *[ctypes.c_uint] * 3)
        kind(function.value)(ctypes.addressof(given), x, y, threads)
        return 0

    def found(_, name, flags, __):
        return ctypes.cast(compiled[flags][f"run_{name}"], ctypes.c_void_p).value

    fakes = SimpleNamespace(cuLaunchKernel=SimpleNamespace(unchecked=launch))
    monkeypatch.setattr(launching, "driver", fakes)
    monkeypatch.setattr(launching, "loaded", found)
    kind = {SOURCE: BatchKernelStep}
    monkeypatch.setattr(
        stand_in.calls, "BatchKernelStep", lambda *given: kind.get(given[-1], products.BatchKernelStep)(*given)
    )
    executor.device = None
    return executor


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_plan_with_the_kernels_themselves_is_right(row, on_the_cpu, rng):
    for case in cases(row):
        check = case.check(dp.device("host"), rng)
        request = check.request
        if request.a.size > 5000 or any(rule(request) for rule in row.rules):
            continue
        outputs = request.device.executor().outputs(request)
        row.call(request, on_the_cpu, row).enqueue(request.arguments(outputs))
        check.verify(request.result(outputs))


def test_a_norm_at_a_power_of_two_is_scaled_no_further_than_need_be(on_the_cpu):
    request = dp.ExpmRequest(dp.device("host").array(np.array([[-8 * THETA[F64]]])), squarings=3)
    row = select(request, Arch(90))
    outputs = request.device.executor().outputs(request)
    row.call(request, on_the_cpu, row).enqueue(request.arguments(outputs))
    out, info = request.result(outputs)
    assert info.numpy() == 0
    np.testing.assert_allclose(out.numpy(), np.exp(-8 * THETA[F64]), rtol=1e-11)


@pytest.mark.parametrize(("dtype", "count"), [("f32", 9), ("c128", 11)])
def test_hundreds_are_one_call_of_each_routine_and_nothing_waits(dtype, count, executor, monkeypatch, rng):
    called, enqueue = [], products.Blas.enqueue
    monkeypatch.setattr(
        products.Blas, "enqueue", lambda self, at: (called.append(self.routine.name), enqueue(self, at))
    )
    request = dp.ExpmRequest(dp.device("host").array(rng.standard_normal((300, 3, 3)), dtype), squarings=5)
    row = select(request, Arch(90))
    plan, outputs = row.call(request, executor, row), request.device.executor().outputs(request)
    assert plan.capture_safe
    plan.enqueue(request.arguments(outputs))
    letter = {"f32": "S", "c128": "Z"}[dtype]
    assert executor.batched.called == [f"cublas{letter}getrfBatched", f"cublas{letter}getrsBatched"]
    assert called == ["gemmStridedBatched"] * count
    out, info = request.result(outputs)
    assert not info.numpy().any()
    np.testing.assert_allclose(out.numpy(), dp.linalg.expm(request.a).numpy(), rtol=2e-3, atol=2e-3)


def test_a_singular_denominator_is_told_behind_the_statuses_of_the_norm(on_the_cpu, monkeypatch):
    put = stand_in.put_info
    monkeypatch.setattr(stand_in, "put_info", lambda pointer, _, number=0: put(pointer, 2, number))
    request = dp.ExpmRequest(dp.device("host").array(np.stack([np.eye(200), 1e9 * np.eye(200)])))
    row = select(request, Arch(90))
    outputs = request.device.executor().outputs(request)
    row.call(request, on_the_cpu, row).enqueue(request.arguments(outputs))
    out, info = request.result(outputs)
    assert info.numpy().tolist() == [4, 1]
    assert np.isnan(out.numpy()).all()


@pytest.mark.parametrize("arch", ["sm_80", "sm_100"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernels_compile(dtype, arch):
    nvrtc = pytest.importorskip("cudabind.nvrtc")
    try:
        code = nvrtc.compile(SOURCE, "exponential.cu", (f"-arch={arch}", *options(dtype))).code
    except LibraryNotFound:
        pytest.skip("NVRTC is not installed")
    assert all(name.encode() in code for name in KERNELS)
