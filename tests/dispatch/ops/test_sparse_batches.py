"""Batches of sparse products: their plans over a stand-in for cuSPARSE, the functions on the host, and what is refused."""

# ruff: noqa: E501 - tables of errors

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.device.host import HostDevice
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import Arch
from dispatch.table.select import select

sp = pytest.importorskip("scipy.sparse")

spec = importlib.util.spec_from_file_location("cusparse_stand_in", Path(__file__).parents[1] / "cusparse_stand_in.py")
stand_in = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_in)

S = dp.sparse
DEV = None


@pytest.fixture(autouse=True)
def dev():
    """The host as it is now: a test of another file may have closed the one before."""
    global DEV
    DEV = dp.device("host")


@pytest.fixture
def executor(monkeypatch):
    return stand_in.executor_of(monkeypatch)


def stacked(rng, count=3):
    """As many matrices of one number of elements in each row, as arrays, and their three parts in CSR."""
    places = np.argsort(rng.random((count, 5, 6)), axis=2)[:, :, :2]
    columns = np.sort(places, axis=2).reshape(count, 10).astype("i4")
    values, dense = rng.standard_normal((count, 10)), np.zeros((count, 5, 6))
    for number in range(count):
        dense[number, np.repeat(np.arange(5), 2), columns[number]] = values[number]
    return dense, values, np.arange(0, 11, 2, dtype="i4"), columns


def made(request, executor):
    """A plan, and what it gives."""
    row = select(request, Arch(90))
    plan = row.call(request, executor, row)
    outputs = DEV.executor().outputs(request)
    plan.enqueue(request.arguments(outputs))
    return plan, request.result(outputs).numpy()


ROWS_OF_COO = np.repeat(np.arange(5, dtype="i4"), 2)


def batches(rng):
    """By name: parts of A, its format, the matrices that they are, and how many calls of the library that is."""
    dense, values, ends, columns = stacked(rng)
    rows, of_one = np.tile(ROWS_OF_COO, (3, 1)), sp.csr_array((values[0], columns[0], ends), (5, 6)).toarray()
    one_pattern = np.stack([sp.csr_array((own, columns[0], ends), (5, 6)).toarray() for own in values])
    apart = np.zeros((3, 12), "i4")
    apart[:, :10] = columns
    return {
        "CSR, one of each": ((values, ends, columns), "csr", dense, 1),
        "CSR, one for all": ((values[0], ends, columns[0]), "csr", of_one, 1),
        "CSR, one pattern": ((values, ends, columns[0]), "csr", one_pattern, 3),
        "CSR, offsets of each": ((values, np.tile(ends, (3, 1)), columns), "csr", dense, 3),
        "CSR, columns further apart": ((values, ends, apart), "csr", dense, 3),
        "COO, one of each": ((values, rows, columns), "coo", dense, 3),
        "COO, one for all": ((values[0], rows[0], columns[0]), "coo", of_one, 1),
        "COO, one pattern": ((values, rows[0], columns[0]), "coo", one_pattern, 3),
        "COO, rows for all": ((values, rows[0], columns), "coo", dense, 3),
    }


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("name", batches(np.random.default_rng(0)))
def test_a_batch_is_one_call_where_the_library_has_words_for_it(name, by_rows, executor, rng):
    parts, kind, dense, calls = batches(rng)[name]
    values, rows, columns = map(DEV.array, parts)
    columns = columns[:, :10] if columns.ndim > 1 else columns
    b = rng.standard_normal((3, 6, 4))
    right = DEV.array(b) if by_rows else DEV.array(np.ascontiguousarray(b.swapaxes(1, 2))).mT
    form = dp.SparseForm(kind, (5, 6))
    request = dp.BatchedSpmmRequest(values, rows, columns, form, right, alpha=2, library="cusparse")
    plan, found = made(request, executor)
    np.testing.assert_allclose(found, 2 * dense @ b)
    assert plan.capture_safe
    assert executor.library.called.count("cusparseSpMM") == calls
    np.testing.assert_allclose(dp.run(request).numpy(), 2 * dense @ b)


@pytest.mark.parametrize("name", ["CSR, one of each", "CSR, one for all", "COO, one for all", "COO, one of each"])
def test_with_one_b_for_all_there_is_a_call_for_each(name, executor, rng):
    """The library does not document a stride of 0."""
    (values, rows, columns), kind, dense, _ = batches(rng)[name]
    b = rng.standard_normal((6, 4))
    right = DEV.array(b).strided((3, 6, 4), (0, 4, 1))
    parts = map(DEV.array, (values, rows, columns))
    request = dp.BatchedSpmmRequest(*parts, dp.SparseForm(kind, (5, 6)), right, library="cusparse")
    _, found = made(request, executor)
    np.testing.assert_allclose(found, np.broadcast_to(dense @ b, (3, 5, 4)))
    assert executor.library.called.count("cusparseSpMM") == 3


