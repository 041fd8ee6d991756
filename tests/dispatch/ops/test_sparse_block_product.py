"""The kernel of BSR times a dense matrix, compiled by g++ and run over the host's memory: blocks, tiles, strides."""

import ctypes
import importlib.util
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import NoRow, Refused
from dispatch.keys import C128, F32, F64, HALF, HOST, Arch, Dtype
from dispatch.libraries.nvrtc import launching
from dispatch.libraries.nvrtc.kernel import Kernel
from dispatch.ops.sparse import block_product_kernels as kernels
from dispatch.ops.sparse import own_block_product
from dispatch.ops.sparse.bsr_rules import large_blocks
from dispatch.ops.sparse.cases import cases
from dispatch.ops.sparse.plain_operators import BatchStrides
from dispatch.table.select import select
from dispatch.testing.check import ROUNDOFF

sp = pytest.importorskip("scipy.sparse")
spec = importlib.util.spec_from_file_location("blocks_on_cpu", Path(__file__).with_name("blocks_on_cpu.py"))
blocks_on_cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(blocks_on_cpu)

GPU = Arch(90)
OPS = ("spmm", "spmm_batched")
ROWS = [row for op in OPS for row in dp.TABLE.of(op) if row.function == kernels.NAME and row.min_arch != HOST]
QUICK = ("f32", "c128")  # kernels are compiled for each dtype and block, which takes a second: others are exhaustive
PARAMETERS = (
    *("const Number* elements", "const LINE* offsets", "const PLACE* places", "const Number* b", "const Result* c"),
    *("Result* out", "Sum alpha", "Sum beta", "Int count", "Int base", "Int columns", "Int b_row", "Int b_column"),
    *("Int c_row", "Int c_column", "Int out_row", "Int out_column", "int parts", "int tiles", "int each"),
    "BatchStrides strides",
)
DEV = None


@pytest.fixture(autouse=True)
def dev():
    """The host as it is now: a test of another file may have closed the one before."""
    global DEV
    DEV = dp.device("host")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return blocks_on_cpu.InBlocks(tmp_path_factory.mktemp("block_products"))


@pytest.fixture
def executor(on_cpu, monkeypatch):
    """What plans are made for: launches run on the CPU; `launched` has the options, blocks and threads of each."""
    made = SimpleNamespace(target=ctypes.c_void_p(7), launched=[], device=DEV)
    known = []

    def loaded(source, name, chosen, _):
        assert (source, name) == (kernels.SOURCE, kernels.NAME)
        known.append(chosen)
        return len(known)

    def launch(function, blocks, *rest):
        *extents, target, pointers, _ = rest
        chosen, threads = known[function.value - 1], extents[2]
        assert tuple(extents) == (1, 1, threads, 1, 1, 0)
        assert target is made.target
        words = dict(option[2:].split("=") for option in chosen[1:])
        real = ctypes.c_double if words["REAL"] == "double" else ctypes.c_float
        sum_of = type("Sum", (ctypes.Structure,), {"_fields_": [("part", real * int(words["PARTS"]))]})
        by_value = {"Sum": sum_of, "Int": ctypes.c_int64, "int": ctypes.c_int, "BatchStrides": BatchStrides}
        kinds = [by_value.get(one.rpartition(" ")[0], ctypes.c_void_p) for one in PARAMETERS]
        given = [kind.from_address(at) for kind, at in zip(kinds, pointers, strict=True)]
        made.launched.append((words, blocks, threads))
        on_cpu.launched(kernels.SOURCE, kernels.NAME, chosen, PARAMETERS, (blocks, threads), given)
        return 0

    monkeypatch.setattr(launching, "loaded", loaded)
    monkeypatch.setattr(launching, "driver", SimpleNamespace(cuLaunchKernel=SimpleNamespace(unchecked=launch)))
    return made


def plan_of(request, executor):
    row = select(request.replace(library="own"), GPU)
    assert row.function == kernels.NAME
    return own_block_product.plan(request, executor, row)


def result_of(request, executor):
    """The same bits in two runs into poisoned memory."""
    plan, found = plan_of(request, executor), []
    assert plan.capture_safe
    for _ in range(2):
        outputs = DEV.executor().outputs(request)
        for tensor in outputs.values():
            tensor.copy_from(np.full(tensor.shape, np.nan, tensor.dtype.numpy))
        plan.enqueue(request.arguments(outputs))
        found.append(request.result(outputs).numpy())
    assert found[0].tobytes() == found[1].tobytes()
    return found[0]


def drawn(rng, dtype, *shape):
    return (rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype.is_complex else 0)).astype(
        dtype.numpy
    )


