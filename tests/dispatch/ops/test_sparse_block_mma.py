"""The kernel of BSR times a dense matrix by tensor cores, whose instructions a CPU computes as PTX defines them."""

import importlib.util
from pathlib import Path

import pytest

import dispatch as dp
from dispatch.keys import F16, F32, Arch, Dtype
from dispatch.libraries.nvrtc.kernel import Kernel
from dispatch.ops.sparse import block_mma_kernels as mma
from dispatch.ops.sparse import block_product_kernels as kernels
from dispatch.ops.sparse.block_product_sources import Read
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


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize(
    ("block", "columns", "base"), [((16, 16), 8, 0), ((32, 32), 72, 1), ((48, 16), 136, 0), ((64, 80), 32, 0)]
)
def test_tensor_cores(block, columns, base, dtype, executor, rng):
    """Rows without blocks, and with fewer steps than there are stages; tiles of C's columns that are not full."""
    dtype, lengths = Dtype.of(dtype), [3, 0, 9, 1]
    operands, dense = matrix_of(rng, lengths, 10, block, dtype, base)
    b, c = drawn(rng, dtype, dense.shape[1], columns), drawn(rng, dtype, dense.shape[0], columns)
    request = dp.SpmmRequest(*operands, laid(b, "rows"), c=laid(c, "apart"), alpha=2.0, beta=0.5, library="own")
    found = result_of(request, executor)
    assert executor.names == [mma.NAME] * 2
    check(found, dense, b, dtype, max(lengths) * block[1], c, 2.0, 0.5)


@pytest.mark.parametrize("tile", [(64, 128, 32, 4), (64, 64, 64, 3), (32, 32, 64, 3), (16, 32, 64, 3), (16, 64, 32, 2)])
def test_tiles_of_all_sizes(tile, executor, rng, monkeypatch):
    monkeypatch.setattr(mma, "tile_of", lambda *_: mma.MmaTile(*tile))
    operands, dense = matrix_of(rng, [7, 2], 8, (64, 32), F16)
    b = drawn(rng, F16, dense.shape[1], 200)
    check(result_of(dp.SpmmRequest(*operands, products.DEV.array(b), library="own"), executor), dense, b, F16, 7 * 32)
    assert executor.launched[-1][0]["TILE_WIDE"] == str(tile[1])
    assert executor.launched[-1][1] == 2 * (64 // tile[0]) * -(-200 // tile[1])


def test_tensor_cores_multiply_batches(executor, rng):
    batch, block, columns = 3, (16, 32), 24
    made = [matrix_of(rng, [2, 0, 5], 6, block, F16) for _ in range(batch)]
    b = drawn(rng, F16, batch, 6 * 32, columns)
    parts = [stacked(one[0][at] for one in made) for at in range(3)]
    found = result_of(dp.BatchedSpmmRequest(*parts, made[0][0][3], products.DEV.array(b)), executor)
    for one, (_, dense) in enumerate(made):
        check(found[one], dense, b[one], F16, 5 * 32)
    assert executor.names == [mma.NAME] * 2


def test_what_tensor_cores_do_not_support_is_multiplied_without_them(executor, rng):
    for block, columns, how, name, arch in (
        ((16, 16), 12, "rows", "f16", 90),  # rows of 24 bytes
        ((16, 16), 16, "columns", "f16", 90),
        ((16, 8), 16, "rows", "f16", 90),
        ((24, 16), 16, "rows", "bf16", 90),
        ((16, 16), 16, "rows", "f16", 75),
        ((16, 16), 16, "rows", "f32", 90),
    ):
        dtype, executor.device.arch = Dtype.of(name), Arch(arch)
        operands, dense = matrix_of(rng, [2, 1], 3, block, dtype)
        b = drawn(rng, dtype, dense.shape[1], columns)
        check(
            result_of(dp.SpmmRequest(*operands, laid(b, how), library="own"), executor), dense, b, dtype, 2 * block[1]
        )
        assert executor.names[-1] == kernels.NAME, (block, columns, how, name, arch)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("high", mma.HEIGHTS)
def test_nvrtc_compiles_that_of_tensor_cores(high, dtype):
    dtype = Dtype.of(dtype)
    for columns, is_large in ((32, False), (64, True), (1000, False)):
        tile = mma.tile_of(high, columns, 10**5)
        assert tile.high == high
        assert tile.shared <= 110 << 10, "two blocks run on a multiprocessor"
        read = Read((high, 32), (8, 4), is_large, (64, 1), is_large)
        kernel = Kernel(
            mma.SOURCE, mma.NAME, lambda _: None, mma.options(dtype, F32 if is_large else dtype, tile, read)
        )
        assert products.blocks_on_cpu.kernels_on_cpu.size_for_sm_90(kernel) > 0


def test_blocks_of_16_rows_are_its_by_default(rng):
    for dtype, columns, is_own in (("f16", 64, True), ("bf16", 512, True), ("f16", 12, False), ("f32", 64, False)):
        operands, dense = matrix_of(rng, [1, 2], 2, (16, 16), Dtype.of(dtype))
        request = dp.SpmmRequest(*operands, products.DEV.array(drawn(rng, Dtype.of(dtype), dense.shape[1], columns)))
        assert (select(request, products.GPU).function == kernels.NAME) is is_own, (dtype, columns)
