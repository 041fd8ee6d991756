"""Direct solves of several patterns: plans over a stand-in of cuDSS, what is kept, told and refused, and the host."""

import ctypes
import dataclasses
import gc
import importlib.util
import pickle
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from cudabind.errors import LibraryNotFound, SymbolNotFound
from cudabind.sys import cudss as library
from dispatch.errors import BadRequest, LinAlgError, NoRow
from dispatch.keys import Arch
from dispatch.libraries.cudss import lists
from dispatch.libraries.cudss.factors import SystemSpec
from dispatch.libraries.nvrtc.kernel import Kernel
from dispatch.ops.sparse import cudss_lists as plans
from dispatch.ops.sparse.cases import cases
from dispatch.ops.sparse.cudss_batched import options
from dispatch.table.select import select

sp = pytest.importorskip("scipy.sparse")


def module_at(name):
    path = Path(__file__).parents[1] / f"{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cudss, cusparse = map(module_at, ("cudss_lists_stand_in", "cusparse_stand_in"))
ROWS = [row for row in dp.TABLE.of("spsolve_batched") if row.library == "cudss" and row.variant]
ANALYSIS, FACTORIZATION, REFACTORIZATION, SOLVE = 3, 4, 8, 1008
SIZES = (7, 12, 1, 5)
DEV = None
S = dp.sparse


@pytest.fixture(autouse=True)
def dev():
    """The host as it is now: a test of another file may have closed the one before."""
    global DEV
    DEV = dp.device("host")


@pytest.fixture
def executor(monkeypatch):
    yield cudss.executor_of(monkeypatch, cusparse.Copy)
    gc.collect()  # what a plan holds is given back to the stand-in


@pytest.fixture
def matrices(rng):
    """Matrices of several sizes and patterns."""
    made = []
    for n in SIZES:
        mask = (rng.random((n, n)) < 0.4) | np.eye(n, dtype=bool)
        made.append(sp.csr_array(np.where(mask, rng.standard_normal((n, n)), 0) + 4 * np.eye(n)))
    return made


def request_of(matrices, b, fixed=True, dtype="f8", **choices):
    parts = [S.sparse_tensor(a.astype(dtype)) for a in matrices]
    parts = [(a.fixed() if fixed else a).parts for a in parts]
    right = [DEV.array(np.asarray(one, dtype)) for one in b]
    return dp.BatchedSpsolveListRequest(*zip(*parts, strict=True), right, **choices)


def right_of(matrices, rng, nrhs=(0, 2, 0, 3)):
    return [rng.standard_normal((a.shape[0], k) if k else a.shape[0]) for a, k in zip(matrices, nrhs, strict=False)]


def made(request, executor):
    row = select(request, Arch(90))
    assert row.variant == "several patterns"
    return row.call(request, executor, row)


def enqueued(plan, request):
    outputs = DEV.executor().outputs(request)
    plan.enqueue(request.arguments(outputs))
    *x, info = request.result(outputs)
    return [one.numpy() for one in x], info.numpy()


def are_solutions(matrices, b, x, but=(), atol=1e-9):
    for number, (a, right, found) in enumerate(zip(matrices, b, x, strict=True)):
        if number not in but:
            np.testing.assert_allclose(a @ found, right, atol=atol)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_plan_says_what_the_library_is_to_know(row, executor, rng):
    for case in cases(row):
        check = case.check(DEV, rng)
        assert not any(rule(check.request) for rule in row.rules), check.request.describe()
        plan = row.call(check.request, executor, row)
        assert not plan.capture_safe
        outputs = DEV.executor().outputs(check.request)
        for _ in range(2):
            result = check.request.result(outputs)
            check.renew(result)
            plan.enqueue(check.request.arguments(outputs))
            check.verify(result)
    plan = None
    gc.collect()
    assert executor.library.alive == {1: "handle"}, "all is given back"


