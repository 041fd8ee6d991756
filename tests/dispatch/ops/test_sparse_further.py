"""Sliced and blocked ELL, sorting, pruning, five diagonals: on the host and by plans over a stand-in; what is refused."""

# ruff: noqa: E501 - tables of errors

import gc
import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, BadType, NoRow
from dispatch.keys import HOST, Arch
from dispatch.ops.sparse.cases import cases
from dispatch.row_check import check_row
from dispatch.table.select import select

spec = importlib.util.spec_from_file_location(
    "further_stand_in", Path(__file__).parents[1] / "cusparse_further_stand_in.py"
)
stand_in = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_in)

S = dp.sparse
ROWS = [
    row
    for op in ("sell_mv", "blocked_ell_mm", "sparse_sort", "prune_nnz", "prune_to_csr", "gpsv", "ilu0", "ic0")
    for row in dp.TABLE.of(op)
]
DEV = None


@pytest.fixture(autouse=True)
def dev():
    """The host as it is now: a test of another file may have closed the one before."""
    global DEV
    DEV = dp.device("host")


EVERY = pytest.mark.parametrize(
    "every", [pytest.param(6, id="sample"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)]
)


@EVERY
@pytest.mark.parametrize("row", [row for row in ROWS if row.on(HOST)], ids=lambda row: row.name)
def test_a_row_of_the_host_passes_its_cases(row, every, rng):
    for case in cases(row)[ROWS.index(row) % every :: every]:
        assert not check_row(row, case, DEV, rng), "cases are those that the row takes"


@EVERY
@pytest.mark.parametrize("row", [row for row in ROWS if not row.on(HOST)], ids=lambda row: row.name)
def test_a_plan_says_what_the_library_is_to_know(row, every, monkeypatch, rng):
    executor = stand_in.executor_of(monkeypatch)
    for case in cases(row)[ROWS.index(row) % every :: every]:
        check = case.check(DEV, rng)
        plan = row.call(check.request, executor, row)
        for _ in range(2):  # the second over memory that the first has left
            check.renew()
            outputs = DEV.executor().outputs(check.request)
            plan.enqueue(check.request.arguments(outputs))
            check.verify(check.request.result(outputs))
            if not check.request.repeatable:
                break
        executor.library.check_capture(plan)
    plan = None
    gc.collect()
    assert not executor.library.alive, "descriptors are given back"


def drawn(rng, m, n, share=0.3):
    return rng.standard_normal((m, n)) * (rng.random((m, n)) < share)


def test_a_plan_follows_the_memory_of_each_run(monkeypatch, rng):
    executor = stand_in.executor_of(monkeypatch)
    dense = [drawn(rng, 8, 6, 1.0) for _ in range(2)]
    for make, right in (
        (S.tosell, rng.standard_normal(6)),
        (lambda a: S.toblocked_ell(a, block=2), rng.standard_normal((6, 4))),
    ):
        made = [make(DEV.array(a)) for a in dense]
        if right.ndim == 1:
            sizes = {"m": 8, "slice_size": 32, "nnz": 48}
            requests = [dp.SellMvRequest(*one[:3], DEV.array(right), **sizes) for one in made]
        else:
            requests = [dp.BlockedEllMmRequest(*one[:2], DEV.array(right)) for one in made]
        row = select(requests[0], Arch(90))
        plan = row.call(requests[0], executor, row)
        for number in (0, 1, 0):
            outputs = DEV.executor().outputs(requests[number])
            plan.enqueue(requests[number].arguments(outputs))
            np.testing.assert_allclose(outputs["out"].numpy(), dense[number] @ right)


