"""Contractions, einsum and what is elementwise on the GPU: every row through its cases, networks, other addresses."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import dispatch as dp
from dispatch.keys import HOST
from dispatch.ops.contraction import network, network_rules, own_network
from dispatch.ops.contraction.cases import FORMS, cases
from dispatch.row_check import check_row

ROWS = [row for op in (*FORMS, "einsum") for row in dp.TABLE.of(op) if row.min_arch != HOST]


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TESTS = Path(__file__).parents[2] / "dispatch"
shapes_of, networks = (loaded(TESTS / f"{name}.py") for name in ("contraction_shapes", "network_shapes"))


@pytest.fixture
def cutensor(skip_without):
    skip_without(next(row for row in ROWS if row.library == "cutensor"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_passes_its_cases_or_refuses_them_with_its_reasons(row, gpu, rng, skip_without, monkeypatch):
    if row.library != "own":  # whose rows come first, and take small networks
        monkeypatch.setattr(network_rules, "CALL_US", 0.0)
    if not row.on(gpu.arch):
        pytest.skip(f"needs {row.min_arch} or newer, this GPU is {gpu.arch}")
    skip_without(row)
    failed = []
    for case in cases(row):
        try:
            check_row(row, case, gpu, rng)
        except Exception as error:  # noqa: BLE001, PERF203  # whatever it is, the other cases are tried
            failed.append(f"{case.id}: {type(error).__name__}: {error}")
    assert not failed, "\n".join([f"{len(failed)} of {len(cases(row))} cases fail", *failed])


@pytest.mark.usefixtures("cutensor")
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64", "c64", "c128"])
def test_products_over_an_empty_axis_are_ones(gpu, dtype):
    x = gpu.zeros((300, 0, 7), dtype)
    for _ in range(3):
        assert (dp.tensors.prod(x, 1).numpy() == 1).all()
        assert (dp.reduce_modes("abc->ca", x, reduce="mul", alpha=-2.5).numpy() == -2.5).all()


@pytest.mark.usefixtures("cutensor")
@pytest.mark.parametrize("kind", ["f8", "c16"])
@pytest.mark.parametrize("library", [None, "own", "libraries"])
def test_drawn_contractions_are_numpys(gpu, rng, kind, library, monkeypatch):
    if library == "libraries":
        monkeypatch.setattr(network_rules, "CALL_US", 0.0)
    library = "own" if library == "own" else None
    for _ in range(500):
        spec, shapes = shapes_of.drawn(rng)
        arrays = [rng.standard_normal(shape).astype(kind) for shape in shapes]
        got = dp.einsum(spec, [gpu.array(array) for array in arrays], library=library).numpy()
        expected = np.einsum(spec, *arrays, optimize=len(arrays) > 2)
        size = np.einsum(spec, *map(np.abs, arrays), optimize=len(arrays) > 2)
        assert (np.abs(got - expected) <= 1e-12 * (np.abs(size) + 1)).all(), spec


# -- networks of small tensors in one launch ---------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["f4", "f8", "c8", "c16"])
def test_drawn_networks_by_one_launch_are_numpys(gpu, rng, kind):
    for turn in range(150):
        spec, shapes = networks.drawn(rng, 24 if turn % 2 else 5)
        arrays = [networks.numbers(rng, shape, kind) for shape in shapes]
        tensors = [networks.lying(rng, gpu, array) if turn % 3 else gpu.array(array) for array in arrays]
        request = dp.EinsumRequest(spec, tensors, library="own")
        found = [dp.run(request).numpy() for _ in range(3)]
        assert all(one.tobytes() == found[0].tobytes() for one in found), spec
        assert networks.is_near(found[0], *networks.numpys(spec, arrays, request.schedule.path), arrays), spec


@pytest.mark.parametrize("size", [(3, 3, 8), (4, 4, 4), (6, 4, 4), (2, 2, 16)])
def test_a_lattice_is_one_graph_of_one_launch_at_any_addresses(gpu, rng, size):
    spec, shapes = shapes_of.lattice(*size)
    for _ in range(20):
        arrays = [networks.numbers(rng, shape, "f4") / size[-1] for shape in shapes]
        request = dp.EinsumRequest(spec, [*map(gpu.array, arrays)], out=gpu.zeros((), "f32"))
        found = dp.run(request).numpy()
        assert networks.is_near(found, *networks.numpys(spec, arrays, request.schedule.path), arrays)
    executor = gpu.executor()
    assert executor.relocate(executor.plan(request), request.arguments({})) == ""
    told = str(dp.explain(request))
    assert "network" in told
    assert "launched as a graph of 1 node, at any addresses" in told


@pytest.mark.parametrize("kind", ["f4", "c16"])
def test_what_is_on_the_way_may_lie_in_the_gpus_memory(gpu, rng, kind, monkeypatch):
    for _ in range(20):
        spec, shapes = networks.drawn(rng, 12)
        arrays = [networks.numbers(rng, shape, kind) for shape in shapes]
        near = dp.run(dp.EinsumRequest(spec, [*map(gpu.array, arrays)], library="own")).numpy()
        request = dp.EinsumRequest(spec, [*map(gpu.array, arrays)], library="own", memory_limit=1 << 40)  # a new plan
        with monkeypatch.context() as patch:
            patch.setattr(own_network, "most_shared", lambda _, r=request: network.program_of(r).words.nbytes)
            far = dp.run(request).numpy()
        assert near.tobytes() == far.tobytes(), spec


@pytest.mark.usefixtures("cutensor")
def test_all_ways_of_a_small_network_race(gpu, rng):
    arrays = [rng.standard_normal((6, 6)) for _ in range(4)]
    for _ in range(2):
        got = dp.einsum("ab,bc,cd,de->ae", *map(gpu.array, arrays), autotune=True)
        np.testing.assert_allclose(got.numpy(), np.linalg.multi_dot(arrays), rtol=1e-11, atol=1e-11)


@pytest.mark.usefixtures("cutensor")
@pytest.mark.parametrize("kind", ["f4", "f8", "c8"])
@pytest.mark.parametrize("spec", shapes_of.TCCG)
def test_the_contractions_of_the_benchmark_are_numpys(gpu, rng, kind, spec):
    inputs, _ = spec.split("->")
    sizes = {mode: int(rng.integers(5, 14)) for mode in inputs if mode != ","}
    arrays = [rng.standard_normal([sizes[mode] for mode in term]).astype(kind) for term in inputs.split(",")]
    expected = np.einsum(spec, *(array.astype("c16") for array in arrays), optimize=True)
    for library in (None, "cutensor"):
        got = dp.einsum(spec, *map(gpu.array, arrays), library=library).numpy()
        bound = 64 * np.finfo(kind).eps * np.abs(expected).max()
        assert np.abs(got - expected).max() <= bound


@pytest.mark.usefixtures("cutensor")
@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16, "f4", "f8", "c8", "c16"], ids=str)
def test_scalars_are_numpys_as_often_as_they_are_asked_for(gpu, rng, kind):
    shapes = ((8, 5), (5, 11), (11, 8))
    for turn in range(40):
        arrays = [rng.integers(-1, 2, shape).astype(kind) for shape in shapes]
        expected = np.einsum("ab,bc,ca->", *(array.astype("c16") for array in arrays))
        optimize = ((0, 1, 2),) if turn % 2 else "auto"  # three at once, which are two contractions
        request = dp.EinsumRequest("ab,bc,ca->", [*map(gpu.array, arrays)], optimize=optimize)
        assert complex(dp.run(request).numpy()) == expected  # of whole numbers all is exact
        assert complex(dp.prepare(request)().numpy()) == expected


@pytest.mark.usefixtures("cutensor")
def test_a_call_that_comes_again_is_one_graph_at_any_addresses(gpu, rng):
    shapes = ((24, 16), (16, 32), (32, 8), (8, 24))
    for _ in range(200):
        arrays = [rng.standard_normal(shape) for shape in shapes]
        got = dp.einsum("ij,jk,kl,li->il", *map(gpu.array, arrays))
    a, b, c, d = arrays
    np.testing.assert_allclose(got.numpy(), (a @ b @ c) * d.T, rtol=1e-11)
    request = dp.EinsumRequest("ij,jk,kl,li->il", [gpu.array(array) for array in arrays])
    dp.run(request)
    assert "launched as a graph" in str(dp.explain(request))


@pytest.mark.usefixtures("cutensor")
def test_numbers_follow_a_learnt_call(gpu, rng):
    a, b, c = (rng.standard_normal((20, 20)) for _ in range(3))
    tensors = [gpu.array(array) for array in (a, b, c)]
    for turn in range(150):
        alpha, beta = 1 + turn / 7, turn / 3
        got = dp.contract("ik,jk->ji", *tensors[:2], c=tensors[2], alpha=alpha, beta=beta)
        if turn % 25 == 0:
            np.testing.assert_allclose(got.numpy(), alpha * (a @ b.T).T + beta * c, rtol=1e-11, atol=1e-11)


@pytest.mark.usefixtures("cutensor")
def test_kernels_race_and_the_result_is_right(gpu, rng):
    a, b = rng.standard_normal((8, 12, 10)), rng.standard_normal((10, 9, 12))
    for _ in range(2):
        got = dp.contract("ikl,ljk->ij", gpu.array(a), gpu.array(b), autotune=True)
        np.testing.assert_allclose(got.numpy(), np.einsum("ikl,ljk->ij", a, b), rtol=1e-11, atol=1e-11)


def test_products_run_by_cublaslt_alone(gpu, rng):
    arrays = [rng.standard_normal(shape).astype("f4") for shape in ((30, 40), (40, 50), (50, 20))]
    got = dp.einsum("ij,jk,kl->il", *map(gpu.array, arrays), library="cublasLt").numpy()
    np.testing.assert_allclose(got, np.linalg.multi_dot([array.astype("f8") for array in arrays]), rtol=1e-3, atol=1e-3)


STARVED = """
import sys
import numpy as np
from cudabind import driver
import dispatch as dp
from dispatch.errors import OutOfMemory

