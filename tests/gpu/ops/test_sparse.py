"""Sparse linear algebra on the GPU: every row through its cases, large matrices, analyses, and torch's tensors."""

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import HOST
from dispatch.ops import FAMILIES
from dispatch.ops.sparse.cases import cases
from dispatch.row_check import check_row

sp = pytest.importorskip("scipy.sparse")

S = dp.sparse
ROWS = [row for op in FAMILIES["sparse"][1] for row in dp.TABLE.of(op) if row.min_arch != HOST]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_passes_its_cases_or_refuses_them_with_its_reasons(row, gpu, rng, skip_without):
    if not row.on(gpu.arch):
        pytest.skip(f"needs {row.min_arch} or newer, this GPU is {gpu.arch}")
    skip_without(row)
    failed = []
    for case in cases(row):
        try:
            check_row(row, case, gpu, rng)
        except Exception as error:  # noqa: BLE001, PERF203  # whatever it is, the other cases are tried
            failed.append(f"{case.id}: {type(error).__name__}: {error}")
    assert not failed, "\n".join([f"{len(failed)} of {len(cases(row))} cases fail", *failed])


def poisson(n, dtype="f8"):
    """Poisson's equation on a cube of n points a side."""
    line = sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n))
    one = sp.eye_array(n)
    terms = (sp.kron(sp.kron(line, one), one), sp.kron(sp.kron(one, line), one), sp.kron(sp.kron(one, one), line))
    return sum(terms).tocsr().astype(dtype)


def close(got, expected, dtype="f8"):
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape
    assert np.linalg.norm(got - expected) <= 100 * np.finfo(dtype).eps * np.linalg.norm(expected)


@pytest.mark.parametrize("kind", ["csr", "csc", "coo"])
@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
def test_a_million_points_by_every_algorithm(kind, dtype, gpu, rng):
    matrix = poisson(100, dtype)
    a = S.sparse_tensor(getattr(matrix, f"to{kind}")(), device=gpu, validate=True)
    x = rng.standard_normal((matrix.shape[1], 4)).astype(dtype)
    first = {"csr": "CSR", "csc": "CSR", "coo": "COO"}[kind]
    for algorithm in dp.SpmvAlgorithm:
        if algorithm.name.startswith(("DEFAULT", first)):
            for trans in "ntc":
                op = {"n": matrix, "t": matrix.T, "c": matrix.conj().T}[trans]
                close(
                    S.spmv(a, gpu.array(x[:, 0].copy()), trans=trans, algorithm=algorithm).numpy(), op @ x[:, 0], dtype
                )
    for algorithm in dp.SpmmAlgorithm:
        if algorithm.name.startswith(("DEFAULT", first)):
            for b in (gpu.array(x), gpu.array(x.T.copy()).T):
                try:
                    close(S.spmm(a, b, algorithm=algorithm).numpy(), matrix @ x, dtype)
                except NoRow:  # noqa: PERF203  # a CSC is the transpose of a CSR, which CSR_ALG3 does not take
                    assert (kind, algorithm.name) == ("csc", "CSR_ALG3")


def test_repeated_calls_over_other_patterns_of_the_same_layouts(gpu, rng):
    """What is remembered, recorded and relocated is compared with each pattern's own product."""
    patterns = []
    for _ in range(4):
        places = np.argsort(rng.random((300, 400)), axis=1)[:, :7]
        rows, columns = np.arange(0, 2101, 7), np.sort(places, axis=1).ravel()
        patterns.append(sp.csr_array((rng.standard_normal(2100), columns.astype("i4"), rows.astype("i4")), (300, 400)))
    x = rng.standard_normal((400, 3))
    on_gpu = [(S.sparse_tensor(one, device=gpu), gpu.array(x[:, 0] * k)) for k, one in enumerate(patterns)]
    b = gpu.array(x)
    for turn in range(120):
        k = turn % 4
        close(S.spmv(*on_gpu[k], alpha=1 + turn).numpy(), (1 + turn) * (patterns[k] @ (x[:, 0] * k)))
        close(S.spmm(on_gpu[k][0], b, alpha=1 + turn).numpy(), (1 + turn) * (patterns[k] @ x))