def test_the_layouts_are_nvidia_s_own_examples():
    """The matrices of `spmv_sell` and `dense2sparse_blockedell` among NVIDIA's samples."""
    dense = np.array([[1, 0, 2, 3], [0, 4, 0, 0], [5, 0, 6, 7], [0, 8, 0, 9.0]])
    a = S.tosell(DEV.array(dense), slice_size=2)
    np.testing.assert_array_equal(a.offsets.numpy(), [0, 6, 12])
    np.testing.assert_array_equal(a.columns.numpy(), [0, 1, 2, -1, 3, -1, 0, 1, 2, 3, 3, -1])
    np.testing.assert_array_equal(a.values.numpy(), [1, 4, 2, 0, 3, 0, 5, 8, 6, 9, 7, 0])
    assert a.nnz == 9
    wide = np.array([[0, 0, 1, 2, 0, 0], [0, 0, 3, 4, 0, 0], [5, 6, 0, 0, 7, 8], [9, 10, 0, 0, 11, 12.0]])
    b = S.toblocked_ell(DEV.array(wide), block=2)
    np.testing.assert_array_equal(b.columns.numpy(), [[1, -1], [0, 2]])
    np.testing.assert_array_equal(b.values.numpy(), [[1, 2, 0, 0], [3, 4, 0, 0], [5, 6, 7, 8], [9, 10, 11, 12]])


@pytest.mark.parametrize("kind", ["dense", "scipy", "sparse tensor"])
def test_matrices_of_any_kind_become_ell_and_multiply(kind, rng):
    sp = pytest.importorskip("scipy.sparse")
    dense = drawn(rng, 48, 32)
    matrix = sp.csr_array(dense)
    given = {"dense": DEV.array(dense), "scipy": matrix, "sparse tensor": S.sparse_tensor(matrix, device="host")}[kind]
    x, b = rng.standard_normal(32), rng.standard_normal((32, 5))
    for size in (1, 7, 32, 100):
        np.testing.assert_allclose((S.tosell(given, slice_size=size) @ DEV.array(x)).numpy(), dense @ x)
    np.testing.assert_allclose((S.toblocked_ell(given) @ DEV.array(b)).numpy(), dense @ b)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")  # torch's, of its sparse tensors
@pytest.mark.parametrize("kind", ["numpy", "lists", "torch", "torch sparse", "torch csr"])
def test_matrices_of_other_libraries_become_ell_where_they_are(kind, rng):
    dense = drawn(rng, 32, 16)
    dense[0, 0] = 1
    given, x, b = dense, rng.standard_normal(16), rng.standard_normal((16, 5))
    if kind == "lists":
        given = dense.tolist()
    elif kind != "numpy":
        torch = pytest.importorskip("torch")
        given, x, b = map(torch.from_numpy, (dense, x, b))
        given = {"torch": given, "torch sparse": given.to_sparse(), "torch csr": given.to_sparse_csr()}[kind]
    sliced, blocked = S.tosell(given), S.toblocked_ell(given)
    assert sliced.values.device is blocked.values.device is DEV
    np.testing.assert_allclose(np.asarray(sliced @ x), dense @ np.asarray(x))
    np.testing.assert_allclose(np.asarray(blocked @ b), dense @ np.asarray(b))
    with pytest.raises(BadType, match="matrix: got a str"):
        S.tosell("eye")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_padding_stands_for_is_not_read(bad):
    """NaN or infinity of x reaches the rows that have an element there, and no other."""
    dense = np.array([[1.0, 2], [0, 0], [3, 0]])
    for size in (1, 2, 32):
        found = S.tosell(DEV.array(dense), slice_size=size) @ DEV.array([1, bad])
        np.testing.assert_array_equal(found.numpy(), [bad, 0, 3])
    blocks = np.zeros((6, 4))
    blocks[:2], blocks[4:, :2] = 1, 3  # two blocks, none, and the first alone
    b = np.ones((4, 3))
    b[2:] = bad
    found = S.toblocked_ell(DEV.array(blocks), block=2) @ DEV.array(b)
    np.testing.assert_array_equal(found.numpy(), np.repeat([[bad], [0], [6]], 2, 0) * np.ones(3))


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_a_dense_matrix_is_pruned_by_a_threshold_or_a_share(dtype, rng):
    dense = rng.standard_normal((30, 20)).astype(dtype)
    a = DEV.array(dense)
    found = S.prune(a, threshold=0.7).validate()
    np.testing.assert_array_equal(found.todense().numpy(), np.where(np.abs(dense) > 0.7, dense, 0))
    holed = dense.copy()
    holed[3, 4] = np.nan  # its magnitude is above no threshold
    found = S.prune(DEV.array(holed), threshold=0.7)
    np.testing.assert_array_equal(found.todense().numpy(), np.where(np.abs(holed) > 0.7, holed, 0))
    for share in (0.1, 25, 50, 99.9, 100):
        found = S.prune(a, percentage=share).validate()
        assert found.nnz == 600 - np.ceil(6 * share)
        kept = np.sort(np.abs(dense), axis=None)[600 - found.nnz :]
        np.testing.assert_array_equal(np.sort(np.abs(found.values.numpy())), kept)
    with pytest.raises(BadRequest, match=r"nnz: got 3; expected .* the number that prune_nnz counts"):
        S.prune(a, threshold=0.7, nnz=3)
    for wrong in ({}, {"threshold": 1, "percentage": 1}, {"threshold": -1.0}, {"percentage": 101}):
        with pytest.raises(BadRequest, match=r"threshold: got|percentage: got"):
            S.prune(a, **wrong)


