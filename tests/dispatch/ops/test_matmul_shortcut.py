"""The way `matmul` takes when it has seen the layouts before: the same arguments and the same refusals as a request.

No GPU is needed to see that: the device here has host memory and an sm_90's rows, and the plan notes what it is given.
What cuBLASLt's heuristic would answer is left out; everything before and behind it is the real code.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

import dispatch as dp
from cudabind.sys import cublasLt as lt
from dispatch.core.fusion import Fusion
from dispatch.device.host import HostDevice
from dispatch.errors import BadRequest
from dispatch.execute.cuda_executor import CudaExecutor
from dispatch.execute.executor import Executor
from dispatch.execute.launches import Launches
from dispatch.keys import Arch, Compute, Epilogue
from dispatch.ops import matmul
from dispatch.ops.matmul import cublaslt, exact, exact_kernels
from dispatch.ops.matmul import shortcut as short_ways
from dispatch.ops.matmul.lower import lower
from dispatch.table.table import TABLE


class NoContext(nullcontext):
    def push(self):
        return 0

    def pop(self):
        return 0


class Gpu(HostDevice):
    """Host memory under the rows of an sm_90, with a stream that is nobody else's."""

    is_host = False

    def __init__(self):
        super().__init__(1)
        self.name, self.arch = "cuda:7", Arch(90)
        self._stream.external = False
        self.context = NoContext()


class NotingExecutor(CudaExecutor):
    """Notes the arguments, reads and writes of every run."""

    versions = {"cublasLt": (13, 1, 0)}  # noqa: RUF012
    workspace = type("W", (), {"nbytes": 1 << 25, "c_ptr": None})

    def __init__(self, stream):
        Executor.__init__(self, stream)
        self.handles["cublasLt"] = lt.cublasLtHandle_t()
        self.target, self.runs = None, []

    def enqueue(self, plan, arguments, reads, writes):
        self.runs.append((arguments, reads, writes))

    def forget(self):
        Executor.forget(self)

    def close(self):
        Executor.close(self)


Gpu.open_executor = NotingExecutor


@pytest.fixture
def dev(monkeypatch):
    monkeypatch.setattr(cublaslt, "heuristic", lambda *_, **__: [lt.cublasLtMatmulHeuristicResult_t()])
    monkeypatch.setattr(cublaslt, "kernels", lambda *_: ("one",))
    monkeypatch.setattr(exact, "functions", lambda *_: dict.fromkeys(exact_kernels.NAMES, 1))
    monkeypatch.setattr(exact_kernels, "_launch_function", lambda: lambda *_: 0)
    device = Gpu()
    yield device
    device.close()


def operands(dev, dtype="f32"):
    shapes = {"a": (32, 16), "b": (16, 48), "c": (32, 48), "bias": (48,), "out": (32, 48)}
    return {name: dev.array(np.ones(shape), dtype) for name, shape in shapes.items()}


def taken_by(dev):
    return dev.executor().runs


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


class CapturedExecutor(NotingExecutor):
    """Its stream is being captured by the caller."""

    captured = True
    enqueue = CudaExecutor.enqueue
    _workspace, _pages, _zeros, _scalars = None, (), (), ()

    def __init__(self, stream):
        super().__init__(stream)
        self.launches, self._calling, self._calls = Launches(stream, None), set(), threading.RLock()
        self._mode = ctypes.c_int()
        self._c_mode = ctypes.byref(self._mode)

    def preparing(self):
        return nullcontext()

    def record(self, plan, arguments):
        raise AssertionError("a record was made while the caller captured")

    recorded = record


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


def test_what_would_run_now_is_refused_where_the_caller_captures(dev, monkeypatch):
    monkeypatch.setattr(Gpu, "open_executor", CapturedExecutor)
    a, b = dev.array(np.ones((32, 16)), "f32"), dev.array(np.ones((16, 48)), "f32")
    monkeypatch.setattr(CudaExecutor, "algorithms", lambda *_: NoOutcomes)
    with pytest.raises(dp.errors.BadRequest, match="to be tuned"):
        dp.matmul(a, b, autotune=True)


def test_the_short_ways_are_bounded(dev, monkeypatch):
    monkeypatch.setattr(short_ways, "MAX_SHORTCUTS", 4)
    b = dev.array(np.ones((16, 48)), "f32")
    for rows in range(1, 10):
        dp.matmul(dev.array(np.ones((rows, 16)), "f32"), b)
        assert len(dev.executor().shortcuts) <= 4


