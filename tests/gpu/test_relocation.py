"""Relocated calls in every company that they may have: each result is the library's own, bit by bit.

Operands that are one or overlap, numbers that change, threads, work that is still running, captures, and child
processes. tests/gpu/test_relocation_rows.py has every row of the table, test_relocation_many.py thousands of addresses.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dispatch as dp

sys.path.insert(0, str(Path(__file__).parents[1]))

from address_sets import N, bits, own_bits, relocated

sys.path.remove(str(Path(__file__).parents[1]))  # else every child of a later test would find it, too

PATIENCE = 60


# -- operands that are one, or overlap --------------------------------------------------------------------------------
def numbers(dev: dp.Device, rng: np.random.Generator, *shape: int, dtype: str = "bf16") -> dp.Tensor:
    return dev.array(rng.standard_normal(shape), dtype)


def poisoned(dev: dp.Device, *shape: int, dtype: str = "bf16") -> dp.Tensor:
    return dev.array(np.full(shape, np.nan), dtype)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_the_same_operand_twice_in_turn_with_others(dev, rng, dtype):
    with dev.stream():
        whole = numbers(dev, rng, 2 * N, N, dtype=dtype)
        x, y = (numbers(dev, rng, N, N, dtype=dtype) for _ in range(2))
        twin = dp.Tensor(x.storage, x.ptr, x.layout)
        pairs = [(x, y), (x, x), (x, twin), (y, x), (y, y), (whole[:N], whole[16 : 16 + N]), (whole[:N], whole[:N])]
        works = [dp.MatmulRequest(a, b, out=poisoned(dev, N, N, dtype=dtype)) for a, b in pairs for _ in range(3)]
        right = [own_bits(request, request.out) for request in works]
        for request in works[::3]:
            relocation = relocated(request)
        before = relocation.launches
        for _ in range(10):
            for number in rng.permutation(len(works)):
                dp.matmul(works[number].a, works[number].b, out=works[number].out)
        assert relocation.launches - before >= len(works)
        assert [bits(request.out) for request in works] == right


def test_c_that_is_the_output_in_turn_with_another(dev, rng):
    with dev.stream():
        a, b = numbers(dev, rng, N, N), numbers(dev, rng, N, N)
        start = rng.standard_normal((N, N))
        works = []
        for number in range(12):
            out = dev.array(start, "bf16")
            c = out if number % 2 else dev.array(start, "bf16")
            works.append(dp.MatmulRequest(a, b, c=c, beta=0.5, out=out))
        right = [own_bits(request, request.out) for request in works]
        for request in works[:2]:
            relocated(request)
        for _ in range(5):
            for request in works:
                request.out.copy_from(start)
            for number in rng.permutation(len(works)):
                dp.run(works[number])
            assert [bits(request.out) for request in works] == right
        assert executor_launches(works) >= len(works)


def executor_launches(works: list[Any]) -> int:
    """Launches of the relocated graphs of all plans of some requests on the current stream."""
    plans = {id(plan): plan for plan in (request.device.executor().plan(request) for request in works)}
    return sum(plan.relocation.launches for plan in plans.values())


def test_in_place_in_turn_with_another_output(dev, rng):
    with dev.stream():
        start = rng.standard_normal((16, 96))
        xs = [dev.array(start, "f32") for _ in range(12)]
        outs = [x if number % 2 else dev.array(start, "f32") for number, x in enumerate(xs)]
        works = [dp.SoftmaxRequest(x, out=out) for x, out in zip(xs, outs, strict=True)]
        right = [own_bits(request, request.out) for request in works]
        for request in works[:2]:
            relocated(request)
        for _ in range(5):
            for out in outs:
                out.copy_from(start)
            for number in rng.permutation(len(works)):
                dp.run(works[number])
            assert [bits(out) for out in outs] == right
        assert executor_launches(works) >= len(works)


# -- numbers --------------------------------------------------------------------------------------------------------
FACTORS = (1.0, 0.0, -0.0, 2.0, -1.0, 0.5, 1e-3, 3.0)


@pytest.mark.parametrize("dtype", ["bf16", "f32", "f64", "c64"])
def test_alpha_and_beta_that_change_from_call_to_call(dev, rng, dtype):
    """With 0 the operands are not read: there is a NaN in them, then."""
    factors: tuple[complex, ...] = (*FACTORS, 0.5 + 2j, -1j) if dtype == "c64" else FACTORS
    with dev.stream():
        a, b, c = (numbers(dev, rng, N, N, dtype=dtype) for _ in range(3))
        bad = dev.array(np.full((N, N), np.nan), dtype)
        works = []
        for alpha in factors:
            for beta in factors:
                given = (bad if alpha == 0 and rng.integers(2) else a, b)
                added = bad if beta == 0 and rng.integers(2) else c
                out = poisoned(dev, N, N, dtype=dtype)
                works.append(dp.MatmulRequest(*given, c=added, alpha=alpha, beta=beta, out=out))
        right = [own_bits(request, request.out) for request in works]
        executor = dev.executor()
        for request in works:
            executor.relocate(executor.plan(request), request.arguments({}))
        for _ in range(6):
            for number in rng.permutation(len(works)):
                request = works[number]
                dp.matmul(request.a, request.b, c=request.c, alpha=request.alpha, beta=request.beta, out=request.out)
        wrong = [
            (request.alpha, request.beta)
            for request, bytes_ in zip(works, right, strict=True)
            if bits(request.out) != bytes_
        ]
        assert not wrong
        assert executor.relocation_stats()["differed"] == 0
        assert executor_launches(works) > 0


def test_numbers_in_device_memory(dev, rng):
    with dev.stream():
        a, b, c = (numbers(dev, rng, N, N) for _ in range(3))
        works = []
        for _ in range(20):
            alpha, beta = (dev.array(rng.standard_normal(1), "f32") for _ in range(2))
            works.append(dp.MatmulRequest(a, b, c=c, alpha=alpha, beta=beta, out=poisoned(dev, N, N)))
        right = [own_bits(request, request.out) for request in works]
        relocation = relocated(works[0])
        before = relocation.launches
        for _ in range(5):
            for number in rng.permutation(len(works)):
                dp.run(works[number])
        assert [bits(request.out) for request in works] == right
        assert relocation.launches - before >= len(works)


# -- other work at the same time --------------------------------------------------------------------------------------
def test_eight_threads_on_streams_of_their_own(dev, rng):
    xs = [numbers(dev, rng, N, N) for _ in range(12)]
    pairs = [(a, b) for a in range(12) for b in range(12)]
    dev.synchronize()
    with dev.stream():
        works = [dp.MatmulRequest(xs[a], xs[b], out=poisoned(dev, N, N)) for a, b in pairs]
        right = [own_bits(request, request.out) for request in works]
    dev.synchronize()
    wrong: list[Any] = []
    start = threading.Barrier(8)

    def run(number: int) -> None:
        try:
            mine = np.random.default_rng(number)
            outs = [poisoned(dev, N, N) for _ in range(len(pairs))]
            launched = relocated(dp.MatmulRequest(xs[0], xs[1], out=outs[0]))
            relocated(dp.MatmulRequest(xs[0], xs[0], out=outs[0]))
            start.wait(PATIENCE)
            for turn in range(4):
                for which in mine.permutation(len(pairs)).tolist():
                    a, b = pairs[which]
                    dp.matmul(xs[a], xs[b], out=outs[(which + turn) % len(outs)])
                wrong.extend(
                    (number, turn, pairs[which])
                    for which in range(len(pairs))
                    if bits(outs[(which + turn) % len(outs)]) != right[which]
                )
            if launched.launches < 3 * len(pairs):
                wrong.append((number, f"{launched.launches} launches were relocated"))
        except BaseException as error:  # noqa: BLE001  # shown below
            wrong.append((number, repr(error)))
            start.abort()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_launches_behind_one_that_is_still_running(dev, rng):
    """The graph's parameters are written anew while the GPU has yet to run what was launched with the others."""
    large = 8192
    with dev.stream():
        busy = dev.zeros((large, large), "bf16")
        target = dev.empty((large, large), "bf16")
        xs = [numbers(dev, rng, N, N) for _ in range(10)]
        works = [dp.MatmulRequest(a, b, out=poisoned(dev, N, N)) for a in xs for b in xs if a is not b]
        right = [own_bits(request, request.out) for request in works]
        relocation = relocated(works[0])
        dp.matmul(works[0].a, works[0].b, out=works[0].out)  # of this plan, and not of one like that of `busy`
        dp.matmul(busy, busy, out=target)
        stream = dev.executor().stream
        for _ in range(3):
            for request in works:
                request.out.copy_from(np.full((N, N), np.nan))
            stream.synchronize()
            before = relocation.launches
            for _ in range(30):
                dp.matmul(busy, busy, out=target)
            for number in rng.permutation(len(works)):
                dp.matmul(works[number].a, works[number].b, out=works[number].out)
            assert not stream.done(), "the GPU was too quick: this run showed nothing"
            assert relocation.launches - before >= len(works) - 5
            assert [bits(request.out) for request in works] == right