@pytest.mark.parametrize("kind", ["coo", "csr"])
def test_a_matrix_is_sound_once_it_is_sorted(kind, rng):
    row, column = np.nonzero(rng.random((30, 20)) < 0.2)
    values = rng.standard_normal(len(row))
    dense = np.zeros((30, 20))
    dense[row, column] = values
    order = rng.permutation(len(row))
    if kind == "csr":
        order = order[np.argsort(row[order], kind="stable")]
        rows = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=30))])
    else:
        rows = row[order]
    parts = (DEV.array(part) for part in (values[order], rows.astype("i4"), column[order].astype("i4")))
    a = getattr(S, kind)(*parts, (30, 20))
    with pytest.raises(BadRequest, match="unsorted elements"):
        a.validate()
    found = S.sort(a).validate()
    np.testing.assert_array_equal(found.todense().numpy(), dense)
    np.testing.assert_array_equal(found.values.numpy(), values)
    with pytest.raises(BadRequest, match=r"form\.format: got CSC; expected COO or CSR"):
        S.sort(S.csr(*found.parts[:3], (30, 20)).T if kind == "csr" else S.tocsc(found))


def test_five_diagonals_and_what_is_beside_them(rng):
    scipy_linalg = pytest.importorskip("scipy.linalg")
    n = 12
    parts = {name: rng.standard_normal((n, 3)) for name in ("ds", "dl", "d", "du", "dw")}
    parts["d"] += 9
    for name, outside in (("ds", [0, 1]), ("dl", [0]), ("du", [-1]), ("dw", [-1, -2])):
        parts[name][outside] = 0
    b = rng.standard_normal((n, 3))
    x = dp.gpsv(*map(DEV.array, parts.values()), DEV.array(b)).numpy()
    for j in range(3):
        low = {name: parts[name][:, j] for name in parts}
        a = np.diag(low["d"]) + np.diag(low["dl"][1:], -1) + np.diag(low["ds"][2:], -2)
        a += np.diag(low["du"][:-1], 1) + np.diag(low["dw"][:-2], 2)
        np.testing.assert_allclose(x[:, j], scipy_linalg.solve(a, b[:, j]))
    parts["dw"][-1] = 1
    with pytest.raises(BadRequest, match="dw: got an element outside of the matrix; expected 0 in its last 2"):
        dp.gpsv(*map(DEV.array, parts.values()), DEV.array(b))
    with pytest.raises(BadRequest, match="at least 3 unknowns"):
        dp.gpsv(*[DEV.zeros((2, 3), "f32")] * 6)


def test_three_unknowns_leave_what_is_behind_them(monkeypatch):
    """The library writes a row too much."""
    executor = stand_in.executor_of(monkeypatch)
    parts = {name: np.zeros((3, 4)) for name in ("ds", "dl", "d", "du", "dw")}
    parts["d"] += 2
    memory = DEV.array(np.full((5, 4), 7.0))
    x = memory[:3]
    request = dp.GpsvRequest(*map(DEV.array, parts.values()), x, out=x)
    row = select(request, Arch(90))
    row.call(request, executor, row).enqueue(request.arguments({"out": x}))
    np.testing.assert_array_equal(memory.numpy(), [[3.5] * 4] * 3 + [[7] * 4] * 2)


