"""Iterations: their kernels on the CPU in the passes of the graph, and the host's rows, against a direct solve."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import LinAlgError
from dispatch.ops.sparse.cases_krylov import KRYLOV, krylov_cases
from dispatch.ops.sparse.krylov import BREAKDOWN, NOT_FINITE, STAGNATED

sp = pytest.importorskip("scipy.sparse")
linalg = pytest.importorskip("scipy.sparse.linalg")

spec = importlib.util.spec_from_file_location("krylov_systems", Path(__file__).with_name("krylov_systems.py"))
systems = importlib.util.module_from_spec(spec)
spec.loader.exec_module(systems)
poisson, convection, request_of = systems.poisson, systems.convection, systems.request_of

spec = importlib.util.spec_from_file_location("krylov_on_cpu", Path(__file__).with_name("krylov_on_cpu.py"))
krylov_on_cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(krylov_on_cpu)

HOST = [row for row in dp.TABLE if row.op in KRYLOV and row.run_on == ("host",)]
# Of the two precisions of a method one is as good as the other here.
TRIED = [row for row in HOST if row.op == "cg" or row.dtypes[0].name in ("f64", "c128")]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return krylov_on_cpu.Iterations(tmp_path_factory.mktemp("krylov"))


def solved(on_cpu, op, a, b, x0=None, **choices):
    """What the kernels give, and the host's row in the same words."""
    request = request_of(op, a, b, x0, **choices)
    host = dp.run(request)
    return on_cpu.solve(request), tuple(one.numpy() for one in host)


@pytest.mark.parametrize("row", TRIED, ids=lambda row: row.name)
def test_the_kernels_solve_every_case_of_a_row(row, on_cpu, rng):
    for case in krylov_cases(row):
        check = case.check(dp.device("host"), rng)
        if any(rule(check.request) for rule in row.rules):
            continue
        results = on_cpu.solve(check.request)
        check.verify(tuple(SimpleNamespace(numpy=lambda value=value: np.asarray(value)) for value in results))