def test_calls_under_the_callers_own_capture(dev, torch):
    """They become part of his graph as the library's own calls; before and after it they are relocated."""
    xs = [torch.randn(N, N, device="cuda", dtype=torch.bfloat16) for _ in range(6)]
    outs = [torch.full_like(xs[0], float("nan")) for _ in range(12)]
    ours, ours_out = [dp.from_dlpack(x) for x in xs], [dp.from_dlpack(x) for x in outs]
    side = torch.cuda.Stream()
    stream = dp.Stream.from_handle(dev, side.cuda_stream)
    torch.cuda.synchronize()

    def call(number: int) -> None:
        dp.matmul(ours[number % 6], ours[(number + 1) % 6], out=ours_out[number])

    def right(number: int) -> Any:
        return xs[number % 6].float() @ xs[(number + 1) % 6].float()

    with torch.cuda.stream(side), stream:
        relocation = relocated(dp.MatmulRequest(ours[0], ours[1], out=ours_out[0]))
        for turn in range(3):
            for number in range(8):
                call(number)
            side.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                before = relocation.launches
                for number in range(8, 12):
                    call(number)
                assert relocation.launches == before, "a relocated graph was launched into a capture"
            for _ in range(2):
                for x in xs:
                    x.normal_()
                for out in outs:
                    out.fill_(float("nan"))
                for number in range(4):  # its graph is as it was
                    call(number)
                graph.replay()
                side.synchronize()
                for number in (*range(4), *range(8, 12)):
                    wanted = right(number)
                    assert bool(((outs[number].float() - wanted).abs() <= 0.02 * wanted.abs().max()).all()), turn
        assert relocation.launches >= 20