SHAPES = [(32, 16, 48), (33, 17, 49), (8, 256, 2), (2, 2, 2), (130, 64, 8)]
DTYPES = {"f64": "f64", "f32": "f32", "bf16": "bf16", "f16": "f16", "c64": "c64"}


def drawn(dev, rng, dtype, rows, columns, order):
    """A dense operand in some order, of a larger one or whole, so that steps and alignments differ too."""
    pad, skip = (int(x) for x in rng.integers(0, 4, 2))
    extents = (rows, columns) if order == "row" else (columns, rows)
    view = dev.zeros((extents[0] + 1, extents[1] + pad + skip), dtype)[1:, skip : skip + extents[1]]
    return view if order == "row" else view.mT


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "orders", ["row row row", "row column row", "column column row", "column row column", "row row"]
)
@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.RELU, Epilogue.GELU_BIAS], ids=lambda e: e.name)
def test_a_pattern_makes_the_problem_that_a_request_would(dev, monkeypatch, dtype, orders, epilogue):
    in_order = dict(zip(("a", "b", "out"), orders.split(), strict=False))
    if dtype == "c64" and epilogue is not Epilogue.NONE:
        epilogue = Epilogue.NONE  # nothing else is fused for complex numbers
    if epilogue is Epilogue.GELU_BIAS and in_order.get("out") == "column":
        epilogue = Epilogue.GELU  # a bias does not run along the columns
    rng = np.random.default_rng(3)
    made, real = [], short_ways.recognize
    monkeypatch.setattr(short_ways, "recognize", lambda *given: made.append(real(*given)) or made[-1])
    monkeypatch.setattr(matmul, "recognize", short_ways.recognize)
    for m, k, n in SHAPES:
        for _ in range(3):
            extents = {"a": (m, k), "b": (k, n), "out": (m, n)}
            fields = {name: drawn(dev, rng, dtype, *extents[name], order) for name, order in in_order.items()}
            if epilogue.adds_bias:
                fields["bias"] = dev.zeros((n,), dtype)
            request = dp.MatmulRequest(**fields, epilogue=epilogue)
            result = dp.matmul(fields.pop("a"), fields.pop("b"), epilogue=epilogue, **fields)
            assert result.shape == (m, n)
            if made and made[-1] is not None:
                plan = made.pop().plan
                lowered = lower(request, plan.row.compute)
                if epilogue.activation == "gelu" and dtype == "f64":  # whose GELU is a kernel behind the product
                    lowered = lowered._replace(problem=exact.product_of(lowered.problem, epilogue))
                assert plan.lowered == lowered
                made.append("seen")
                assert taken_by(dev)[-1][0][:6] == request.arguments({"out": result})[:6]
    assert made.count("seen") > len(SHAPES), "most calls were to be recognized by their pattern"


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


def test_rows_that_look_at_extents_have_no_pattern(dev):
    for rows in (32, 64):
        dp.matmul(dev.zeros((rows, 16), "i8"), dev.zeros((16, 48), "i8"))
    assert not dev.executor().patterns
    with pytest.raises(dp.errors.NoRow, match="multiple of 4"):
        dp.matmul(dev.zeros((32, 18), "i8"), dev.zeros((18, 48), "i8"))


def test_a_users_row_that_looks_at_extents_gets_every_request(dev):
    asked = []
    mine = replace(TABLE[1], rules=(lambda request: "needs m 8" if request.m != 8 else "",), call=TABLE[1].call)
    with_rule = replace(mine, call=lambda *given: asked.append(given[0].m) or TABLE[1].call(*given))
    dp.register(with_rule)
    try:
        for rows in (32, 16, 8):
            dp.matmul(dev.zeros((rows, 16)), dev.zeros((16, 48)))
    finally:
        TABLE.unregister(with_rule)
    assert asked == [8]


def test_a_closed_device_takes_no_short_way(dev):
    given = operands(dev)
    for _ in range(2):
        dp.matmul(given["a"], given["b"], out=given["out"])
    dev.close()
    with pytest.raises(dp.errors.StaleTensor):
        dp.matmul(given["a"], given["b"], out=given["out"])


WRITING = [e for e in Epilogue if e.writes_aux or e.writes_bgrad]


