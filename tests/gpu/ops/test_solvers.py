"""Solvers on the GPU: large systems against SciPy in float64, what is kept and noticed.

Their rows go through their cases in test_sparse.py, with those of all sparse ops.
"""

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, LinAlgError
from dispatch.keys import HOST
from dispatch.ops.sparse.krylov import BREAKDOWN, NOT_FINITE, STAGNATED

sp = pytest.importorskip("scipy.sparse")
linalg = pytest.importorskip("scipy.sparse.linalg")

S = dp.sparse
ITERATIONS = ("cg", "bicgstab", "gmres", "minres")
EPS = {"f4": 2e-7, "c8": 2e-7, "f8": 3e-16, "c16": 3e-16}


def poisson(*extents):
    """Poisson's equation on a grid."""
    lines = [sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n)) for n in extents]
    found = lines[0]
    for line in lines[1:]:
        found = sp.kron(found, sp.eye_array(line.shape[0])) + sp.kron(sp.eye_array(found.shape[0]), line)
    return found.tocsr()


def convection(n, speed=0.4):
    """Convection and diffusion on a square: not symmetric."""
    along = sp.diags_array([-1 - speed, 2.0, -1 + speed], offsets=[-1, 0, 1], shape=(n, n))
    return (sp.kron(along, sp.eye_array(n)) + sp.kron(sp.eye_array(n), along)).tocsr()


MATRICES = {
    "cg": lambda: poisson(40, 40, 40),
    "bicgstab": lambda: convection(200),
    "gmres": lambda: convection(60),
    "minres": lambda: poisson(50, 50) - 0.011 * sp.eye_array(2500),
}


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("op", ITERATIONS)
def test_large_systems_are_solved_to_the_criterion(op, dtype, gpu, rng):
    if op == "minres" and dtype.startswith("c"):
        pytest.skip("minres is for real matrices")
    a = MATRICES[op]().astype(dtype)
    n, rtol = a.shape[0], 1e-4 if dtype in ("f4", "c8") else 1e-9
    x = rng.standard_normal(n) + (1j * rng.standard_normal(n) if dtype.startswith("c") else 0)
    b = a @ x.astype(dtype)
    for how in (None, "jacobi"):
        found, info = getattr(S, op)(S.sparse_tensor(a, device=gpu), gpu.array(b), rtol=rtol, maxiter=n, M=how)
        assert info.item() == 0, how
        left = np.linalg.norm(b - a @ found.numpy())
        slack = 100 * EPS[dtype] * 8 * np.linalg.norm(found.numpy())
        assert left <= rtol * np.linalg.norm(b) * (1 if how is None or op != "minres" else 3) + slack


