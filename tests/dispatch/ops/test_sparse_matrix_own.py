"""This library's products of sparse and dense matrices, compiled by g++ and run over the host's memory."""

import importlib.util
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.keys import C64, F32, F64, HOST, Dtype
from dispatch.ops.sparse import own_matrix
from dispatch.ops.sparse.cases import cases
from dispatch.testing.check import Mismatch

spec = importlib.util.spec_from_file_location("matrices_on_cpu", Path(__file__).with_name("matrices_on_cpu.py"))
shared = importlib.util.module_from_spec(spec)
spec.loader.exec_module(shared)
on_cpu_of, SMALL = shared.compiled_on_cpu, shared.SMALL
close, drawn, exactly, laid, of_lengths, patterns, plan_of, result_of, tensors = (
    vars(shared)[name]
    for name in ("close", "drawn", "exactly", "laid", "of_lengths", "patterns", "plan_of", "result_of", "tensors")
)

ROWS = [row for op in ("spmm", "spmm_batched") for row in dp.TABLE.of(op) if row.function == "multiply_over"]
# A kernel is compiled for each dtype and layout, which takes two seconds: other dtypes are exhaustive.
QUICK = ("f32", "c128")
DEV = None
N, T, C = dp.Operation


@pytest.fixture(autouse=True)
def dev():
    """The host as it is now: a test of another file may have closed the one before."""
    global DEV
    DEV = dp.device("host")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return on_cpu_of.blocks_on_cpu.InBlocks(tmp_path_factory.mktemp("matrices"))


@pytest.fixture
def executor(on_cpu, monkeypatch):
    return on_cpu_of.executor_on(on_cpu, monkeypatch)


@pytest.fixture
def small(monkeypatch):
    """Blocks of few steps, so that small matrices have several, and rows of several of them."""
    on_cpu_of.small_blocks(monkeypatch, SMALL)


# -- cases ------------------------------------------------------------------------------------------------------------
def compiled_quickly(row):
    return pytest.param(row, id=row.name, marks=() if str(row.dtypes[0]) in QUICK else pytest.mark.exhaustive)


