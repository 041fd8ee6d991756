"""The kernel of BSR times a dense matrix, run on the CPU: blocks, tiles, strides, and which requests are its."""

import importlib.util
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import NoRow, Refused
from dispatch.keys import C128, F32, F64, HOST, Dtype
from dispatch.libraries.nvrtc.kernel import Kernel
from dispatch.ops.sparse import block_product_kernels as kernels
from dispatch.ops.sparse import own_block_product
from dispatch.ops.sparse.block_product_sources import Read
from dispatch.ops.sparse.bsr_rules import large_blocks
from dispatch.ops.sparse.cases import cases
from dispatch.table.select import select

spec = importlib.util.spec_from_file_location("block_products", Path(__file__).with_name("block_products_on_cpu.py"))
products = importlib.util.module_from_spec(spec)
spec.loader.exec_module(products)
on_cpu, executor, dev, plan_of, result_of = (
    products.on_cpu,
    products.executor,
    products.dev,
    products.plan_of,
    products.result_of,
)
drawn, matrix_of, laid, check, stacked = (
    products.drawn,
    products.matrix_of,
    products.laid,
    products.check,
    products.stacked,
)


def compiled_quickly(row):
    return pytest.param(row, id=row.name, marks=() if str(row.dtypes[0]) in products.QUICK else pytest.mark.exhaustive)


@pytest.mark.parametrize("row", [compiled_quickly(row) for row in products.ROWS])
def test_the_cases_of_its_rows(row, executor, rng):
    count = 0
    for case in cases(row):
        trial = case.check(products.DEV, rng)
        request = trial.request.replace(library="own")
        if request.form.format != dp.SparseFormat.BSR or any(rule(request) for rule in row.rules):
            continue
        if row.dtypes != (request.values.dtype, request.out_dtype):
            continue
        plan = own_block_product.plan(request, executor, row)
        outputs = products.DEV.executor().outputs(request)
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
            dense = products.sp.bsr_array((values, places.numpy(), rows.numpy()), form.shape).toarray().astype("f8")
            made.append(([products.DEV.array(values), rows, places, form], dense))
    parts = [
        made[0][0][at] if shared == "matrix" or (shared == "pattern" and at) else stacked(one[0][at] for one in made)
        for at in range(3)
    ]
    b, c = drawn(rng, F32, batch, 16, columns), drawn(rng, F32, batch, 18, columns)
    right = products.DEV.array(b)
    if shared == "b":
        b[:] = b[0]
        right = products.DEV.array(b[0]).strided(b.shape, (0, columns, 1))
    request = dp.BatchedSpmmRequest(*parts, made[0][0][3], right, c=products.DEV.array(c), beta=0.5)
    found = result_of(request, executor)
    for one, (_, dense) in enumerate(made):
        check(found[one], dense, b[one], F32, 20, c[one], 1.0, 0.5)
    assert len(executor.launched) == 2, "one launch for each of the two runs"


def test_an_added_operand_with_a_beta_of_0_is_not_read(executor, rng):
    operands, dense = matrix_of(rng, [2, 3], 3, (4, 4))
    b, c = drawn(rng, F32, 12, 6), np.full((8, 6), np.nan, np.float32)
    found = result_of(dp.SpmmRequest(*operands, products.DEV.array(b), c=products.DEV.array(c), beta=0.0), executor)
    check(found, dense, b, F32, 12)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["f64", "c64", "c128", "f16", "bf16"])
def test_dtypes(dtype, executor, rng):
    dtype = Dtype.of(dtype)
    operands, dense = matrix_of(rng, [2, 0, 5], 4, (6, 6), dtype)
    b = drawn(rng, dtype, dense.shape[1], 10)
    check(result_of(dp.SpmmRequest(*operands, products.DEV.array(b)), executor), dense, b, dtype, 30)


def test_more_blocks_than_are_staged_at_once(executor, rng):
    operands, dense = matrix_of(rng, [700, 1], 5, (2, 1))
    b = drawn(rng, F32, dense.shape[1], 3)
    check(result_of(dp.SpmmRequest(*operands, products.DEV.array(b)), executor), dense, b, F32, 700)


