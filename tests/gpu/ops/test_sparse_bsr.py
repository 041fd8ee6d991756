"""Blocks to and from other formats on the GPU at sizes of use; their rows' cases run among those of all matrices."""

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest

sp = pytest.importorskip("scipy.sparse")

S = dp.sparse


def in_blocks(matrix, block):
    """What SciPy makes of it, with its blocks sorted."""
    found = matrix.tobsr(blocksize=block)
    found.sort_indices()
    return found


def same(found, expected):
    """Whether a SparseTensor has the very parts of a matrix of SciPy's."""
    for part, theirs in zip(found.parts, (expected.data, expected.indptr, expected.indices), strict=False):
        np.testing.assert_array_equal(part.numpy(), theirs)


MATRICES = {
    "few in a row": lambda rng: sp.random_array((40_000, 60_000), density=5e-5, rng=rng, format="csr"),
    "long rows": lambda rng: sp.random_array((96, 240_000), density=0.02, rng=rng, format="csr"),
    "dense blocks": lambda rng: sp.kron(sp.random_array((2000, 2500), density=0.002, rng=rng), np.ones((8, 12)), "csr"),
    "one dense row": lambda rng: sp.vstack(
        [sp.random_array((2399, 48_000), density=1e-4, rng=rng), np.ones((1, 48_000))], format="csr"
    ),
}


@pytest.mark.parametrize("block", [(1, 1), (2, 2), (4, 4), (8, 12), (24, 1), (3, 16)])
@pytest.mark.parametrize("name", MATRICES)
def test_large_matrices_as_scipy_makes_blocks_of_them_and_elements_again(name, block, gpu, rng):
    matrix = sp.csr_array(MATRICES[name](rng))
    matrix = matrix[: matrix.shape[0] // block[0] * block[0], : matrix.shape[1] // block[1] * block[1]].tocsr()
    matrix.sort_indices()
    a, expected = S.sparse_tensor(matrix, device=gpu), in_blocks(matrix, block)
    blocks = S.tobsr(a, block)
    same(blocks, expected)
    spread = S.tocsr(blocks)
    same(spread, expected.tocsr())
    assert spread.nnz == expected.data.size
    x = rng.standard_normal(matrix.shape[1])
    np.testing.assert_allclose((spread @ gpu.array(x)).numpy(), matrix @ x, rtol=1e-10, atol=1e-8)


@pytest.mark.parametrize("index", ["i4", "i8"])
@pytest.mark.parametrize("base", [0, 1])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64", "c64", "c128"])
def test_every_dtype_and_base_by_repeated_calls(dtype, base, index, gpu, rng):
    """Other values and patterns of the same layouts; what is remembered, recorded and relocated gives each its own."""
    matrices = []
    for _ in range(3):
        places = np.sort(np.argsort(rng.random((300, 450)), axis=1)[:, :7], axis=1)
        parts = (rng.standard_normal(2100), places.ravel(), np.arange(0, 2101, 7))
        matrix = sp.csr_array(parts, shape=(300, 450))
        held = gpu.array(matrix.data, dtype)
        indices = (gpu.array((part + base).astype(index)) for part in (matrix.indptr, matrix.indices))
        rounded = sp.csr_array((held.numpy(), matrix.indices, matrix.indptr), (300, 450))
        exact = sp.csr_array((rounded.data.astype("c16" if dtype[0] == "c" else "f8"), *parts[1:]), (300, 450))
        matrices.append((S.csr(held, *indices, (300, 450), base=base), in_blocks(exact, (3, 5)), exact.toarray()))
    for turn in range(210):
        a, expected, dense = matrices[turn % 3]
        blocks = S.tobsr(a, (3, 5))
        spread = S.tocsr(blocks)
        unpacked = blocks.todense()
        if turn % 7 == 0:
            assert blocks.nnz == expected.data.size
            np.testing.assert_array_equal(blocks.values.numpy().astype(dense.dtype), expected.data)
            np.testing.assert_array_equal(blocks.columns.numpy(), expected.indices + base)
            np.testing.assert_array_equal(spread.rows.numpy(), expected.tocsr().indptr + base)
            np.testing.assert_array_equal(spread.columns.numpy(), expected.tocsr().indices + base)
            np.testing.assert_array_equal(unpacked.numpy().astype(dense.dtype), dense)


def test_a_count_is_captured_and_its_number_is_that_of_the_values_of_the_time(gpu, rng):
    matrix = sp.random_array((3000, 4000), density=0.01, rng=rng, format="csr")
    other = sp.csr_array((matrix.data, rng.permuted(matrix.indices), matrix.indptr), matrix.shape)
    other.sort_indices()
    a = S.sparse_tensor(matrix, device=gpu)
    call = dp.prepare(dp.Csr2bsrNnzRequest(*a, block=(4, 4)))
    for turn in range(6):
        now = (matrix, other)[turn % 2]
        a.columns.copy_from(now.indices.astype(a.columns.dtype.numpy))
        assert call().item() == len(in_blocks(now, (4, 4)).indices)


def test_elements_of_one_place_add_up_and_unsorted_rows_are_sorted_or_refused(gpu, rng):
    row = np.sort(rng.integers(0, 60, 4000))
    column = rng.integers(0, 80, 4000)
    ends = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=60))]).astype("i4")
    a = S.csr(gpu.array(rng.standard_normal(4000)), gpu.array(ends), gpu.array(column.astype("i4")), (60, 80))
    dense = sp.coo_array((a.values.numpy(), (row, column)), (60, 80)).toarray()
    unsorted = int(((np.diff(column) < 0) & (np.diff(row) == 0)).sum())
    assert dp.csr2bsr_nnz(*a, block=(4, 4)).item() == -unsorted
    with pytest.raises(BadRequest, match=f"columns: got {unsorted} unsorted elements; expected sorted elements"):
        dp.csr2bsr(*a, block=(4, 4), nnzb=300)
    np.testing.assert_allclose(S.tobsr(a, (4, 4)).todense().numpy(), dense, rtol=0, atol=1e-13)
    ordered = S.sort(a)
    first = S.tobsr(ordered, (4, 4)).values.numpy()
    assert all(S.tobsr(ordered, (4, 4)).values.numpy().tobytes() == first.tobytes() for _ in range(3))
    with pytest.raises(BadRequest, match="nnzb: got 7; expected 300, the number that csr2bsr_nnz counts"):
        S.tobsr(ordered, (4, 4), nnzb=7)


