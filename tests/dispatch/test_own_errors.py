"""What a user's own formula, rule or launch raises is that request's error, as it is; the worker goes on."""

import importlib
import sys
import traceback

import numpy as np
import pytest

import dispatch as dp
from dispatch.core import host_plan
from dispatch.core.user_code import is_of_user_code
from dispatch.errors import OutOfMemory, WorkerFailed
from dispatch.supervise.process.messages import pack_error, unpack_error

PATIENCE = 60  # seconds, on a machine that has other things to do
MINE = """
import asyncio
from dataclasses import dataclass
from typing import ClassVar
import numpy as np
import dispatch as dp
from dispatch.keys import F32, HOST

class Hostile(Exception):
    @property
    def __notes__(self):
        raise RuntimeError("it has no notes")

class Stop(BaseException):
    pass

ERRORS = {1.0: ValueError, 2.0: TypeError, 3.0: KeyError, 4.0: SystemExit, 6.0: Hostile}
ERRORS |= {5.0: KeyboardInterrupt, 7.0: asyncio.CancelledError, 8.0: Stop, 9.0: GeneratorExit, 10.0: MemoryError}
ERRORS[11.0] = StopIteration

@dataclass(frozen=True, eq=False)
class MineRequest(dp.OperandRequest["dp.Tensor"]):
    op: ClassVar[str] = "mine"
    reads: ClassVar[tuple[str, ...]] = ("x",)
    x: dp.Tensor
    limit: float = 0.0
    out: dp.Tensor | None = None

    def check_fields(self) -> None:
        pass

def raise_if_asked(limit):
    if limit in ERRORS:
        raise ERRORS[limit]("a mistake of mine")

def evaluate(request, work):
    raise_if_asked(request.limit)
    return {"out": np.asarray(request.x)}

def rule(request):
    raise_if_asked(-request.limit)
    return ""

ROW = dp.Row("mine", (F32, F32), None, (rule,), HOST, HOST, (), "numpy", "mine", dp.numpy_call(evaluate))
dp.register(ROW)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The module of a user, which children import too."""
    (tmp_path / "own_errors_mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("own_errors_mine")
    yield module
    dp.TABLE.unregister(module.ROW)
    del sys.modules["own_errors_mine"]


@pytest.fixture(params=["thread", "process"])
def sup(request, mine):
    with dp.Supervisor("host", streams=1, isolation=request.param, setup=(mine.__name__,), max_restarts=0) as made:
        yield made


@pytest.mark.parametrize("limit", [1.0, 2.0, 3.0, -1.0, 7.0, -7.0, 8.0, 9.0, 11.0, -11.0])
def test_what_own_code_raises_is_its_requests_error_and_costs_no_worker(mine, sup, limit):
    x = sup.device.array(np.ones(3, np.float32))
    bad = [sup.submit(mine.MineRequest(x, limit)) for _ in range(5)]
    for future in bad:
        error = future.exception(PATIENCE)
        assert type(error) is mine.ERRORS[abs(limit)]
        assert error.args == ("a mistake of mine",)
    np.testing.assert_array_equal(sup.submit(mine.MineRequest(x)).result(PATIENCE).numpy(), [1, 1, 1])
    assert sup.stats().restarts == 0


def test_a_formula_that_lacks_memory_is_told_as_a_device_that_does(mine, sup):
    error = sup.submit(mine.MineRequest(sup.device.zeros(3), 10.0)).exception(PATIENCE)
    assert type(error) is OutOfMemory
    assert "a mistake of mine" in str(error)
    with pytest.raises(OutOfMemory, match="a mistake of mine"):
        dp.run(mine.MineRequest(dp.device("host").zeros(3), 10.0))


def test_the_traceback_leads_to_the_users_line(mine, sup):
    error = sup.submit(mine.MineRequest(sup.device.zeros(3), 1.0)).exception(PATIENCE)
    shown = "".join(traceback.format_exception(error)) + "".join(getattr(error, "__notes__", ()))
    assert "in evaluate\n    raise_if_asked(request.limit)" in shown


def test_an_error_that_does_not_come_through_says_where_it_was_raised():
    class Local(Exception):
        """Of a function's own, which no other process knows."""

    try:
        raise Local("a mistake of mine")
    except Local as error:
        found = unpack_error(pack_error(error))
    assert isinstance(found, WorkerFailed)
    assert "Local: a mistake of mine" in str(found)
    assert any('raise Local("a mistake of mine")' in note for note in found.__notes__)


def test_an_error_of_several_requests_has_its_traceback_once():
    try:
        raise ValueError("a mistake of mine")
    except ValueError as error:
        for _ in range(3):
            found = unpack_error(pack_error(error))
    assert len(found.__notes__) == 1


def test_what_has_no_notes_is_told_all_the_same(mine, sup):
    error = sup.submit(mine.MineRequest(sup.device.zeros(3), 6.0)).exception(PATIENCE)
    assert isinstance(error, (mine.Hostile, WorkerFailed))
    assert "a mistake of mine" in str(error)


@pytest.mark.parametrize("limit", [4.0, 5.0, -4.0, -5.0])
def test_an_exit_or_interrupt_of_own_code_is_replaced_and_breaks_no_worker(mine, sup, limit):
    for _ in range(5):
        error = sup.submit(mine.MineRequest(sup.device.zeros(3), limit)).exception(PATIENCE)
        assert isinstance(error, WorkerFailed)
        assert isinstance(error.__cause__, mine.ERRORS[abs(limit)])
    sup.submit(mine.MineRequest(sup.device.zeros(3))).result(PATIENCE)
    assert sup.stats().restarts == 0


def test_a_call_raises_what_its_formula_raises(mine):
    x = dp.device("host").zeros(3)
    with pytest.raises(KeyError, match="a mistake of mine") as caught:
        dp.run(mine.MineRequest(x, 3.0))
    assert is_of_user_code(caught.value)


def test_what_this_library_raises_by_itself_is_a_defect(monkeypatch):
    monkeypatch.setattr(host_plan.NumpyPlan, "_check_names", None)
    with dp.Supervisor("host", streams=1) as sup:
        error = sup.submit(dp.SoftmaxRequest(sup.device.zeros((3, 4)))).exception(PATIENCE)
    assert isinstance(error, WorkerFailed)
    assert not is_of_user_code(error.__cause__)
