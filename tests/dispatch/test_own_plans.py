"""Plans, their makers and request classes of a user's own: what they raise is their requests' error, and no defect."""

import asyncio
import importlib
import sys

import numpy as np
import pytest

import dispatch as dp
from dispatch.core.user_code import is_of_user_code
from dispatch.errors import BadRow, NoRow, WorkerFailed
from dispatch.execute.cuda_executor import CudaExecutor

PATIENCE = 60  # seconds, on a machine that has other things to do
MINE = """
import sys
from dataclasses import dataclass
from typing import ClassVar
import numpy as np
import dispatch as dp
from dispatch.keys import F32, HOST

def happen(kind, where):
    if kind == where:
        raise ValueError("mine, in " + where)

@dataclass(frozen=True, eq=False)
class Mine(dp.OperandRequest["dp.Tensor"]):
    op: ClassVar[str] = "own_plan"
    reads: ClassVar[tuple[str, ...]] = ("x",)
    x: dp.Tensor
    kind: str = ""
    out: dp.Tensor | None = None

    def check_fields(self):
        pass

    @property
    def dtypes(self):
        happen(self.kind, "dtypes")
        return 3 if self.kind == "bad dtypes" else super().dtypes

    def result(self, outputs):
        happen(self.kind, "result")
        return super().result(outputs)

    def unallocated(self):
        happen(self.kind, "unallocated")
        return super().unallocated()

    def key(self):
        happen(self.kind, "key")
        return super().key()

    def describe(self):
        happen(self.kind, "describe")
        return super().describe()

class Fill(dp.Plan):
    __slots__ = ()

    def run(self, request, outputs):
        kind = getattr(request, "kind", "run")
        happen(kind, "run")
        happen("run" if kind == "describe" else "", "run")
        if kind == "exit of run":
            sys.exit(3)
        np.asarray(outputs.get("out", request.out))[...] = 1

def call(request, executor, row):
    happen(request.kind, "call")
    if request.kind == "StopIteration of call":
        raise StopIteration("mine, in call")
    return {"None of call": None, "3 of call": 3}.get(request.kind, Fill(row, capture_safe=False))

def rule(request):
    if request.kind == "StopIteration of rule":
        raise StopIteration("mine, in rule")
    return "needs another kind" if request.kind == "refused" else ""

def fills(request, executor, row):
    return Fill(row, capture_safe=False)

ROW = dp.Row("own_plan", (F32, F32), None, (rule,), HOST, HOST, (), "mine", "own_plan", call)
OF_SOFTMAX = dp.Row("softmax", (F32, F32), None, (), HOST, HOST, (), "mine", "fill", fills)
dp.register(ROW, OF_SOFTMAX)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The module of a user, which children import too."""
    (tmp_path / "own_plans_mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("own_plans_mine")
    yield module
    dp.TABLE.unregister(module.ROW)
    dp.TABLE.unregister(module.OF_SOFTMAX)
    del sys.modules["own_plans_mine"]


@pytest.fixture(params=["thread", "process"])
def sup(request, mine):
    with dp.Supervisor("host", streams=1, isolation=request.param, setup=(mine.__name__,), max_restarts=0) as made:
        yield made


KINDS = {
    **dict.fromkeys(["call", "run", "result", "dtypes", "unallocated", "key"], ValueError),
    "describe": ValueError,  # where an error is to be described
    "bad dtypes": TypeError,
    "StopIteration of call": StopIteration,
    "StopIteration of rule": StopIteration,
    "None of call": BadRow,
    "3 of call": BadRow,
    "exit of run": WorkerFailed,
}


def test_errors_of_own_plans_and_classes_are_their_requests_errors_and_break_no_worker(mine, sup):
    x, a = sup.device.zeros(3), sup.device.zeros((2, 2))
    for kind, error in KINDS.items():
        for _ in range(2):
            found = sup.submit(mine.Mine(x, kind)).exception(PATIENCE)
            assert type(found) is error, (kind, found)
            if error is ValueError:
                assert str(found) == f"mine, in {'run' if kind == 'describe' else kind}"
    np.testing.assert_array_equal(sup.submit(mine.Mine(x)).result(PATIENCE).numpy(), [1, 1, 1])
    sup.submit(dp.MatmulRequest(a, a)).result(PATIENCE)
    assert sup.stats().restarts == 0


@pytest.mark.usefixtures("mine")
def test_an_own_plan_for_an_op_of_this_library_raises_as_its_own(sup):
    found = sup.submit(dp.SoftmaxRequest(sup.device.zeros((2, 3)))).exception(PATIENCE)
    assert (type(found), str(found)) == (ValueError, "mine, in run")
    assert sup.stats().restarts == 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "exit of run"])
def test_a_run_raises_the_same_as_a_future(mine, kind):
    with pytest.raises(KINDS[kind]) as caught:
        dp.run(mine.Mine(dp.device("host").zeros(3), kind))
    assert type(caught.value) is KINDS[kind]


@pytest.mark.parametrize(("kind", "given"), [("None of call", "None"), ("3 of call", "3")])
@pytest.mark.parametrize("call", [dp.run, dp.prepare])
def test_a_row_whose_call_returns_no_plan_is_named(mine, kind, given, call):
    with pytest.raises(BadRow) as caught:
        call(mine.Mine(dp.device("host").zeros(3), kind))
    assert str(caught.value) == f"{mine.ROW.name}: its call returned {given}; expected a dispatch.Plan"


@pytest.mark.parametrize("call", [dp.run, dp.prepare, dp.explain])
def test_a_rule_may_raise_stop_iteration_like_any_exception(mine, call):
    with pytest.raises(StopIteration, match="mine, in rule"):
        call(mine.Mine(dp.device("host").zeros(3), "StopIteration of rule"))
    with pytest.raises(NoRow, match="needs another kind"):
        dp.run(mine.Mine(dp.device("host").zeros(3), "refused"))


def test_an_awaited_stop_iteration_ends_the_wait(mine):
    """A coroutine cannot raise StopIteration: Python makes it a RuntimeError, whose cause it is."""

    async def wait(sup):
        await sup.submit(mine.Mine(sup.device.zeros(3), "StopIteration of call"))

    with dp.Supervisor("host", streams=1) as sup, pytest.raises(RuntimeError, match="StopIteration") as caught:
        asyncio.run(wait(sup))
    assert isinstance(caught.value.__cause__, StopIteration)


def test_what_an_own_plan_raises_as_it_enqueues_is_of_user_code(mine):
    class Executor(CudaExecutor):
        closed = True
        device = type("Device", (), {"context": type("Context", (), {"push": lambda _: 0, "pop": lambda _: 0})()})()

        def __init__(self):
            self._calling, self._scalars = set(), {}
            self.launches = type("Launches", (), {"left": 0})()
            self._mode = self._c_mode = type("Mode", (), {"value": 0})()

        def __del__(self):
            pass

    class Broken(dp.Plan):
        def enqueue(self, arguments):
            raise ValueError("mine, in enqueue")

    plan = Broken(mine.ROW, capture_safe=False)
    with pytest.raises(ValueError, match="mine, in enqueue") as caught:
        Executor().call(plan, ())
    assert is_of_user_code(caught.value)
