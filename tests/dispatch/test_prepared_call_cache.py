"""Prepared calls over other operands go to their plan without a request, and end as a request would.

No GPU is needed to see that: the device of call_cache_cases.py has host memory.
"""

import contextlib
import dataclasses
import importlib.util
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

import dispatch as dp
from dispatch.core import prepared_call_cache
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, Closed, StaleTensor
from dispatch.ops.conv.trees import TreeConvRequest

spec = importlib.util.spec_from_file_location("call_cache_cases", Path(__file__).with_name("call_cache_cases.py"))
calls = importlib.util.module_from_spec(spec)
spec.loader.exec_module(calls)
NotingExecutor, dev, outcome, Drawn = calls.NotingExecutor, calls.dev, calls.outcome, calls.Drawn
swapped, in_part, call, taken, run_over = calls.swapped, calls.in_part, calls.call, calls.taken, calls.run_over


class DrawnCalls(Drawn):
    """Random prepared calls, each over other operands several times."""

    def __init__(self, dev, rng):
        super().__init__(dev, rng)
        self.pool.device = dp.device("host")
        self.kinds = [*self.kinds, *[dp.MatmulRequest] * 8]
        self.pool.requests[dp.MatmulRequest] += list(self.products())
        self.pool.device = dev

    def products(self):
        new = self.pool.new
        a, b, c, one = new(16, 16), new(16, 16), new(16, 16), new(1).reshape(())
        yield dp.MatmulRequest(a, b, out=c, beta=0.5)
        yield dp.MatmulRequest(a, b, c=c, out=c, beta=0.5)
        yield dp.MatmulRequest(a, b, c=c, alpha=one, beta=one)
        yield dp.MatmulRequest(a, b, c=c, alpha=2.0, beta=-0.0)
        yield dp.MatmulRequest(a, b, bias=new(16), epilogue=dp.Epilogue.RELU_BIAS)
        yield dp.MatmulRequest(a.T, b, epilogue=dp.Epilogue.BGRADA)

    def request(self, kind):
        """A good one; some ops take no outputs with gaps."""
        while True:
            with contextlib.suppress(BadRequest):
                return self.drawn(kind)

    def drawn(self, kind):
        fields = self.base(kind, gaps=0.1)
        scales = fields.get("scales")
        if scales is not None:
            parts = {field.name: getattr(scales, field.name) for field in dataclasses.fields(scales)}
            found = {name: self.fresh(one.layout) for name, one in parts.items() if isinstance(one, Tensor)}
            fields["scales"] = dataclasses.replace(scales, **found)
        return kind(**fields)

    def chosen(self, request):
        """The names of one to three operands."""
        names = [name for name, *_ in request.tensors() if not name.startswith("scales.")]
        return [self.pool.pick(names) for _ in range(int(self.rng.integers(1, 4)))]

    def others(self, request, chosen):
        """Other operands of some names, most of them of the same layouts."""
        tensors = {name: tensor for name, tensor, _ in request.tensors() if not name.startswith("scales.")}
        given = {name: self.fresh(tensors[name].layout) for name in chosen}
        turn, name = self.rng.random(), self.pool.pick(chosen)
        if turn < 0.3:
            other = self.pool.pick(list(tensors))
            near = self.moved(given.get(other, tensors[other]), self.pool.pick((0, 0, 0, 1, -1, 16)))
            layout = tensors[name].layout
            given[name] = Tensor(
                near.storage, near.ptr, self.dev.layout(layout.dtype, layout.shape, layout.strides, near.ptr)
            )
        elif turn < 0.4:
            given[name] = tensors[self.pool.pick(list(tensors))]
        elif turn < 0.5:
            given[name] = self.pool.value(tensors[name])
        elif turn < 0.55:
            given[self.pool.pick(("nothing", "alpha", "axis", "scales", "out"))] = given[name]
        return given


