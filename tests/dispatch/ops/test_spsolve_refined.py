"""Direct solves by factors of f32 whose solution is refined: the kernels by g++, plans over a stand-in of cuDSS."""

import gc
import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from cudabind.errors import LibraryNotFound
from dispatch.errors import LinAlgError
from dispatch.keys import Arch
from dispatch.libraries.nvrtc.compiled import compiled
from dispatch.ops.sparse.cudss_refined import KERNELS
from dispatch.ops.sparse.refinement_kernels import SOURCE, options
from dispatch.table.select import select

sp = pytest.importorskip("scipy.sparse")


def module_at(name):
    path = Path(__file__).parents[1] / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


blocks_on_cpu = module_at("ops/blocks_on_cpu")
cudss, cusparse = map(module_at, ("cudss_stand_in", "cusparse_stand_in"))
ANALYSIS, FACTORIZATION, REFACTORIZATION, SOLVE = 3, 4, 8, 1008
DEV = None
S = dp.sparse
N = 300  # more rows than a block has threads


@pytest.fixture(autouse=True)
def dev():
    """The host as it is now: a test of another file may have closed the one before."""
    global DEV
    DEV = dp.device("host")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return blocks_on_cpu.InBlocks(tmp_path_factory.mktemp("refined"))


@pytest.fixture
def executor(monkeypatch, on_cpu):
    cudss.refine_on_cpu(monkeypatch, on_cpu)
    yield cudss.executor_of(monkeypatch, cusparse.Copy)
    gc.collect()  # what a plan holds is given back to the stand-in


def made(request, executor):
    row = select(request, Arch(90))
    assert row.library == "cudss"
    return row.call(request, executor, row)


def enqueued(plan, request):
    outputs = request.device.executor().outputs(request)
    plan.enqueue(request.arguments(outputs))
    return [found.numpy() for found in request.result(outputs)]


def system(rng, n=N, dtype="f8"):
    a = sp.random_array((n, n), density=4 / n, rng=rng, dtype=np.float64) + sp.eye_array(n) * 3
    if dtype == "c16":
        a = a + 1j * sp.random_array((n, n), density=2 / n, rng=rng)
    return a.tocsr().astype(dtype)


def value_types(library):
    """The dtypes of the matrices that are factorized."""
    return [thing.value.name for thing in library.alive.values() if hasattr(thing, "nnz")]


def backward(a, x, b):
    """The residual in roundoffs, beside what is added up in it."""
    left = np.abs(b - a @ x).max(axis=0)
    return (left / (abs(a) @ np.abs(x) + np.abs(b)).max(axis=0)).max() / 2.0**-52


@pytest.mark.parametrize("dtype", ["f8", "c16"])
@pytest.mark.parametrize("shape", [(N,), (N, 3)])
def test_the_solution_is_as_exact_as_factors_of_f64_make_it(shape, dtype, executor, rng):
    a = system(rng, dtype=dtype)
    b = (rng.standard_normal(shape) * (1 if dtype == "f8" else 1j)).astype(dtype)
    request = dp.SpsolveRequest(*S.sparse_tensor(a.copy()).fixed(), DEV.array(b), precision="f32", stamp=3)
    plan = made(request, executor)
    x, info = enqueued(plan, request)
    assert info == 0
    assert backward(a, x, b) < 20
    library = executor.library
    assert value_types(library) == ["float32" if dtype == "f8" else "complex64"]
    assert library.phases[:2] == [ANALYSIS, FACTORIZATION]
    assert 2 <= library.phases.count(SOLVE) <= 6
    before = len(library.phases)
    x, _ = enqueued(plan, request)
    assert backward(a, x, b) < 20
    assert set(library.phases[before:]) == {SOLVE}, "the factors are kept"
    request.values.copy_from(2 * a.data)
    other = request.replace(stamp=4)
    x, _ = enqueued(plan, other)
    assert backward(2 * a, x, b) < 20
    assert library.phases[before:].count(REFACTORIZATION) == 1


