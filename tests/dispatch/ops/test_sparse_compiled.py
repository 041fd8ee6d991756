"""Products with operators of the caller's: on the host, by plans over a stand-in for cuSPARSE, and by NVRTC itself.

Kernels of this library's own that they are compiled into are in test_sparse_compiled_own.py.
"""

# ruff: noqa: E501 - tables of errors

import gc
import importlib.util
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from cudabind import nvjitlink, nvrtc
from cudabind.errors import LibraryNotFound, NvrtcError
from dispatch.errors import BadRequest, NoRow, Refused
from dispatch.keys import C64, C128, F32, F64, HOST, Arch
from dispatch.libraries.cusparse import compiled_product
from dispatch.libraries.cusparse.operator_source import KERNEL_OPTIONS, LTO_OPTIONS, Operators, row_epilogue_source
from dispatch.ops.sparse import cusparse_compiled
from dispatch.ops.sparse.cases import cases
from dispatch.ops.sparse.cases_compiled import EPILOGUES, OF_COMPLEX, OF_REAL, SEMIRINGS
from dispatch.ops.sparse.semirings import NAMED_SEMIRINGS
from dispatch.row_check import check_row
from dispatch.table.select import select

sp = pytest.importorskip("scipy.sparse")
spec = importlib.util.spec_from_file_location(
    "compiled_stand_in", Path(__file__).parents[1] / "cusparse_compiled_stand_in.py"
)
stand_in = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_in)

S = dp.sparse
ROWS = [row for op in ("spmm_op", "spmv_op") for row in dp.TABLE.of(op)]
DEV = None
EVERY = pytest.mark.parametrize(
    "every", [pytest.param(4, id="sample"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)]
)


@pytest.fixture(autouse=True)
def dev():
    """The host as it is now: a test of another file may have closed the one before."""
    global DEV
    DEV = dp.device("host")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("operators")


@pytest.fixture
def executor(monkeypatch, folder):
    return stand_in.executor_of(monkeypatch, folder)


@EVERY
@pytest.mark.parametrize("row", [row for row in ROWS if row.on(HOST)], ids=lambda row: row.name)
def test_a_row_of_the_host_passes_its_cases(row, every, rng):
    for case in cases(row)[ROWS.index(row) % every :: every]:
        assert not check_row(row, case, DEV, rng), "cases are those that the row takes"


@EVERY
@pytest.mark.parametrize("row", [row for row in ROWS if row.library == "cusparse"], ids=lambda row: row.name)
def test_a_plan_says_what_the_library_is_to_know(row, every, executor, rng):
    for case in cases(row)[ROWS.index(row) % every :: every]:
        check = case.check(DEV, rng)
        assert not any(rule(check.request) for rule in row.rules)
        plan = row.call(check.request, executor, row)
        assert not plan.capture_safe
        for _ in range(2):  # the second over memory that the first has left
            check.renew()
            outputs = DEV.executor().outputs(check.request)
            plan.enqueue(check.request.arguments(outputs))
            check.verify(check.request.result(outputs))
            if not check.request.repeatable:
                break
    plan = None
    gc.collect()
    assert not executor.library.alive, "descriptors and plans are given back"


def graph(rng, n=7):
    """A graph with edges of positive lengths, and as a dense matrix what is not there is infinite."""
    there = rng.random((n, n)) < 0.3
    lengths = np.where(there, rng.uniform(1, 2, (n, n)), np.inf)
    matrix = sp.csr_array(np.where(there, lengths, 0))
    return lengths, S.sparse_tensor(matrix, device=DEV)


def of_min_plus(lengths, b):
    return (lengths[:, :, None] + b[None]).min(axis=1)


def enqueued(plan, request):
    outputs = DEV.executor().outputs(request)
    plan.enqueue(request.arguments(outputs))
    return request.result(outputs).numpy()


def made(request, executor):
    row = select(request.replace(library="cusparse"), Arch(90))
    return row.call(request, executor, row)


def test_shortest_paths_by_products_over_min_plus(rng):
    lengths, a = graph(rng)
    distances = np.full((7, 1), np.inf)
    distances[0] = 0
    found = DEV.array(distances)
    for _ in range(7):
        found = S.spmm_op(a, found, "min_plus", c=found)
    expected = distances
    for _ in range(7):
        expected = np.minimum(expected, of_min_plus(lengths, expected))
    np.testing.assert_allclose(found.numpy(), expected)