@pytest.mark.parametrize(
    "every", [pytest.param(3, id="sample"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("row", [compiled_quickly(row) for row in ROWS if row.min_arch != HOST])
def test_cases_of_the_rows_on_the_cpu(row, every, executor, rng):
    ran = 0
    for case in cases(row)[ROWS.index(row) % every :: every]:
        ran += verified(case, row, executor, rng)
    assert ran


def verified(case, row, executor, rng):
    """Whether the row takes a case, which its plan then carries out twice."""
    check = case.check(DEV, rng)
    request = check.request
    if any(rule(request) for rule in row.rules):
        return False
    plan = own_matrix.plan(request, executor, row)
    for _ in range(2):  # the second over memory that the first has left
        check.renew()
        outputs = DEV.executor().outputs(request)
        plan.enqueue(request.arguments(outputs))
        check.verify(request.result(outputs))
        if not request.repeatable:
            break  # it has overwritten what it reads
    return True


def verified_all(some, row, executor, rng):
    for case in some:
        verified(case, row, executor, rng)


WRONG = {
    "terms are not added up": ("fma(x[0], y[0], s[0])", "x[0] * y[0]"),
    "alpha is left out": ("alpha * sum", "sum"),
    "what C has is left out": ("+ beta * c", ""),
    "the base is left out": ("- (Column)base;", ";"),
    "rows are taken for their neighbours": (
        "store(first + mine, sum,",
        "store(first + (mine ^ (mine + 1 < lines)), sum,",
    ),
}
WRONG_OF_BATCHES = {
    "offsets of the first matrix for all": ("offsets += matrix * strides.offsets", "offsets += 0"),
    "B of the first matrix for all": ("b += matrix * strides.b", "b += 0"),
    "C of the first matrix for all": ("if (c) c +=", "if (false) c +="),
}


@pytest.mark.parametrize("name", [*WRONG, *WRONG_OF_BATCHES])
def test_the_cases_find_a_wrong_kernel(name, executor, rng):
    (right, wrong), row = (WRONG | WRONG_OF_BATCHES)[name], ROWS[0]
    if name in WRONG_OF_BATCHES:
        row = next(row for row in ROWS if row.op == "spmm_batched")

    def altered(source):
        assert right in source or name in WRONG_OF_BATCHES  # a batch of one is no batch
        return source.replace(right, wrong)

    executor.altered = altered
    with pytest.raises(Mismatch):
        verified_all(reversed(cases(row)), row, executor, rng)


# -- patterns ---------------------------------------------------------------------------------------------------------
NAMES = tuple(patterns(np.random.default_rng(0)))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", NAMES)
def test_any_pattern_is_added_up_right(name, executor, rng):
    lengths, n = patterns(rng)[name]
    matrix = of_lengths(rng, lengths, n)
    b, c = drawn(rng, F64, n, 8), drawn(rng, F64, len(lengths), 8)
    for alpha, beta, base in ((1.0, 0.0, 0), (-0.5, 2.0, 1)):
        added = np.full_like(c, np.nan) if not beta else c
        request = dp.SpmmRequest(*tensors(matrix, base), DEV.array(b), c=DEV.array(added), alpha=alpha, beta=beta)
        close(result_of(request, executor), *exactly(matrix, b, c, alpha, beta), F64, max(lengths, default=0))
        assert executor.launched[-1] == max(1, -(-(len(lengths) + len(matrix[0])) // SMALL.steps))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("columns", [1, 2, 3, 7, 33, 64, 130])
def test_any_number_of_columns(columns, executor, monkeypatch, rng):
    for lanes in (1, 4) if columns <= 3 else (1,):
        on_cpu_of.small_blocks(monkeypatch, SMALL._replace(element_lanes=lanes))
        lengths, n = patterns(rng)["dense rows beside each other"]
        matrix = of_lengths(rng, lengths, n, F32)
        b = drawn(rng, F32, n, columns)
        request = dp.SpmmRequest(*tensors(matrix), DEV.array(b), alpha=3)
        close(result_of(request, executor), *exactly(matrix, b, None, 3), F32, 100)


SHAPES = {
    "column-major": (6, "columns", "rows"),
    "a result column-major": (8, "rows", "columns"),
    "all column-major": (8, "columns", "columns"),
    "three columns, column-major": (3, "columns", "columns"),
    "every other column": (8, "apart", "apart"),
    "no room at multiples": (12, "odd lines", "odd lines"),
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [F32, pytest.param(C64, marks=pytest.mark.exhaustive)], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_b_and_c_lie_in_any_strides(name, dtype, executor, rng):
    columns, how_b, how_c = SHAPES[name]
    lengths, n = patterns(rng)["dense rows beside each other"]
    matrix = of_lengths(rng, lengths, n, dtype)
    b, c = drawn(rng, dtype, n, columns), drawn(rng, dtype, len(lengths), columns)
    out = laid(np.zeros_like(c), how_c)
    more = {"c": laid(c, how_c), "alpha": 0.5, "beta": -2.0, "out": out}
    request = dp.SpmmRequest(*tensors(matrix, 1, ("i8", "i4")), laid(b, how_b), **more)
    assert own_matrix.is_copied(request) == (how_b != "odd lines" and how_b != "rows" and columns >= 4)
    close(result_of(request, executor), *exactly(matrix, b, c, 0.5, -2.0), dtype, 100)


def test_b_is_copied_where_a_has_elements_enough(rng):
    b = laid(drawn(rng, F64, 40, 5), "columns")
    for count, expected in ((39, False), (40, True)):
        matrix = of_lengths(rng, [count], 40)
        assert own_matrix.is_copied(dp.SpmmRequest(*tensors(matrix), b)) is expected
        assert not own_matrix.is_copied(dp.SpmmRequest(*tensors(matrix), b.copy()))


KINDS = [("f32", "f32"), ("f64", "f64"), ("c64", "c64"), ("c128", "c128")]
KINDS += [("f16", "f16"), ("f16", "f32"), ("bf16", "bf16"), ("bf16", "f32")]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("dtype", "result"), KINDS)
def test_every_dtype_with_factors_and_conjugated(dtype, result, executor, rng):
    """Of a CSC, transposed or conjugated; long rows are rounded once, where they end."""
    dtype, result = Dtype.of(dtype), Dtype.of(result)
    lengths, n = patterns(rng)["dense rows beside each other"]
    matrix = of_lengths(rng, lengths, n, dtype)
    b, c = drawn(rng, dtype, n, 4), drawn(rng, result, len(lengths), 4)
    alpha, beta = (0.5 - 2j, 1 + 1j) if dtype.is_complex else (0.5, -2.0)
    values, rows, columns, form = tensors(matrix)
    other = form._replace(format="csc", shape=form.shape[::-1])
    for trans in (N, T, C):
        of = (rows, columns, form) if trans is N else (columns, rows, other)
        given = {"out": DEV.array(c)} if trans is T else {"c": DEV.array(c), "beta": beta}
        request = dp.SpmmRequest(values, *of, DEV.array(b), alpha=alpha, trans=trans, **given)
        found = result_of(request, executor)
        assert found.dtype == result.numpy
        a = (matrix[0].conj(), *matrix[1:]) if trans is C and dtype.is_complex else matrix
        close(found, *exactly(a, b, c, alpha, 0.0 if trans is T else beta), result, 100)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("widths", [("i8", "i8"), ("i4", "i8")])
def test_offsets_and_columns_have_32_or_64_bits_each_for_itself(widths, executor, rng):
    lengths, n = patterns(rng)["random"]
    matrix = of_lengths(rng, lengths, n)
    b = drawn(rng, F64, n, 8)
    for base in (0, 1):
        request = dp.SpmmRequest(*tensors(matrix, base, widths), DEV.array(b))
        close(result_of(request, executor), *exactly(matrix, b), F64, 30)


@pytest.mark.usefixtures("small")
def test_what_is_added_may_be_the_result_also_in_a_long_row(executor, rng):
    matrix = of_lengths(rng, [3, 0, 500, 2, 90], 300)
    b, c = drawn(rng, F64, 300, 8), drawn(rng, F64, 5, 8)
    for executor.order in range(3):
        memory = np.full((9, 8), 7.0)
        memory[2:7] = c
        memory = DEV.array(memory)
        request = dp.SpmmRequest(*tensors(matrix), DEV.array(b), c=memory[2:7], beta=2.0, out=memory[2:7])
        plan_of(request, executor).enqueue(request.arguments({}))
        found = memory.numpy()
        close(found[2:7], *exactly(matrix, b, c, 1.0, 2.0), F64, 500)
        assert (found[:2] == 7).all()
        assert (found[7:] == 7).all()


@pytest.mark.usefixtures("small")
def test_nan_and_infinities_stay_in_their_row_and_column(executor, rng):
    lengths = [3, 0, 50, 2, 90, 7]
    values, *others = of_lengths(rng, lengths, 300)
    b = drawn(rng, F64, 300, 8)
    for row, value in product((0, 2, 4, 5), (np.nan, np.inf)):
        spoiled = values.copy()
        spoiled[others[0][row] + lengths[row] // 2] = value
        found = result_of(dp.SpmmRequest(*tensors((spoiled, *others)), DEV.array(b)), executor)
        assert np.nonzero(~np.isfinite(found).all(axis=1))[0].tolist() == [row]
    b[others[1][5], 3] = np.nan
    found = result_of(dp.SpmmRequest(*tensors((values, *others)), DEV.array(b)), executor)
    assert np.nonzero(np.isnan(found).any(axis=0))[0].tolist() == [3]
