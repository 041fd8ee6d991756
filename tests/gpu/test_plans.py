"""Bound and one-shot calls on the GPU: graphs stay right when pointers, memory, streams and threads change."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

import dispatch as dp
from cudabind import driver
from dispatch.execute import plan_relocation, relocations

if TYPE_CHECKING:
    from dispatch.core.request import Plan

N = 64


def operand(dev: dp.Device, rng: np.random.Generator, *shape: int, dtype: str = "f32") -> dp.Tensor:
    return dev.array(rng.standard_normal(shape), dtype)


def poisoned(dev: dp.Device, *shape: int, dtype: str = "f32") -> dp.Tensor:
    return dev.empty(shape, dtype).copy_from(np.full(shape, np.nan))


def product(a: dp.Tensor, b: dp.Tensor) -> np.ndarray:
    return a.numpy().astype(np.float64) @ b.numpy().astype(np.float64)


def close(result: dp.Tensor, expected: np.ndarray) -> bool:
    # f32 sums of 64 products of normal numbers: 1e-4 is over ten times the rounding, far under a wrong element.
    return bool(np.allclose(result.numpy(), expected, rtol=1e-4, atol=1e-4))


def plan_of(request: dp.MatmulRequest) -> Plan:
    return request.device.executor().plan(request)


@pytest.mark.parametrize("way", ["matmul", "run"])
def test_the_first_calls_are_the_librarys_later_ones_relocated_and_all_are_right(dev, rng, way):
    a, b, out = operand(dev, rng, N, N), operand(dev, rng, N, N), dev.empty((N, N))
    expected, launched = product(a, b), []
    with dev.stream():  # an executor of its own, with no plans yet
        for _ in range(200):
            out.copy_from(np.full((N, N), np.nan))
            request = dp.MatmulRequest(a, b, out=out)
            if way == "run":
                dp.run(request)
                plan = plan_of(request)
            else:
                dp.matmul(a, b, out=out)
                (short,) = dev.executor().shortcuts.values()
                plan = short.plan
            assert close(out, expected)
            launched.append(plan.launch is not None)
    assert launched == sorted(launched)
    assert not launched[plan_relocation.FIRST - 1]
    assert launched[-1]
    assert plan.relocation.why == ""


def test_a_replay_reads_its_operands_anew(dev, rng):
    a, b, out = operand(dev, rng, N, N), operand(dev, rng, N, N), dev.empty((N, N))
    call = dp.prepare(dp.MatmulRequest(a, b, out=out))
    for _ in range(3):
        a.copy_from(rng.standard_normal((N, N)))
        assert call() is out
        assert close(out, product(a, b))


def test_other_pointers_of_a_layout_take_the_same_plan(dev, rng):
    pairs = [(operand(dev, rng, N, N), operand(dev, rng, N, N)) for _ in range(5)]
    before = len(dev.executor().plans)
    plan_of(dp.MatmulRequest(*pairs[0]))
    for _ in range(3):
        for a, b in pairs:
            assert close(dp.matmul(a, b), product(a, b))
    assert len(dev.executor().plans) <= before + 1


def test_a_bound_call_takes_other_operands(dev, rng):
    a, b, other = (operand(dev, rng, N, N) for _ in range(3))
    call = dp.prepare(dp.MatmulRequest(a, b))
    first = call().numpy()
    assert close(call(a=other), product(other, b))
    assert np.array_equal(call().numpy(), first)
    with pytest.raises(dp.errors.BadRequest, match="weights"):
        call(weights=other)


def test_memory_that_was_freed_and_reused_is_no_stale_replay(dev, rng):
    seen = set()
    for _ in range(20):
        a, b, out = operand(dev, rng, N, N), operand(dev, rng, N, N), poisoned(dev, N, N)
        seen.add((a.ptr, b.ptr, out.ptr))
        for _ in range(3):
            out.copy_from(np.full((N, N), np.nan))
            dp.matmul(a, b, out=out)
            assert close(out, product(a, b))
        del a, b, out
    assert len(seen) < 20, "the pool gave no address twice, so this run showed nothing"


def test_alpha_and_beta_by_value_belong_to_the_record(dev, rng):
    a, b, c = (operand(dev, rng, N, N) for _ in range(3))
    out = dev.empty((N, N))
    for alpha, beta in [(1.0, 0.5), (2.0, 0.5), (1.0, 0.5), (2.0, 3.0)] * 3:
        dp.matmul(a, b, c=c, alpha=alpha, beta=beta, out=out)
        assert close(out, alpha * product(a, b) + beta * c.numpy().astype(np.float64))


def test_in_place_accumulation_adds_once_a_call(dev, rng):
    a, b = operand(dev, rng, N, N), operand(dev, rng, N, N)
    total = dev.zeros((N, N))
    for count in range(1, 6):
        dp.matmul(a, b, beta=1.0, out=total)
        assert close(total, count * product(a, b))


def test_preparing_runs_nothing(dev, rng):
    a, b, total = operand(dev, rng, N, N), operand(dev, rng, N, N), dev.zeros((N, N))
    call = dp.prepare(dp.MatmulRequest(a, b, beta=1.0, out=total))
    assert not total.numpy().any()
    call()
    assert close(total, product(a, b))


def test_the_cache_of_records_is_bounded_and_evicted_calls_still_work(dev, rng, monkeypatch):
    monkeypatch.setattr(relocations, "MAX_GRAPHS", 4)
    monkeypatch.setattr(plan_relocation, "FIRST", 2)
    monkeypatch.setattr(plan_relocation, "EVERY", 1)
    a, b = operand(dev, rng, N, N), operand(dev, rng, N, N)
    with dev.stream():
        bound = dp.prepare(dp.MatmulRequest(a, b, out=poisoned(dev, N, N)))
        works = [(a[:rows], poisoned(dev, rows, N)) for rows in range(2, N, 5) for _ in range(2)]
        for x, out in works * 12:
            dp.matmul(x, b, out=out)
        assert dev.executor().relocation_stats()["relocated"] == 4
        assert all(close(out, product(x, b)) for x, out in works)
        assert close(bound(), product(a, b))


def test_a_caller_who_captures_the_stream_gets_plain_calls_in_his_graph(dev, rng):
    a, b, out = operand(dev, rng, N, N), operand(dev, rng, N, N), dev.empty((N, N))
    stream = dev.stream()
    with stream:
        call = dp.prepare(dp.MatmulRequest(a, b, out=out))
        for _ in range(3):
            dp.matmul(a, b, out=out)
            call()
    stream.synchronize()
    driver.cuStreamBeginCapture(stream.handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
    with stream:
        dp.matmul(a, b, out=out)
        fresh = dp.matmul(out, b)  # its output is allocated while the stream is captured
        call()
    graph = driver.cuStreamEndCapture(stream.handle)
    executable = driver.cuGraphInstantiate(graph, 0)
    for _ in range(3):
        a.copy_from(rng.standard_normal((N, N)))
        out.copy_from(np.full((N, N), np.nan))
        dev.synchronize()
        driver.cuGraphLaunch(executable, stream.handle)
        stream.synchronize()
        expected = product(a, b)
        assert close(out, expected)
        assert np.allclose(fresh.numpy(), expected @ b.numpy().astype(np.float64), rtol=1e-3, atol=1e-2)
    with stream:
        assert close(dp.matmul(a, b, out=out), product(a, b)), "after the capture, calls run again"
    driver.cuGraphExecDestroy(executable)


def test_torch_can_capture_our_calls(dev):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    a, b = (torch.randn(N, N, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    tensors = [dp.from_dlpack(t) for t in (a, b, out)]
    side = torch.cuda.Stream()
    stream = dp.Stream.from_handle(dev, side.cuda_stream)
    with torch.cuda.stream(side), stream:
        for _ in range(3):
            dp.matmul(*tensors[:2], out=tensors[2])
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            dp.matmul(*tensors[:2], out=tensors[2])
    a.normal_()
    out.fill_(float("nan"))
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.allclose(out.double(), a.double() @ b.double(), rtol=1e-4, atol=1e-4)


def test_streams_wait_for_each_other_where_they_share_a_tensor(dev, rng):
    size = 2048
    a, b = operand(dev, rng, size, size), operand(dev, rng, size, size)
    streams = [dev.stream() for _ in range(3)]
    middle, last = dev.empty((size, size)), dev.empty((size, size))
    for _ in range(5):
        with streams[0]:
            for _ in range(4):
                dp.matmul(a, b, out=middle)  # about a millisecond in all, which the next stream must wait out
        with streams[1]:
            dp.matmul(middle, b, out=last)
        with streams[2]:
            middle.copy_from(np.zeros((size, size)))  # must not overtake the reader
    expected = product(a, b) @ b.numpy().astype(np.float64)
    error = np.linalg.norm(last.numpy() - expected) / np.linalg.norm(expected)
    assert error < 1e-5
    assert not middle.numpy().any()


def test_memory_is_not_reused_while_another_stream_still_reads_it(dev, rng):
    size = 2048
    b = operand(dev, rng, size, size)
    slow, fast = dev.stream(), dev.stream()
    for _ in range(5):
        with fast:
            a = operand(dev, rng, size, size)
            expected = a.numpy()
        with slow:
            for _ in range(4):
                busy = dp.matmul(b, b)
            out = dp.matmul(a, b)
        del a, busy  # `slow` has yet to read a
        with fast:
            junk = [poisoned(dev, size, size) for _ in range(2)]
        reference = expected.astype(np.float64) @ b.numpy().astype(np.float64)
        assert np.linalg.norm(out.numpy() - reference) / np.linalg.norm(reference) < 1e-5
        del junk


def test_direct_calls_from_many_threads_are_right(dev, rng):
    work = [(operand(dev, rng, N, 96), operand(dev, rng, 96, N)) for _ in range(8)]
    expected = [product(a, b) for a, b in work]
    wrong: list[int] = []
    start = threading.Barrier(8)

    def run(number: int) -> None:
        start.wait()
        for turn in range(200):
            index = (number + turn) % 8  # the operands are shared: every thread reads them on its own stream
            if not close(dp.matmul(*work[index]), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_closed_device_makes_its_tensors_and_calls_stale(rng):
    dev = dp.device("cuda:0")
    a, b = operand(dev, rng, N, N), operand(dev, rng, N, N)
    out = dp.matmul(a, b)
    call = dp.prepare(dp.MatmulRequest(a, b))
    request = dp.MatmulRequest(a, b, out=out)
    for _ in range(3):
        dp.run(request)
        dp.matmul(a, b, out=out)
        call()
    dev.close()
    fresh = dp.device("cuda:0")
    assert fresh.generation == dev.generation + 1
    for use in (
        lambda: dp.matmul(a, b),
        lambda: dp.matmul(a, b, out=out),
        call,
        lambda: dp.run(request),
        lambda: dp.prepare(request),
        lambda: dp.MatmulRequest(a, b),
        a.numpy,
        lambda: a.copy_from(np.zeros((N, N))),
        lambda: dev.empty((2, 2)),
        a.__dlpack__,
        lambda: a.__cuda_array_interface__,
    ):
        with pytest.raises(dp.errors.StaleTensor):
            use()
    x, y = operand(fresh, rng, N, N), operand(fresh, rng, N, N)
    with pytest.raises(dp.errors.StaleTensor):
        dp.matmul(x, b)
    assert close(dp.matmul(x, y), product(x, y))