def matrix_of(rng, lengths, columns, block, dtype=F32, base=0, widths=("i4", "i4")):
    """BSR whose rows have so many blocks, in any order and some twice: the tensors, and the matrix densely in f64."""
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    places = rng.integers(0, columns, ends[-1])
    values = drawn(rng, dtype, ends[-1], *block)
    wide = np.complex128 if dtype.is_complex else np.float64
    dense = np.zeros((len(lengths) * block[0], columns * block[1]), wide)
    for line in range(len(lengths)):
        for at in range(ends[line], ends[line + 1]):
            rows, cols = (slice(i * size, (i + 1) * size) for i, size in zip((line, places[at]), block, strict=True))
            dense[rows, cols] += values[at].astype(wide)
    parts = values, (ends + base).astype(widths[0]), (places + base).astype(widths[1])
    form = dp.SparseForm("bsr", dense.shape, base, block)
    return [*map(DEV.array, parts), form], dense


def laid(array, how):
    """By rows, by columns, with every other column, or reversed."""
    if how == "columns":
        return DEV.array(np.ascontiguousarray(array.T)).T
    if how == "apart":
        wide = np.full((len(array), 2 * array.shape[1]), np.nan, array.dtype)
        wide[:, ::2] = array
        return DEV.array(wide)[:, ::2]
    return DEV.array(array)


def check(found, dense, b, dtype, terms, c=0.0, alpha=1.0, beta=0.0):
    wide = dense.dtype
    expected = alpha * (dense @ b.astype(wide)) + (beta * c.astype(wide) if beta else 0)
    size = abs(alpha) * (np.abs(dense) @ np.abs(b.astype(wide))) + (np.abs(beta * c.astype(wide)) if beta else 0)
    work = F64 if dtype in (F64, C128) else F32
    unit = ROUNDOFF[work][0] * (terms + 8) * (4 if dtype.is_complex else 1)
    own = ROUNDOFF[dtype][0] if dtype in HALF else 0
    assert np.isfinite(found).all()
    # Blocks that are stored twice are added up by the reference first.
    assert (np.abs(found.astype(wide) - expected) <= 2 * unit * size + 2 * own * np.abs(expected) + own * 1e-6).all()


def compiled_quickly(row):
    return pytest.param(row, id=row.name, marks=() if str(row.dtypes[0]) in QUICK else pytest.mark.exhaustive)


@pytest.mark.parametrize("row", [compiled_quickly(row) for row in ROWS])
def test_the_cases_of_its_rows(row, executor, rng):
    count = 0
    for case in cases(row):
        trial = case.check(DEV, rng)
        request = trial.request.replace(library="own")
        if request.form.format != dp.SparseFormat.BSR or any(rule(request) for rule in row.rules):
            continue
        if row.dtypes != (request.values.dtype, request.out_dtype):
            continue
        plan = own_block_product.plan(request, executor, row)
        outputs = DEV.executor().outputs(request)
        plan.enqueue(request.arguments(outputs))
        trial.verify(request.give(outputs))
        count += 1
    assert count >= 2