@pytest.mark.parametrize("algorithm", ["default", "csr_alg1", "csr_alg2", "csr_alg3"])
def test_another_pattern_in_the_same_memory(algorithm, gpu, rng):
    """The library looks at the pattern in each call: nothing of an earlier one is in workspace or in a descriptor."""
    x = rng.standard_normal((400, 3))
    b, first = gpu.array(x), gpu.array(np.ascontiguousarray(x[:, 0]))
    a = None
    for _ in range(6):
        matrix = sp.random_array((300, 400), density=0.05, rng=rng, format="csr")
        if a is None:
            a = S.sparse_tensor(matrix, device=gpu)
        else:
            a.rows.copy_from(matrix.indptr.astype(a.rows.dtype.numpy))
            a.columns.copy_from(matrix.indices.astype(a.columns.dtype.numpy))
            a.values.copy_from(matrix.data)
        close(S.spmm(a, b, algorithm=algorithm).numpy(), matrix @ x)
        if algorithm != "csr_alg3":
            close(S.spmv(a, first, algorithm=algorithm).numpy(), matrix @ x[:, 0])


def test_factors_of_0_and_others_by_turns(gpu, rng):
    """Workspace is as large for any factor, though a plan is made with one of 0 first."""
    matrix = sp.random_array((300, 400), density=0.05, rng=rng, format="csr")
    a, x = S.sparse_tensor(matrix, device=gpu), rng.standard_normal((400, 3))
    b = gpu.array(x)
    for alpha in (0.0, 2.0, 0.0, -1.0):
        close(S.spmm(a, b, alpha=alpha).numpy(), alpha * (matrix @ x))


def test_slices_are_parts_of_sparse_vectors_and_of_coo(gpu, rng):
    """Parts at any element: none is refused, and none is read as if it were at a multiple of 16 bytes."""
    y, count = rng.standard_normal(1000), 501
    dense = gpu.array(y)
    for dtype in ("i32", "i64"):
        for offset in (0, 1, 2, 3):
            places = rng.permutation(1000)[:count]
            indices = gpu.zeros((count + offset,), dtype)[offset:]
            values = gpu.zeros((count + offset,), "f32")[offset:]
            indices.copy_from(places.astype(indices.dtype.numpy))
            values.copy_from(y[places].astype("f4"))
            narrow = dense.astype("f32")
            np.testing.assert_array_equal(dp.sparse_gather(narrow, indices).numpy(), y.astype("f4")[places])
            found = dp.sparse_scatter(values, indices, gpu.zeros((1000,), "f32")).numpy()
            np.testing.assert_array_equal(found[places], y[places].astype("f4"))
            total = dp.spvv(values, indices, narrow).numpy()[0]
            assert abs(total - (y[places] ** 2).sum()) < 1e-3
            a = S.coo(values, gpu.array(np.sort(places).astype(indices.dtype.numpy)), indices, (1000, 1000))
            unpacked = S.todense(a).numpy()
            np.testing.assert_array_equal(unpacked[np.sort(places), places], y[places].astype("f4"))