def graded(rng, condition):
    """A matrix of a condition, all of whose elements are there."""
    q, _ = np.linalg.qr(rng.standard_normal((40, 40)))
    return sp.csr_array(q * np.geomspace(1, 1 / condition, 40) @ q.T)


@pytest.mark.parametrize("case", ["condition", "overflow", "few steps"])
def test_what_factors_of_f32_do_not_suffice_for_is_factorized_in_its_own_precision(case, executor, rng):
    choices = {}
    if case == "condition":
        a = graded(rng, 1e11)
    elif case == "overflow":
        a = system(rng, 40) * 1e200
    else:
        a, choices = graded(rng, 1e5), {"refinements": 0}
    b = a @ rng.standard_normal(40)
    request = dp.SpsolveRequest(*S.sparse_tensor(a).fixed(), DEV.array(b), precision="f32", stamp=1, **choices)
    plan = made(request, executor)
    library = executor.library
    for turn in range(2):
        before = len(library.phases)
        with np.errstate(all="ignore"):
            x, info = enqueued(plan, request)
        assert info == 0
        assert backward(a, x, b) < 100
        assert sorted(value_types(library)) == ["float32", "float64"]
        if turn:
            assert library.phases[before:] == [SOLVE], "of these values it is known that those of f32 do not do"
    assert REFACTORIZATION not in library.phases


def test_the_status_is_that_of_the_own_precision(executor):
    indefinite = sp.csr_array(np.diag([1.0, -1.0, 2.0]))
    request = dp.SpsolveRequest(*S.sparse_tensor(indefinite), DEV.array(np.ones(3)), assume_a="pos", precision="f32")
    assert enqueued(made(request, executor), request)[1] > 0
    singular = sp.csr_array((np.array([1.0, 0.0, 1.0]), np.arange(3, dtype="i4"), np.arange(4, dtype="i4")), (3, 3))
    request = dp.SpsolveRequest(*S.sparse_tensor(singular), DEV.array(np.ones(3)), precision="f32")
    assert enqueued(made(request, executor), request)[1] < 0


def test_a_right_side_of_zeros_needs_no_step_and_nan_spreads(executor, rng):
    a = S.sparse_tensor(system(rng)).fixed()
    request = dp.SpsolveRequest(*a, DEV.array(np.zeros((N, 2))), precision="f32")
    plan = made(request, executor)
    x, info = enqueued(plan, request)
    assert (info, x.any()) == (0, False)
    assert executor.library.phases.count(SOLVE) == 1
    b = np.zeros((N, 2))
    b[7, 1] = np.nan
    x, _ = enqueued(plan, request.replace(b=DEV.array(b)))
    assert np.isnan(x[:, 1]).any()


@pytest.mark.parametrize("view", [0, 1, 2])
@pytest.mark.parametrize("kind", ["f8", "c16"])
def test_kernels_compile_for_a_gpu(view, kind):
    a = S.sparse_tensor(sp.eye_array(3, format="csr").astype(kind))
    request = dp.SpsolveRequest(*a, DEV.zeros(3, a.dtype), precision="f32", assume_a="her")
    chosen = "-arch=sm_90", *options(request, view, conj=kind == "c16")
    try:
        assert all(compiled(SOURCE, name, chosen) for name in KERNELS)
    except LibraryNotFound as error:
        pytest.skip(str(error))


def test_splu_and_spsolve_with_the_choice_on_the_host(rng):
    a = system(rng)
    b = rng.standard_normal(N)
    x = S.spsolve(a, DEV.array(b), precision="f32").numpy()
    assert backward(a, x, b) < 100
    factors = S.splu(a, precision="f32", memory="hybrid")
    np.testing.assert_allclose(factors.solve(DEV.array(b)).numpy(), x)
    with pytest.raises(LinAlgError, match="singular"):
        S.splu(sp.csr_array(np.array([[1.0, 0.0], [1.0, 0.0]])), precision="f32")