@pytest.mark.parametrize(
    ("block", "columns"), [((4, 4), 64), ((32, 32), 33), ((3, 5), 7), ((70, 2), 9), ((1, 40), 1), ((16, 16), 100)]
)
def test_blocks_and_columns_of_all_sizes(block, columns, executor, rng):
    """Steps that begin and end inside blocks, tiles of C's rows and columns that are not full, empty rows."""
    lengths = [3, 0, 12, 1, 0, 40 // block[1] + 2]
    operands, dense = matrix_of(rng, lengths, 9, block)
    b = drawn(rng, F32, dense.shape[1], columns)
    found = result_of(dp.SpmmRequest(*operands, laid(b, "rows"), library="own"), executor)
    check(found, dense, b, F32, max(lengths) * block[1])


@pytest.mark.parametrize("how", list(product(("rows", "columns", "apart"), ("rows", "apart"))), ids="-".join)
def test_strides_and_what_is_added(how, executor, rng):
    operands, dense = matrix_of(rng, [2, 5, 1], 4, (8, 8), base=1, widths=("i8", "i4"))
    b, c = drawn(rng, F32, dense.shape[1], 20), drawn(rng, F32, dense.shape[0], 20)
    out = laid(np.full(c.shape, np.nan, np.float32), how[1])
    request = dp.SpmmRequest(*operands, laid(b, how[0]), c=laid(c, how[1]), alpha=0.5, beta=-2.0, out=out)
    plan_of(request, executor).enqueue(request.arguments({}))
    check(out.numpy(), dense, b, F32, 40, c, 0.5, -2.0)
    words = executor.launched[-1][0]
    assert words["B_BY_COLUMNS"] == str(int(how[0] == "columns"))
    assert words["B_COLUMN"] == ("1" if how[0] == "rows" else "b_column")


@pytest.mark.parametrize("shared", ["nothing", "pattern", "matrix", "b"])
def test_batches(shared, executor, rng):
    """Each matrix has its own tiles; parts without a batch axis, and a B with a stride of 0, are the same for all."""
    batch, block, columns = 3, (6, 4), 70
    made = [matrix_of(rng, [2, 0, 5], 4, block) for _ in range(batch)]
    if shared == "matrix":
        made = [made[0]] * batch
    if shared == "pattern":  # and other values
        (first, rows, places, form), _ = made[0]
        made = [made[0]]
        for _ in range(batch - 1):
            values = drawn(rng, F32, *first.shape)
            dense = sp.bsr_array((values, places.numpy(), rows.numpy()), form.shape).toarray().astype("f8")
            made.append(([DEV.array(values), rows, places, form], dense))
    parts = [
        made[0][0][at] if shared == "matrix" or (shared == "pattern" and at) else stacked(one[0][at] for one in made)
        for at in range(3)
    ]
    b, c = drawn(rng, F32, batch, 16, columns), drawn(rng, F32, batch, 18, columns)
    right = DEV.array(b)
    if shared == "b":
        b[:] = b[0]
        right = DEV.array(b[0]).strided(b.shape, (0, columns, 1))
    request = dp.BatchedSpmmRequest(*parts, made[0][0][3], right, c=DEV.array(c), beta=0.5)
    found = result_of(request, executor)
    for one, (_, dense) in enumerate(made):
        check(found[one], dense, b[one], F32, 20, c[one], 1.0, 0.5)
    assert len(executor.launched) == 2, "one launch for each of the two runs"


def stacked(parts):
    return DEV.array(np.stack([part.numpy() for part in parts]))


def test_an_added_operand_with_a_beta_of_0_is_not_read(executor, rng):
    operands, dense = matrix_of(rng, [2, 3], 3, (4, 4))
    b, c = drawn(rng, F32, 12, 6), np.full((8, 6), np.nan, np.float32)
    found = result_of(dp.SpmmRequest(*operands, DEV.array(b), c=DEV.array(c), beta=0.0), executor)
    check(found, dense, b, F32, 12)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["f64", "c64", "c128", "f16", "bf16"])
def test_dtypes(dtype, executor, rng):
    dtype = Dtype.of(dtype)
    operands, dense = matrix_of(rng, [2, 0, 5], 4, (6, 6), dtype)
    b = drawn(rng, dtype, dense.shape[1], 10)
    check(result_of(dp.SpmmRequest(*operands, DEV.array(b)), executor), dense, b, dtype, 30)


def test_more_blocks_than_are_staged_at_once(executor, rng):
    operands, dense = matrix_of(rng, [700, 1], 5, (2, 1))
    b = drawn(rng, F32, dense.shape[1], 3)
    check(result_of(dp.SpmmRequest(*operands, DEV.array(b)), executor), dense, b, F32, 700)


def test_indices_of_64_bits_where_a_has_many_elements(executor, rng, monkeypatch):
    operands, dense = matrix_of(rng, [3, 4], 3, (5, 4))
    b = drawn(rng, F32, dense.shape[1], 8)
    request = dp.SpmmRequest(*operands, DEV.array(b))
    narrow = result_of(request, executor)
    assert executor.launched[-1][0]["SPAN"] == "int"
    monkeypatch.setattr(own_block_product, "MAX_INT", 100)
    assert result_of(request, executor).tobytes() == narrow.tobytes()
    assert executor.launched[-1][0]["SPAN"] == "long long"


def test_offsets_that_are_wrong_lead_nowhere_outside_of_a(executor, rng):
    """They fall, or are too large: what is read is some element of A, and the other rows are right."""
    (values, _, places, form), _ = matrix_of(rng, [1, 1, 1, 1], 3, (4, 4))
    wrong = DEV.array(np.array([-3, 1, 2, 1, 900], "i4"))
    b = drawn(rng, F32, 12, 5)
    found = result_of(dp.SpmmRequest(values, wrong, places, form, DEV.array(b)), executor)
    at = slice(4 * int(places.numpy()[1]), 4 * int(places.numpy()[1]) + 4)
    np.testing.assert_allclose(found[4:8], values.numpy()[1].astype("f8") @ b[at].astype("f8"), rtol=1e-4, atol=1e-5)
    assert not found[8:12].any()


# -- which requests are its -------------------------------------------------------------------------------------------
def request_of(rng, block=(4, 4), columns=8, **more):
    operands, dense = matrix_of(rng, [1, 2], 2, block)
    return dp.SpmmRequest(
        *operands, DEV.array(drawn(rng, F32, dense.shape[0 if "trans" in more else 1], columns)), **more
    )