@pytest.mark.parametrize("fixed", [False, True])
def test_triangles_whose_values_and_patterns_change(fixed, gpu, rng):
    a = sp.tril(poisson(20)).tocsr()
    on_gpu = S.sparse_tensor(a, device=gpu)
    on_gpu = on_gpu.fixed() if fixed else on_gpu
    b = rng.standard_normal((a.shape[0], 3))
    from scipy.sparse.linalg import spsolve_triangular

    call = dp.prepare(dp.SpsvRequest(*on_gpu, gpu.array(b[:, 0].copy())))
    for factor in (1.0, 2.0, 0.5):
        on_gpu.values.copy_from(factor * a.data)
        expected = spsolve_triangular(factor * a, b)
        close(call().numpy(), expected[:, 0])
        close(S.spsolve_triangular(on_gpu, gpu.array(b[:, 0].copy())).numpy(), expected[:, 0])
        close(S.spsolve_triangular(on_gpu, gpu.array(b)).numpy(), expected)
    if not fixed:  # the same memory has another pattern: row 7 reads column 5 in place of 6
        other = a.copy()
        at = other.indptr[8] - 2
        other.indices[at] = 5
        on_gpu.columns.copy_from(other.indices)
        on_gpu.values.copy_from(a.data)
        close(call().numpy(), spsolve_triangular(other, b[:, 0]))


WHOLE = [one for one in dp.SpgemmAlgorithm if not one.name.startswith("CSR_ALG")]


@pytest.mark.parametrize("algorithm", WHOLE)
def test_products_of_sparse_matrices(algorithm, gpu):
    matrix = poisson(30)
    a = S.sparse_tensor(matrix, device=gpu)
    product = S.spgemm(a, a, algorithm=algorithm)
    expected = (matrix @ matrix).tocsr()
    assert product.nnz == expected.nnz
    assert abs(S.to_scipy(product) - expected).max() < 1e-12
    with pytest.raises(BadRequest, match="the number that spgemm_nnz counts"):
        S.spgemm(a, a, nnz=expected.nnz + 1, algorithm=algorithm)


def product_of(parts, shape):
    """A product in SciPy's CSR, its columns sorted."""
    values, rows, columns = parts
    found = sp.csr_array((values.numpy(), columns.numpy(), rows.numpy()), shape)
    found.sort_indices()
    return found


@pytest.mark.parametrize("algorithm", ["default", "csr_alg_determinitic", "csr_alg_nondeterminitic"])
@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
def test_products_of_fixed_patterns_follow_values_and_memory(algorithm, dtype, gpu, rng):
    """The analysis is kept; values, results and, later, indices lie elsewhere in each call."""
    matrix = poisson(20, dtype)
    a = S.sparse_tensor(matrix, device=gpu).fixed()
    exact = (matrix @ matrix).tocsr()
    exact.sort_indices()
    bits = set()
    for turn in range(12):
        drawn = [rng.standard_normal(matrix.nnz).astype(dtype) for _ in range(2)]
        left, right = (sp.csr_array((one, matrix.indices, matrix.indptr), matrix.shape) for one in drawn)
        parts = [a.with_values(gpu.array(one)) for one in drawn]
        if turn == 6:  # the same pattern in other memory
            other = S.csr(parts[0].values, gpu.array(matrix.indptr), gpu.array(matrix.indices), matrix.shape)
            parts[0] = S.SparseTensor(other.values, other.rows, other.columns, a.form)
        found = dp.spgemm(*parts[0], *parts[1], nnz=exact.nnz, alpha=2, algorithm=algorithm)
        expected = 2 * (left @ right)
        close(product_of(found, matrix.shape)[:300].toarray(), expected[:300].toarray(), dtype)
        again = dp.spgemm(*parts[0], *parts[1], nnz=exact.nnz, alpha=2, algorithm=algorithm)
        bits.add(again[0].numpy().tobytes() == found[0].numpy().tobytes())
    assert bits == {True} or algorithm != "csr_alg_determinitic"
    for one in (a, S.sparse_tensor(matrix, device=gpu)):
        tuned = dp.spgemm(*one, *one, nnz=exact.nnz, autotune=True)
        close(product_of(tuned, matrix.shape)[:300].toarray(), exact[:300].toarray(), dtype)
    with pytest.raises(BadRequest, match=f"nnz: got {exact.nnz + 1}; expected {exact.nnz}"):
        dp.spgemm(*a.fixed(), *a, nnz=exact.nnz + 1)