left, dev = int(sys.argv[1]) << 20, dp.device("cuda:0")
rng, told = np.random.default_rng(3), {}
arrays = {kind: [rng.integers(-1, 2, shape).astype(kind) for shape in ((64, 48), (48, 56), (56, 64))]
          for kind in ("f4", "f8", "c8", "c16")}
tensors = {kind: [dev.array(one) for one in some] for kind, some in arrays.items()}
dev.synchronize()
hogs = []
with dev.context:
    while (room := driver.cuMemGetInfo()[0] - left) > 1 << 20:
        try:
            hogs.append(driver.cuMemAlloc(room if room < 1 << 30 else 1 << 30))
        except Exception as error:
            told[f"no more to take: {type(error).__name__}"] = 1
            break
for kind, some in tensors.items():
    for spec, count in (("ab,bc,ca->", 3), ("ab,ab->", 2), ("ab,bc->ca", 2)):
        given = [some[0], some[0]] if spec == "ab,ab->" else some[:count]
        try:
            got = dp.einsum(spec, *given, library="cutensor").numpy()
        except OutOfMemory as error:
            told[f"OutOfMemory: {str(error)[:300]}"] = told.get(f"OutOfMemory: {str(error)[:300]}", 0) + 1
            continue
        of = arrays[kind]
        want = np.einsum(spec, *([of[0], of[0]] if spec == "ab,ab->" else of[:count]))
        assert np.array_equal(got, want), (kind, spec)
        told["right"] = told.get("right", 0) + 1
