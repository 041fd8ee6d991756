"""Which products of a sparse and a dense matrix, and which batches, are this library's kernel's, and what is said."""

from itertools import product

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import NoRow
from dispatch.keys import HOST, Arch, Dtype
from dispatch.ops.sparse import own_matrix, rules
from dispatch.table.select import candidates, select

H200 = Arch(90)
DEV = None
N, T, C = dp.Operation


@pytest.fixture(autouse=True)
def dev():
    """The host as it is now: a test of another file may have closed the one before."""
    global DEV
    DEV = dp.device("host")


def requests(b, kind=None):
    """By format, requests over a matrix of 2 rows and columns with two elements; of a batch where b is one."""
    parts = [DEV.array(np.ones(2)), DEV.array(np.array([0, 1, 2], "i4")), DEV.array(np.array([0, 1], "i4"))]
    forms = {name: dp.SparseForm(name, (2, 2)) for name in ("csr", "csc", "coo")}
    of = {"csr": parts, "csc": [parts[0], parts[2], parts[1]], "coo": [parts[0], parts[2], parts[2]]}
    kind = kind or (dp.SpmmRequest if b.ndim == 2 else dp.BatchedSpmmRequest)
    return {name: (lambda name=name, **more: kind(*of[name], forms[name], b, **more)) for name in of}


@pytest.mark.parametrize("shape", [(2, 3), (4, 2, 3)], ids=["one", "a batch"])
def test_what_has_its_rows_together_is_this_library_s_and_all_else_cusparse_s(shape):
    made = requests(DEV.array(np.ones(shape)))
    for kind, trans in product(made, (N, T, C)):
        request = made[kind](trans=trans)
        is_own = (kind == "csr") == (trans is N) and kind != "coo"
        assert select(request, H200).library == ("own" if is_own else "cusparse")
        assert select(request, HOST).stands_for == ("own" if is_own else "cusparse")
        assert select(request.replace(library="cusparse"), H200).library == "cusparse"
        assert [row.library for row in candidates(request, H200)] == ["own"] * is_own + ["cusparse"]
        if not is_own:
            with pytest.raises(
                NoRow, match=f"needs CSR with trans n, or CSC .*, has {kind.upper()} with {trans.name.lower()}"
            ):
                select(request.replace(library="own"), H200)


@pytest.mark.parametrize("shape", [(2, 3), (4, 2, 3)], ids=["one", "a batch"])
def test_an_algorithm_of_cusparse_is_cusparse_s_and_tuned_requests_are_of_both(shape):
    made = requests(DEV.array(np.ones(shape)))
    for algorithm in ("csr_alg1", "csr_alg2", "csr_alg3"):
        assert select(made["csr"](algorithm=algorithm), H200).library == "cusparse"
        with pytest.raises(NoRow, match=f"needs algorithm default, has {algorithm}"):
            select(made["csr"](algorithm=algorithm, library="own"), H200)
    tuned = candidates(made["csr"](autotune=True), H200)
    assert [row.library for row in tuned] == ["own", "cusparse"]


@pytest.mark.parametrize("more", [0, 1])
def test_large_products_with_few_columns_are_cusparses_unless_they_are_asked_for(more):
    n = rules.MAX_STEPS // 2
    values, columns = DEV.zeros((n + more,), "f32"), DEV.zeros((n + more,), "i32")
    rows, form = DEV.zeros((n + 1,), "i32"), dp.SparseForm("csr", (n, 1))
    for k in (rules.MIN_COLUMNS - 1, rules.MIN_COLUMNS):
        parts = values, rows, columns, form, DEV.zeros((1, k), "f32")
        is_large = more and k < rules.MIN_COLUMNS
        for chosen, library in (
            ({}, "cusparse" if is_large else "own"),
            ({"library": "own"}, "own"),
            ({"autotune": True}, "own"),
        ):
            assert select(dp.SpmmRequest(*parts, **chosen), H200).library == library
        reason = rules.enough_columns(dp.SpmmRequest(*parts))
        wanted = f"needs at least 2 columns of b, or library own or autotune, has {k}"
        assert reason == (wanted if is_large else "")


def test_strides_that_cusparse_refuses_and_indices_of_two_widths_are_taken():
    values, rows = DEV.array(np.ones(2)), DEV.array(np.array([0, 1, 2], "i4"))
    wide = DEV.array(np.array([0, 1], "i8"))
    b = DEV.array(np.ones((2, 8)))[:, ::2]
    request = dp.SpmmRequest(values, rows, wide, dp.SparseForm("csr", (2, 2)), b)
    assert select(request, H200).library == "own"
    with pytest.raises(NoRow, match=r"needs rows and columns of one dtype.*needs b row-major or column-major"):
        select(request.replace(library="cusparse"), H200)


def test_something_is_added_to_a_matrix_without_elements():
    a = [DEV.zeros((0,), "f64"), DEV.array(np.zeros(3, "i4")), DEV.zeros((0,), "i32"), dp.SparseForm("csr", (2, 4))]
    b, c = DEV.array(np.ones((4, 5))), DEV.array(np.full((2, 5), 3.0))
    request = dp.SpmmRequest(*a, b, c=c, beta=2)
    assert select(request, H200).library == "own"
    np.testing.assert_array_equal(dp.run(request).numpy(), np.full((2, 5), 6.0))
    with pytest.raises(NoRow, match="needs a matrix with elements if an operand is added"):
        select(request.replace(library="cusparse"), H200)


def test_the_same_bits_are_promised_where_this_library_is_asked_for():
    for shape in ((2, 3), (4, 2, 3)):
        made = requests(DEV.array(np.ones(shape)))
        assert made["csr"](library="own").same_bits
        assert made["csc"](library="own", trans="c").same_bits
        assert not made["csr"](library="cusparse").same_bits
        assert not made["csr"]().same_bits  # without NVRTC it is cuSPARSE's


@pytest.mark.parametrize(("dtype", "out"), [("f16", "f16"), ("f16", "f32"), ("bf16", "bf16"), ("bf16", "f32")])
@pytest.mark.parametrize("kind", ["csr", "csc", "coo"])
def test_batches_of_16_bits_have_rows_in_each_format(kind, dtype, out):
    b = DEV.zeros((3, 2, 4), dtype)
    made = requests(b, lambda values, *rest, **more: dp.BatchedSpmmRequest(values.astype(dtype), *rest, **more))
    for trans in (N, T):
        request = made[kind](trans=trans, out=DEV.zeros((3, 2, 4), out))
        assert request.layout_of("out").dtype is Dtype.of(out)
        is_own = (kind == "csr") == (trans is N) and kind != "coo"
        row = select(request, H200)
        assert (row.library, row.dtypes) == ("own" if is_own else "cusparse", (Dtype.of(dtype), Dtype.of(out)))
        np.testing.assert_array_equal(dp.run(request).numpy().astype("f4"), 0)


def test_a_result_without_elements_launches_nothing():
    a = [DEV.zeros((0,), "f64"), DEV.zeros((1,), "i32"), DEV.zeros((0,), "i32"), dp.SparseForm("csr", (0, 3))]
    for request in (
        dp.SpmmRequest(*a, DEV.array(np.ones((3, 2)))),
        dp.BatchedSpmmRequest(*a, DEV.array(np.ones((4, 3, 2)))),
    ):
        plan = own_matrix.plan(request, None, select(request, H200))
        plan.enqueue(request.arguments(DEV.executor().outputs(request)))
        assert plan.is_bare
