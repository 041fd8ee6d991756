"""Supervisors on the host: results, which worker gets a request, and queues that are full."""

import asyncio
import importlib.util
import threading
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, Closed, QueueFull
from dispatch.supervise.placement import FEW, NEAR

spec = importlib.util.spec_from_file_location("busy_workers", Path(__file__).with_name("busy_workers.py"))
workers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(workers)
PATIENCE, Hold = workers.PATIENCE, workers.Hold


# -- results ------------------------------------------------------------------------------------------------------
def test_products_come_out_as_numpy_has_them(rng):
    host = dp.device("host")
    pairs = [(rng.random((m, 7)), rng.random((7, m + 1))) for m in range(1, 40)]
    requests = [dp.MatmulRequest(host.array(a), host.array(b)) for a, b in pairs]
    with dp.Supervisor("host", streams=3) as sup:
        assert sup.device is host
        futures = sup.submit_many(requests) + [sup.submit(request) for request in requests]
        for future, (a, b) in zip(futures, pairs * 2, strict=True):
            np.testing.assert_allclose(future.result(PATIENCE).numpy(), a @ b, rtol=1e-12)
    stats = sup.stats()
    assert (stats.done, stats.failed, stats.queued, stats.running) == (78, 0, 0, 0)
    assert 0 < stats.p50 <= stats.p90 <= stats.p99


def test_asyncio_awaits_results(probe):
    async def main(sup: dp.Supervisor) -> list[int]:
        return await asyncio.gather(*(sup.submit(probe(lambda i=i: i)) for i in range(500)))

    with dp.Supervisor("host") as sup:
        assert asyncio.run(main(sup)) == list(range(500))


@pytest.mark.parametrize("options", [{"isolation": "fiber"}, {"when_full": "drop"}, {"placement": "random"}])
def test_an_option_that_is_none_names_what_is_accepted(options):
    (name,) = options
    with pytest.raises(BadRequest, match=rf"{name}: got .* expected '"):
        dp.Supervisor("host", **options)


@pytest.mark.parametrize(
    "options", [{"streams": 0}, {"queue_size": 0}, {"max_restarts": -1}, {"streams": "four"}, {"max_seconds": -1}]
)
def test_a_number_that_is_too_small_is_refused(options):
    with pytest.raises(BadRequest, match="or more"):
        dp.Supervisor("host", **options)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_more_workers_than_make_sense_are_refused_before_any_is_started(isolation):
    with pytest.raises(BadRequest, match=r"^streams: got 1000000; expected an integer from 1 to 4096\. Hint: each"):
        dp.Supervisor("host", streams=10**6, isolation=isolation)


def test_the_worker_asked_for_must_exist(probe):
    with dp.Supervisor("host", streams=2) as sup:
        for worker in (2, -1, "0"):
            with pytest.raises(BadRequest, match="from 0 to 1"):
                sup.submit(probe(), worker=worker)
            with pytest.raises(BadRequest, match="from 0 to 1"):
                sup.submit_many([probe()], worker=worker)


def test_numpys_whole_numbers_are_numbers(probe):
    two = np.int64(2)
    with dp.Supervisor("host", streams=two, queue_size=two, max_restarts=np.uint8(3), spare=np.int32(0)) as sup:
        for worker in (np.int64(1), [np.int32(0), 1], np.array([0, 1])):
            assert sup.submit(probe(lambda: 7), worker=worker, priority=np.int8(-1)).result(PATIENCE) == 7
        for worker in (np.int64(2), [np.int32(-1)], np.array([0.0]), np.True_):
            with pytest.raises(BadRequest, match=r"^worker: got"):
                sup.submit(probe(), worker=worker)


def test_an_observer_is_a_function():
    with (
        dp.Supervisor("host", streams=1) as sup,
        pytest.raises(BadRequest, match=r"^observer: got None; expected"),
    ):
        sup.watch_generation(None)


# -- placing ------------------------------------------------------------------------------------------------------
def test_requests_that_are_waited_for_one_by_one_stay_with_one_worker_until_it_is_busy(probe):
    def ran() -> str:
        return sup.submit(probe(lambda: threading.current_thread().name)).result(PATIENCE)[-1]

    with dp.Supervisor("host", streams=3) as sup:
        assert {ran() for _ in range(6)} == {"0"}
        hold = Hold()
        busy = sup.submit(probe(hold))
        assert hold.entered.wait(PATIENCE)
        assert "0" not in (others := {ran() for _ in range(6)})
        assert len(others) == 1
        hold.release.set()
        busy.result(PATIENCE)
        assert {ran() for _ in range(6)} == others


def test_idle_workers_get_requests_in_turn_where_that_is_asked_for(probe):
    with dp.Supervisor("host", streams=3, placement="fair") as sup:
        names = [sup.submit(probe(lambda: threading.current_thread().name)).result(PATIENCE)[-1] for _ in range(6)]
    assert sorted(names[:3]) == sorted(names[3:]) == ["0", "1", "2"]


def test_a_busy_worker_gets_no_more_while_others_have_less(probe):
    hold = Hold()
    with dp.Supervisor("host", streams=2) as sup:
        sup.submit(probe(hold), worker=0)
        assert hold.entered.wait(PATIENCE)
        ran = [sup.submit(probe(lambda: threading.current_thread().name)).result(PATIENCE)[-1] for _ in range(4)]
        hold.release.set()
    assert ran == ["1"] * 4


