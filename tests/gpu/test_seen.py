"""What is seen of a supervisor on the GPU: hooks around a launch, memory in use, faults in a journal run again."""

from __future__ import annotations

import gc
import json
import os

import numpy as np
import pytest

import dispatch as dp
from dispatch.__main__ import main
from dispatch.errors import DeviceFault, HookFailed, TaintedTensor
from dispatch.supervise import status_server as status
from dispatch.supervise import trace
from dispatch.supervise.journal import read

PATIENCE = 60
N = 64


def pair(dev, rng):
    a, b = (rng.standard_normal((N, N)).astype(np.float32) for _ in range(2))
    return dp.MatmulRequest(dev.array(a), dev.array(b), out=dev.zeros((N, N))), a.astype(np.float64) @ b


def close(tensor, expected):
    return float(np.abs(tensor.numpy() - expected).max()) <= 1e-5 * float(np.abs(expected).max())


@pytest.mark.parametrize("point", ["before", "after"])
def test_what_a_hook_raises_fails_its_request_alone(rng, point):
    dev = dp.device("cuda:0")
    work = [pair(dev, rng) for _ in range(50)]
    bad = work[20][0]

    def check(request):
        if request is bad:
            raise OSError("from a hook")

    with dp.Supervisor(dev, streams=2) as sup:
        with trace.add(**{point: check}):
            futures = sup.submit_many([request for request, _ in work])
            for future, (request, right) in zip(futures, work, strict=True):
                if request is bad:
                    with pytest.raises(HookFailed, match=f"{point} enqueueing matmul"):
                        future.result(PATIENCE)
                else:
                    assert close(future.result(PATIENCE), right)
        assert close(sup.submit(bad).result(PATIENCE), work[20][1])
        assert (sup.stats().failed, sup.stats().restarts) == (1, 0)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_memory_in_use_is_counted(isolation):
    with dp.Supervisor("cuda:0", streams=1, isolation=isolation) as sup:
        gc.collect()  # what other tests left is let go before, not meanwhile
        before = sup.stats().bytes_in_use
        held = sup.device.empty((1 << 24,), "u8")
        sup.device.synchronize()
        assert sup.stats().bytes_in_use >= before + (1 << 24)
        assert held.nbytes == 1 << 24
        (facts,) = status.ask(os.getpid())
        assert facts["bytes_in_use"] >= before + (1 << 24)


def test_a_journal_is_run_again_on_the_gpu_and_on_the_host(rng, tmp_path, capsys):
    path = tmp_path / "journal"
    with dp.Supervisor("cuda:0", streams=2, journal=path) as sup:
        work = [pair(sup.device, rng) for _ in range(20)]
        for _ in range(3):
            for future in sup.submit_many([request for request, _ in work]):
                future.result(PATIENCE)
        bad = dp.MatmulRequest(sup.device.zeros((4, 4), "f64"), sup.device.zeros((4, 4), "f32"))
        assert sup.submit(bad).exception(PATIENCE)
    _, lines = read(path)
    assert {line["row"] for line in lines if "define" in line} == {dp.explain(work[0][0]).row.name, None}
    for device in ("cuda:0", "host"):
        assert main(["replay", str(path), "--json", "--device", device]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["requests"], told["ran"], told["on"], told["difference"]) == (61, 61, device, None)


def test_a_journal_of_faults_is_run_again(trouble, tmp_path, capsys):
    path = tmp_path / "journal"
    made = dp.Supervisor(
        "cuda:0", streams=1, isolation="process", setup=("trouble",), max_restarts=100, journal=path
    )  # fmt: skip
    with made as sup:
        dev = sup.device
        guilty = trouble.Trouble("illegal address", dev.array(np.full(4096, 3.0), "f32"), dev.zeros(4096))
        reader = trouble.Trouble("fine", guilty.out, dev.zeros(4096))
        mended = trouble.Trouble("fine", guilty.a, guilty.out)
        wanted = [(guilty, DeviceFault), (reader, TaintedTensor), (mended, type(None)), (reader, type(None))]
        for request, kind in wanted:
            assert isinstance(sup.submit(request).exception(PATIENCE), kind)
    assert main(["replay", str(path), "--setup", "trouble"]) == 0
    assert "4 requests of cuda:0; 4 run again on cuda:0\nno difference in outcome\n" in capsys.readouterr().out
    sup.device.close()