def test_all_are_analysed_factorized_and_solved_at_once_and_kept(executor, rng, matrices):
    b = right_of(matrices, rng)
    request = request_of(matrices, b, stamp=1)
    plan = made(request, executor)
    for stamp, factor in ((1, 1), (1, 1), (2, 3)):
        b = right_of(matrices, rng)
        for values, a in zip(request.values, matrices, strict=True):
            values.copy_from(a.data * factor)
        given = dataclasses.replace(request, b=tuple(map(DEV.array, b)), stamp=stamp)
        x, info = enqueued(plan, given)
        are_solutions([a * factor for a in matrices], b, x)
        assert not info.any()
    assert executor.library.phases == [ANALYSIS, FACTORIZATION, SOLVE, SOLVE, REFACTORIZATION, SOLVE]
    assert executor.waits == [0, 4], "for the lists of addresses, where the GPU is waited for in any case"


def test_without_a_promise_each_call_analyses_anew(executor, rng, matrices):
    request = request_of(matrices, right_of(matrices, rng), fixed=False)
    plan = made(request, executor)
    for _ in range(2):
        enqueued(plan, request)
    assert executor.library.phases == [ANALYSIS, FACTORIZATION, SOLVE] * 2
    fixed = [S.sparse_tensor(a).fixed().parts for a in matrices]
    some = [S.sparse_tensor(a).parts if number == 2 else fixed[number] for number, a in enumerate(matrices)]
    keys = {
        dp.BatchedSpsolveListRequest(*zip(*parts, strict=True), request.b).key()
        for parts in (fixed, some, [S.sparse_tensor(a).fixed().parts for a in matrices])
    }
    assert len(keys) == 3, "a pattern is part of the plan's key"


def test_operands_at_other_addresses_are_followed(executor, rng, matrices):
    b = right_of(matrices, rng)
    request = request_of(matrices, b)
    plan = made(request, executor)
    enqueued(plan, request)
    for _ in range(3):
        b = right_of(matrices, rng)
        others = {f"b[{number}]": DEV.array(one) for number, one in enumerate(b)}
        others |= {f"values[{number}]": DEV.array(2 * a.data) for number, a in enumerate(matrices)}
        x, info = enqueued(plan, request.replace(**others))
        are_solutions([2 * a for a in matrices], b, x)
        assert not info.any()
    elsewhere = {f"columns[{number}]": DEV.array(one.numpy()) for number, one in enumerate(request.columns)}
    enqueued(plan, request.replace(**elsewhere))
    assert executor.library.phases.count(ANALYSIS) == 2, (
        "indices at other addresses are analysed, whatever was promised"
    )


@pytest.mark.parametrize("wrong", [0, 1, 3])
@pytest.mark.parametrize("kind", ["gen", "pos"])
def test_one_that_cannot_be_factorized_is_told_and_the_others_are_right(wrong, kind, executor, rng, matrices):
    if kind == "pos":
        matrices = [sp.csr_array(np.diag(rng.uniform(1, 2, n))) for n in SIZES]
    b = right_of(matrices, rng)
    request = request_of(matrices, b, assume_a=kind)
    plan = made(request, executor)
    bad = -matrices[wrong].data if kind == "pos" else 0 * matrices[wrong].data
    request.values[wrong].copy_from(bad)
    for _ in range(2):
        x, info = enqueued(plan, request)
        assert (info != 0).tolist() == [number == wrong for number in range(len(SIZES))]
        assert (info[wrong] > 0) == (kind == "pos")
        are_solutions(matrices, b, x, but=(wrong,))
    request.values[wrong].copy_from(matrices[wrong].data)
    before = len(executor.library.phases)
    x, info = enqueued(plan, request)
    assert not info.any()
    are_solutions(matrices, b, x)
    assert executor.library.phases[before:] == [ANALYSIS, FACTORIZATION, SOLVE], "all together again"


def test_what_is_no_number_in_b_is_no_failure(executor, rng, matrices):
    b = right_of(matrices, rng)
    b[1][3, 1] = np.inf
    request = request_of(matrices, b)
    x, info = enqueued(made(request, executor), request)
    assert not info.any()
    are_solutions(matrices, b, x, but=(1,))


def test_refinements_reach_the_library(executor, rng, matrices):
    request = request_of(matrices, right_of(matrices, rng), refinements=3)
    plan = made(request, executor)
    enqueued(plan, request)
    told = [thing for thing in executor.library.alive.values() if isinstance(thing, dict)]
    assert told == [{cudss.single.CONFIG.CUDSS_CONFIG_IR_N_STEPS: 3}]
    del plan


