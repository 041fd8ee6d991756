"""Two GPUs in one process: a request runs on the GPU of its operands, and the current context stays what it is.

The tests of one GPU find nothing of what may be missing here, for there the right context is always the current one.
"""

from __future__ import annotations

import numpy as np
import pytest

import dispatch as dp
from cudabind import driver
from dispatch.errors import BadRequest, DeviceFault, NoRow
from dispatch.execute import installed
from dispatch.keys import HOST
from dispatch.row_check import cases_of

PATIENCE = 60
N = 96
OPS = sorted(
    {row.op for row in dp.TABLE if row.min_arch != HOST and row.op != "cudnn_graph"}
)  # a graph's cases are drawn
TOLERANCE = 1e-5  # of the largest element: f32 sums of 96 products differ by some 1e-7 of it


def choose(dev):
    """What `torch.cuda.set_device` does."""
    driver.cuCtxSetCurrent(dev.context.handle)


def chosen():
    return int(driver.cuCtxGetDevice())


@pytest.fixture
def first():
    """The first GPU, whose context is the current one from here to the end."""
    if int(driver.cuDeviceGetCount()) < 2:
        pytest.skip("needs two GPUs")
    dev = dp.device("cuda:0")
    choose(dev)
    yield dev
    assert chosen() == 0


@pytest.fixture
def second(first):
    dev = dp.device("cuda:1")
    assert chosen() == first.ordinal
    return dev


def product(dev, rng):
    a, b = (rng.standard_normal((N, N)).astype(np.float32) for _ in range(2))
    out = dev.array(np.full((N, N), np.nan, np.float32))
    return dp.MatmulRequest(dev.array(a), dev.array(b), out=out), a.astype(np.float64) @ b


def is_close(tensor, expected):
    return float(np.abs(tensor.numpy() - expected).max()) <= TOLERANCE * float(np.abs(expected).max())


def poison(request):
    request.out.copy_from(np.full((N, N), np.nan))


@pytest.mark.parametrize("way", ["matmul", "run", "bound call"])
def test_calls_in_turns(first, second, rng, way):
    work = [product(dev, rng) for dev in (first, second)]
    if way == "matmul":
        calls = [lambda r=request: dp.matmul(r.a, r.b, out=r.out) for request, _ in work]
    elif way == "run":
        calls = [lambda r=request: dp.run(r) for request, _ in work]
    else:
        calls = [dp.prepare(request) for request, _ in work]
    for _ in range(4):  # the library is called, its call recorded, then replayed
        for dev, call, (request, right) in zip((first, second), calls, work, strict=True):
            for current in (first, second):
                poison(request)
                choose(current)
                out = call()
                assert out.device is dev
                assert is_close(out, right)
                assert chosen() == current.ordinal
    choose(first)


@pytest.mark.parametrize("op", OPS)
def test_each_op_runs_on_the_second(second, rng, op):
    for row in dp.TABLE.of(op):
        if not row.on(second.arch):
            continue
        for case in cases_of(row):
            check = case.check(second, rng)
            try:
                call = dp.prepare(check.request)
            except NoRow:
                continue  # one that the row, or the library, refuses: the next
            check.verify(call())
            again = case.check(second, rng)
            again.verify(dp.run(again.request))
            return
    pytest.skip(f"no row of {op} runs on {second.arch}")


def test_relocated_calls_on_the_second(second, rng):
    """Learnt and launched at other addresses while the first GPU's context is the current one; one with a memset."""
    products = [product(second, rng) for _ in range(20)]
    heads = [[second.array(rng.standard_normal((1, 2, 64, 64)), "f16") for _ in range(4)] for _ in range(20)]
    attention = [dp.SdpaFwdRequest(q, k, v, out=out) for q, k, v, out in heads]
    executor = second.executor()
    right = []
    for request in attention:
        executor.call(executor.plan(request), request.arguments({}))
        right.append(request.out.numpy())
        request.out.copy_from(np.full(request.out.shape, np.nan))
    works = [*(request for request, _ in products), *attention]
    plans = {executor.plan(request): request for request in works}
    assert [executor.relocate(plan, request.arguments({})) for plan, request in plans.items()] == ["", ""]
    for _ in range(2):
        for request in works:
            dp.run(request)
    assert all(plan.relocation.launches >= len(attention) for plan in plans)
    assert all(is_close(request.out, expected) for request, expected in products)
    for request, expected in zip(attention, right, strict=True):
        np.testing.assert_array_equal(request.out.numpy(), expected)
    assert chosen() == 0


