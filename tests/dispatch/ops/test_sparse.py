"""Sparse linear algebra on the host: every row's cases, SparseTensors of other libraries, and what is refused, how."""

# ruff: noqa: E501 - tables of errors

import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, BadType, NoRow
from dispatch.keys import HOST, Arch
from dispatch.libraries.cusparse import descriptors
from dispatch.ops import FAMILIES
from dispatch.ops.sparse.cases import cases
from dispatch.row_check import check_row
from dispatch.supervise.request_json import Writer
from dispatch.table.select import select

sp = pytest.importorskip("scipy.sparse")

ROWS = [row for row in dp.TABLE if row.op in FAMILIES["sparse"][1] and row.on(HOST)]
DEV = dp.device("host")
S = dp.sparse


@pytest.mark.parametrize(
    "every", [pytest.param(5, id="sample"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_of_the_host_passes_its_cases(row, every, rng):
    taken = [not check_row(row, case, DEV, rng) for case in cases(row)[ROWS.index(row) % min(every, 3) :: every]]
    assert any(taken)


@pytest.fixture
def matrix(rng):
    return sp.random_array((8, 12), density=0.3, rng=rng, format="csr")


# -- matrices of other libraries --------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["csr", "csc", "coo"])
def test_a_matrix_of_scipy_is_taken_in_and_given_back_over_the_same_memory(kind, matrix):
    theirs = getattr(matrix, f"to{kind}")()
    a = S.sparse_tensor(theirs, validate=True)
    assert a.values.ptr == theirs.data.ctypes.data
    first = theirs.row if kind == "coo" else theirs.indptr
    assert (a.columns if kind == "csc" else a.rows).ptr == first.ctypes.data
    assert (a.shape, a.nnz, a.ndim, a.dtype.name) == ((8, 12), theirs.nnz, 2, "f64")
    assert a.density == theirs.nnz / 96
    back = S.to_scipy(a)
    assert back.format == kind
    assert np.shares_memory(back.data, theirs.data)
    np.testing.assert_array_equal(back.toarray(), theirs.toarray())
    np.testing.assert_array_equal(a.todense().numpy(), theirs.toarray())


def test_blocks_of_scipy(matrix):
    theirs = matrix.tobsr(blocksize=(2, 2))
    theirs.sort_indices()
    a = S.sparse_tensor(theirs, validate=True)
    assert a.values.ptr == theirs.data.ctypes.data
    assert repr(a) == f"SparseTensor(BSR f64[8, 12], nnz {theirs.data.size}, {a.index_dtype} indices, blocks 2x2, host)"
    x = np.arange(12.0)
    np.testing.assert_allclose((a @ DEV.array(x)).numpy(), matrix @ x)
    with pytest.raises(NoRow, match="needs square blocks, has 4x2"):
        S.spmv(matrix.tobsr(blocksize=(4, 2)), DEV.array(x))


def test_an_array_that_is_copied_to_a_device_has_memory_of_its_own(matrix):
    a = S.sparse_tensor(matrix, device="host")
    assert a.values.ptr != matrix.data.ctypes.data
    np.testing.assert_array_equal(a.values.numpy(), matrix.data)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", ["csr", "csc", "coo", "bsr"])
def test_a_tensor_of_torch_is_taken_in_and_what_comes_back_is_torch_s(kind, matrix, rng):
    torch = pytest.importorskip("torch")
    dense = torch.from_numpy(matrix.toarray())
    theirs = dense.to_sparse_bsr((2, 3)) if kind == "bsr" else getattr(dense, f"to_sparse_{kind}")()
    theirs = theirs.coalesce() if kind == "coo" else theirs
    a = S.sparse_tensor(theirs, validate=True)
    assert a.values.ptr == theirs.values().data_ptr()
    back = S.to_torch(a)
    assert back.layout == theirs.layout
    assert back.values().data_ptr() == theirs.values().data_ptr()
    np.testing.assert_array_equal(back.to_dense().numpy(), matrix.toarray())
    b = torch.from_numpy(rng.standard_normal((12, 3)))
    if kind != "bsr":
        product = a @ b
        assert isinstance(product, torch.Tensor)
        np.testing.assert_allclose(product.numpy(), matrix @ b.numpy())
        left = torch.from_numpy(rng.standard_normal((3, 8))) @ a
        assert isinstance(left, torch.Tensor)
        assert left.shape == (3, 12)
    with pytest.raises(BadRequest, match="one that is not coalesced"):
        S.sparse_tensor(torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 2), check_invariants=True))


def test_a_matrix_of_cupy_s_attributes_is_taken_in_by_these(matrix):
    theirs = SimpleNamespace(
        format="csr", shape=matrix.shape, nnz=matrix.nnz, data=matrix.data, indices=matrix.indices, indptr=matrix.indptr
    )
    a = S.sparse_tensor(theirs)
    np.testing.assert_array_equal(a.todense().numpy(), matrix.toarray())
    with pytest.raises(BadRequest, match="one in LIL; expected CSR, CSC, COO or BSR"):
        S.sparse_tensor(SimpleNamespace(format="lil", shape=(2, 2), nnz=0))
    with pytest.raises(BadType, match="a ndarray; expected a sparse matrix of SciPy, CuPy or torch"):
        S.sparse_tensor(np.eye(3))


# -- SparseTensor -----------------------------------------------------------------------------------------------------
def test_the_transpose_is_the_other_format_over_the_same_memory(matrix, rng):
    a = S.sparse_tensor(matrix)
    assert (a.T.format.name, a.T.shape, a.T.T.format.name) == ("CSC", (12, 8), "CSR")
    assert (a.T.values.ptr, a.T.columns.ptr, a.T.rows.ptr) == (a.values.ptr, a.rows.ptr, a.columns.ptr)
    np.testing.assert_array_equal(a.T.todense().numpy(), matrix.toarray().T)
    x = rng.standard_normal(8)
    np.testing.assert_allclose((a.T @ DEV.array(x)).numpy(), matrix.T @ x)
    np.testing.assert_allclose((DEV.array(x) @ a).numpy(), x @ matrix)
    np.testing.assert_allclose(x @ a, x @ matrix)
    with pytest.raises(BadRequest, match="CSR or CSC, whose transpose is the other one"):
        _ = S.sparse_tensor(matrix.tocoo()).T


def test_what_a_sparse_tensor_is_not_is_said(matrix):
    a = S.sparse_tensor(matrix)
    with pytest.raises(TypeError, match=r"no array of NumPy's: a.todense\(\) makes a dense tensor"):
        np.asarray(a)
    with pytest.raises(BadRequest, match="a: got a SparseTensor"):
        dp.matmul(a, DEV.array(np.ones((12, 2))))
    empty = S.sparse_tensor(sp.csr_array((3, 4)), validate=True)
    assert (empty.nnz, empty.density) == (0, 0)
    assert not (empty @ DEV.array(np.ones(4))).numpy().any()


def test_changing_values_are_seen_and_a_promise_is_of_the_pattern_alone(matrix):
    a = S.sparse_tensor(matrix.copy()).fixed()
    assert ", fixed, " in repr(a)
    before = a.todense().numpy()
    a.values.copy_from(2 * a.values.numpy())
    np.testing.assert_array_equal(a.todense().numpy(), 2 * before)
    assert a.with_values(DEV.array(np.ones(a.nnz))).form == a.form
    assert a.fixed().form != a.form


def wrong(**parts):
    given = {"values": [1.0, 2, 3], "rows": [0, 1, 3], "columns": [0, 0, 2], "shape": (2, 3), "index": "i4"} | parts
    index = given["index"]
    arrays = (
        DEV.array(np.array(given[name], "f8" if name == "values" else index)) for name in ("values", "rows", "columns")
    )
    return S.csr(*arrays, given["shape"], base=given.get("base", 0), validate=given.get("validate", True))


INVALID = {
    "offsets that fall": ({"rows": [0, 5, 3]}, "1 offsets that are no ends"),
    "offsets of another base": ({"base": 1}, "2 offsets that are no ends, 2 indices beyond the matrix"),
    "too large a column": ({"columns": [0, 0, 3]}, "1 indices beyond the matrix"),
    "a negative column": ({"columns": [-1, 0, 2]}, "1 indices beyond the matrix"),
    "unsorted": ({"columns": [0, 2, 0]}, "1 unsorted elements"),
    "twice": ({"columns": [0, 2, 2]}, "1 duplicates"),
    "too few offsets": ({"rows": [0, 3]}, r"rows: got i32\[2\]; expected i32\[3\] of CSR\[2, 3\]"),
    "too few columns": ({"columns": [0, 1]}, r"columns: got i32\[2\]; expected i32\[3\] of CSR"),
    "a negative extent": ({"shape": (-2, 3)}, "form.shape: got -2"),
    "an overflowing extent": ({"shape": (2, 2**63)}, "form.shape"),
    "a base of 2": ({"base": 2}, "form.base: got 2"),
    "too wide for 31 bits": ({"shape": (2, 2**31)}, "rows: got i32.*expected i64, for indices go beyond 31 bits"),
    "indices of 16 bits": ({"index": "u4"}, "rows: got u32.*expected i32 or i64"),
}


@pytest.mark.parametrize("what", INVALID)
def test_what_no_matrix_is_is_refused_with_what_is_wrong(what):
    parts, said = INVALID[what]
    with pytest.raises(BadRequest, match=said):
        wrong(**parts)


def test_a_matrix_is_sound_however_many_elements_it_has():
    for parts in (
        {},
        {"values": [], "rows": [0, 0, 0], "columns": []},
        {"values": [], "rows": [0], "columns": [], "shape": (0, 3)},
    ):
        assert wrong(**parts).validate()


def test_indices_that_nobody_looked_at_are_looked_at_by_the_host():
    a = wrong(columns=[0, 0, 7], validate=False)
    for run in (lambda: a @ DEV.array(np.ones(3)), a.todense, lambda: S.tocsc(a)):
        with pytest.raises(BadRequest, match="rows: got 0 wrong offsets and 1 indices beyond the matrix"):
            run()


# -- requests ---------------------------------------------------------------------------------------------------------
def refused():
    a, x = wrong(), DEV.array(np.ones(3))
    square = S.sparse_tensor(sp.eye_array(3, format="csr"))
    halves = DEV.array(np.ones(3, np.float32))
    return {
        "a form of something else": (lambda: dp.sparse_mv(a.values, a.rows, a.columns, "csr", x), "form: got 'csr'; expected a SparseForm"),
        "an unknown format": (lambda: dp.sparse_mv(*a.parts[:3], a.form._replace(format="lil"), x), "form.format: got 'lil'; expected one of CSR"),
        "a vector of the other side": (lambda: dp.sparse_mv(*a, x, trans="t"), r"x: got f64\[3\]; expected f64\[2\], as op\(A\) is \[3, 2\]"),
        "a matrix for a vector": (lambda: dp.sparse_mv(*a, DEV.array(np.ones((3, 1)))), r"Hint: x\[:, 0\] is a column"),
        "a vector for a matrix": (lambda: dp.spmm(*a, x), r"b: got f64\[3\]; expected f64\[3, …\]"),
        "another dtype": (lambda: dp.sparse_mv(*a, halves), r"x: got f32\[3\]; expected f64, as values is"),
        "another dtype that is added": (lambda: dp.sparse_mv(*a, x, y=DEV.array(np.ones(2, np.float32))), r"y: got f32\[2\]; expected f64, the dtype of the result"),
        "beta without y": (lambda: dp.sparse_mv(*a, x, beta=2.0), "beta: got 2.0; expected 0 without y"),
        "a complex factor": (lambda: dp.sparse_mv(*a, x, alpha=1j), "alpha: got 1j; expected a real number"),
        "another format's algorithm": (lambda: dp.sparse_mv(*a, x, algorithm="coo_alg1"), "algorithm: got COO_ALG1; expected DEFAULT, or one of CSR"),
        "an unknown algorithm": (lambda: dp.spmm(*a, DEV.array(np.ones((3, 2))), algorithm="fastest"), "algorithm: got 'fastest'"),
        "a triangle that is not square": (lambda: dp.spsv(*a, x), r"form.shape: got \(2, 3\); expected a square matrix"),
        "out among what is read": (lambda: dp.sparse_mv(*square, x, out=x), "out: got memory that overlaps x"),
        "out among the indices": (lambda: dp.sparse_mv(*square, x, out=square.values), "out: got memory that overlaps values"),
        "products of other extents": (lambda: dp.spgemm(*a, *a, nnz=3), "b_form.shape: got .2, 3.; expected 3 rows"),
        "products in CSC": (lambda: dp.spgemm_nnz(*a.T, *a), "form.format: got CSC; expected CSR. Hint: csr2csc makes one"),
        "a wrong number of elements": (lambda: dp.spgemm(*square, *square, nnz=4), "nnz: got 4; expected 3, as spgemm_nnz counts them"),
        "a negative number of elements": (lambda: dp.spgemm(*square, *square, nnz=-1), "nnz: got -1"),
        "two bases": (lambda: dp.spgemm_nnz(*square, *square.parts[:3], square.form._replace(base=1)), "b_form.base: got 1; expected 0"),
        "a pattern for another product": (lambda: dp.sddmm(*a, DEV.array(np.ones((3, 2))), DEV.array(np.ones((2, 3)))), r"a: got f64\[3, 2\]; expected f64\[2, …\], as C is \[2, 3\]"),
        "blocks turned": (lambda: dp.csr2csc(*S.sparse_tensor(sp.eye_array(4).tobsr((2, 2)))), "form.format: got BSR; expected CSR or CSC"),
        "a wrong count of a dense matrix": (lambda: dp.dense_to_sparse(DEV.array(np.eye(3)), nnz=4), "nnz: got 4; expected 3, as dense_nnz counts them"),
        "blocks of a dense matrix": (lambda: dp.dense_to_sparse(DEV.array(np.eye(4)), nnz=4, format="bsr"), "format: got BSR; expected CSR, CSC or COO"),
        "indices of 8 bits": (lambda: dp.dense_to_sparse(DEV.array(np.eye(4)), nnz=4, index_dtype="i8"), "index_dtype: got i8; expected i32 or i64"),
        "diagonals of another length": (lambda: dp.gtsv(x[:2], x, x, x), "dl: got f64.2.; expected f64.3., as d is"),
        "right-hand sides of another length": (lambda: dp.gtsv(x, x, x, x[:2]), "b: got f64.2.; expected f64.3. or .3, …."),
        "pivots of many systems": (lambda: dp.gtsv(*[DEV.zeros((2, 3), "f64")] * 4), "pivoting: got True; expected False for many systems"),
        "an element beside the matrix": (lambda: dp.gtsv(x, x, x, x), r"dl: got an element beside the matrix; expected 0 there"),
        "two unknowns": (lambda: dp.gtsv(x[:2], x[:2], x[:2], x[:2]), "needs at least 3 unknowns, has 2"),
        "indices of another number": (lambda: dp.spvv(x, DEV.array(np.zeros(2, "i4")), x), "indices: got i32.2.; expected .3., as values are"),
        "indices that are none": (lambda: dp.sparse_gather(x, x), "indices: got f64.3.; expected i32 or i64"),
        "indices beyond a vector": (lambda: dp.sparse_gather(x, DEV.array(np.array([0, 3], "i4"))), "indices: got 1 beyond the vector; expected those of 3 elements"),
        "a sparse vector of nothing": (lambda: dp.sparse_axpby(x[:0], DEV.array(np.zeros(0, "i4")), x), "needs a sparse vector with elements, has none"),
        "a dense vector": (lambda: dp.dense_nnz(x), "a: got f64.3.; expected a matrix"),
        "rows that fall": (lambda: dp.coo2csr(DEV.array(np.array([1, 0], "i4")), m=2), "rows: got rows that fall"),
        "rows beyond the matrix": (lambda: dp.coo2csr(DEV.array(np.array([0, 2], "i4")), m=2), "rows: got rows that fall, or are none of the matrix"),
        "offsets that lead elsewhere": (lambda: dp.csr2coo(DEV.array(np.array([0, 2], "i4")), nnz=3), "rows: got offsets that fall, or lead elsewhere; expected those of 3 elements"),
        "no offsets": (lambda: dp.csr2coo(DEV.array(np.array([], "i4")), nnz=0), "rows: got i32.0.; expected offsets"),
        "a result with gaps": (lambda: dp.csr2csc(*square, out_values=DEV.zeros((6,), "f64")[::2]), "needs out_values dense"),
        "indices with gaps": (lambda: dp.sparse_mv(a.values, a.rows, DEV.array(np.zeros(6, "i4"))[::2], a.form, x), "columns: got .*expected dense memory"),
    }  # fmt: skip


@pytest.mark.parametrize("what", refused())
def test_a_request_is_refused_by_the_name_of_what_is_wrong(what):
    call, said = refused()[what]
    with pytest.raises((BadRequest, NoRow), match=said):
        call()


def test_rows_say_what_they_do_not_take(rng):
    a = wrong()
    x = DEV.array(rng.standard_normal(6))[::2]
    with pytest.raises(NoRow, match="needs x dense, has"):
        dp.sparse_mv(*a, x)
    with pytest.raises(NoRow, match="needs b row-major or column-major"):
        dp.spmm(*a, DEV.array(np.ones((6, 6)))[::2, ::2])
    empty = wrong(values=[], rows=[0, 0, 0], columns=[])
    assert not dp.sparse_mv(*empty, DEV.array(np.ones(3))).numpy().any()
    with pytest.raises(NoRow, match="needs a matrix with elements where something is added, has none"):
        dp.sparse_mv(*empty, DEV.array(np.ones(3)), y=DEV.array(np.ones(2)))


@pytest.mark.filterwarnings("ignore:divide")
def test_a_singular_triangle_makes_infinities_as_a_division_by_0_does():
    a = S.csr(
        *(
            DEV.array(np.array(part, kind))
            for part, kind in (([2.0, 1, 0], "f8"), ([0, 1, 3], "i4"), ([0, 0, 1], "i4"))
        ),
        (2, 2),
    )
    assert dp.spsv(*a, DEV.array(np.array([2.0, 5]))).numpy().tolist() == [1.0, np.inf]
    assert dp.spsv(*a, DEV.array(np.array([2.0, 5])), diag="unit").numpy().tolist() == [2.0, 3.0]


def test_without_scipy_a_row_says_so(monkeypatch):
    a = wrong()
    monkeypatch.setitem(sys.modules, "scipy.sparse.linalg", None)
    with pytest.raises(NoRow, match=r"needs scipy: pip install 'cudabind\[host\]'"):
        dp.spmm(*a, DEV.array(np.ones((3, 9))))


def test_a_sparse_operand_is_its_three_tensors_to_all_that_looks_at_requests(matrix, rng):
    """Order, overlap, lifetimes, generations and children go by `tensors`, plans by `key`, relocation by `arguments`."""
    a, b = S.sparse_tensor(matrix, device="host"), DEV.array(rng.standard_normal((12, 2)))
    request = dp.SpmmRequest(*a, b, alpha=2.0)
    assert [(name, written) for name, _, written in request.tensors()] == [
        (n, False) for n in ("values", "rows", "columns", "b")
    ]
    out = DEV.empty((8, 2), "f64")
    assert request.arguments({"out": out}) == (*(t.ptr for t in (a.values, a.rows, a.columns, b)), 0, out.ptr, 2.0, 0.0)
    order = request.named_arguments().order
    assert order == ("values", "rows", "columns", "b", "c", "out", "alpha", "beta")
    other = dp.SpmmRequest(*S.sparse_tensor(matrix, device="host"), b, alpha=3.0)
    assert other.key() == request.key()
    assert dp.SpmmRequest(*a, b, c=out).key() != dp.SpmmRequest(*a, b, c=out, beta=0).key()
    with_other_values = request.replace(values=DEV.array(np.ones(a.nnz)))
    np.testing.assert_allclose(dp.run(with_other_values).numpy(), 2 * (matrix != 0).astype(float) @ b.numpy())
    entry = Writer().request(request)
    assert entry["fields"]["form"]["fields"]["shape"] == {"tuple": [8, 12]}
    assert pickle.loads(pickle.dumps(request.form)) == request.form


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_supervisor_runs_them(isolation, matrix, rng):
    x = rng.standard_normal(12)
    with dp.Supervisor("host", streams=1, isolation=isolation) as sup:
        a = S.sparse_tensor(matrix, device=sup.device)
        futures = [sup.submit(dp.SparseMvRequest(*a, sup.device.array(x * k))) for k in range(3)]
        for k, future in enumerate(futures):
            np.testing.assert_allclose(future.result(60).numpy(), k * (matrix @ x), atol=1e-12)


def test_a_prepared_call_sees_other_values_and_takes_other_operands(matrix, rng):
    a, x = S.sparse_tensor(matrix.copy()), rng.standard_normal(12)
    call = dp.prepare(dp.SparseMvRequest(*a, DEV.array(x)))
    np.testing.assert_allclose(call().numpy(), matrix @ x)
    call.refit(values=3 * matrix.data)
    np.testing.assert_allclose(call().numpy(), 3 * (matrix @ x))
    np.testing.assert_allclose(call(x=DEV.array(2 * x)).numpy(), 6 * (matrix @ x))


def test_the_functions_in_scipy_s_words_give_what_scipy_s_do(matrix, rng):
    from scipy.sparse.linalg import spsolve_triangular

    a = S.sparse_tensor(matrix)
    product = a @ S.sparse_tensor(matrix.T.tocsr())
    np.testing.assert_allclose(S.to_scipy(product).toarray(), (matrix @ matrix.T).toarray())
    again = S.spgemm(a, matrix.T.tocsr(), nnz=product.nnz, alpha=2)
    np.testing.assert_allclose(again.todense().numpy(), 2 * (matrix @ matrix.T).toarray())
    lower = sp.csr_array(sp.tril(sp.random_array((9, 9), density=0.4, rng=rng)) + 3 * sp.eye_array(9))
    for unit in (False, True):
        for b in (rng.standard_normal(9), rng.standard_normal((9, 2))):
            found = S.spsolve_triangular(lower.tocsr(), DEV.array(b), unit_diagonal=unit)
            np.testing.assert_allclose(found.numpy(), spsolve_triangular(lower.tocsr(), b, unit_diagonal=unit))
    u, v = rng.standard_normal((8, 3)), rng.standard_normal((3, 12))
    sampled = S.sddmm(a, DEV.array(u), DEV.array(v))
    np.testing.assert_allclose(S.to_scipy(sampled).toarray(), (u @ v) * (matrix.toarray() != 0))
    for kind in ("csr", "csc"):
        found = getattr(S, f"to{kind}")(getattr(matrix, "tocsc" if kind == "csr" else "tocsr")())
        assert found.format.name == kind.upper()
        np.testing.assert_array_equal(found.todense().numpy(), matrix.toarray())


@pytest.mark.parametrize("first", ["csr", "csc", "coo"])
@pytest.mark.parametrize("second", ["csr", "csc", "coo"])
def test_every_format_from_every_other_and_from_a_dense_matrix(first, second, matrix):
    theirs = getattr(matrix, f"to{first}")()
    parts = (theirs.data, theirs.row, theirs.col) if first == "coo" else (theirs.data, theirs.indptr, theirs.indices)
    values, *indices = (DEV.array(part + (place > 0)) for place, part in enumerate(parts))
    one = getattr(S, first)(values, *(indices[::-1] if first == "csc" else indices), (8, 12), base=1, validate=True)
    found = getattr(S, f"to{second}")(one)
    assert (found.format.name.lower(), found.form.base) == (second, 1)
    found.validate()
    np.testing.assert_array_equal(S.to_scipy(found).toarray(), matrix.toarray())
    for index in ("i32", "i64"):
        again = S.fromdense(DEV.array(matrix.toarray()), format=second, index_dtype=index).validate()
        assert (again.format.name.lower(), again.index_dtype.name, again.nnz) == (second, index, matrix.nnz)
        np.testing.assert_array_equal(again.todense().numpy(), matrix.toarray())


def test_three_diagonals_against_a_dense_system(rng):
    low, diagonal, high = rng.standard_normal((3, 40))
    low[0] = high[-1] = diagonal[7] = 0  # rows must change places
    b = rng.standard_normal((40, 3))
    a = np.diag(diagonal) + np.diag(low[1:], -1) + np.diag(high[:-1], 1)
    x = dp.gtsv(*map(DEV.array, (low, diagonal, high, b)))
    np.testing.assert_allclose(x.numpy(), np.linalg.solve(a, b), rtol=1e-8, atol=1e-8)
    low[1:], high[:-1], diagonal[:] = 0, 0, 0
    assert np.isnan(dp.gtsv(*map(DEV.array, (low, diagonal, high, b))).numpy()).all()


# -- without a GPU ----------------------------------------------------------------------------------------------------
def test_the_first_row_for_a_gpu_is_cusparse_s():
    a = wrong()
    assert select(dp.SparseMvRequest(*a, DEV.array(np.ones(3))), Arch(90)).function == "cusparseSpMV"
    assert select(dp.SparseCheckRequest(*a), Arch(90)).library == "own"


@pytest.mark.parametrize("nnz", [0, 6])
@pytest.mark.parametrize("kind", dp.SparseFormat)
def test_the_library_itself_takes_the_descriptors(kind, nnz):
    """They are the host's memory alone: the library makes them where no GPU is."""
    import ctypes

    from cudabind import _load
    from cudabind.errors import LibraryNotFound
    from cudabind.sys import cusparse

    try:
        _load.version("cusparse")
    except LibraryNotFound as error:
        pytest.skip(str(error))
    block, triangle = ((2, 2), {}) if kind is dp.SparseFormat.BSR else ((1, 1), {"fill": 1, "diag": 0})
    made = descriptors.SparseMatrix(
        descriptors.Sparse(int(kind), (4, 8), nnz, 1, block, 0, 4, 4, 0, 1, 2, **triangle), 256
    )
    for shift in (0, 4096):
        made.point((1024 + shift, 2048 + shift, 3072 + shift))
        numbers = [ctypes.c_int64() for _ in range(3)]
        cusparse.cusparseSpMatGetSize(made.c, *map(ctypes.byref, numbers))
        assert [one.value for one in numbers] == [4, 8, nnz * block[0] * block[1]]
        values, form = ctypes.c_void_p(), ctypes.c_int32()
        cusparse.cusparseSpMatGetValues(made.c, ctypes.byref(values))
        cusparse.cusparseSpMatGetFormat(made.c, ctypes.byref(form))
        assert values.value == 1024 + shift or not nnz
        assert form.value == int(kind)
    for by_rows in (True, False):
        dense = descriptors.DenseMatrix((3, 4), 4, 0, 0, 256, by_rows=by_rows)
        dense.point((4096,))
    vector = descriptors.DenseVector(5, 0, 0, 256)
    vector.point((4096,))
    at = ctypes.c_void_p()
    cusparse.cusparseDnVecGetValues(vector.c, ctypes.byref(at))
    assert at.value == 4096
    few = descriptors.SparseVector((9, 4), 8, 1, 1, (0, 1), 256)
    for addresses in ((512, 1024), (512, 2048), (4096, 2048)):
        few.point(addresses)
        cusparse.cusparseSpVecGetValues(few.c, ctypes.byref(at))
        assert at.value == addresses[1]
    nothing = descriptors.SparseMatrix(
        descriptors.Sparse(int(kind), (4, 8), 0, 0, block, 0, 4, 4, 0, 1, 2), descriptors.NOWHERE
    )
    nothing.point((1024, 2048, 4096))
