"""Supervisors on the GPU: results over four streams, memory that passes between them, and what a real fault leaves."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import dispatch as dp
from cudabind import driver
from dispatch.core.request import Plan, Request, Signature
from dispatch.errors import BadRequest, OutOfMemory
from dispatch.execute.bound import Bound
from dispatch.keys import F32, Arch

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE = 60
ROOT = Path(__file__).parents[2]
N = 64


def operand(dev: dp.Device, rng: np.random.Generator, *shape: int, dtype: str = "f32") -> dp.Tensor:
    return dev.array(rng.standard_normal(shape), dtype)


def exact(*factors: np.ndarray) -> np.ndarray:
    product = factors[0].astype(np.float64)
    for factor in factors[1:]:
        product = product @ factor.astype(np.float64)
    return product


def close(result: dp.Tensor, expected: np.ndarray, tolerance: float = 1e-5) -> bool:
    """Within a share of the largest element: f32 sums of 64 products differ by some 1e-7 of it, a wrong one by all."""
    return float(np.abs(result.numpy() - expected).max()) <= tolerance * float(np.abs(expected).max())


def test_many_small_products_on_four_streams_are_right(dev, rng):
    pairs = [(operand(dev, rng, N, N), operand(dev, rng, N, N)) for _ in range(40)]
    expected = [exact(a.numpy(), b.numpy()) for a, b in pairs]
    requests = [dp.MatmulRequest(a, b, out=dev.empty((N, N))) for a, b in pairs]
    with dp.Supervisor("cuda:0", streams=4, queue_size=64) as sup:
        for _ in range(5):  # the first run calls the library, the second records it, the others replay
            for request in requests:
                request.out.copy_from(np.full((N, N), np.nan))
            for future, right in zip(sup.submit_many(requests), expected, strict=True):
                assert close(future.result(PATIENCE), right)
        fresh = [sup.submit(dp.MatmulRequest(a, b)) for a, b in pairs]
        for future, right in zip(fresh, expected, strict=True):
            assert close(future.result(PATIENCE), right)
        stats = sup.stats()
    assert (stats.done, stats.failed, stats.restarts) == (240, 0, 0)


def test_lone_requests_are_right_whoever_launches_them(dev, rng, monkeypatch):
    launched: list[int] = []
    launch = Bound.launch
    monkeypatch.setattr(Bound, "launch", lambda bound: launched.append(threading.get_ident()) or launch(bound))
    pairs = [(operand(dev, rng, N, N), operand(dev, rng, N, N)) for _ in range(8)]
    expected = [exact(a.numpy(), b.numpy()) for a, b in pairs]
    requests = [dp.MatmulRequest(a, b, out=dev.empty((N, N))) for a, b in pairs]
    with dp.Supervisor("cuda:0", streams=2) as sup:
        for _ in range(100):  # the plan is learnt meanwhile
            for request, right in zip(requests, expected, strict=True):
                request.out.copy_from(np.full((N, N), np.nan))
                assert close(sup.submit(request).result(PATIENCE), right)
        stats = sup.stats()
    assert (stats.done, stats.failed, stats.restarts) == (800, 0, 0)
    assert set(launched) == {threading.get_ident()}


def test_what_one_worker_made_another_takes(dev, rng):
    chain = [rng.standard_normal((N, N)) / 8 for _ in range(9)]
    tensors = [dev.array(x, "f32") for x in chain]
    with dp.Supervisor("cuda:0", streams=4) as sup:
        product = tensors[0]
        for step, factor in enumerate(tensors[1:]):
            product = sup.submit(dp.MatmulRequest(product, factor), worker=step % 4).result(PATIENCE)
        assert close(product, exact(*chain), 1e-4)
        # The very same memory, written by one stream after the other, and read by all of them.
        shared = dev.empty((N, N))
        for step in range(40):
            a, b = tensors[step % 9], tensors[(step + 1) % 9]
            sup.submit(dp.MatmulRequest(a, b, out=shared), worker=step % 4).result(PATIENCE)
            futures = [sup.submit(dp.MatmulRequest(shared, a), worker=worker) for worker in range(4)]
            right = exact(chain[step % 9], chain[(step + 1) % 9], chain[step % 9])
            assert all(close(future.result(PATIENCE), right, 1e-4) for future in futures)


def test_one_workers_requests_may_depend_on_each_other_without_waiting(dev, rng):
    chain = [rng.standard_normal((N, N)) / 8 for _ in range(9)]
    tensors = [dev.array(x, "f32") for x in chain]
    steps = [dev.empty((N, N)) for _ in chain[1:]]
    befores = [tensors[0], *steps]
    requests = [dp.MatmulRequest(x, y, out=z) for x, y, z in zip(befores, tensors[1:], steps, strict=False)]
    with dp.Supervisor("cuda:0", streams=4) as sup:
        for worker in range(4):
            for step in steps:
                step.copy_from(np.full((N, N), np.nan))
            futures = [sup.submit(request, worker=worker) for request in requests]
            assert close(futures[-1].result(PATIENCE), exact(*chain), 1e-4)


def test_results_are_good_on_any_thread_and_stream_at_once(dev, rng):
    a, b = operand(dev, rng, N, N), operand(dev, rng, N, N)
    right = exact(a.numpy(), b.numpy(), b.numpy())
    found = []

    def use(future: dp.Future) -> None:
        with dev.stream():
            found.append(close(dp.matmul(future.result(PATIENCE), b), right, 1e-4))

    with dp.Supervisor("cuda:0", streams=2) as sup:
        threads = [threading.Thread(target=use, args=(sup.submit(dp.MatmulRequest(a, b)),)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    assert found == [True] * 4


def test_operands_of_another_library_live_until_the_work_is_done(dev, rng):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    b = operand(dev, rng, 2048, 2048)
    source = rng.standard_normal((2048, 2048)).astype(np.float32)
    right = exact(source[:8], b.numpy())
    with dp.Supervisor("cuda:0", streams=1) as sup:
        futures = []
        for _ in range(16):
            taken = torch.from_numpy(source).cuda()
            futures.append(sup.submit(dp.MatmulRequest(dp.from_dlpack(taken), b)))
            del taken  # torch gives the memory to the next tensor as soon as nobody holds it
            torch.full((2048, 2048), float("nan"), device="cuda")
        assert all(close(future.result(PATIENCE)[:8], right, 1e-4) for future in futures)


def test_asyncio_awaits_products(dev, rng):
    a, b = operand(dev, rng, N, N), operand(dev, rng, N, N)

    async def main(sup: dp.Supervisor) -> list[dp.Tensor]:
        return await asyncio.gather(*(sup.submit(dp.MatmulRequest(a, b)) for _ in range(200)))

    with dp.Supervisor("cuda:0") as sup:
        assert all(close(product, exact(a.numpy(), b.numpy())) for product in asyncio.run(main(sup)))


class Greedy(Request):
    """Asks the device for more memory than any has, and counts how often."""

    op = "greedy"

    def __init__(self, dev: dp.Device) -> None:
        self.dev, self.asked = dev, 0

    @property
    def device(self) -> dp.Device:
        return self.dev

    def signature(self) -> Signature:
        return Signature((F32,))

    def key(self) -> tuple[Any, ...]:
        return (self,)

    def arguments(self, outputs: Any) -> tuple[Any, ...]:
        return ()

    def tensors(self) -> Iterator[Any]:
        return iter(())

    def unallocated(self) -> dict[str, Any]:
        return {}

    def result(self, outputs: Any) -> Any:
        return None

    def replace(self, **operands: Any) -> Greedy:
        return self

    def describe(self) -> str:
        return "greedy()"


class GreedyPlan(Plan):
    __slots__ = ("request",)

    def enqueue(self, arguments: tuple[Any, ...]) -> None:
        self.request.asked += 1
        self.request.dev.empty(1 << 46, "u8")


def greedy_plan(request: Greedy, _executor: Any, row: dp.Row) -> Plan:
    plan = GreedyPlan(row, capture_safe=False)
    plan.request = request
    return plan


GREEDY = dp.Row("greedy", (F32,), None, (), Arch(70), None, (), "tests", "greedy", greedy_plan)


def test_a_request_that_does_not_fit_fails_alone_after_a_second_try(dev, rng):
    a, b = operand(dev, rng, N, N), operand(dev, rng, N, N)
    greedy = Greedy(dev)
    dp.register(GREEDY)
    try:
        with dp.Supervisor("cuda:0", streams=1) as sup:
            before, huge, after = sup.submit_many([dp.MatmulRequest(a, b), greedy, dp.MatmulRequest(a, b)])
            with pytest.raises(OutOfMemory, match="MiB are free"):
                huge.result(PATIENCE)
            assert close(before.result(PATIENCE), exact(a.numpy(), b.numpy()))
            assert close(after.result(PATIENCE), exact(a.numpy(), b.numpy()))
            assert sup.stats().restarts == 0
    finally:
        dp.TABLE.unregister(GREEDY)
    assert greedy.asked == 2


def test_operands_on_the_host_are_refused(rng):
    a = operand(dp.device("host"), rng, 2, 2)
    with dp.Supervisor("cuda:0", streams=1) as sup, pytest.raises(BadRequest, match="host"):
        sup.submit(dp.MatmulRequest(a, a)).result(PATIENCE)


def test_workers_do_not_disturb_a_capture_in_the_strictest_mode(dev, rng):
    a, b, out = operand(dev, rng, N, N), operand(dev, rng, N, N), dev.empty((N, N))
    request = dp.MatmulRequest(a, b, out=out)
    stream = dev.stream()
    with dp.Supervisor("cuda:0", streams=2) as sup:
        for worker in (0, 0, 0, 1, 1, 1):
            sup.submit(request, worker=worker).result(PATIENCE)
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        driver.cuStreamBeginCapture(stream.c_handle.value, mode)
        try:
            for worker in (0, 1, 0, 1):
                sup.submit(request, worker=worker).result(PATIENCE)
        finally:
            graph = driver.cuStreamEndCapture(stream.c_handle.value)
        driver.cuGraphDestroy(graph)
    assert close(out, exact(a.numpy(), b.numpy()))


FAULT = """
import ctypes, sys, threading
import numpy as np
import dispatch as dp
from cudabind import driver, nvrtc
from dispatch.keys import F32, Arch
from dispatch.core.request import Plan, Request, Signature

