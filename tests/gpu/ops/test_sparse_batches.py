"""Batches of sparse products on the GPU at sizes of use; their rows' cases run among those of all sparse matrices."""

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import NoRow

sp = pytest.importorskip("scipy.sparse")

S = dp.sparse
RELATIVE = {"f16": 2e-3, "bf16": 1.6e-2, "f32": 2e-5, "f64": 1e-13, "c64": 4e-5, "c128": 2e-13}


def close(found, expected, dtype):
    found = np.asarray(found)
    assert found.shape == expected.shape
    wide = found.astype("c16" if dtype[0] == "c" else "f8")
    assert np.abs(wide - expected).max() <= RELATIVE[dtype] * np.abs(expected).max()


def normal(rng, dtype, *shape):
    drawn = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype[0] == "c" else 0)
    return drawn.astype(dp.keys.Dtype.of(dtype).numpy)


def exact(array):
    return np.asarray(array).astype("c16" if np.asarray(array).dtype.kind == "c" else "f8")


# -- products with a batch of dense matrices --------------------------------------------------------------------------
def patterns(rng, kind, count, m, n, each):
    """Indices of as many matrices, of 9 elements a row on average; their rows are as long only where `each` is not."""
    lengths = np.full(m, 9)
    lengths[::3], lengths[1::3] = 2, 16
    lines = np.array([rng.permutation(lengths) for _ in range(count)]) if each else np.tile(lengths, (count, 1))
    row = np.array([np.repeat(np.arange(m), own) for own in lines])
    column = np.array([np.concatenate([np.sort(rng.choice(n, k, replace=False)) for k in own]) for own in lines])
    ends = np.concatenate([np.zeros((count, 1), int), np.cumsum(lines, axis=1)], axis=1)
    return row, column, row if kind == "coo" else ends


@pytest.mark.parametrize("index", ["i4", "i8"])
@pytest.mark.parametrize("shared", ["nothing", "pattern", "all"])
@pytest.mark.parametrize("kind", ["csr", "coo"])
@pytest.mark.parametrize("dtype", ["f32", "f64", "c64", "c128"])
def test_a_batch_by_every_algorithm(dtype, kind, shared, index, gpu, rng):
    """Each matrix has rows of its own lengths: of such a batch in CSR cuSPARSE 12.6 takes the first one's for all."""
    count, m, n, k = 5, 600, 500, 24
    row, column, rows = patterns(rng, kind, count, m, n, each=True)
    if shared != "nothing":
        row, column, rows = (np.tile(part[:1], (count, 1)) for part in (row, column, rows))
    values = normal(rng, dtype, *column.shape)
    if shared == "all":
        values = np.tile(values[:1], (count, 1))
    of = {"nothing": (0, 0), "pattern": (0, 1), "all": (1, 1)}[shared]
    parts = [values[0] if of[0] else values, *((part[0] if of[1] else part).astype(index) for part in (rows, column))]
    b = normal(rng, dtype, count, n, k)
    triples = zip(values, row, column, b, strict=True)
    expected = np.stack([sp.coo_array((exact(v), (i, j)), (m, n)).tocsr() @ exact(one) for v, i, j, one in triples])
    a, form, taken = [gpu.array(part) for part in parts], dp.SparseForm(kind, (m, n)), []
    for algorithm in dp.SpmmAlgorithm:
        if not algorithm.name.startswith(("DEFAULT", kind.upper())):
            continue
        for right in (gpu.array(b), gpu.array(np.ascontiguousarray(b.swapaxes(1, 2))).mT):
            try:
                call = dp.prepare(dp.BatchedSpmmRequest(*a, form, right, algorithm=algorithm))
            except NoRow:
                continue
            for _ in range(3):  # the second is recorded, the third a replay
                close(call().numpy(), expected, dtype)
            taken.append(algorithm.name)
    assert set(taken) >= {"DEFAULT", *(("COO_ALG1", "COO_ALG2", "COO_ALG4") if kind == "coo" else ("CSR_ALG2",))}