def sell():
    return S.tosell(DEV.array(np.eye(6)), slice_size=4)


BAD = {
    "offsets of other slices": (lambda: dp.sell_mv(*sell()[:3], DEV.zeros((6,), "f64"), m=9, slice_size=4, nnz=6), r"offsets: got i32\[3\]; expected i32 or i64 \[4\]"),
    "a column too far": (lambda: dp.sell_mv(sell().values, sell().offsets, DEV.array(sell().columns.numpy() + 5), DEV.zeros((6,), "f64"), m=6, slice_size=4, nnz=6), "columns: got .* beyond the matrix; expected from 0 to 5, or -1"),
    "offsets that fall": (lambda: dp.sell_mv(sell().values, DEV.array(np.array([0, 16, 8], "i4")), sell().columns, DEV.zeros((6,), "f64"), m=6, slice_size=4, nnz=6), "offsets: got decreasing ends"),
    "elements behind the end": (lambda: dp.sell_mv(sell().values, sell().offsets, DEV.zeros((8,), "i32"), DEV.zeros((6,), "f64"), m=5, slice_size=4, nnz=5), "columns: got elements after the last row"),
    "more elements than there are": (lambda: dp.sell_mv(*sell()[:3], DEV.zeros((6,), "f64"), m=6, slice_size=4, nnz=9), "nnz: got 9"),
    "a y of another shape": (lambda: dp.sell_mv(*sell()[:3], DEV.zeros((6,), "f64"), m=6, slice_size=4, nnz=6, y=DEV.zeros((5,), "f64")), r"y: got f64\[5\]; expected f64\[6\]"),
    "indices of f32": (lambda: dp.sell_mv(sell().values, sell().offsets, DEV.zeros((8,), "f32"), DEV.zeros((6,), "f64"), m=6, slice_size=4, nnz=6), "columns: got f32"),
    "blocks that are not square": (lambda: dp.blocked_ell_mm(DEV.zeros((8, 4), "f32"), DEV.zeros((4, 1), "i32"), DEV.zeros((8, 2), "f32")), "columns: got .* expected square blocks"),
    "b of no whole blocks": (lambda: dp.blocked_ell_mm(DEV.zeros((8, 4), "f32"), DEV.zeros((4, 2), "i32"), DEV.zeros((7, 2), "f32")), "b: got f32.* expected whole blocks of 2 rows"),
    "a matrix of no whole blocks": (lambda: S.toblocked_ell(DEV.zeros((20, 16), "f32")), r"matrix: got shape \(20, 16\); expected whole blocks of 16"),
    "a vector for a matrix": (lambda: S.tosell(DEV.zeros((4,), "f32")), "expected a matrix, with two axes"),
    "a short x": (lambda: sell() @ DEV.zeros((5,), "f64"), "expected a vector of 6 elements"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_does_not_fit_is_refused_by_its_name(what):
    call, said = BAD[what]
    with pytest.raises(BadRequest, match=said):
        call()


def test_blocks_of_no_power_of_2_are_no_row_s():
    with pytest.raises(NoRow, match="needs blocks of a power of 2, has 3"):
        dp.blocked_ell_mm(DEV.zeros((6, 3), "f32"), DEV.zeros((2, 1), "i32"), DEV.zeros((6, 2), "f32"))
    for arch in (HOST, Arch(90)):
        wide = dp.BlockedEllMmRequest(DEV.zeros((8, 4), "f32"), DEV.zeros((4, 2), "i64"), DEV.zeros((8, 4), "f32"))
        with pytest.raises(NoRow, match="needs columns of i32, has i64"):
            select(wide, arch)
    empty = S.tosell(DEV.zeros((4, 4), "f32"))
    with pytest.raises(NoRow, match="needs a matrix with elements if an operand is added"):
        dp.sell_mv(*empty[:3], DEV.zeros((4,), "f32"), m=4, slice_size=32, nnz=0, y=DEV.zeros((4,), "f32"))
