"""This library's product of a sparse matrix and a vector, compiled by g++ and run over the host's memory."""

import ctypes
import importlib.util
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.keys import C64, C128, F32, F64, HOST, Dtype
from dispatch.ops.sparse import own_product
from dispatch.ops.sparse.cases import cases
from dispatch.ops.sparse.product_kernels import Tile
from dispatch.testing.check import ROUNDOFF

sp = pytest.importorskip("scipy.sparse")

spec = importlib.util.spec_from_file_location("products_on_cpu", Path(__file__).with_name("products_on_cpu.py"))
on_cpu_of = importlib.util.module_from_spec(spec)
spec.loader.exec_module(on_cpu_of)

ROWS = [row for row in dp.TABLE.of("sparse_mv") if row.min_arch != HOST and row.library == "own"]
# Kernels are compiled for each dtype and pair of indices, which takes two seconds: other dtypes are exhaustive.
QUICK = ("f32", "c128")
SMALL = Tile(threads=64, items=3, max_row=32)  # 160 steps in a block
DEV = None
N, T, C = dp.Operation


@pytest.fixture(autouse=True)
def dev():
    """The host as it is now: a test of another file may have closed the one before."""
    global DEV
    DEV = dp.device("host")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return on_cpu_of.blocks_on_cpu.InBlocks(tmp_path_factory.mktemp("products"))


@pytest.fixture
def executor(on_cpu, monkeypatch):
    return on_cpu_of.executor_on(on_cpu, monkeypatch)


@pytest.fixture
def small(monkeypatch):
    """Blocks of few steps."""
    monkeypatch.setattr(own_product, "tile_of", lambda *_: SMALL)


def row_of(request):
    wanted = request.values.dtype, request.layout_of("out").dtype
    row = next(row for row in ROWS if row.dtypes == wanted)
    assert not any(rule(request) for rule in row.rules)
    return row


def check_memory(executor):
    """Counters and states are 0 again, and nothing has written behind the memory."""
    blocks, memory = executor.launched[-1][1], executor.made[-1]
    assert not memory[: 16 + 4 * blocks].any()
    assert (memory[-on_cpu_of.GUARD :] == 0xFF).all()


def result_of(request, executor, turns=2):
    """What the kernel gives in a plan's runs, all of which have the same bits; blocks come in each order."""
    plan = own_product.plan(request, executor, row_of(request))
    found = []
    for _ in range(turns):
        for executor.order in range(3):
            outputs = DEV.executor().outputs(request)
            for tensor in outputs.values():
                tensor.copy_from(np.full(tensor.shape, np.nan, tensor.dtype.numpy))
            plan.enqueue(request.arguments(outputs))
            found.append(request.result(outputs).numpy())
            check_memory(executor)
    assert all(one.tobytes() == found[0].tobytes() for one in found)
    return found[0]


def compiled_quickly(row):
    return pytest.param(row, id=row.name, marks=() if str(row.dtypes[0]) in QUICK else pytest.mark.exhaustive)


# -- cases ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "every", [pytest.param(2, id="sample"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("row", [compiled_quickly(row) for row in ROWS])
def test_cases_of_the_rows_on_the_cpu(row, every, executor, rng):
    ran = 0
    for case in cases(row)[ROWS.index(row) % every :: every]:
        check = case.check(DEV, rng)
        request = check.request
        if any(rule(request) for rule in row.rules):
            continue
        plan = own_product.plan(request, executor, row)
        for _ in range(2):
            check.renew()
            outputs = DEV.executor().outputs(request)
            plan.enqueue(request.arguments(outputs))
            check.verify(request.result(outputs))
            ran += 1
            if request.in_place and not request.repeatable:
                break  # it has overwritten what it reads
    assert ran


# -- patterns ---------------------------------------------------------------------------------------------------------
def drawn(rng, dtype, *shape):
    values = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype.is_complex else 0)
    return values.astype(dtype.numpy)


def of_lengths(rng, lengths, n, dtype=F64):
    """A matrix in SciPy's CSR whose rows have so many elements at random, some of them twice."""
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    count = int(ends[-1])
    columns = rng.integers(0, max(n, 1), count) if n > 1 else np.zeros(count, np.int64)
    return sp.csr_array((drawn(rng, dtype, count), columns, ends), shape=(len(lengths), n))