@pytest.mark.parametrize("epilogue", [*WRITING, Epilogue.NONE, Epilogue.GELU_BIAS], ids=lambda e: e.name)
def test_outputs_that_are_left_open_have_the_shapes_of_their_own_call(dev, epilogue):
    for m, n, k in [(32, 48, 16), (40, 56, 24), (24, 16, 64), (7, 300, 5), (32, 48, 16)]:
        a = dev.zeros((k, m)).mT if epilogue is Epilogue.BGRADA else dev.zeros((m, k))
        fields = {"bias": dev.zeros((n,))} if epilogue.adds_bias else {}
        if epilogue.is_gradient:
            shape, _ = dp.aux_shape(epilogue, (m, n))
            relu = epilogue.activation == "relu"
            fields["aux"] = dev.zeros((m, shape[-1] if relu else -(-n // 8) * 8), "u8" if relu else "f32")[
                :, : shape[-1]
            ]
        request = dp.MatmulRequest(a, dev.zeros((k, n)), epilogue=epilogue, **fields)
        for _ in range(2):
            result = dp.matmul(a, request.b, epilogue=epilogue, **fields)
            outputs = result if isinstance(result, tuple) else (result,)
            wanted = list(request.unallocated().values())
            assert [(t.shape, t.layout.strides, t.dtype) for t in outputs] == wanted


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


def test_a_library_that_refuses_a_first_row_is_asked_again_for_other_extents(dev):
    """The pattern of the row that then took the call would keep other extents from the first."""
    answers, real = [], matmul.cublaslt_matmul

    def refuse_once(request, executor_, row):
        answers.append((request.m, row.name))
        if len(answers) == 1:
            raise dp.errors.Refused("not these extents")
        return real(request, executor_, row)

    first = replace(TABLE[1], variant="first", fusion=Fusion(), call=refuse_once)
    dp.register(first)
    try:
        for rows in (32, 40):
            dp.matmul(dev.zeros((rows, 16)), dev.zeros((16, 48)))
    finally:
        TABLE.unregister(first)
    assert [m for m, _ in answers] == [32, 40]


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


@pytest.mark.parametrize("skew", [0, 4, 8, 16])
def test_the_heuristic_is_told_how_a_bias_is_aligned(dev, monkeypatch, skew):
    """By the pointer that is set when it is asked, whether by a request or for a pattern."""
    seen = []

    def heuristic(_handle, descriptors, *_):
        pointer, size = ctypes.c_uint64(), ctypes.c_size_t()
        attribute = cublaslt.Desc.CUBLASLT_MATMUL_DESC_BIAS_POINTER
        get = lt.cublasLtMatmulDescGetAttribute.unchecked
        assert get(descriptors.matmul, attribute, ctypes.byref(pointer), 8, ctypes.byref(size)) == 0
        seen.append(pointer.value)
        return [lt.cublasLtMatmulHeuristicResult_t()]

    monkeypatch.setattr(cublaslt, "heuristic", heuristic)
    for rows in (32, 40):  # the second by its pattern
        bias = dev.zeros((64,))[skew : skew + 48]
        dp.matmul(dev.zeros((rows, 16)), dev.zeros((16, 48)), bias=bias, epilogue=Epilogue.BIAS)
    assert set(seen) == {bias.layout.alignment}
    assert len(dev.executor().patterns) == 1


def test_a_bias_of_another_dtype_is_no_call_of_the_same_pattern(dev):
    a, b = (dev.zeros(shape, "bf16") for shape in ((32, 16), (16, 48)))
    dp.matmul(a, b, bias=dev.zeros((48,), "bf16"), epilogue=Epilogue.BIAS)
    assert dev.executor().patterns
    with pytest.raises(dp.errors.NoRow, match="bias"):
        dp.matmul(dev.zeros((40, 16), "bf16"), b, bias=dev.zeros((48,), "f64"), epilogue=Epilogue.BIAS)


def test_read_only_memory_is_refused_after_the_same_that_may_be_written(dev):
    a, b, out = dev.zeros((32, 16)), dev.zeros((16, 48)), dev.zeros((32, 48))
    kept = dp.Tensor(out.storage, out.ptr, dev.layout(out.dtype, out.shape, out.layout.strides, out.ptr, readonly=True))
    for _ in range(2):
        dp.matmul(a, b, out=out)
        with pytest.raises(dp.errors.BadRequest, match="read-only"):
            dp.matmul(a, b, out=kept)


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


@pytest.mark.parametrize("wrong", [{"epilogue": "gelu_bais"}, {"compute": "f31"}], ids=str)
def test_a_name_that_means_nothing_is_refused_each_time(dev, wrong):
    given = operands(dev)
    for _ in range(2):
        dp.matmul(given["a"], given["b"])
        with pytest.raises(BadRequest, match=f"^{next(iter(wrong))}: got '"):
            dp.matmul(given["a"], given["b"], **wrong)
    assert len(taken_by(dev)) == 2
