"""Products by cuBLAS's own gemm: its plans over a stand-in, what it refuses, and which requests come to it."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import NoRow, Refused
from dispatch.keys import BF16, F32, HOST, Arch, Compute
from dispatch.ops.matmul import cublas as bound
from dispatch.ops.matmul import cublas_gemm
from dispatch.ops.matmul.cases import cases
from dispatch.table.cublas_gemm import GPU_ROWS
from dispatch.table.select import candidates, select

STAND_IN = Path(__file__).parents[1] / "cublas_gemm_stand_in.py"
spec = importlib.util.spec_from_file_location("cublas_gemm_stand_in", STAND_IN)
stand_in = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_in)
H200 = Arch(90)


@pytest.fixture
def executor(monkeypatch):
    return stand_in.Executor(monkeypatch)


@pytest.fixture
def dev():
    return dp.device("host")


def check_cases(row, some, executor, dev, rng):
    """Every case that the row's rules take, twice: at other addresses and with other numbers."""
    taken = 0
    for case in some:
        plan = None
        for _ in range(2):
            check = case.check(dev, rng)
            if any(rule(check.request) for rule in row.rules):
                continue
            taken += 1
            outputs = dev.executor().outputs(check.request)
            plan = plan or cublas_gemm.plan(check.request, executor, row)
            plan.enqueue(check.request.arguments(outputs))
            check.verify(check.request.result(outputs))
    assert taken > len(some)
    assert executor.library.math == stand_in.MATH


@pytest.mark.parametrize(("number", "row"), list(enumerate(GPU_ROWS)), ids=lambda given: getattr(given, "name", ""))
def test_a_plan_says_a_product_in_cublas_s_terms(number, row, executor, dev, rng):
    """A sample that rows take turns in, so that each case is tried with a few of them."""
    some = [case for case in cases(row) if case.form.name not in ("large", "deep")]
    check_cases(row, some[number % 5 :: 5], executor, dev, rng)


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", GPU_ROWS, ids=lambda row: row.name)
def test_every_case_of_a_row_is_said_in_cublas_s_terms(row, executor, dev, rng):
    check_cases(row, cases(row), executor, dev, rng)


def of(row_dtypes, compute=Compute.COMPUTE_32F):
    return next(row for row in GPU_ROWS if (row.dtypes[0], row.dtypes[3], row.compute) == (*row_dtypes, compute))


def test_a_product_is_not_rounded_before_it_is_added_to_d(executor, dev):
    """Where beta is 1 and D is of 16 bits the library is not to see that it is 1."""
    one = dev.array(np.ones((4, 4)), "bf16")
    for beta, hidden in ((1.0, True), (0.5, False)):
        request = dp.MatmulRequest(one, one, c=one, out=dev.zeros((4, 4), "bf16"), beta=beta)
        cublas_gemm.plan(request, executor, of((BF16, BF16))).enqueue(request.arguments({}))
        assert executor.library.modes[-1] == (hidden, stand_in.MATH)
    early = replace(request, reduced_precision=True, beta=1.0)
    cublas_gemm.plan(early, executor, of((BF16, BF16))).enqueue(early.arguments({}))
    assert executor.library.modes[-1] == (False, bound.DEFAULT_MATH)
    assert executor.library.math == stand_in.MATH
    whole = dev.zeros((4, 4))
    request = dp.MatmulRequest(whole, whole, c=whole, beta=1.0, out=dev.zeros((4, 4)))
    cublas_gemm.plan(request, executor, of((F32, F32))).enqueue(request.arguments({}))
    assert executor.library.modes[-1] == (False, stand_in.MATH)


def test_one_call_for_a_batch_and_none_without_elements(executor, dev):
    a = dev.zeros((10_000, 8, 4))
    request = dp.MatmulRequest(a, dev.zeros((10_000, 4, 8)), out=dev.zeros((10_000, 8, 8)))
    cublas_gemm.plan(request, executor, of((F32, F32))).enqueue(request.arguments({}))
    assert executor.library.names == ["cublasGemmStridedBatchedEx"]
    empty = dp.MatmulRequest(dev.zeros((0, 4)), dev.zeros((4, 8)), out=dev.zeros((0, 8)))
    assert cublas_gemm.plan(empty, executor, of((F32, F32))).is_bare


BROADCAST = ((6, 1, 3), (1, 7, 1))
TRANSPOSED = ((6, 7, 3), (6, 7, 3))


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "c64"])
@pytest.mark.parametrize("batches", [BROADCAST, TRANSPOSED], ids=["broadcast", "axes exchanged"])
@pytest.mark.parametrize("with_c", [False, True], ids=["", "c"])
def test_a_batch_without_a_single_step_is_one_call_by_pointers(dtype, batches, with_c, executor, dev, rng):
    a, b = (dev.array(rng.integers(-4, 5, (*batch, 8, 8)), dtype) for batch in batches)
    if batches is TRANSPOSED:
        a = dev.array(np.asarray(a).swapaxes(0, 1), dtype).transpose(1, 0, 2, 3, 4)
    c = dev.array(rng.integers(-4, 5, (6, 7, 3, 8, 8)), dtype) if with_c else None
    row = next(row for row in GPU_ROWS if row.dtypes[0] is row.dtypes[3] is a.dtype)
    request = dp.MatmulRequest(a, b, c=c, beta=2.0 if with_c else 0.0, out=dev.zeros((6, 7, 3, 8, 8), dtype))
    plan = cublas_gemm.plan(request, executor, row)
    expected = np.asarray(a).astype(complex) @ np.asarray(b).astype(complex)
    for other in (request, replace(request, out=dev.zeros((6, 7, 3, 8, 8), dtype), alpha=0.5)):
        plan.enqueue(other.arguments({}))
        added = 0 if c is None else 2 * np.asarray(c).astype(complex)
        np.testing.assert_allclose(np.asarray(other.out).astype(complex), other.alpha * expected + added, rtol=2**-7)
    assert executor.library.names == ["cublasGemmBatchedEx"] * 2


