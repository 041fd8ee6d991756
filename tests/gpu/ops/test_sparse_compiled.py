"""Products with operators of the caller's on the GPU: paths in a graph, large matrices, lines that do not compile.

The cases of their rows, and those of rotations, are in test_sparse.py.
"""

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest
from dispatch.ops.sparse.semirings import READY

sp = pytest.importorskip("scipy.sparse")
S = dp.sparse


@pytest.fixture
def product(skip_without):
    """The function, where the libraries that it needs are there."""
    row = next(row for row in dp.TABLE.of("spmm_op") if row.library == "cusparse")
    skip_without(row)
    return S.spmm_op


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


@pytest.mark.parametrize("name", READY)
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
    for name in READY:
        host = S.spmm_op(S.sparse_tensor(matrix, device=dp.device("host")), dp.device("host").array(b), name)
        found = product(S.sparse_tensor(matrix, device=gpu), gpu.array(b), name)
        np.testing.assert_allclose(found.numpy(), host.numpy(), rtol=1e-12)


def test_lines_that_do_not_compile_are_shown_and_others_are_taken_after_it(product, gpu):
    a = S.sparse_tensor(sp.eye_array(4).tocsr(), device=gpu)
    b = gpu.array(np.arange(8.0).reshape(4, 2))
    wrong = S.Semiring(S.SparseOperator("return a * q;", np.multiply), READY["plus_times"].add, 0.0)
    with pytest.raises(BadRequest, match="of which line 1, `return a \\* q;`, does not compile"):
        product(a, b, wrong)
    np.testing.assert_array_equal(product(a, b).numpy(), b.numpy())


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.usefixtures("gpu", "product")
def test_a_supervisor_runs_them(isolation, rng):
    matrix = sp.random_array((40, 30), density=0.2, rng=rng, format="csr")
    b = rng.standard_normal((30, 4))
    own = S.Semiring(S.SparseOperator("return a * b;", lambda x, y: x * y), READY["plus_times"].add, 0.0)
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
