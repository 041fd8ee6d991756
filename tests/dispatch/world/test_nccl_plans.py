"""Plans and communicators of NCCL over a stand-in for it: arguments, groups, configurations, and memory of its own."""

import gc
import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, Closed, Refused
from dispatch.keys import F32, HOST, Arch
from dispatch.libraries.nccl import memory
from dispatch.libraries.nccl.communicator import NcclCommunicator, unique_id
from dispatch.libraries.nccl.config import NcclConfig, c_config
from dispatch.ops import FAMILIES
from dispatch.ops.collective import cases as case_module
from dispatch.ops.collective.nccl import NcclPlan
from dispatch.table.select import select

spec = importlib.util.spec_from_file_location("nccl_ranks", Path(__file__).with_name("nccl_ranks.py"))
nccl_ranks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(nccl_ranks)
loaded, library, executor, ranks = nccl_ranks.loaded, nccl_ranks.library, nccl_ranks.executor, nccl_ranks.ranks
runner, on_threads, waited = nccl_ranks.runner, nccl_ranks.on_threads, nccl_ranks.waited

collective_cases = loaded(Path(__file__).with_name("collective_cases.py"))
ROWS = [row for row in dp.TABLE if row.op in FAMILIES["collective"][1] and row.min_arch != HOST]
QUICK = ("f32", "bf16", "u8")


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS if str(row.dtypes[0]) in QUICK])
def test_a_plan_of_one_rank_is_right(row, library, executor, monkeypatch, each):
    (comm,) = ranks(library, 1)
    monkeypatch.setattr(case_module, "solo", lambda _: comm)

    def check_communicator(case, rng):
        check = case.check(dp.device("host"), rng)
        if row.variant == "even" and getattr(check.request, "send_counts", None):
            return
        plan = row.call(check.request, executor, row)
        assert not plan.capture_safe
        assert plan.is_bare
        outputs = check.request.device.executor().outputs(check.request)
        plan.enqueue(check.request.arguments(outputs))
        check.verify(check.request.result(outputs))

    each(case_module.cases(row), check_communicator)


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
