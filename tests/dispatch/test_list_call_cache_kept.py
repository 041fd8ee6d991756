"""Repeated calls with lists and mappings of operands, or numbers: what depends on addresses, and what is kept."""

import contextlib
import gc
import importlib.util
import threading
import weakref
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.core import call_cache, list_call_cache
from dispatch.core.request import Request
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, StaleTensor
from dispatch.libraries.cutlass import evt

spec = importlib.util.spec_from_file_location(
    "list_call_cache_cases", Path(__file__).with_name("list_call_cache_cases.py")
)
calls = importlib.util.module_from_spec(spec)
spec.loader.exec_module(calls)
stand_ins, dev, built, Drawn, board = calls.stand_ins, calls.dev, calls.built, calls.Drawn, calls.board
changed_in, told, within = calls.changed_in, calls.told, calls.within


# -- what depends on addresses ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("groups", [2, 5, 12])
def test_outputs_of_a_list_are_apart(dev, built, groups):
    def new(*shape):
        return [dev.zeros(shape, "f16") for _ in range(groups)]

    a, b, memory = new(8, 16), new(16, 16), dev.zeros((groups + 2, 8, 16), "f16")
    out = [memory[place] for place in range(groups)]
    for _ in range(2):
        assert dp.grouped_matmul(a, b, out=out) == tuple(out)
    assert built == {"grouped_matmul": 1}
    assert dp.grouped_matmul(a, b, out=out[::-1]) == tuple(out[::-1])
    assert built == {"grouped_matmul": 1}
    # Such as no address has: alignment cannot tell them apart.
    near = [*out[:-1], Tensor(memory.storage, out[-1].ptr - 2, out[-1].layout)]
    with pytest.raises(BadRequest, match="overlaps"):
        dp.grouped_matmul(a, b, out=near)
    with pytest.raises(BadRequest, match="overlaps"):
        dp.grouped_matmul(a, b, out=[*out[:-1], out[0]])
    wide = [*b[:-1], Tensor(memory.storage, out[-1].ptr + 254, b[-1].layout)]
    with pytest.raises(BadRequest, match="overlaps"):
        dp.grouped_matmul(a, wide, out=out)


def test_the_result_of_a_tree_may_be_its_source_itself(dev, built):
    a, b = dev.zeros((8, 16), "f16"), dev.zeros((16, 8), "f16")
    c, out = dev.zeros((16, 8), "f16")[:8], dev.zeros((8, 8), "f16")
    tree = evt.accumulator() + evt.scalar("beta") * evt.source()
    for target in (out, c, out, c):
        assert dp.matmul(a, b, c=c, out=target, epilogue=tree) is target
    assert built == {"matmul": 1}
    with pytest.raises(BadRequest, match="overlaps c"):
        dp.matmul(a, b, c=c, out=Tensor(c.storage, c.ptr + 2, c.layout), epilogue=tree)


# -- devices, threads, what is kept -----------------------------------------------------------------------------------
def test_tensors_of_a_closed_device_are_refused(dev):
    a, b = [dev.zeros((8, 16), "f16")], [dev.zeros((16, 8), "f16")]
    for _ in range(2):
        dp.grouped_matmul(a, b)
        dp.dropout_states(dev, 1)
    dev.close()
    for call in (lambda: dp.grouped_matmul(a, b), lambda: dp.dropout_states(dev, 1)):
        with pytest.raises(StaleTensor):
            call()


@pytest.mark.parametrize("forget", [stand_ins.Gpu.forget_plans, lambda dev: dev.executor().release()])
def test_a_forgotten_plan_is_taken_no_more(dev, forget):
    a, b = [dev.zeros((8, 16), "f16")], [dev.zeros((16, 8), "f16")]
    for _ in range(2):
        dp.grouped_matmul(a, b)
    old = stand_ins.taken(dev)
    forget(dev)
    dp.grouped_matmul(a, b)
    assert stand_ins.taken(dev) is not old


def test_threads_take_their_own_plans(dev):
    a = [dev.zeros((8, 16), "f16") for _ in range(2)]
    b = [dev.zeros((16, 8), "f16") for _ in range(2)]
    drawn, _ = board(4)
    found, failed = {}, []

    def run(number):
        try:
            for turn in range(200):
                dp.grouped_matmul(a, b, alpha=float(turn))
                drawn(x=dev.zeros((2, 3, 4)), w=dev.zeros((1, 4, 5)))
            executor = dev.executor()
            found[number] = executor, {id(plan) for plan, *_ in executor.runs}, len(executor.calls)
        except Exception as error:  # noqa: BLE001  # the test tells of it
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len({id(executor) for executor, *_ in found.values()}) == 3
    assert all(len(plans) == calls == 2 for _, plans, calls in found.values())


def test_on_the_host_nothing_is_remembered():
    host = dp.device("host")
    for _ in range(3):
        dp.dropout_states(host, 7)
        dp.grouped_matmul([host.zeros((8, 16), "f16")], [host.zeros((16, 8), "f16")])
    assert not host.executor().calls


