"""Arguments of sparse functions that do not fit: each error names the argument as the caller wrote it, and says what
helps. And combinations that fit: one B for a batch, algorithms of fixed patterns without elements.
"""

import re

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, BadType, NoRow

sp = pytest.importorskip("scipy.sparse")
S = dp.sparse


@pytest.fixture
def dev():
    return dp.device("host")


def matrix(kind="csr", index="i4", values=(1.0, 1.0)):
    """The identity of two rows, over NumPy's arrays as tensors."""
    one = sp.eye_array(2, format=kind)
    parts = {"csr": (np.array([0, 1, 2]), np.array([0, 1])), "coo": (np.array([0, 1]), np.array([0, 1]))}[kind]
    rows, columns = (dp.device("host").array(part.astype(index)) for part in parts)
    return getattr(S, kind)(dp.device("host").array(np.asarray(values)), rows, columns, one.shape)


# -- operators --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("left", "shown"), [(None, "None"), (3, "an int"), ("x", "a str"), ([1.0, 1.0], "a list")])
def test_what_is_no_array_on_the_left_is_named(left, shown):
    with pytest.raises(BadType, match=f"^x: got {shown}; expected a tensor, or an array of another library"):
        left @ matrix()
    with pytest.raises(BadRequest, match=f"^b: got {shown}; expected a dispatch Tensor, or an array of torch, NumPy"):
        matrix() @ left


def test_arrays_on_the_left_still_multiply(rng, dev):
    a = sp.random_array((3, 4), density=0.5, rng=rng, format="csr")
    ours = S.sparse_tensor(a, device=dev)
    for x in (rng.standard_normal(3), rng.standard_normal((2, 3)), rng.standard_normal((5, 2, 3))):
        np.testing.assert_allclose(x @ ours, x @ a.toarray())
        np.testing.assert_allclose((dev.array(x) @ ours).numpy(), x @ a.toarray())


def test_a_matrix_of_scipy_on_the_left_says_what_multiplies():
    """SciPy converts the right operand to an array, and defers to nothing."""
    left = sp.csr_array([[1.0, 2.0], [0.0, 3.0]])
    with pytest.raises(TypeError, match=r"for m @ a .* call dispatch\.sparse\.spgemm\(m, a\)"):
        left @ matrix()
    np.testing.assert_array_equal(S.spgemm(left, matrix()).todense(), left.toarray())


def test_a_product_of_matrices_names_its_operands():
    a, coo, wide = matrix(), matrix("coo"), matrix(index="i8")
    tall = S.sparse_tensor(sp.eye_array(3, 2, format="csr"))
    for call, words in (
        (lambda: coo @ a, "a.format: got COO; expected CSR. Hint: dispatch.sparse.tocsr"),
        (lambda: a @ coo, "b.format: got COO; expected CSR. Hint: dispatch.sparse.tocsr"),
        (lambda: S.spgemm(a, coo, nnz=2), "b.format: got COO"),
        (lambda: a @ tall, "b.shape: got (3, 2); expected 2 rows, the columns of the first matrix"),
        (lambda: a @ wide, "b.rows: got i64[3]; expected i32, the dtype of the first matrix's rows. Hint: b.rows.ast"),
    ):
        with pytest.raises(BadRequest, match=f"^{re.escape(words)}"):
            call()
    narrow = S.csr(wide.values, wide.rows.astype("i32"), wide.columns.astype("i32"), wide.shape)  # as docs/sparse.md
    np.testing.assert_array_equal((a @ narrow).todense(), np.eye(2))


@pytest.mark.parametrize("make", [S.tosell, lambda a: S.toblocked_ell(a, block=2)])
def test_tensors_leave_a_product_with_ell_on_the_right_to_it(make, dev):
    with pytest.raises(TypeError, match="ELL cannot be the right operand of @ for a Tensor: use to"):
        dev.array(np.ones((2, 2))) @ make(np.eye(2))