def test_a_plan_follows_the_memory_of_each_run_and_links_once(executor, rng):
    lengths, a = graph(rng)
    plan = None
    for turn in range(3):
        b = rng.uniform(0, 1, (7, 3))
        other = a.with_values(DEV.array(a.values.numpy() * (1 + turn)))
        request = dp.SpmmOpRequest(*other, DEV.array(b), "min_plus")
        plan = made(request, executor) if plan is None else plan
        np.testing.assert_allclose(enqueued(plan, request), of_min_plus(lengths * (1 + turn), b))
    assert executor.library.called.count("cusparseSpMMOp_createPlan") == 1


@pytest.mark.parametrize("name", NAMED_SEMIRINGS)
def test_each_ready_semiring_is_what_it_is_called(name, executor, rng):
    dense = np.where(rng.random((6, 5)) < 0.6, rng.choice([-1.5, 0.5, 2.0], (6, 5)), 0)
    dense[2] = 0
    b = rng.choice([-1.0, 0.0, 3.0], (5, 4))
    a = S.sparse_tensor(sp.csr_array(dense), device=DEV)
    request = dp.SpmmOpRequest(*a, DEV.array(b), name)
    left, right = dense[:, :, None], b[None]
    there = left != 0
    with np.errstate(all="ignore"):
        expected = {
            "plus_times": (left * right).sum(1),
            "min_plus": np.where(there, left + right, np.inf).min(1),
            "max_plus": np.where(there, left + right, -np.inf).max(1),
            "max_times": np.where(there, left * right, -np.inf).max(1),
            "or_and": (there & (right != 0)).any(1).astype(float),
        }[name]
    np.testing.assert_allclose(enqueued(made(request, executor), request), expected)
    np.testing.assert_allclose(dp.run(request).numpy(), expected)
    assert dp.SpmmOpRequest(*a, DEV.array(b), S.Semiring.named(name)).key() == request.key()


def test_other_lines_are_another_plan_and_other_numpy_functions_are_not(rng):
    _, a = graph(rng)
    b = DEV.array(np.ones((7, 2)))

    def key(code):
        own = S.Semiring(S.SparseOperator(code, lambda x, y: x * y), NAMED_SEMIRINGS["plus_times"].add, 0)
        return dp.SpmmOpRequest(*a, b, own).key()

    assert key("return a * b;") == key("return a * b;") == dp.SpmmOpRequest(*a, b).key()
    assert key("return b * a;") != key("return a * b;")


def test_numbers_of_the_dtypes_ends_are_what_they_are(executor):
    """What cuSPARSE adds up are other bits: NaN, infinities, subnormal numbers and signs of 0 come back as they were."""
    values = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 5e-324, 1.7e308, -2.5])
    first = S.Semiring(S.SparseOperator("return a;", lambda a, b: a + 0 * b), NAMED_SEMIRINGS["max_plus"].add, 7.0)
    a = S.csr(*(DEV.array(x) for x in (values, np.arange(9, dtype="i4"), np.zeros(8, "i4"))), (8, 1))
    request = dp.SpmmOpRequest(*a, DEV.array(np.zeros((1, 1))), first)
    found = enqueued(made(request, executor), request)[:, 0]
    np.testing.assert_array_equal(found, values)
    np.testing.assert_array_equal(np.signbit(found[:4]), np.signbit(values[:4]))


def test_an_epilogue_has_what_is_there_or_0(executor, rng):
    _, a = graph(rng)
    b, c = rng.standard_normal((7, 2)), rng.standard_normal((7, 2))
    ending = S.SparseOperator("return sum + 10 * c;", lambda total, c: total + 10 * c)
    own = replace(NAMED_SEMIRINGS["plus_times"], epilogue=ending)
    dense = S.to_scipy(a).toarray() @ b
    for beside, expected in ((None, dense), (DEV.array(c), dense + 10 * c)):
        request = dp.SpmmOpRequest(*a, DEV.array(b), own, c=beside)
        np.testing.assert_allclose(enqueued(made(request, executor), request), expected)
        np.testing.assert_allclose(dp.run(request).numpy(), expected)