SYSTEMS = {
    "cg 2d": ("cg", poisson(9, 11), {}),
    "cg 3d": ("cg", poisson(5, 4, 6), {"preconditioner": "jacobi"}),
    "bicgstab": ("bicgstab", convection(9), {}),
    "bicgstab jacobi": ("bicgstab", convection(7, 0.3), {"preconditioner": "jacobi"}),
    "gmres": ("gmres", convection(9), {"restart": 8}),
    "gmres whole": ("gmres", convection(5), {"restart": 60}),
    "minres": ("minres", poisson(8, 9) - 3.3 * sp.eye_array(72), {"maxiter": 1000}),
    "minres M": ("minres", poisson(6, 7) - 3.3 * sp.eye_array(42), {"M": 1 / (1 + np.arange(42) % 3), "maxiter": 1000}),
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_solution_is_that_of_a_direct_solve(system, on_cpu, rng):
    op, a, choices = SYSTEMS[system]
    b = rng.standard_normal(a.shape[0])
    right = linalg.spsolve(a.tocsc(), b)
    for x, info, iterations, residual in solved(on_cpu, op, a, b, rng.standard_normal(len(b)), rtol=1e-11, **choices):
        assert int(info) == 0
        assert int(iterations) > 3
        np.testing.assert_allclose(x, right, atol=1e-7 * np.abs(right).max())
        if "M" not in choices:
            assert float(residual) <= 1e-11 * np.linalg.norm(b)


@pytest.mark.parametrize("op", KRYLOV)
def test_an_x0_that_solves_it_is_given_back_after_no_iteration(op, on_cpu, rng):
    a, x0 = poisson(6, 6), rng.standard_normal(36)
    for x, info, iterations, _ in solved(on_cpu, op, a, a @ x0, x0):
        np.testing.assert_array_equal(x, x0)
        assert (int(info), int(iterations)) == (0, 0)


@pytest.mark.parametrize("op", KRYLOV)
def test_without_a_right_hand_side_x_is_0_whatever_x0_is(op, on_cpu, rng):
    for x, info, iterations, residual in solved(on_cpu, op, poisson(6, 6), np.zeros(36), rng.standard_normal(36)):
        assert not x.any()
        assert (int(info), int(iterations), float(residual)) == (0, 0, 0.0)


@pytest.mark.parametrize("op", KRYLOV)
def test_what_is_not_finite_ends_it_with_a_status_of_its_own(op, on_cpu):
    b = np.ones(36)
    b[7] = np.nan
    for x, info, _, _ in solved(on_cpu, op, poisson(6, 6), b):
        assert int(info) == NOT_FINITE
        assert np.isnan(x).all()


@pytest.mark.parametrize("op", KRYLOV)
def test_after_as_many_iterations_as_were_allowed_the_status_counts_them(op, on_cpu, rng):
    choices = {"restart": 2} if op == "gmres" else {}
    a, b = poisson(9, 9), rng.standard_normal(81)
    for x, info, iterations, residual in solved(on_cpu, op, a, b, rtol=1e-12, maxiter=3, **choices):
        count = 6 if op == "gmres" else 3
        assert int(info) == int(iterations) == count
        assert float(residual) == pytest.approx(np.linalg.norm(b - a @ x), rel=1e-6)


@pytest.mark.parametrize("op", ["cg", "bicgstab"])
def test_a_scalar_of_0_that_divides_is_a_breakdown(op, on_cpu):
    a = sp.csr_array(np.array([[0.0, 1.0], [1.0, 0.0]] if op == "cg" else [[0.0, 1.0], [-1.0, 0.0]]))
    for x, info, _, _ in solved(on_cpu, op, a, np.array([1.0, 0.0])):
        assert info == BREAKDOWN
        assert np.isfinite(x).all()


@pytest.mark.parametrize("op", KRYLOV)
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_a_residual_of_0_is_enough_whatever_the_tolerance(op, dtype, on_cpu):
    request = request_of(op, 2 * sp.eye_array(4), np.ones(4), dtype=dtype, rtol=0.0)  # each step is exact
    for x, info, _, residual in (on_cpu.solve(request), tuple(one.numpy() for one in dp.run(request))):
        np.testing.assert_array_equal(x, np.full(4, 0.5))
        assert (int(info), float(residual)) == (0, 0.0)


def test_minres_of_a_singular_system_that_has_a_solution_finds_one(on_cpu, rng):
    a = poisson(6, 6)
    a = a - sp.diags_array(a.sum(axis=1))  # the Laplacian of a grid: constants are its null space
    b = a @ rng.standard_normal(36)
    x, info, _, _ = on_cpu.solve(request_of("minres", a, b, rtol=1e-10))
    assert info == 0
    assert np.linalg.norm(b - a @ x) <= 1e-9 * np.linalg.norm(b)


def test_minres_of_a_system_without_a_solution_ends_with_the_least_squares_one(on_cpu, rng):
    a = poisson(6, 6)
    a = a - sp.diags_array(a.sum(axis=1))
    b = rng.standard_normal(36)
    x, info, iterations, residual = on_cpu.solve(request_of("minres", a, b))
    least = np.linalg.norm(b - a @ np.linalg.lstsq(a.toarray(), b)[0])
    assert info in (STAGNATED, BREAKDOWN)
    assert iterations < 360
    assert residual == pytest.approx(least, rel=1e-6)
    assert np.linalg.norm(b - a @ x) == pytest.approx(least, rel=1e-6)


def test_gmres_of_a_system_without_a_solution_breaks_down_and_stays_finite(on_cpu):
    a = sp.csr_array(np.diag([1.0, 2.0, 3.0, 0.0]))
    x, info, _, residual = on_cpu.solve(request_of("gmres", a, np.array([1.0, 1.0, 1.0, 1.0])))
    assert info == BREAKDOWN
    assert residual >= 1 - 1e-12
    assert np.isfinite(x).all()


def test_gmres_that_cannot_come_nearer_in_its_dtype_says_so(on_cpu, rng):
    a = sp.diags_array(np.logspace(0, -5, 30)).tocsr()
    _, info, iterations, _ = on_cpu.solve(request_of("gmres", a, rng.standard_normal(30), dtype="f32", rtol=1e-12))
    assert info == STAGNATED
    assert iterations < 3000


def test_two_runs_give_the_same_bits(on_cpu, rng):
    a, b = poisson(9, 9), rng.standard_normal(81)
    request = request_of("cg", a, b)
    first, second = on_cpu.solve(request), on_cpu.solve(request)
    np.testing.assert_array_equal(first[0], second[0])
    assert first[1:] == second[1:]


# -- incomplete factors -----------------------------------------------------------------------------------------------
FACTORED = {
    "cg ic0": ("cg", poisson(12, 13), "ic0"),
    "cg ilu0": ("cg", poisson(6, 5, 4), "ilu0"),
    "bicgstab ilu0": ("bicgstab", convection(12), "ilu0"),
    "gmres ilu0": ("gmres", convection(12), "ilu0"),
    "gmres ic0": ("gmres", poisson(9, 11), "ic0"),
}


@pytest.mark.parametrize("system", FACTORED)
@pytest.mark.parametrize("dtype", ["f64", "c128"])
def test_incomplete_factors_leave_the_solution_and_take_fewer_iterations(system, dtype, on_cpu, rng):
    op, a, kind = FACTORED[system]
    n = a.shape[0]
    b, x0 = (rng.standard_normal(n) + (1j * rng.standard_normal(n) if dtype == "c128" else 0) for _ in range(2))
    if dtype == "c128":  # Hermitian where it was symmetric, by a diagonal of phases on both sides
        turn = sp.diags_array(np.exp(1j * rng.uniform(0, 6, n)))
        a = (turn @ a @ turn.conj()).tocsr()
    a.sort_indices()
    plain = request_of(op, a, b, x0, dtype=dtype, rtol=1e-10, **({"restart": 12} if op == "gmres" else {}))
    factors = getattr(dp.sparse, kind)(dp.sparse.sparse_tensor(a))
    taken = plain.replace(form=factors.matrix.form, M=factors.matrix.values, preconditioner=kind)
    right = linalg.spsolve(a.tocsc(), b)
    counts = {}
    for request in (plain, taken):
        for x, info, iterations, residual in (on_cpu.solve(request), tuple(one.numpy() for one in dp.run(request))):
            assert int(info) == 0
            np.testing.assert_allclose(x, right, atol=1e-7 * np.abs(right).max())
            assert float(residual) <= 1e-10 * np.linalg.norm(b)
            counts.setdefault(request is taken, []).append(int(iterations))
    assert max(counts[True]) < 0.7 * min(counts[False])
    assert abs(counts[True][0] - counts[True][1]) <= 1 + counts[True][0] // 10, "as many as SciPy takes"


@pytest.mark.parametrize("op", ["cg", "bicgstab", "gmres"])
def test_factors_that_are_not_finite_end_it_with_a_status_of_their_own(op, on_cpu):
    a, b = poisson(5, 5), np.ones(25)
    factors = dp.sparse.ilu0(dp.sparse.sparse_tensor(a))
    values = factors.matrix.values.numpy().copy()
    values[0] = 0  # the first pivot
    request = request_of(op, a, b).replace(
        form=factors.matrix.form, M=dp.device("host").array(values), preconditioner="ilu0"
    )
    for x, info, *_ in (on_cpu.solve(request), tuple(one.numpy() for one in dp.run(request))):
        assert int(info) == NOT_FINITE
        assert np.isnan(x).all()


# -- singular systems on the host, whose rows say what the kernels say -------------------------------------------------
def laplacian(n):
    """Of a line: constants are its null space."""
    ends = np.r_[1.0, np.full(n - 2, 2.0), 1.0]
    return sp.diags_array([-np.ones(n - 1), ends, -np.ones(n - 1)], offsets=[-1, 0, 1]).tocsr()


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("scaled", [False, True])
def test_minres_without_a_solution_gives_a_least_squares_one_on_the_host_too(dtype, scaled, on_cpu, rng):
    a, b = laplacian(50), rng.standard_normal(50)
    choices = {"M": np.full(50, 0.5)} if scaled else {}
    least = np.linalg.norm(b - a @ (np.linalg.pinv(a.toarray()) @ b))
    request = request_of("minres", a, b, dtype=dtype, rtol=1e-5 if dtype == "f64" else 1e-4, **choices)
    for x, info, _, _ in (on_cpu.solve(request), tuple(one.numpy() for one in dp.run(request))):
        assert int(info) in (STAGNATED, BREAKDOWN)
        assert np.linalg.norm(b - a @ x.astype("f8")) <= least * (1.001 if dtype == "f64" else 1.02)
        assert np.abs(x).max() < 1e4


def test_minres_takes_no_preconditioner_that_is_not_positive(on_cpu):
    request = request_of("minres", sp.eye_array(4).tocsr(), np.ones(4), M=-np.ones(4))
    for _, info, *_ in (on_cpu.solve(request), tuple(one.numpy() for one in dp.run(request))):
        assert int(info) == BREAKDOWN


def test_gmres_of_a_singular_system_says_why_it_ends_on_the_host_too(on_cpu, rng):
    for size in (3, 7, 15):
        a = rng.standard_normal((size, size))
        a[0], a[:, 0] = 0, 0
        request = request_of("gmres", sp.csr_array(a), np.ones(size))
        for x, info, *_ in (on_cpu.solve(request), tuple(one.numpy() for one in dp.run(request))):
            assert int(info) in (BREAKDOWN, STAGNATED)
            assert np.isfinite(x).all()
    with pytest.raises(LinAlgError, match="the method broke down"):
        dp.sparse.gmres(sp.csr_array(np.diag([1.0, 0.0, 0.0])), np.ones(3), check=True)
