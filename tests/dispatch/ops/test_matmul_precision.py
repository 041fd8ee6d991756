"""No product is less precise than its compute type unless the request says so: what cuBLASLt is told, and what is kept.

No GPU is needed: the heuristic that is asked here only notes its preference, whose words are the library's own.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from cudabind.sys import cublasLt as lt
from dispatch.device.recordings import Recordings
from dispatch.errors import Refused
from dispatch.keys import Compute, Epilogue
from dispatch.libraries.cublaslt import descriptors, launched
from dispatch.ops.matmul import aux_shape, cublaslt, cublaslt_matmul, exact, exact_kernels
from dispatch.ops.matmul.lower import lower

PREF = lt.cublasLtMatmulPreferenceAttributes_t
ALL = lt.cublasLtReductionScheme_t.CUBLASLT_REDUCTION_SCHEME_MASK
IN_COMPUTE_TYPE = lt.cublasLtReductionScheme_t.CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE


def problem_of(dtype="bf16", out=None, **choices):
    dev = dp.device("host")
    a, b = dev.array(np.ones((32, 64)), dtype), dev.array(np.ones((48, 64)), dtype).T
    return lower(dp.MatmulRequest(a, b, out_dtype=out, **choices), Compute.COMPUTE_32F).problem


class Noting:
    """Stands for `cublasLtMatmulAlgoGetHeuristic`: notes the mask of reduction schemes, and finds nothing."""

    def __init__(self):
        self.masks = []

    def __call__(self, _handle, _operation, _a, _b, _c, _d, preference, _count, _results, _found):
        mask, size = ctypes.c_uint32(), ctypes.c_size_t()
        lt.cublasLtMatmulPreferenceGetAttribute(
            preference, PREF.CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, ctypes.byref(mask), 4, ctypes.byref(size)
        )
        self.masks.append(mask.value)


@pytest.fixture
def heuristic(monkeypatch):
    noting = Noting()
    monkeypatch.setattr(lt, "cublasLtMatmulAlgoGetHeuristic", noting)
    return noting


# fmt: off
SCHEMES = [
    # operands  D         choices                       may be added up
    ("bf16",    None,     {},                           IN_COMPUTE_TYPE),
    ("f16",     None,     {},                           IN_COMPUTE_TYPE),
    ("f8e4m3",  None,     {},                           IN_COMPUTE_TYPE),
    ("f8e4m3",  "f8e4m3", {},                           IN_COMPUTE_TYPE),
    ("f8e4m3",  "f16",    {"fast_accum": True},         IN_COMPUTE_TYPE),
    ("bf16",    None,     {"autotune": True},           IN_COMPUTE_TYPE),
    ("bf16",    None,     {"workspace": 0},             IN_COMPUTE_TYPE),
    ("bf16",    None,     {"reduced_precision": True},  ALL),
    ("f8e4m3",  None,     {"reduced_precision": True},  ALL),
    ("bf16",    "f32",    {},                           ALL),  # D is as precise as the sums: nothing is lost in it
    ("f32",     None,     {},                           ALL),
]
# fmt: on


@pytest.mark.parametrize(("dtype", "out", "choices", "allowed"), SCHEMES, ids=str)
def test_partial_sums_are_added_in_the_compute_type_unless_the_request_allows_less(
    heuristic, dtype, out, choices, allowed
):
    problem = problem_of(dtype, out, **choices)
    with pytest.raises(Refused, match="finds no algorithm"):
        descriptors.heuristic(None, descriptors.Descriptors(problem), problem, 1 << 25)
    assert heuristic.masks == [allowed]


@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.GELU_AUX], ids=lambda e: e.name)
def test_what_was_tuned_with_less_precision_is_another_problem(epilogue):
    """The cache on disk goes by another text, and so do entries from before there was a choice."""
    exact, reduced = (problem_of(epilogue=epilogue, reduced_precision=choice) for choice in (False, True))
    assert exact._replace(reduced_precision=True) == reduced
    assert exact.as_key() != reduced.as_key()
    assert "reduced_precision=False" in exact.as_key()


# Kernels as cuBLASLt 13.1 names them on an H200.
FUSED = "nvjet_sm90_tst_64x8_64x16_1x4_h_bz_relubias_TNT"
PLAIN = "nvjet_sm90_tst_64x8_64x16_1x4_h_bz_splitK_TNT"
REDUCE = "_ZN8cublasLt19splitKreduce_kernelILi32ELi16Ei{}Lb1ELb1ELb0ELb0EEEvNS_18cublasSplitKParamsIT4_EEPKT2_PKT8_PT7_"
IN_F32 = (REDUCE.format("f13__nv_bfloat16fS1_Lb0EfS1_S1_"), REDUCE.format("f6__halffS1_Lb0EfS1_S1_"))
THEN_16 = (REDUCE.format("f13__nv_bfloat16fS1_Lb0ES1_S1_S1_"), REDUCE.format("f6__halffS1_Lb0ES1_S1_S1_"))
FROM_16 = REDUCE.format("13__nv_bfloat16S1_fS1_Lb0ES1_S1_S1_")
BEHIND = (
    "_ZN8cublasLt8epilogue4impl12globalKernelILi8ELi32E13__nv_bfloat16S3_fLb1ELb1ELi1EEEviilPT1_18cublasLtEpilogue_t"
)
# fmt: off
LAUNCHED = [
    ((FUSED,),                True),
    (("",),                   True),   # one kernel needs no name
    ((PLAIN, IN_F32[0]),      True),
    ((IN_F32[1], PLAIN),      True),
    ((PLAIN, THEN_16[0]),     False),
    ((PLAIN, THEN_16[1]),     False),
    ((PLAIN, FROM_16),        False),
    ((FUSED, BEHIND),         False),
    ((PLAIN, IN_F32[0], BEHIND), False),
    (("", ""),                False),  # what has no name is not known to keep f32
    ((FUSED, FUSED),          False),
    ((),                      False),
    (None,                    False),
]
# fmt: on


@pytest.mark.parametrize(("names", "right"), LAUNCHED)
def test_an_epilogue_is_in_time_in_one_kernel_or_where_split_sums_meet_in_f32(names, right):
    assert launched.fuses(names) is right


@pytest.mark.parametrize("epilogue", Epilogue, ids=lambda e: e.name)
@pytest.mark.parametrize(
    ("dtype", "out", "reduced"), [("bf16", None, False), ("bf16", None, True), ("bf16", "f32", False)]
)
def test_only_where_rounding_first_would_show_is_there_something_to_look_at(epilogue, dtype, out, reduced):
    dev = dp.device("host")
    a, b = dev.zeros((16, 32), dtype).mT, dev.zeros((16, 48), dtype)
    given = {"bias": dev.zeros((48,), out or dtype)} if epilogue.adds_bias else {}
    if epilogue.is_gradient:
        own, strides = aux_shape(epilogue, (32, 48))
        given["aux"] = dev.zeros((32, strides[0]), "u8" if epilogue.activation == "relu" else out or dtype)[:, : own[1]]
    request = dp.MatmulRequest(a, b, epilogue=epilogue, out_dtype=out, reduced_precision=reduced, **given)
    problem = lower(request, Compute.COMPUTE_32F).problem
    bent = epilogue.adds_bias or epilogue.activation == "gelu"
    assert launched.must_fuse(problem) == (bent and out is None and not reduced)


class Library:
    """Stands for the heuristic and for what its algorithms launch: numbers by which both know them."""

    def __init__(self, monkeypatch, *launches):
        self.launches, self.asked, self.looks = launches, [], []
        monkeypatch.setattr(cublaslt, "heuristic", self.heuristic)
        monkeypatch.setattr(cublaslt, "suggestion", lambda *_: None)  # test_matmul_rounded.py asks for those
        monkeypatch.setattr(cublaslt, "kernels", self.kernels)

    def heuristic(self, _handle, _descriptors, _problem, _workspace, count=1):
        self.asked.append(count)
        results = [lt.cublasLtMatmulHeuristicResult_t() for _ in self.launches[:count]]
        for number, result in enumerate(results):
            result.workspaceSize = number
        return results

    def kernels(self, _executor, call):
        self.looks.append(call.args[-2].value)  # the bytes of workspace
        return self.launches[self.looks[-1]]


class ExecutorOf:
    """An executor without a GPU."""

    stream = algorithms = None
    target = ctypes.c_void_p()

    def __init__(self):
        self.handles = {"cublasLt": lt.cublasLtHandle_t()}

    def refuse_capture(self, what):
        """Nobody captures it."""


def bound(**choices):
    dev = dp.device("host")
    fields = {"epilogue": Epilogue.RELU_BIAS, "bias": dev.zeros((48,), "bf16"), "autotune": False} | choices
    request = dp.MatmulRequest(dev.zeros((32, 64), "bf16"), dev.zeros((64, 48), "bf16"), **fields)
    row = next(row for row in dp.TABLE.of("matmul") if row.dtypes == request.signature().dtypes[:4])
    executor = ExecutorOf()
    executor.device = dev
    executor.workspace = type("W", (), {"nbytes": 1 << 25, "c_ptr": None})
    return cublaslt_matmul(request, executor, row)


def taken(plan):
    return plan._calls[0].args[-2].value


def test_the_first_algorithm_that_is_precise_is_taken(monkeypatch):
    library = Library(monkeypatch, (FUSED,))
    assert taken(bound()) == 0
    assert (library.asked, library.looks) == ([1], [0])
    library = Library(monkeypatch, (PLAIN, THEN_16[0]), (FUSED, BEHIND), (PLAIN, IN_F32[0]), (FUSED,))
    assert taken(bound()) == 2
    assert (library.asked, library.looks) == ([1, cublaslt.FEW], [0, 1, 2])


def test_what_is_fastest_with_much_workspace_is_not_taken_with_less(monkeypatch):
    """The outcome on disk of a request without a limit does not tell one of `workspace=…` what to take, nor back."""
    raced, known = [], {}

    def heuristic(_handle, _descriptors, _problem, workspace, count=1):
        return [lt.cublasLtMatmulHeuristicResult_t(workspaceSize=workspace) for _ in range(count)]

    def fastest(_executor, _request, _run, count):
        raced.append(count)
        return 0

    monkeypatch.setattr(cublaslt, "heuristic", heuristic)
    monkeypatch.setattr(cublaslt, "fastest", fastest)
    monkeypatch.setattr(lt, "cublasLtMatmulAlgoCheck", SimpleNamespace(unchecked=lambda *_: 0))
    algorithms = SimpleNamespace(
        get=lambda _, name: known.get(name), put=lambda _, name, one: known.update({name: one})
    )
    monkeypatch.setattr(ExecutorOf, "algorithms", lambda *_: algorithms)
    tuned = {"epilogue": Epilogue.NONE, "bias": None, "autotune": True}
    for limit, most in ((None, 1 << 25), (1 << 20, 1 << 20), (0, 0), (1 << 30, 1 << 25), (1 << 20, 1 << 20)):
        assert taken(bound(**tuned, workspace=limit)) == most
    assert len(raced) == 3, "no limit, 1 MiB and 0 each have an outcome of their own"
    (plenty,) = (name for name in known if "bytes" not in name)
    known.update(dict.fromkeys(known, known[plenty]))
    assert taken(bound(**tuned, workspace=0)) == 0, "more than the request allows is not believed"


def test_where_nothing_needs_a_look_none_is_taken(monkeypatch):
    library = Library(monkeypatch, (FUSED, BEHIND))
    assert taken(bound(reduced_precision=True)) == 0
    assert taken(bound(epilogue=Epilogue.RELU, bias=None)) == 0
    assert (library.asked, library.looks) == ([1, 1], [])


def test_where_no_algorithm_is_precise_this_librarys_kernels_do_it(monkeypatch):
    Library(monkeypatch, *[(FUSED, BEHIND)] * 12)
    monkeypatch.setattr(exact, "functions", lambda *_: dict.fromkeys(exact_kernels.NAMES, 1))
    monkeypatch.setattr(exact_kernels, "_launch_function", lambda: lambda *_: 0)
    assert isinstance(bound(), exact.ExactPlan)


def test_where_there_are_no_kernels_either_the_refusal_says_how_to_go_on(monkeypatch):
    def refuse(*_):
        raise Refused("NVRTC gives no kernels")

    Library(monkeypatch, *[(FUSED, BEHIND)] * 12)
    monkeypatch.setattr(exact, "functions", refuse)
    with pytest.raises(Refused, match="NVRTC gives no kernels; reduced_precision=True"):
        bound()


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
        monkeypatch.setattr(launched, "driver", self)

    def _cuStreamBeginCapture(self, stream, mode):
        assert (stream.value, mode) == (7, launched.RELAXED)
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
    names = launched.kernels(executor, lambda: targets.append(executor.target.value) or call())
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
    assert driver.destroyed == driver.begun == launched.TRIES


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
