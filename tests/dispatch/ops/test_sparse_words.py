"""Sparse matrices as SciPy's and torch's users call them: what is stored counts, and what does not fit is named."""

import pickle

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, BadType

sp = pytest.importorskip("scipy.sparse")
S = dp.sparse


def ints(*numbers):
    return np.array(numbers, np.int32)


@pytest.mark.parametrize("fixed", [False, True])
def test_a_product_has_the_places_of_its_patterns_whatever_cancels(fixed, rng):
    """SciPy drops what adds up to 0; a fixed pattern is counted once, and values may change since."""
    places = sp.random_array((30, 30), density=0.2, rng=rng, format="csr")
    ones = sp.csr_array((np.ones(places.nnz), places.indices, places.indptr), shape=places.shape)
    expected = (ones @ ones).nnz
    values = np.ones(places.nnz)
    a = S.csr(values, places.indptr, places.indices, (30, 30))
    a = a.fixed() if fixed else a
    for _ in range(20):
        values[...] = rng.choice([-1.0, 0.0, 1.0], places.nnz)
        found = S.spgemm(a, a)
        dense = sp.csr_array((values, places.indices, places.indptr), shape=places.shape).toarray()
        assert found.nnz == expected == int(dp.spgemm_nnz(*a, *a).item())
        np.testing.assert_array_equal(found.todense(), dense @ dense)


@pytest.mark.parametrize("make", [S.tosell, lambda a: S.toblocked_ell(a, block=2)], ids=["sliced", "blocked"])
def test_all_that_is_stored_is_laid_out(make, rng):
    values = np.array([1.0, 10.0, 0.0, 5.0])
    a = S.csr(values, ints(0, 2, 3, 4, 4), ints(0, 0, 1, 2), (4, 4))
    x = rng.standard_normal((4, 3))
    ell = make(a)
    for j in range(3):
        operand = np.array(x[:, j] if hasattr(ell, "slice_size") else x[:, j : j + 1])
        np.testing.assert_allclose(np.ravel(ell @ operand), [11 * x[0, j], 0, 5 * x[2, j], 0])
    if hasattr(ell, "slice_size"):
        assert ell.nnz == 4
        assert np.isnan(np.asarray(ell @ np.array([1.0, np.nan, 1.0, 1.0]))[1]), "a stored 0 multiplies"


@pytest.mark.parametrize("kind", ["csr", "csc", "coo", "bsr", "dia", "lil"])
def test_matrices_of_every_format_are_laid_out_without_a_dense_one(kind, rng):
    n = 96_000 if kind != "lil" else 200
    a = sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n)).asformat(kind)
    x = rng.standard_normal(n)
    np.testing.assert_allclose(S.tosell(a) @ x, a @ x)
    if kind in ("csr", "bsr"):
        ell = S.toblocked_ell(a, block=16)
        np.testing.assert_allclose(np.ravel(ell @ x[:, None]), a @ x)


def test_what_ell_cannot_do_is_said():
    sell, blocked = S.tosell(np.eye(4)), S.toblocked_ell(np.eye(4), block=2)
    for call, words in (
        (lambda: sell @ [1.0, 1.0], "x: got a list; expected a vector of 4 elements"),
        (lambda: blocked @ 3, "b: got an int; expected a matrix of 4 rows"),
    ):
        with pytest.raises(BadType, match=words):
            call()
    for call in (lambda: np.ones(4) @ sell, lambda: np.ones((4, 4)) @ blocked):
        with pytest.raises(TypeError, match="cannot be the right operand of @ for a ndarray"):
            call()
    for matrix in (sell, blocked):
        with pytest.raises(TypeError, match="cannot be converted to a NumPy array"):
            np.asarray(matrix)
    with pytest.raises(BadRequest, match="block: got 3; expected a power of 2"):
        S.toblocked_ell(np.eye(6), block=3)


