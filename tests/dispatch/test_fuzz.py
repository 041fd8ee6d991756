"""5,000 malformed requests, seeded: each raises an error that explains itself, none reaches the device.

tests/gpu/test_fuzz.py runs the very same on a GPU. Each function of `MISTAKES` (product_mistakes.py) makes exactly one
mistake in a good request; the fuzz chooses one, and a door to come in by.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch
from dispatch import MatmulRequest
from dispatch.errors import BadRequest, DispatchError, NoRow, StaleTensor
from dispatch.execute.cuda_executor import CudaExecutor
from dispatch.ops.matmul import cublaslt, empty
from dispatch.ops.matmul.host import NumpyMatmul

spec = importlib.util.spec_from_file_location("product_mistakes", Path(__file__).with_name("product_mistakes.py"))
mistakes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mistakes)
E, Scene, fp8_fields, MISTAKES = mistakes.E, mistakes.Scene, mistakes.fp8_fields, mistakes.MISTAKES

COUNT = 5000


def by_function(_scene, fields):
    return dispatch.matmul(**fields)


def by_request(_scene, fields):
    return dispatch.run(MatmulRequest(**fields))


def by_prepared_call(_scene, fields):
    return dispatch.prepare(MatmulRequest(**fields))()


def by_replacement(scene, fields):
    a, b = scene.array((16, 16)), scene.array((16, 16))
    return dispatch.run(MatmulRequest(a=a, b=b).replace(**fields))


def by_rebound_call(scene, fields):
    return scene.prepared(**{"out": None, **fields})


DOORS = (by_function, by_function, by_request, by_prepared_call, by_replacement, by_rebound_call)


@pytest.fixture
def launches(monkeypatch):
    """The number of times that anything was handed to a library or launched."""
    counted = []

    def count(owner, name):
        real = getattr(owner, name)

        def counting(*arguments):
            counted.append((owner, name))
            return real(*arguments)

        monkeypatch.setattr(owner, name, counting)

    count(NumpyMatmul, "run")
    count(cublaslt.CublasLtPlan, "enqueue")
    count(empty.EmptyPlan, "enqueue")
    count(CudaExecutor, "launch")
    return counted


def explains_itself(error):
    """Whether an error says what it is about: the operand and both sides of a mistake, or every row's reason."""
    if isinstance(error, BadRequest):
        return bool(error.operand and error.given and error.expected)
    if isinstance(error, NoRow):
        return bool(error.tried and error.nearest) and all(reasons for _, reasons in error.tried)
    return isinstance(error, StaleTensor) and len(str(error)) > 20


def what_it_raises(door, scene, fields):
    """The error, of whatever type, that a request ends in; None where it is taken."""
    try:
        door(scene, fields)
    except Exception as error:  # noqa: BLE001  # a wrong type of error is what this looks for
        return error
    return None


def fuzz(name, rng, launches, count=COUNT):
    """Send so many malformed requests to a device; gives how often each mistake was made, by the kind of error."""
    scene = Scene(name, rng)
    seen = {}
    for number in range(count):
        mistake, door = MISTAKES[number % len(MISTAKES)], scene.pick(DOORS)
        fields = scene.good(E.NONE if door in (by_replacement, by_rebound_call) else None)
        mistake(scene, fields)
        before = len(launches)
        error = what_it_raises(door, scene, fields)
        # The fields are described where something is wrong: to print all elements took two thirds of the time.
        place = f"number {number}, {mistake.__name__}, {door.__name__}"
        assert isinstance(error, DispatchError), f"{place}: {fields} gave {error!r}"
        assert explains_itself(error), f"{place}: {fields}: {error!r}"
        seen.setdefault(mistake.__name__, set()).add(type(error).__name__)
        assert len(launches) == before, f"{place}: {fields} reached the device"
    return scene, seen


def check_good_requests(scene, launches):
    """After all that, good requests work, and are seen by what counted the others."""
    for dtype, bound in (("f32", 1e-4), ("bf16", 0.1)):
        a, b = scene.array((48, 32), dtype), scene.array((32, 64), dtype)
        before = len(launches)
        out = dispatch.matmul(a, b, epilogue=E.RELU)
        expected = np.maximum(np.einsum("ik,kj->ij", a.numpy().astype(float), b.numpy().astype(float)), 0)
        np.testing.assert_allclose(out.numpy().astype(float), expected, rtol=bound, atol=bound)
        assert len(launches) == before + 1


@pytest.mark.parametrize(
    "count",
    [pytest.param(COUNT // 8, id="host-sample"), pytest.param(COUNT, id="host-all", marks=pytest.mark.exhaustive)],
)
def test_malformed_requests_raise_and_never_reach_the_device(count, rng, launches):
    scene, seen = fuzz("host", rng, launches, count)
    assert set(seen) == {mistake.__name__ for mistake in MISTAKES}
    assert {kind for kinds in seen.values() for kind in kinds} == {"BadRequest", "NoRow", "StaleTensor"}
    check_good_requests(scene, launches)


def test_the_good_fields_that_mistakes_are_made_in_are_good(rng):
    scene = Scene("host", rng)
    for _ in range(100):
        fields = scene.good()
        m, n, _ = scene.sizes(fields)
        result = dispatch.matmul(**fields)
        assert (result[0] if isinstance(result, tuple) else result).shape == (m, n)
    for made in (fp8_fields(scene)[0] for _ in range(10)):
        assert dispatch.matmul(**made).dtype == "bf16"