@pytest.mark.parametrize("kind", ["csr", "coo"])
@pytest.mark.parametrize("trans", ["t", "c"])
def test_of_transposed_matrices_there_is_a_call_for_each(trans, kind, executor, rng):
    dense, values, ends, columns = stacked(rng)
    rows = ends if kind == "csr" else np.tile(ROWS_OF_COO, (3, 1))
    b = rng.standard_normal((3, 5, 4))
    parts = map(DEV.array, (values, rows, columns))
    request = dp.BatchedSpmmRequest(*parts, dp.SparseForm(kind, (5, 6)), DEV.array(b), trans=trans)
    _, found = made(request, executor)
    np.testing.assert_allclose(found, dense.swapaxes(1, 2) @ b)
    assert executor.library.called.count("cusparseSpMM") == 3


def test_more_matrices_than_a_call_takes_have_a_call_for_each(executor, monkeypatch, rng):
    from dispatch.ops.sparse import cusparse_batched

    monkeypatch.setattr(cusparse_batched, "MAX_BATCHES", 2)
    dense, *parts = stacked(rng)
    b = rng.standard_normal((3, 6, 4))
    form = dp.SparseForm("csr", (5, 6))
    request = dp.BatchedSpmmRequest(*map(DEV.array, parts), form, DEV.array(b), library="cusparse")
    np.testing.assert_allclose(made(request, executor)[1], dense @ b)
    assert executor.library.called.count("cusparseSpMM") == 3


def test_matrices_that_lie_backwards_have_a_call_for_each(executor, rng):
    dense, values, ends, columns = stacked(rng)
    b = rng.standard_normal((3, 6, 4))
    backwards = (DEV.array(values[::-1].copy())[::-1], DEV.array(ends), DEV.array(columns[::-1].copy())[::-1])
    request = dp.BatchedSpmmRequest(*backwards, dp.SparseForm("csr", (5, 6)), DEV.array(b), library="cusparse")
    np.testing.assert_allclose(made(request, executor)[1], dense @ b)
    assert executor.library.called.count("cusparseSpMM") == 3


@pytest.mark.parametrize("trans", ["n", "t"])
def test_of_csc_there_is_a_call_for_each(trans, executor, rng):
    dense, values, ends, rows = stacked(rng)  # by columns
    b = rng.standard_normal((3, 5 if trans == "n" else 6, 4))
    form = dp.SparseForm("csc", (6, 5))
    for number, parts in enumerate(((values, rows, ends), (values[0], rows[0], ends))):
        given = (*map(DEV.array, parts), form, DEV.array(b))
        request = dp.BatchedSpmmRequest(*given, trans=trans, library="cusparse")
        exact = dense if number == 0 else np.tile(dense[:1], (3, 1, 1))
        exact = exact.swapaxes(1, 2) if trans == "n" else exact
        np.testing.assert_allclose(made(request, executor)[1], exact @ b)
        np.testing.assert_allclose(dp.run(request).numpy(), exact @ b)
        assert executor.library.called.count("cusparseSpMM") == 3 * (1 + number)
        own = request.replace(library=None)  # which has the rows of its transpose one behind another
        assert select(own, Arch(90)).library == ("cusparse" if trans == "n" else "own")
        np.testing.assert_allclose(dp.run(own).numpy(), exact @ b)


@pytest.mark.parametrize("shared", [(), ("rows",), ("rows", "columns"), ("values", "rows", "columns")])
def test_of_blocks_cusparse_is_called_for_each(shared, executor, rng):
    columns = np.sort(np.argsort(rng.random((3, 2, 3)), axis=2)[:, :, :2], axis=2).reshape(3, 4).astype("i4")
    parts = {"values": rng.standard_normal((3, 4, 2, 2)), "rows": np.tile(np.arange(0, 5, 2, "i4"), (3, 1))}
    parts["columns"] = columns
    each = {
        name: np.tile(part[:1], (3, *[1] * (part.ndim - 1))) if name in shared else part for name, part in parts.items()
    }
    dense = np.stack(
        [
            sp.bsr_array(tuple(each[name][i] for name in ("values", "columns", "rows")), (4, 6)).toarray()
            for i in range(3)
        ]
    )
    given = [DEV.array(parts[name][0] if name in shared else parts[name]) for name in ("values", "rows", "columns")]
    b, c = rng.standard_normal((3, 6, 4)), rng.standard_normal((3, 4, 4))
    form = dp.SparseForm("bsr", (4, 6), 0, (2, 2))
    request = dp.BatchedSpmmRequest(*given, form, DEV.array(b), c=DEV.array(c), beta=2, library="cusparse")
    np.testing.assert_allclose(made(request, executor)[1], dense @ b + 2 * c)
    np.testing.assert_allclose(dp.run(request).numpy(), dense @ b + 2 * c)
    assert executor.library.called.count("cusparseSpMM") == 3