def patterns(rng):
    """The lengths of rows, and the columns."""
    one_dense = np.full(400, 2)
    one_dense[123] = 12_000  # of more blocks than a block has threads
    ends = np.zeros(900, int)
    ends[300:600] = 3
    line = np.full(700, 3)
    line[[0, -1]] = 2
    long = np.zeros(50, int)
    long[[3, 4, 20, 49]] = 33, 2000, 161, 700
    return {
        "random": (rng.poisson(7, 900), 500),
        "a band": (line, 700),
        "a power law": (np.minimum((rng.pareto(1.0, 900) * 3).astype(int), 3000), 500),
        "one dense row": (one_dense, 3000),
        "dense rows beside each other": (long, 800),
        "the last row is dense": (np.array([1] * 170 + [5000]), 300),
        "the first row is dense": (np.array([5000] + [1] * 170), 300),
        "no element": (np.zeros(700, int), 10),
        "empty rows first and last": (ends, 40),
        "one row": (np.array([1500]), 1500),
        "one short row": (np.array([5]), 9),
        "one column": (rng.integers(0, 3, 600), 1),
        "many rows": (rng.poisson(0.3, 30_000), 400),
        "no column": (np.zeros(300, int), 0),
    }


NAMES = tuple(patterns(np.random.default_rng(0)))


def tensors(matrix, base=0, widths=("i4", "i4")):
    """A SparseTensor of SciPy's CSR, duplicates and all."""
    rows, columns = (matrix.indptr + base).astype(widths[0]), (matrix.indices + base).astype(widths[1])
    form = dp.SparseForm("csr", matrix.shape, base)
    return [*(DEV.array(part) for part in (matrix.data, rows, columns)), form]


def both(matrix, wide):
    """Its elements in a wider dtype, and their magnitudes; `abs` of a matrix would add up those stored twice."""
    return matrix.data.astype(wide), np.abs(matrix.data.astype(wide))


def exactly(matrix, x, y, alpha=1.0, beta=0.0):
    """What is right, and how far results may be, in units of roundoff."""
    wide = np.complex128 if np.iscomplexobj(matrix.data) else np.float64
    a, sizes = (sp.csr_array((some, matrix.indices, matrix.indptr), matrix.shape) for some in both(matrix, wide))
    expected = alpha * (a @ x.astype(wide)) + (beta * y.astype(wide) if beta else 0)
    size = abs(alpha) * (sizes @ np.abs(x.astype(wide))) + (abs(beta) * np.abs(y.astype(wide)) if beta else 0)
    return expected, size