def test_an_analysis_stays_where_the_pattern_is_fixed(executor, rng):
    _, a = graph(rng)
    x, dense = DEV.array(rng.standard_normal(7)), S.to_scipy(a).toarray()
    for fixed, analyses in ((False, 4), (True, 1)):
        request = dp.SpmvOpRequest(*(a.fixed() if fixed else a), x, EPILOGUES["by row"])
        plan = made(request, executor)
        executor.library.called.clear()
        for turn in range(4):
            a.values.copy_from(dense[dense != 0] * (1 + turn))
            np.testing.assert_allclose(enqueued(plan, request), dp.run(request).numpy())
        a.values.copy_from(dense[dense != 0])
        assert executor.library.called.count("cusparseSpMVOp_createDescr") == analyses


@pytest.mark.parametrize("beta", [0.0, -0.5])
def test_what_is_added_lies_apart_from_the_result(beta, executor, rng):
    _, a = graph(rng)
    x, y = DEV.array(rng.standard_normal(8))[1:], rng.standard_normal(7)
    into = DEV.array(np.append(0, y))[1:]  # neither begins where vectors do
    request = dp.SpmvOpRequest(*a, x, EPILOGUES["positive"], y=into, beta=beta, out=into)
    sums = S.to_scipy(a).toarray() @ x.numpy() + beta * y
    np.testing.assert_allclose(enqueued(made(request, executor), request), np.where(sums > 0, sums, sums / 4))


def test_epilogues_of_rows_by_both_libraries_versions(executor, rng):
    _, a = graph(rng)
    x = DEV.array(rng.standard_normal(7))
    request = dp.SpmvOpRequest(*a, x, EPILOGUES["by row"])
    np.testing.assert_allclose(enqueued(made(request, executor), request), S.spmv_op(a, x, EPILOGUES["by row"]).numpy())
    old = {"cusparse": (12, 6, 3)}
    with pytest.raises(NoRow, match=r"cusparse 12\.9\.4.*12\.6\.3|12\.6\.3.*12\.9\.4"):
        select(request.replace(library="cusparse"), Arch(90), versions=old)


# -- what is refused --------------------------------------------------------------------------------------------------
ADD = S.SparseOperator("return a + b;", np.add)


def by_cusparse(kind, a, right):
    return dp.run(kind(*a, right, library="cusparse"))