@pytest.mark.parametrize("kind", ["f4", "f8", "c8", "c16"])
def test_the_kernel_that_looks_at_solutions(kind, rng, tmp_path):
    parts = 1 + (kind[0] == "c")
    real = "f8" if kind in ("f8", "c16") else "f4"
    sizes = [37, 1, 500, 12, 64]
    b, x = ([rng.standard_normal(size * parts).astype(real) for size in sizes] for _ in range(2))
    x[0][-1], b[2][3], x[3][0], b[3][1], x[4][5] = np.nan, np.inf, -np.inf, np.nan, np.finfo(real).max
    addresses = ([one.ctypes.data for one in several] for several in (b, x))
    words = [np.array(one, np.int64) for one in (*addresses, np.multiply(sizes, parts))]
    blocks = module_at("ops/blocks_on_cpu")
    chosen = options(np.dtype(kind).itemsize, parts=parts)
    parameters = ("const REAL* const* b", "const REAL* const* x", "const Int* counts", "unsigned* found", "Int systems")
    source = "static void atomicOr(unsigned* at, unsigned x) { *at |= x; }\n" + plans.SOURCE
    for grid in (1, 3):
        found = np.zeros(len(sizes), np.uint32)
        lists = [ctypes.c_void_p(one.ctypes.data) for one in (*words, found)]
        given = [*lists, ctypes.c_int64(len(sizes))]
        blocks.InBlocks(tmp_path).launched(source, plans.NAME, chosen, parameters, (grid, 64), given)
        assert found.tolist() == [1, 0, 2, 3, 0]
    kernel = Kernel(plans.SOURCE, plans.NAME, lambda _: None, chosen)
    assert blocks.kernels_on_cpu.size_for_sm_90(kernel) > 0


def test_the_library_itself_takes_the_descriptors(monkeypatch):
    """Where it is installed: to make them it needs no GPU."""
    monkeypatch.setattr(lists, "PointerArrays", cudss.Pointers)
    made = lists.ListFactors.__new__(lists.ListFactors)
    made._pointers = cudss.Pointers(None, 3, lists.ADDRESS_LISTS)
    made._a, made._b, made._x = (library.cudssMatrix_t() for _ in range(3))
    said = [SystemSpec(n, 2 * n, k, (n, n), 4, 4, 1, 0, 0, 0) for n, k in ((3, 1), (7, 2), (5, 1))]
    try:
        made._describe(said, 0)
    except (LibraryNotFound, SymbolNotFound) as error:
        pytest.skip(str(error))
    count, numbers = ctypes.c_int64(), [ctypes.c_int32() for _ in range(6)]
    addresses = [ctypes.c_void_p() for _ in range(7)]
    library.cudssMatrixGetBatchCsr(made._a, *map(ctypes.byref, (count, *addresses, *numbers)))
    rows, _, elements, *at = (one.value for one in addresses)
    assert count.value == 3
    assert cudss.Library.listed(rows, 3) == [3, 7, 5]
    assert cudss.Library.listed(elements, 3) == [6, 14, 10]
    first, *others = (one.value for one in made._pointers.addresses[:3])
    assert at == [first, None, *others]
    assert [one.value for one in numbers] == [10, 10, 1, 0, 0, 0]
    library.cudssMatrixGetBatchDn(made._x, *map(ctypes.byref, (count, *addresses[:4], *numbers[:3])))
    rows, nrhs, ld, values = (one.value for one in addresses[:4])
    found = [cudss.Library.listed(one, 3) for one in (rows, nrhs, ld)]
    assert found == [[3, 7, 5], [1, 2, 1], [3, 7, 5]]
    assert values == made._pointers.addresses[4].value
    for matrix in (made._a, made._b, made._x):
        library.cudssMatrixDestroy(matrix)