def test_a_batch_is_split_so_that_all_have_as_much_to_do(probe):
    holds = [Hold(), Hold(), Hold()]
    with dp.Supervisor("host", streams=3) as sup:
        for index, hold in enumerate(holds):
            sup.submit(probe(hold), worker=index)
            assert hold.entered.wait(PATIENCE)
        sup.submit_many([probe() for _ in range(5)], worker=1)
        sup.submit_many([probe() for _ in range(10)])
        assert [len(queue.pending) for queue in sup._pool.queues] == [5, 5, 5]
        sup.submit_many([probe() for _ in range(2)])
        assert sorted(len(queue.pending) for queue in sup._pool.queues) in ([5, 6, 6], [5, 5, 7])
        for hold in holds:
            hold.release.set()


def test_a_request_that_is_bound_to_a_worker_goes_there_again(probe):
    with dp.Supervisor("host", streams=4) as sup:
        request = probe(lambda: threading.current_thread().name)
        assert sup.submit(request, worker=2).result(PATIENCE).endswith("2")
        (executor,) = [executor for executor, queue in sup._pool.queue_of.items() if queue.index == 2]
        request.bound = type("Bound", (), {"executor": executor})  # as a GPU's executor leaves it
        assert {sup.submit(request).result(PATIENCE)[-1] for _ in range(8)} == {"2"}
    with dp.Supervisor("host", streams=4, placement="fair") as sup:
        assert {sup.submit(request).result(PATIENCE)[-1] for _ in range(8)} == {"0", "1", "2", "3"}


def test_a_worker_that_knows_many_requests_gets_no_more_than_a_few_of_them_while_others_are_idle(probe):
    with dp.Supervisor("host", streams=2) as sup:
        (executor,) = [executor for executor, queue in sup._pool.queue_of.items() if queue.index == 0]
        known = probe(lambda: threading.current_thread().name)
        known.bound = type("Bound", (), {"executor": executor})
        holds = [Hold(), Hold()]
        first = sup.submit(probe(holds[0]), worker=0)
        assert holds[0].entered.wait(PATIENCE)
        sent = [sup.submit(known) for _ in range(FEW)]
        assert [len(queue.pending) for queue in sup._pool.queues] == [FEW, 0]
        assert sup.submit(known).result(PATIENCE)[-1] == "1"
        second = sup.submit(probe(holds[1]), worker=1)
        assert holds[1].entered.wait(PATIENCE)
        sent += [sup.submit(known) for _ in range(NEAR - FEW + 1)]  # nobody is idle
        assert [len(queue.pending) for queue in sup._pool.queues] == [NEAR + 1, 0]
        sent.append(sup.submit(known))
        assert [len(queue.pending) for queue in sup._pool.queues] == [NEAR + 1, 1]
        for hold in holds:
            hold.release.set()
        assert [future.result(PATIENCE)[-1] for future in sent] == ["0"] * (NEAR + 1) + ["1"]
        assert first.result(PATIENCE) is second.result(PATIENCE) is None


# -- full queues --------------------------------------------------------------------------------------------------
def test_a_full_queue_raises_if_asked_to(probe):
    hold = Hold()
    with dp.Supervisor("host", streams=1, queue_size=2, when_full="raise") as sup:
        sup.submit(probe(hold))
        assert hold.entered.wait(PATIENCE)
        with pytest.raises(QueueFull, match="cannot hold 3 more"):
            sup.submit_many([probe(), probe(), probe()])
        sup.submit_many([probe(), probe()])
        with pytest.raises(QueueFull, match=r"queue of worker 0 of host is full \(2 requests each\)"):
            sup.submit(probe())
        hold.release.set()
    assert sup.stats().done == 3


def test_a_full_queue_blocks_until_there_is_room(probe):
    hold, ran = Hold(), []
    with dp.Supervisor("host", streams=1, queue_size=2) as sup:
        sup.submit(probe(hold))
        assert hold.entered.wait(PATIENCE)
        queued = [sup.submit(probe()), sup.submit(probe())]
        with pytest.raises(QueueFull, match="timeout has expired"):
            sup.submit(probe(), timeout=0.01)
        threads = [
            threading.Thread(target=lambda: sup.submit(probe(lambda: ran.append("one")))),
            threading.Thread(target=lambda: sup.submit_many([probe(lambda: ran.append("many"))] * 7)),
        ]
        for thread in threads:
            thread.start()
        assert not ran
        hold.release.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert sorted(ran) == ["many"] * 7 + ["one"]
    assert all(future.done() for future in queued)


def test_a_worker_does_not_wait_for_itself_to_make_room(probe):
    caught, called = [], threading.Event()

    def call_back(_: dp.Future) -> None:
        sup.submit_many([probe(), probe()])
        with pytest.raises(QueueFull, match="own thread cannot wait") as info:
            sup.submit(probe())
        caught.append(info.value)
        called.set()

    with dp.Supervisor("host", streams=1, queue_size=2) as sup:
        hold = Hold()
        future = sup.submit(probe(hold))
        assert hold.entered.wait(PATIENCE)
        future.add_done_callback(call_back)
        hold.release.set()
        assert called.wait(PATIENCE)
    assert len(caught) == 1


def test_who_waits_for_room_hears_that_there_will_be_none(probe):
    hold, heard = Hold(), []
    sup = dp.Supervisor("host", streams=1, queue_size=1)
    sup.submit(probe(hold))
    assert hold.entered.wait(PATIENCE)
    queued = sup.submit(probe())

    def submit() -> None:
        with pytest.raises(Closed):
            sup.submit(probe())
        heard.append(1)

    def submit_many() -> None:
        heard.extend(type(future.exception(PATIENCE)) for future in sup.submit_many([probe(), probe()]))

    threads = [threading.Thread(target=submit), threading.Thread(target=submit_many)]
    for thread in threads:
        thread.start()
    while sup._pool.blocked < 2:
        threading.Event().wait(0.001)
    sup.close(wait=False)
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(heard, key=str) == [1, Closed, Closed]
    hold.release.set()
    sup.close()
    assert queued.cancelled()