def judge_calls(dev, rng, rounds):
    """What ends otherwise by a prepared call than by a request, up to the first; and how many enqueued no request's."""
    drawn, quick = DrawnCalls(dev, rng), Counter()
    executor, runs = dev.executor(), Counter()
    before = NotingExecutor.run

    def counted(self, request):
        runs[self is executor] += 1
        return before(self, request)

    NotingExecutor.run = counted
    try:
        for turn in range(rounds):
            kind = drawn.kinds[turn % len(drawn.kinds)]
            prepared = dp.prepare(drawn.request(kind))
            request = prepared.request
            names = drawn.chosen(request), drawn.chosen(request)
            for step in range(10):
                given = drawn.others(request, names[step % 2])
                count, fresh = runs[True], NotingExecutor(executor.stream)
                call = outcome(executor, partial(prepared, **given))
                quick[kind.op] += bool(call[1]) and runs[True] == count
                wanted = outcome(fresh, partial(run_over, fresh, request, given))
                if call != wanted:
                    return [(request, given, call, wanted)], quick, drawn
    finally:
        NotingExecutor.run = before
        drawn.close()
    return [], quick, drawn


def test_each_prepared_call_over_other_operands_is_what_its_request_is(dev, rng):
    differences, quick, drawn = judge_calls(dev, rng, 1600)
    assert not differences, "\n".join(map(str, differences[0]))
    assert all(quick[kind.op] > 20 for kind in drawn.kinds), quick


def formed(change):
    """A mutation of the form of calls over other operands."""

    def mutate(monkeypatch):
        maker = prepared_call_cache._maker
        monkeypatch.setattr(prepared_call_cache, "_maker", lambda form: maker(change(form)))

    return mutate


MUTATIONS_OF_CALLS = {
    "addresses in another order": formed(lambda form: form._replace(addresses=swapped(form.addresses))),
    "reads in another order": formed(lambda form: form._replace(reads=swapped(form.reads))),
    "a write is left out": formed(lambda form: form._replace(writes=form.writes[1:])),
    "results in another order": formed(lambda form: form._replace(results=swapped(form.results))),
    "always a tuple": formed(lambda form: form._replace(is_tuple=True)),
    "no pair is looked at": formed(lambda form: form._replace(pairs=())),
    "the first pair is not looked at": formed(lambda form: form._replace(pairs=form.pairs[1:])),
    "all may be one view": formed(lambda form: form._replace(pairs=tuple((*pair[:2], True) for pair in form.pairs))),
    "any layouts are one view": lambda monkeypatch: monkeypatch.setattr(
        prepared_call_cache, "overlap_bounds", lambda one, other: (one.low - other.high, one.high - other.low, 0)
    ),
    "C is never D": lambda monkeypatch: monkeypatch.setattr(
        dp.MatmulRequest, "addresses", lambda _: ("a", "b", "c", "bias", "aux", "bgrad", "out", None, None)
    ),
    "trees are plain": lambda monkeypatch: monkeypatch.setattr(TreeConvRequest, "is_plain", True),
}


@pytest.mark.parametrize("mutate", in_part(MUTATIONS_OF_CALLS))
def test_a_wrong_way_to_other_operands_is_found(dev, rng, mutate, monkeypatch):
    mutate(monkeypatch)
    differences, _, _ = judge_calls(dev, rng, 20000)
    assert differences


def test_a_prepared_call_over_other_operands_follows_its_executor(dev):
    x, out = dev.zeros((4, 4)), dev.zeros((4, 4))
    prepared = dp.prepare(dp.SoftmaxRequest(x, out=out))
    others = [dev.zeros((4, 4)) for _ in range(3)]
    for other in others:
        assert prepared(x=other) is out
        assert prepared(x=other, out=other) is other
    old = taken(dev)
    dev.forget_plans()
    for other in others:
        prepared(x=other)
        assert taken(dev) is not old
    dev.executor().close()
    with pytest.raises(Closed):
        prepared(x=others[0])
    dev.close()
    with pytest.raises(StaleTensor):
        prepared(x=others[0])