def test_what_is_its_own_and_what_is_cusparses(rng):
    """What is faster, by measurement; what cuSPARSE does not support; and what is asked for."""
    for block, columns, more, is_own in (
        ((32, 32), 1, {}, True),
        ((64, 64), 200, {}, True),
        ((16, 16), 2, {}, True),
        ((16, 16), 8, {}, True),
        ((16, 16), 1, {}, False),
        ((16, 16), 9, {}, False),
        ((4, 4), 8, {}, False),
        ((4, 2), 64, {}, True),
        ((4, 4), 8, {"library": "own"}, True),
        ((4, 4), 8, {"autotune": True}, True),
        ((32, 32), 64, {"library": "cusparse"}, False),
        ((32, 32), 64, {"algorithm": "bsr_alg1"}, False),
    ):
        request = request_of(rng, block, columns, **more)
        assert (select(request, GPU).function == kernels.NAME) is is_own, (block, columns, more)
        assert select(request, HOST).stands_for == ("own" if is_own else "cusparse")
    with pytest.raises(NoRow, match=r"needs BSR with trans n, has BSR with t"):
        select(request_of(rng, trans="t", library="own"), GPU)
    assert large_blocks(request_of(rng)).endswith("or library own or autotune, has 4 and 8")


def test_too_many_tiles_are_refused(executor, rng, monkeypatch):
    monkeypatch.setattr(own_block_product, "MAX_BLOCKS", 1)
    with pytest.raises(Refused, match=r"needs at most 1 tiles of the results, has 2"):
        plan_of(request_of(rng), executor)


def test_a_result_without_elements_launches_nothing(executor):
    operands = [
        DEV.zeros((0, 4, 4)),
        DEV.zeros((1,), "i32"),
        DEV.zeros((0,), "i32"),
        dp.SparseForm("bsr", (0, 8), 0, (4, 4)),
    ]
    request = dp.SpmmRequest(*operands, DEV.zeros((8, 3)))
    plan_of(request, executor).enqueue(request.arguments(DEV.executor().outputs(request)))
    assert not executor.launched


def test_tiles_fit_into_shared_memory_and_into_blocks():
    teams = set()
    for high, columns, item, lines, span in product(
        (1, 2, 3, 4, 7, 8, 16, 31, 32, 64, 200),
        (1, 2, 3, 5, 33, 64, 1000),
        (4, 8, 16),
        (1, 100, 10**6),
        (0, 320, 10**5),
    ):
        tile = kernels.tile_of(high, columns, item, lines, span)
        pad = kernels.LINE_BYTES // item
        height = -(-tile.high // tile.rows) * tile.rows + pad
        steps = tile.teams * tile.step
        assert steps * (item * (height + tile.wide + pad) + 32) + (2 * steps + 64) * 8 <= 48 << 10
        assert 1 <= tile.threads <= 1024
        assert tile.wide % tile.columns == 0
        assert tile.high <= high
        assert tile.teams == 1 or tile.teams * tile.step <= span, "each team has a step of an average row"
        teams.add(tile.teams)
    assert {1, 2, 4} <= teams


@pytest.mark.parametrize("teams", [2, 4])
@pytest.mark.parametrize(("block", "columns"), [((32, 32), 40), ((5, 3), 9), ((70, 20), 3), ((1, 40), 1)])
def test_teams_share_the_steps_of_a_row(block, columns, teams, executor, rng, monkeypatch):
    """Rows with fewer steps than teams, rows of many steps, empty ones; more blocks than are staged at once."""
    tile_of = kernels.tile_of
    monkeypatch.setattr(own_block_product, "tile_of", lambda *given: tile_of(*given)._replace(teams=teams))
    lengths = [1, 0, 13, 4, 900 // block[1]]
    operands, dense = matrix_of(rng, lengths, 12, block)
    b, c = drawn(rng, F32, dense.shape[1], columns), drawn(rng, F32, dense.shape[0], columns)
    request = dp.SpmmRequest(*operands, laid(b, "rows"), c=laid(c, "rows"), alpha=2.0, beta=0.5, library="own")
    check(result_of(request, executor), dense, b, F32, max(lengths) * block[1], c, 2.0, 0.5)
    assert executor.launched[-1][0]["TEAMS"] == str(teams)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64", "c64", "c128"])
def test_nvrtc_compiles_it(dtype):
    dtype = Dtype.of(dtype)
    item = 16 if dtype is C128 else 8 if dtype is F64 or dtype.is_complex else 4
    tile = kernels.tile_of(32, 64, item, 100, 320)
    assert tile.teams > 1
    for strides, is_large in (((64, 1), False), ((1, 300), True)):
        chosen = kernels.options(dtype, dtype, tile, kernels.Read((32, 16), (8, 4), is_large, strides, is_large))
        kernel = Kernel(kernels.SOURCE, kernels.NAME, lambda _: None, chosen)
        assert blocks_on_cpu.kernels_on_cpu.size_for_sm_90(kernel) > 0
