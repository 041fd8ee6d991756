"""Worlds of threads on the host: every collective, ranks that fail, hang and disagree, and the worlds that go on."""

import copy
import importlib.util
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, Closed, CollectiveError, CollectiveTimeout, RankLost

spec = importlib.util.spec_from_file_location("collective_cases", Path(__file__).with_name("collective_cases.py"))
collective_cases = importlib.util.module_from_spec(spec)
spec.loader.exec_module(collective_cases)

SHORT = 0.3  # seconds


def full(world, value, n=5):
    return world.device.array(np.full(n, value, np.float32))


def total(world):
    """The first element of the sum of 1, 2, … of the ranks."""
    return float(dp.all_reduce(full(world, world.rank + 1), comm=world).numpy()[0])


@pytest.mark.parametrize("count", [1, 2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_every_collective_gives_what_the_reference_gives(count):
    with dp.World.local(["host"] * count, deadline=60) as world:
        assert world.run(collective_cases.failures) == [[]] * count


def test_the_reference_is_numpys(rng):
    """The collectives and their tests share a reference, so that is held against NumPy by itself."""
    xs = rng.standard_normal((3, 3, 4))
    whole = rng.integers(-100, 100, (3, 5)).astype(np.int8)

    def run(world):
        x, w = world.device.array(xs[world.rank]), world.device.array(whole[world.rank])
        made = {how: dp.all_reduce(x, comm=world, reduce=how).numpy() for how in ("sum", "prod", "max", "min", "avg")}
        made["premul"] = dp.all_reduce(x, comm=world, reduce="premul_sum", factor=world.rank + 0.5).numpy()
        made["wrapped"] = dp.all_reduce(w, comm=world).numpy()
        made["cut"] = dp.all_reduce(w, comm=world, reduce="avg").numpy()
        made["mean of u8"] = dp.all_reduce(world.device.array([200], "u8"), comm=world, reduce="avg").tolist()
        made["part"] = dp.reduce_scatter(x, comm=world).numpy()
        made["turned"] = dp.all_to_all(x, comm=world).numpy()
        made["stacked"] = dp.all_gather(x, comm=world).numpy()
        return made

    with dp.World.local(["host"] * 3) as world:
        found = world.run(run)
    wrapped = whole.astype(np.int64).sum(0).astype(np.int8)
    for rank, each in enumerate(found):
        np.testing.assert_allclose(each["sum"], xs.sum(0), rtol=1e-14, atol=1e-14)
        np.testing.assert_allclose(each["prod"], xs.prod(0), rtol=1e-14)
        np.testing.assert_array_equal(each["max"], xs.max(0))
        np.testing.assert_array_equal(each["min"], xs.min(0))
        np.testing.assert_allclose(each["avg"], xs.mean(0), rtol=1e-14, atol=1e-15)
        np.testing.assert_allclose(each["premul"], np.tensordot([0.5, 1.5, 2.5], xs, 1), rtol=1e-13, atol=1e-14)
        np.testing.assert_array_equal(each["wrapped"], wrapped)
        np.testing.assert_array_equal(each["cut"], np.trunc(wrapped / 3))
        assert each["mean of u8"] == [29], "(3 · 200 - 2 · 256) / 3, as docs/collectives.md has it"
        np.testing.assert_allclose(each["part"], xs.sum(0)[rank], rtol=1e-14, atol=1e-14)
        np.testing.assert_array_equal(each["turned"], xs[:, rank])
        np.testing.assert_array_equal(each["stacked"], xs)


# -- lost ranks -------------------------------------------------------------------------------------------------------
def test_a_rank_that_raises_is_lost_to_the_others_which_go_on():
    seen = {}

    def run(world):
        assert total(world) == 6
        if world.rank == 1:
            raise ValueError("a fault of its own")
        with pytest.raises(RankLost, match="rank 1 of 3") as caught:
            total(world)
        old = world.communicator
        assert caught.value.ranks == (1,)
        assert world.rebuild() is world
        with pytest.raises(RankLost):
            dp.barrier(comm=old)
        seen[world.members[world.rank]] = (world.rank, world.size, world.generation, total(world))

    with dp.World.local(["host"] * 3, deadline=30) as world:
        with pytest.raises(ValueError, match="a fault of its own"):
            world.run(run)
        assert seen == {0: (0, 2, 1, 3.0), 2: (1, 2, 1, 3.0)}
        world.rebuild()  # the thread of rank 1 is as good as before
        assert world.run(total) == [6.0] * 3
        assert {each.generation for each in world.worlds} == {2}


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_that_all_failed_rebuild_one_world(count):
    def run(world):
        if world.rank == 1:
            raise ValueError("a fault of its own")
        return total(world)

    def again(world):
        world.rebuild()
        return world.rank, world.members, world.generation, total(world)

    with dp.World.local(["host"] * count, deadline=20) as world:
        for generation in (1, 2):
            with pytest.raises(ValueError, match="a fault of its own"):
                world.run(run)
            members, whole = tuple(range(count)), count * (count + 1) / 2
            assert world.run(again) == [(rank, members, generation, whole) for rank in members]


def test_a_rank_that_the_others_went_on_without_never_makes_a_world_of_its_own():
    def run(world):
        if world.rank == 1:
            raise ValueError("a fault of its own")
        with pytest.raises(RankLost):
            total(world)
        world.rebuild()

    def again(world):
        if world.members != (0, 1, 2):
            return total(world)
        for _ in range(2):
            with pytest.raises(dp.errors.RankLeftOut, match="generation 1 of"):
                world.rebuild(grace=SHORT)
        return None

    with dp.World.local(["host"] * 3, deadline=20) as world:
        with pytest.raises(ValueError, match="a fault of its own"):
            world.run(run)
        assert world.run(again) == [3.0, None, 3.0]


def test_a_world_is_not_asked_from_within_a_rank_s_function():
    """Its thread would wait for itself, for ever."""
    with dp.World.local(["host"] * 2, deadline=5) as world:
        for call in (lambda: world.run(lambda _: 1), world.rebuild):
            with pytest.raises(BadRequest, match="inside a rank's function"):
                world.run(lambda mine, call=call: call() if mine.rank == 0 else 1)
            world.rebuild()
        assert world.run(lambda mine: mine.rank) == [0, 1]


def test_a_rank_that_hangs_is_a_timeout_that_names_it():
    awake, left_out = threading.Event(), []

    def run(world):
        if world.rank == 2:
            awake.wait(20)
            with pytest.raises(CollectiveError):
                total(world)
            with pytest.raises(dp.errors.RankLeftOut, match="was not heard by its deadline"):
                world.rebuild(grace=SHORT)
            left_out.append(world.rank)
            return None
        begun = time.monotonic()
        with pytest.raises(CollectiveError) as caught:
            total(world)
        took = time.monotonic() - begun
        world.rebuild(grace=SHORT)
        found = total(world)
        awake.set()
        return took, caught.value, found

    with dp.World.local(["host"] * 3, deadline=SHORT) as world:
        first, second, _ = world.run(run)
    for took, error, found in (first, second):
        assert SHORT * 0.9 < took < SHORT + 5
        assert isinstance(error, CollectiveTimeout)
        assert "rank 2 has not called it" in str(error)
        assert found == 3.0
    assert left_out == [2]


def test_ranks_that_make_different_calls_all_learn_so():
    def run(world):
        x = full(world, 1.0)
        with pytest.raises(CollectiveError, match="ranks disagree"):
            dp.broadcast(x, comm=world) if world.rank else dp.all_reduce(x, comm=world)

    with dp.World.local(["host"] * 2, deadline=5) as world:
        world.run(run)


@pytest.mark.parametrize("other", [{"reduce": "max"}, {"n": 6}, {"dtype": np.float64}])
def test_ranks_that_disagree_on_a_choice_learn_so(other):
    def run(world):
        given = other if world.rank else {}
        x = world.device.array(np.ones(given.get("n", 5), given.get("dtype", np.float32)))
        with pytest.raises(CollectiveError, match="ranks disagree"):
            dp.all_reduce(x, comm=world, reduce=given.get("reduce", "sum"))

    with dp.World.local(["host"] * 2, deadline=5) as world:
        world.run(run)


@pytest.mark.parametrize("call", [dp.all_gather, dp.gather, dp.all_to_all])
def test_ranks_whose_parts_are_of_other_shapes_learn_so(call):
    def run(world):
        x = world.device.zeros((2, 3 + world.rank))
        with pytest.raises(CollectiveError, match=r"ranks disagree: .* \[2, 3\].* \[2, 4\]|.* \[2, 4\].* \[2, 3\]"):
            call(x, comm=world)

    with dp.World.local(["host"] * 2, deadline=5) as world:
        world.run(run)


@pytest.mark.parametrize(
    "call",
    [
        lambda world: dp.broadcast(full(world, 1), comm=world, root=world.rank),
        lambda world: dp.all_reduce(full(world, 1), comm=world, reduce="sum" if world.rank else "max"),
        lambda world: (dp.all_gather if world.rank else dp.all_reduce)(full(world, 1), comm=world),
    ],
)
def test_run_raises_the_disagreement_and_not_what_follows_from_it(call):
    with dp.World.local(["host"] * 2, deadline=20) as world:
        for _ in range(20):
            with pytest.raises(CollectiveError, match="ranks disagree"):
                world.run(call)
            world.rebuild()


def test_the_rank_that_did_not_call_is_named_and_not_one_that_waited_for_it():
    with dp.World.local(["host"] * 3, deadline=0.05) as world:
        for _ in range(10):
            with pytest.raises(CollectiveTimeout, match="rank 1 has not called it"):
                world.run(lambda world: None if world.rank == 1 else total(world))
            world.rebuild()


def test_errors_of_other_ranks_stand_in_the_notes():
    def run(world):
        if world.rank == 1:
            raise KeyError("the first")
        try:
            total(world)
        except RankLost:
            raise RankLost("what follows") from None

    with dp.World.local(["host"] * 2, deadline=20) as world, pytest.raises(KeyError, match="the first") as caught:
        world.run(run)
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["on another rank: RankLost: what follows"]


def test_abort_ends_a_call_that_waits():
    def run(world):
        if world.rank:
            time.sleep(0.05)
            world.abort("enough")
            return None
        with pytest.raises(CollectiveError, match="enough"):
            total(world)
        return True

    with dp.World.local(["host"] * 2, deadline=30) as world:
        assert world.run(run)[0]


# -- requests ---------------------------------------------------------------------------------------------------------
def test_one_thread_makes_the_calls_of_all_ranks_in_a_group():
    with dp.World.local(["host"] * 3, deadline=5) as world:
        for _ in range(2):
            with dp.collective_group():
                found = [dp.all_reduce(full(each, each.rank + 1), comm=each) for each in world.worlds]
            assert [float(each.numpy()[0]) for each in found] == [6.0] * 3


def test_a_group_that_raises_leaves_no_call_behind():
    with dp.World.local(["host"], deadline=5) as world:
        (one,) = world.worlds
        with pytest.raises(BadRequest), dp.collective_group():
            dp.all_reduce(full(one, 1), comm=one, out=one.device.empty((dp.all_reduce(full(one, 1), comm=one).ndim,)))
        assert total(one) == 1.0


def test_splits_are_by_color_and_in_the_order_of_keys():
    def run(world):
        part = world.communicator.split(world.rank % 2, key=-world.rank)
        none = world.communicator.split(None if world.rank else 0)
        found = dp.all_gather(world.device.array(np.array([world.rank])), comm=part).numpy()[:, 0].tolist()
        return found, part.rank, none is None

    with dp.World.local(["host"] * 4, deadline=10) as world:
        found = world.run(run)
    assert found == [([2, 0], 1, False), ([3, 1], 1, True), ([2, 0], 0, True), ([3, 1], 0, True)]


@pytest.mark.parametrize(
    ("color", "key", "named"), [("a", 0, "color"), (-1, 0, "color"), (1 << 31, 0, "color"), (0, 0.5, "key")]
)
def test_a_split_by_what_is_no_number_is_refused(color, key, named):
    refused = pytest.raises(BadRequest, match=f"^{named}: got .*expected a whole number from ")
    with dp.World.local(["host"] * 2, deadline=10) as world, refused:
        world.run(lambda each: each.communicator.split(color, key))


def test_calls_are_bound_and_repeated_and_die_with_their_communicator():
    def run(world):
        x = full(world, world.rank + 1)
        call = dp.prepare(dp.AllReduceRequest(x, comm=world, out=world.device.empty((5,))))
        for _ in range(3):
            assert call().numpy()[0] == 3
        assert call(x=full(world, 2.0)).numpy()[0] == 4
        dp.barrier(comm=world)
        world.rebuild()
        with pytest.raises(CollectiveError, match="aborted to rebuild"):
            call()
        return total(world)

    with dp.World.local(["host"] * 2, deadline=20) as world:
        assert world.run(run) == [3.0, 3.0]


def test_torch_tensors_go_in_and_come_out():
    torch = pytest.importorskip("torch")

    def run(world):
        found = dp.all_reduce(torch.full((3,), world.rank + 1.0), comm=world)
        assert isinstance(found, torch.Tensor)
        return found.tolist()

    with dp.World.local(["host"] * 2, deadline=20) as world:
        assert world.run(run) == [[3.0] * 3] * 2


def test_requests_that_no_rank_could_take_part_with_are_refused():
    host = dp.device("host")
    x, rows = host.zeros((4,)), host.zeros((3, 2))
    with dp.World.local(["host"] * 2, deadline=5) as world:
        one, two = world.worlds
        refused = [
            (lambda: dp.all_reduce(x, comm=None), "comm"),
            (lambda: dp.all_reduce(x, comm=world), "comm"),
            (lambda: dp.all_reduce(x, comm=one, factor=2.0), "factor"),
            (lambda: dp.all_reduce(x.astype("i8"), comm=one, reduce="premul_sum", factor=300.0), "factor"),
            (lambda: dp.all_reduce(x, comm=one, reduce="premul_sum", device_factor=rows), "device_factor"),
            (lambda: dp.all_reduce(x, comm=one, out=x[::2]), "out"),
            (lambda: dp.broadcast(x, comm=one, root=2), "root"),
            (lambda: dp.reduce_scatter(rows, comm=one), "x"),
            (lambda: dp.all_to_all(rows, comm=one), "x"),
            (lambda: dp.all_to_all(rows, comm=one, send_counts=(1, 2)), "recv_counts"),
            (lambda: dp.all_to_all(rows, comm=one, send_counts=(1, 2), recv_counts=(2, 2)), "recv_counts"),
            (lambda: dp.all_gather(rows, comm=one, counts=(1, 1)), "x"),
            (lambda: dp.all_gather(rows, comm=one, counts=(3,)), "counts"),
            (lambda: dp.scatter(rows, comm=two, out=x), "x"),
            (lambda: dp.scatter(comm=two), "out"),
            (lambda: dp.send(x, comm=one, peer=5), "peer"),
            (lambda: dp.RecvRequest(comm=one, peer=1), "out"),
            (lambda: dp.sendrecv(x, comm=one, dest=0, source=-1), "source"),
        ]
        for number, (call, operand) in enumerate(refused):
            with pytest.raises(BadRequest) as caught:
                call()
            assert caught.value.operand == operand, number
        with pytest.raises(dp.errors.NoRow, match="dense in C order"):
            dp.all_reduce(rows.T, comm=one)
        with pytest.raises(BadRequest, match="library: got 'cublas'"):
            dp.all_reduce(x, comm=one, library="cublas")
        assert dp.explain(dp.AllReduceRequest(x, comm=one, library="nccl")).row.library == "numpy"
    with pytest.raises((Closed, CollectiveError)):
        dp.all_reduce(x, comm=one)


def test_worlds_that_cannot_be():
    with pytest.raises(BadRequest, match="devices"):
        dp.World.local([])
    for given in ("host", 3, dp.device("host")):
        with pytest.raises(BadRequest, match=r"devices: got .*expected a list"):
            dp.World.local(given)
    with pytest.raises(BadRequest, match="deadline"):
        dp.World.local(["host"], deadline=0)
    with dp.World.local(["host"]) as world, pytest.raises(TypeError, match="belongs to this process"):
        copy.copy(world.worlds[0].communicator)


def test_a_closed_world_takes_no_call():
    with dp.World.local(["host"]) as world:
        assert world.run(total) == [1.0]
    for call in (lambda: world.run(total), world.rebuild):
        with pytest.raises(Closed, match="was closed"):
            call()


def test_workers_of_a_supervisor_run_collectives():
    with dp.World.local(["host"] * 2, deadline=20) as world, dp.Supervisor("host", streams=2) as sup:
        requests = [dp.AllReduceRequest(full(each, each.rank + 1), comm=each) for each in world.worlds]
        futures = [sup.submit(request) for request in requests]
        assert [float(future.result(20).numpy()[0]) for future in futures] == [3.0, 3.0]