def test_few_calls_and_pointers_that_are_not_aligned_stay_calls_of_their_own(executor, dev):
    few = dp.MatmulRequest(dev.zeros((2, 1, 8, 8)), dev.zeros((1, 3, 8, 8)))
    odd = dp.MatmulRequest(dev.zeros((6, 1, 5, 5), "bf16"), dev.zeros((1, 3, 5, 5), "bf16"))
    for request, dtype, calls in ((few, F32, 2), (odd, BF16, 6)):
        executor.library.names.clear()
        outputs = dev.executor().outputs(request)
        cublas_gemm.plan(request, executor, of((dtype, dtype))).enqueue(request.arguments(outputs))
        assert executor.library.names == ["cublasGemmStridedBatchedEx"] * calls


def test_what_the_library_does_not_take_by_pointers_is_called_one_by_one(executor, dev, monkeypatch):
    monkeypatch.setattr(bound, "kernels", lambda _, call: call() and None)
    monkeypatch.setattr(executor.library, "_cublasGemmStridedBatchedEx", lambda *_: None, raising=False)
    asked = []

    def enqueue_call(self, _):
        asked.append(self._function.__name__)
        return stand_in.NOT_SUPPORTED if self._function.__name__ == "cublasGemmBatchedEx" else 0

    monkeypatch.setattr(bound.GemmPlan, "_enqueue_call", enqueue_call)
    request = dp.MatmulRequest(dev.zeros((6, 1, 8, 8)), dev.zeros((1, 3, 8, 8)))
    assert type(cublas_gemm.plan(request, executor, of((F32, F32)))) is bound.GemmPlan
    assert asked == ["cublasGemmBatchedEx", "cublasGemmStridedBatchedEx"]


def test_what_the_library_says_no_to_is_refused_as_the_plan_is_made(executor, dev, monkeypatch):
    monkeypatch.setattr(bound, "kernels", lambda _, call: call() and None)
    executor.library.status = stand_in.NOT_SUPPORTED
    request = dp.MatmulRequest(dev.zeros((4, 4)), dev.zeros((4, 4)), out=dev.zeros((4, 4)))
    with pytest.raises(Refused, match="cublasGemmEx returned status 15"):
        cublas_gemm.plan(request, executor, of((F32, F32)))


def test_sizes_beyond_31_bits_take_the_function_of_64(executor):
    problem = cublas_gemm.lower(dp.MatmulRequest(*(dp.device("host").zeros((4, 4)) for _ in "ab")), Compute.COMPUTE_32F)
    wide = problem._replace(problem=problem.problem._replace(a=problem.problem.a._replace(ld=2**31)))
    plan = bound.GemmPlan(executor, of((F32, F32)), wide, F32)
    assert plan._function.__name__ == "cublasGemmEx_64"


# -- which requests come to these rows -------------------------------------------------------------------------------
def test_cublas_comes_behind_cublaslt_unless_it_is_asked_for(dev):
    request = dp.MatmulRequest(dev.zeros((4, 4)), dev.zeros((4, 4)))
    assert select(request, H200).library == "cublasLt"
    assert select(replace(request, library="cublas"), H200).library == "cublas"
    libraries = [row.library for row in candidates(request, H200)]
    assert libraries.index("cublasLt") < libraries.index("cublas")


@pytest.mark.parametrize(
    ("dtype", "compute"), [("f32", "bf16x9"), ("c64", "bf16x9"), ("f64", "ozaki"), ("c128", "ozaki")]
)
def test_a_compute_type_that_is_not_the_plain_one_is_taken_only_where_it_is_asked_for(dev, dtype, compute):
    request = dp.MatmulRequest(dev.zeros((4, 4), dtype), dev.zeros((4, 4), dtype), compute=compute)
    row = select(request, H200)
    assert (row.library, row.compute) == ("cublas", request.compute)
    plain = [row.compute for row in candidates(replace(request, compute=None), H200)]
    assert request.compute not in plain
    assert any(row.compute is request.compute and row.min_arch == HOST for row in dp.TABLE.of("matmul"))


def test_fixed_point_needs_a_library_that_has_it(dev):
    request = dp.MatmulRequest(dev.zeros((4, 4), "f64"), dev.zeros((4, 4), "f64"), compute="ozaki")
    with pytest.raises(NoRow, match=r"needs cublas 13\.1"):
        select(request, H200, {"cublas": (13, 0)})


def test_epilogues_are_refused_by_name(dev):
    request = dp.MatmulRequest(dev.zeros((4, 4)), dev.zeros((4, 4)), epilogue="relu", library="cublas")
    with pytest.raises(NoRow, match="needs an epilogue of NONE, has RELU"):
        select(request, H200)
    with pytest.raises(NoRow, match="needs workspace=None, has 4"):
        select(replace(request, epilogue="none", workspace=4), H200)


def test_the_results_of_emulated_types_are_as_precise_as_what_they_emulate(dev, rng):
    a, b = (rng.standard_normal((32, 32)) for _ in range(2))
    for dtype, compute in (("f32", "bf16x9"), ("f64", "ozaki")):
        one, other = dev.array(a, dtype), dev.array(b, dtype)
        assert np.array_equal(dp.matmul(one, other, compute=compute).numpy(), dp.matmul(one, other).numpy())
