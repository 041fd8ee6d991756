"""A look at the kernels that a product would launch: each call as it will be made, with numbers the library sees."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from cudabind.sys import cublasLt as lt
from dispatch.device.recordings import Recordings
from dispatch.keys import Compute, Epilogue
from dispatch.libraries.cublaslt import kernel_recording
from dispatch.ops.matmul import cublaslt, cublaslt_matmul

spec = importlib.util.spec_from_file_location("kernel_names", Path(__file__).with_name("kernel_names.py"))
kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)
FUSED, PLAIN, Library, ExecutorOf = kernels.FUSED, kernels.PLAIN, kernels.Library, kernels.ExecutorOf
bound = kernels.bound


def test_a_call_is_looked_at_as_it_will_be_made(monkeypatch):
    """With C read or not, for cuBLASLt launches other kernels then; and the numbers of the next run are set anew."""
    seen = []

    def look(_executor, call):
        seen.append(call.args[8].value)  # the address of C
        return (FUSED,)

    Library(monkeypatch, (FUSED,))
    monkeypatch.setattr(cublaslt, "kernels", look)
    c = dp.device("host").zeros((32, 48), "bf16")
    plain, with_c = bound(), bound(c=c)
    assert [address is not None for address in seen] == [False, True]
    assert (plain._beta.value, with_c._beta.value) == (0, 1)
    plain._numbers = (2.5, 0.0)  # of a run, before another look
    plain._fuses(lt.cublasLtMatmulHeuristicResult_t())
    assert plain._numbers == ()
    assert plain.lowered.problem.as_key() != with_c.lowered.problem.as_key()


class Driver:
    """Stands for the driver: records what is called, and gives a graph of nodes by their names, or loses it."""

    def __init__(self, monkeypatch, nodes=(), lost=0):
        self.nodes, self.lost, self.begun, self.destroyed = nodes, lost, 0, 0
        for name in ("cuStreamBeginCapture", "cuStreamEndCapture"):
            setattr(self, name, SimpleNamespace(unchecked_holding_gil=getattr(self, f"_{name}")))
        self.cuGraphDestroy = SimpleNamespace(unchecked=self._cuGraphDestroy)
        monkeypatch.setattr(kernel_recording, "driver", self)

    def _cuStreamBeginCapture(self, stream, mode):
        assert (stream.value, mode) == (7, kernel_recording.RELAXED)
        self.begun += 1
        return 0

    def _cuStreamEndCapture(self, _stream, graph):
        if self.begun <= self.lost:
            return 901  # CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
        graph._obj.value = 99
        return 0

    def _cuGraphDestroy(self, graph):
        assert graph.value == 99
        self.destroyed += 1
        return 0

    CUgraph = staticmethod(lambda address: address)

    def cuGraphGetNodes(self, _graph, room):
        return [*self.nodes, *[None] * (room - len(self.nodes))], len(self.nodes)

    def cuGraphNodeGetType(self, node):
        return 2 if node == "memset" else 1 if node == "memcpy" else 0

    def cuGraphKernelNodeGetParams(self, node):
        return SimpleNamespace(func=node)

    def cuFuncGetName(self, function):
        return function.encode()


def look(call=lambda: 0):
    executor = SimpleNamespace(target=ctypes.c_void_p(3))
    executor = type("Executor", (), vars(executor))()
    executor.device = SimpleNamespace(
        context=nullcontext(), stream=lambda: SimpleNamespace(c_handle=ctypes.c_void_p(7))
    )
    executor.device.recordings = Recordings()
    targets = []
    names = kernel_recording.kernels(executor, lambda: targets.append(executor.target.value) or call())
    assert executor.target.value == 3, "the executor's own stream is its target again"
    assert set(targets) <= {7}
    return names


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        (("one",), ("",)),  # needs no name
        (("memset", "one"), ("",)),
        (("one", "memset", "two"), ("one", "two")),
        (("one", "memcpy"), None),
        ((), ()),
        (("one",) * 17, None),
    ],
)
def test_a_look_gives_the_names_of_kernels_and_leaves_nothing(monkeypatch, nodes, names):
    driver = Driver(monkeypatch, nodes)
    assert look() == names
    assert (driver.begun, driver.destroyed) == (1, 1)


@pytest.mark.parametrize(("lost", "begun", "names"), [(1, 2, ("",)), (2, 3, ("",)), (9, 3, None)])
def test_a_look_that_others_end_is_repeated_and_at_last_given_up(monkeypatch, lost, begun, names):
    driver = Driver(monkeypatch, ("one",), lost)
    assert look() == names
    assert (driver.begun, driver.destroyed) == (begun, 0 if names is None else 1)


def test_a_call_that_the_library_refuses_is_not_known_to_be_precise(monkeypatch):
    driver = Driver(monkeypatch, ("one",))
    assert look(lambda: 7) is None
    assert driver.destroyed == driver.begun == kernel_recording.MAX_TRIES


def seen_by_the_library(plan):
    """The pointer mode, and alpha and beta as that mode has them, at each call that is made of a plan."""
    calls, given = [], plan._calls[0]

    def call():
        mode, size = ctypes.c_int32(), ctypes.c_size_t()
        attribute = lt.cublasLtMatmulDescAttributes_t.CUBLASLT_MATMUL_DESC_POINTER_MODE
        lt.cublasLtMatmulDescGetAttribute(
            plan._descriptors.matmul, attribute, ctypes.byref(mode), 4, ctypes.byref(size)
        )
        numbers = [ctypes.c_float.from_address(given.args[place].value).value for place in (2, 7)]
        calls.append((mode.value, *numbers))
        return 0

    call.args = given.args
    plan._calls = (call, plan._calls[1])
    return calls


@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.BIAS], ids=lambda e: e.name)
def test_a_beta_of_1_is_hidden_where_c_is_d(monkeypatch, epilogue):
    """The library then adds in memory what it has rounded before: it must not know. Whatever else it may see."""
    Library(monkeypatch, (FUSED,))
    monkeypatch.setattr(cublaslt.CublasLtPlan, "_takes_device_scalars", lambda _: True)
    dev = dp.device("host")
    bias = dev.zeros((48,), "bf16") if epilogue.adds_bias else None
    numbers = {}
    plan = bound(epilogue=epilogue, bias=bias, c=dev.zeros((32, 48), "bf16"))
    plan._executor.scalar = lambda value, dtype: numbers.setdefault(value, dev.array([value], dtype)).ptr
    calls = seen_by_the_library(plan)
    one, other = 4096, 8192
    for c, alpha, beta in (
        (one, 2, 1),
        (other, 2, 1),
        (one, 2, 1),
        (one, 3, 1),
        (one, 3, 0.5),
        (other, 3, 0.5),
        (one, 1, 1),
    ):
        plan.enqueue((256, 512, c, 1024, 0, 0, one, float(alpha), float(beta)))
    assert calls == [(1, 2, 1), (0, 2, 1), (1, 2, 1), (1, 3, 1), (0, 3, 0.5), (0, 3, 0.5), (1, 1, 1)]
    assert 0.5 not in numbers


class InterruptedOnce:
    """Ctrl-C at line event number `at` of the plan's own code, outside of the library's call."""

    def __init__(self, at):
        self.at, self.count, self.came = at, 0, False

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename != cublaslt.__file__:
            return None
        self.count += event == "line"
        if event == "line" and self.count == self.at:
            self.came = True
            raise KeyboardInterrupt
        return self


def test_a_call_behind_an_interrupted_one_has_its_own_numbers_and_pointers(monkeypatch):
    Library(monkeypatch, (FUSED,))
    monkeypatch.setattr(cublaslt.CublasLtPlan, "_takes_device_scalars", lambda _: True)
    dev = dp.device("host")
    numbers, pointed = {}, {}
    one, other = 4096, 8192
    turns = [(one, 2.0, 1.0, 64), (other, 3.0, 0.5, 128), (one, 3.0, 1.0, 64), (one, 2.0, 0.5, 128)]
    right = [(1, 2, 1, 64), (0, 3, 0.5, 128), (1, 3, 1, 64), (0, 2, 0.5, 128)]
    plan = bound(epilogue=Epilogue.BIAS, bias=dev.zeros((48,), "bf16"), c=dev.zeros((32, 48), "bf16"))
    plan._executor.scalar = lambda value, dtype: numbers.setdefault(value, dev.array([value], dtype)).ptr
    point = plan._descriptors.point
    plan._descriptors.point = lambda name, address: (pointed.update({name: address}), point(name, address))
    calls = seen_by_the_library(plan)

    def enqueue(turn):
        c, alpha, beta, bias = turns[turn]
        plan.enqueue((256, 512, c, bias, 0, 0, one, alpha, beta))

    for before, interrupted, behind in itertools.product(range(4), repeat=3):
        for at in itertools.count(1):
            enqueue(before)
            interrupt, trace = InterruptedOnce(at), sys.gettrace()
            sys.settrace(interrupt)
            with suppress(KeyboardInterrupt):
                enqueue(interrupted)
            sys.settrace(trace)
            enqueue(behind)
            assert (*calls[-1], *pointed.values()) == right[behind]
            if not interrupt.came:
                break


@pytest.mark.parametrize("choices", [{"reduced_precision": True}, {"out_dtype": "f32"}], ids=str)
def test_where_nothing_is_lost_by_it_the_library_sees_beta(monkeypatch, choices):
    Library(monkeypatch, (FUSED,))
    dev = dp.device("host")
    c = dev.zeros((32, 48), choices.get("out_dtype", "bf16"))
    plan = bound(epilogue=Epilogue.NONE, bias=None, c=c, **choices)
    calls = seen_by_the_library(plan)
    plan.enqueue((256, 512, 4096, 0, 0, 0, 4096, 1.0, 1.0))
    assert calls == [(0, 1, 1)]


def test_an_algorithm_that_reads_no_numbers_on_the_device_sees_them(monkeypatch):
    Library(monkeypatch, (FUSED,))
    plan = bound(epilogue=Epilogue.NONE, bias=None, c=dp.device("host").zeros((32, 48), "bf16"))
    assert not plan._takes_device_scalars(), "an algorithm of zeros is none"
    calls = seen_by_the_library(plan)
    plan.enqueue((256, 512, 4096, 0, 0, 0, 4096, 1.0, 1.0))
    assert calls == [(0, 1, 1)]


def test_numbers_of_sums_in_f16_are_f16(monkeypatch):
    """Which ctypes has not: the library is given their bits."""
    Library(monkeypatch, (PLAIN,))
    dev = dp.device("host")
    request = dp.MatmulRequest(dev.zeros((32, 64), "f16"), dev.zeros((64, 48), "f16"), compute="16f")
    row = next(row for row in dp.TABLE.of("matmul") if row.compute is Compute.COMPUTE_16F)
    executor = ExecutorOf()
    executor.device = dev
    executor.workspace = type("W", (), {"nbytes": 1 << 25, "c_ptr": None})
    plan = cublaslt_matmul(request, executor, row)
    plan._calls = (lambda: 0, plan._calls[1])
    plan.enqueue((256, 512, 0, 0, 0, 0, 4096, 0.5, -2.0))
    bits = np.array([plan._alpha.value, plan._beta.value], np.uint16)
    assert bits.view(np.float16).tolist() == [0.5, -2.0]
