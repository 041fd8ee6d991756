"""One process with a thread for each GPU: every collective, op and dtype against NumPy, sizes, graphs, torch beside it.

The tests over one GPU hold on any machine with one; those over two need two.
"""

from __future__ import annotations

import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from cudabind import driver
from dispatch.errors import Closed, CollectiveError, CollectiveTimeout, RankLost, Refused
from dispatch.libraries.nccl import memory
from dispatch.libraries.nccl.communicator import NcclCommunicator, unique_id
from dispatch.libraries.nccl.config import NcclConfig

MIB = 1 << 20
# Bytes for each rank: none, single elements, around what a warp and a 16-byte load take, and much.
SIZES = [0, 1, 8, 15, 16, 17, 512, 4095, 65536, 1_000_003, 64 * MIB + 4]


def full(world, value, n=1000):
    return world.device.array(np.full(n, value, np.float32))


def total(world, n=1000):
    return float(dp.all_reduce(full(world, world.rank + 1, n), comm=world).numpy()[-1])


@pytest.mark.usefixtures("nccl")
def test_every_collective_over_one_gpu(collective_cases):
    with dp.World.local(["cuda:0"], deadline=60) as world:
        assert world.run(collective_cases.failures) == [[]]


def test_every_collective_over_two_gpus(two, collective_cases):
    with dp.World.local(two, deadline=60) as world:
        assert world.run(collective_cases.failures) == [[], []]
        print(f"{collective_cases.COUNT[0]} results compared")


def test_sizes_over_two_gpus(two):
    def run(world):
        rng = np.random.default_rng(5)  # the same on both ranks
        wrong = []
        for nbytes in SIZES:
            xs = rng.integers(0, 100, (2, nbytes)).astype(np.uint8)
            x = world.device.array(xs[world.rank])
            for name, expected, call in (
                ("all_reduce", xs[0] + xs[1], lambda x=x: dp.all_reduce(x, comm=world)),
                ("in place", xs[0] + xs[1], lambda x=x: dp.all_reduce(c := x.copy(), comm=world, out=c)),
                ("broadcast", xs[1], lambda x=x: dp.broadcast(x, comm=world, root=1)),
                ("all_gather", xs, lambda x=x: dp.all_gather(x, comm=world)),
                ("sendrecv", xs[1 - world.rank], lambda x=x: _other(world, x)),
            ):
                if not np.array_equal(call().numpy(), expected):
                    wrong.append(f"{name} of {nbytes} bytes")
        return wrong

    with dp.World.local(two, deadline=60) as world:
        assert world.run(run) == [[], []]


def _other(world, x):
    return dp.sendrecv(x, comm=world, dest=1 - world.rank, source=1 - world.rank)


def test_one_thread_calls_for_both_gpus_in_a_group(two):
    with dp.World.local(two, deadline=60) as world:
        for _ in range(3):
            with dp.collective_group():  # the operands are kept until the calls have begun
                outs = [dp.all_reduce(full(each, each.rank + 1), comm=each) for each in world.worlds]
            assert [float(out.numpy()[7]) for out in outs] == [3.0, 3.0]


def test_repeated_and_bound_calls_on_streams(two):
    """More calls than a plan of another library needs to be learnt: those of NCCL are never recorded."""

    def run(world):
        comm, device = world.communicator, world.device
        x, out = full(world, world.rank + 1), device.empty((1000,))
        stream = device.stream()
        with stream:
            call = dp.prepare(dp.AllReduceRequest(x, comm=comm, out=out))
            for _ in range(100):
                call()
                dp.all_reduce(x, comm=comm, out=out)
            relocation = call._bound.plan.relocation
            assert relocation is None or not relocation.graphs
            product = dp.matmul(out.reshape(10, 100), out.reshape(10, 100).T)
        return float(product.numpy()[0, 0]), float(out.numpy()[0])

    with dp.World.local(two, deadline=60) as world:
        assert world.run(run) == [(900.0, 3.0)] * 2


