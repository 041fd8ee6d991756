"""The building blocks of parallel programs in worlds of threads and of MPI's processes, against one device."""

import contextlib
import importlib.util
import itertools
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from dispatch import parallel
from dispatch.errors import BadRequest, BadType, CollectiveError, Refused
from dispatch.parallel import chunks as chunking
from dispatch.parallel.pipeline import Stage

HERE = Path(__file__).parent


def module(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


parallel_cases = module("parallel_cases", HERE / "parallel_cases.py")
mpi = module("mpi_worlds", HERE.parent / "world" / "test_mpi.py")


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_block_between_threads_gives_what_one_device_gives(count, dtype, rng):
    seed = int(rng.integers(1 << 30))
    with dp.World.local(["host"] * count, deadline=60) as world:
        assert world.run(parallel_cases.failures, dtype, seed) == [[]] * count


@mpi.pytestmark
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_every_block_between_processes(count):
    told, done = mpi.ranks(count, "blocks")
    assert (len(told), done.returncode) == (count, 0), done.stderr
    assert [each["failed"] for each in told] == [[]] * count


def unweighted(a, s, b, t, out_dtype):
    return dp.attention_merge(a, s, b, s, out_dtype=out_dtype)[0], t


def by_the_first(x, w, ends, out):
    return dp.grouped_matmul(x, w, np.full_like(ends, ends[-1]), out=out)


def test_the_cases_see_what_is_wrong(monkeypatch):
    """A block that leaves a rank's part out, or merges without weights, does not pass."""
    from dispatch.parallel import experts, ring, shards

    monkeypatch.setattr(shards, "all_reduce", lambda x, *, comm, out: out.copy_from(x.numpy() * comm.size))
    monkeypatch.setattr(ring, "attention_merge", unweighted)
    monkeypatch.setattr(experts, "grouped_matmul", by_the_first)
    with dp.World.local(["host"] * 2, deadline=60) as world:
        failed = [line for lines in world.run(parallel_cases.failures, "f16") for line in lines]
    for name in ("matmul_all_reduce", "attention", "experts: 3"):
        assert any(name in line for line in failed), failed


# -- chunks -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("rows", "count"), [(10, 3), (3, 8), (1, 1), (0, 4), (16, 4)])
def test_chunks_cover_all_rows_once(rows, count):
    pieces = chunking.cut(rows, count)
    assert [row for piece in pieces for row in range(rows)[piece]] == list(range(rows))
    sizes = {piece.stop - piece.start for piece in pieces}
    assert max(sizes) - min(sizes) <= 1
    assert len(pieces) == max(1, min(count, rows))


def test_ranks_agree_on_the_number_that_the_slowest_is_quickest_with(monkeypatch):
    """Each rank alone would take another one: 2 and 1, of which none is best where the ranks wait for one another."""
    seconds, now = {0: {1: 9.0, 2: 1.0, 4: 5.0}, 1: {1: 3.0, 2: 8.0, 4: 6.0}}, threading.local()
    monkeypatch.setattr(chunking, "time", SimpleNamespace(perf_counter=lambda: getattr(now, "at", 0.0)))

    def run(world):
        def took(count):
            now.at = getattr(now, "at", 0.0) + seconds[world.rank][count]

        here = SimpleNamespace(synchronize=lambda: None)
        beside = SimpleNamespace(comm=world.communicator, device=world.device, main=here)
        return chunking._fastest([partial(took, count) for count in (1, 2, 4)], beside)

    with dp.World.local(["host"] * 2, deadline=60) as world:
        assert world.run(run) == [2, 2]  # the third of the candidates, 4 chunks


def test_small_products_are_measured_as_calls_in_a_row(monkeypatch):
    """One call is soonest done with 4 chunks, in 135 us and not 140; of a row, each takes 122 us with one chunk."""
    now = threading.local()
    monkeypatch.setattr(chunking, "time", SimpleNamespace(perf_counter=lambda: now.at))
    times = {1: (20e-6, 120e-6), 4: (130e-6, 5e-6)}  # of the host, and of the GPU behind it

    def run(world):
        now.at, now.done, calls = 0.0, 0.0, Counter()

        def took(count):
            calls[count] += 1
            of_host, of_gpu = times[count]
            if calls[count] == 1:
                of_host = 0.1  # its plans are made
            now.at += of_host
            now.done = max(now.done, now.at) + of_gpu * world.rank

        def synchronize():
            now.at = max(now.at, now.done)

        side = SimpleNamespace(
            comm=world.communicator, device=world.device, main=SimpleNamespace(synchronize=synchronize)
        )
        return chunking._fastest([partial(took, count) for count in (1, 4)], side), calls

    with dp.World.local(["host"] * 2, deadline=60) as world:
        (first, calls), (second, others) = world.run(run)
    assert first == second == 0  # one chunk
    assert calls == others, "each call is a collective"
    assert max(calls.values()) == 2 + chunking.TURNS * chunking.MAX_CALLS


def test_ranks_whose_shards_differ_in_size_measure_at_once(monkeypatch):
    """One that had measured before, and another that had not, would wait for one another for ever."""
    from dispatch.parallel import shards

    keys = {}
    monkeypatch.setattr(
        shards,
        "run_in_chunks",
        lambda variants, _given, _rows, key, side: keys[side.comm.rank].append(key) or variants[0](2),
    )

    def run(world):
        rank, device, comm = world.rank, world.device, world.communicator
        keys[rank] = []
        rng = np.random.default_rng(0)
        a, b = rng.standard_normal((8, 6)), rng.standard_normal((6, 10))
        inner, outer = (slice(0, 2), slice(2, 6))[rank], (slice(0, 7), slice(7, 10))[rank]
        x, w = device.array(np.ascontiguousarray(a[:, inner])), device.array(b[inner])
        found = parallel.matmul_all_reduce(x, w, comm=comm)
        mine = device.array(a[4 * rank : 4 * rank + 4])
        columns = parallel.all_gather_matmul(mine, device.array(np.ascontiguousarray(b[:, outer])), comm=comm)
        np.testing.assert_allclose(found.numpy(), a @ b, rtol=1e-12)
        np.testing.assert_allclose(columns.numpy(), (a @ b)[:, outer], rtol=1e-12)

    with dp.World.local(["host"] * 2, deadline=60) as world:
        world.run(run)
    assert keys[0] == keys[1]
    assert len(set(keys[0])) == 2


# -- the schedule -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("stages", "count"), [*itertools.product((1, 2, 3, 5, 8), (1, 2, 3, 7, 16))])
def test_no_stage_waits_for_ever_where_groups_of_two_ranks_are_to_match(stages, count, monkeypatch):
    """As NCCL has it: a group begins with the one of the other rank that is its counterpart, and with no other."""
    queues = [groups_of(stage, stages, count, monkeypatch) for stage in range(stages)]
    at = [0] * stages
    while any(place < len(queue) for place, queue in zip(at, queues, strict=True)):
        moved = False
        for stage, queue in enumerate(queues):
            if at[stage] == len(queue):
                continue
            (peer,) = {peer for _, peer in queue[at[stage]]}  # of one link alone
            wanted = sorted(("recv" if kind == "send" else "send", stage) for kind, _ in queue[at[stage]])
            if queues[peer][at[peer] : at[peer] + 1] == [wanted]:
                at[stage] += 1
                at[peer] += 1
                moved = True
        assert moved, f"stages wait for one another in {[q[a : a + 1] for q, a in zip(queues, at, strict=True)]}"
    sent = [message for queue in queues for group in queue for message in group if message[0] == "send"]
    assert len(sent) == 2 * count * (stages - 1)


def groups_of(stage, stages, count, monkeypatch):
    """The messages of each of a stage's groups, in order; one that goes alone is a group."""
    import dispatch.parallel.pipeline as pipeline

    found, opened = [], []

    def said(kind):
        def call(*_, peer, **__):
            opened[-1].append((kind, peer)) if opened else found.append([(kind, peer)])

        return call

    @contextlib.contextmanager
    def group():
        opened.append([])
        yield
        found.append(sorted(opened.pop()))

    for name, fake in (("send", said("send")), ("recv", said("recv")), ("collective_group", group)):
        monkeypatch.setattr(pipeline, name, fake)
    monkeypatch.setattr(pipeline, "check_operand", lambda *_: SimpleNamespace(shape=(), dtype=None))
    beside = SimpleNamespace(
        comm=SimpleNamespace(rank=stage, size=stages), stream=contextlib.nullcontext(), join=lambda: None,
        device=SimpleNamespace(empty=lambda *_: None), wait_for_reads=lambda *_: None,
    )  # fmt: skip
    Stage(lambda *_: None, lambda *_: None, count, beside, SimpleNamespace(shape=(), dtype=None)).run()
    return found


def test_a_schedule_keeps_as_many_activations_as_there_are_stages_behind():
    for stage, count in itertools.product(range(4), (1, 3, 9)):
        alive = most = 0
        steps = parallel.schedule(stage, 4, count)
        for step in steps:
            alive += 1 if step.forward else -1
            most = max(most, alive)
        assert most == min(4 - stage, count)
        assert [s.micro_batch for s in steps if s.forward] == [s.micro_batch for s in steps if not s.forward]


# -- refusals ---------------------------------------------------------------------------------------------------------
def test_refusals_say_what_is_expected():
    def run(world):
        x, comm = world.device.zeros((4, 6)), world.communicator
        for call, error, text in (
            (lambda: parallel.matmul_all_reduce(x, x, comm=comm), BadRequest, "6 rows, the number of columns of a"),
            (lambda: parallel.matmul_all_reduce(x, x.T, comm=comm, chunks=0), BadRequest, "chunks"),
            (lambda: parallel.matmul_all_reduce(x, x.T, comm=comm, by="mpi"), BadRequest, r"by: got .mpi.; expected"),
            (
                lambda: parallel.all_gather_matmul(x, x.T, comm=comm, by="copies"),
                Refused,
                "for GPUs of one machine",
            ),
            (lambda: parallel.matmul_all_reduce(x.numpy(), x, comm=comm), BadType, "from_dlpack"),
            (
                lambda: parallel.matmul_reduce_scatter(x[:3], x.T, comm=comm),
                BadRequest,
                "a multiple of 2, the number of ranks",
            ),
            (lambda: parallel.ring_attention(x, x, x, comm=comm), BadRequest, "4 axes"),
            (lambda: parallel.ExpertExchange([1, 2, 3], comm=comm), BadRequest, "2 times the number on a rank"),
            (lambda: parallel.ExpertExchange([1, -2], comm=comm), BadRequest, "counts"),
            (lambda: parallel.GradientBuckets([], comm=comm), BadRequest, "the shape of each gradient"),
            (lambda: parallel.GradientBuckets(4, comm=comm), BadRequest, "shapes: got 4; expected a list of shapes"),
            (lambda: parallel.GradientBuckets([(2, -1)], comm=comm), BadRequest, "shapes: got .*integers of 0 or more"),
            (
                lambda: parallel.GradientBuckets([2], comm=comm, reduce="mean"),
                BadRequest,
                "reduce: got 'mean'; expected",
            ),
            (
                lambda: parallel.all_gather_matmul(x, x.T, comm=comm, epilogue="GELU_AUX"),
                BadRequest,
                "epilogue: got GELU_AUX; expected one with a single output",
            ),
            (
                lambda: parallel.ring_attention(*[world.device.zeros((1, 1, 2, 8), "f16")] * 3, comm=comm, causal="no"),
                BadRequest,
                "causal: got 'no'; expected a bool",
            ),
            (lambda: parallel.schedule(2, 2, 1), BadRequest, "stage: got 2; expected a whole number from 0 to 1"),
            (lambda: parallel.schedule(0, 0, 1), BadRequest, "stages: got 0"),
            (lambda: parallel.schedule(0, 1, -1), BadRequest, "count: got -1"),
        ):
            with pytest.raises(error, match=text):
                call()
        if world.rank:
            with pytest.raises(BadRequest, match="not the first"):
                parallel.one_forward_one_backward(print, print, 1, comm=comm)
        made = parallel.GradientBuckets([2, (3,)], comm=comm, bucket_bytes=1)
        with pytest.raises(BadRequest, match=r"\[0, 1\] not ready"):
            made.wait()
        made.ready(1)
        with pytest.raises(BadRequest, match="once per step"):
            made.ready(1)
        made.ready(0)
        made.wait()
        return True

    with dp.World.local(["host"] * 2, deadline=60) as world:
        assert world.run(run) == [True, True]


@pytest.mark.parametrize("shapes", [[[(2,)], [(3,)]], [[(2,), (3,)], [(3,), (2,)]], [[(2, 3)], [(3, 2)]]])
def test_ranks_with_other_gradients_in_buckets_of_the_same_size_are_told(shapes):
    def run(world):
        made = parallel.GradientBuckets(shapes[world.rank], comm=world)
        for place in range(len(made.gradients)):
            made.ready(place)
        with pytest.raises(CollectiveError, match=r"ranks disagree: this rank has gradients of the shapes \[\("):
            made.wait()

    with dp.World.local(["host"] * 2, deadline=60) as world:
        world.run(run)


def test_one_thread_averages_the_gradients_of_all_ranks_in_a_group():
    with dp.World.local(["host"] * 2, deadline=60) as world:
        made = [parallel.GradientBuckets([(2,)], comm=each) for each in world.worlds]
        for _ in range(2):
            for rank, each in enumerate(made):
                each.gradients[0].copy_from(np.full(2, rank + 1, np.float32))
            with dp.collective_group():
                for each in made:
                    each.ready(0)
            assert [each.wait()[0].tolist() for each in made] == [[1.5, 1.5]] * 2


def test_rows_come_back_in_their_order_whatever_they_are():
    """Rows of more axes, and of whole numbers, through experts that do nothing."""

    def run(world):
        rng = np.random.default_rng(world.rank)
        counts = rng.integers(0, 5, 6)
        x = rng.integers(-9, 9, (int(counts.sum()), 2, 3)).astype(np.int32)
        exchange = parallel.ExpertExchange(counts, comm=world)
        there = exchange.to_experts(world.device.array(x))
        assert there.shape == (exchange.rows, 2, 3) == (int(exchange.ends[-1]), 2, 3)
        return bool((exchange.from_experts(there).numpy() == x).all())

    with dp.World.local(["host"] * 3, deadline=60) as world:
        assert world.run(run) == [True] * 3


def test_gradients_of_torch_lie_in_buckets_and_go_round_as_autograd_writes_them():
    torch = pytest.importorskip("torch")

    def made():
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))

    x, y = torch.randn(12, 8, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 10

    def train(network, rows, averaged=lambda: None):
        for _ in range(5):
            for each in network.parameters():
                if each.grad is not None:
                    each.grad.zero_()
            torch.nn.functional.cross_entropy(network(x[rows]), y[rows]).backward()
            averaged()
            with torch.no_grad():
                for each in network.parameters():
                    each.sub_(0.1 * each.grad)
        return [each.detach().numpy().copy() for each in network.parameters()]

    networks = [made(), made()]  # here: torch's seed is that of all threads

    def run(world):
        network = networks[world.rank]
        parameters = list(network.parameters())
        shapes = [tuple(each.shape) for each in parameters]
        own = parallel.GradientBuckets(shapes, comm=world.communicator, bucket_bytes=1000)
        for place, (each, gradient) in enumerate(zip(parameters, own.gradients, strict=True)):
            each.grad = torch.from_dlpack(gradient)
            each.register_post_accumulate_grad_hook(lambda _, place=place: own.ready(place))
        return train(network, slice(6 * world.rank, 6 * world.rank + 6), own.wait)

    with dp.World.local(["host"] * 2, deadline=60) as world:
        one, other = world.run(run)
    for a, b, alone in zip(one, other, train(made(), slice(None)), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, alone, atol=1e-6)


def test_a_lost_rank_ends_a_block_and_the_next_world_goes_on():
    found = []

    def run(world):
        x, w = world.device.array(np.full((4, 2), 1.0)), world.device.array(np.full((2, 3), 1.0 + world.rank))
        parallel.matmul_all_reduce(x, w, comm=world)
        if world.rank == 1:
            raise ValueError("a fault of its own")
        with pytest.raises(dp.errors.RankLost):
            parallel.matmul_all_reduce(x, w, comm=world)
        world.rebuild(grace=5)
        found.append(parallel.matmul_all_reduce(x, w, comm=world, chunks=2).numpy())

    with dp.World.local(["host"] * 3, deadline=30) as world, pytest.raises(ValueError, match="of its own"):
        world.run(run)
    assert [each.tolist() for each in found] == [[[8.0] * 3] * 4] * 2  # 2 · 1 of rank 0, 2 · 3 of rank 2