@pytest.mark.parametrize("strides", ["rows", "columns", "neither"])
def test_blocks_are_unpacked_into_any_strides(strides, gpu, rng):
    matrix = sp.random_array((600, 800), density=0.02, rng=rng, format="csr")
    blocks = S.tobsr(S.sparse_tensor(matrix, device=gpu), (5, 8))
    out = {
        "rows": lambda: gpu.array(np.full((600, 800), np.nan)),
        "columns": lambda: gpu.array(np.full((800, 600), np.nan)).T,
        "neither": lambda: gpu.array(np.full((1200, 1600), np.nan))[::2, ::2],
    }[strides]()
    for _ in range(3):
        dp.sparse_to_dense(*blocks, out=out)
        np.testing.assert_array_equal(out.numpy(), matrix.toarray())


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.usefixtures("gpu")
def test_blocks_of_torch(rng):
    torch = pytest.importorskip("torch")
    there = np.kron(rng.random((16, 12)) < 0.2, np.ones((4, 4)))
    dense = torch.from_numpy(rng.standard_normal((64, 48)) * there).cuda()
    theirs = dense.to_sparse_bsr((4, 4))
    a = S.sparse_tensor(theirs, validate=True)
    torch.testing.assert_close(a.todense(), dense)
    assert isinstance(a.todense(), torch.Tensor)
    again = S.to_torch(S.tobsr(S.tocsr(a), (4, 4)))
    torch.testing.assert_close(again.to_dense(), dense)
    torch.testing.assert_close(S.to_torch(S.tocsr(a)).to_dense(), dense)


BLOCKS = [(2, 2), (4, 4), (8, 8), (16, 16), (32, 32), (64, 64), (100, 100), (4, 2), (3, 5), (1, 40), (70, 3)]
EPSILON = {"f4": 2.0**-23, "f8": 2.0**-52, "c8": 2.0**-22}


def block_matrix(rng, lines, across, block, dtype):
    """BSR with up to 12 blocks in a row, one row that has 300, and empty rows."""
    counts = rng.integers(0, 13, lines)
    counts[rng.integers(lines)] = 300
    ends = np.concatenate([[0], np.cumsum(counts)]).astype("i4")
    values = rng.standard_normal((ends[-1], *block))
    if dtype == "c8":
        values = values + 1j * rng.standard_normal(values.shape)
    places = rng.integers(0, across, ends[-1]).astype("i4")
    shape = lines * block[0], across * block[1]
    return sp.bsr_array((values.astype(dtype), places, ends), shape)


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_products_of_blocks_by_this_library_s_kernel(block, dtype, gpu, rng):
    """Fresh numbers and patterns of changing layouts in one process, against SciPy in f64, into poisoned results."""
    wide = "c16" if dtype == "c8" else "f8"
    for columns in (1, 2, 7, 64, 130):
        a = block_matrix(rng, 60, 400, block, dtype)
        b = rng.standard_normal((a.shape[1], columns)).astype(dtype)
        exact, size = a.astype(wide) @ b.astype(wide), abs(a.astype(wide)) @ np.abs(b)
        parts = [gpu.array(part) for part in (a.data, a.indptr, a.indices)]
        form = dp.SparseForm("bsr", a.shape, 0, block)
        for right in (gpu.array(b), gpu.array(np.ascontiguousarray(b.T)).T):
            found = [gpu.array(np.full(exact.shape, np.nan, dtype)) for _ in range(2)]
            for out in found:
                dp.spmm(*parts, form, right, library="own", out=out)
            found = [out.numpy() for out in found]
            assert found[0].tobytes() == found[1].tobytes()
            assert (np.abs(found[0] - exact) <= 300 * max(block) * EPSILON[dtype] * size + 1e-30).all()


def test_a_batch_of_blocks_is_that_of_each_matrix(gpu, rng):
    batch, block = 9, (32, 16)
    one = block_matrix(rng, 20, 400, block, "f4")
    values = rng.standard_normal((batch, *one.data.shape)).astype("f4")
    b = rng.standard_normal((batch, one.shape[1], 33)).astype("f4")
    rows, places, form = gpu.array(one.indptr), gpu.array(one.indices), dp.SparseForm("bsr", one.shape, 0, block)
    found = dp.spmm_batched(gpu.array(values), rows, places, form, gpu.array(b)).numpy()
    for number in range(batch):
        single = dp.spmm(gpu.array(values[number]), rows, places, form, gpu.array(b[number]), library="own").numpy()
        np.testing.assert_allclose(found[number], single, rtol=1e-4, atol=1e-4)
        exact = sp.bsr_array((values[number], one.indices, one.indptr), one.shape).astype("f8") @ b[number]
        np.testing.assert_allclose(found[number], exact, rtol=1e-3, atol=1e-2)