@pytest.mark.parametrize("all_one", [False, True])
@pytest.mark.parametrize(("kind", "algorithm"), [("csr", "csr_alg2"), ("coo", "default"), ("csr", "default")])
def test_one_b_for_all_matrices(kind, algorithm, all_one, gpu, rng):
    count, m, n, k = 5, 600, 500, 24
    row, column, rows = patterns(rng, kind, 1, m, n, each=False)
    values, b = rng.standard_normal((count, column.shape[1])), rng.standard_normal((n, k))
    expected = np.stack([sp.coo_array((one, (row[0], column[0])), (m, n)).tocsr() @ b for one in values])
    expected = np.tile(expected[:1], (count, 1, 1)) if all_one else expected
    parts = [
        gpu.array(part) for part in (values[0] if all_one else values, rows[0].astype("i4"), column[0].astype("i4"))
    ]
    right = gpu.array(b).strided((count, n, k), (0, k, 1))
    call = dp.prepare(dp.BatchedSpmmRequest(*parts, dp.SparseForm(kind, (m, n)), right, algorithm=algorithm))
    for _ in range(3):
        close(call().numpy(), expected, "f64")


@pytest.mark.parametrize("kind", ["csr", "coo"])
def test_repeated_calls_over_other_batches(kind, gpu, rng):
    """What is remembered, recorded and relocated is compared with each batch's own product."""
    count, m, n, k = 3, 200, 150, 5
    held = []
    for _ in range(4):
        row, column, rows = patterns(rng, kind, count, m, n, each=kind == "coo")
        values, b = rng.standard_normal(column.shape), rng.standard_normal((count, n, k))
        rows = rows if kind == "coo" else rows[0]
        triples = zip(values, row, column, b, strict=True)
        expected = np.stack([sp.coo_array((v, (i, j)), (m, n)).tocsr() @ one for v, i, j, one in triples])
        held.append(([gpu.array(part) for part in (values, rows, column)], gpu.array(b), expected))
    form = dp.SparseForm(kind, (m, n))
    for turn in range(200):
        a, b, expected = held[turn % 4]
        close(dp.spmm_batched(*a, form, b, alpha=1.0 + turn).numpy(), (1 + turn) * expected, "f64")


# -- dense products at the places of a batch --------------------------------------------------------------------------
def places(rng, batch, m, n, nnz):
    """Rows and columns of so many places of each, row by row."""
    drawn = np.array([np.sort(rng.choice(m * n, nnz, replace=False)) for _ in range(batch)])
    return drawn // n, drawn % n


def stored_as(kind, row, column, shape):
    """Rows and columns of a batch as a format has them, and the order of its elements."""
    m, n = shape
    order = np.lexsort((row, column), axis=1) if kind == "csc" else np.tile(np.arange(row.shape[1]), (len(row), 1))
    row, column = (np.take_along_axis(part, order, 1) for part in (row, column))

    def ends(part, extent):
        counts = np.array([np.bincount(own, minlength=extent) for own in part])
        return np.concatenate([np.zeros((len(part), 1), int), np.cumsum(counts, axis=1)], axis=1)

    rows, columns = {
        "csr": lambda: (ends(row, m), column),
        "csc": lambda: (row, ends(column, n)),
        "coo": lambda: (row, column),
    }[kind]()
    return rows.astype("i4"), columns.astype("i4"), row, column


