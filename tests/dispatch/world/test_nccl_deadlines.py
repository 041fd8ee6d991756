"""Calls of NCCL that fail or are late, over a stand-in for it: deadlines, the monitor, and what is aborted once."""

import importlib.util
import threading
import time
from pathlib import Path

import pytest

import dispatch as dp
from dispatch.device import failed_collectives
from dispatch.errors import BadRequest, Closed, CollectiveError, CollectiveTimeout
from dispatch.keys import Arch
from dispatch.libraries.nccl import communicator, monitor
from dispatch.libraries.nccl.communicator import NcclCommunicator, unique_id
from dispatch.libraries.nccl.config import NcclConfig
from dispatch.table.select import select

spec = importlib.util.spec_from_file_location("nccl_ranks", Path(__file__).with_name("nccl_ranks.py"))
nccl_ranks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(nccl_ranks)
stand_in, library, executor, ranks = nccl_ranks.stand_in, nccl_ranks.library, nccl_ranks.executor, nccl_ranks.ranks
runner, waited = nccl_ranks.runner, nccl_ranks.waited


def test_a_call_that_never_ends_is_a_timeout_and_the_communicator_is_aborted_once(library, executor):
    (comm,) = ranks(library, 1, deadline=0.1)
    run, handle = runner(executor), comm.c_handle.value
    library.slow = 1 << 30
    with pytest.raises(CollectiveTimeout, match=r"ncclAllReduce took more than 0.1 s"):
        run(dp.AllReduceRequest(comm.device.array([1.0], "f32"), comm=comm))
    library.slow = 0
    for _ in range(2):
        with pytest.raises(CollectiveTimeout):
            comm.check()
    comm.close()
    waited(lambda: library.aborted == [handle])
    assert library.destroyed == []


def test_the_monitor_fails_what_is_not_done_in_time_and_reading_says_so(library, executor):
    (comm,) = ranks(library, 1, deadline=0.1)
    told = []
    comm.watchers.append(told.append)
    runner(executor)(dp.AllReduceRequest(comm.device.array([1.0], "f32"), comm=comm))
    assert monitor.check_communicator(comm) is False  # done
    assert not comm.pending
    library.gpu.done = False
    runner(executor)(dp.AllReduceRequest(comm.device.array([1.0], "f32"), comm=comm))
    assert monitor.check_communicator(comm) is True
    waited(lambda: time.monotonic() > comm.pending[0].until)
    assert monitor.check_communicator(comm) is False
    with pytest.raises(CollectiveTimeout, match=r"ncclAllReduce was not done on all ranks within 0.1 s"):
        failed_collectives.check_not_failed(comm.device)
    assert [type(each) for each in told] == [CollectiveTimeout]
    comm.close()
    failed_collectives.check_not_failed(comm.device)


def test_calls_behind_one_that_is_not_done_share_an_event_and_do_not_put_its_deadline_off(library, executor):
    """The monitor asks for two at most; each stream has its own."""
    (comm,), run = ranks(library, 1, deadline=0.3), runner(executor)
    x = comm.device.array([1.0], "f32")
    run(dp.AllReduceRequest(x, comm=ranks(library, 1)[0]))  # the first call takes long
    library.gpu.done, library.gpu.events = False, 0
    begun = time.monotonic()
    while time.monotonic() < begun + 0.2:
        run(dp.AllReduceRequest(x, comm=comm))
        assert len(comm.pending) <= 2
    assert library.gpu.events == 2
    assert monitor.check_communicator(comm) is True
    oldest, latest = (each.until - begun for each in comm.pending)
    assert oldest < 0.4 < latest
    for _ in range(3):
        comm.record_work(type(executor.target)(stand_in.STREAM + 8), "a graph")  # on another stream
    assert library.gpu.events == 3
    waited(lambda: time.monotonic() > begun + 0.4)
    assert monitor.check_communicator(comm) is False
    assert isinstance(comm.error, CollectiveTimeout)
    comm.close()
    assert not comm.pending


def test_a_communicator_without_graphs_refuses_a_capture(library, executor):
    (comm,) = ranks(library, 1)
    comm.config = NcclConfig(graph_usage_mode=0)
    run, x = runner(executor), comm.device.array([1.0], "f32")
    run(dp.AllReduceRequest(x, comm=comm))
    executor.captured = True
    with pytest.raises(BadRequest, match="graph_usage_mode is 0, under capture"):
        run(dp.AllReduceRequest(x, comm=comm))


