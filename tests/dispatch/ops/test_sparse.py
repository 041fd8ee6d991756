"""Sparse linear algebra on the host: every row's cases, SparseTensors of other libraries, and what is refused, how."""

# ruff: noqa: E501 - tables of errors

import pickle
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, BadType, NoRow, Refused
from dispatch.keys import HOST, Arch
from dispatch.libraries.cusparse import descriptors
from dispatch.ops import FAMILIES
from dispatch.ops.sparse.cases import cases
from dispatch.row_check import check_row
from dispatch.supervise.request_json import Writer
from dispatch.table.select import select

sp = pytest.importorskip("scipy.sparse")

ROWS = [row for row in dp.TABLE if row.op in FAMILIES["sparse"][1] and row.on(HOST)]
DEV = None


@pytest.fixture(autouse=True)
def dev():
    """The host as it is now: a test of another file may have closed the one before."""
    global DEV
    DEV = dp.device("host")


S = dp.sparse


@pytest.mark.parametrize(
    "every", [pytest.param(5, id="sample"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_of_the_host_passes_its_cases(row, every, rng):
    found = cases(row)
    taken = [not check_row(row, case, DEV, rng) for case in found[ROWS.index(row) % min(every, 3) :: every]]
    # A row that is for few of its op's cases may take none of the sample.
    assert any(taken) or any(not check_row(row, case, DEV, rng) for case in found)


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
    torch.set_default_device("meta")
    try:
        assert S.to_torch(a).device == theirs.device
    finally:
        torch.set_default_device(None)
    b = torch.from_numpy(rng.standard_normal((12, 3)))
    if kind != "bsr":
        product = a @ b
        assert isinstance(product, torch.Tensor)
        np.testing.assert_allclose(product.numpy(), matrix @ b.numpy())
        left = torch.from_numpy(rng.standard_normal((3, 8))) @ a
        assert isinstance(left, torch.Tensor)
        assert left.shape == (3, 12)
    with pytest.raises(BadRequest, match="a tensor that is not coalesced"):
        S.sparse_tensor(torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 2), check_invariants=True))


def test_a_matrix_of_cupy_s_attributes_is_taken_in_by_these(matrix):
    theirs = SimpleNamespace(
        format="csr", shape=matrix.shape, nnz=matrix.nnz, data=matrix.data, indices=matrix.indices, indptr=matrix.indptr
    )
    a = S.sparse_tensor(theirs)
    np.testing.assert_array_equal(a.todense().numpy(), matrix.toarray())
    with pytest.raises(BadRequest, match="a matrix in LIL; expected CSR, CSC, COO or BSR"):
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
    with pytest.raises(BadRequest, match="CSR or CSC, because the transpose of each is the other"):
        _ = S.sparse_tensor(matrix.tocoo()).T


def test_a_batch_of_dense_matrices_stands_on_either_side(rng):
    matrix = sp.random_array((6, 5), density=0.5, rng=rng, format="csr")
    a, dense = S.sparse_tensor(matrix, device=DEV), matrix.toarray()
    left, right = rng.standard_normal((4, 3, 6)), rng.standard_normal((4, 5, 2))
    by_columns = DEV.array(np.ascontiguousarray(left.swapaxes(1, 2))).mT
    for given in (DEV.array(left), by_columns):
        np.testing.assert_allclose((given @ a).numpy(), left @ dense, rtol=0, atol=1e-12)
    np.testing.assert_allclose(S.spmm(a, DEV.array(right)).numpy(), dense @ right, rtol=0, atol=1e-12)
    with pytest.raises(NoRow, match=r"the matrices of b one behind another|row-major or column-major"):
        DEV.array(np.ascontiguousarray(left.T)).T @ a
    with pytest.raises(BadRequest, match="because op"):
        DEV.array(np.zeros((3, 2, 2))).T @ a  # 3 elements a line, for 6 lines of A


def test_what_a_sparse_tensor_is_not_is_said(matrix):
    a = S.sparse_tensor(matrix)
    with pytest.raises(TypeError, match=r"cannot be converted to a NumPy array: a.todense\(\) makes a dense tensor"):
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


# -- requests ---------------------------------------------------------------------------------------------------------
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
def test_the_first_row_for_a_gpu_is_this_library_s_kernel_or_cusparse_s():
    a = S.sparse_tensor(sp.eye_array(3, format="csr"))
    request = dp.SpmmRequest(*a, DEV.array(np.ones((3, 1))))
    assert select(request, Arch(90)).function == "multiply_over"
    assert select(request.replace(library="cusparse"), Arch(90)).function == "cusparseSpMM"
    assert select(request.replace(trans="t"), Arch(90)).function == "cusparseSpMM"
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
        descriptors.SparseSpec(int(kind), (4, 8), nnz, 1, block, 0, 4, 4, 0, 1, 2, **triangle), 256
    )
    for shift in (0, 4096):
        made.set_addresses((1024 + shift, 2048 + shift, 3072 + shift))
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
        dense.set_addresses((4096,))
    vector = descriptors.DenseVector(5, 0, 0, 256)
    vector.set_addresses((4096,))
    at = ctypes.c_void_p()
    cusparse.cusparseDnVecGetValues(vector.c, ctypes.byref(at))
    assert at.value == 4096
    few = descriptors.SparseVector((9, 4), 8, 1, 1, (0, 1), 256)
    for addresses in ((512, 1024), (512, 2048), (4096, 2048)):
        few.set_addresses(addresses)
        cusparse.cusparseSpVecGetValues(few.c, ctypes.byref(at))
        assert at.value == addresses[1]
    nothing = descriptors.SparseMatrix(
        descriptors.SparseSpec(int(kind), (4, 8), 0, 0, block, 0, 4, 4, 0, 1, 2), descriptors.NULL_ADDRESS
    )
    nothing.set_addresses((1024, 2048, 4096))


def test_a_form_that_the_library_rejects_is_a_refusal():
    """With more elements than places, which duplicates may make; other rows may take such a matrix."""
    from cudabind import _load
    from cudabind.errors import LibraryNotFound

    try:
        _load.version("cusparse")
    except LibraryNotFound as error:
        pytest.skip(str(error))
    spec = descriptors.SparseSpec(int(dp.SparseFormat.CSC), (3, 2), 7, 0, (1, 1), 0, 4, 4, 0, 1, 2)
    with pytest.raises(Refused, match="cusparseCreateCsc rejects 7 elements in 3 x 2, indices of 32 and 32 bits: CUS"):
        descriptors.SparseMatrix(spec, 256)


def test_products_of_bsr_in_blocks_of_one_with_a_vector_are_refused():
    a = [DEV.array(np.ones((2, 1, 1))), DEV.array([0, 1, 2], "i32"), DEV.array([0, 1], "i32")]
    form = dp.SparseForm("bsr", (2, 2), 0, (1, 1))
    for request in (
        dp.SparseMvRequest(*a, form, DEV.zeros((2,), "f64")),
        dp.CgRequest(*a, form, DEV.zeros((2,), "f64")),
    ):
        with pytest.raises(
            NoRow, match=r"needs BSR in blocks of two rows or more, has 1x1: dispatch\.sparse\.tocsr\(a\)"
        ):
            select(request, Arch(90))
    assert select(dp.SpmmRequest(*a, form, DEV.zeros((2, 3), "f64")), Arch(90)).op == "spmm"
