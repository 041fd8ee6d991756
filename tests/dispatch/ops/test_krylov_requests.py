"""Requests of iterations: what is refused, SciPy's arguments, incomplete factors, and kernels that NVRTC compiles."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, LinAlgError, NoRow
from dispatch.libraries.nvrtc.compiled import compiled
from dispatch.ops.sparse.cases_krylov import KRYLOV
from dispatch.ops.sparse.krylov_kernels import KERNELS, SOURCES
from dispatch.ops.sparse.own_krylov import options

sp = pytest.importorskip("scipy.sparse")
linalg = pytest.importorskip("scipy.sparse.linalg")

spec = importlib.util.spec_from_file_location("krylov_systems", Path(__file__).with_name("krylov_systems.py"))
systems = importlib.util.module_from_spec(spec)
spec.loader.exec_module(systems)
poisson, convection, request_of = systems.poisson, systems.convection, systems.request_of


def test_a_tolerance_of_0_is_met_by_the_residual_that_is_carried_along():
    for a in (sp.diags_array(np.arange(1.0, 5)), poisson(5, 5)):
        b = np.ones(a.shape[0])
        x, info, *_ = dp.run(request_of("cg", a, b, rtol=0.0, maxiter=2000))
        assert info.item() == 0
        np.testing.assert_allclose(a @ x.numpy(), b)


@pytest.mark.compiles
@pytest.mark.parametrize("op", KRYLOV)
@pytest.mark.parametrize("dtype", ["f32", "c128"])
def test_nvrtc_compiles_the_kernels_for_sm_90(op, dtype):
    if op == "minres" and dtype == "c128":
        dtype = "f64"
    request = request_of(op, poisson(3, 3), np.ones(9), dtype=dtype)
    for name in ("begin", *KERNELS[op], "finish"):
        assert len(compiled(SOURCES[op], name, ("-arch=sm_90", *options(request)))) > 1000


def test_bad_requests_are_refused_by_name():
    a, b = poisson(3, 3), np.ones(9)
    for change, words in (
        ({"b": np.ones(8)}, "b: "),
        ({"x0": np.ones((9, 1))}, "x0: "),
        ({"rtol": -1.0}, "rtol"),
        ({"atol": np.nan}, "atol"),
        ({"maxiter": 0}, "maxiter"),
        ({"algorithm": "coo_alg1"}, "algorithm"),
        ({"M": np.ones(9), "preconditioner": "jacobi"}, "M: "),
        ({"a": a[:8]}, "form.shape"),
    ):
        given = {"a": a, "b": b, **change}
        with pytest.raises(BadRequest, match=words.replace(".", r"\.")):
            request_of("cg", **given)
    with pytest.raises(BadRequest, match="restart"):
        request_of("gmres", a, b, restart=0)
    with pytest.raises(NoRow, match="c128"):
        dp.run(request_of("minres", a, b, dtype="c128"))


def test_a_preconditioner_that_is_made_of_a_needs_its_lines():
    dev = dp.device("host")
    a = dp.sparse.sparse_tensor(poisson(3, 3).tocoo())
    with pytest.raises(NoRow, match="needs CSR or CSC"):
        dp.cg(*a, dev.array(np.ones(9)), preconditioner="jacobi")


@pytest.mark.parametrize("op", KRYLOV)
def test_the_functions_of_sparse_take_scipys_arguments(op, rng):
    a = poisson(6, 6).astype(np.float64)
    b, x0 = rng.standard_normal(36), rng.standard_normal(36)
    dev = dp.device("host")
    function, theirs = getattr(dp.sparse, op), getattr(linalg, op)
    x, info = function(a, dev.array(b), dev.array(x0), rtol=1e-9, maxiter=500, M="jacobi")
    expected, status = theirs(a, b, x0, rtol=1e-9, maxiter=500)
    assert info.item() == status == 0
    np.testing.assert_allclose(x.numpy(), expected, rtol=1e-5)
    np.testing.assert_array_equal(function(a, dev.array(b), dev.array(x0), rtol=1e-9, M="jacobi", check=True), x)
    with pytest.raises(LinAlgError, match=f"{op}: the residual is .* after"):
        function(a, dev.array(b), rtol=1e-13, maxiter=1, check=True, **({"restart": 2} if op == "gmres" else {}))
    with pytest.raises(BadRequest, match="jacobi"):
        function(a, dev.array(b), M=a)


@pytest.mark.parametrize("op", ["cg", "bicgstab", "gmres", "minres"])
def test_the_host_takes_no_part_in_an_iteration(op):
    from scipy.sparse.linalg import LinearOperator

    solve, a = getattr(dp.sparse, op), np.eye(3)
    b = dp.device("host").array(np.ones(3))
    with pytest.raises(BadRequest, match=r"callback: got .*; expected None: all iterations are one launch"):
        solve(sp.csr_array(a), b, callback=print)
    for matrix in (LinearOperator((3, 3), matvec=lambda x: x), lambda x: x):
        with pytest.raises(BadRequest, match=r"A: got .*; expected a sparse matrix: all iterations are one launch"):
            solve(matrix, b)


def test_the_functions_of_sparse_take_incomplete_factors(rng):
    dev, a = dp.device("host"), convection(9)
    a.sort_indices()
    b = rng.standard_normal(81)
    right = linalg.spsolve(a.tocsc(), b)
    matrix = dp.sparse.sparse_tensor(a)
    factors = dp.sparse.ilu0(matrix)
    for given in (matrix, a):  # SciPy's matrix is the same memory
        for function in (dp.sparse.bicgstab, dp.sparse.gmres):
            x = function(given, dev.array(b), rtol=1e-10, M=factors, check=True)
            np.testing.assert_allclose(x.numpy(), right, atol=1e-7)
    for given in (a, a.tocsc(), a.tocoo()):  # by rows within
        x = dp.sparse.bicgstab(given, dev.array(b), rtol=1e-10, M="ILU0", check=True)
        np.testing.assert_allclose(x.numpy(), right, atol=1e-7)
    # Other elements at the same places keep the factors of those before.
    near = matrix.with_values(dev.array(a.data * rng.uniform(0.9, 1.1, a.nnz)))
    x = dp.sparse.gmres(near, dev.array(b), rtol=1e-10, M=factors, check=True)
    np.testing.assert_allclose(near.todense().numpy() @ x.numpy(), b, atol=1e-7)
    for other in (a.copy(), a.tocsc(), a[:80, :80]):
        with pytest.raises(BadRequest, match=r"M: got IncompleteFactors.*pass as A the object that was passed to ilu0"):
            dp.sparse.gmres(other, dev.array(b[: other.shape[0]]), M=factors)
    with pytest.raises(LinAlgError, match="ic0: the pivot of row 0"):
        dp.sparse.cg(-poisson(3, 3), dev.array(np.ones(9)), M="ic0")
    with pytest.raises(BadRequest, match=r"M: got Inc.*minres does not support incomplete factors; cg,"):
        dp.sparse.minres(matrix, dev.array(b), M=factors)
    with pytest.raises(BadRequest, match='M: got a csr_array; expected None, "jacobi", "ilu0", "ic0"'):
        dp.sparse.cg(matrix, dev.array(b), M=a)


def test_requests_with_factors_say_what_they_lack():
    dev, a = dp.device("host"), poisson(3, 3)
    matrix, b = dp.sparse.sparse_tensor(a).fixed(), dev.array(np.ones(9))
    given = {"M": dev.array(a.data), "preconditioner": "ilu0"}
    coo = dp.sparse.sparse_tensor(a.tocoo())
    for parts, change, words in (
        (matrix, {"M": None}, "M: got None; expected the factors that the request ilu0 returns"),
        (matrix, {"M": b}, r"M: .*expected f64\[33\], a value of the factors for each of the 33"),
        (dp.sparse.sparse_tensor(a), {}, r"form.pattern: got None.*a\.fixed\(\)"),
        (coo, {}, r"form.format: got .*; expected CSR, with preconditioner='ilu0'"),
        (matrix, {"preconditioner": "ilu1"}, "preconditioner: .*ILU0"),
    ):
        with pytest.raises(BadRequest, match=words):
            dp.CgRequest(*parts, b, **{**given, **change})


METHODS = [dp.sparse.cg, dp.sparse.bicgstab, dp.sparse.gmres, dp.sparse.minres]


@pytest.mark.parametrize("solve", METHODS)
@pytest.mark.parametrize("m", ["magic", "ilu", 5, [1.0, 2.0], np.eye(4), linalg.aslinearoperator(np.eye(4))])
def test_what_m_may_be_is_said_by_its_own_name(solve, m):
    with pytest.raises(BadRequest) as caught:
        solve(poisson(2, 2), np.ones(4), M=m)
    words = str(caught.value)
    assert words.startswith("M: got ")
    for kind in ("None", '"jacobi"', '"block_jacobi"', "block_jacobi(A, size", "(n,): the diagonal of a matrix"):
        assert kind in words
    assert ("ilu0(A)" in words) == (solve is not dp.sparse.minres)
    assert ("Did you mean Preconditioner.ILU0?" in words) == (m == "ilu" if isinstance(m, str) else False)


@pytest.mark.parametrize("name", ["ilu0", "IC-0", dp.sparse.ilu0(poisson(2, 2)), dp.sparse.ic0(poisson(2, 2))])
def test_minres_takes_no_factors_for_m_and_says_so(name):
    with pytest.raises(
        BadRequest, match=r'^M: got .*; expected None, "jacobi", .* Hint: minres does not support incomplete'
    ):
        dp.sparse.minres(poisson(2, 2), np.ones(4), M=name)


@pytest.mark.parametrize("solve", METHODS)
def test_m_is_named_in_any_spelling(solve):
    a, b = dp.sparse.tobsr(dp.sparse.sparse_tensor(poisson(4, 4)), (2, 2)), np.ones(16)
    names = [(a, "Block-Jacobi"), (a, "block_jacobi")]
    csr = dp.sparse.sparse_tensor(poisson(4, 4))
    names += [(csr, "JACOBI"), (csr, type(dp.CgRequest(*csr, dp.device("host").array(b)).preconditioner).JACOBI)]
    names += [(csr, "ILU-0")] if solve is not dp.sparse.minres else []
    for matrix, name in names:
        x, info = solve(matrix, b, M=name, rtol=1e-10)
        assert info == 0
        np.testing.assert_allclose(poisson(4, 4) @ x, b, atol=1e-8)
