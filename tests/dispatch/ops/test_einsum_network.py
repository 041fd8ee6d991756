"""Networks of small tensors by this library's kernel, compiled by g++ and run over the host's memory."""

# ruff: noqa: E501 - tables of errors

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from cudabind import nvrtc
from cudabind.errors import LibraryNotFound
from dispatch.core.request import IdlePlan
from dispatch.core.row import refusals
from dispatch.keys import C64, C128, F32, F64
from dispatch.ops.contraction import network, network_kernel, own_network
from dispatch.ops.contraction.cases import cases
from dispatch.table.einsum import OWN_ROWS
from dispatch.testing.check import Mismatch


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HERE = Path(__file__).parent
on_cpu_of = loaded(HERE / "network_on_cpu.py")
shapes_of = loaded(HERE.parent / "contraction_shapes.py")
networks = loaded(HERE.parent / "network_shapes.py")
ROW = {str(row.dtypes[0]): row for row in OWN_ROWS}


@pytest.fixture
def dev():
    return dp.device("host")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return on_cpu_of.OnCpu(tmp_path_factory.mktemp("networks"))


@pytest.fixture
def executor(on_cpu, monkeypatch):
    return on_cpu_of.executor_on(on_cpu, monkeypatch)


def result_of(request, executor, turns=1):
    """What the plan gives in each of its runs, which have the same bits, into memory that is poisoned first."""
    plan = own_network.plan(request, executor, ROW["f32"])
    program = [memory.copy() for memory in executor.made[-1:]]
    found = []
    for _ in range(turns):
        outputs = request.device.executor().outputs(request)
        for tensor in outputs.values():
            tensor.copy_from(np.full(tensor.shape, np.nan, tensor.dtype.numpy))
        plan.enqueue(request.arguments(outputs))
        found.append(request.result(outputs).numpy())
    assert all(one.tobytes() == found[0].tobytes() for one in found)
    for memory in executor.made[-2:]:
        assert (memory[-on_cpu_of.GUARD :] == 0xFF).all(), "nothing writes behind a plan's memory"
    if len(executor.made) == 1:
        assert (program[0] == executor.made[0]).all(), "a program is read alone"
    return found[0]


def check(request, spec, arrays, executor, turns=1):
    expected, size = networks.numpys(spec, arrays, request.schedule.path)
    found = result_of(request, executor, turns)
    assert found.shape == expected.shape
    assert networks.is_near(found, expected, size, arrays), spec


# -- cases ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("row", OWN_ROWS, ids=lambda row: row.name)
def test_a_row_passes_its_cases_on_the_cpu(row, dev, executor, each):
    def verify(case, rng):
        made = case.check(dev, rng)
        assert not refusals(row, made.request, made.request.signature())
        verified(made, row, executor)

    each(cases(row), verify)


def verified(made, row, executor):
    plan = own_network.plan(made.request, executor, row)
    assert plan.capture_safe
    result = None
    for _ in range(2):  # the second over memory that the first has left
        made.renew(result)
        outputs = made.request.device.executor().outputs(made.request)
        for tensor in outputs.values():
            tensor.copy_from(np.full(tensor.shape, np.nan, tensor.dtype.numpy))
        plan.enqueue(made.request.arguments(outputs))
        result = made.request.result(outputs)
        made.verify(result)


def verified_all(row, dev, executor, rng):
    for case in reversed(cases(row)):
        verified(case.check(dev, rng), row, executor)


