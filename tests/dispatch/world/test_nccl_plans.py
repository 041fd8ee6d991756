"""Plans and communicators of NCCL over a stand-in for it: arguments, groups, what goes on, fails, and is late."""

import gc
import importlib.util
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from dispatch.device import suspicions
from dispatch.device.host import HostDevice
from dispatch.device.stream import NULL_CONTEXT
from dispatch.errors import BadRequest, Closed, CollectiveError, CollectiveTimeout, Refused
from dispatch.keys import F32, HOST, Arch
from dispatch.libraries.nccl import memory, monitor
from dispatch.libraries.nccl.communicator import NcclCommunicator, unique_id
from dispatch.libraries.nccl.config import NcclConfig, c_config
from dispatch.ops import FAMILIES
from dispatch.ops.collective import cases as case_module
from dispatch.ops.collective.nccl import NcclPlan
from dispatch.table.select import select


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stand_in = loaded(Path(__file__).parents[1] / "nccl_stand_in.py")
collective_cases = loaded(Path(__file__).with_name("collective_cases.py"))
ROWS = [row for row in dp.TABLE if row.op in FAMILIES["collective"][1] and row.min_arch != HOST]
QUICK = ("f32", "bf16", "u8")


@pytest.fixture
def library(monkeypatch):
    made, gpu = stand_in.install(monkeypatch)
    made.gpu = gpu
    # Requests are on the host, and so is the device of their communicators: it has what a GPU's has, for that long.
    for name in ("context", "event", "recycle"):
        value = NULL_CONTEXT if name == "context" else getattr(gpu, name)
        monkeypatch.setattr(HostDevice, name, value, raising=False)
    return made


@pytest.fixture
def executor():
    import ctypes

    return SimpleNamespace(target=ctypes.c_void_p(stand_in.STREAM), captured=False)


def ranks(library, count, deadline=20.0):
    """Communicators of so many ranks, on the host's device."""
    hall = stand_in.Hall(count)
    device = dp.device("host")
    handles = [stand_in.nccl.ncclComm_t(library._made(hall, rank)) for rank in range(count)]
    return [NcclCommunicator(h, rank, count, device, NcclConfig(), deadline=deadline) for rank, h in enumerate(handles)]


def runner(executor):
    """What runs a request by the row of a GPU."""

    def run(request):
        row = select(request, Arch(90))
        plan = row.call(request, executor, row)
        outputs = request.device.executor().outputs(request)
        plan.hold((*(tensor for _, tensor, _ in request.tensors()), *outputs.values()))  # as executors do
        plan.enqueue(request.arguments(outputs))
        return request.give(outputs)

    return run


def on_threads(function, comms):
    with ThreadPoolExecutor(len(comms)) as pool:
        return [each.result(60) for each in [pool.submit(function, comm) for comm in comms]]


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS if str(row.dtypes[0]) in QUICK])
def test_a_plan_of_one_rank_is_right(row, library, executor, monkeypatch, each):
    (comm,) = ranks(library, 1)
    monkeypatch.setattr(case_module, "solo", lambda _: comm)

    def look(case, rng):
        check = case.check(dp.device("host"), rng)
        if row.variant == "even" and getattr(check.request, "send_counts", None):
            return
        plan = row.call(check.request, executor, row)
        assert not plan.capture_safe
        assert plan.is_bare
        outputs = check.request.device.executor().outputs(check.request)
        plan.enqueue(check.request.arguments(outputs))
        check.verify(check.request.result(outputs))

    each(case_module.cases(row), look)


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_plans_of_several_ranks_give_what_the_reference_gives(library, executor, count):
    comms, run = ranks(library, count), runner(executor)

    def compare(comm):
        world = SimpleNamespace(rank=comm.rank, size=comm.size, device=comm.device, communicator=comm)
        return collective_cases.compared(
            world, dtypes=collective_cases.DTYPES[:3] + collective_cases.DTYPES[7:9], run=run
        )

    assert on_threads(compare, comms) == [[]] * count
    assert {
        "ncclAllReduce",
        "ncclReduce",
        "ncclReduceScatter",
        "ncclBroadcast",
        "ncclAllGather",
        "ncclAlltoAll",
    } <= set(library.named)
    assert library.named.count("ncclRedOpCreatePreMulSum") == library.named.count("ncclRedOpDestroy") > 0
    assert library.named.count("ncclGroupStart") == library.named.count("ncclGroupEnd")


def test_sends_and_receives_of_a_group_go_together(library, executor):
    comms, run = ranks(library, 2), runner(executor)

    def exchange(comm):
        device = comm.device
        x, out = device.array(np.full(3, comm.rank, np.float32)), device.empty((3,))
        with dp.collective_group():
            run(dp.SendRequest(x, comm=comm, peer=1 - comm.rank))
            run(dp.RecvRequest(out, comm=comm, peer=1 - comm.rank))
            assert len(comm.pending) == 0
        run(dp.BarrierRequest(comm=comm))
        return out.numpy().tolist(), len(comm.pending)

    found = on_threads(exchange, comms)
    # One note for the group, and one for the barrier.
    assert found == [([1.0] * 3, 2), ([0.0] * 3, 2)]


