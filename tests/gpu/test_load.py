"""Load on the GPU: order across streams by events, priorities, what is dropped, and three ways to learn of an end."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, DependencyFailed, QueueFull

PATIENCE = 60
N = 64
LONG = 4096  # a product of these takes some 0.2 ms in bf16: longer than it takes to enqueue a dozen others


def close(result: dp.Tensor, expected: np.ndarray, tolerance: float = 1e-4) -> bool:
    """Within a share of the largest element: f32 sums of 64 products differ by some 1e-7 of it, a wrong one by all."""
    return float(np.abs(result.numpy() - expected).max()) <= tolerance * float(np.abs(expected).max())


def chain(rng: np.random.Generator, dev: dp.Device, length: int):
    """Requests that make each cell of the one before, the cells, and what the last of them must be."""
    factors = [rng.standard_normal((N, N)) / 8 for _ in range(length + 1)]
    tensors = [dev.array(x, "f32") for x in factors]
    cells = [dev.array(np.full((N, N), np.nan), "f32") for _ in range(length)]
    befores = [tensors[0], *cells]
    requests = [dp.MatmulRequest(x, y, out=z) for x, y, z in zip(befores, tensors[1:], cells, strict=False)]
    right = factors[0].astype(np.float64)
    for factor in factors[1:]:
        right = right @ factor
    return requests, cells, right


@pytest.mark.parametrize("completion", ["poll", "block", "callback"])
def test_a_chain_over_all_workers_is_in_order_without_waiting_for_any(dev, rng, completion):
    big = dev.array(rng.standard_normal((LONG, LONG)), "bf16")
    busy = dp.MatmulRequest(big, big, out=dev.empty((LONG, LONG), "bf16"))
    requests, cells, right = chain(rng, dev, 24)
    with dp.Supervisor(dev, streams=4, completion=completion) as sup:
        for round_ in range(6):  # later rounds replay graphs
            for cell in cells:
                cell.copy_from(np.full((N, N), np.nan))
            futures = [sup.submit(busy, worker=round_ % 4), sup.submit(busy, worker=round_ % 4)]
            for index, request in enumerate(requests):
                futures.append(sup.submit(request, worker=(round_ + index) % 4, after=futures[-1:]))
            assert close(futures[-1].result(PATIENCE), right)
        assert sup.stats().failed == 0


def test_many_chains_at_once_with_priorities(dev, rng):
    chains = [chain(rng, dev, 10) for _ in range(20)]
    last: list[dp.Future] = []
    with dp.Supervisor(dev, streams=4) as sup:
        for number, (requests, _, _) in enumerate(chains):
            before: list[dp.Future] = []
            for index, request in enumerate(requests):
                before = [sup.submit(request, worker=(number + index) % 4, priority=number % 3 - 1, after=before)]
            last += before
        for future, (_, _, right) in zip(last, chains, strict=True):
            assert close(future.result(PATIENCE), right)


def test_what_waits_for_a_refused_request_is_not_run(dev, rng):
    a = dp.device("host").array(np.ones((2, 2), np.float32))
    good, cells, _ = chain(rng, dev, 1)
    with dp.Supervisor(dev, streams=2) as sup:
        bad = sup.submit(dp.MatmulRequest(a, a), worker=0)
        dependent = sup.submit(good[0], worker=1, after=[bad])
        with pytest.raises(DependencyFailed, match="BadRequest"):
            dependent.result(PATIENCE)
        assert isinstance(bad.exception(PATIENCE), BadRequest)
        assert np.isnan(cells[0].numpy()).all()


def test_a_full_queue_drops_the_oldest_and_runs_the_rest(dev, rng):
    requests, _, _ = chain(rng, dev, 1)
    big = dev.array(rng.standard_normal((LONG, LONG)), "bf16")
    busy = dp.MatmulRequest(big, big, out=dev.empty((LONG, LONG), "bf16"))
    with dp.Supervisor(dev, streams=1, queue_size=8, when_full="drop_oldest") as sup:
        futures = [sup.submit(busy) for _ in range(600)] + [sup.submit(requests[0]) for _ in range(200)]
        errors = [future.exception(PATIENCE) for future in futures]
        assert {type(error) for error in errors} <= {type(None), QueueFull}
        assert errors[-1] is None
        assert sup.stats().done + sup.stats().failed == 800


@pytest.mark.parametrize("completion", ["poll", "block", "callback"])
def test_results_are_right_however_their_end_is_learnt_of(dev, rng, completion):
    pairs = [(rng.standard_normal((N, N)), rng.standard_normal((N, N))) for _ in range(40)]
    requests = [dp.MatmulRequest(dev.array(a, "f32"), dev.array(b, "f32"), out=dev.empty((N, N))) for a, b in pairs]
    with dp.Supervisor(dev, streams=3, completion=completion, queue_size=64) as sup:
        for _ in range(4):
            for request in requests:
                request.out.copy_from(np.full((N, N), np.nan))
            for future, (a, b) in zip(sup.submit_many(requests), pairs, strict=True):
                assert close(future.result(PATIENCE), a @ b)
        many = sup.submit_many(requests * 50)
        assert many[-1].result(PATIENCE) is requests[-1].out
        one = [sup.submit(request).result(PATIENCE) for request in requests]
        assert all(close(result, a @ b) for result, (a, b) in zip(one, pairs, strict=True))
    assert (sup.stats().done, sup.stats().running) == (40 * 55, 0)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dispatch")]


@pytest.mark.parametrize("completion", ["poll", "block", "callback"])
def test_a_chain_over_all_workers_of_a_child_is_in_order(rng, completion):
    with dp.Supervisor("cuda:0", streams=4, isolation="process", completion=completion) as sup:
        home = sup.device
        big = home.array(rng.standard_normal((LONG, LONG)), "bf16")
        busy = dp.MatmulRequest(big, big, out=home.empty((LONG, LONG), "bf16"))
        requests, cells, right = chain(rng, home, 24)
        for round_ in range(4):
            for cell in cells:
                cell.copy_from(np.full((N, N), np.nan))
            futures = [sup.submit(busy, worker=round_ % 4), sup.submit(busy, worker=round_ % 4)]
            for index, request in enumerate(requests):
                futures.append(sup.submit(request, worker=(round_ + index) % 4, after=futures[-1:]))
            assert close(futures[-1].result(PATIENCE), right)
        many = sup.submit_many(requests[:1] * 2000)
        assert all(future.result(PATIENCE) is requests[0].out for future in many)
        del big, busy, requests, cells, futures, many
    home.close()


def test_an_executor_that_has_let_its_memory_go_runs_on(dev, rng):
    a, b = rng.standard_normal((N, N)), rng.standard_normal((N, N))
    request = dp.MatmulRequest(dev.array(a, "f32"), dev.array(b, "f32"), out=dev.empty((N, N)))
    with dev.stream():
        executor = dev.executor()
        for _ in range(3):
            for _ in range(3):
                dp.run(request)
            assert close(request.out, a @ b)
            executor.release()
            assert executor._workspace is None
            request.out.copy_from(np.full((N, N), np.nan))
        call = dp.prepare(request)
        kept = executor.workspace
        executor.release()
        assert executor._workspace is kept, "the call's graph holds its address"
        call()
        assert close(request.out, a @ b)
