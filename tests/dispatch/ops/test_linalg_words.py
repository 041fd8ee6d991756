"""`dispatch.linalg` as SciPy's users call it: SciPy's order of arguments, wrong ones refused by the names they have."""

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest

L = dp.linalg
A, B = np.array([[4.0, 1.0], [1.0, 3.0]]), np.array([1.0, 2.0])

WRONG = {
    "overwrite_b: got 'no'; expected a bool": lambda: L.solve(A, B, overwrite_b="no"),
    "overwrite_b: got 2.5; expected a bool": lambda: L.lu_solve(L.lu_factor(A), B, 0, 2.5),
    "overwrite_b: got 1; expected a bool": lambda: L.cho_solve((L.cholesky(A), False), B, 1),
    "overwrite_a: got a numpy ndarray": lambda: L.cholesky(A.copy(), overwrite_a=np.ones(2)),
    "overwrite_a: got 0; expected a bool": lambda: L.ldl(A, overwrite_a=0),
    "overwrite_a: got None; expected a bool": lambda: L.lu_factor(A, None),
    "lu_and_pivots: got a int; expected (lu, pivots)": lambda: L.lu_solve(5, B),
    "lu_and_pivots: got a ndarray; expected (lu, pivots)": lambda: L.lu_solve(A, B),
    "c_and_lower: got (a numpy ndarray": lambda: L.cho_solve((A,), B),
    "subset_by_value: got a numpy ndarray": lambda: L.eigh(A, subset_by_value=np.array(2.0)),
    'pivots: got i32[2]; expected i64[2], dense. Hint: dev.array(x, "i64")': lambda: L.lu_solve(
        (A, np.array([1, 2], "i4")), B
    ),
    "cond: got 5; expected a number from 0 to 1": lambda: L.lstsq(A, B, cond=5),
    "rtol: got 0.1; expected None with driver gels": lambda: L.lstsq(A, B, driver="gels", cond=0.1),
    "type: got 9; expected a whole number from 1 to 3": lambda: L.eigh(A, A, type=9),
    "check: got a numpy ndarray": lambda: L.eigh(A, A, check=np.ones(2)),
    "ord: got True": lambda: L.norm(A, True),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_argument_is_refused_by_its_own_name(words):
    with pytest.raises(BadRequest) as caught:
        WRONG[words]()
    assert str(caught.value).startswith(words)


def test_arguments_by_place_are_those_of_scipy():
    scipy = pytest.importorskip("scipy.linalg")
    b = B.copy()
    np.testing.assert_allclose(L.solve(A, b, False, True), scipy.solve(A, B, False, True))
    np.testing.assert_array_equal(b, B)  # the fourth one is overwrite_a
    x = L.solve(A, b, False, False, True)
    assert x is b
    np.testing.assert_allclose(x, np.linalg.solve(A, B))


@pytest.mark.parametrize("order", [np.int64(1), np.float32(2), np.float64(np.inf), -np.int32(1)])
def test_numbers_of_numpy_are_orders_of_norms(order):
    np.testing.assert_allclose(L.norm(A, order), np.linalg.norm(A, order))


SPELLINGS = {
    "solve": ["gen", "general", "GEN", "pos", "positive definite", "positive-definite", "spd", "HPD", "sym",
              "symmetric", "her", "hermitian", "Hermitian"],
    "inv": ["gen", "general", "GEN", "pos", "positive definite", "positive_definite", "spd", "HPD", "lower", "upper",
            "lower triangular", "upper triangular", "lower_triangular", "LOWER"],
}  # fmt: skip


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, names in SPELLINGS.items() for name in names])
def test_what_is_known_of_a_matrix_is_named_alike_at_both_doors(op, name):
    dev = dp.device("host")
    words = name.lower().replace("_", " ")
    a = np.tril(A) if words.startswith("lower") else np.triu(A) if words.startswith("upper") else A
    x, right = ((B,), np.linalg.solve(a, B)) if op == "solve" else ((), np.linalg.inv(a))
    np.testing.assert_allclose(getattr(L, op)(a, *x, assume_a=name), right)
    given = [dev.array(one) for one in (a, *x)]
    np.testing.assert_allclose(getattr(dp, op)(*given, assume_a=name)[0].numpy(), right)


@pytest.mark.parametrize("name", ["gen", "general", "pos", "positive definite", "spd", "sym", "symmetric", "hermitian"])
def test_sparse_solvers_take_the_same_names(name):
    sparse = pytest.importorskip("scipy.sparse")
    np.testing.assert_allclose(dp.sparse.spsolve(sparse.csr_array(A), B, assume_a=name), np.linalg.solve(A, B))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: L.solve(A, B, assume_a="lower triangular"), "SYM, HER. dispatch.trsm(a, b, uplo='lower') solves with"),
        (lambda: L.solve(A, B, assume_a="upper"), "SYM, HER. dispatch.trsm(a, b, uplo='upper') solves with"),
        (lambda: L.solve(A, B, assume_a="tridiagonal"), "dispatch.gtsv(dl, d, du, b)"),
        (
            lambda: L.inv(A, assume_a="sym"),
            "UPPER. pass the full matrix with GEN, or use dispatch.solve with the identity",
        ),
    ],
)
def test_a_name_of_the_other_function_is_refused_with_what_to_do(call, words):
    with pytest.raises(BadRequest) as caught:
        call()
    assert str(caught.value).startswith("assume_a: got ")
    assert words in str(caught.value)