def test_one_thread_groups_the_calls_of_several_communicators(library, executor):
    comms, run = ranks(library, 3), runner(executor)
    with dp.collective_group():
        outs = [run(dp.AllReduceRequest(c.device.array([c.rank + 1.0], "f32"), comm=c)) for c in comms]
    assert [float(out.numpy()[0]) for out in outs] == [6.0] * 3


def test_a_factor_in_device_memory_is_read_at_the_call(library, executor):
    (comm,) = ranks(library, 1)
    factor, x = comm.device.array(2.0, "f32"), comm.device.array([1.0, 3.0], "f32")
    request = dp.AllReduceRequest(x, comm=comm, reduce="premul_sum", device_factor=factor, out=comm.device.empty((2,)))
    row = select(request, Arch(90))
    plan = row.call(request, executor, row)
    for value in (2.0, 5.0):
        factor.copy_from(np.float32(value))
        plan.enqueue(request.arguments({}))
        assert request.out.numpy().tolist() == [value, 3 * value]


def test_calls_that_go_on_are_waited_for(library, executor):
    comms, run = ranks(library, 2), runner(executor)
    library.slow = 3
    found = on_threads(lambda c: run(dp.AllReduceRequest(c.device.array([1.0], "f32"), comm=c)).numpy()[0], comms)
    assert found == [2.0, 2.0]
    assert library.named.count("ncclCommGetAsyncError") >= 6


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


def waited(condition, seconds=20):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(1e-3)


def test_the_monitor_fails_what_is_not_done_in_time_and_reading_says_so(library, executor):
    (comm,) = ranks(library, 1, deadline=0.1)
    told = []
    comm.watchers.append(told.append)
    runner(executor)(dp.AllReduceRequest(comm.device.array([1.0], "f32"), comm=comm))
    assert monitor.look(comm) is False  # done
    assert not comm.pending
    library.gpu.done = False
    runner(executor)(dp.AllReduceRequest(comm.device.array([1.0], "f32"), comm=comm))
    assert monitor.look(comm) is True
    waited(lambda: time.monotonic() > comm.pending[0].until)
    assert monitor.look(comm) is False
    with pytest.raises(CollectiveTimeout, match=r"ncclAllReduce was not done on all ranks within 0.1 s"):
        suspicions.check_trust(comm.device)
    assert [type(each) for each in told] == [CollectiveTimeout]
    comm.close()
    suspicions.check_trust(comm.device)


def test_calls_behind_one_that_is_not_done_share_an_event_and_do_not_put_its_deadline_off(library, executor):
    """The monitor asks for two at most; each stream has its own."""
    (comm,) = ranks(library, 1, deadline=0.3)
    library.gpu.done = False
    run, x = runner(executor), comm.device.array([1.0], "f32")
    begun = time.monotonic()
    while time.monotonic() < begun + 0.2:
        run(dp.AllReduceRequest(x, comm=comm))
        assert len(comm.pending) <= 2
    assert library.gpu.events == 2
    assert monitor.look(comm) is True
    oldest, latest = (each.until - begun for each in comm.pending)
    assert oldest < 0.4 < latest
    for _ in range(3):
        comm.note(type(executor.target)(stand_in.STREAM + 8), "a graph")  # on another stream
    assert library.gpu.events == 3
    waited(lambda: time.monotonic() > begun + 0.4)
    assert monitor.look(comm) is False
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
    assert monitor.look(comm) is False
    assert isinstance(comm.error, dp.errors.RankLost)
    with pytest.raises(dp.errors.RankLost, match="ncclRemoteError"):
        runner(executor)(dp.BarrierRequest(comm=comm))
    suspicions.trust(comm.device, comm)


def test_aborting_from_another_thread_never_meets_a_call(library, executor):
    """The stand-in refuses a handle that is gone; calls either are before the abort or raise."""
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
        pointer._obj.value = library._made(stand_in.Hall(1), 0)

    monkeypatch.setattr(library, "_CommInitRankConfig", late)
    with pytest.raises(CollectiveTimeout, match=r"ncclCommInitRankConfig was not done within 0.1 s"):
        NcclCommunicator.create(library.gpu, 0, 2, unique_id(), deadline=0.1)
    suspicions.check_trust(library.gpu)  # nothing was to be written by it
    never.set()
    waited(lambda: all(thread.name != "ncclCommInitRankConfig" for thread in threading.enumerate()))
    assert library.aborted == list(library.comms), "what came so late was let go of"