def test_a_callers_graph_holds_collectives_and_is_launched_again(two):
    meet = threading.Barrier(2)

    def run(world):
        x, out = full(world, world.rank + 1), world.device.empty((1000,))
        dp.all_reduce(x, comm=world, out=out)  # connections are made
        world.device.synchronize()
        stream, graph = world.device.stream(), ctypes.c_void_p()
        handle = ctypes.c_void_p(stream.handle)
        meet.wait(60)
        with world.device.context:
            assert driver.cuStreamBeginCapture.unchecked(handle, 1) == 0  # of this thread alone
            with stream:
                dp.all_reduce(x, comm=world, out=out)
                dp.all_reduce(out, comm=world, out=out)
            assert driver.cuStreamEndCapture.unchecked(handle, ctypes.byref(graph)) == 0
            executable = driver.cuGraphInstantiate(graph.value, 0)
        found = []
        for value in (1.0, 5.0):
            x.copy_from(np.full(1000, value * (world.rank + 1), np.float32))
            world.device.synchronize()
            with world.device.context:
                driver.cuGraphLaunch(executable, stream.handle)
                world.communicator.watch(stream)
            stream.synchronize()
            found.append(float(out.numpy()[3]))
        meet.wait(60)
        return found

    with dp.World.local(two, deadline=60) as world:
        assert world.run(run) == [[6.0, 30.0]] * 2


def test_prepared_graphs_of_collectives(two, captured_cases):
    """Between NCCL's own calls, on several streams, and again in the world that is rebuilt."""

    def run(world):
        wrong, right = captured_cases.failures(world), captured_cases.many(world)
        kept = dp.prepare(dp.AllReduceRequest(full(world, 1.0), comm=world.communicator), graph=True)
        assert float(kept().numpy()[0]) == 2.0
        world.rebuild()  # the graphs of the communicator before are destroyed: its end waits for them
        with pytest.raises((Closed, CollectiveError)):
            kept()
        again = dp.prepare(dp.AllReduceRequest(full(world, 3.0), comm=world.communicator), graph=True)
        return wrong, right, float(again().numpy()[0])

    with dp.World.local(two, deadline=60) as world:
        assert world.run(run) == [([], [True] * 3, 6.0)] * 2


def test_a_graph_whose_partner_never_launches_is_a_timeout(two):
    deadline, done = 2.0, threading.Event()

    def run(world):
        call = dp.prepare(dp.AllReduceRequest(full(world, 1.0), comm=world.communicator), graph=True)
        assert float(call().numpy()[0]) == 2.0
        world.communicator.deadline = deadline
        if world.rank == 1:
            done.wait(60)
            return None
        begun, result = time.monotonic(), call()
        with pytest.raises(CollectiveTimeout, match="ncclAllReduce was not done on all ranks"):
            result.numpy()
        took = time.monotonic() - begun
        with pytest.raises(CollectiveTimeout):
            call()
        done.set()
        return took

    with dp.World.local(two, deadline=60) as world:
        took, _ = world.run(run)
    assert deadline <= took < deadline + 10


# -- what fails -------------------------------------------------------------------------------------------------------
def test_a_rank_that_never_comes_is_a_timeout_and_the_world_goes_on(two):
    """The call returns at once: it is who reads that is told, once the monitor has ended the kernel.

    The deadline is short for that call alone: NCCL takes seconds to begin, to connect at the first sum, and to begin
    again in the rebuild. What each rank did and when is printed; pytest shows it where the test fails.
    """
    late, done = 2.0, threading.Event()
    story = Story()

    def run(world):
        kept = full(world, 7.0)
        assert total(world) == 3.0
        story.add(world, "first sum")
        old = world.communicator
        old.deadline = late
        if world.rank:
            done.wait(60)
        begun = time.monotonic()
        try:
            found = total(world)
        except CollectiveError as error:
            took, told = time.monotonic() - begun, error
        else:
            pytest.fail(f"a sum of rank {world.rank} gave {found}\n{story}")
        story.add(world, f"{type(told).__name__} after {took:.2f} s: {told}")
        done.set()
        assert isinstance(told, CollectiveTimeout), story
        if world.rank:  # which would find what rank 0 had sent, and wait for its own deadline the next time
            assert took < 1, story
            assert "has aborted" in str(told), story
        else:
            assert late * 0.9 < took < late + 3, story
        world.rebuild(grace=30)
        story.add(world, f"rebuilt, pending {len(old.pending)}, aborted {old.is_aborted}")
        assert float(kept.numpy()[0]) == 7.0, story
        found = total(world), world.size, world.generation
        story.add(world, f"after: {found}")
        return found

    with dp.World.local(two, deadline=60) as world:
        story.add(world.worlds[0], "world made")
        assert world.run(run) == [(3.0, 2, 1)] * 2, story


