"""Products with operators of the caller's on the GPU: paths in a graph, large matrices, lines that do not compile.

The cases of their rows, and those of rotations, are in test_sparse.py.
"""

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest
from dispatch.ops.sparse.semirings import NAMED_SEMIRINGS

sp = pytest.importorskip("scipy.sparse")
S = dp.sparse


@pytest.fixture(params=["own", "cusparse"])
def product(request, skip_without):
    """The function by one library, where it is there with all that it needs."""
    row = next(row for row in dp.TABLE.of("spmm_op") if row.library == request.param)
    skip_without(row)
    return lambda a, b, semiring="plus_times", **more: dp.spmm_op(*a, b, semiring, library=row.library, **more)


def graph(rng, n, share):
    lengths = sp.random_array(
        (n, n), density=share, rng=rng, format="csr", data_sampler=lambda size: rng.uniform(1, 2, size)
    )
    return lengths, np.where(lengths.toarray() > 0, lengths.toarray(), np.inf)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_shortest_paths_by_products_in_changing_memory(dtype, product, gpu, rng):
    """200 calls over memory that comes and goes; row 0 begins with 0, and nothing is nearer than it is."""
    matrix, lengths = graph(rng, 60, 0.08)
    a = S.sparse_tensor(matrix.astype(dtype), device=gpu)
    start = np.full((60, 3), np.inf, dtype)
    start[:3] = np.where(np.eye(3), 0, np.inf)
    expected = start.astype("f8")
    for _ in range(60):
        expected = np.minimum(expected, (lengths.astype(dtype).astype("f8")[:, :, None] + expected[None]).min(axis=1))
    kept, found = [], None
    for turn in range(200):
        if turn % 60 == 0:
            found = gpu.array(start)
        found = product(a, found, "min_plus", c=found)
        kept = [*kept[-(turn % 7) :], found] if turn % 7 else [found]
        if turn % 60 == 59:
            np.testing.assert_allclose(found.numpy(), expected, rtol=60 * np.finfo(dtype).eps)