@pytest.mark.parametrize("layout", ["rows", "columns", "apart"])
@pytest.mark.parametrize("added", [False, True])
def test_sums_of_16_bits_are_rounded_once(added, layout, executor):
    """2,048 and 1 is 2,048 in f16: what is rounded at each addition does not get beyond it."""
    count, form = 4096, dp.SparseForm("csr", (4096, 1))
    a = DEV.array(np.ones(count, "f2")), DEV.array(np.arange(count + 1, dtype="i4")), DEV.zeros((count,), "i32")
    b = DEV.array(np.ones((3, count, 2), "f2"))
    memory = DEV.array(np.full((3, 2, 2, 2) if layout == "apart" else (3, 1, 2), 7, "f2"))
    out = memory[:, 0, :1] if layout == "apart" else memory
    out = DEV.array(np.full((3, 2, 1), 7, "f2")).mT if layout == "columns" else out
    more = {"c": DEV.array(np.full((3, 1, 2), 8, "f2")), "beta": 2} if added else {}
    request = dp.BatchedSpmmRequest(*a, form, b, out=out, trans="t", **more)
    assert not request.same_bits
    plan, found = made(request, executor)
    np.testing.assert_array_equal(found, np.full((3, 1, 2), 4096 + 16 * added))
    assert plan.capture_safe
    if layout == "apart":
        assert (memory.numpy()[:, 1] == 7).all()
    wide = request.replace(out=DEV.zeros((3, 1, 2), "f32"), c=None, beta=0)
    np.testing.assert_array_equal(made(wide, executor)[1], np.full((3, 1, 2), 4096))


def test_of_coo_the_algorithm_takes_batches_and_the_default_is_one_that_does(executor, rng):
    dense, values, _, columns = stacked(rng)
    parts = (DEV.array(values), DEV.array(np.tile(ROWS_OF_COO, (3, 1))), DEV.array(columns))
    b = rng.standard_normal((3, 6, 4))
    given = (*parts, dp.SparseForm("coo", (5, 6)), DEV.array(b))
    for algorithm in ("default", "coo_alg1", "coo_alg2", "coo_alg4"):
        request = dp.BatchedSpmmRequest(*given, algorithm=algorithm)
        np.testing.assert_allclose(made(request, executor)[1], dense @ b)
    with pytest.raises(
        NoRow, match="needs algorithm default, coo_alg1, coo_alg2 or coo_alg4 for a batch, has coo_alg3"
    ):
        dp.spmm_batched(*given, algorithm="coo_alg3")
    from dispatch.ops.sparse.tune import suited

    assert [one.name for one in suited(request)] == ["DEFAULT", "COO_ALG1", "COO_ALG2", "COO_ALG4"]


def test_the_library_itself_takes_a_batch_of_coo_and_keeps_it_at_other_addresses():
    """Descriptors are the host's memory alone: the library makes them where no GPU is."""
    import ctypes

    from cudabind import _load
    from cudabind.errors import LibraryNotFound
    from cudabind.sys import cusparse
    from dispatch.libraries.cusparse import descriptors

    try:
        _load.version("cusparse")
    except LibraryNotFound as error:
        pytest.skip(str(error))
    for kind, apart in ((3, (0, 6)), (3, (0, 0)), (1, (0, 6)), (1, (5, 6)), (1, (0, 0))):
        one = descriptors.SparseMatrix(descriptors.SparseSpec(kind, (4, 8), 6, 0, (1, 1), 0, 4, 4, 0, 1, 2), 256)
        one.set_batch(3, *apart)
        one.set_addresses((512, 1024, 2048))
        count = ctypes.c_int()
        cusparse.cusparseSpMatGetStridedBatch(one.c, ctypes.byref(count))
        assert count.value == 3


