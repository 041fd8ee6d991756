"""Repeated calls of einsum and of contractions find their plan without a request, at ever other addresses.

The stand-ins for a GPU and its executor are those of tests/dispatch/call_cache_cases.py.
"""

import importlib.util
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest
from dispatch.ops.contraction.base import ModesRequest
from dispatch.ops.contraction.einsum import EinsumRequest

spec = importlib.util.spec_from_file_location("stand_ins", Path(__file__).parents[1] / "call_cache_cases.py")
stand_ins = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_ins)


@pytest.fixture
def dev():
    device = stand_ins.Gpu()
    yield device
    device.close()


@pytest.fixture
def made(monkeypatch):
    """How many requests are made, by their ops."""
    count = Counter()
    for kind in (EinsumRequest, ModesRequest):

        def counted(self, before=kind.__post_init__):
            count[type(self).op] += 1
            before(self)

        monkeypatch.setattr(kind, "__post_init__", counted)
    return count


SHAPES = ((3, 4), (4, 5), (5, 2))


def test_a_call_of_the_same_layouts_is_one_plan_and_one_request(dev, made):
    runs = dev.executor().runs
    for turn in range(20):
        operands = [dev.empty(shape, "f64") for shape in SHAPES]
        out = dp.einsum("ij,jk,kl->il", *operands) if turn % 2 else dp.einsum("ij,jk,kl->il", operands)
        plan, arguments, reads, writes = runs[-1]
        assert arguments == (*(one.ptr for one in operands), out.ptr)
        assert (plan, [id(one) for one in reads]) == (runs[0][0], [id(one) for one in operands])
        assert [id(one) for one in writes] == [id(out)]
        assert (out.shape, out.dtype) == ((3, 2), "f64")
    assert made["einsum"] == 1


def test_other_specs_options_and_layouts_are_other_plans(dev, made):
    a, b = dev.empty((4, 4), "f64"), dev.empty((4, 4), "f64")
    asked = [
        *({"spec": spec} for spec in ("ij,jk->ik", "ij,kj->ik", [["i", "j"], ["j", "k"], ["k", "i"]])),
        *({"spec": "ij,jk->ik"} | option for option in ({"compute": "32f"}, {"library": "cutensor"})),
    ]
    for _ in range(3):
        for options in asked:
            dp.einsum(options["spec"], a, b, **{name: value for name, value in options.items() if name != "spec"})
        dp.einsum("ij,jk->ik", a.T, b)
    plans = [run[0] for run in dev.executor().runs]
    assert len(set(plans)) == len(asked) + 1
    assert plans[: len(asked) + 1] == plans[-len(asked) - 1 :]
    assert made["einsum"] == len(asked) + 1


def test_a_result_that_overlaps_is_refused_in_a_repeated_call_too(dev):
    memory = dev.empty((8, 4), "f64")
    b = dev.empty((4, 4), "f64")
    for _ in range(3):
        assert dp.einsum("ij,jk->ik", memory[:4], b, out=memory[4:]).ptr == memory[4:].ptr
    for _ in range(2):
        with pytest.raises(BadRequest, match=r"out: got memory that overlaps operands\[0\]"):
            dp.einsum("ij,jk->ik", memory[:4], b, out=memory[2:6])


def test_numbers_go_to_the_plan_of_a_repeated_call(dev, made):
    runs = dev.executor().runs
    a, b, c = (dev.empty((4, 4), "f64") for _ in range(3))
    for turn in range(10):
        out = dp.contract("ik,kj->ij", a, b, c=c, alpha=1.5 + turn, beta=np.float64(2.0 + turn))
        assert runs[-1][1] == (a.ptr, b.ptr, c.ptr, out.ptr, 1.5 + turn, 2.0 + turn)
        dp.elementwise_trinary("ij,j->ij", a, b[0], c, alpha=turn, beta=-turn, gamma=0.5)
        assert runs[-1][1][-3:] == (float(turn), float(-turn), 0.5)
    assert made["contract"] == made["elementwise_trinary"] == 1
    dp.contract("ik,kj->ij", a, b, c=c, beta=0.0)
    assert runs[-1][0] is not runs[0][0]  # nothing reads c
    assert made["contract"] == 2


def test_an_expression_is_one_plan(dev, made):
    expression = dp.tensors.contract_expression("ij,jk,kl->il", *SHAPES)
    found = made["einsum"]
    for _ in range(5):
        expression(*(dev.empty(shape, "f32") for shape in SHAPES))
    assert len({run[0] for run in dev.executor().runs}) == 1
    assert made["einsum"] == found + 1