def refused():
    a = S.csr(*(DEV.array(x) for x in (np.ones(2), np.array([0, 1, 2], "i4"), np.array([0, 2], "i4"))), (2, 3))
    wide = S.csr(a.values.astype("c128"), a.rows, a.columns, (2, 3))
    b = DEV.array(np.ones((3, 2)))
    return {
        "a name of none": (lambda: S.spmm_op(a, b, "min_times"), "semiring: got 'min_times'; expected a dispatch.sparse.Semiring, or one of plus_times"),
        "no semiring": (lambda: S.spmm_op(a, b, 3), "semiring: got 3; expected a dispatch.sparse.Semiring"),
        "lines alone": (lambda: S.Semiring("return a;", ADD, 0), "multiply: got 'return a;'; expected a SparseOperator"),
        "no add": (lambda: S.Semiring(ADD, None, 0), "add: got None; expected a SparseOperator"),
        "no identity": (lambda: S.Semiring(ADD, ADD, None), "identity: got None; expected a number"),
        "no lines": (lambda: S.SparseOperator("  ", np.add), "code: got '  '; expected lines of CUDA C"),
        "no function": (lambda: S.SparseOperator("return a;", 3), "numpy: got 3; expected a function of two arrays"),
        "an order of complex numbers": (lambda: S.spmm_op(wide, b.astype("c128"), "min_plus"), "semiring: got min_plus; expected plus_times, because complex numbers have no order"),
        "a complex identity": (lambda: S.spmm_op(a, b, S.Semiring(ADD, ADD, 1j)), "semiring.identity: got 1j; expected a real number, because A is f64"),
        "another format": (lambda: S.spmm_op(a.T, b), "form.format: got CSC; expected CSR, the only format that spmm_op"),
        "another height": (lambda: S.spmm_op(a, b[:2]), "b: got f64.2, 2.; expected f64.3, …., because A is .2, 3."),
        "another c": (lambda: S.spmm_op(a, b, c=b), "c: got f64.3, 2.; expected f64.2, 2., the shape of the result"),
        "a c of another dtype": (lambda: S.spmm_op(a, b, c=b[:2].astype("f32")), "c: got f32.2, 2.; expected f64, the dtype of the result"),
        "b of another dtype": (lambda: S.spmm_op(a, b.astype("f32")), "b: got f32.3, 2.; expected f64, as values is"),
        "out over b": (lambda: S.spmm_op(a, b, out=b[:2]), "out: got memory that overlaps"),
        "a function of another shape": (lambda: S.spmm_op(a, b, S.Semiring(S.SparseOperator("return a;", lambda x, _: x[:1, :1].repeat(3)), ADD, 0)), r"semiring.multiply: got shape \[3\] from its NumPy counterpart; expected \[2, 2\]"),
        "complex numbers of real ones": (lambda: S.spmm_op(a, b, S.Semiring(S.SparseOperator("return a;", lambda x, _: x * 1j), ADD, 0)), "semiring.multiply: got complex numbers"),
        "no elements": (lambda: by_cusparse(dp.SpmmOpRequest, S.csr(*(DEV.array(x) for x in (np.ones(0), np.zeros(3, "i4"), np.zeros(0, "i4"))), (2, 3)), b), "needs a matrix with elements, has none"),
        "two kinds of indices": (lambda: by_cusparse(dp.SpmmOpRequest, S.csr(a.values, a.rows.astype("i64"), a.columns, (2, 3)), b), "needs rows and columns of one dtype, has i64 and i32"),
        "indices from 1 on": (lambda: by_cusparse(dp.SpmvOpRequest, S.csr(a.values, a.rows, a.columns, (2, 3), base=1), b[:, 0].copy()), "needs base 0, has 1"),
        "columns of 64 bits": (lambda: by_cusparse(dp.SpmvOpRequest, S.csr(a.values, a.rows.astype("i64"), a.columns.astype("i64"), (2, 3)), b[:, 0].copy()), "needs columns of i32, has i64"),
        "an epilogue that is none": (lambda: S.spmv_op(a, b[:, 0].copy(), "return x;"), "epilogue: got 'return x;'; expected a SparseOperator"),
        "an x of another length": (lambda: S.spmv_op(a, b[0]), "x: got f64.2.; expected f64.3., because A is .2, 3."),
    }  # fmt: skip


def test_a_request_is_refused_by_the_name_of_what_is_wrong():
    for call, said in refused().values():
        with pytest.raises((BadRequest, NoRow), match=said):
            call()


def test_what_does_not_pickle_stays_behind():
    own = S.Semiring(S.SparseOperator("return a;", lambda a, _: a), ADD, 0)
    there = pickle.loads(pickle.dumps(own))
    assert (there.multiply.code, there.add.numpy) == ("return a;", np.add)
    with pytest.raises(BadRequest, match="a function that cannot be pickled"):
        there.multiply.of("multiply", np.ones(1), np.ones(1))
    for ready in NAMED_SEMIRINGS.values():
        assert pickle.loads(pickle.dumps(ready)) == ready


def test_a_library_that_does_not_take_it_refuses_the_row(executor, rng):
    _, a = graph(rng)
    executor.library.refused.add("cusparseSpMMOp_createPlan")
    with pytest.raises(Refused, match="cusparseSpMMOp_createPlan rejects the request"):
        made(dp.SpmmOpRequest(*a, DEV.array(np.ones((7, 2)))), executor)


# -- the compiler, which needs no GPU ---------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def compiler():
    try:
        nvrtc.nvrtcVersion()
        nvjitlink.nvJitLinkVersion()
    except LibraryNotFound as error:
        pytest.skip(str(error))


def operators(name, dtype, *, adds_c=False):
    ring = SEMIRINGS[name]
    ending = None if ring.epilogue is None else ring.epilogue.code
    return Operators(dtype, ring.multiply.code, ring.add.code, ending, ring.identity, adds_c)