class Story:
    """What ranks did, and when."""

    def __init__(self):
        self.begun, self.lines = time.monotonic(), []

    def add(self, world, what):
        self.lines.append(f"{time.monotonic() - self.begun:7.2f} s  rank {world.rank}: {what}")
        print(self.lines[-1], flush=True)

    def __str__(self):
        return "\n".join(["", *self.lines])

    __repr__ = __str__


def test_a_rank_that_never_comes_to_the_beginning_is_a_timeout_and_nccl_begins_again(two):
    """NCCL waits within ncclCommInitRankConfig: who waits is given up, its beginning aborted, another made."""
    story, late = Story(), 4.0
    device = dp.device(two[0])
    alone = SimpleNamespace(rank=0)
    before = threading.active_count()
    begun = time.monotonic()
    with pytest.raises(CollectiveTimeout, match="ncclCommInitRankConfig") as told:
        NcclCommunicator.create(device, 0, 2, unique_id(), deadline=late)
    story.add(alone, f"after {time.monotonic() - begun:.2f} s: {told.value}")
    assert time.monotonic() - begun < late + 2, story
    assert float((device.array(np.ones(3, np.float32)).numpy()).sum()) == 3.0, "the device is as it was"
    with dp.World.local(two, deadline=60) as world:
        assert world.run(total) == [3.0, 3.0], story
        story.add(alone, "a world made and used after that")
    until = time.monotonic() + 30
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.1)  # the call that was given up has come back from NCCL, by the abort
    story.add(alone, f"threads: {[each.name for each in threading.enumerate()]}")
    assert all(each.name != "ncclCommInitRankConfig" for each in threading.enumerate()), story


def test_a_communicator_grows_by_a_rank_that_joins(two, nccl):
    """One GPU's communicator becomes that of two; before NCCL 2.29 it is refused."""
    devices = [dp.device(name) for name in two]
    with NcclCommunicator.create(devices[0], 0, 1, unique_id(), deadline=60) as small:
        if nccl < (2, 29, 0):
            with pytest.raises(Refused, match=r"ncclCommGrow came with NCCL 2.29"):
                small.grow(2)
            return
        identity = small.growing_id()
        with ThreadPoolExecutor(2) as pool:
            joining = pool.submit(NcclCommunicator.join, devices[1], 1, 2, identity, deadline=60)
            larger = pool.submit(small.grow, 2, identity).result(), joining.result()
            assert [(each.rank, each.size) for each in larger] == [(0, 2), (1, 2)]

            def summed(each):
                return float(dp.all_reduce(each.device.array(np.full(5, each.rank + 1.0)), comm=each).numpy()[0])

            assert list(pool.map(summed, larger)) == [3.0, 3.0]
            list(pool.map(lambda each: each.close(), larger))
        assert float(dp.all_reduce(devices[0].array(np.ones(2)), comm=small).numpy()[0]) == 1.0