# -- requests and the host --------------------------------------------------------------------------------------------
def test_bad_requests_are_refused_by_name(rng, matrices):
    good = request_of(matrices, right_of(matrices, rng))
    fields = {name: getattr(good, name) for name in ("values", "rows", "columns", "form", "b")}
    rows, form, b = fields["rows"], fields["form"], fields["b"]

    def with_one(name, number, value):
        return {name: (*fields[name][:number], value, *fields[name][number + 1 :])}

    wide = form[1]._replace(shape=(12, 13))
    for change, words in (
        ({"values": ()}, "values: got 0 of values, 4 of rows.*as many of each, and at least one"),
        (dict.fromkeys(fields, ()), "values: got 0 of values"),
        ({"b": b[:3]}, "values: got 4 of values, .*3 of b"),
        ({"rows": rows[0]}, "rows: got .*expected a list"),
        ({"form": form[0]}, "form: got .*expected a list with one item for each matrix"),
        ({"b": None}, "b: got None; expected a list"),
        (with_one("values", 2, None), r"values\[2\]: got None; expected a dispatch Tensor"),
        (with_one("form", 1, None), r"form\[1\]: got None; expected a SparseForm"),
        (with_one("form", 1, wide), r"form\[1\]\.shape: got \(12, 13\); expected a square matrix"),
        (with_one("form", 1, form[1]._replace(format="csc")), r"form\[1\]\.format: got CSC; expected CSR"),
        (with_one("form", 3, form[3]._replace(base=1)), r"form\[3\]\.base: got 1; expected 0, the base of the first"),
        (with_one("rows", 0, rows[1]), r"rows\[0\]: got i32\[13\].*expected i32 or i64\[8\]|rows\[0\]: .*\[8\]"),
        (with_one("b", 1, b[0]), r"b\[1\]: got f64\[7\].*expected f64\[12\] or .*, because A\[1\] is \[12, 12\]"),
        (with_one("b", 1, b[1].astype("f32")), r"b\[1\]: got f32.*expected f64, the dtype of values\[0\]"),
        (with_one("values", 3, fields["values"][3].astype("c128")), r"values\[3\]: got c128.*expected f64"),
        ({"uplo": "lower"}, "uplo: got LOWER; expected None for general matrices"),
        ({"assume_a": "band"}, "assume_a"),
        ({"stamp": -1}, "stamp"),
        ({"refinements": -1}, "refinements"),
        ({"library": 3}, "library"),
        ({"out": [DEV.zeros(n, "f64") for n in SIZES]}, r"out\[1\]: .*expected f64\[12, 2\]"),
        ({"info": DEV.zeros(3, "i32")}, r"info: .*expected i32\[4\]"),
        (
            {"out": [b[0], *(DEV.zeros(one.shape, "f64") for one in b[1:])]},
            r"out\[0\]: got memory that overlaps b\[0\]",
        ),
    ):
        with pytest.raises(BadRequest, match=words):
            dp.spsolve_batched(**{**fields, **change})
    twice = DEV.zeros(12, "f64")
    same = [twice[:7], DEV.zeros((12, 2), "f64"), twice[6:7], DEV.zeros((5, 3), "f64")]
    with pytest.raises(BadRequest, match=r"out\[[02]\]: got memory that overlaps out\[[02]\]"):
        dp.spsolve_batched(**fields, out=same)
    with pytest.raises(BadRequest, match="nowhere: got a name that is not an operand of this request"):
        good.replace(nowhere=twice)
    with pytest.raises(TypeError, match="unexpected keyword argument 'memory'"):
        dp.spsolve_batched(**fields, memory="hybrid")


def test_rows_refuse_by_name_what_the_library_does_not_have(rng, matrices):
    b = right_of(matrices, rng)
    good = request_of(matrices, b)
    assert select(good, Arch(90)).variant == "several patterns"
    wide = good.replace(**{"columns[2]": good.columns[2].astype("i64")})
    with pytest.raises(NoRow, match=r"needs columns\[2\] of i32, has i64"):
        select(wide, Arch(90))
    by_rows = [DEV.zeros(one.shape, "f64") for one in b]
    with pytest.raises(NoRow, match=r"needs out\[1\] with contiguous columns"):
        select(
            dp.BatchedSpsolveListRequest(good.values, good.rows, good.columns, good.form, good.b, out=by_rows), Arch(90)
        )
    empty = S.csr(DEV.zeros(0, "f64"), DEV.zeros(4, "i32"), DEV.zeros(0, "i32"), (3, 3))
    none = dp.BatchedSpsolveListRequest(*zip(empty.parts, strict=True), [DEV.zeros(3, "f64")])
    with pytest.raises(NoRow, match=r"needs matrices with elements, has none in values\[0\]"):
        select(none, Arch(90))
    one = S.sparse_tensor(matrices[0])
    stacked = dp.BatchedSpsolveRequest(one.values[None], *one.parts[1:], DEV.zeros((1, 7), "f64"))
    assert not select(stacked, Arch(90)).variant
    with pytest.raises(NoRow, match="needs lists of matrices, has values"):
        select(stacked.replace(memory="hybrid"), Arch(90))