# -- the functions --------------------------------------------------------------------------------------------------------
def test_one_matrix_multiplies_a_batch_in_either_format(rng):
    dense, values, ends, columns = stacked(rng)
    b, left = rng.standard_normal((3, 6, 4)), rng.standard_normal((3, 2, 5))
    one = S.csr(DEV.array(values[0]), DEV.array(ends), DEV.array(columns[0]), (5, 6))
    for a in (one, S.tocoo(one)):
        np.testing.assert_allclose(S.spmm(a, DEV.array(b)).numpy(), dense[0] @ b)
        np.testing.assert_allclose((a @ DEV.array(b)).numpy(), dense[0] @ b)
        np.testing.assert_allclose((DEV.array(left) @ a).numpy(), left @ dense[0])


@pytest.mark.parametrize("kind", ["csr", "csc", "coo"])
def test_a_batch_of_dense_products_at_the_places_of_a_matrix(kind, rng):
    matrix = sp.random_array((8, 12), density=0.3, rng=rng, format="csr").asformat(kind)
    c = S.sparse_tensor(matrix, device=DEV)
    row, column = matrix.tocoo().coords if kind != "csc" else matrix.tocsc().tocoo().coords
    u, v = rng.standard_normal((4, 8, 3)), rng.standard_normal((4, 3, 12))
    at = (u @ v)[:, row, column]
    np.testing.assert_allclose(S.sddmm(c, DEV.array(u), DEV.array(v)).numpy(), at)
    np.testing.assert_allclose(S.sddmm(c, DEV.array(u[0]), DEV.array(v)).numpy(), (u[0] @ v)[:, row, column])
    np.testing.assert_allclose(S.sddmm(c, DEV.array(u), DEV.array(v[0])).numpy(), (u @ v[0])[:, row, column])
    # C's own elements are for all; others are for each, and may be the result
    np.testing.assert_allclose(S.sddmm(c, DEV.array(u), DEV.array(v), beta=2).numpy(), at + 2 * matrix.data)
    own = rng.standard_normal((4, matrix.nnz))
    held = DEV.array(own)
    found = S.sddmm(c, DEV.array(u), DEV.array(v), values=held, alpha=-1, beta=0.5, out=held)
    assert found is held
    np.testing.assert_allclose(held.numpy(), 0.5 * own - at)
    one = S.sddmm(c, DEV.array(u[0]), DEV.array(v[0]), values=DEV.array(own[0]), beta=1)
    np.testing.assert_allclose(one.values.numpy(), at[0] + own[0])


def test_scores_at_the_places_of_a_mask_multiply_a_batch(rng):
    """As attention does it: what `sddmm_batched` gives over one pattern is what `spmm_batched` takes over it."""
    mask = sp.random_array((8, 8), density=0.4, rng=rng, format="csr")
    c = S.sparse_tensor(mask, device=DEV)
    q, k, v = (rng.standard_normal((4, 8, 5)) for _ in range(3))
    scores = S.sddmm(c, DEV.array(q), DEV.array(k).mT)
    found = dp.spmm_batched(scores, c.rows, c.columns, c.form, DEV.array(v))
    np.testing.assert_allclose(found.numpy(), (q @ k.swapaxes(1, 2) * (mask.toarray() != 0)) @ v)


# -- what is refused --------------------------------------------------------------------------------------------------
HOST = HostDevice(generation=1 << 23)  # of its own: another file's test may close the host


