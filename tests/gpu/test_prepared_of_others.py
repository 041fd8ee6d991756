"""Prepared calls over arrays of torch and CuPy are in the order of their library's current stream, on both sides.

What writes the operands comes late, behind a kernel that only waits, and results are read at once on that stream.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest

import dispatch as dp

pytestmark = pytest.mark.usefixtures("dev")
LATE = 20_000_000  # cycles of the GPU: some 10 ms
N = 64


def late(torch, target, value):
    """Write a tensor on the current stream, once the GPU has waited."""
    torch.cuda._sleep(LATE)
    target.fill_(value)


def found(result):
    """The values of a result, copied on torch's current stream and read behind that copy alone."""
    copied = result.clone()
    return set(copied.float().cpu().unique().tolist())


def operands(torch, dtype="float32"):
    return (torch.full((N, N), 1.0, device="cuda", dtype=getattr(torch, dtype)) for _ in range(2))


@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize("on", ["default", "one", "another"])
def test_operands_come_late_and_results_are_read_at_once(torch, on, out):
    first = torch.cuda.current_stream() if on == "default" else torch.cuda.Stream()
    second = torch.cuda.Stream() if on == "another" else first
    with torch.cuda.stream(first):
        a, b = operands(torch)
        given = {"out": torch.full((N, N), torch.nan, device="cuda")} if out else {}
        call = dp.prepare(dp.MatmulRequest(a, b, **given))
        result = call()
        assert found(result) == {N}
    second.wait_stream(first)
    with torch.cuda.stream(second):
        for value in range(2, 12):
            late(torch, a, value)
            assert call() is result
            assert found(result) == {N * value}
    first.wait_stream(second)
    with torch.cuda.stream(first):
        late(torch, b, 3)
        assert found(call()) == {33 * N}
        assert not out or result is given["out"]


def test_other_operands_come_late_too(torch):
    with torch.cuda.stream(torch.cuda.Stream()):
        a, b = operands(torch)
        call = dp.prepare(dp.MatmulRequest(a, b))
        for value in range(2, 8):
            other, target = torch.zeros(N, N, device="cuda"), torch.full((N, N), torch.nan, device="cuda")
            late(torch, other, value)
            assert call(a=other, out=target) is target
            assert found(target) == {N * value}
        assert found(call()) == {N}


def test_each_thread_has_a_stream_of_its_own(torch):
    a, b = operands(torch)
    call = dp.prepare(dp.MatmulRequest(a, b))
    torch.cuda.synchronize()
    wrong = []

    def work(number):
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(12):
                value = 1 + number * 12 + turn
                other, target = torch.zeros(N, N, device="cuda"), torch.full((N, N), torch.nan, device="cuda")
                late(torch, other, value)
                call(a=other, out=target)
                if found(target) != {N * value}:
                    wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_capture_of_torchs_takes_the_call(torch):
    a, b = operands(torch)
    call = dp.prepare(dp.MatmulRequest(a, b))
    result = call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        late(torch, a, 5)
        call()
        twice = result * 2
    a.fill_(0)
    result.fill_(0)
    for _ in range(3):
        graph.replay()
        assert found(twice) == {10 * N}


def test_a_refit_is_in_order_on_any_stream(torch):
    with torch.cuda.stream(torch.cuda.Stream()):
        a, b = operands(torch, "bfloat16")
        call = dp.prepare(dp.MatmulRequest(a, b))
        call()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for value in range(2, 6):
                version, weights = b._version, torch.zeros(N, N, device="cuda", dtype=torch.bfloat16)
                late(torch, weights, value)
                call.refit(weights)
                weights.fill_(torch.nan)
                assert b._version > version
                assert found(b) == {value}
                assert found(call()) == {N * value}


def test_an_operand_of_cupys_comes_late_on_its_own_stream(torch):
    cupy = pytest.importorskip("cupy", reason="operands of CuPy need it")
    (a, _), there = operands(torch), cupy.cuda.Stream(non_blocking=True)
    with there:
        b = cupy.ones((N, N), np.float32)
    with there:
        call = dp.prepare(dp.MatmulRequest(a, b))
    torch.cuda.synchronize()
    for value in range(2, 8):
        with torch.cuda.stream(torch.cuda.ExternalStream(there.ptr)):
            torch.cuda._sleep(LATE)
        with there:
            b.fill(value)
        assert found(call()) == {N * value}
        with there:
            b.fill(0)  # behind the call, which is still to read it


def test_results_are_there_for_the_next_of_torchs_operations(torch):
    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.randn(33, 65, device="cuda", dtype=torch.float16)
        call = dp.prepare(dp.SoftmaxRequest(x))
        for _ in range(20):
            torch.cuda._sleep(LATE // 10)
            x.copy_(torch.randn_like(x))
            right = torch.softmax(x.double(), -1)
            assert float((call().clone().double() - right).abs().max()) < 1e-3


def test_a_call_that_comes_again_on_its_stream_is_no_more_than_a_launch(torch):
    """The quick way is taken, and left where the current stream is another one, or is captured."""
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            a, b = operands(torch)
            call = dp.prepare(dp.MatmulRequest(a, b))
            for _ in range(3):
                result = call()
            assert call._framework_epoch >= 0
            version = result._version
            a.fill_(2)
            assert found(call()) == {2 * N}
            assert result._version > version
        other = torch.cuda.Stream()
        other.wait_stream(stream)
        with torch.cuda.stream(other):
            late(torch, a, 7)
            assert found(call()) == {7 * N}
        stream.wait_stream(other)