device = dp.device("cuda:0")
source = 'extern "C" __global__ void fault(unsigned long long p) { %s }' % sys.argv[1]
code = nvrtc.compile(source, options=[f"-arch=sm_{int(device.arch)}"]).code


class Fault(Request):
    op = "fault"
    device = device
    def signature(self): return Signature((F32,))
    def key(self): return ()
    def arguments(self, outputs): return (1 << 44,)
    def tensors(self): return iter(())
    def unallocated(self): return {}
    def result(self, outputs): return "no fault"
    def replace(self, **operands): return self
    def describe(self): return "fault()"


class FaultPlan(Plan):
    __slots__ = ("kernel", "executor")
    def enqueue(self, arguments):
        stream = self.executor.stream.c_handle.value
        driver.cuLaunchKernel(self.kernel, 1, 1, 1, 1, 1, 1, 0, stream, (arguments, (ctypes.c_uint64,)), 0)


def fault_plan(request, executor, row):
    plan = FaultPlan(row, capture_safe=False)
    plan.executor, plan.kernel = executor, driver.cuModuleGetFunction(driver.cuModuleLoadData(code), b"fault")
    return plan


dp.register(dp.Row("fault", (F32,), None, (), Arch(70), None, (), "tests", "fault", fault_plan))


def faults(call):
    try:
        call()
    except dp.errors.DeviceFault as error:
        return "child process" in str(error)
    return False


