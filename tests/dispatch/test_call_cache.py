"""Calls that were made before go to their plan without a request, and end as a request on a fresh executor would.

No GPU is needed to see that: the device of call_cache_cases.py has host memory.
"""

import dataclasses
import gc
import importlib.util
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.core import call_cache
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, Closed, Refused, StaleTensor
from dispatch.ops import FAMILIES
from dispatch.ops.conv.trees import TreeConvRequest
from dispatch.ops.softmax import SoftmaxAlgorithm

spec = importlib.util.spec_from_file_location("call_cache_cases", Path(__file__).with_name("call_cache_cases.py"))
calls = importlib.util.module_from_spec(spec)
spec.loader.exec_module(calls)
hostile, ROUNDS, REFUSED, Gpu = calls.hostile, calls.ROUNDS, calls.REFUSED, calls.Gpu
NotingExecutor, dev, built, function_of = calls.NotingExecutor, calls.dev, calls.built, calls.function_of
Drawn, judge, reordered, replaced, swapped = calls.Drawn, calls.judge, calls.reordered, calls.replaced, calls.swapped
in_part, call, taken = calls.in_part, calls.call, calls.taken


def test_each_call_is_what_its_request_is_on_a_fresh_executor(dev, rng):
    differences, quick, drawn = judge(dev, rng)
    assert not differences, "\n".join(map(str, differences[0]))
    assert all(quick[kind.op] > 30 for kind in drawn.kinds), quick
    assert len(dev.executor().calls) > 100


MUTATIONS = {
    "addresses in another order": reordered(lambda form: form._replace(order=swapped(form.order))),
    "reads in another order": reordered(lambda form: form._replace(reads=swapped(form.reads))),
    "a read is left out": reordered(lambda form: form._replace(reads=form.reads[1:])),
    "writes in another order": reordered(lambda form: form._replace(writes=swapped(form.writes))),
    "results in another order": reordered(lambda form: form._replace(results=swapped(form.results))),
    "one result of several": reordered(lambda form: form._replace(results=form.results[:1])),
    "no pair is looked at": reordered(lambda form: form._replace(pairs=())),
    "the first pair is not looked at": reordered(lambda form: form._replace(pairs=form.pairs[1:])),
    "all may be one view": reordered(lambda form: form._replace(pairs=tuple((*pair[:2], True) for pair in form.pairs))),
    "no two overlap": replaced("overlap_bounds", lambda *_: (0, 0, None)),
    "bounds of one operand alone": replaced("overlap_bounds", lambda one, _: (one.low, one.high, 0)),
    "any layouts are one view": replaced(
        "overlap_bounds", lambda one, other: (one.low - other.high, one.high - other.low, 0)
    ),
    "equal choices are the same": replaced("is_same_choice", lambda *_: True),
    "classes of a tuple's elements do not count": replaced(
        "is_same_choice", lambda one, other: type(one) is type(other)
    ),
    "trees are plain": lambda monkeypatch: monkeypatch.setattr(TreeConvRequest, "is_plain", True),
}


@pytest.mark.parametrize("mutate", in_part(MUTATIONS))
def test_a_wrong_way_in_is_found(dev, rng, mutate, monkeypatch):
    clear = call_cache._maker.cache_clear
    clear()
    mutate(monkeypatch)
    try:
        differences, _, _ = judge(dev, rng, 5 * ROUNDS)
    finally:
        clear()  # else other tests would have the wrong way
    assert differences


# -- no request -------------------------------------------------------------------------------------------------------
def test_a_repeated_call_of_any_op_makes_no_request(dev, rng, built):
    drawn = Drawn(dev, rng)
    for kind in drawn.kinds:
        for _ in range(20):
            fields = drawn.base(kind)
            if fields.get("epilogue") is None and fields.get("library") is None:
                call(kind, fields)
                built.clear()
                call(kind, drawn.again(fields))
                assert not built, f"{kind.op} {fields}"
    drawn.close()


def test_all_ops_are_remembered(rng):
    """Those with numbers or lists among their operands in a way of their own (test_list_call_cache.py)."""
    pool = hostile.Pool(rng)
    assert {kind.op for kind in pool.requests} == {
        row.op for row in dp.TABLE if row.op not in FAMILIES["collective"][1]
    } | {"cudnn_graph"}
    assert [kind.op for kind in pool.requests if kind.plain_reads() is None and kind.unpacked is None] == []
    pool.other.close()


def test_a_class_with_its_own_arguments_goes_by_requests():
    @dataclasses.dataclass(frozen=True, eq=False)
    class Own(dp.SoftmaxRequest):
        """With a number."""

        def arguments(self, outputs):
            return (*super().arguments(outputs), self.axis)

    assert dp.SoftmaxRequest.plain_reads() == ("x",)
    assert Own.plain_reads() is None