@pytest.mark.parametrize("name", NAMED_SEMIRINGS)
@pytest.mark.parametrize("index", ["i4", "i8"])
def test_a_large_matrix_over_each_semiring(name, index, product, gpu, rng):
    matrix = sp.random_array((20_000, 30_000), density=2e-4, rng=rng, format="csr")
    matrix.data[:] = rng.standard_normal(matrix.nnz)
    matrix.indptr, matrix.indices = matrix.indptr.astype(index), matrix.indices.astype(index)
    b = rng.standard_normal((30_000, 16))
    on_host = S.spmm_op(S.sparse_tensor(matrix, device=dp.device("host")), dp.device("host").array(b), name)
    a = S.sparse_tensor(matrix, device=gpu)
    for right in (gpu.array(b), gpu.array(b.T.copy()).T):
        found = product(a, right, name)
        np.testing.assert_allclose(found.numpy(), on_host.numpy(), rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(product(a, right, name).numpy(), found.numpy())  # the same bits in each run


def test_rows_of_any_length_and_one_that_is_dense(product, gpu, rng):
    mask = sp.random_array((500, 4000), density=0.001, rng=rng, format="lil")
    mask[7] = rng.standard_normal(4000)
    matrix = mask.tocsr()
    matrix.data[:] = rng.uniform(1, 2, matrix.nnz)
    b = rng.uniform(1, 2, (4000, 5))
    for name in NAMED_SEMIRINGS:
        host = S.spmm_op(S.sparse_tensor(matrix, device=dp.device("host")), dp.device("host").array(b), name)
        found = product(S.sparse_tensor(matrix, device=gpu), gpu.array(b), name)
        np.testing.assert_allclose(found.numpy(), host.numpy(), rtol=1e-12)


def long_rows(rng, name):
    """The lengths of rows of a matrix with 1,000 columns: blocks have 256 to 1,024 steps."""
    power = np.minimum((rng.pareto(0.9, 30_000) * 3).astype(int), 200_000)
    dense = np.full(5_000, 3)
    dense[[0, 77, 78, 4_999]] = 300_000, 40_000, 700, 5_000
    return {"a power law": power, "dense rows": dense, "one row": np.array([1_000_003])}[name]


@pytest.mark.parametrize("columns", [1, 5, 33, 64, 260])
@pytest.mark.parametrize("name", ["a power law", "dense rows", "one row"])
def test_long_rows_are_added_up_by_many_blocks_in_one_order(name, columns, gpu, rng):
    lengths = long_rows(rng, name)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    values, places = rng.integers(-8, 9, ends[-1]).astype("f4"), rng.integers(0, 1000, ends[-1])
    b = rng.integers(-8, 9, (1000, columns)).astype("f4")  # whose sums are whole numbers that f32 has
    matrix = sp.csr_array((values.astype("f8"), places, ends), shape=(len(lengths), 1000))
    a = S.csr(gpu.array(values), gpu.array(ends), gpu.array(places.astype("i4")), matrix.shape)
    for right in (gpu.array(b), gpu.array(b.T.copy()).T):
        found = [dp.spmm_op(*a, right, library="own").numpy() for _ in range(3)]
        np.testing.assert_array_equal(found[0], matrix @ b)
        assert found[0].tobytes() == found[1].tobytes() == found[2].tobytes()
    start, stop = ends[:-1], ends[1:]
    some = stop > start
    least = np.full((len(lengths), columns), np.inf)
    if columns <= 5:
        least[some] = np.minimum.reduceat(values[:, None] + b[places], start[some])
        np.testing.assert_array_equal(dp.spmm_op(*a, gpu.array(b), "min_plus", library="own").numpy(), least)


@pytest.mark.parametrize("library", ["own", "cusparse"])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_epilogues_of_rows_of_a_large_matrix(dtype, library, gpu, skip_without, rng):
    skip_without(next(row for row in dp.TABLE.of("spmv_op") if row.library == library))
    matrix = sp.random_array((40_000, 30_000), density=3e-4, rng=rng, format="csr").astype(dtype)
    x, y = rng.standard_normal(30_000).astype(dtype), rng.standard_normal(40_000).astype(dtype)
    a = S.sparse_tensor(matrix, device=gpu)
    if a.rows.dtype.itemsize > 4:
        a = S.csr(a.values, a.rows.astype("i32"), a.columns.astype("i32"), a.shape)
    ending = S.SparseOperator("return row % 2 ? x : -x;", lambda row, x: np.where(row % 2, x, -x))
    sums = matrix.astype("f8") @ x + 0.5 * y
    expected = np.where(np.arange(40_000) % 2, sums, -sums)
    for one in (a, a.fixed()):
        for turn in range(3):
            values = gpu.array(matrix.data * (1 + turn))
            found = dp.spmv_op(
                *one.with_values(values), gpu.array(x / (1 + turn)), ending, y=gpu.array(y), beta=0.5, library=library
            )
            np.testing.assert_allclose(found.numpy(), expected, atol=200 * np.finfo(dtype).eps)


def test_lines_that_do_not_compile_are_shown_and_others_are_taken_after_it(product, gpu):
    a = S.sparse_tensor(sp.eye_array(4).tocsr(), device=gpu)
    b = gpu.array(np.arange(8.0).reshape(4, 2))
    wrong = S.Semiring(S.SparseOperator("return a * q;", np.multiply), NAMED_SEMIRINGS["plus_times"].add, 0.0)
    with pytest.raises(BadRequest, match="of which line 1, `return a \\* q;`, does not compile"):
        product(a, b, wrong)
    np.testing.assert_array_equal(product(a, b).numpy(), b.numpy())


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.usefixtures("gpu", "product")
def test_a_supervisor_runs_them(isolation, rng):
    matrix = sp.random_array((40, 30), density=0.2, rng=rng, format="csr")
    b = rng.standard_normal((30, 4))
    own = S.Semiring(S.SparseOperator("return a * b;", lambda x, y: x * y), NAMED_SEMIRINGS["plus_times"].add, 0.0)
    with dp.Supervisor("cuda:0", streams=2, isolation=isolation) as sup:
        a, right = S.sparse_tensor(matrix, device=sup.device), sup.device.array(b)
        for _ in range(3):
            for semiring in ("plus_times", own):
                found = sup.submit(dp.SpmmOpRequest(*a, right, semiring)).result()
                np.testing.assert_allclose(found.numpy(), matrix @ b, rtol=1e-12, atol=1e-12)


def test_rotations_in_changing_memory(gpu, rng):
    y, places = rng.standard_normal(1000), rng.permutation(1000)[:400]
    for dtype in ("f4", "f8", "c8", "c16"):
        for turn in range(120):
            c, s = np.cos(turn), np.sin(turn)
            dense, values = y.astype(dtype), y[:400].astype(dtype)
            found = dp.sparse_rot(gpu.array(values), gpu.array(places.astype("i4")), gpu.array(dense), c, s)
            expected = dense.copy()
            expected[places] = c * dense[places] - s * values
            close = {"rtol": 0, "atol": 20 * np.finfo(dtype).eps}
            np.testing.assert_allclose(found[0].numpy(), c * values + s * dense[places], **close)
            np.testing.assert_allclose(found[1].numpy(), expected, **close)
