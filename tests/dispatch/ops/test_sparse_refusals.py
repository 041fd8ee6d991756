"""What no sparse matrix is, and requests that do not fit: refused by the name of what is wrong, on the host as well."""

# ruff: noqa: E501 - tables of errors

import sys

import numpy as np
import pytest

import dispatch as dp
from dispatch.device.host import HostDevice
from dispatch.errors import BadRequest, NoRow

sp = pytest.importorskip("scipy.sparse")

DEV = HostDevice(generation=1 << 22)  # of its own: another file's test may close the host
S = dp.sparse


def wrong(**parts):
    given = {"values": [1.0, 2, 3], "rows": [0, 1, 3], "columns": [0, 0, 2], "shape": (2, 3), "index": "i4"} | parts
    index = given["index"]
    arrays = (
        DEV.array(np.array(given[name], "f8" if name == "values" else index)) for name in ("values", "rows", "columns")
    )
    return S.csr(*arrays, given["shape"], base=given.get("base", 0), validate=given.get("validate", True))


INVALID = {
    "offsets that fall": ({"rows": [0, 5, 3]}, "1 invalid offsets"),
    "offsets of another base": ({"base": 1}, "2 invalid offsets, 2 indices beyond the matrix"),
    "too large a column": ({"columns": [0, 0, 3]}, "1 indices beyond the matrix"),
    "a negative column": ({"columns": [-1, 0, 2]}, "1 indices beyond the matrix"),
    "unsorted": ({"columns": [0, 2, 0]}, "1 unsorted elements"),
    "twice": ({"columns": [0, 2, 2]}, "1 duplicates"),
    "too few offsets": ({"rows": [0, 3]}, r"rows: got i32\[2\]; expected i32\[3\] of CSR\[2, 3\]"),
    "too few columns": ({"columns": [0, 1]}, r"columns: got i32\[2\]; expected i32\[3\] of CSR"),
    "a negative extent": ({"shape": (-2, 3)}, "form.shape: got -2"),
    "an overflowing extent": ({"shape": (2, 2**63)}, "form.shape"),
    "a base of 2": ({"base": 2}, "form.base: got 2"),
    "too wide for 31 bits": (
        {"shape": (2, 2**31)},
        "columns: got i32.*expected i64, because numbers up to 2147483648 need more than 31 bits",
    ),
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
        with pytest.raises(BadRequest, match="columns: got 1 indices beyond the matrix"):
            run()


# -- requests ---------------------------------------------------------------------------------------------------------
def refused():
    a, x = wrong(), DEV.array(np.ones(3))
    square = S.sparse_tensor(sp.eye_array(3, format="csr"), device=DEV)
    halves = DEV.array(np.ones(3, np.float32))
    return {
        "a form of something else": (lambda: dp.sparse_mv(a.values, a.rows, a.columns, "csr", x), "form: got 'csr'; expected a SparseForm"),
        "an unknown format": (lambda: dp.sparse_mv(*a.parts[:3], a.form._replace(format="lil"), x), "form.format: got 'lil'; expected one of CSR"),
        "a vector of the other side": (lambda: dp.sparse_mv(*a, x, trans="t"), r"x: got f64\[3\]; expected f64\[2\], because op\(A\) is \[3, 2\]"),
        "a matrix for a vector": (lambda: dp.sparse_mv(*a, DEV.array(np.ones((3, 1)))), r"Hint: x\[:, 0\] is a vector"),
        "a vector for a matrix": (lambda: dp.spmm(*a, x), r"b: got f64\[3\]; expected f64\[3, …\]"),
        "another dtype": (lambda: dp.sparse_mv(*a, halves), r"x: got f32\[3\]; expected f64, as values is"),
        "another dtype that is added": (lambda: dp.sparse_mv(*a, x, y=DEV.array(np.ones(2, np.float32))), r"y: got f32\[2\]; expected f64, the dtype of the result"),
        "beta without y": (lambda: dp.sparse_mv(*a, x, beta=2.0), "beta: got 2.0; expected 0 without y"),
        "a complex factor": (lambda: dp.sparse_mv(*a, x, alpha=1j), "alpha: got 1j; expected a real number"),
        "another format's algorithm": (lambda: dp.sparse_mv(*a, x, algorithm="coo_alg1"), "algorithm: got COO_ALG1; expected DEFAULT, or an algorithm for CSR"),
        "an unknown algorithm": (lambda: dp.spmm(*a, DEV.array(np.ones((3, 2))), algorithm="fastest"), "algorithm: got 'fastest'"),
        "a triangle that is not square": (lambda: dp.spsv(*a, x), r"form.shape: got \(2, 3\); expected a square matrix"),
        "out among what is read": (lambda: dp.sparse_mv(*square, x, out=x), "out: got memory that overlaps x"),
        "out among the indices": (lambda: dp.sparse_mv(*square, x, out=square.values), "out: got memory that overlaps values"),
        "products of other extents": (lambda: dp.spgemm(*a, *a, nnz=3), "b_form.shape: got .2, 3.; expected 3 rows"),
        "products in CSC": (lambda: dp.spgemm_nnz(*a.T, *a), "form.format: got CSC; expected CSR. Hint: dispatch.sparse.tocsr converts"),
        "a wrong number of elements": (lambda: dp.spgemm(*square, *square, nnz=4), "nnz: got 4; expected 3, the number that spgemm_nnz counts"),
        "a negative number of elements": (lambda: dp.spgemm(*square, *square, nnz=-1), "nnz: got -1"),
        "two bases": (lambda: dp.spgemm_nnz(*square, *square.parts[:3], square.form._replace(base=1)), "b_form.base: got 1; expected 0"),
        "a pattern for another product": (lambda: dp.sddmm(*a, DEV.array(np.ones((3, 2))), DEV.array(np.ones((2, 3)))), r"a: got f64\[3, 2\]; expected f64\[2, …\], because C is \[2, 3\]"),
        "blocks turned": (lambda: dp.csr2csc(*S.sparse_tensor(sp.eye_array(4).tobsr((2, 2)))), "form.format: got BSR; expected CSR or CSC"),
        "a wrong count of a dense matrix": (lambda: dp.dense_to_sparse(DEV.array(np.eye(3)), nnz=4), "nnz: got 4; expected 3, the number that dense_nnz counts"),
        "blocks of a dense matrix": (lambda: dp.dense_to_sparse(DEV.array(np.eye(4)), nnz=4, format="bsr"), "format: got BSR; expected CSR, CSC or COO"),
        "indices of 8 bits": (lambda: dp.dense_to_sparse(DEV.array(np.eye(4)), nnz=4, index_dtype="i8"), "index_dtype: got i8; expected i32 or i64"),
        "diagonals of another length": (lambda: dp.gtsv(x[:2], x, x, x), "dl: got f64.2.; expected f64.3., like d"),
        "right-hand sides of another length": (lambda: dp.gtsv(x, x, x, x[:2]), "b: got f64.2.; expected f64.3. or .3, …."),
        "pivots of many systems": (lambda: dp.gtsv(*[DEV.zeros((2, 3), "f64")] * 4), "pivoting: got True; expected False for several systems"),
        "an element outside of the matrix": (lambda: dp.gtsv(x, x, x, x), r"dl: got an element outside of the matrix; expected 0 there"),
        "two unknowns": (lambda: dp.gtsv(x[:2], x[:2], x[:2], x[:2]), "needs at least 3 unknowns, has 2"),
        "indices of another number": (lambda: dp.spvv(x, DEV.array(np.zeros(2, "i4")), x), "indices: got i32.2.; expected .3., the shape of values"),
        "indices that are none": (lambda: dp.sparse_gather(x, x), "indices: got f64.3.; expected i32 or i64"),
        "indices beyond a vector": (lambda: dp.sparse_gather(x, DEV.array(np.array([0, 3], "i4"))), "indices: got 1 beyond the vector; expected indices of 3 elements"),
        "a sparse vector of nothing": (lambda: dp.sparse_axpby(x[:0], DEV.array(np.zeros(0, "i4")), x), "needs a sparse vector with elements, has none"),
        "a rotation of nothing": (lambda: dp.sparse_rot(x[:0], DEV.array(np.zeros(0, "i4")), x, 0.6, 0.8), "needs a sparse vector with elements, has none"),
        "a rotation beyond a vector": (lambda: dp.sparse_rot(x, DEV.array(np.array([0, 1, 3], "i4")), x.copy(), 0.6, 0.8), "indices: got 1 beyond the vector; expected indices of 3 elements"),
        "a rotation of two dtypes": (lambda: dp.sparse_rot(x, DEV.array(np.arange(3)), x.astype("f32"), 0.6, 0.8), "y: got f32.3.; expected f64, as values is"),
        "a complex sine of real numbers": (lambda: dp.sparse_rot(x, DEV.array(np.arange(3)), x.copy(), 0.6, 0.8j), "s: got 0.8j; expected a real number"),
        "a cosine that is none": (lambda: dp.sparse_rot(x, DEV.array(np.arange(3)), x.copy(), None, 0.8), "c: got None; expected a real number"),
        "a rotation into one memory": (lambda: dp.sparse_rot(x, DEV.array(np.arange(3)), x.copy(), 0.6, 0.8, out_y=x), "out_y: got .*overlaps"),
        "a dense vector": (lambda: dp.dense_nnz(x), "a: got f64.3.; expected a matrix"),
        "rows that fall": (lambda: dp.coo2csr(DEV.array(np.array([1, 0], "i4")), m=2), "rows: got unsorted rows"),
        "rows beyond the matrix": (lambda: dp.coo2csr(DEV.array(np.array([0, 2], "i4")), m=2), "rows: got unsorted rows, or rows outside of the matrix"),
        "offsets that lead elsewhere": (lambda: dp.csr2coo(DEV.array(np.array([0, 2], "i4")), nnz=3), "rows: got decreasing offsets, or a wrong last offset; expected the offsets of 3 elements"),
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
    np.testing.assert_array_equal(dp.sparse_mv(*a, x).numpy(), dp.sparse_mv(*a, x.copy()).numpy())  # a kernel of ours
    with pytest.raises(NoRow, match="needs x dense, has"):
        dp.sparse_mv(*a, x[:2], trans="t")
    b = DEV.array(rng.standard_normal((6, 6)))[::2, ::2]
    np.testing.assert_array_equal(dp.spmm(*a, b).numpy(), dp.spmm(*a, b.copy()).numpy())  # a kernel of ours
    with pytest.raises(NoRow, match="needs b row-major or column-major"):
        dp.spmm(*a, b[:2], trans="t")
    empty = wrong(values=[], rows=[0, 0, 0], columns=[])
    assert not dp.sparse_mv(*empty, DEV.array(np.ones(3))).numpy().any()
    assert dp.sparse_mv(*empty, DEV.array(np.ones(3)), y=DEV.array(np.ones(2)), beta=2).numpy().tolist() == [2, 2]
    with pytest.raises(NoRow, match="needs a matrix with elements if an operand is added, has none"):
        dp.sparse_mv(*empty, DEV.array(np.ones(2)), y=DEV.array(np.ones(3)), trans="t")


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
