"""Collectives that all ranks capture into graphs, over a stand-in for NCCL: what is captured, launched, and ended."""

import ctypes
import importlib.util
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from dispatch.device import disposal
from dispatch.device.stream import NULL_CONTEXT
from dispatch.errors import BadRequest, Closed, CollectiveError
from dispatch.keys import Arch
from dispatch.libraries.nccl import monitor
from dispatch.libraries.nccl.config import NcclConfig
from dispatch.table.select import select

spec = importlib.util.spec_from_file_location("nccl_ranks", Path(__file__).with_name("nccl_ranks.py"))
nccl_ranks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(nccl_ranks)
stand_in, library, ranks, waited = nccl_ranks.stand_in, nccl_ranks.library, nccl_ranks.ranks, nccl_ranks.waited


class Graph:
    """An executable graph, whose launches are counted."""

    def __init__(self):
        self.status = self.launches = 0

    def launch(self):
        self.launches += 1
        return self.status


class Executor:
    """An executor's capture: what is enqueued meanwhile goes to another stream."""

    captured = False

    def __init__(self):
        self.target, self.stream = ctypes.c_void_p(stand_in.STREAM), SimpleNamespace(context=NULL_CONTEXT)
        self.ended = 0  # how many captures other libraries end
        self.graphs, self.streams = [], []

    def capture(self, enqueue, *, tries=3):
        for _ in range(tries):
            self.streams.append(self.target.value)
            enqueue()
            if not self.ended:
                self.graphs.append(weakref.ref(graph := Graph()))
                return graph
            self.ended -= 1
        return None


@pytest.fixture
def executor():
    return Executor()


def planned(comm, executor):
    request = dp.AllReduceRequest(comm.device.array([1.0], "f32"), comm=comm)
    row = select(request, Arch(90))
    outputs = request.device.executor().outputs(request)
    return row.call(request, executor, row), request.arguments(outputs)


def test_a_call_is_captured_once_and_each_launch_is_watched(library, executor):
    (comm,) = ranks(library, 1)
    plan, arguments = planned(comm, executor)
    graph = plan.as_graph(arguments)
    assert (library.named, len(comm.pending), comm.in_graphs) == (["ncclAllReduce"], 0, False), "captured, not running"
    library.gpu.done = False
    assert graph.launch() == 0
    assert library.named == ["ncclAllReduce"], "a launch makes no call of NCCL"
    assert [each.what for each in comm.pending] == ["ncclAllReduce"]
    assert not comm.is_idle
    library.gpu.done = True
    assert comm.is_idle, "a graph of this library does not hide what is running"
    executor.graphs[0]().status = 1
    assert graph.launch() == 1
    assert not comm.pending, "a launch that failed runs nothing"


def test_the_deadline_applies_to_launches(library, executor):
    (comm,) = ranks(library, 1, deadline=0.05)
    plan, arguments = planned(comm, executor)
    graph = plan.as_graph(arguments)
    library.gpu.done = False
    graph.launch()
    waited(lambda: not monitor.check_communicator(comm))
    with pytest.raises(dp.errors.CollectiveTimeout, match="ncclAllReduce was not done on all ranks"):
        graph.launch()
    waited(lambda: executor.graphs[0]() is None)
    assert comm.error is not None


def test_a_closed_communicator_destroys_its_graphs_first(library, executor, monkeypatch):
    (comm,) = ranks(library, 1)
    plan, arguments = planned(comm, executor)
    graph, alive = plan.as_graph(arguments), []
    finalize = library._CommFinalize
    monkeypatch.setattr(library, "_CommFinalize", lambda h: alive.append(executor.graphs[0]()) or finalize(h))
    comm.close()
    assert alive == [None], "NCCL's end waits for graphs"
    with pytest.raises(Closed):
        graph.launch()


def test_a_graph_that_nobody_holds_goes_with_its_call(library, executor):
    (comm,) = ranks(library, 1)
    plan, arguments = planned(comm, executor)
    graph = plan.as_graph(arguments)
    assert list(comm.graphs) == [graph]
    del graph
    assert (list(comm.graphs), executor.graphs[0]()) == ([], None)


def test_launches_and_the_end_never_meet(library, executor):
    """Each launch of another thread is before the end, or raises."""
    (comm,) = ranks(library, 1)
    plan, arguments = planned(comm, executor)
    graph, begun, raised = plan.as_graph(arguments), threading.Event(), []

    def launch():
        try:
            for _ in range(1_000_000):
                graph.launch()
                begun.set()
        except (CollectiveError, Closed) as error:
            raised.append(error)

    thread = threading.Thread(target=launch)
    thread.start()
    begun.wait(20)
    comm.abort("enough")
    thread.join(60)
    assert len(raised) == 1
    assert "enough" in str(raised[0])
    waited(lambda: executor.graphs[0]() is None)
    waited(lambda: len(library.aborted) == 1)


def test_a_capture_that_is_ended_fails_the_communicator_and_is_not_repeated(library, executor):
    """A second call on one rank alone would shift all later ones."""
    (comm,) = ranks(library, 1)
    plan, arguments = planned(comm, executor)
    executor.ended = 1
    with pytest.raises(CollectiveError, match="ended the capture of ncclAllReduce"):
        plan.as_graph(arguments)
    assert library.named.count("ncclAllReduce") == 1
    with pytest.raises(CollectiveError):
        comm.check()


def test_what_cannot_be_captured_is_refused(library, executor):
    (comm,) = ranks(library, 1)
    plan, arguments = planned(comm, executor)
    with dp.collective_group(), pytest.raises(BadRequest, match="True inside a collective_group"):
        plan.as_graph(arguments)
    comm.config = NcclConfig(graph_usage_mode=0)
    with pytest.raises(BadRequest, match="graph_usage_mode is 0"):
        plan.as_graph(arguments)
    assert not executor.streams
    x = dp.device("host").array([1.0], "f32")
    with pytest.raises(BadRequest, match=r"graph: got True; expected False on the host"):
        dp.prepare(dp.SoftmaxRequest(x), graph=True)
    for wrong in ("yes", 1, np.ones(3)):
        with pytest.raises(BadRequest, match=r"graph: got .*; expected a bool"):
            dp.prepare(dp.SoftmaxRequest(x), graph=wrong)


def test_no_object_is_destroyed_while_it_is_launched(library, executor, monkeypatch):
    (comm,) = ranks(library, 1)
    plan, arguments = planned(comm, executor)
    graph, blocks = plan.as_graph(arguments), []

    class Disposal:
        __enter__ = staticmethod(lambda: blocks.append(executor.graphs[0]().launches))
        __exit__ = staticmethod(lambda *_: blocks.append(len(comm.pending)))

    library.gpu.done = False
    monkeypatch.setattr(disposal, "_disposal", Disposal())
    graph.launch()
    assert blocks == [0, 1], "it begins before the launch, and ends when the work is recorded"
