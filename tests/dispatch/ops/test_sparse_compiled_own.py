"""Products with a caller's operators by this library's kernels, compiled by g++ and run over the host's memory."""

# ruff: noqa: E501 - tables of errors

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest
from dispatch.keys import C64, F32, F64, Arch, Dtype
from dispatch.ops.sparse import own_compiled, own_product, product_kernels, semiring_kernels
from dispatch.ops.sparse.cases import cases
from dispatch.ops.sparse.cases_compiled import EPILOGUES
from dispatch.ops.sparse.compiled_reference import evaluate_compiled
from dispatch.ops.sparse.semiring_tiles import Tile
from dispatch.ops.sparse.semirings import NAMED_SEMIRINGS
from dispatch.table.select import select
from dispatch.testing.check import Mismatch

sp = pytest.importorskip("scipy.sparse")
spec = importlib.util.spec_from_file_location("compiled_on_cpu", Path(__file__).with_name("compiled_on_cpu.py"))
on_cpu_of = importlib.util.module_from_spec(spec)
spec.loader.exec_module(on_cpu_of)

S = dp.sparse
ROWS = [row for op in ("spmm_op", "spmv_op") for row in dp.TABLE.of(op) if row.library == "own"]
# A kernel is compiled for each dtype, operator and layout, which takes two seconds: other dtypes are exhaustive.
QUICK = ("f32", "c128")
DEV = None
SMALL = Tile(steps=32, element_lanes=1)
GPU = Arch(90)


@pytest.fixture(autouse=True)
def dev():
    """The host as it is now: a test of another file may have closed the one before."""
    global DEV
    DEV = dp.device("host")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return on_cpu_of.blocks_on_cpu.InBlocks(tmp_path_factory.mktemp("compiled"))


@pytest.fixture
def executor(on_cpu, monkeypatch):
    return on_cpu_of.executor_on(on_cpu, monkeypatch)


@pytest.fixture
def small(monkeypatch):
    """Blocks of few steps, so that small matrices have several, and rows of several of them."""
    on_cpu_of.small_blocks(monkeypatch, SMALL)


def row_of(request):
    row = select(request, GPU)
    assert row.library == "own"
    return row


def result_of(request, executor, turns=1):
    """What the kernel gives in a plan's runs, all of which have the same bits, whichever blocks come first."""
    plan = own_compiled.plan(request, executor, row_of(request))
    found = []
    for executor.order in range(3) if turns else (0,):
        for _ in range(turns):
            outputs = DEV.executor().outputs(request)
            for tensor in outputs.values():
                tensor.copy_from(np.full(tensor.shape, np.nan, tensor.dtype.numpy))
            plan.enqueue(request.arguments(outputs))
            found.append(request.result(outputs).numpy())
            check_memory(executor)
    assert all(one.tobytes() == found[0].tobytes() for one in found)
    return found[0]


def check_memory(executor):
    """Counters are 0 again, and nothing has written behind the memory."""
    for memory in executor.made[-1:]:
        assert not memory[: 4 * executor.launched[-1]].any()
        assert (memory[-on_cpu_of.products_on_cpu.GUARD :] == 0xFF).all()


# -- cases ------------------------------------------------------------------------------------------------------------
def compiled_quickly(row):
    return pytest.param(row, id=row.name, marks=() if str(row.dtypes[0]) in QUICK else pytest.mark.exhaustive)