CLOSE = {
    "1 is not true": (dp.ActivationRequest, {"coef": 1.0}, {"coef": True}),
    "0 is not false": (dp.SoftmaxRequest, {"axis": 0}, {"axis": False}),
    "a float is no whole number": (dp.SoftmaxRequest, {"axis": 1}, {"axis": 1.0}),
    "a number is no mode": (dp.SoftmaxRequest, {"algorithm": dp.SoftmaxAlgorithm.ACCURATE}, {"algorithm": 1}),
    "minus zero": (dp.LrnRequest, {"alpha": 0.0}, {"alpha": -0.0}),
    "minus zero of NumPy": (dp.LrnRequest, {"alpha": np.float32(0.0)}, {"alpha": np.float32(-0.0)}),
    "in a tuple": (dp.PoolingRequest, {"window": (2, 2), "padding": (1, 0)}, {"window": (2, 2), "padding": (True, 0)}),
    "false in a tuple": (dp.ReduceRequest, {"axes": (0, 1)}, {"axes": (False, 1)}),
}


@pytest.mark.parametrize(("kind", "first", "second"), CLOSE.values(), ids=CLOSE.keys())
def test_choices_that_are_equal_are_told_apart(dev, built, kind, first, second):
    x = dev.zeros((2, 4, 6, 6))
    for _ in range(2):
        function_of(kind)(x, **first)
    built.clear()
    function_of(kind)(x, **first)
    assert not built
    try:
        function_of(kind)(x, **second)
    except BadRequest:
        assert built[kind.op] == 1
    else:
        assert built[kind.op] == 1
    first = {name: (*value,) if isinstance(value, tuple) else value for name, value in first.items()}
    built.clear()
    function_of(kind)(x, **first)
    assert built[kind.op] == (1 if "alpha" in first else 0)  # the last one that was right is remembered
    function_of(kind)(x, **first)
    assert built[kind.op] == (1 if "alpha" in first else 0)


@pytest.mark.parametrize("value", [float("nan"), np.float64("nan")], ids=repr)
def test_nan_is_never_remembered(dev, value):
    q = dev.zeros((1, 2, 8, 8), "f16")
    for _ in range(3):
        with pytest.raises(BadRequest, match="scale"):
            dp.sdpa_fwd(q, q, q, scale=value)
    x, w = dev.zeros((1, 4, 5, 5)), dev.zeros((4, 4, 3, 3))
    for _ in range(3):
        dp.conv_fwd(x, w, alpha=value)
    assert len(dev.executor().runs) == 3
    assert not dev.executor().calls


# -- what depends on addresses ----------------------------------------------------------------------------------------
def test_an_output_may_be_the_input_itself_and_no_neighbour_of_it(dev, built):
    memory = dev.zeros((100,))
    x, apart = memory[:32], memory[64:96]
    dp.softmax(x, out=apart)
    built.clear()
    dp.softmax(apart, out=apart)
    dp.softmax(x, out=x)
    dp.softmax(apart, out=x)
    assert not built
    near = Tensor(x.storage, x.ptr + 4, x.layout)  # such as no address has: alignment cannot tell them apart
    for one, other in ((x, near), (near, x)):
        with pytest.raises(BadRequest, match="overlaps x"):
            dp.softmax(one, out=other)
    assert len(dev.executor().calls) == 1


def test_memory_that_ends_where_another_begins_is_apart(dev, built):
    memory = dev.zeros((2, 64))
    x, y = memory[:1], memory[1:]
    dp.lrn(dev.zeros((2, 64))[:1], out=dev.zeros((2, 64))[1:])
    built.clear()
    dp.lrn(x, out=y)
    dp.lrn(y, out=x)
    assert not built
    with pytest.raises(BadRequest, match="overlaps"):
        dp.lrn(x, out=x)


def test_alignment_is_another_key(dev):
    memory = dev.zeros((100,))
    dp.softmax(memory[:32])
    dp.softmax(memory[1:33])
    (one, *_), (other, *_) = (run for run in dev.executor().runs)
    assert one.key[1].alignment > other.key[1].alignment == 4


def test_tensors_of_a_closed_device_are_refused(dev):
    x = dev.zeros((4, 4))
    for _ in range(2):
        dp.softmax(x)
    dev.close()
    with pytest.raises(StaleTensor):
        dp.softmax(x)


def test_a_closed_executor_runs_nothing(dev):
    x, executor = dev.zeros((4, 4)), dev.executor()
    with dev.stream() as stream:
        for _ in range(2):
            dp.softmax(x)
        inner = dev.executor()
        assert inner.calls
        inner.close()
        with pytest.raises(Closed):
            dp.softmax(x)
        assert not inner.calls
    assert inner.stream is stream
    assert not executor.runs


@pytest.mark.parametrize("forget", [Gpu.forget_plans, lambda dev: dev.executor().release()], ids=["forget", "release"])
def test_a_forgotten_plan_is_taken_no_more(dev, forget):
    x = dev.zeros((4, 4))
    for _ in range(2):
        dp.softmax(x)
    old = taken(dev)
    forget(dev)
    dp.softmax(x)
    assert taken(dev) is not old


