"""The way `matmul` takes when it has seen the layouts before: the same refusals as a request's, after good calls."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest
from dispatch.execute.cuda_executor import CudaExecutor
from dispatch.keys import Epilogue
from dispatch.ops.matmul import cublaslt

spec = importlib.util.spec_from_file_location("noted_products", Path(__file__).with_name("noted_products.py"))
products = importlib.util.module_from_spec(spec)
spec.loader.exec_module(products)
Gpu, dev, operands, taken_by = products.Gpu, products.dev, products.operands, products.taken_by
CapturedExecutor = products.CapturedExecutor

MISTAKES = {
    "alpha is text": {"alpha": "2"},
    "alpha is nothing": {"alpha": None},
    "alpha is complex": {"alpha": 1j},
    "alpha is true": {"alpha": True},
    "beta is true": {"beta": True},
    "beta is complex": {"beta": 1j},
    "beta is a list": {"beta": [1.0]},
    "alpha is an array": {"alpha": np.ones(2)},
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_after_good_calls_is_still_a_bad_request(dev, mistake):
    given = operands(dev)
    for beta in (None, 1.0):
        dp.matmul(given["a"], given["b"], c=given["c"], out=given["out"], beta=beta)
    before = len(taken_by(dev))
    with pytest.raises(dp.errors.BadRequest, match=next(iter(mistake))):
        dp.matmul(given["a"], given["b"], c=given["c"], out=given["out"], **mistake)
    assert len(taken_by(dev)) == before


@pytest.mark.parametrize("mistake", [{"alpha": 0.5}, {"beta": 0.5}, {"alpha": float("nan")}], ids=str)
def test_a_fraction_of_integers_is_refused_after_good_calls_too(dev, mistake):
    a, b = dev.array(np.ones((32, 16)), "i8"), dev.array(np.ones((16, 48)), "i8")
    c, out = dev.zeros((32, 48), "i32"), dev.zeros((32, 48), "i32")
    for beta in (None, 2.0):
        dp.matmul(a, b, c=c, out=out, beta=beta)
    with pytest.raises(dp.errors.BadRequest, match="whole number"):
        dp.matmul(a, b, c=c, out=out, **mistake)
    dp.matmul(a, b, c=c, out=out, alpha=3.0, beta=2.0)
    assert taken_by(dev)[-1][0][7:9] == (3.0, 2.0)


def test_new_addresses_that_overlap_are_refused_after_good_calls(dev):
    whole = dev.zeros((64, 16))
    a, b, out = whole[:16], dev.zeros((16, 16)), dev.zeros((16, 16))
    for _ in range(2):
        dp.matmul(a, b, out=out)
    with pytest.raises(dp.errors.BadRequest, match="overlaps a"):
        dp.matmul(whole[16:32], b, out=whole[16:32])
    assert len(taken_by(dev)) == 2


class NoOutcomes:
    """An empty memory of autotune."""

    @staticmethod
    def get(_op, _key):
        return None


def test_what_would_run_now_is_refused_where_the_caller_captures(dev, monkeypatch):
    monkeypatch.setattr(Gpu, "open_executor", CapturedExecutor)
    a, b = dev.array(np.ones((32, 16)), "f32"), dev.array(np.ones((16, 48)), "f32")
    monkeypatch.setattr(CudaExecutor, "algorithms", lambda *_: NoOutcomes)
    with pytest.raises(dp.errors.BadRequest, match="autotune=True"):
        dp.matmul(a, b, autotune=True)


def test_extents_that_do_not_fit_are_refused_after_good_calls(dev):
    given = operands(dev)
    dp.matmul(given["a"], given["b"], bias=given["bias"], out=given["out"], epilogue=Epilogue.BIAS)
    wrong = {"b": dev.zeros((17, 48)), "out": dev.zeros((32, 47)), "bias": dev.zeros((47,))}
    assert dev.executor().patterns
    for name, tensor in wrong.items():
        fields = {name_: given[name_] for name_ in ("a", "b", "bias", "out")} | {name: tensor}
        with pytest.raises(dp.errors.BadRequest, match=name):
            dp.matmul(fields.pop("a"), fields.pop("b"), epilogue=Epilogue.BIAS, **fields)
    assert len(taken_by(dev)) == 1


def test_operands_of_two_devices_are_refused_after_good_calls(dev):
    other = Gpu()
    dp.matmul(dev.zeros((32, 16)), dev.zeros((16, 48)))
    with pytest.raises(dp.errors.BadRequest, match="b: got a tensor on"):
        dp.matmul(dev.zeros((8, 16)), other.zeros((16, 48)))
    other.close()


def test_what_the_library_refuses_for_other_extents_is_explained_by_a_request(dev, monkeypatch):
    dp.matmul(dev.zeros((32, 16)), dev.zeros((16, 48)), library="cublasLt")

    def refuse(*_):
        raise dp.errors.Refused("cublasLtMatmulAlgoGetHeuristic finds no algorithm")

    monkeypatch.setattr(cublaslt, "heuristic", refuse)
    with pytest.raises(dp.errors.NoRow, match="finds no algorithm"):
        dp.matmul(dev.zeros((8, 16)), dev.zeros((16, 48)), library="cublasLt")


@pytest.mark.parametrize("mistake", [{"alpha": 2**31}, {"beta": -(2.0**40)}, {"alpha": 10**400}], ids=repr)
def test_a_number_of_more_than_32_bits_is_refused_for_integers(dev, mistake):
    a, b = dev.array(np.ones((32, 16)), "i8"), dev.array(np.ones((16, 48)), "i8")
    c, out = dev.zeros((32, 48), "i32"), dev.zeros((32, 48), "i32")
    for beta in (None, 2.0):
        dp.matmul(a, b, c=c, out=out, beta=beta)
    with pytest.raises(dp.errors.BadRequest, match=f"^{next(iter(mistake))}: "):
        dp.matmul(a, b, c=c, out=out, **mistake)
    assert len(taken_by(dev)) == 2


UNTYPED = [
    {"epilogue": 2},
    {"fast_accum": 0},
    {"autotune": 0},
    {"reduced_precision": 0},
    {"workspace": True},
    {"compute": 68},
]


@pytest.mark.parametrize("mistake", UNTYPED, ids=repr)
@pytest.mark.parametrize("rows", [32, 40], ids=["seen", "of a pattern"])
def test_what_only_equals_a_good_choice_is_refused_after_good_calls(dev, mistake, rows):
    good = {"epilogue": Epilogue.RELU, "compute": dp.Compute.COMPUTE_32F, "workspace": 1}
    for _ in range(2):
        dp.matmul(dev.zeros((32, 16)), dev.zeros((16, 48)), **good)
    with pytest.raises(dp.errors.BadRequest, match=next(iter(mistake))):
        dp.matmul(dev.zeros((rows, 16)), dev.zeros((16, 48)), **(good | mistake))
    assert len(taken_by(dev)) == 2


def alias_cases(dev):
    """Good fields, and what of them is to be the output itself: operands that may not."""
    square = {name: dev.zeros((32, 32)) for name in ("a", "b", "c", "aux", "out")}
    bias = {"bias": dev.zeros((32,)), "epilogue": Epilogue.BIAS}
    yield "a", square | bias, ("a", "b", "out")
    yield "b", square | bias, ("a", "b", "out")
    yield "a", square, ("a", "b", "c", "out")
    yield "b", square, ("a", "b", "c", "out")
    yield "a", square, ("a", "b", "out")
    yield "aux", square | {"epilogue": Epilogue.GELU_AUX}, ("a", "b", "aux", "out")
    yield "aux", square | {"epilogue": Epilogue.DGELU}, ("a", "b", "aux", "out")


@pytest.mark.parametrize("number", range(7))
def test_an_operand_that_is_the_output_is_refused_after_good_calls(dev, number):
    name, fields, chosen = list(alias_cases(dev))[number]
    fields = {key: value for key, value in fields.items() if key in (*chosen, "bias", "epilogue")}
    for _ in range(2):
        dp.matmul(**fields)
    for out in (fields[name], fields[name][:]):  # the very tensor, and another view of it
        with pytest.raises(dp.errors.BadRequest, match=f"out: .* overlaps {name}|aux: .* overlaps out"):
            dp.matmul(**(fields | {"out": out}))
    assert len(taken_by(dev)) == 2


def test_read_only_memory_is_refused_after_the_same_that_may_be_written(dev):
    a, b, out = dev.zeros((32, 16)), dev.zeros((16, 48)), dev.zeros((32, 48))
    kept = dp.Tensor(out.storage, out.ptr, dev.layout(out.dtype, out.shape, out.layout.strides, out.ptr, readonly=True))
    for _ in range(2):
        dp.matmul(a, b, out=out)
        with pytest.raises(dp.errors.BadRequest, match="read-only"):
            dp.matmul(a, b, out=kept)


@pytest.mark.parametrize("wrong", [{"epilogue": "gelu_bais"}, {"compute": "f31"}], ids=str)
def test_a_name_that_means_nothing_is_refused_each_time(dev, wrong):
    given = operands(dev)
    for _ in range(2):
        dp.matmul(given["a"], given["b"])
        with pytest.raises(BadRequest, match=f"^{next(iter(wrong))}: got '"):
            dp.matmul(given["a"], given["b"], **wrong)
    assert len(taken_by(dev)) == 2