with dev.context:
    for hog in hogs:
        driver.cuMemFree(hog)
assert np.array_equal(dp.einsum("ab,bc->ca", *tensors["f8"][:2]).numpy(), np.einsum("ab,bc->ca", *arrays["f8"][:2]))
print(told)
"""


@pytest.mark.alone
@pytest.mark.usefixtures("cutensor", "gpu")
@pytest.mark.parametrize("left", [0, 8, 64])
def test_where_memory_is_short_a_contraction_is_right_or_out_of_memory(left):
    """With so many MiB of the GPU's left: never CUTENSOR_STATUS_CUDA_ERROR, and all is well once there is memory."""
    ran = subprocess.run(
        [sys.executable, "-c", STARVED, str(left)], capture_output=True, text=True, check=False, timeout=240
    )
    print(f"{left} MiB left: {ran.stdout}")
    assert ran.returncode == 0, ran.stderr[-3000:]


@pytest.mark.usefixtures("cutensor")
@pytest.mark.parametrize("kind", ["f2", "f4", "f8", "c8"])
def test_reductions_of_what_lies_anywhere(gpu, rng, kind):
    """cuTENSOR reads 16 bytes at once, as far as its operands are aligned or not."""
    for spec, shape in (("ab->a", (8, 4)), ("ab->a", (33, 16)), ("abcd->ac", (2, 5, 4, 1)), ("aab->b", (4, 4, 8))):
        for place in range(8):
            count = int(np.prod(shape))
            memory = networks.numbers(rng, (count + 8,), kind)
            x, right = gpu.array(memory)[place : place + count].reshape(*shape), memory[place : place + count]
            right = np.einsum(spec, right.reshape(shape).astype("c16" if kind == "c8" else "f8"))
            calls = [dp.prepare(dp.EinsumRequest(spec, [x])), lambda spec=spec, x=x: dp.einsum(spec, x)]
            for call in (
                *calls,
                lambda spec=spec, x=x: dp.reduce_modes(spec, x, reduce="max" if kind != "c8" else "add"),
            ):
                found = call()
            for call in calls:
                found = call().numpy()
                np.testing.assert_allclose(found, right, rtol=1e-2 if kind == "f2" else 1e-4, atol=1e-2)