@pytest.mark.parametrize(
    "every", [pytest.param(7, id="sample"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("row", [compiled_quickly(row) for row in ROWS])
def test_cases_of_the_rows_on_the_cpu(row, every, executor, rng):
    # Kernels of other dtypes differ in their numbers alone: each has a part of the cases, and all of them have all.
    step = every if str(row.dtypes[0]) in QUICK else max(every, 4)
    for case in cases(row)[ROWS.index(row) % step :: step]:
        verified(case, row, executor, rng)


def verified(case, row, executor, rng):
    check = case.check(DEV, rng)
    assert not any(rule(check.request) for rule in row.rules), "cases are those that the row takes"
    plan = own_compiled.plan(check.request, executor, row)
    assert plan.capture_safe
    for _ in range(2):  # the second over memory that the first has left
        check.renew()
        outputs = DEV.executor().outputs(check.request)
        plan.enqueue(check.request.arguments(outputs))
        check.verify(check.request.result(outputs))
        if not check.request.repeatable:
            break


def verified_all(some, row, executor, rng):
    for case in some:
        verified(case, row, executor, rng)


WRONG = {
    "sums begin with 0": ("i || is_begun ? operators::user_add(sum[v], term) : term", "operators::user_add(sum[v], term)"),
    "a row's last element is left out": ("for (int at = begin + turn; at < end", "for (int at = begin + turn; at < end - 1"),
    "rows are taken for their neighbours": ("store(first + mine, sum,", "store(first + (mine ^ (mine + 1 < lines)), sum,"),
    "the last run of a long row is left out": ("for (int run = 1; run < runs; ++run)", "for (int run = 1; run < runs - 1; ++run)"),
    "who comes first adds up the pieces": ("== members - 1;", "== 0;"),
    "empty rows are their sums": ("is_any ? sum[v] : operators::identity()", "sum[v]"),
    "what C has is left out": ("c ? number(given.at[v]) : Sum(Real(0))", "Sum(Real(0))"),
    "the base is left out": ("- (Column)base;", ";"),
    "columns of the next lane": ("partial[run * WIDE + lane * VECTOR + v] = sum[v];\n        }\n        __syncthreads", "partial[run * WIDE + (lane ^ 1) * VECTOR % WIDE + v] = sum[v];\n        }\n        __syncthreads"),
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WRONG)
def test_the_cases_find_a_wrong_kernel(name, executor, rng):
    right, wrong = WRONG[name]
    assert right in semiring_kernels.KERNEL + semiring_kernels.CALLER_TERM

    def altered(source):
        assert right in source
        return source.replace(right, wrong)

    executor.altered = altered
    row = ROWS[0]
    with pytest.raises(Mismatch):
        verified_all(reversed(cases(row)), row, executor, rng)


# -- patterns ---------------------------------------------------------------------------------------------------------
def of_lengths(rng, lengths, n, dtype=F64):
    """A matrix in CSR whose rows have so many elements at random, some of them twice."""
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    count = int(ends[-1])
    values = rng.standard_normal(count) + (1j * rng.standard_normal(count) if dtype.is_complex else 0)
    return values.astype(dtype.numpy), ends, rng.integers(0, max(n, 1), count), (len(lengths), n)


def tensors(matrix, base=0, widths=("i4", "i4")):
    values, rows, columns, shape = matrix
    parts = values, (rows + base).astype(widths[0]), (columns + base).astype(widths[1])
    return [*(DEV.array(part) for part in parts), dp.SparseForm("csr", shape, base)]


def patterns(rng):
    """The lengths of rows, and the columns; blocks have 32 steps, and rows of more than 8 elements are long."""
    dense = np.full(90, 2)
    dense[41] = 900
    ends = np.zeros(120, int)
    ends[40:80] = 3
    return {
        "random": (rng.poisson(5, 150), 80),
        "a power law": (np.minimum((rng.pareto(0.8, 150) * 2).astype(int), 700), 60),
        "one dense row": (dense, 300),
        "dense rows beside each other": (np.array([0, 9, 32, 31, 64, 0, 0, 33, 8, 100, 0]), 40),
        "long rows that end where blocks do": (np.array([31, 31, 63, 30, 1, 32, 95, 0]), 40),
        "the first row is dense": (np.array([500] + [1] * 20), 30),
        "the last row is dense": (np.array([1] * 20 + [500]), 30),
        "no element": (np.zeros(70, int), 10),
        "empty rows first and last": (ends, 40),
        "one row": (np.array([300]), 300),
        "one short row": (np.array([5]), 9),
        "no column": (np.zeros(40, int), 0),
        "all rows just not long": (np.full(60, 8), 40),
    }


NAMES = tuple(patterns(np.random.default_rng(0)))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("name", NAMES)
def test_any_pattern_is_split_alike_and_added_up_right(name, lanes, executor, monkeypatch, rng):
    on_cpu_of.small_blocks(monkeypatch, SMALL._replace(element_lanes=lanes))
    lengths, n = patterns(rng)[name]
    matrix = of_lengths(rng, lengths, n)
    b, c = rng.standard_normal((n, 8)), rng.standard_normal((len(lengths), 8))
    request = dp.SpmmOpRequest(*tensors(matrix), DEV.array(b), "plus_times", c=DEV.array(c))
    expected = sp.csr_array((matrix[0], matrix[2], matrix[1]), shape=matrix[3]) @ b + c
    found = result_of(request, executor)
    size = sp.csr_array((np.abs(matrix[0]), matrix[2], matrix[1]), shape=matrix[3]) @ np.abs(b) + np.abs(c)
    assert (np.abs(found - expected) <= 60 * np.finfo("f8").eps * size).all()
    blocks = -(-(len(lengths) + len(matrix[0])) // SMALL.steps)
    assert executor.launched[-1] == blocks  # one launch, of blocks with equal shares


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("name", ["a power law", "dense rows beside each other", "long rows that end where blocks do"])
def test_terms_are_added_in_the_order_of_elements_by_one_lane(name, side, executor, rng):
    """What takes the first, or the last, of two is associative and not commutative: it shows the order."""
    lengths, n = patterns(rng)[name]
    matrix = of_lengths(rng, lengths, n)
    b = rng.standard_normal((n, 8))
    ring = S.Semiring(NAMED_SEMIRINGS["plus_times"].multiply, S.SparseOperator(f"return {side};", np.add), -3.0)
    found = result_of(dp.SpmmOpRequest(*tensors(matrix), DEV.array(b), ring), executor)
    values, ends, columns, _ = matrix
    at = ends[:-1] if side == "a" else ends[1:] - 1
    some = np.diff(ends) > 0
    np.testing.assert_array_equal(found[some], values[at[some], None] * b[columns[at[some]]])
    assert (found[~some] == -3).all()


SHAPES = {
    "one column": (1, "rows", "rows"),
    "odd columns": (33, "rows", "rows"),
    "column-major": (6, "columns", "columns"),
    "a result column-major": (8, "rows", "columns"),
    "every other column": (8, "apart", "rows"),
    "more columns than a block has": (132, "rows", "rows"),
    "no room at multiples": (12, "odd lines", "odd lines"),
}


def laid(array, how):
    """A matrix by rows, by columns, with every other column, or with lines an element longer than they are."""
    if how == "columns":
        return DEV.array(np.ascontiguousarray(array.T)).T
    step, more = (2, 0) if how == "apart" else (1, 1) if how == "odd lines" else (1, 0)
    wide = np.full((array.shape[0], array.shape[1] * step + more), np.nan, array.dtype)
    wide[:, : array.shape[1] * step : step] = array
    return DEV.array(wide)[:, : array.shape[1] * step : step]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [F32, pytest.param(C64, marks=pytest.mark.exhaustive)], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_b_and_c_lie_in_any_strides(name, dtype, executor, rng):
    columns, how_b, how_c = SHAPES[name]
    lengths, n = patterns(rng)["dense rows beside each other"]
    matrix = of_lengths(rng, lengths, n, dtype)
    b, c = (rng.standard_normal((rows, columns)).astype(dtype.numpy) for rows in (n, len(lengths)))
    beside, out = laid(c, how_c), laid(np.zeros_like(c), how_c)
    for base, widths in ((0, ("i4", "i4")), (1, ("i8", "i4"))):
        request = dp.SpmmOpRequest(*tensors(matrix, base, widths), laid(b, how_b), c=beside, out=out)
        exact = evaluate_compiled(request, np.dtype(np.complex128 if dtype.is_complex else np.float64))["out"]
        np.testing.assert_allclose(result_of(request, executor), exact, atol=2e-4)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", NAMED_SEMIRINGS)
def test_each_ready_semiring(name, executor, rng):
    lengths, n = patterns(rng)["dense rows beside each other"]
    values, *others = of_lengths(rng, lengths, n)
    request = dp.SpmmOpRequest(
        *tensors((np.round(values), *others)), DEV.array(np.round(rng.standard_normal((n, 5)))), name
    )
    np.testing.assert_array_equal(result_of(request, executor), dp.run(request).numpy())


@pytest.mark.usefixtures("small")
def test_random_operators(executor, rng):
    """Associative ones of several kinds, with an epilogue and without, and with C or not."""
    adds = {
        "return a * b;": np.multiply,
        "return a < b ? b : a;": np.maximum,
        "return a + b + a * b;": lambda a, b: a + b + a * b,
        "const Number x = a < 0 ? -a : a, y = b < 0 ? -b : b;\nreturn x < y ? x : y;": lambda a, b: np.minimum(abs(a), abs(b)),
    }  # fmt: skip
    lengths, n = patterns(rng)["long rows that end where blocks do"]
    for number, (code, function) in enumerate(adds.items()):
        values, *others = of_lengths(rng, lengths, n)
        ending = S.SparseOperator("return sum * Real(0.5) - c;", lambda total, c: total * 0.5 - c)
        ring = S.Semiring(
            S.SparseOperator("return (a - b) * Real(0.125);", lambda a, b: (a - b) * 0.125),
            S.SparseOperator(code, function),
            float(rng.standard_normal()),
            ending if number % 2 else None,
        )
        c = DEV.array(rng.standard_normal((len(lengths), 4))) if number // 2 else None
        request = dp.SpmmOpRequest(*tensors((values, *others)), DEV.array(rng.standard_normal((n, 4))), ring, c=c)
        np.testing.assert_allclose(result_of(request, executor), dp.run(request).numpy(), rtol=1e-9, atol=1e-9)


def test_numbers_of_the_dtypes_ends_are_what_they_are(executor):
    values = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 5e-324, 1.7e308, -2.5])
    first = S.Semiring(S.SparseOperator("return a;", lambda a, b: a + 0 * b), NAMED_SEMIRINGS["max_plus"].add, 7.0)
    a = S.csr(*(DEV.array(x) for x in (values, np.arange(9, dtype="i4"), np.zeros(8, "i4"))), (8, 1))
    found = result_of(dp.SpmmOpRequest(*a, DEV.array(np.zeros((1, 1))), first), executor)[:, 0]
    np.testing.assert_array_equal(found, values)
    np.testing.assert_array_equal(np.signbit(found[:4]), np.signbit(values[:4]))


# -- products with a vector -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["none", "positive", "by row"])
def test_epilogues_of_rows_of_any_length(name, executor, monkeypatch, rng):
    monkeypatch.setattr(own_product, "tile_of", lambda *_: product_kernels.Tile(threads=64, items=3, max_row=32))
    for pattern in ("a power law", "one dense row", "empty rows first and last", "no element", "no column"):
        lengths, n = patterns(rng)[pattern]
        matrix = of_lengths(rng, lengths, n)
        x, y = DEV.array(rng.standard_normal(n)), DEV.array(rng.standard_normal(len(lengths)))
        more = {"y": y, "beta": -0.5} if pattern != "a power law" else {}
        request = dp.SpmvOpRequest(*tensors(matrix, 1, ("i8", "i8")), x, EPILOGUES[name], alpha=1.5, **more)
        np.testing.assert_allclose(result_of(request, executor), dp.run(request).numpy(), rtol=1e-9, atol=1e-9)


def test_results_of_16_bits_may_be_f32(rng):
    lengths, n = patterns(rng)["random"]
    values, *others = of_lengths(rng, lengths, n)
    a = tensors((values.astype("f2"), *others))
    x, wide = DEV.array(np.ones(n, "f2")), DEV.zeros((len(lengths),), "f32")
    assert dp.SpmvOpRequest(*a, x).out_dtype is Dtype.of("f16")
    assert dp.SpmvOpRequest(*a, x, y=wide, beta=0).out_dtype is F32
    with pytest.raises(BadRequest, match=r"y: got f16\[150\]; expected f32, the dtype of the result"):
        dp.SpmvOpRequest(*a, x, y=wide.astype("f16"), out=wide)
