"""The short way of NCCL's repeated calls, over a stand-in for NCCL: the stream, groups, nested calls and failures."""

import ctypes
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import CollectiveError
from dispatch.execute.relocated_graph import MISFIT
from dispatch.keys import Arch
from dispatch.table.select import select

spec = importlib.util.spec_from_file_location("nccl_ranks", Path(__file__).with_name("nccl_ranks.py"))
nccl_ranks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(nccl_ranks)
stand_in, library, ranks = nccl_ranks.stand_in, nccl_ranks.library, nccl_ranks.ranks


class Context:
    """A GPU's context: whether it is current."""

    def __init__(self):
        self.depth = self.status = 0
        self.push, self.pop = lambda: self._move(1), lambda: self._move(-1)

    def _move(self, by):
        self.depth += 0 if self.status else by
        return self.status

    def __enter__(self):
        self.push()

    def __exit__(self, *_):
        self.pop()


@pytest.fixture
def executor():
    """Its plans enqueue to another stream than its own, as during a recording."""
    launches = SimpleNamespace(left=0, stream_handle=ctypes.c_void_p(stand_in.STREAM))
    device = SimpleNamespace(context=Context())
    return SimpleNamespace(target=ctypes.c_void_p(99), captured=False, launches=launches, device=device)


def planned(comm, executor, x, out):
    request = dp.AllReduceRequest(x, comm=comm, out=out)
    row = select(request, Arch(90))
    return row.call(request, executor, row), request.arguments({})


def operands(comm, value, count=3):
    return comm.device.array(np.full(count, value, np.float32)), comm.device.empty((count,))


def test_a_call_is_made_on_the_stream_of_its_executor_and_watched(library, executor):
    (comm,) = ranks(library, 1)
    x, out = operands(comm, 2.0)
    plan, arguments = planned(comm, executor, x, out)
    during = []
    all_reduce = library._AllReduce

    def noted(*given):
        during.append((executor.device.context.depth, given[-1].value))
        return all_reduce(*given)

    library._AllReduce = noted
    library.gpu.done = False
    assert plan.launch(arguments) == 0
    assert during == [(1, stand_in.STREAM)]
    assert executor.device.context.depth == 0
    assert [each.what for each in comm.pending] == ["ncclAllReduce"]
    assert out.numpy().tolist() == [2.0] * 3
    executor.device.context.status = 3
    assert plan.launch(arguments) == 3, "nothing was called without the context"
    assert library.named == ["ncclAllReduce"]


def test_calls_in_a_group_begin_at_its_end_and_keep_their_operands(library, executor):
    executor.target.value = stand_in.STREAM
    (comm,) = ranks(library, 1)
    x, out = operands(comm, 5.0)
    plan, arguments = planned(comm, executor, x, out)
    calls = plan.as_calls(arguments, (x, out))
    with dp.collective_group():
        assert plan.launch(arguments) == MISFIT, "the executor keeps the operands"
        assert calls.launch() == 0
        assert len(comm.pending) == 0
        assert library.named.count("ncclGroupStart") == 1
    assert library.named == ["ncclGroupStart", "ncclAllReduce", "ncclGroupEnd"]
    assert out.numpy().tolist() == [5.0] * 3
    assert calls.launch() == 0
    assert library.named[-1] == "ncclAllReduce"


def test_a_call_inside_a_call_of_the_same_plan_leaves_its_addresses(library, executor):
    """As by a finalizer or a signal handler: each call has addresses of its own."""
    (comm,) = ranks(library, 1)
    x, out = operands(comm, 1.0)
    plan, arguments = planned(comm, executor, x, out)
    y, other = operands(comm, 7.0)
    nested = dp.AllReduceRequest(y, comm=comm, out=other).arguments({})
    all_reduce, once = library._AllReduce, [nested]

    def interrupted(*given):
        if once:
            assert plan.launch(once.pop()) == 0
        return all_reduce(*given)

    library._AllReduce = interrupted
    assert plan.launch(arguments) == 0
    assert (out.numpy().tolist(), other.numpy().tolist()) == ([1.0] * 3, [7.0] * 3)


def test_a_failed_communicator_makes_no_more_calls(library, executor):
    (comm,) = ranks(library, 1)
    plan, arguments = planned(comm, executor, *operands(comm, 1.0))
    calls = plan.as_calls(arguments, ())
    comm.fail(CollectiveError("lost"))
    for call in (lambda: plan.launch(arguments), calls.launch):
        with pytest.raises(CollectiveError, match="lost"):
            call()
    assert executor.device.context.depth == 0
    assert library.named.count("ncclAllReduce") == 0