def test_no_tensor_and_no_request_is_kept(dev, rng, monkeypatch):
    drawn, seen = Drawn(dev, rng), []
    before = Request.__getstate__  # any function of the class: what is made is noted as it runs
    assert before
    run = stand_ins.NotingExecutor.run

    def noted(self, request):
        seen.append(weakref.ref(request))
        return run(self, request)

    monkeypatch.setattr(stand_ins.NotingExecutor, "run", noted)
    for turn in range(70):
        function, _, fields = drawn.form(turn)
        seen += [weakref.ref(one) for _, one in within(fields) if isinstance(one, Tensor)]
        function(**fields)
        function(**fields)
    del fields, function
    dev.executor().runs.clear()
    gc.collect()
    assert dev.executor().calls
    assert not any(ref() is not None for ref in seen)
    drawn.close()


def test_as_many_calls_are_kept_as_are_said(dev, built, monkeypatch):
    monkeypatch.setattr(call_cache, "MAX_CALLS", 4)
    lists = [[dev.zeros((n, 16), "f16")] for n in range(1, 9)]
    b = [dev.zeros((16, 8), "f16")]
    for a in lists:
        dp.grouped_matmul(a, b)
        assert len(dev.executor().calls) <= 4
    built.clear()
    for a in lists[4:]:
        dp.grouped_matmul(a, b)
    assert not built


def test_the_code_of_a_pattern_is_compiled_once_also_where_no_call_is_remembered(dev, monkeypatch):
    made = []
    lookup_of = list_call_cache.lookup_of
    monkeypatch.setattr(list_call_cache, "lookup_of", lambda pattern: made.append(pattern) or lookup_of(pattern))
    monkeypatch.setattr(list_call_cache, "_binding", lambda *_: None)
    a, b = [dev.zeros((8, 16), "f16") for _ in range(5)], [dev.zeros((16, 8), "f16") for _ in range(5)]
    for _ in range(3):
        dp.grouped_matmul(a, b)
    assert len(made) <= 1  # none, where another test had such a call


@pytest.mark.parametrize("value", [float("nan"), np.float64("nan"), float("inf"), 1e39], ids=repr)
def test_numbers_out_of_the_range_go_by_a_request_each_time(dev, built, value):
    a, b = [dev.zeros((8, 16), "f16")], [dev.zeros((16, 8), "f16")]
    dp.grouped_matmul(a, b, alpha=type(value)(1))
    for turn in range(2):
        with contextlib.suppress(BadRequest):
            dp.grouped_matmul(a, b, alpha=value)
        assert built["grouped_matmul"] in (1 + turn + 1, 1, 2)  # those that are refused never ran


# -- prepared calls over other operands -------------------------------------------------------------------------------
def test_prepared_calls_over_other_operands_make_no_request(dev, rng, built):
    """But for those of lists, whose names no parameter can have."""
    drawn, quick, executor = Drawn(dev, rng), Counter(), dev.executor()
    for turn in range(280):
        _, make, fields = drawn.form(turn)
        prepared = dp.prepare(make(**fields))
        request = prepared.request
        tensors = {name: tensor for name, tensor, _ in request.tensors()}
        names = [drawn.pool.pick(list(tensors)) for _ in range(2)]
        for step in range(6):
            given = {name: drawn.fresh(tensors[name].layout) for name in names}
            if drawn.maybe(0.3):
                given[names[0]] = drawn.pool.pick([*tensors.values(), *given.values()])
            built.clear()
            call = stand_ins.outcome(executor, partial(prepared, **given))
            name = "numbers" if make in drawn.numbered else request.op
            quick[name] += bool(call[1]) and not built
            fresh = stand_ins.NotingExecutor(executor.stream)
            wanted = stand_ins.outcome(fresh, partial(stand_ins.run_over, fresh, request, given))
            assert call == wanted, (step, request, changed_in(given, told))
    drawn.close()
    named = {"matmul", "conv_fwd", "conv_bwd_data", "grouped_matmul", "cudnn_graph", "dropout_states", "numbers"}
    assert quick.keys() == named
    assert all(count > 30 for count in quick.values()), quick


def test_an_operand_of_a_drawing_may_have_any_name(dev):
    drawn = dp.cudnn.Graph()
    names = ("lambda", "_executor", "_plan", "fast_call")
    nodes = [drawn.tensor(name, (4, 4), "f32") for name in names]
    drawn.output("None", drawn.pointwise("ADD", nodes[0], drawn.pointwise("ADD", nodes[1], nodes[2])), "f32")
    drawn.output("False", drawn.pointwise("RELU_FWD", nodes[3]), "f32")
    given = {name: dev.zeros((4, 4)) for name in names}
    prepared = dp.prepare(drawn.request(**given))
    for name in (*names, "None"):
        for _ in range(3):
            other = dev.zeros((4, 4))
            found = prepared(**{name: other})
            assert (found[0] is other) == (name == "None")
            assert other.ptr in dev.executor().runs[-1][1]
