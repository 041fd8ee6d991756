"""Iterations with block Jacobi: their kernels on the CPU, by themselves and in a plan's graph, and the host's rows."""

import gc
import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, LinAlgError
from dispatch.keys import Arch
from dispatch.libraries.nvrtc.compiled import compiled
from dispatch.ops.sparse.cases_krylov import KRYLOV
from dispatch.ops.sparse.krylov import BREAKDOWN, NOT_FINITE
from dispatch.ops.sparse.krylov_kernels import BLOCKED, SOURCES
from dispatch.ops.sparse.own_krylov import options
from dispatch.table.select import select

sp = pytest.importorskip("scipy.sparse")
linalg = pytest.importorskip("scipy.sparse.linalg")


def module_at(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HERE = Path(__file__)
krylov_on_cpu = module_at(HERE.with_name("krylov_on_cpu.py"))
cusparse = module_at(HERE.parents[1] / "cusparse_stand_in.py")
graphs = module_at(HERE.parents[1] / "while_graph_stand_in.py")
DEV = None
S = dp.sparse


@pytest.fixture(autouse=True)
def dev():
    """The host as it is now: a test of another file may have closed the one before."""
    global DEV
    DEV = dp.device("host")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return krylov_on_cpu.Iterations(tmp_path_factory.mktemp("blocks"))


def coupled(op, n, size, rng, is_complex=False):
    """Points with several unknowns each, coupled strongly in a point and weakly from one to another.

    The eigenvalues of a point are far apart, and its diagonal tells little of them.
    """
    count = -(-n // size)
    part = rng.standard_normal((count, size, size)) + (
        1j * rng.standard_normal((count, size, size)) if is_complex else 0
    )
    turned, _ = np.linalg.qr(part)
    values = np.geomspace(1, 1e4, size) * rng.uniform(0.5, 2, (count, 1))
    if op == "minres":
        values[:, ::2] *= -1
    blocks = (turned * values[:, None, :]) @ (turned.conj().transpose(0, 2, 1))
    if op in ("bicgstab", "gmres"):
        blocks = blocks @ np.linalg.qr(part + 3 * turned)[0]
    line = sp.diags_array([-0.1, 0.2, -0.1], offsets=[-1, 0, 1], shape=(count, count))
    whole = sp.block_diag(list(blocks), format="csr") + sp.kron(line, sp.eye_array(size))
    return sp.csr_array(sp.csr_array(whole)[:n, :n])


def solved(on_cpu, request):
    """What the kernels give, and the host's row in the same words."""
    return on_cpu.solve(request), tuple(one.numpy() for one in dp.run(request))


@pytest.mark.parametrize("dtype", ["f64", "c128"])
@pytest.mark.parametrize("size", [3, 8])
@pytest.mark.parametrize("op", KRYLOV)
def test_blocks_take_far_fewer_iterations_than_the_diagonal(op, size, dtype, on_cpu, rng):
    if op == "minres" and dtype == "c128":
        pytest.skip("minres is for real matrices")
    n = 118  # no multiple of either
    a = coupled(op, n, size, rng, dtype == "c128")
    b = rng.standard_normal(n) + (1j * rng.standard_normal(n) if dtype == "c128" else 0)
    right = linalg.spsolve(a.tocsc(), b)
    matrix = S.sparse_tensor(a)
    blocks = S.block_jacobi(matrix, size, absolute=op == "minres")
    common = {"rtol": 1e-10, **({"restart": 30, "maxiter": 60} if op == "gmres" else {"maxiter": 3000})}
    counts = {}
    for how in ({"preconditioner": "jacobi"}, {"preconditioner": "block_jacobi", "M": blocks.inverses}):
        for x, info, iterations, _ in solved(on_cpu, KRYLOV[op](*matrix, DEV.array(b), **how, **common)):
            if how["preconditioner"] == "block_jacobi":
                assert int(info) == 0
                np.testing.assert_allclose(x, right, atol=1e-6 * np.abs(right).max())
            counts.setdefault(how["preconditioner"], []).append(int(iterations))
    assert max(counts["block_jacobi"]) < 0.3 * min(counts["jacobi"]), counts
    assert abs(np.diff(counts["block_jacobi"])[0]) <= 2 + max(counts["block_jacobi"]) // 8, "as many as SciPy takes"


@pytest.mark.parametrize("op", KRYLOV)
def test_inverses_of_one_row_are_the_diagonal(op, on_cpu, rng):
    a = coupled(op, 40, 2, rng)
    b = DEV.array(rng.standard_normal(40))
    one = S.block_jacobi(a, 1, absolute=op == "minres").inverses
    ways = {"preconditioner": "jacobi"}, {"preconditioner": "block_jacobi", "M": one}
    found = [on_cpu.solve(KRYLOV[op](*S.sparse_tensor(a), b, maxiter=400, **how)) for how in ways]
    (x, info, count, _), (y, other_info, other_count, _) = found
    np.testing.assert_allclose(x, y, atol=1e-4 * np.abs(x).max())
    assert (info, abs(count - other_count) <= 1 + count // 20) == (other_info, True)


@pytest.mark.parametrize("op", KRYLOV)
def test_whole_inverses_end_it_at_once(op, on_cpu, rng):
    a = coupled(op, 30, 3, rng)
    b, x0 = rng.standard_normal(30), rng.standard_normal(30)
    blocks = S.block_jacobi(a, 30, absolute=op == "minres").inverses
    request = KRYLOV[op](
        *S.sparse_tensor(a), DEV.array(b), DEV.array(x0), M=blocks, preconditioner="block_jacobi", rtol=1e-8
    )
    for x, info, iterations, _ in solved(on_cpu, request):
        assert int(info) == 0
        assert int(iterations) <= (4 if op == "minres" else 2)  # of minres there are two eigenvalues, 1 and -1
        np.testing.assert_allclose(a @ x, b, atol=1e-6)


@pytest.mark.parametrize("op", KRYLOV)
def test_an_inverse_that_is_no_number_ends_it_with_a_status_of_its_own(op, on_cpu):
    dense = sp.block_diag([np.ones((3, 3)), 2 * np.eye(3), np.eye(2)]).toarray()
    blocks, info = dp.block_jacobi(*S.sparse_tensor(sp.csr_array(dense)), block_size=3)
    assert info.item() == 1
    request = KRYLOV[op](
        *S.sparse_tensor(sp.csr_array(dense + np.eye(8))),
        DEV.array(np.ones(8)),
        M=blocks,
        preconditioner="block_jacobi",
    )
    for x, status, *_ in solved(on_cpu, request):
        assert int(status) == NOT_FINITE
        assert np.isnan(x).all()


def test_minres_says_where_m_is_not_positive_definite_and_absolute_values_are(on_cpu, rng):
    a = coupled("minres", 64, 4, rng)
    b = DEV.array(rng.standard_normal(64))
    for absolute in (False, True):
        m = S.block_jacobi(a, 4, absolute=absolute)
        request = dp.MinresRequest(*S.sparse_tensor(a), b, M=m.inverses, preconditioner="block_jacobi", rtol=1e-9)
        for x, info, *_ in solved(on_cpu, request):
            assert int(info) == (0 if absolute else BREAKDOWN)
            if absolute:
                np.testing.assert_allclose(a @ x, b.numpy(), atol=1e-4)


def test_requests_with_blocks_say_what_they_lack():
    a, b = S.sparse_tensor(sp.eye_array(10, format="csr")), DEV.array(np.ones(10))
    for m, words in (
        (None, "M: got None; expected the inverses that the request block_jacobi returns"),
        (np.ones(10), r"M: got f64\[10\].*expected f64\[blocks, size, size\]"),
        (np.ones((2, 4, 4)), r"M: got f64\[2, 4, 4\].*as many blocks as 10 rows need"),
        (np.ones((4, 4, 4)), "M: got"),
        (np.ones((3, 4, 3)), "M: got"),
        (np.ones((1, 33, 33)), "M: got .*size 1 to 32"),
        (np.ones((3, 0, 0)), "M: got"),
        (np.ones((3, 4, 4), "f4"), "M: got f32"),
    ):
        with pytest.raises(BadRequest, match=words):
            dp.CgRequest(*a, b, M=None if m is None else DEV.array(m), preconditioner="block_jacobi")


def test_the_functions_of_sparse_take_blocks(rng):
    b = rng.standard_normal(24)
    for op in KRYLOV:
        function, a = getattr(S, op), coupled(op, 24, 4, rng)
        right, size = linalg.spsolve(a.tocsc(), b), np.abs(b).max()
        absolute = op == "minres"
        matrix = S.sparse_tensor(a)
        blocks = S.block_jacobi(matrix, 4, absolute=absolute)
        assert repr(blocks) == f"BlockJacobi(6 blocks of 4 rows{', absolute' if absolute else ''}, of {matrix!r})"
        assert blocks.shape == (24, 24)
        inverses = blocks.inverses.numpy().copy()
        bsr = a.tobsr((4, 4))
        bsr.sort_indices()
        given = [(a, blocks), (a.tocsc(), blocks), (a.tocoo(), blocks), (bsr, "block_jacobi"), (bsr, "BLOCK_JACOBI")]
        for whole, m in [*given, (a, DEV.array(inverses)), (a, np.asfortranarray(inverses))]:
            x = function(whole, DEV.array(b) if not isinstance(m, np.ndarray) else b, rtol=1e-11, M=m, check=True)
            np.testing.assert_allclose(np.asarray(x), right, atol=1e-6 * np.abs(right).max() + 1e-9 * size)


def test_the_functions_of_sparse_refuse_by_name():
    a, b = sp.csr_array(np.diag([1.0, 0, 2, 3])), DEV.array(np.ones(4))
    with pytest.raises(BadRequest, match=r"block_size: got None; expected the rows of a block.*block_jacobi\(A, 4\)"):
        S.cg(a, b, M="block_jacobi")
    with pytest.raises(BadRequest, match="block_size: got None"):
        S.block_jacobi(a.tobsr((2, 4)))
    with pytest.raises(LinAlgError, match="block_jacobi: block 1, from row 1 on, has no inverse"):
        S.block_jacobi(a, 1)
    with pytest.raises(BadRequest, match=r"M: got a list; expected None, .*block_jacobi"):
        S.cg(a, b, M=[1.0])
    with pytest.raises(BadRequest, match=r"M: got f64\[2, 2, 2\].*expected f64\[blocks, size, size\]"):
        S.cg(sp.csr_array(np.eye(9)), DEV.array(np.ones(9)), M=S.block_jacobi(sp.csr_array(np.eye(4)), 2))


# -- plans ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def executor(on_cpu, monkeypatch):
    found = graphs.iterating(cusparse.executor_of(monkeypatch), on_cpu, monkeypatch)
    yield found
    gc.collect()  # what a plan holds is given back to the stand-in


@pytest.mark.parametrize("op", KRYLOV)
def test_a_graph_reads_the_inverses_as_they_are_and_follows_where_they_lie(op, executor, rng):
    a = coupled(op, 36, 4, rng)
    m = S.block_jacobi(a, 4, absolute=op == "minres").inverses
    b = rng.standard_normal(36)
    choices = {"maxiter": 2000, **({"restart": 36} if op == "gmres" else {})}
    request = KRYLOV[op](*S.sparse_tensor(a), DEV.array(b), M=m, preconditioner="block_jacobi", rtol=1e-9, **choices)
    row = select(request, Arch(90))
    assert row.variant == "blocks"
    plan = row.call(request, executor, row)

    def iterations(given):
        outputs = DEV.executor().outputs(given)
        plan.enqueue(given.arguments(outputs))
        x, info, count, _ = given.result(outputs)
        assert info.item() == 0
        np.testing.assert_allclose(a @ x.numpy(), given.b.numpy(), atol=1e-4)
        return count.item()

    made = executor.driver.called.count
    few, right = iterations(request), m.numpy().copy()
    assert iterations(request.replace(b=DEV.array(2 * b))) <= few + 1
    assert made("cuGraphInstantiate") == 1
    m.copy_from(np.broadcast_to(np.eye(4) * 1e-2, m.shape))  # in place
    assert iterations(request) > 2 * few
    assert made("cuGraphInstantiate") == 1
    others = [DEV.array(right.transpose(0, 2, 1)).transpose((0, 2, 1)) for _ in range(5)]
    assert {request.replace(M=other).key() for other in others} == {request.key()}
    assert [iterations(request.replace(M=other)) for other in others] == [few] * 5, "each by a graph of its own"
    assert made("cuGraphInstantiate") == 6
    assert len(executor.driver.executables) == 4, "the oldest go"
    by_rows = request.replace(M=DEV.array(right))
    assert by_rows.key() != request.key(), "the steps between elements belong to the plan"
    plan = row.call(by_rows, executor, row)
    assert iterations(by_rows) == few


@pytest.mark.compiles
@pytest.mark.parametrize("op", BLOCKED)
@pytest.mark.parametrize("dtype", ["f32", "c128"])
def test_nvrtc_compiles_the_iterations_with_blocks_for_sm_90(op, dtype):
    dtype = "f64" if op == "minres" and dtype == "c128" else dtype
    number = dp.keys.Dtype.of(dtype).numpy
    m, b = DEV.array(np.ones((2, 2, 2), number)), DEV.array(np.ones(4, number))
    request = KRYLOV[op](
        *S.sparse_tensor(sp.eye_array(4, format="csr", dtype=number)), b, M=m, preconditioner="block_jacobi"
    )
    for name in ("begin", *BLOCKED[op], "finish"):
        assert len(compiled(SOURCES[op], name, ("-arch=sm_90", *options(request)))) > 1000