def test_memory(first, second, rng):
    values = rng.standard_normal((N, N)).astype(np.float32)
    for dev in (second, first, second):
        zeros, taken = dev.zeros((N, N)), dev.array(values)
        assert not zeros.numpy().any()
        assert np.array_equal(taken.T.numpy(), values.T)
        assert np.array_equal(taken[::2, 1:].numpy(), values[::2, 1:])
        pinned = dev.pinned((N, N))
        pinned[...] = values
        assert np.array_equal(zeros.copy_from_async(pinned).result().numpy_async().result(), values)
        held = dev.bytes_in_use()
        del zeros, taken
        dev.synchronize()
        assert dev.bytes_in_use() < held
    there = second.array(first.array(values))  # from one to the other
    assert there.device is second
    assert np.array_equal(there.numpy(), values)


def test_operands_on_both_are_refused(first, second, rng):
    a, b = first.array(rng.standard_normal((N, N))), second.array(rng.standard_normal((N, N)))
    with pytest.raises(BadRequest, match=r"cuda:1.*cuda:0|cuda:0.*cuda:1"):
        dp.matmul(a, b)
    right = first.array(rng.standard_normal((N, N)))
    with pytest.raises(BadRequest, match=r"cuda:1.*cuda:0|cuda:0.*cuda:1"):
        dp.matmul(a, right, out=b)


def test_a_product_is_tuned_on_the_second(second, rng, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDABIND_CACHE", str(tmp_path))
    installed.algorithms.cache_clear()
    request, right = product(second, rng)
    try:
        assert is_close(dp.run(request.replace(autotune=True, library="cublasLt")), right)
    finally:
        installed.algorithms.cache_clear()


def test_weights_are_refitted_on_the_second(second, rng):
    request, _ = product(second, rng)
    call = dp.prepare(request)
    weights = rng.standard_normal((N, N)).astype(np.float32)
    call.refit(weights)
    assert is_close(call(), request.a.numpy().astype(np.float64) @ weights)
    call.refit(second.array(weights[::-1].copy()))
    assert is_close(call(), request.a.numpy().astype(np.float64) @ weights[::-1])


def test_torch_shares_memory_of_the_second_and_keeps_its_own_choice(second, rng):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    torch.cuda.set_device(0)
    a, b = (torch.from_numpy(rng.standard_normal((N, N))).to("cuda:1") for _ in range(2))
    for _ in range(3):
        a.add_(1.0)  # the product must wait for it
        out = dp.matmul(dp.from_dlpack(a), dp.from_dlpack(b))
        assert out.device is second
        assert torch.cuda.current_device() == 0
        torch.testing.assert_close(torch.from_dlpack(out), a @ b)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_supervisor_on_each(first, second, rng, isolation):
    with (
        dp.Supervisor(first, streams=2, isolation=isolation) as here,
        dp.Supervisor(second, streams=2, isolation=isolation) as there,
    ):
        work = [(sup, *product(sup.device, rng)) for sup in (here, there) for _ in range(40)]
        for _ in range(3):
            for _, request, _ in work:
                poison(request)
            futures = [sup.submit(request) for sup, request, _ in work]
            for future, (sup, _, right) in zip(futures, work, strict=True):
                out = future.result(PATIENCE)
                assert out.device is sup.device
                assert is_close(out, right)
    assert [sup.device.name for sup in (here, there)] == ["cuda:0", "cuda:1"]
    if isolation == "process":
        for sup in (here, there):
            sup.device.close()


def test_a_fault_on_the_second_costs_nothing_on_the_first(first, trouble, rng):
    request, right = product(first, rng)
    with dp.Supervisor("cuda:1", streams=2, isolation="process", setup=("trouble",)) as sup:
        kept, kept_right = product(sup.device, rng)
        guilty = trouble.Trouble("illegal address", sup.device.zeros(64), sup.device.zeros(64))
        assert isinstance(sup.submit(guilty).exception(PATIENCE), DeviceFault)
        assert is_close(dp.run(request), right)
        assert is_close(sup.submit(kept).result(PATIENCE), kept_right)
    sup.device.close()


def test_the_second_is_closed_and_made_anew(second, rng):
    request, right = product(second, rng)
    assert is_close(dp.run(request), right)
    second.close()
    again, right = product(dp.device("cuda:1"), rng)
    for _ in range(3):
        assert is_close(dp.run(again), right)
