"""Batches of this library's products of sparse and dense matrices, compiled by g++ and run over the host's memory."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from cudabind import nvrtc
from cudabind.errors import LibraryNotFound
from dispatch.errors import Refused
from dispatch.keys import F32, F64, Dtype
from dispatch.libraries.cusparse.operator_source import KERNEL_OPTIONS
from dispatch.ops.sparse import own_matrix, plain_operators, semiring_kernels
from dispatch.ops.sparse.semiring_tiles import Shape, Tile, shape_of, tile_of

spec = importlib.util.spec_from_file_location("matrices_on_cpu", Path(__file__).with_name("matrices_on_cpu.py"))
shared = importlib.util.module_from_spec(spec)
spec.loader.exec_module(shared)
on_cpu_of, SMALL = shared.compiled_on_cpu, shared.SMALL
close, drawn, exactly, laid, of_lengths, plan_of, result_of = (
    vars(shared)[name] for name in ("close", "drawn", "exactly", "laid", "of_lengths", "plan_of", "result_of")
)

DEV = None
N, T, _ = dp.Operation


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


# -- batches ----------------------------------------------------------------------------------------------------------
OF_BATCHES = {"each": (1, 1, 1), "one offsets": (1, 0, 1), "one pattern": (1, 0, 0), "one A": (0, 0, 0)}


def batch(rng, kind, count, lengths, n, dtype=F64):
    """As many matrices, and the three parts that a request takes; rows of each have other lengths, in all as many."""
    has_values, has_offsets, has_columns = OF_BATCHES[kind]
    orders = [rng.permutation(lengths) if has_offsets else lengths for _ in range(count)]
    some = [of_lengths(rng, order, n, dtype) for order in orders]
    chosen = [
        np.stack([one[part] for one in some]) if apart else some[0][part]
        for part, apart in enumerate((has_values, has_offsets, has_columns))
    ]
    matrices = [
        (*(part[number] if part.ndim > 1 else part for part in chosen), (len(lengths), n)) for number in range(count)
    ]
    return matrices, chosen


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", OF_BATCHES)
def test_batches_of_several_blocks_for_each_matrix(kind, executor, rng):
    """Each matrix has long rows of several blocks, and B several tiles of columns."""
    lengths, n = np.array([0, 9, 32, 31, 64, 0, 33, 8, 100]), 40
    matrices, parts = batch(rng, kind, 3, lengths, n, F32)
    b, c = drawn(rng, F32, 3, n, 132), drawn(rng, F32, 3, len(lengths), 132)
    for base, more in ((0, {}), (1, {"c": DEV.array(c), "beta": -1.5})):
        indices = [(part + base).astype("i4") for part in parts[1:]]
        form = dp.SparseForm("csr", (len(lengths), n), base)
        request = dp.BatchedSpmmRequest(*map(DEV.array, (parts[0], *indices)), form, DEV.array(b), alpha=2, **more)
        found = result_of(request, executor)
        for number, matrix in enumerate(matrices):
            close(found[number], *exactly(matrix, b[number], c[number], 2, more.get("beta", 0)), F32, 100)
        tiles = -(-132 // shape_of(4, 132, SMALL.element_lanes).wide)
        assert tiles > 1
        assert executor.launched[-1] == 3 * tiles * -(-(len(lengths) + lengths.sum()) // SMALL.steps)


@pytest.mark.parametrize("how", ["rows", "columns", "odd lines"])
def test_batches_of_one_block_for_each_matrix_in_any_strides(how, executor, rng):
    """B may be one for all, and lie backwards; what lies between matrices of the result stays as it is."""
    lengths, n = rng.poisson(4, 30), 20
    matrices, parts = batch(rng, "each", 4, lengths, n)
    form = dp.SparseForm("csr", (30, n))
    a = [DEV.array(parts[0]), *(DEV.array(part.astype("i4")) for part in parts[1:])]
    b = drawn(rng, F64, 4, n, 8)
    memory = DEV.array(np.full((4, 31, 8), 7.0))
    backwards = laid(b[::-1].copy(), how)[::-1]
    request = dp.BatchedSpmmRequest(*a, form, backwards, out=memory[:, :30])
    found = result_of(request, executor)
    for number, matrix in enumerate(matrices):
        close(found[number], *exactly(matrix, b[number]), F64, 30)
    assert executor.launched[-1] == 4
    assert not executor.made, "of one block there is nothing left"
    assert (memory.numpy()[:, 30] == 7).all()
    one = laid(b[0], how)
    for_all = one.strided((4, n, 8), (0, *one.layout.strides))
    found = result_of(dp.BatchedSpmmRequest(*a, form, for_all), executor)
    close(found[3], *exactly(matrices[3], b[0]), F64, 30)


@pytest.mark.usefixtures("small")
def test_batches_of_16_bits_are_added_up_in_f32(executor):
    """4,096 times 1 is no number of sums that are rounded to f16 at each addition; and CSC by its columns."""
    count = 4096
    values = np.ones((2, count), "f2")
    offsets, places = np.array([0, count], "i4"), np.zeros(count, "i4")
    b = np.ones((2, 1, 4), "f2")
    b[1] = 0.25
    for trans, form, order in ((N, dp.SparseForm("csr", (1, 1)), 1), (T, dp.SparseForm("csc", (1, 1)), -1)):
        indices = [DEV.array(part) for part in (offsets, places)[::order]]
        for out in (None, DEV.zeros((2, 1, 4), "f32")):
            request = dp.BatchedSpmmRequest(DEV.array(values), *indices, form, DEV.array(b), trans=trans, out=out)
            np.testing.assert_array_equal(result_of(request, executor)[:, 0, 0], [4096, 1024])


def test_matrices_of_a_batch_have_blocks_of_their_own_that_are_no_larger_than_they():
    for rows, count, columns in ((10**4, 10**5, 64), (30, 100, 8), (300, 500, 64), (1, 10**6, 200)):
        one = tile_of(rows, count, columns)
        for number in (1, 2, 1000):
            tile = tile_of(rows, count, columns, number)
            assert tile.element_lanes == one.element_lanes
            assert tile.steps in (256, 512, 1024)
            assert number == 1 or tile.steps == 256 or tile.steps < 2 * (rows + count)
    assert tile_of(100, 300, 64, 10**6).steps == 512  # all of a matrix, and no piece is left
    assert tile_of(60, 100, 64, 10**6).steps == 256
    assert tile_of(10**5, 10**6, 64, 4).steps == 1024


def test_more_blocks_than_a_launch_has_are_refused(executor, monkeypatch, rng):
    monkeypatch.setattr(own_matrix, "MAX_BLOCKS", 5)
    matrices, parts = batch(rng, "one A", 6, [2, 3], 4)
    a = [DEV.array(parts[0]), *(DEV.array(part.astype("i4")) for part in parts[1:])]
    request = dp.BatchedSpmmRequest(*a, dp.SparseForm("csr", (2, 4)), DEV.array(drawn(rng, F64, 6, 4, 2)))
    assert len(matrices) == 6
    with pytest.raises(Refused, match="needs at most 5 blocks of 256 rows and elements, has 6"):
        plan_of(request, executor)


# -- the compiler, which needs no GPU ---------------------------------------------------------------------------------
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64", "c64", "c128"])
def test_nvrtc_compiles_them(dtype, batched):
    dtype = Dtype.of(dtype)
    compute = own_matrix.COMPUTE.get(dtype, F32)
    conj = dtype.is_complex and batched
    for vector, lanes in ((16 // compute.itemsize, 1), (1, 4)):
        more = plain_operators.words(conj=conj, batched=batched)
        text = plain_operators.plain_operators(compute)
        shape, widths = Shape(vector, 8), (8, 4) if vector > 1 else (4, 8)
        wide = (True, vector > 1)
        found = semiring_kernels.source(text, (dtype, dtype), widths, Tile(1024, lanes), shape, wide, more)
        try:
            assert nvrtc.compile(found, "kernel.cu", ("-arch=sm_90", *KERNEL_OPTIONS)).code
        except LibraryNotFound as error:
            pytest.skip(str(error))