WRONG = {
    "the last term is left out": ("term < step.terms; term += parts) {\n                Number x", "term < step.terms - 1; term += parts) {\n                Number x"),
    "rows are taken for their neighbours": ("line - batch * step.row_tiles", "(line - batch * step.row_tiles) / 2"),
    "a batch is the first": ("batch * step.b_batch", "0"),
    "lanes do not add up": ("add(sum[0][0], theirs);", ""),
    "results lie as they are numbered": ("at += (int)(x - rest * axis.extent) * axis.stride;", "at += (int)(x - rest * axis.extent);"),
    "the last elements are not copied": ("if (element >= copy.count) continue;", "if (element >= copy.count - 1) continue;"),
    "conjugates are not taken": ("if (conjugated) y.part[1] = -y.part[1];", ""),
    "zeros are not written": ("if (header.zeros_at)", "if (0)"),
    "products of imaginary parts are added": ("fma(-x.part[1]", "fma(x.part[1]"),
    "no warp waits for another": ("result, warp, lane);\n#endif\n        }\n        __syncthreads();", "result, warp, lane);\n#endif\n        }"),
    "operands change places": ("pointers.at[copy.slot]", "pointers.at[header.slot ? copy.slot ^ (header.slot > 1 && (copy.slot | 1) < header.slot) : 0]"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_the_cases_find_a_wrong_kernel(name, dev, executor, rng):
    right, wrong = WRONG[name]
    assert network_kernel.SOURCE.count(right) >= 1
    executor.altered = lambda source: source.replace(right, wrong)
    with pytest.raises(Mismatch):
        verified_all(ROW["c128"], dev, executor, rng)


# -- drawn networks ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["f4", "f8", "c8", "c16"])
def test_drawn_networks_are_numpys(kind, dev, executor, rng):
    counts, dims = set(), set()
    for turn in range(60):
        spec, shapes = networks.drawn(rng, 24 if turn % 2 else 5)
        arrays = [networks.numbers(rng, shape, kind) for shape in shapes]
        tensors = [networks.lying(rng, dev, array) if turn % 3 else dev.array(array) for array in arrays]
        optimize = ("auto", "left-to-right", "greedy")[turn % 3]
        check(dp.EinsumRequest(spec, tensors, optimize=optimize), spec, arrays, executor)
        counts.add(len(arrays))
        dims.add(len({*spec} - {*",->"}))
    assert min(counts) <= 2
    assert max(counts) >= 20
    assert min(dims) <= 2
    assert max(dims) >= 10


def test_drawn_networks_do_not_depend_on_where_arrays_lie(dev, executor, rng):
    """What fits in no shared memory lies in the plan's, with guards behind it; all bits are the same."""
    for _ in range(25):
        spec, shapes = networks.drawn(rng, 12)
        arrays = [networks.numbers(rng, shape, "f8") for shape in shapes]
        found = []
        for _ in range(2):
            tensors = [dev.array(array) for array in arrays]
            request = dp.EinsumRequest(spec, tensors)
            found.append(result_of(request, executor, turns=2))
            executor.shared = network.program_of(request).words.nbytes  # room for the program alone
        executor.shared = on_cpu_of.MAX_SHARED
        assert executor.launched[-1][1] < executor.launched[-3][1]
        assert found[0].tobytes() == found[1].tobytes()
        for tensor, array in zip(tensors, arrays, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), array)


@pytest.mark.parametrize(("rows", "columns", "bond"), [(3, 3, 8), (4, 4, 4), (6, 4, 4), (2, 2, 7), (1, 5, 13)])
def test_lattices_are_numpys(rows, columns, bond, dev, executor, rng):
    spec, shapes = shapes_of.lattice(rows, columns, bond)
    arrays = [networks.numbers(rng, shape, "f4") / bond for shape in shapes]
    request = dp.EinsumRequest(spec, [*map(dev.array, arrays)])
    check(request, spec, arrays, executor, turns=2)


@pytest.mark.parametrize("kind", ["f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("spec", ["ij,jk->ik", "bij,bjk->bki", "ij,kj->ki", "ia,i->ia", "ij,ij->", "i,j->ji", "ij->j"])
def test_tiles_of_any_extents(spec, kind, dev, executor, rng):
    """Extents around those of the tiles, in which some threads have a part of theirs."""
    for size in (1, 3, 4, 5, 17, 33):
        sizes = dict(zip("abijk", (2, 3, size, size + 1, max(1, size - 1)), strict=True))
        terms = spec.split("->")[0].split(",")
        arrays = [networks.numbers(rng, [sizes[mode] for mode in term], kind) for term in terms]
        request = dp.EinsumRequest(spec, [*map(dev.array, arrays)])
        check(request, spec, arrays, executor)


@pytest.mark.parametrize(
    ("kinds", "result"),
    [
        (("f2", "f4", "f2"), "f4"),
        (("f2", "f8", "f4"), "f8"),
        (("c8", "c16", "f8"), "c16"),
        (("f2", "c16", "f4"), "c16"),
    ],
)
def test_operands_of_several_precisions(kinds, result, dev, executor, rng):
    shapes = ((4, 5), (5, 3), (3, 6))
    arrays = [networks.numbers(rng, shape, kind) for shape, kind in zip(shapes, kinds, strict=True)]
    request = dp.EinsumRequest("ij,jk,kl->li", [*map(dev.array, arrays)], conj=(0, 1))
    wide = [array.astype(np.complex128) for array in arrays]
    expected = (wide[0].conj() @ wide[1].conj() @ wide[2]).T
    found = result_of(request, executor)
    assert found.dtype == np.dtype(result)
    np.testing.assert_allclose(found, expected, rtol=0, atol=60 * np.finfo(result).eps * np.abs(expected).max())


def test_a_result_of_16_bits_is_rounded_once(dev, executor, rng):
    """What is on the way is f32: whole numbers beyond 2048, which f16 has not, come back."""
    a, b = np.full((1, 4), 60.0, "f2"), rng.integers(50, 60, (4, 64)).astype("f2")
    c = np.full((64, 1), 2.0**-9, "f2")
    request = dp.EinsumRequest("ij,jk,kl->il", [*map(dev.array, (a, b, c))], optimize="left-to-right")
    exact = (a.astype("f8") @ b.astype("f8") @ c.astype("f8")).astype("f2")
    np.testing.assert_array_equal(result_of(request, executor), exact)


def test_addresses_are_those_of_the_run(dev, executor, rng):
    shapes = ((3, 4), (4, 5), (5, 2))
    first = [dev.zeros(shape, "f64") for shape in shapes]
    request = dp.EinsumRequest("ij,jk,kl->il", first)
    plan = own_network.plan(request, executor, ROW["f64"])
    for _ in range(3):
        arrays = [rng.standard_normal(shape) for shape in shapes]
        other = replace(request, operands=tuple(map(dev.array, arrays)), out=dev.zeros((3, 2), "f64"))
        plan.enqueue(other.arguments({}))
        np.testing.assert_allclose(other.out.numpy(), np.linalg.multi_dot(arrays), rtol=1e-12)


def test_a_result_without_elements_is_no_launch(dev, executor):
    request = dp.EinsumRequest("ij,jk->ik", [dev.zeros((0, 3), "f64"), dev.zeros((3, 2), "f64")])
    assert isinstance(own_network.plan(request, executor, ROW["f64"]), IdlePlan)
    assert not executor.launched


def test_infinities_go_where_they_are_multiplied(dev, executor):
    a, b = np.ones((3, 4)), np.ones((4, 5))
    a[1, 2], b[0, 3] = np.inf, np.nan
    found = result_of(dp.EinsumRequest("ij,jk->ik", [*map(dev.array, (a, b))]), executor)
    np.testing.assert_array_equal(found, np.einsum("ij,jk->ik", a, b))


@pytest.mark.parametrize(
    ("dtype", "arch"),
    [
        (F32, "sm_75"),
        *(pytest.param(dtype, arch, marks=pytest.mark.exhaustive) for dtype in (F32, F64, C64, C128)
          for arch in ("sm_80", "sm_90", "sm_100")),
    ],
)  # fmt: skip
def test_the_kernel_compiles(dtype, arch):
    chosen = (f"-arch={arch}", *network_kernel.options(dtype, in_shared=True))
    try:
        assert nvrtc.compile(network_kernel.SOURCE, "network.cu", chosen).code
    except LibraryNotFound as error:
        pytest.skip(str(error))
