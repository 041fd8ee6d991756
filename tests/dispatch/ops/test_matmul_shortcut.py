"""The way `matmul` takes when it has seen the layouts before: the same arguments as a request.

No GPU is needed to see that: the device of noted_products.py has host memory and an sm_90's rows. What cuBLASLt's
heuristic would answer is left out; everything before and behind it is the real code.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.keys import Compute, Epilogue
from dispatch.ops import matmul
from dispatch.ops.matmul import cublaslt
from dispatch.ops.matmul import shortcut as short_ways
from dispatch.ops.matmul.lower import lower

spec = importlib.util.spec_from_file_location("noted_products", Path(__file__).with_name("noted_products.py"))
products = importlib.util.module_from_spec(spec)
spec.loader.exec_module(products)
Gpu, NotingExecutor, dev, operands = products.Gpu, products.NotingExecutor, products.dev, products.operands
taken_by, CapturedExecutor = products.taken_by, products.CapturedExecutor

VARIANTS = {
    "plain": ("a", "b", "out"),
    "no out": ("a", "b"),
    "c": ("a", "b", "c", "out"),
    "bias": ("a", "b", "bias", "out"),
    "c and bias": ("a", "b", "c", "bias", "out"),
}


@pytest.mark.parametrize("names", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("numbers", [{}, {"alpha": 2.5}, {"alpha": 3, "beta": 0.5}, {"beta": 0.0}], ids=str)
def test_a_repeated_call_hands_over_what_its_request_would(dev, names, numbers):
    if "out" not in names and "c" not in names and numbers.get("beta"):
        numbers = {}  # there would be nothing to scale
    epilogue = Epilogue.RELU_BIAS if "bias" in names else Epilogue.NONE
    for turn in range(3):
        given = operands(dev)
        chosen = {name: given[name] for name in names}
        result = dp.matmul(chosen.pop("a"), chosen.pop("b"), epilogue=epilogue, **chosen, **numbers)
        arguments, reads, writes = taken_by(dev)[-1]
        fields = {name: given[name] for name in names} | {"out": result}
        request = dp.MatmulRequest(**fields, epilogue=epilogue, **numbers)
        assert arguments == request.arguments({})
        assert set(writes) == {result}
        assert set(reads) == {tensor for name, tensor in fields.items() if name != "out"}
        assert len(taken_by(dev)) == turn + 1
    assert len(dev.executor().shortcuts) == 1, "the second and third call were to take the short way"


def test_the_scales_of_a_repeated_call_are_handed_over(dev):
    a, b = dev.array(np.ones((32, 32)), "f8e4m3"), dev.array(np.ones((48, 32)), "f8e4m3").T
    out, amax = dev.zeros((32, 48), "f8e4m3"), dev.zeros((1,))
    scales = dp.Scales(a=dev.array([2.0], "f32"), b=0.5, d=dev.array([1.0], "f32"), amax_d=amax)
    for _ in range(3):
        dp.matmul(a, b, out=out, scales=scales)
        arguments, reads, writes = taken_by(dev)[-1]
        assert arguments == dp.MatmulRequest(a, b, out=out, scales=scales).arguments({})
        assert set(writes) == {out, amax}
        assert {scales.a, scales.d} <= set(reads)


def test_plans_that_are_forgotten_while_a_call_runs_are_not_remembered(dev, monkeypatch):
    given, executor = operands(dev), dev.executor()
    monkeypatch.setattr(NotingExecutor, "enqueue", lambda self, *_: self.forget())
    dp.matmul(given["a"], given["b"])
    assert not executor.shortcuts
    assert not executor.patterns


def test_a_pattern_that_is_forgotten_while_its_plan_is_made_is_not_remembered(dev, monkeypatch):
    given, executor = operands(dev), dev.executor()
    dp.matmul(given["a"], given["b"])
    assert executor.patterns
    resized = cublaslt.CublasLtPlan.resized
    monkeypatch.setattr(cublaslt.CublasLtPlan, "resized", lambda *given: executor.forget() or resized(*given))
    dp.matmul(given["a"][:16], given["b"])
    assert not executor.shortcuts


class Graphs:
    """What the graphs under capture keep."""

    def __init__(self):
        self.kept = []

    def keep(self, stream, *things):
        self.kept += things


def test_nothing_is_recorded_or_replayed_while_the_caller_captures(dev, monkeypatch):
    ran = []
    monkeypatch.setattr(cublaslt.CublasLtPlan, "enqueue", lambda _, arguments: ran.append(arguments))
    monkeypatch.setattr(Gpu, "open_executor", CapturedExecutor)
    dev.graphs = Graphs()
    given = operands(dev)
    for _ in range(200):  # without a capture most of them would be a graph's launches
        dp.matmul(given["a"], given["b"], out=given["out"])
    assert len(ran) == 200
    assert len(set(ran)) == 1
    assert any(isinstance(kept, cublaslt.CublasLtPlan) for kept in dev.graphs.kept)


def test_the_short_ways_are_bounded(dev, monkeypatch):
    monkeypatch.setattr(short_ways, "MAX_SHORTCUTS", 4)
    b = dev.array(np.ones((16, 48)), "f32")
    for rows in range(1, 10):
        dp.matmul(dev.array(np.ones((rows, 16)), "f32"), b)
        assert len(dev.executor().shortcuts) <= 4


def test_a_closed_device_takes_no_short_way(dev):
    given = operands(dev)
    for _ in range(2):
        dp.matmul(given["a"], given["b"], out=given["out"])
    dev.close()
    with pytest.raises(dp.errors.StaleTensor):
        dp.matmul(given["a"], given["b"], out=given["out"])


def test_a_plan_that_reads_numbers_on_the_device_is_not_taken_for_plain_ones(dev):
    """An int given by value would be read as an address."""
    given = operands(dev)
    fields = {"c": given["c"], "out": given["out"]}
    for alpha in (1.0, dev.array([3.0], "f32"), 2, dev.array([3.0], "f32"), 2.0):
        dp.matmul(given["a"], given["b"], alpha=alpha, **fields)
        arguments = taken_by(dev)[-1][0]
        assert arguments == dp.MatmulRequest(given["a"], given["b"], alpha=alpha, **fields).arguments({})
        if not isinstance(alpha, dp.Tensor):
            assert not any(s.plan.lowered.problem.device_scalars for s in dev.executor().shortcuts.values())


@pytest.mark.parametrize(
    "number", [-0.0, 0, -3, 2**31 - 1, 2**31, 2**60, 1e300, np.float32(0.1), np.int64(3)], ids=repr
)
def test_a_number_reaches_the_plan_as_its_request_has_it(dev, number):
    given = operands(dev)
    fields = {"c": given["c"], "out": given["out"]}
    for alpha, beta in ((1.0, 1.0), (number, 1.0), (0.5, number), (number, number)):
        dp.matmul(given["a"], given["b"], alpha=alpha, beta=beta, **fields)
        numbers = taken_by(dev)[-1][0][7:]
        wanted = dp.MatmulRequest(given["a"], given["b"], alpha=alpha, beta=beta, **fields).arguments({})[7:]
        assert [float(x).hex() for x in numbers] == [float(x).hex() for x in wanted]
        assert [type(x) for x in numbers] == [type(x) for x in wanted], "an int is an address"


def test_numbers_that_the_library_refuses_leave_the_plan_as_it_was(dev, monkeypatch):
    """Of two numbers one is in place when the other raises: the next call must set both again."""
    given, seen = operands(dev), []
    monkeypatch.setattr(
        cublaslt.CublasLtPlan, "_call", lambda plan, _: seen.append((plan._alpha.value, plan._beta.value))
    )
    plan = dev.executor().plan(dp.MatmulRequest(given["a"], given["b"], c=given["c"], out=given["out"]))
    addresses = (*(given[name].ptr for name in ("a", "b", "c")), 0, 0, 0, given["out"].ptr)
    plan.enqueue((*addresses, 1.0, 1.0))
    with pytest.raises(OverflowError):
        plan.enqueue((*addresses, 2.0, 10**400))
    plan.enqueue((*addresses, 1.0, 1.0))
    assert seen == [(1.0, 1.0), (1.0, 1.0)]


@pytest.mark.parametrize("beta", [np.float32(0.5), np.float64(0.0), 1], ids=repr)
def test_a_number_of_numpy_leads_to_the_problem_of_a_plain_one(dev, beta):
    """The cache on disk knows problems by their text."""
    given = operands(dev)
    requests = [
        dp.MatmulRequest(given["a"], given["b"], out=given["out"], beta=number) for number in (beta, float(beta))
    ]
    one, other = (lower(request, dp.Compute.COMPUTE_32F).problem for request in requests)
    assert one.as_key() == other.as_key()


@pytest.mark.parametrize("first", [Epilogue.GELU_BIAS, "gelu_bias"], ids=str)
@pytest.mark.parametrize("compute", [None, "32f", Compute.COMPUTE_32F], ids=str)
def test_names_take_the_way_of_the_members_that_they_mean(dev, monkeypatch, first, compute):
    given = operands(dev)
    fields = {name: given[name] for name in ("a", "b", "bias", "out")}
    dp.matmul(**fields, epilogue=first, compute=compute)
    assert len(dev.executor().shortcuts) == 1
    assert len(dev.executor().patterns) == 1
    monkeypatch.setattr(matmul, "MatmulRequest", None)  # no call makes a request from here on
    for epilogue in ("gelu_bias", "GELU-BIAS", Epilogue.GELU_BIAS):
        dp.matmul(**fields, epilogue=epilogue, compute=compute)
    smaller = fields | {"a": given["a"][:16], "out": given["out"][:16]}
    dp.matmul(**smaller, epilogue="gelu_bias", compute=compute)
    monkeypatch.undo()
    *same, last = taken_by(dev)
    assert len(same) == 4
    request = dp.MatmulRequest(**fields, epilogue=Epilogue.GELU_BIAS)
    assert all(arguments == request.arguments({}) for arguments, _, _ in same)
    assert last[0] == dp.MatmulRequest(**smaller, epilogue=Epilogue.GELU_BIAS).arguments({})