def test_what_a_request_says_of_itself(rng, matrices):
    request = request_of(matrices, right_of(matrices, rng), assume_a="sym", uplo="lower", refinements=2)
    words = "spsolve_batched(4 matrices of f64, n 7, 12, 1, 5, assume_a=SYM, uplo=LOWER, refinements=2)"
    assert request.describe() == words
    again = pickle.loads(pickle.dumps(request))
    assert [one.shape for one in again.b] == [one.shape for one in request.b]
    assert dp.run(again)[-1].shape == (4,)


def test_lists_in_scipys_words(rng, matrices):
    b = right_of(matrices, rng)
    x = S.spsolve(matrices, b)
    assert type(x) is list
    are_solutions(matrices, b, x)
    mixed = [matrices[0].tocsc(), matrices[1].tocoo(), S.sparse_tensor(matrices[2]).fixed(), matrices[3]]
    x = S.spsolve(tuple(mixed), [DEV.array(one) for one in b], refinements=1)
    are_solutions(matrices, b, [one.numpy() for one in x])
    symmetric = [a + a.T for a in matrices]
    lower = [sp.csr_array(sp.tril(a)) for a in symmetric]
    are_solutions(symmetric, b, S.spsolve(lower, b, assume_a="sym", uplo="lower"))
    matrices[1] = 0 * matrices[1]
    with pytest.raises(LinAlgError, match=r"singular.* of matrix \[1\]") as caught:
        S.spsolve(matrices, b)
    assert caught.value.statuses == {(1,): -1}
    x, info = S.spsolve(matrices, b, check=False)
    assert np.asarray(info).tolist() == [0, -1, 0, 0]
    assert np.isnan(x[1]).all()
    are_solutions(matrices, b, x, but=(1,))


def test_the_function_refuses_what_is_for_one_pattern_alone(rng, matrices):
    b = right_of(matrices, rng)
    for choices, words in (
        ({"values": np.ones((4, 3))}, "values: got .*expected None with a list of matrices"),
        ({"memory": "hybrid"}, "memory: got 'hybrid'; expected device with a list of matrices"),
        ({"device_memory": 1 << 20}, "device_memory: got 1048576; expected None"),
        ({"precision": "f32"}, "precision: got 'f32'; expected None with a list"),
    ):
        with pytest.raises(BadRequest, match=words):
            S.spsolve(matrices, b, **choices)
    for wrong in ([], b[0], b[:2]):
        with pytest.raises(BadRequest):
            S.spsolve(matrices, wrong)
    with pytest.raises(BadRequest, match="values: got 0 of values"):
        S.spsolve([], [])
    are_solutions(matrices, b, S.spsolve(matrices, b, memory="device"))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_lists_of_torchs_tensors_give_torchs(rng, matrices):
    torch = pytest.importorskip("torch")
    theirs = [torch.from_numpy(a.toarray()).to_sparse_csr() for a in matrices]  # whose indices are of i64
    b = right_of(matrices, rng)
    x = S.spsolve(theirs, [torch.from_numpy(one) for one in b])
    assert all(isinstance(one, torch.Tensor) for one in x)
    are_solutions(matrices, b, [one.numpy() for one in x])


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_supervisor_runs_lists(isolation, rng, matrices):
    b = right_of(matrices, rng)
    with dp.Supervisor("host", streams=1, isolation=isolation) as sup:
        parts = [S.sparse_tensor(a, device=sup.device).parts for a in matrices]
        request = dp.BatchedSpsolveListRequest(*zip(*parts, strict=True), [sup.device.array(one) for one in b])
        *x, info = sup.submit(request).result(60)
        assert not info.numpy().any()
        are_solutions(matrices, b, [one.numpy() for one in x])