a = device.array(np.eye(64, dtype=np.float32))
product = dp.MatmulRequest(a, a)
with dp.Supervisor(device, streams=4, completion=sys.argv[2]) as sup:
    before = sup.submit_many([dp.MatmulRequest(a, a) for _ in range(20)])
    print(all(np.array_equal(future.result(30).numpy(), np.eye(64)) for future in before))
    guilty, *behind = sup.submit_many([Fault(), *(dp.MatmulRequest(a, a) for _ in range(20))], worker=0)
    print({type(future.exception(30)).__name__ for future in (guilty, *behind)})
    print([faults(call) for call in (
        guilty.result, lambda: sup.submit(product), lambda: sup.submit_many([product]), lambda: dp.run(product),
        lambda: dp.Supervisor(device), lambda: dp.device("cuda:0"), a.numpy, device.synchronize,
    )])
    print(sup.stats().restarts)
print([thread.name for thread in threading.enumerate() if thread.name.startswith("dispatch")])
host = dp.device("host").array(np.eye(3))
print(np.array_equal(dp.matmul(host, host).numpy(), np.eye(3)))
"""


@pytest.mark.parametrize("body", ["*(volatile int*)p = 1;", 'asm("trap;");'], ids=["illegal address", "trap"])
@pytest.mark.parametrize("completion", ["poll", "block", "callback"])
def test_a_fault_is_told_to_every_future_and_every_later_call_and_the_exit_is_clean(body, completion):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FAULT, body, completion],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    told = ["True", "{'DeviceFault'}", str([True] * 8), "0", "[]", "True"]
    assert done.stdout.splitlines() == told, done.stderr
    assert (done.returncode, done.stderr) == (0, "")