# -- arguments --------------------------------------------------------------------------------------------------------
def test_a_matrix_that_is_not_unpacked_is_told(dev):
    a, x = matrix(), dev.array(np.ones(2))
    for call, name, missing in (
        (lambda: dp.spmm(a, x), "spmm", "3 required positional arguments: 'columns', 'form', and 'b'"),
        (lambda: dp.cg(a, x), "cg", "3 required positional arguments: 'columns', 'form', and 'b'"),
        (lambda: dp.sparse_check(a), "sparse_check", "3 required positional arguments: 'rows', 'columns', and 'form'"),
        (lambda: dp.sparse_mv(*a), "sparse_mv", "1 required positional argument: 'x'"),
        (lambda: dp.spgemm(*a, *a), "spgemm", "1 required keyword-only argument: 'nnz'"),
        (lambda: dp.spgemm(a, a), "spgemm", "6 required positional arguments"),
    ):
        with pytest.raises(TypeError, match=rf"^{name}\(\) missing {missing}.*{name}\(\*a, …\)"):
            call()
    parts = dict(zip(("values", "rows", "columns", "form"), a, strict=True))
    for name in parts:  # the last argument is there, an earlier one is not
        others = {other: part for other, part in parts.items() if other != name}
        with pytest.raises(BadRequest, match=f"^{name}: got .*missing argument"):
            dp.sparse_mv(**others, x=x)
    assert dp.sparse_mv(**parts, x=x).shape == (2,)


def test_a_sparse_operand_of_a_dense_op_leads_to_the_sparse_one(dev):
    a, x = matrix(), dev.array(np.ones(2))
    for call, words in (
        (lambda: dp.spmv(a, x), "ap: got a SparseTensor; .*x.todense.*; dispatch.sparse.spmv"),
        (lambda: dp.trsv(a, x), "a: got a SparseTensor; .*; dispatch.sparse.spsolve_triangular"),
        (lambda: dp.softmax(sp.eye_array(2)), "x: got a dia_array; .*Hint: it is sparse: x.todense.. makes it dense$"),
    ):
        with pytest.raises(BadRequest, match=words):
            call()


@pytest.mark.parametrize("values", [np.ones(2, "i4"), np.ones(2, bool)])
def test_elements_that_no_row_multiplies_are_the_matrixs_fault(values, dev):
    words = r"^values: got (i32|bool)\[2\]; expected elements of f32, f64, c64, c128, f16 or bf16"
    a = matrix(values=values)
    for call in (lambda: S.spmv(a, dev.array(np.ones(2))), lambda: a @ a, a.todense, a.validate):
        with pytest.raises(BadRequest, match=words):
            call()


def test_a_wrong_keyword_of_a_function_is_told_with_the_right_one(dev):
    a, x = matrix(), dev.array(np.ones(2))
    for call, words in (
        (lambda: S.spmv(a, x, aplha=2), r"spmv.*'aplha'\. Did you mean alpha\?.*see help\(dispatch\.sparse\.spmv\)"),
        (lambda: S.tosell(a, slices=4), r"tosell.*'slices'.*see help\(dispatch\.sparse\.tosell\)"),
        (lambda: S.cg(a), r"cg\(\) missing 1 required positional argument: 'b': see help\(dispatch\.sparse\.cg\)"),
        (lambda: dp.tensors.sum(x, dim=0), r"sum.*'dim'\. Did you mean axis\?.*help\(dispatch\.tensors\.sum\)"),
        (lambda: dp.tensors.einsum_vjp("i->", x), r"missing 1 required keyword-only argument: 'grad'"),
        (lambda: dp.tensors.einsum_path("i->", x, optimise="dp"), r"'optimise'\. Did you mean optimize\?"),
        (
            lambda: dp.structured.prune(x, algoritm="tile"),
            r"Did you mean algorithm\?.*help\(dispatch\.structured\.prune",
        ),
    ):
        with pytest.raises(TypeError, match=words):
            call()


@pytest.mark.parametrize("name", ["dense_nnz", "sparse_check", "sparse_mv", "einsum", "spsolve_batched"])
def test_an_empty_name_is_no_library(name, dev):
    a, x = matrix(), dev.array(np.ones((2, 2)))
    values, rows, columns, form = a.parts
    calls = {
        "dense_nnz": lambda: dp.dense_nnz(x, library=""),
        "sparse_check": lambda: dp.sparse_check(*a, library=""),
        "sparse_mv": lambda: dp.sparse_mv(*a, x[0], library=""),
        "einsum": lambda: dp.einsum("ij->i", x, library=""),
        "spsolve_batched": lambda: dp.spsolve_batched([values], [rows], [columns], [form], [x[0]], library=""),
    }
    with pytest.raises(
        BadRequest, match=r"^library: got ''; expected the name of a library, such as 'cutlass', or None"
    ):
        calls[name]()


