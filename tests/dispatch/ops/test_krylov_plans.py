"""The plans of iterations over stand-ins of cuSPARSE and the driver: one launch of a graph, made once for a matrix."""

import ctypes
import gc
import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from cudabind import nvjitlink
from cudabind.errors import LibraryNotFound
from dispatch.errors import Refused
from dispatch.execute import while_graph
from dispatch.keys import Arch
from dispatch.ops.sparse.cases_krylov import KRYLOV, krylov_cases
from dispatch.table.select import select

sp = pytest.importorskip("scipy.sparse")


def module_at(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HERE = Path(__file__)
cusparse = module_at(HERE.parents[1] / "cusparse_stand_in.py")
graphs = module_at(HERE.parents[1] / "while_graph_stand_in.py")
krylov_on_cpu = module_at(HERE.with_name("krylov_on_cpu.py"))
ROWS = [row for row in dp.TABLE if row.op in KRYLOV and row.library == "own" and row.dtypes[0].name == "f64"]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return krylov_on_cpu.Iterations(tmp_path_factory.mktemp("krylov"))


@pytest.fixture
def executor(on_cpu, monkeypatch):
    found = graphs.iterating(cusparse.executor_of(monkeypatch), on_cpu, monkeypatch)
    yield found
    gc.collect()  # what a plan holds is given back to the stand-in


def poisson(n):
    line = sp.diags_array([-np.ones(n - 1), 2 * np.ones(n), -np.ones(n - 1)], offsets=[-1, 0, 1])
    return (sp.kron(line, sp.eye_array(n)) + sp.kron(sp.eye_array(n), line)).tocsr()


def made(request, executor):
    row = select(request, Arch(90))
    return row.call(request, executor, row)


def enqueued(plan, request):
    outputs = request.device.executor().outputs(request)
    plan.enqueue(request.arguments(outputs))
    return request.result(outputs)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_plan_is_one_launch_that_solves_every_case(row, executor, rng):
    for case in krylov_cases(row):
        check = case.check(dp.device("host"), rng)
        request = check.request
        if any(rule(request) for rule in row.rules):
            continue
        plan = row.call(request, executor, row)
        assert not plan.capture_safe
        for _ in range(2):  # the second over memory that the first has left
            check.renew()
            executor.driver.called.clear()
            check.verify(enqueued(plan, request))
            assert executor.driver.called.count("cuGraphLaunch") == 1
            if request.out is request.x0 is not None:
                break
    plan = None
    gc.collect()
    assert not executor.driver.executables
    assert not executor.driver.graphs
    assert not executor.library.alive, "descriptors are given back"


def test_a_graph_is_made_once_for_a_matrix_and_follows_the_vectors(executor, rng):
    dev = dp.device("host")
    a = poisson(6)
    matrix = dp.sparse.sparse_tensor(a)
    request = dp.CgRequest(*matrix, dev.array(rng.standard_normal(36)), rtol=1e-10)
    plan = made(request, executor)
    instantiated = []
    for _ in range(3):
        b = rng.standard_normal(36)
        given = request.replace(b=dev.array(b))
        x, info, iterations, residual = enqueued(plan, given)
        np.testing.assert_allclose(a @ x.numpy(), b, atol=1e-8)
        assert (info.item(), iterations.item() > 5, residual.item() < 1e-8) == (0, True, True)
        instantiated.append(executor.driver.called.count("cuGraphInstantiate"))
    assert instantiated == [1, 1, 1]
    assert executor.driver.called.count("cuGraphExecKernelNodeSetParams") == 4


def test_values_that_change_in_place_and_matrices_at_other_addresses_are_followed(executor, rng):
    dev = dp.device("host")
    a = poisson(5)
    matrix, b = dp.sparse.sparse_tensor(a.copy()).fixed(), rng.standard_normal(25)
    request = dp.CgRequest(*matrix, dev.array(b), rtol=1e-10)
    plan = made(request, executor)
    enqueued(plan, request)
    matrix.values.copy_from(matrix.values.numpy() * 3)
    np.testing.assert_allclose(3 * (a @ enqueued(plan, request)[0].numpy()), b, atol=1e-8)
    assert executor.driver.called.count("cuGraphInstantiate") == 1
    assert executor.library.called.count("cusparseSpMV_preprocess") == 1
    others = {factor: matrix.with_values(dev.array(a.data * factor)) for factor in range(4, 10)}
    for factor, other in others.items():
        x = enqueued(plan, request.replace(values=other.values))[0].numpy()
        np.testing.assert_allclose(factor * (a @ x), b, atol=1e-8)
    assert executor.driver.called.count("cuGraphInstantiate") == 7
    gc.collect()
    assert len(executor.driver.executables) == 4, "the oldest go"
    del plan
    gc.collect()


def test_the_product_is_by_the_algorithm_that_is_named(executor, monkeypatch):
    given = []
    carry_out = executor.library._SpMV

    def noted(*arguments):
        given.append(int(arguments[-2]))
        return carry_out(*arguments)

    monkeypatch.setattr(executor.library, "_SpMV", noted)
    matrix, b = dp.sparse.sparse_tensor(poisson(4)), dp.device("host").array(np.ones(16))
    for name, number in (("default", 0), ("csr_alg2", 3)):
        request = dp.CgRequest(*matrix, b, algorithm=name)
        enqueued(made(request, executor), request)
        assert set(given) == {number}
        given.clear()


def test_another_pattern_is_another_plan():
    dev = dp.device("host")
    a, b = poisson(5), dev.array(np.ones(25))
    one, other = dp.sparse.sparse_tensor(a).fixed(), dp.sparse.sparse_tensor(a).fixed()
    keys = {dp.CgRequest(*matrix, b).key() for matrix in (one, one.with_values(one.values), other)}
    assert len(keys) == 2


def test_a_driver_without_while_nodes_is_refused_in_words(on_cpu, monkeypatch):
    executor = graphs.iterating(cusparse.executor_of(monkeypatch), on_cpu, monkeypatch, version=12030)
    request = dp.CgRequest(*dp.sparse.sparse_tensor(poisson(4)), dp.device("host").array(np.ones(16)))
    with pytest.raises(Refused, match=r"CUDA 12\.4"):
        made(request, executor)


def test_what_a_while_node_is_given_is_as_large_as_the_drivers_structure():
    node = while_graph.NodeParams
    assert ctypes.sizeof(node) == 256
    offsets = {name: getattr(node, name).offset for name in ("type", "handle", "kind", "size", "graphs", "context")}
    assert offsets == {"type": 0, "handle": 16, "kind": 24, "size": 28, "graphs": 32, "context": 40}
    assert node.reserved2.offset == 248


@pytest.mark.compiles
@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_100"])
def test_the_kernel_that_tells_the_node_is_compiled_for_every_gpu(arch):
    """The driver has the function that it calls; here another stands for it."""
    function = b".version 7.0\n.target sm_70\n.address_size 64\n.visible .func cudaGraphSetConditional"
    function += b" (.param .b64 handle, .param .b32 value) { ret; }"
    try:
        code = nvjitlink.link([("PTX", while_graph.PTX.rstrip(b"\0")), ("PTX", function)], [f"-arch={arch}"])
    except LibraryNotFound as error:
        pytest.skip(str(error))
    assert b"set_condition" in code


def test_factors_are_analysed_with_a_graph_and_handed_over_when_they_change(executor, rng):
    dev, a = dp.device("host"), poisson(6)
    factors, b = dp.sparse.ic0(dp.sparse.sparse_tensor(a)), rng.standard_normal(36)
    lower = factors.matrix.values
    request = dp.CgRequest(*factors.source, dev.array(b), M=lower, preconditioner="ic0", rtol=1e-10)
    plan, count = made(request, executor), executor.library.called.count

    def iterations(given=request):
        x, info, iterations, _ = enqueued(plan, given)
        np.testing.assert_allclose(a @ x.numpy(), b, atol=1e-8)
        assert info.item() == 0
        return iterations.item()

    few = iterations()
    assert (count("cusparseSpSV_analysis"), count("cusparseSpSV_updateMatrix")) == (2, 0)
    right, many = lower.numpy().copy(), dp.cg(*factors.source, dev.array(b), rtol=1e-10)[2].item()
    assert few < many
    lower.copy_from(np.eye(36)[np.nonzero(a.toarray())])  # the factors of the unit matrix, in place
    assert abs(iterations() - many) <= 2
    assert (count("cusparseSpSV_analysis"), count("cusparseSpSV_updateMatrix")) == (2, 2)
    assert executor.driver.called.count("cuGraphInstantiate") == 1
    assert iterations(request.replace(M=dev.array(right))) == few, "other factors have a graph of their own"
    assert (count("cusparseSpSV_analysis"), executor.driver.called.count("cuGraphInstantiate")) == (4, 2)
    lower.copy_from(right)
    assert iterations() == few
    others = [dev.array(right) for _ in range(5)]  # so many that the oldest go, and their analyses with them
    assert [iterations(request.replace(M=other)) for other in others] == [few] * 5
    assert len(executor.driver.executables) == 4
