"""Repeated calls over structured matrices, on a stand-in for a GPU: no request is made again, and all is as by one."""

import importlib.util
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.core.call_cache import is_constant
from dispatch.core.operands import OperandRequest

spec = importlib.util.spec_from_file_location("stand_ins", Path(__file__).parents[1] / "call_cache_cases.py")
stand_ins = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_ins)
FORM = dp.StructuredForm((32, 64), "f16", made_by="a library")


@pytest.fixture
def dev():
    device = stand_ins.Gpu()
    yield device
    device.close()


@pytest.fixture
def built(monkeypatch):
    """How many requests are made, by their ops."""
    count = Counter()
    before = OperandRequest.__post_init__

    def counted(self):
        count[type(self).op] += 1
        before(self)

    monkeypatch.setattr(OperandRequest, "__post_init__", counted)
    return count


def calls(dev):
    """Functions of a turn, which is in the numbers; operands lie elsewhere in each."""
    a, b = (lambda: dev.zeros((2304,), "u8")), (lambda: dev.zeros((64, 16), "f16"))
    c, bias = (lambda: dev.zeros((32, 16), "f16")), (lambda: dev.zeros((32,), "f16"))
    dense = lambda: dev.zeros((32, 64), "f16")  # noqa: E731
    product = (dp.matmul_2_4, dp.Matmul24Request)
    return {
        "matmul_2_4": lambda turn: (*product, (a(), FORM, b()), {"alpha": 1.0 + turn}),
        "matmul_2_4 added": lambda turn: (*product, (a(), FORM, b()), {"c": c(), "beta": 1.0 + turn, "bias": bias()}),
        "matmul_2_4 relu": lambda _: (
            *product,
            (a(), FORM, b()),
            {"activation": "relu", "upper_bound": 6.0, "out": c()},
        ),
        "prune_2_4": lambda _: (dp.prune_2_4, dp.Prune24Request, (dense(),), {"algorithm": dp.PruneAlgorithm.TILE}),
        "check_2_4": lambda _: (dp.check_2_4, dp.Check24Request, (dense(),), {}),
    }


def shown(run):
    """A run by what it enqueued, and where the outputs made for it are counted from."""
    plan, arguments, reads, writes = run
    places = [
        argument if not isinstance(argument, int) or argument < stand_ins.MADE else "made" for argument in arguments
    ]
    return plan.key, places, [t.ptr for t in reads], [t.ptr if t.ptr < stand_ins.MADE else "made" for t in writes]


@pytest.mark.parametrize("name", calls(None))
def test_a_repeated_call_makes_no_request_and_runs_as_one(name, dev, built):
    call = calls(dev)[name]
    executor = dev.executor()
    for turn in range(5):
        function, kind, operands, choices = call(turn)
        function(*operands, **choices)
        quick = executor.runs[-1]
        assert sum(built.values()) == 1 + turn, "the first call alone makes a request, and each run below"
        dp.run(kind(*operands, **choices))
        assert shown(quick) == shown(executor.runs[-1])


def test_a_form_is_a_constant_of_a_call_and_another_one_is_another_call(dev, built):
    a, b = dev.zeros((2304,), "u8"), dev.zeros((64, 16), "f16")
    assert is_constant(FORM)
    other = FORM._replace(made_by="a newer library")
    for form in (FORM, other, FORM, other):
        dp.matmul_2_4(a, form, b)
    assert built["matmul_2_4"] == 2


def test_an_output_among_the_operands_is_refused_though_the_call_is_known(dev):
    a, b, out = dev.zeros((2304,), "u8"), dev.zeros((64, 16), "f16"), dev.zeros((32, 16), "f16")
    dp.matmul_2_4(a, FORM, b, c=out, out=out)
    dp.matmul_2_4(a, FORM, b, c=out, out=out)
    for _ in range(2):
        dp.matmul_2_4(a, FORM, b, out=out)
    with pytest.raises(dp.errors.BadRequest, match="out: got memory that overlaps b"):
        dp.matmul_2_4(a, FORM, b, out=b[:32])


def test_a_number_that_is_no_factor_is_refused_though_the_call_is_known(dev):
    a, b = dev.zeros((2304,), "u8"), dev.zeros((64, 16), "f16")
    dp.matmul_2_4(a, FORM, b, alpha=2.0)
    dp.matmul_2_4(a, FORM, b, alpha=3.0)
    for wrong in (1j, "2", None, np.zeros(2)):
        with pytest.raises(dp.errors.BadRequest, match="alpha: got"):
            dp.matmul_2_4(a, FORM, b, alpha=wrong)