@pytest.mark.parametrize("terms", [64, 33])
@pytest.mark.parametrize("kind", ["csr", "csc", "coo"])
@pytest.mark.parametrize("dtype", list(RELATIVE))
def test_dense_products_at_the_places_of_each(dtype, kind, terms, gpu, rng):
    batch, m, n, nnz = 24, 200, 300, 2011  # no multiple of a block of threads
    rows, columns, row, column = stored_as(kind, *places(rng, batch, m, n, nnz), (m, n))
    a, b = normal(rng, dtype, batch, m, terms), normal(rng, dtype, batch, terms, n)
    before = normal(rng, dtype, batch, nnz)
    left = np.take_along_axis(exact(a), row[:, :, None], 1)
    right = np.take_along_axis(exact(b).swapaxes(1, 2), column[:, :, None], 1)
    product = np.einsum("bik,bik->bi", left, right)
    form, given = dp.SparseForm(kind, (m, n)), [gpu.array(part) for part in (before, rows, columns)]
    by_columns = gpu.array(np.ascontiguousarray(b.swapaxes(1, 2))).mT
    bits = set()
    for right_side in (by_columns, gpu.array(b)):  # the second is copied, so that terms lie side by side
        call = dp.prepare(dp.BatchedSddmmRequest(*given, form, gpu.array(a), right_side, alpha=0.5, beta=-2.0))
        for _ in range(3):
            found = call()
            close(found.numpy(), 0.5 * product - 2 * exact(before), dtype)
            bits.add((right_side is by_columns, found.numpy().tobytes()))
    assert len(bits) == 2, "the same bits in each run"


@pytest.mark.parametrize("of", ["a", "b", "pattern", "elements"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "c64"])
def test_what_is_for_all_is_read_for_each(of, dtype, gpu, rng):
    batch, m, n, nnz, terms = 100, 40, 50, 77, 16
    row, column = places(rng, 1 if of in ("pattern", "elements") else batch, m, n, nnz)
    a, b = normal(rng, dtype, batch, m, terms), normal(rng, dtype, batch, terms, n)
    before = normal(rng, dtype, *((nnz,) if of == "elements" else (batch, nnz)))
    a, b = a[0] if of == "a" else a, b[0] if of == "b" else b
    indices = (part[0] if len(part) == 1 else part for part in (row, column))
    parts = [gpu.array(before), *(gpu.array(part.astype("i8")) for part in indices)]
    dense = np.broadcast_to(exact(a) @ exact(b), (batch, m, n))
    own = (np.broadcast_to(part, (batch, nnz)) for part in (row, column))
    expected = dense[(np.arange(batch)[:, None], *own)] + exact(before)
    found = dp.sddmm_batched(*parts, dp.SparseForm("coo", (m, n)), gpu.array(a), gpu.array(b), beta=1.0)
    close(found.numpy(), expected, dtype)
    for number in (0, batch // 2, batch - 1):  # as a call for each gives it, to the last bit
        values, rows, columns = (part[number] if part.ndim > 1 else part for part in parts)
        sides = (gpu.array(one[number] if one.ndim > 2 else one) for one in (a, b))
        one = dp.sddmm(values, rows, columns, dp.SparseForm("coo", (m, n)), *sides, beta=1.0, library="own")
        np.testing.assert_array_equal(found[number].numpy(), one.numpy())


def test_scores_at_the_places_of_a_mask_multiply_a_batch(gpu, rng):
    """Sparse attention without its softmax, repeated over other memory: recorded and relocated calls, too."""
    batch, length, width = 8, 256, 32
    mask = sp.random_array((length, length), density=0.1, rng=rng, format="csr")
    c = S.sparse_tensor(mask, device=gpu)
    for turn in range(150):
        q, k, v = (rng.standard_normal((batch, length, width)).astype("f4") for _ in range(3))
        scores = S.sddmm(c.with_values(c.values.astype("f32")), gpu.array(q), gpu.array(k).mT, alpha=1.0 + turn)
        found = dp.spmm_batched(scores, c.rows, c.columns, c.form, gpu.array(v))
        if turn % 10 == 0:
            exact_scores = (1.0 + turn) * (q.astype("f8") @ k.swapaxes(1, 2)) * (mask.toarray() != 0)
            close(found.numpy(), exact_scores @ v, "f32")
