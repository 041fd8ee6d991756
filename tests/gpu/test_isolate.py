"""Process isolation on the GPU: a real fault costs a child and one request, and all other memory stays as it was."""

from __future__ import annotations

import signal
from time import perf_counter

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import DeadlineExceeded, DeviceFault, OutOfMemory, TaintedTensor

PATIENCE = 60
N = 64


@pytest.fixture
def open_supervisor(trouble):
    made = []

    def make(**options):
        many = {"streams": 2, "max_restarts": 100, "max_seconds": 600}
        sup = dp.Supervisor("cuda:0", isolation="process", setup=(trouble.__name__,), **{**many, **options})
        made.append(sup)
        return sup

    yield make
    for sup in made:
        sup.device.close()


def pair(dev, rng):
    a, b = (rng.standard_normal((N, N)).astype(np.float32) for _ in range(2))
    out = dev.array(np.full((N, N), np.nan, np.float32))
    return dp.MatmulRequest(dev.array(a), dev.array(b), out=out), a.astype(np.float64) @ b


def close(tensor, expected):
    """Within a share of the largest element: f32 sums of 64 products differ by some 1e-7 of it, a wrong one by all."""
    return float(np.abs(tensor.numpy() - expected).max()) <= 1e-5 * float(np.abs(expected).max())


def make_trouble(sup, trouble, kind, **fields):
    dev = sup.device
    return trouble.Trouble(kind, dev.array(np.full(4096, 3.0, np.float32)), dev.zeros(4096), **fields)


def child_of(sup):
    return sup._pool._child.process.pid


def test_products_over_shared_memory_are_right(open_supervisor, rng):
    with open_supervisor(streams=4) as sup:
        work = [pair(sup.device, rng) for _ in range(60)]
        for _ in range(4):  # the first run calls the library, the second records it, the others replay
            for request, _ in work:
                request.out.copy_from(np.full((N, N), np.nan))
            for future, (_, right) in zip(sup.submit_many([request for request, _ in work]), work, strict=True):
                assert close(future.result(PATIENCE), right)
        fresh = [sup.submit(dp.MatmulRequest(request.a, request.b)) for request, _ in work]
        for future, (_, right) in zip(fresh, work, strict=True):
            assert close(future.result(PATIENCE), right)
        assert (sup.stats().done, sup.stats().failed, sup.stats().restarts) == (300, 0, 0)


def test_torch_reads_the_shared_memory_without_a_copy(open_supervisor, rng):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with open_supervisor() as sup:
        request, right = pair(sup.device, rng)
        out = sup.submit(request).result(PATIENCE)
        seen = torch.from_dlpack(out)
        assert seen.data_ptr() == out.ptr
        assert np.allclose(seen.cpu().numpy(), right, atol=1e-3)
        seen.fill_(2.0)
        torch.cuda.synchronize()
        assert (out.numpy() == 2.0).all()


@pytest.mark.parametrize("spare", [False, True], ids=["cold", "spare"])
@pytest.mark.parametrize("kind", ["illegal address", "misaligned", "trap", "assert"])
def test_a_fault_costs_one_request(open_supervisor, trouble, rng, kind, spare):
    with open_supervisor(streams=4, spare=spare) as sup:
        work = [pair(sup.device, rng) for _ in range(100)]
        untouched = sup.device.array(rng.standard_normal(1 << 20), "f32")
        before = untouched.numpy().copy()
        requests = [request for request, _ in work]
        for future in sup.submit_many(requests):
            future.result(PATIENCE)
        for request in requests:
            request.out.copy_from(np.full((N, N), np.nan))
        guilty = make_trouble(sup, trouble, kind)
        started = perf_counter()
        futures = sup.submit_many([*requests[:50], guilty, *requests[50:]])
        error = futures.pop(50).exception(PATIENCE)
        print(f"{kind}: {perf_counter() - started:.3f} s to the verdict; {error}")
        assert isinstance(error, DeviceFault)
        assert f"trouble({kind})" in str(error)
        for future, (_, right) in zip(futures, work, strict=True):
            assert close(future.result(PATIENCE), right)
        with pytest.raises(TaintedTensor):
            guilty.out.numpy()
        assert np.array_equal(untouched.numpy(), before)
        assert (guilty.a.numpy() == 3.0).all()
        guilty.out.copy_from(np.zeros(4096, np.float32))
        assert sup.submit(make_trouble(sup, trouble, "fine")).result(PATIENCE).numpy()[0] == 3.0


@pytest.mark.parametrize("kind", ["illegal address", "trap"])
def test_a_fault_beside_the_first_requests_of_a_child_is_not_theirs(open_supervisor, trouble, rng, kind):
    """The other workers' libraries are opened while the context ends under them, and say what they like of it."""
    with open_supervisor(streams=4, max_restarts=100) as sup:
        work = [pair(sup.device, rng) for _ in range(12)]
        for _ in range(4):  # each finds a child that has run nothing
            guilty = make_trouble(sup, trouble, kind)
            futures = sup.submit_many([guilty, *(request for request, _ in work)])
            assert isinstance(futures.pop(0).exception(PATIENCE), DeviceFault)
            for future, (_, right) in zip(futures, work, strict=True):
                assert close(future.result(PATIENCE), right)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=lambda s: s.name)
def test_a_child_that_is_killed_or_stopped_costs_no_request(open_supervisor, trouble, rng, sent, tmp_path):
    with open_supervisor() as sup:
        work = [pair(sup.device, rng) for _ in range(200)]
        hold = trouble.Hold(tmp_path)
        held = make_trouble(sup, trouble, "held", once=hold.once)
        futures = sup.submit_many([held, *(request for request, _ in work)])
        hold.release_behind(child_of(sup), sent, PATIENCE)
        for future, (_, right) in zip(futures[1:], work, strict=True):
            assert close(future.result(PATIENCE), right)
        assert (futures[0].result(PATIENCE).numpy() == 3.0).all()


def test_a_kernel_without_an_end_is_ended_at_its_deadline(open_supervisor, trouble, rng):
    with open_supervisor() as sup:
        work = [pair(sup.device, rng) for _ in range(20)]
        hung = sup.submit(make_trouble(sup, trouble, "hang"), timeout=1.0, worker=0)
        futures = [sup.submit(request, worker=index % 2) for index, (request, _) in enumerate(work)]
        with pytest.raises(DeadlineExceeded):
            hung.result(PATIENCE)
        for future, (_, right) in zip(futures, work, strict=True):
            assert close(future.result(PATIENCE), right)


@pytest.mark.alone
def test_memory_is_given_back(open_supervisor, rng):
    from cudabind import driver

    with open_supervisor(streams=1) as sup:
        request, right = pair(sup.device, rng)
        sup.submit(request).result(PATIENCE)
        free = driver.cuMemGetInfo()[0]
        large = sup.device.empty((1 << 28,), "u8")
        assert free - driver.cuMemGetInfo()[0] >= 1 << 28
        with pytest.raises(OutOfMemory):
            sup.device.empty((1 << 46,), "u8")
        del large
        sup.device.trim()  # the child, and the one that stands by, let go of it too
        assert free - driver.cuMemGetInfo()[0] < 1 << 28
        assert close(sup.submit(request).result(PATIENCE), right)
    sup.device.close()
    assert driver.cuMemGetInfo()[0] >= free