def test_what_a_count_leaves_is_the_product_of_its_operands(gpu):
    """`a @ b` multiplies once; another count in between, or other values, do not mix."""
    one, other = poisson(20), (poisson(20) * 3 + sp.eye_array(8000)).tocsr()
    a, b = (S.sparse_tensor(matrix, device=gpu) for matrix in (one, other))
    for _ in range(5):
        for left, right, expected in ((a, b, one @ other), (b, a, other @ one), (a, a, one @ one)):
            found = left @ right
            close(S.to_scipy(found)[:200].toarray(), expected[:200].toarray())
    stamped = dp.spgemm_nnz(*a, *b, stamp=7)
    nnz = int(stamped.item())
    dp.spgemm_nnz(*b, *a, stamp=8)
    found = dp.spgemm(*a, *b, nnz=nnz, stamp=7)  # what was left is another's: it is made anew
    close(product_of(found, one.shape)[:200].toarray(), (one @ other)[:200].toarray())


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("fixed", [False, True])
def test_incomplete_factors_of_a_large_matrix_and_of_other_values(dtype, fixed, gpu, rng):
    matrix = poisson(24, dtype)
    n = matrix.shape[0]
    a = S.sparse_tensor(matrix, device=gpu)
    a = a.fixed() if fixed else a
    b = rng.standard_normal(n).astype(dtype)
    for make in (S.ilu0, S.ic0):
        factors = make(a)
        for factor in (1, 4):
            if factor != 1:
                factors.refactorize(gpu.array(matrix.data * factor))
            dense = S.to_scipy(factors.matrix)
            low = sp.tril(dense, -1) + sp.eye_array(n) if make is S.ilu0 else sp.tril(dense)
            high = sp.triu(dense) if make is S.ilu0 else sp.tril(dense).conj().T
            product = (low.tocsr() @ high.tocsr()).multiply(matrix != 0)
            close(product.tocsr()[::97].toarray(), (factor * matrix)[::97].toarray(), dtype)
            x = factors.solve(gpu.array(b)).numpy()
            close(low @ (high @ x), b, dtype)
            wide = factors.solve(gpu.array(np.stack([b, 2 * b], axis=1))).numpy()
            close(wide[:, 1], 2 * x, dtype)


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_batch_of_products_by_every_algorithm(dtype, shared, gpu, rng):
    count, m, n, k = 5, 3000, 2000, 16
    columns = np.sort(np.argsort(rng.random((count, m, n), np.float32)[:, :, :64], axis=2)[:, :, :9], axis=2)
    columns, rows = columns.reshape(count, -1).astype("i4"), np.arange(0, 9 * m + 1, 9, dtype="i4")
    values = rng.standard_normal(columns.shape).astype(dtype)
    parts = (values[0], rows, columns[0]) if shared else (values, rows, columns)
    matrices = [
        sp.csr_array((values[0 if shared else i], columns[0 if shared else i], rows), (m, n)) for i in range(count)
    ]
    b = rng.standard_normal((count, n, k)).astype(dtype)
    expected = np.stack([one @ right for one, right in zip(matrices, b, strict=True)])
    taken = []
    for algorithm in dp.SpmmAlgorithm:
        if not algorithm.name.startswith(("DEFAULT", "CSR")):
            continue
        for right in (gpu.array(b), gpu.array(np.ascontiguousarray(b.swapaxes(1, 2))).mT):
            try:
                got = dp.spmm_batched(*map(gpu.array, parts), dp.SparseForm("csr", (m, n)), right, algorithm=algorithm)
            except NoRow:
                continue
            close(got.numpy(), expected, dtype)
            taken.append(algorithm)
    assert dp.SpmmAlgorithm.DEFAULT in taken