def refused():
    _, *parts = stacked(np.random.default_rng(0))
    values, rows, columns = map(HOST.array, parts)
    form, b = dp.SparseForm("csr", (5, 6)), HOST.zeros((3, 6, 4), "f64")
    left, right = HOST.zeros((3, 5, 4), "f64"), HOST.zeros((3, 4, 6), "f64")
    mm, dd, c = dp.spmm_batched, dp.sddmm_batched, (values, rows, columns, form)
    return {
        "one B": (lambda: mm(*c, b[0]), r"b: got .*; expected \(batch, n, k\) of at least one matrix. Hint: for one matrix use spmm"),
        "fewer B": (lambda: mm(*c, b[:2]), "values: got .*; expected a batch of 2, like b, or one matrix for all"),
        "B of another size": (lambda: mm(*c, b[:, :5]), r"b: got .*f64\[3, 6, …\], because op\(A\) is \[5, 6\]"),
        "columns for each, values for all": (lambda: mm(values[0], rows, columns, form, b), r"columns: got i32\[3, 10\]; expected one for all matrices, like values, or values \(batch, nnz\)"),
        "offsets for each, values for all": (lambda: mm(values[0], HOST.zeros((3, 6), "i32"), columns[0], form, b), r"rows: got i32\[3, 6\]; expected one for all matrices, like values"),
        "offsets for the rows of CSC": (lambda: mm(*c[:3], form._replace(format="csc"), b), r"rows: got i32\[6\]; expected i32\[10\] of CSC\[5, 6\]"),
        "elements for blocks": (lambda: mm(*c[:3], form._replace(format="bsr", shape=(10, 6), block=(2, 2)), HOST.zeros((3, 6, 4), "f64")), r"values: got f64\[3, 10\]; expected a batch of 3, like b, or one matrix for all"),
        "offsets for the rows of COO": (lambda: mm(*c[:3], form._replace(format="coo"), b), r"rows: got i32\[6\]; expected i32\[10\] of COO\[5, 6\]"),
        "too few offsets": (lambda: mm(values, rows[:4], columns, form, b), r"rows: got .*i32\[6\]"),
        "an algorithm of CSR for COO": (lambda: mm(values[0], HOST.zeros((10,), "i32"), columns[0], form._replace(format="coo"), b, algorithm="csr_alg1"), "algorithm: got CSR_ALG1; expected DEFAULT, or an algorithm for COO"),
        "no batch at all": (lambda: dd(*c, left[0], right[0]), r"b: got f64\[4, 6\]; expected \(batch, k, n\) of at least one matrix, or such an a of \(batch, m, k\). Hint: for one matrix of each operand use sddmm"),
        "a batch of none": (lambda: dd(*c, left[:0], right), r"a: got f64\[0, 5, 4\]; expected \(batch, k, n\) of at least one"),
        "A and B of two batches": (lambda: dd(*c, left, right[:2]), r"b: got f64\[2, 4, 6\]; expected f64\[3, 4, 6\], or \[4, 6\] for all, because C is \[5, 6\] and a is \[3, 5, 4\]"),
        "A of another size": (lambda: dd(*c, left[:, :4], right), r"a: got f64\[3, 4, 4\].*; expected f64\[3, 5, …\], or \[5, …\] for all, because C is \[5, 6\]"),
        "B of other terms": (lambda: dd(*c, left, right[:, :3]), r"b: got f64\[3, 3, 6\].*; expected f64\[3, 4, 6\]"),
        "a vector for A": (lambda: dd(*c, left[0, 0], right), r"a: got f64\[4\]; expected f64\[3, 5, …\], or"),
        "elements of another batch": (lambda: dd(values[:2], rows, columns, form, left, right), r"values: got f64\[2, 10\]; expected a batch of 3, like a, or one matrix for all"),
        "a pattern of another batch": (lambda: dd(values, rows, columns[:2], form, left, right), r"columns: got i32\[2, 10\]; expected a batch of 3, like a, or one matrix for all"),
        "more elements than places": (lambda: dd(HOST.zeros((3, 11), "f64"), rows, columns, form, left, right), r"rows|columns: got i32\[10\]; expected i32\[11\] of CSR"),
        "A of another dtype": (lambda: dd(*c, left.astype("f32"), right), r"a: got f32\[3, 5, 4\]; expected f64, as values is"),
        "places of blocks": (lambda: dd(*c[:3], form._replace(format="bsr", shape=(5, 6)), left, right), r"form\.format: got BSR; expected CSR, CSC or COO. Hint: dispatch\.sparse\.tocsr converts BSR"),
        "a result of another batch": (lambda: dd(*c, left, right, out=HOST.zeros((2, 10), "f64")), r"out: got f64\[2, 10\]; expected f64\[3, 10\]"),
        "a result among what is read": (lambda: dd(values, rows, columns, form, left, right, beta=1, out=values[::-1]), "out: got memory that overlaps values.*values may be out itself"),
        "a result with gaps": (lambda: dd(*c, left, right, out=HOST.zeros((3, 20), "f64")[:, ::2]), "needs out with the elements of each matrix contiguous"),
        "a complex factor": (lambda: dd(*c, left, right, alpha=1j), "alpha: got 1j; expected a real number"),
        "an index beyond the matrix": (lambda: dd(values, rows, HOST.array(np.full((3, 10), 6, "i4")), form, left, right), "columns: got 10 indices beyond the matrix"),
    }  # fmt: skip


@pytest.mark.parametrize("what", refused())
def test_batches_that_do_not_fit_are_refused_by_the_name_of_what_is_wrong(what):
    call, words = refused()[what]
    with pytest.raises((BadRequest, NoRow), match=words):
        call()