def close(found, expected, size, dtype, terms):
    """Few roundings: sums are trees, but for the few elements that one thread adds up."""
    work = F64 if dtype in (F64, C128) else F32
    unit = ROUNDOFF[work][0] * min(terms + 4, 60) * (4 if dtype.is_complex else 1)
    off = np.abs(found.astype(expected.dtype) - expected)
    own = ROUNDOFF[dtype][0] if dtype not in (F64, C128, F32, C64) else 0
    assert np.isfinite(found).all()
    assert (off <= unit * size + own * np.abs(expected) + 1e-30).all(), float((off / np.maximum(size, 1e-30)).max())


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", NAMES)
def test_any_pattern_is_split_alike_and_summed_up_right(name, executor, rng):
    lengths, n = patterns(rng)[name]
    matrix = of_lengths(rng, lengths, n)
    x, y = drawn(rng, F64, n), drawn(rng, F64, len(lengths))
    for alpha, beta, base in ((1.0, 0.0, 0), (-0.5, 2.0, 1)):
        added = np.full(len(lengths), np.nan) if not beta else y
        request = dp.SparseMvRequest(*tensors(matrix, base), DEV.array(x), y=DEV.array(added), alpha=alpha, beta=beta)
        found = result_of(request, executor)
        close(found, *exactly(matrix, x, y, alpha, beta), F64, max(lengths, default=0))
        blocks = -(-(len(lengths) + matrix.nnz) // SMALL.steps)
        assert executor.launched[-1][1] == blocks


@pytest.mark.parametrize("name", ["random", "a power law", "one dense row", "many rows"])
def test_the_tile_of_users_does_so_too(name, executor, rng):
    lengths, n = patterns(rng)[name]
    matrix = of_lengths(rng, lengths * 3, n)
    x, y = drawn(rng, F64, n), drawn(rng, F64, len(lengths))
    request = dp.SparseMvRequest(*tensors(matrix), DEV.array(x), y=DEV.array(y), beta=0.5)
    close(result_of(request, executor), *exactly(matrix, x, y, 1.0, 0.5), F64, max(lengths) * 3)
    assert executor.launched[-1][1] > 1


@pytest.mark.usefixtures("small")
def test_rows_that_end_at_borders_of_blocks_and_beside_them(executor, rng):
    """Rows of about as many elements as one block sums up alone, and as it has steps, begin and end everywhere."""
    steps, longest = SMALL.steps, SMALL.max_row
    around = [0, 1, 2, longest - 1, longest, longest + 1, steps - 1, steps, steps + 1]
    around += [2 * steps - 1, 2 * steps, 3 * steps]
    for _ in range(40):
        likely = rng.dirichlet(np.full(len(around), 0.3))
        lengths = rng.choice(around, rng.integers(1, 60), p=likely)
        check_lengths(lengths, executor, rng)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("short", [-1, 0, 1])
def test_paths_of_whole_blocks_and_of_a_step_more_or_less(short, executor, rng):
    for blocks, row in product((1, 2, 5), (1, 3, SMALL.max_row, SMALL.max_row + 1, SMALL.steps - 1)):
        steps = blocks * SMALL.steps + short
        lines, left = divmod(steps, row + 1)
        lengths = [row] * lines + ([left - 1] if left else [])
        assert sum(lengths) + len(lengths) == steps
        check_lengths(lengths, executor, rng)
        check_lengths(lengths[::-1], executor, rng)
        check_lengths([*([0] * (steps % 7)), *lengths], executor, rng)


def check_lengths(lengths, executor, rng):
    """Whole numbers as elements and unlike sums: each row has its own, exactly."""
    matrix = of_lengths(rng, lengths, 50)
    matrix.data[:] = rng.integers(1, 1000, matrix.nnz)
    x = rng.integers(1, 1000, 50).astype(float)
    request = dp.SparseMvRequest(*tensors(matrix), DEV.array(x))
    np.testing.assert_array_equal(result_of(request, executor, turns=1), matrix @ x)


KINDS = [("f32", "f32"), ("f64", "f64"), ("c64", "c64"), ("c128", "c128")]
KINDS += [("f16", "f16"), ("f16", "f32"), ("bf16", "bf16"), ("bf16", "f32")]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("dtype", "result"), KINDS)
def test_every_dtype_with_factors_and_conjugated(dtype, result, executor, rng):
    """Of a CSC, transposed or conjugated; long rows are rounded once, by the last block."""
    dtype, result = Dtype.of(dtype), Dtype.of(result)
    lengths = np.concatenate([rng.poisson(5, 200), [700], rng.poisson(5, 100)])
    matrix = of_lengths(rng, lengths, 300, dtype)
    x, y = drawn(rng, dtype, 300), drawn(rng, result, len(lengths))
    alpha, beta = (0.5 - 2j, 1 + 1j) if dtype.is_complex else (0.5, -2.0)
    values, rows, columns, form = tensors(matrix)
    for trans in (N, T, C):
        of = (
            (rows, columns, form)
            if trans is N
            else (columns, rows, form._replace(format="csc", shape=form.shape[::-1]))
        )
        for more in ({"y": DEV.array(y), "beta": beta}, {"out": DEV.array(y)}):
            request = dp.SparseMvRequest(values, *of, DEV.array(x), alpha=alpha, trans=trans, **more)
            found = result_of(request, executor, turns=1)
            assert found.dtype == result.numpy
            a = matrix.conj() if trans is C and dtype.is_complex else matrix
            right = exactly(a, x, y, alpha, beta if "beta" in more else 0.0)
            close(found, *right, result if result is not F32 or dtype is F32 else F32, 700)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("widths", [("i4", "i4"), ("i8", "i8"), ("i8", "i4"), ("i4", "i8")])
def test_offsets_and_columns_have_32_or_64_bits_each_for_itself(widths, executor, rng):
    matrix = of_lengths(rng, rng.poisson(4, 500), 300)
    x = drawn(rng, F64, 300)
    for base in (0, 1):
        request = dp.SparseMvRequest(*tensors(matrix, base, widths), DEV.array(x))
        close(result_of(request, executor, turns=1), *exactly(matrix, x, None), F64, 30)


@pytest.mark.usefixtures("small")
def test_vectors_have_any_strides_and_nothing_is_written_between_their_elements(executor, rng):
    matrix = of_lengths(rng, [3, 0, 500, 2] * 50, 300)
    x, y = drawn(rng, F64, 600), drawn(rng, F64, 600)
    out = DEV.array(np.full(400, np.nan))
    spread = out[::2]
    for step in (2, -2):
        request = dp.SparseMvRequest(
            *tensors(matrix), DEV.array(x)[::step], y=DEV.array(y)[:200][::-1], beta=3.0, out=spread
        )
        found = result_of(request, executor, turns=1)
        close(found, *exactly(matrix, x[::step], y[:200][::-1], 1.0, 3.0), F64, 500)
        assert np.isnan(out.numpy()[1::2]).all()