@pytest.mark.parametrize("blocking", [True, False])
def test_communicators_are_made_split_shrunk_and_destroyed(library, blocking):
    library.slow = 2
    identity = unique_id()
    assert len(identity) == 128

    def make(rank):
        return NcclCommunicator.create(
            library.gpu, rank, 4, identity, NcclConfig(blocking=blocking, max_ctas=8), deadline=20
        )

    def shape(comm):
        comm.rank, comm.size = comm.rank, comm.size
        parts = comm.split(comm.rank % 2, key=-comm.rank)
        none = comm.split(None if comm.rank == 3 else 0)
        small = None if comm.rank == 1 else comm.shrink([1])
        found = (parts.rank, parts.size), none and none.size, small and (small.rank, small.size)
        for each in filter(None, (parts, none, small)):
            each.close()
            each.close()
        return found

    with ThreadPoolExecutor(4) as pool:
        comms = list(pool.map(make, range(4)))
        found = list(pool.map(shape, comms))
    assert found == [
        ((1, 2), 3, (0, 3)), ((1, 2), 3, None), ((0, 2), 3, (1, 3)), ((0, 2), None, (2, 3)),
    ]  # fmt: skip
    for comm in comms:
        comm.close()
        with pytest.raises(Closed):
            comm.check()
    assert len(library.destroyed) == 4 + 4 + 3 + 3
    assert library.aborted == []


def test_memory_of_nccls_own_is_registered_and_goes_back(library, executor):
    comms = ranks(library, 2)
    made = [memory.empty(comm.device, (3, 5), "bf16") for comm in comms]
    assert [tensor.ptr % 4096 for tensor in made] == [0, 0]
    assert (made[0].shape, str(made[0].dtype), made[0].nbytes) == ((3, 5), "bf16", 30)
    windows = on_threads(lambda comm: memory.window(comm, made[comm.rank]), comms)
    with memory.register(comms[0], made[0]):
        assert sorted(library.registered.values()) == sorted([(t.ptr, 30) for t in (*made, made[0])])
    assert len(library.registered) == 2
    for each in windows:
        each.close()
        each.close()
    assert library.registered == {}
    strided, other = comms[0].device.zeros((4, 4)).T, comms[0].device.zeros((4, 4))[0, 1:]
    with pytest.raises(BadRequest, match="dense in C order"):
        memory.register(comms[0], strided)
    with pytest.raises(BadRequest, match="memory of NCCL's"):
        memory.window(comms[0], other)
    x = made[0]
    x.copy_from(np.ones((3, 5)))
    (alone,) = ranks(library, 1)
    assert runner(executor)(dp.AllReduceRequest(x, comm=alone, out=x)).numpy().sum() == 15
    made.clear()
    del windows, each, x, strided, other
    gc.collect()
    waited(lambda: library.memory == {})


@pytest.mark.usefixtures("library")
def test_a_host_is_no_place_for_nccl():
    with pytest.raises(BadRequest, match="a GPU"):
        NcclCommunicator.create(dp.device("host"), 0, 1, unique_id())


def test_a_configuration_is_ncclss_own():
    assert c_config(NcclConfig()).blocking == 1
    made = c_config(NcclConfig(blocking=False, min_ctas=2, net_name="Socket", comm_name="mine"))
    assert (made.magic, made.blocking, made.minCTAs) == (0xCAFEBEEF, 0, 2)
    assert made.maxCTAs == -(2**31)
    import ctypes

    assert ctypes.string_at(made.netName) == b"Socket"
    assert ctypes.string_at(made.commName) == b"mine"
    for wrong in ({"min_ctas": -1}, {"net_name": 3}, {"blocking": None}):
        with pytest.raises(BadRequest):
            NcclConfig(**wrong)


def test_a_field_that_the_installed_nccl_lacks_is_refused(monkeypatch):
    from dispatch.libraries.nccl import config

    monkeypatch.setitem(config.NAMES, "nvls_ctas", "notThere")
    with pytest.raises(Refused, match="nvls_ctas is none of NCCL"):
        c_config(NcclConfig(nvls_ctas=1))


def test_numbers_of_dtypes_are_those_of_the_header():
    from cudabind.sys import nccl
    from dispatch.ops.collective.nccl_messages import DTYPES

    names = {"f64": "Float64", "f32": "Float32", "f16": "Float16", "bf16": "Bfloat16", "f8e4m3": "Float8e4m3",
             "f8e5m2": "Float8e5m2", "i8": "Int8", "u8": "Uint8", "i32": "Int32", "u32": "Uint32", "i64": "Int64",
             "u64": "Uint64"}  # fmt: skip
    assert {str(dtype): number for dtype, number in DTYPES.items()} == {
        dtype: int(nccl.ncclDataType_t[f"nccl{name}"]) for dtype, name in names.items()
    }
    for name in ("SUM", "PROD", "MAX", "MIN", "AVG"):
        assert int(dp.RedOp[name]) == int(nccl.ncclRedOp_t[f"nccl{name.title()}"])
    assert F32 in DTYPES
    assert issubclass(NcclPlan, dp.Plan)