@pytest.mark.parametrize("make", [S.ilu0, S.ic0])
def test_factors_look_at_indices(make):
    for matrix, words in (
        (S.csr(np.array([1.0, 5, 1]), ints(0, 2, 3), ints(0, 7, 1), (2, 2)), "columns: got 1 indices beyond"),
        (S.csr(np.array([5.0, 1, 1]), ints(0, 2, 3), ints(-1, 0, 1), (2, 2)), "columns: got 1 indices beyond"),
        (S.csr(np.ones(2), ints(0, 1, 9), ints(0, 1), (2, 2)), "rows: got 1 wrong offsets"),
        (S.csr(np.ones(3), ints(0, 2, 3), ints(0, 0, 1), (2, 2)), "columns: got 0 unsorted elements and 1 that"),
        (S.csr(np.ones(3), ints(0, 1, 3), ints(0, 1, 0), (2, 2)), "columns: got 1 unsorted elements and 0 that"),
    ):
        with pytest.raises(BadRequest, match=words):
            make(matrix)


def test_a_fixed_pattern_has_a_number_of_its_own_wherever_it_comes_to():
    a = S.sparse_tensor(sp.csr_array(np.ones((3, 3)))).fixed()
    b = pickle.loads(pickle.dumps(a))
    assert b.form.pattern not in (None, a.form.pattern)
    np.testing.assert_array_equal(b.todense(), a.todense())
    assert pickle.loads(pickle.dumps(S.sparse_tensor(sp.csr_array(np.eye(2))))).form.pattern is None


def test_matrices_of_scipy_multiply_on_the_right_too():
    m = sp.csr_array(np.array([[1.0, 2.0], [0.0, 3.0]]))
    np.testing.assert_array_equal((S.sparse_tensor(m) @ m).todense(), (m @ m).toarray())


def test_what_is_no_matrix_of_ours_is_said():
    m = sp.csr_array(np.eye(3))
    for call, words in (
        (lambda: S.spsolve(m, m), "b: got a csr_array; .*it is sparse: x.todense"),
        (lambda: S.fromdense(m), "a: got a csr_array; .*it is sparse"),
        (lambda: S.sparse_tensor(m).with_values(np.ones(4)), r"values: got shape \[4\]; expected \[3\]"),
        (lambda: S.sparse_tensor(m.astype(np.longdouble)), "matrix: got elements or indices of float128"),
    ):
        with pytest.raises(BadRequest, match=words):
            call()


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
def test_torchs_matrices_keep_to_what_autograd_follows():
    torch = pytest.importorskip("torch")
    a = torch.eye(3).to_sparse_csr().requires_grad_()
    with pytest.raises(BadRequest, match="a tensor that requires grad"):
        S.sparse_tensor(a)
    with torch.no_grad():
        np.testing.assert_array_equal(S.sparse_tensor(a) @ torch.ones(3), np.ones(3))
    with pytest.raises(BadRequest, match=r"a tensor of layout torch\.sparse_bsc"):
        S.sparse_tensor(torch.eye(4).to_sparse_bsc((2, 2)))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_elements_that_scipy_has_not_are_refused_by_their_dtype(dtype):
    dev = dp.device("host")
    a = S.csr(dev.array([1.0, 2.0], dtype), dev.array([0, 1, 2], "i32"), dev.array([0, 1], "i32"), (2, 2))
    for given in (a, a.T, S.tocoo(a)):
        with pytest.raises(BadRequest, match=f"which {dtype} is not. Hint: a.with_values") as caught:
            S.to_scipy(given)
        assert S.to_scipy(eval(caught.value.hint, {"a": given})).toarray().tolist() == [[1, 0], [0, 2]]


def test_a_batch_of_elements_multiplies_at_the_places_of_one_matrix(rng):
    dev, a = dp.device("host"), sp.random_array((5, 6), density=0.4, format="csr", rng=rng)
    values, b = rng.standard_normal((3, a.nnz)), rng.standard_normal((3, 6, 4))
    c = S.spmm(a, dev.array(b), values=dev.array(values)).numpy()
    for number, one in enumerate(values):
        dense = sp.csr_array((one, a.indices, a.indptr), a.shape).toarray()
        np.testing.assert_allclose(c[number], dense @ b[number], atol=1e-12)
        np.testing.assert_allclose(S.spmm(a, b[0], values=one), dense @ b[0], atol=1e-12)
    words = rf"values: got f64\[3, {a.nnz}\]; expected f64\[{a.nnz}\] of CSR\[5, 6\]\. Hint: .* as values= of spmm"
    with pytest.raises(BadRequest, match=words):
        S.csr(values, a.indptr, a.indices, (5, 6))