def test_a_number_of_elements_beyond_the_shapes_is_refused_before_memory_is_allocated(dev):
    a, dense = matrix(), dev.array(np.ones((2, 3)))
    thin = S.sparse_tensor(sp.csr_array(([1.0], ([0], [0])), (1000, 1000)))
    for call, most in (
        (lambda: S.spgemm(a, a, nnz=2**40), 4),
        (lambda: S.spgemm(thin, thin, nnz=2), 1),  # one element meets at most one
        (lambda: S.fromdense(dense, nnz=2**40), 6),
        (lambda: S.prune(dense, threshold=0.5, nnz=2**31 - 1), 6),
    ):
        with pytest.raises(BadRequest, match=f"^nnz: got [0-9]+; expected a whole number from 0 to {most}$"):
            call()
    assert S.spgemm(thin, thin, nnz=1).nnz == 1
    assert S.fromdense(dense, nnz=6).nnz == 6


BIG = 2**40


@pytest.mark.parametrize(
    ("kind", "shape", "lengths", "index", "named"),
    [
        ("csr", (2, BIG), (3, 2), ("i4", "i4"), "columns"),
        ("csr", (2, BIG), (3, 2), ("i8", "i4"), "columns"),
        ("csc", (BIG, 2), (2, 3), ("i4", "i4"), "rows"),
        ("coo", (2, BIG), (2, 2), ("i4", "i4"), "columns"),
        ("coo", (BIG, 2), (2, 2), ("i4", "i8"), "rows"),
    ],
)
def test_the_indices_that_are_too_narrow_are_named(kind, shape, lengths, index, named):
    parts = [np.zeros(length, dtype) for length, dtype in zip(lengths, index, strict=True)]
    words = f"^{named}: got i32.*expected i64, because numbers up to {BIG} need more than 31 bits"
    with pytest.raises(BadRequest, match=words):
        getattr(S, kind)(np.ones(2), *parts, shape)
    wide = [part.astype("i8") if name == named else part for name, part in zip(("rows", "columns"), parts, strict=True)]
    assert getattr(S, kind)(np.ones(2), *wide, shape).shape == shape


# -- algorithms and batches -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("algorithm", ["csr_alg_determinitic", "csr_alg_nondeterminitic"])
def test_algorithms_of_fixed_patterns_say_what_they_lack(algorithm):
    a, based = matrix(), S.csr(np.ones(2), np.array([1, 2, 3], "i4"), np.array([1, 2], "i4"), (2, 2), base=1)
    fixed, wide = a.fixed(), matrix(index="i8").fixed()
    counts = f"needs an algorithm that counts, has {algorithm.upper()}, .*: leave it out here, and pass it to spgemm"
    for call, words in (
        (lambda: dp.spgemm_nnz(*fixed, *fixed, algorithm=algorithm), counts),
        (lambda: S.spgemm(a, a, algorithm=algorithm), f"{counts} of a.fixed.. and b.fixed"),
        (lambda: S.spgemm(a, fixed, nnz=2, algorithm=algorithm), r"needs spgemm of fixed patterns .*: pass a\.fixed\("),
        (lambda: S.spgemm(wide, wide, nnz=2, algorithm=algorithm), "needs i32 indices .*, has i64"),
        (lambda: S.spgemm(based.fixed(), based.fixed(), nnz=2, algorithm=algorithm), "needs base 0 .*, has 1"),
    ):
        with pytest.raises(NoRow, match=words):
            call()
    empty = S.csr(np.zeros(0), np.zeros(3, "i4"), np.zeros(0, "i4"), (2, 2)).fixed()
    for first, second in ((empty, fixed), (fixed, empty), (empty, empty)):
        for nnz in (0, None):
            assert S.spgemm(first, second, nnz=nnz, algorithm=algorithm).nnz == 0
    np.testing.assert_array_equal(S.spgemm(fixed, fixed, algorithm=algorithm).todense(), np.eye(2))


@pytest.mark.parametrize(("kind", "algorithm"), [("coo", "default"), ("csr", "csr_alg1"), ("csr", "default")])
def test_one_b_is_for_all_matrices_of_a_batch(kind, algorithm, rng, dev):
    a = S.sparse_tensor(sp.random_array((3, 2), density=0.7, rng=rng, format=kind), device=dev)
    b, values = rng.standard_normal((2, 3)), rng.standard_normal((4, a.nnz))
    shared = dev.array(b).strided((4, 2, 3), (0, 3, 1))
    found = S.spmm(a, shared, values=dev.array(values), algorithm=algorithm)
    for number in range(4):
        expected = S.to_scipy(a.with_values(values[number])).toarray() @ b
        np.testing.assert_allclose(found.numpy()[number], expected, atol=1e-14)


def test_matrices_of_a_batch_that_overlap_in_part_are_copied_by_the_caller(dev):
    b = dev.array(np.ones(30)).strided((4, 2, 3), (3, 3, 1))
    with pytest.raises(NoRow, match="the matrices of b one after another, without common elements"):
        dp.spmm_batched(*matrix("coo"), b)