def test_a_pivot_of_0_is_told_by_its_row(gpu):
    for make in (S.ilu0, S.ic0):
        for dense, row in (([[4.0, 2, 0], [2, 1, 0], [0, 0, 3]], 1), ([[2.0, 1, 0], [1, 2, 1], [0, 1, 0]], 2)):
            matrix = S.sparse_tensor(sp.csr_array(np.array(dense)), device=gpu)
            with pytest.raises(dp.errors.LinAlgError, match=f"the pivot of row {row} is (0|not above 0)"):
                make(matrix)
            assert np.isnan(make(matrix, check=False).matrix.values.numpy()).all()


def test_indices_are_looked_at_on_the_device(gpu, rng):
    matrix = sp.random_array((3000, 4000), density=0.01, rng=rng, format="csr")
    S.sparse_tensor(matrix, device=gpu, validate=True)
    matrix.indices[777] = 4000
    with pytest.raises(BadRequest, match="1 indices beyond the matrix"):
        S.sparse_tensor(matrix, device=gpu, validate=True)
    matrix.indices[777] = matrix.indices[778]
    with pytest.raises(BadRequest, match="duplicates"):
        S.sparse_tensor(matrix, device=gpu, validate=True)
    parts = (gpu.array(rng.integers(-(2**62), 2**62, size)) for size in (5, 9))
    with pytest.raises(BadRequest, match="9 indices beyond the matrix"):
        S.csr(gpu.array(np.ones(9)), *parts, (4, 4), validate=True)


def test_every_format_from_every_other_and_from_a_dense_matrix(gpu, rng):
    matrix = sp.random_array((300, 400), density=0.05, rng=rng, format="csr")
    dense = gpu.array(matrix.toarray())
    for first in ("csr", "csc", "coo"):
        a = S.fromdense(dense, format=first).validate()
        assert a.nnz == matrix.nnz
        for second in ("csr", "csc", "coo"):
            found = getattr(S, f"to{second}")(a).validate()
            np.testing.assert_array_equal(found.todense().numpy(), matrix.toarray())
    with pytest.raises(BadRequest, match="the number that dense_nnz counts"):
        S.fromdense(dense, nnz=matrix.nnz - 1)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.usefixtures("gpu")
def test_torch_s_sparse_tensors_are_operands_as_they_are(rng):
    torch = pytest.importorskip("torch")
    dense = torch.from_numpy(rng.standard_normal((64, 48)) * (rng.random((64, 48)) < 0.2)).cuda()
    b = torch.from_numpy(rng.standard_normal((48, 5))).cuda()
    for theirs in (dense.to_sparse_csr(), dense.to_sparse_csc(), dense.to_sparse_coo().coalesce()):
        a = S.sparse_tensor(theirs, validate=True)
        assert a.values.ptr == theirs.values().data_ptr()
        product = a @ b
        assert isinstance(product, torch.Tensor)
        torch.testing.assert_close(product, dense @ b)


@pytest.mark.usefixtures("gpu")
def test_cupy_s_sparse_matrices_are_operands_as_they_are(rng):
    cupy = pytest.importorskip("cupy")
    from cupyx.scipy import sparse

    theirs = sparse.csr_matrix(sp.random_array((64, 48), density=0.2, rng=rng, format="csr"))
    b = cupy.asarray(rng.standard_normal((48, 5)))
    a = S.sparse_tensor(theirs, validate=True)
    assert a.values.ptr == theirs.data.data.ptr
    cupy.testing.assert_allclose(a @ b, theirs @ b)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_supervisor_runs_them(isolation, rng):
    matrix = poisson(12)
    x = rng.standard_normal(matrix.shape[0])
    with dp.Supervisor("cuda:0", streams=2, isolation=isolation) as sup:
        a = S.sparse_tensor(matrix, device=sup.device)
        futures = [sup.submit(dp.SparseMvRequest(*a, sup.device.array(k * x))) for k in range(70)]
        for k, future in enumerate(futures):
            close(future.result(60).numpy(), k * (matrix @ x))