@pytest.mark.parametrize("field", [{"blocking": False}, {"max_ctas": 4, "min_ctas": 1}, {"cta_policy": 1}])
def test_a_configuration_by_fields(two, nccl, field):
    if "cta_policy" in field and nccl < (2, 27, 0):
        pytest.skip(f"cta_policy came with NCCL 2.27, {nccl} is installed")
    with dp.World.local(two, deadline=60, config=NcclConfig(**field)) as world:
        assert world.run(total) == [3.0, 3.0]
        world.rebuild()
        assert world.run(total) == [3.0, 3.0]


@pytest.mark.parametrize("turn", range(3))
def test_a_rank_that_raises_is_lost_at_once_in_the_middle_of_a_collective(two, turn):
    def run(world):
        assert total(world) == 3.0
        if world.rank == turn % 2:
            raise ValueError("a fault of its own")
        with pytest.raises(RankLost):
            total(world, 1 << 20)
        world.rebuild(grace=5)
        return total(world)

    with dp.World.local(two, deadline=30) as world:
        before = [device.bytes_in_use() for device in (dp.device(name) for name in two)]
        with pytest.raises(ValueError, match="of its own"):
            world.run(run)
        world.rebuild()
        assert world.run(total) == [3.0, 3.0]
        assert all(b is None or a <= b + MIB for a, b in zip(_in_use(two), before, strict=True))


def _in_use(names):
    return [dp.device(name).bytes_in_use() for name in names]


def test_abort_ends_a_kernel_that_waits(two):
    both = threading.Barrier(2)

    def run(world):
        total(world)  # connections are made
        both.wait(30)  # both have read that sum, which an abort takes back
        if world.rank:
            until = time.monotonic() + 20  # it is told, and waits for no deadline
            while world.communicator.error is None and time.monotonic() < until:
                time.sleep(1e-3)
            with pytest.raises(CollectiveError, match=r"aborted: .*enough"):
                world.check()
            return None
        dp.all_reduce(full(world, 1.0), comm=world)
        world.abort("enough")
        with pytest.raises(CollectiveError, match="enough"):
            full(world, 1.0).numpy()  # what follows from it on this GPU is not to be trusted
        begun = time.monotonic()
        world.device.synchronize()
        return time.monotonic() - begun

    with dp.World.local(two, deadline=60) as world:
        assert world.run(run)[0] < 10


@pytest.mark.parametrize("kind", ["registered", "window"])
def test_registered_memory(two, nccl, kind):
    if kind == "window" and nccl < (2, 28, 0):
        pytest.skip(f"windows came with NCCL 2.28, {nccl} is installed")

    def run(world):
        comm = world.communicator
        x, out = (memory.empty(world.device, (1 << 20,), "f32") for _ in range(2))
        x.copy_from(np.full(1 << 20, world.rank + 1.0))
        make = memory.register if kind == "registered" else memory.window
        with make(comm, x), make(comm, out):
            dp.all_reduce(x, comm=comm, out=out)
            return float(out.numpy()[-1])

    with dp.World.local(two, deadline=60) as world:
        assert world.run(run) == [3.0, 3.0]


def test_splits_and_shrinks(two):
    def run(world):
        comm = world.communicator
        alone, both = comm.split(world.rank), comm.split(0, key=-world.rank)
        found = (alone.size, both.rank, float(dp.all_reduce(full(world, 1.0), comm=both).numpy()[0]))
        small = None if world.rank else comm.shrink([1])
        size = None if small is None else (small.size, float(dp.all_reduce(full(world, 5.0), comm=small).numpy()[0]))
        for each in filter(None, (alone, both, small)):
            each.close()
        return found, size

    with dp.World.local(two, deadline=60) as world:
        assert world.run(run) == [((1, 1, 2.0), (1, 5.0)), ((1, 0, 2.0), None)]


def test_torch_tensors_go_in_and_come_out(two, torch):
    def run(world):
        x = torch.full((1000,), world.rank + 1.0, device=f"cuda:{world.rank}")
        out = dp.all_reduce(x, comm=world)
        assert isinstance(out, torch.Tensor)
        return float((out + 1)[0])

    with dp.World.local(two, deadline=60) as world:
        assert world.run(run) == [4.0, 4.0]