def test_the_monitor_takes_ncclss_word(library, executor):
    (comm,) = ranks(library, 1)
    library.broken[comm.c_handle.value] = 6
    assert monitor.check_communicator(comm) is False
    assert isinstance(comm.error, dp.errors.RankLost)
    with pytest.raises(dp.errors.RankLost, match="ncclRemoteError"):
        runner(executor)(dp.BarrierRequest(comm=comm))
    failed_collectives.clear_failed(comm.device, comm)


def test_aborting_from_another_thread_never_meets_a_call(library, executor, monkeypatch):
    """The stand-in refuses a handle that is gone; calls either are before the abort or raise."""
    monkeypatch.setattr(communicator, "LONGEST_CALL", 20.0)  # a busy machine may stop a thread inside a call
    (comm,) = ranks(library, 1)
    x = comm.device.array([1.0], "f32")
    request = dp.AllReduceRequest(x, comm=comm, out=x)
    row = select(request, Arch(90))
    plan, begun, raised = row.call(request, executor, row), threading.Event(), []

    def call():
        try:
            for _ in range(100000):
                plan.enqueue(request.arguments({}))
                begun.set()
        except CollectiveError as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    begun.wait(20)
    comm.abort("enough")
    thread.join(60)
    assert len(raised) == 1
    assert "enough" in str(raised[0])
    comm.close()
    waited(lambda: len(library.aborted) == 1)


def test_closing_waits_no_longer_than_the_deadline(library, monkeypatch):
    (comm,) = ranks(library, 1, deadline=0.1)
    never, handle = threading.Event(), comm.c_handle.value
    monkeypatch.setattr(library, "_CommFinalize", lambda _: never.wait(20) and 0)
    comm.close()
    waited(lambda: library.aborted == [handle])
    with pytest.raises(Closed):
        comm.check()
    never.set()  # what comes back so late leaves the handle alone, which is gone
    waited(lambda: all(thread.name != "ncclCommFinalize" for thread in threading.enumerate()))
    assert (library.aborted, library.destroyed) == ([handle], [])


def test_a_call_within_a_capture_is_not_noted_and_its_graph_holds_up_nobody(library, executor, monkeypatch):
    """NCCL destroys a communicator behind the graphs that have its calls, which the caller may keep."""
    (comm,) = ranks(library, 1)
    handle, gone = comm.c_handle.value, threading.Event()
    monkeypatch.setattr(library, "_CommFinalize", lambda _: gone.wait(20) and 0)
    executor.captured = True
    runner(executor)(dp.AllReduceRequest(comm.device.array([1.0], "f32"), comm=comm))
    assert not comm.pending
    comm.close()  # returns, where the graph is there as yet
    assert not library.destroyed
    gone.set()
    waited(lambda: library.destroyed == [handle])
    assert library.aborted == []


def test_closing_behind_graphs_waits_for_work_no_longer_than_one_deadline(library, executor):
    (comm,) = ranks(library, 1, deadline=0.2)
    handle, library.gpu.done = comm.c_handle.value, False
    runner(executor)(dp.AllReduceRequest(comm.device.array([1.0], "f32"), comm=comm))
    comm.in_graphs, begun = True, time.monotonic()
    comm.close()
    assert time.monotonic() - begun < 0.35
    waited(lambda: library.aborted == [handle])


def test_a_call_that_waits_within_nccl_ends_by_the_monitor(library, executor):
    """Connections are made by a first call, which waits for the other ranks."""
    (comm,) = ranks(library, 1, deadline=0.2)
    library.stuck = True
    monitor.watch(comm)
    with pytest.raises(CollectiveTimeout, match=r"has not come back from NCCL within 0.2 s"):
        runner(executor)(dp.AllReduceRequest(comm.device.array([1.0], "f32"), comm=comm))
    waited(lambda: len(library.aborted) == 1)
    comm.close()


def test_ranks_that_do_not_come_to_the_beginning_are_a_timeout(library, monkeypatch):
    never = threading.Event()

    def late(pointer, *_):
        never.wait(20)
        pointer._obj.value = library._made(stand_in.Rendezvous(1), 0)

    monkeypatch.setattr(library, "_CommInitRankConfig", late)
    with pytest.raises(CollectiveTimeout, match=r"ncclCommInitRankConfig did not complete within 0.1 s"):
        NcclCommunicator.create(library.gpu, 0, 2, unique_id(), deadline=0.1)
    failed_collectives.check_not_failed(library.gpu)  # nothing was to be written by it
    never.set()
    waited(lambda: all(thread.name != "ncclCommInitRankConfig" for thread in threading.enumerate()))
    assert library.aborted == list(library.comms), "what came so late was let go of"