KERNEL = """
__device__ TYPE mul_op(TYPE, TYPE);
__device__ TYPE add_op(TYPE, TYPE);
__device__ TYPE epilogue(TYPE, TYPE);
extern "C" __global__ void product(TYPE* x, int n)
{
    TYPE sum = {};
    for (int k = 0; k < n; ++k) sum = add_op(sum, mul_op(x[k], x[k + n]));
    x[0] = epilogue(sum, x[0]);
}
"""
LTO = ("-dlto", "-rdc=true")


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("dtype", "given"), [(F32, "float"), (F64, "double"), (C64, "float2"), (C128, "double2")])
def test_operators_link_into_a_kernel_that_calls_them_as_cusparse_does(dtype, given):
    kernel = nvrtc.compile(KERNEL.replace("TYPE", given), "kernel.cu", ("-arch=sm_90", *LTO)).code
    for number, name in enumerate(OF_COMPLEX if dtype.is_complex else OF_REAL):
        sources = operators(name, dtype, adds_c=number % 2 == 1).sources()
        parts = [nvrtc.compile(text, f"{one}.cu", ("-arch=sm_90", *LTO_OPTIONS)).code for one, text in sources.items()]
        assert nvjitlink.link([("LTOIR", part) for part in (kernel, *parts)], ("-arch=sm_90", "-lto"))
    for index in compiled_product.INDICES.values():
        options = ("-arch=sm_90", *KERNEL_OPTIONS, f"-DINDEX={index}")
        assert nvrtc.compile(operators(name, dtype, adds_c=True).empty_rows_source(), "rows.cu", options).code


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("dtype", "given"), [(F32, "float"), (F64, "double")])
@pytest.mark.parametrize("row", ["int", "long", "long long"])
def test_an_epilogue_of_rows_links_whatever_a_row_is_counted_in(dtype, given, row):
    kernel = f"""
    __device__ {given} spmvop_epilogue({row} row, {given} x);
    extern "C" __global__ void product({given}* x) {{ x[threadIdx.x] = spmvop_epilogue(threadIdx.x, x[threadIdx.x]); }}
    """
    compiled = nvrtc.compile(kernel, "kernel.cu", ("-arch=sm_90", *LTO)).code
    source = row_epilogue_source(dtype, EPILOGUES["by row"].code)
    part = nvrtc.compile(source, "spmvop_epilogue.cu", ("-arch=sm_90", *LTO_OPTIONS)).code
    assert nvjitlink.link([("LTOIR", compiled), ("LTOIR", part)], ("-arch=sm_90", "-lto"))


WRONG = {
    "multiply": ("return a * q;", r"semiring.multiply: got semiring.multiply.code, of which line 1, `return a \* q;`, does not compile: identifier \"q\" is undefined; expected CUDA C\+\+ that returns a Number; it can read a and b"),
    "add": ("if (a < b)\n    return a;\nreturn c;", "semiring.add: got semiring.add.code, of which line 3, `return c;`, does not compile: identifier \"c\" is undefined"),
    "epilogue": ("sum = c;", "semiring.epilogue: got semiring.epilogue.code, of which line 1, `sum = c;`, does not compile: missing return statement.*it can read sum and c"),
}  # fmt: skip


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("side", WRONG)
def test_lines_that_do_not_compile_are_shown(side, executor, monkeypatch, rng):
    _, a = graph(rng)
    code, said = WRONG[side]
    monkeypatch.setattr(
        compiled_product, "compiled", lambda text, name, options: nvrtc.compile(text, f"{name}.cu", options).code
    )
    own = replace(NAMED_SEMIRINGS["plus_times"], **{side: S.SparseOperator(code, np.add)})
    with pytest.raises(BadRequest, match=said):
        made(dp.SpmmOpRequest(*a, DEV.array(np.ones((7, 2))), own), executor)


def test_an_error_that_is_of_no_line_stays_the_compilers(executor, monkeypatch, rng):
    _, a = graph(rng)

    def fails(*_):
        raise NvrtcError("nvrtc", "nvrtcCompileProgram", 6, "NVRTC_ERROR_COMPILATION", "", "")

    monkeypatch.setattr(cusparse_compiled, "compile_to_lto", fails)
    with pytest.raises(NvrtcError):
        made(dp.SpmmOpRequest(*a, DEV.array(np.ones((7, 2)))), executor)


def test_a_semiring_by_its_name_is_written_down_and_made_again(rng):
    from dispatch.supervise.request_json import Writer

    _, a = graph(rng)
    request = dp.SpmmOpRequest(*a, DEV.array(np.ones((7, 2))), "min_plus")
    assert Writer().request(request)["fields"]["semiring"] == "min_plus"
    assert "semiring=min_plus" in request.describe()