def test_a_child_process_and_the_one_after_it(trouble, rng, tmp_path):
    with dp.Supervisor("cuda:0", streams=2, isolation="process", setup=(trouble.__name__,), max_restarts=100) as sup:
        home = sup.device
        values = [rng.standard_normal((N, N)).astype(np.float32) for _ in range(8)]
        xs = [home.array(x, "f32") for x in values]
        outs = [home.array(np.full((N, N), np.nan), "f32") for _ in range(200)]
        exact = [[a.astype(np.float64) @ b for b in values] for a in values]
        for turn in range(6):
            if turn == 3:  # the child is killed with a request in hand, and another takes its place
                hold = trouble.Hold(tmp_path)
                cell = home.zeros(4096)
                held = sup.submit(
                    trouble.Trouble("held", home.array(np.full(4096, 3.0, np.float32)), cell, once=hold.once)
                )
                hold.release_behind(sup._pool._child.process.pid, signal.SIGKILL, PATIENCE)
                assert (held.result(PATIENCE).numpy() == 3.0).all()
            picked = rng.integers(8, size=(len(outs), 2)).tolist()
            requests = [dp.MatmulRequest(xs[a], xs[b], out=out) for (a, b), out in zip(picked, outs, strict=True)]
            for future in sup.submit_many(requests):
                future.result(PATIENCE)
            for (a, b), out in zip(picked, outs, strict=True):
                assert np.abs(out.numpy() - exact[a][b]).max() <= 1e-5 * np.abs(exact[a][b]).max()
                out.copy_from(np.full((N, N), np.nan))
    home.close()