@pytest.mark.parametrize("op", ["cg", "minres"])
def test_iterations_are_those_of_scipy(op, gpu, rng):
    """In exact arithmetic they are the same; in float64 a few more or fewer."""
    a, count = poisson(60, 60), 0
    b = rng.standard_normal(3600)

    def counting(_):
        nonlocal count
        count += 1

    matrix = S.sparse_tensor(a, device=gpu)
    _, info, iterations, residual = getattr(dp, op)(*matrix, gpu.array(b), rtol=1e-8)
    linalg.cg(a, b, rtol=1e-8, callback=counting)
    assert info.item() == 0
    assert residual.item() <= 1e-8 * np.linalg.norm(b)
    assert abs(iterations.item() - count) <= (3 if op == "cg" else count // 4)


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
@pytest.mark.parametrize(("op", "kind"), [("cg", "ic0"), ("cg", "ilu0"), ("bicgstab", "ilu0"), ("gmres", "ilu0")])
def test_incomplete_factors_take_fewer_iterations_to_the_same_solution(op, kind, dtype, gpu, rng):
    a = (poisson(30, 30, 12) if op == "cg" else convection(90)).astype(dtype)
    a.sort_indices()
    n, rtol = a.shape[0], 1e-4 if dtype in ("f4", "c8") else 1e-9
    b = a @ (rng.standard_normal(n) + (1j * rng.standard_normal(n) if dtype.startswith("c") else 0)).astype(dtype)
    matrix, right = S.sparse_tensor(a, device=gpu), gpu.array(b)
    factors = getattr(S, kind)(matrix)
    request = {"cg": dp.CgRequest, "bicgstab": dp.BicgstabRequest, "gmres": dp.GmresRequest}[op]
    plain = request(*factors.source, right, rtol=rtol, maxiter=n)
    counts = []
    for given in (plain, plain.replace(M=factors.matrix.values, preconditioner=kind)):
        x, info, iterations, _ = dp.run(given)
        assert info.item() == 0
        slack = 100 * EPS[dtype] * 8 * np.linalg.norm(x.numpy())
        assert np.linalg.norm(b - a @ x.numpy()) <= rtol * np.linalg.norm(b) + slack
        counts.append(iterations.item())
    assert counts[1] < 0.7 * counts[0]
    for turn in range(8):  # other elements at the same places, in place and at other addresses
        scale = 1 + turn
        factors.refactorize(gpu.array(a.data * scale))
        x = getattr(S, op)(factors.source, right, rtol=rtol, M=factors, check=True)
        assert np.linalg.norm(b - scale * (a @ x.numpy())) <= 2 * rtol * np.linalg.norm(b) + slack


@pytest.mark.parametrize("op", ITERATIONS)
def test_two_runs_give_the_same_bits(op, gpu, rng):
    a = S.sparse_tensor(MATRICES[op](), device=gpu)
    b = gpu.array(rng.standard_normal(a.shape[0]))
    function = getattr(dp, op)
    first, second = (function(*a, b, rtol=1e-6, maxiter=300, algorithm="csr_alg2")[0].numpy() for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("op", ITERATIONS)
@pytest.mark.parametrize("fixed", [False, True])
def test_repeated_calls_over_changing_vectors_values_and_patterns(op, fixed, gpu, rng):
    a = poisson(12, 13)
    matrix = S.sparse_tensor(a, device=gpu)
    matrix = matrix.fixed() if fixed else matrix
    function = getattr(S, op)
    for turn in range(70):  # others follow after 48, if this could be captured
        b = rng.standard_normal(156)
        if turn % 10 == 9:
            matrix.values.copy_from(a.data * (1 + turn))
        scale = matrix.values.numpy()[0] / a.data[0]
        x, info = function(matrix, gpu.array(b), rtol=1e-10)
        assert info.item() == 0
        np.testing.assert_allclose(scale * (a @ x.numpy()), b, atol=1e-7)
    others = [matrix.with_values(gpu.array(a.data * k)) for k in range(2, 9)]  # more than a plan has graphs
    for _ in range(3):
        for k, other in enumerate(others, 2):
            b = rng.standard_normal(156)
            x, _ = function(other, gpu.array(b), rtol=1e-10)
            np.testing.assert_allclose(k * (a @ x.numpy()), b, atol=1e-7)
    if not fixed:  # the same memory has another pattern of as many elements
        order = rng.permutation(156)
        other = sp.csr_array(a[order][:, order])
        other.sort_indices()
        for part, array in zip(("values", "rows", "columns"), (other.data, other.indptr, other.indices), strict=True):
            getattr(matrix, part).copy_from(array.astype(getattr(matrix, part).numpy().dtype))
        b = rng.standard_normal(156)
        x, _ = function(matrix, gpu.array(b), rtol=1e-10)
        np.testing.assert_allclose(other @ x.numpy(), b, atol=1e-7)


@pytest.mark.parametrize("op", ITERATIONS)
def test_statuses_are_right(op, gpu, rng):
    a = S.sparse_tensor(poisson(9, 9), device=gpu)
    b = rng.standard_normal(81)
    function = getattr(S, op)
    zero, info = function(a, gpu.zeros(81, "f64"), gpu.array(b))
    assert (info.item(), zero.numpy().any()) == (0, False)
    _, info = function(a, gpu.array(b), rtol=1e-13, maxiter=1, **({"restart": 2} if op == "gmres" else {}))
    assert info.item() == (2 if op == "gmres" else 1)
    b[3] = np.nan
    x, info = function(a, gpu.array(b))
    assert info.item() == NOT_FINITE
    assert np.isnan(x.numpy()).all()
    with pytest.raises(LinAlgError, match="NaN or infinite"):
        function(a, gpu.array(b), check=True)


def test_what_has_no_solution_is_said(gpu, rng):
    a = poisson(8, 8)
    a = a - sp.diags_array(a.sum(axis=1))
    _, info = S.minres(S.sparse_tensor(a.tocsr(), device=gpu), gpu.array(rng.standard_normal(64)))
    assert info.item() in (STAGNATED, BREAKDOWN)
    swap = S.sparse_tensor(sp.csr_array(np.array([[0.0, 1.0], [1.0, 0.0]])), device=gpu)
    _, info = S.cg(swap, gpu.array([1.0, 0.0]))
    assert info.item() == BREAKDOWN


def test_a_solve_cannot_be_captured_and_says_so(gpu, rng):
    torch = pytest.importorskip("torch")
    a = S.sparse_tensor(poisson(9, 9), device=gpu)
    b, stream = torch.from_numpy(rng.standard_normal(81)).cuda(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x, _ = S.cg(a, b, rtol=1e-9)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            left = b - 1  # so that there is something in it
            with pytest.raises(BadRequest, match="capture"):
                S.cg(a, b)
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(left, b - 1)
    assert isinstance(x, torch.Tensor)
    np.testing.assert_allclose(poisson(9, 9) @ x.cpu().numpy(), b.cpu().numpy(), atol=1e-6)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_supervisor_runs_them(isolation, rng):
    a = poisson(20, 20)
    b = rng.standard_normal(400)
    with dp.Supervisor("cuda:0", streams=2, isolation=isolation) as sup:
        matrix = S.sparse_tensor(a, device=sup.device)
        futures = [sup.submit(dp.CgRequest(*matrix, sup.device.array(k * b), rtol=1e-9)) for k in range(1, 20)]
        for k, future in enumerate(futures, 1):
            x, info, *_ = future.result(120)
            assert info.item() == 0
            np.testing.assert_allclose(a @ x.numpy(), k * b, atol=1e-6 * k)


# -- direct -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def with_cudss(skip_without):
    skip_without(next(row for row in dp.TABLE.of("spsolve") if row.min_arch != HOST))


@pytest.mark.usefixtures("with_cudss")
@pytest.mark.parametrize("assume_a", ["gen", "sym", "pos"])
def test_factors_are_kept_and_values_may_change(assume_a, gpu, rng):
    a = convection(60) if assume_a == "gen" else poisson(40, 50)
    factors = S.splu(S.sparse_tensor(a, device=gpu), assume_a=assume_a)
    n = a.shape[0]
    for factor in (1.0, 2.0, 0.5):
        if factor != 1:
            factors.refactorize(gpu.array(a.data * factor))
        for shape in ((n,), (n, 3), (n,)):
            b = rng.standard_normal(shape)
            np.testing.assert_allclose(factor * (a @ factors.solve(gpu.array(b)).numpy()), b, atol=1e-9)
    b = rng.standard_normal(n)
    np.testing.assert_allclose(
        S.spsolve(S.sparse_tensor(a, device=gpu), gpu.array(b)).numpy(), linalg.spsolve(a.tocsc(), b), atol=1e-9
    )


@pytest.mark.usefixtures("with_cudss")
def test_what_cannot_be_factorized_is_told(gpu):
    indefinite = S.sparse_tensor(sp.csr_array(np.diag([1.0, -1.0, 2.0])), device=gpu)
    with pytest.raises(LinAlgError, match="positive definite"):
        S.spsolve(indefinite, gpu.array(np.ones(3)), assume_a="pos")
    singular = S.sparse_tensor(sp.csr_array(np.array([[1.0, 1.0], [1.0, 1.0]])), device=gpu)
    with pytest.raises(LinAlgError, match="singular"):
        S.spsolve(singular, gpu.array(np.ones(2)))
    with pytest.raises(LinAlgError, match="singular"):
        S.splu(singular)


@pytest.mark.usefixtures("with_cudss")
def test_splu_has_factorized_when_it_is_made(gpu, rng):
    a = convection(30)
    matrix, b = S.sparse_tensor(a, device=gpu), rng.standard_normal(a.shape[0])
    factors = S.splu(matrix)
    matrix.values.copy_from(np.zeros(a.nnz))
    np.testing.assert_allclose(a @ factors.solve(gpu.array(b)).numpy(), b, atol=1e-9)


@pytest.mark.usefixtures("with_cudss")
@pytest.mark.parametrize("kind", ["splu", "ilu0", "ic0"])
def test_other_values_of_a_matrix_by_columns_are_at_its_own_places(kind, gpu, rng):
    weights = sp.diags_array(1 + rng.random(12))
    band = sp.diags_array([-1.0, 4.0, -1.0], offsets=[-1, 0, 1], shape=(12, 12))  # of which factors have no fill
    other = sp.csc_array(weights @ band @ (weights if kind == "ic0" else sp.eye_array(12)))
    b, turned = rng.standard_normal(12), S.sparse_tensor(sp.csr_array(band), device=gpu).T
    for a in (S.sparse_tensor(sp.csc_array(band), device=gpu), turned):
        factors = getattr(S, kind)(a).refactorize(gpu.array(other.data))
        np.testing.assert_allclose(other @ factors.solve(gpu.array(b)).numpy(), b, atol=1e-12)