def test_indices_of_64_bits_where_a_has_many_elements(executor, rng, monkeypatch):
    operands, dense = matrix_of(rng, [3, 4], 3, (5, 4))
    b = drawn(rng, F32, dense.shape[1], 8)
    request = dp.SpmmRequest(*operands, products.DEV.array(b))
    narrow = result_of(request, executor)
    assert executor.launched[-1][0]["SPAN"] == "int"
    monkeypatch.setattr(own_block_product, "MAX_INT", 100)
    assert result_of(request, executor).tobytes() == narrow.tobytes()
    assert executor.launched[-1][0]["SPAN"] == "long long"


def test_offsets_that_are_wrong_lead_nowhere_outside_of_a(executor, rng):
    """They fall, or are too large: what is read is some element of A, and the other rows are right."""
    (values, _, places, form), _ = matrix_of(rng, [1, 1, 1, 1], 3, (4, 4))
    wrong = products.DEV.array(np.array([-3, 1, 2, 1, 900], "i4"))
    b = drawn(rng, F32, 12, 5)
    found = result_of(dp.SpmmRequest(values, wrong, places, form, products.DEV.array(b)), executor)
    at = slice(4 * int(places.numpy()[1]), 4 * int(places.numpy()[1]) + 4)
    np.testing.assert_allclose(found[4:8], values.numpy()[1].astype("f8") @ b[at].astype("f8"), rtol=1e-4, atol=1e-5)
    assert not found[8:12].any()


# -- which requests are its -------------------------------------------------------------------------------------------
def request_of(rng, block=(4, 4), columns=8, **more):
    operands, dense = matrix_of(rng, [1, 2], 2, block)
    return dp.SpmmRequest(
        *operands, products.DEV.array(drawn(rng, F32, dense.shape[0 if "trans" in more else 1], columns)), **more
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
        assert (select(request, products.GPU).function == kernels.NAME) is is_own, (block, columns, more)
        assert select(request, HOST).stands_for == ("own" if is_own else "cusparse")
    with pytest.raises(NoRow, match=r"needs BSR with trans n, has BSR with t"):
        select(request_of(rng, trans="t", library="own"), products.GPU)
    assert large_blocks(request_of(rng)).endswith("or library own or autotune, has 4 and 8")


def test_too_many_tiles_are_refused(executor, rng, monkeypatch):
    monkeypatch.setattr(own_block_product, "MAX_BLOCKS", 1)
    with pytest.raises(Refused, match=r"needs at most 1 tiles of the results, has 2"):
        plan_of(request_of(rng), executor)


def test_a_result_without_elements_launches_nothing(executor):
    operands = [
        products.DEV.zeros((0, 4, 4)),
        products.DEV.zeros((1,), "i32"),
        products.DEV.zeros((0,), "i32"),
        dp.SparseForm("bsr", (0, 8), 0, (4, 4)),
    ]
    request = dp.SpmmRequest(*operands, products.DEV.zeros((8, 3)))
    plan_of(request, executor).enqueue(request.arguments(products.DEV.executor().outputs(request)))
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
        team = tile.threads // tile.teams * tile.columns
        assert team <= tile.step * (max(height, tile.wide + pad)), "sums of a row fit where the steps were"
        assert tile.teams == 1 or tile.teams * tile.step <= span, "each team has a step of an average row"
        teams.add(tile.teams)
    assert {1, 2, 4} <= teams


@pytest.mark.parametrize("teams", [2, 4])
@pytest.mark.parametrize(("block", "columns"), [((32, 32), 40), ((5, 3), 9), ((70, 20), 3), ((1, 40), 1), ((1, 1), 33)])
def test_teams_share_the_steps_of_a_row(block, columns, teams, executor, rng, monkeypatch):
    """Rows with fewer steps than teams, rows of many steps, empty ones; more blocks than are staged at once."""
    tile_of = kernels.tile_of
    monkeypatch.setattr(kernels, "tile_of", lambda *given: tile_of(*given)._replace(teams=teams))
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
    assert tile.teams > 1 or item == 16, "whose steps leave no room for another team"
    for strides, is_large in (((64, 1), False), ((1, 300), True)):
        chosen = kernels.options(dtype, dtype, tile, Read((32, 16), (8, 4), is_large, strides, is_large))
        kernel = Kernel(kernels.SOURCE, kernels.NAME, lambda _: None, chosen)
        assert products.blocks_on_cpu.kernels_on_cpu.size_for_sm_90(kernel) > 0