@pytest.mark.usefixtures("small")
def test_what_is_added_may_be_the_result_also_in_a_long_row(executor, rng):
    matrix = of_lengths(rng, [3, 0, 500, 2, 900], 300)
    x, y = drawn(rng, F64, 300), drawn(rng, F64, 5)
    for order in range(3):
        memory = np.full(13, 7.0)
        memory[4:9] = y
        memory = DEV.array(memory)
        request = dp.SparseMvRequest(*tensors(matrix), DEV.array(x), y=memory[4:9], beta=2.0, out=memory[4:9])
        executor.order = order
        own_product.plan(request, executor, row_of(request)).enqueue(request.arguments({}))
        found = memory.numpy()
        close(found[4:9], *exactly(matrix, x, y, 1.0, 2.0), F64, 900)
        assert (found[:4] == 7).all()
        assert (found[9:] == 7).all()


@pytest.mark.usefixtures("small")
def test_nan_and_infinities_stay_in_their_row(executor, rng):
    lengths = [3, 0, 500, 2, 900, 7] * 3
    matrix = of_lengths(rng, lengths, 300)
    x = drawn(rng, F64, 300)
    for row, value in product((0, 2, 3, 4, 5, 17), (np.nan, np.inf)):
        spoiled = matrix.copy()
        spoiled.data[spoiled.indptr[row] + lengths[row] // 2] = value
        request = dp.SparseMvRequest(*tensors(spoiled), DEV.array(x))
        found = result_of(request, executor, turns=1)
        assert np.nonzero(~np.isfinite(found))[0].tolist() == [row]


@pytest.mark.usefixtures("small")
def test_offsets_that_fall_harm_nothing_else_and_no_later_run(executor, rng):
    """What is read is any; but nothing beside the result is written, and the plan is as good as before."""
    matrix = of_lengths(rng, [3, 0, 500, 2, 900, 7] * 5, 300)
    x = drawn(rng, F64, 300)
    request = dp.SparseMvRequest(*tensors(matrix), DEV.array(x), out=DEV.zeros((34,), "f64")[2:32])
    plan = own_product.plan(request, executor, row_of(request))
    good = request.rows.numpy()
    for turn in range(60):
        bad = good.copy() if turn % 2 else rng.permutation(good)
        bad[rng.integers(0, 31, 4)] += rng.integers(-900, 900, 4).astype("i4")
        if turn % 5 == 0:
            bad = rng.integers(-(2**30), 2**30, 31).astype("i4")
        request.rows.copy_from(bad)
        executor.order = turn % 3
        plan.enqueue(request.arguments({}))
        check_memory(executor)
        request.rows.copy_from(good)
        plan.enqueue(request.arguments({}))
        close(request.out.numpy(), *exactly(matrix, x, None), F64, 900)


def test_elements_behind_the_first_2_to_the_31_are_found(executor, monkeypatch, rng):
    """A first row that ends where block 2**26 does; only blocks behind it run, over memory as it would be there."""
    monkeypatch.setattr(own_product, "tile_of", lambda *_: SMALL)
    before, extra = 2**26, 7  # blocks
    first = before * SMALL.steps - 1
    matrix = of_lengths(rng, [5, 0, 31, 2, 11] * 20, 300)
    x, out = drawn(rng, F64, 300), np.full(101, np.nan)
    request = dp.SparseMvRequest(*tensors(matrix, widths=("i8", "i4")), DEV.array(x), out=DEV.zeros((100,), "f64"))
    plan = own_product.plan(request, executor, row_of(request))
    plan.enqueue(request.arguments({}))
    given, (chosen, _) = list(executor.given), executor.launched[-1]
    ends = np.concatenate([[0], first + matrix.indptr]).astype("i8")
    given[0] = ctypes.c_void_p(matrix.data.ctypes.data - 8 * first)
    given[1] = ctypes.c_void_p(ends.ctypes.data)
    given[2] = ctypes.c_void_p(request.columns.ptr - 4 * first)
    given[5] = ctypes.c_void_p(out.ctypes.data)
    given[8:10] = ctypes.c_int64(101), ctypes.c_int64(first + matrix.nnz)
    executor.first = before
    assert matrix.nnz + 100 <= extra * SMALL.steps
    executor.run(chosen, -(-(matrix.nnz + 100) // SMALL.steps), given)
    close(out[1:], *exactly(matrix, x, None), F64, 31)
    assert np.isnan(out[0])