def test_forgotten_plans_are_gone_though_a_request_is_bound_to_one_of_them(dev):
    executor, bound = dev.executor(), dp.SoftmaxRequest(dev.zeros((4, 4)))
    dp.run(bound)
    dp.softmax(dev.zeros((4, 5)))
    plans = weakref.WeakSet(executor.plans.values())
    assert len(plans) == 2
    executor.runs.clear()
    executor.forget()
    assert [*plans] == [bound.bound.plan]


def test_plans_that_are_forgotten_while_a_call_runs_are_not_remembered(dev, monkeypatch):
    x, executor = dev.zeros((4, 4)), dev.executor()
    monkeypatch.setattr(NotingExecutor, "enqueue", lambda self, *_: self.forget())
    dp.softmax(x)
    assert not executor.calls


def test_what_no_row_takes_is_refused_each_time(dev):
    for _ in range(3):
        with pytest.raises(Refused):
            dp.softmax(dev.zeros((REFUSED, 2)))
    assert not dev.executor().calls


def test_each_stream_and_each_device_has_its_own(dev):
    x, other = dev.zeros((4, 4)), Gpu(8)
    z = other.zeros((4, 4))
    for _ in range(2):
        dp.softmax(x)
        dp.softmax(z)
    first = taken(dev)
    with dev.stream():
        for _ in range(2):
            dp.softmax(x)
            assert taken(dev) is not first
            assert len(other.executor().runs) == 2
            dp.softmax(z)  # on its own device's stream, whatever is current here
            other.executor().runs.pop()
        assert len(dev.executor().runs) == 2
    assert len(dev.executor().runs) == 2
    with pytest.raises(BadRequest, match="cuda:8"):
        dp.softmax(x, out=z)
    other.close()


def test_threads_take_their_own_plans(dev):
    x, out = dev.zeros((4, 4)), dev.zeros((4, 4))
    found, failed = {}, []

    def run(number):
        try:
            for turn in range(300):
                dp.softmax(x, axis=turn % 2, out=out)
                dp.softmax(x)
            executor = dev.executor()
            found[number] = executor, {id(plan) for plan, *_ in executor.runs}, len(executor.runs)
        except Exception as error:  # noqa: BLE001  # the test tells of it
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    (one, plans, count), (other, others, _) = found.values()
    assert one is not other
    assert count == 600
    assert len(plans) == len(others) == 3
    assert not plans & others


def test_on_the_host_nothing_is_remembered(built):
    host = dp.device("host")
    x = host.zeros((4, 4))
    for _ in range(3):
        dp.softmax(x)
    assert built["softmax"] == 3
    assert not host.executor().calls


# -- what is kept -----------------------------------------------------------------------------------------------------
def test_no_tensor_and_no_request_is_kept(dev, rng):
    drawn, seen = Drawn(dev, rng), []
    for kind in drawn.kinds * 8:
        fields = drawn.base(kind)
        seen += [weakref.ref(value) for value in fields.values() if isinstance(value, Tensor)]
        named = fields.get("operands") or ()
        seen += [weakref.ref(value) for _, value in named if isinstance(value, Tensor)]
        call(kind, fields)
        call(kind, fields)
    del fields, named
    dev.executor().runs.clear()
    gc.collect()
    assert dev.executor().calls
    assert not any(ref() is not None for ref in seen)
    drawn.close()


def test_as_many_calls_are_kept_as_are_said(dev, built, monkeypatch):
    monkeypatch.setattr(call_cache, "MAX_CALLS", 4)
    tensors = [dev.zeros((4, n)) for n in range(1, 9)]
    for x in tensors:
        dp.softmax(x)
        assert len(dev.executor().calls) <= 4
    built.clear()
    for x in tensors[4:]:
        dp.softmax(x)
    assert not built
    dp.softmax(tensors[0])
    assert built["softmax"] == 1


def test_what_looks_like_a_tensor_goes_by_a_request(dev):
    x = dev.zeros((4, 4))

    class Like:
        layout, ptr, storage = x.layout, x.ptr, x.storage

    for _ in range(2):
        dp.softmax(x, out=dev.zeros((4, 4)))
    for wrong in ((Like(), x), (x, Like())):
        with pytest.raises(BadRequest, match="a Like"):
            dp.softmax(wrong[0], out=wrong[1])


def test_a_choice_by_its_name_is_remembered_as_its_member_is(dev, built):
    x = dev.zeros((4, 8))
    runs = dev.executor().runs
    for algorithm in ("log", "LOG", SoftmaxAlgorithm.LOG, "log", "LOG", SoftmaxAlgorithm.LOG):
        dp.softmax(x, algorithm=algorithm)
    assert built["softmax"] == 3  # once for each spelling
    assert len({plan.key for plan, *_ in runs}) == 1
    for _ in range(2):
        with pytest.raises(BadRequest, match=r"^algorithm: got 'lgo'"):
            dp.softmax(x, algorithm="lgo")
