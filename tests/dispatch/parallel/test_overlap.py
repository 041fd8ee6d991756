"""What runs beside what on a GPU: the order of the blocks' calls on their two streams, by a stand-in for the driver.

Nothing is computed. Each call notes what is behind what when it is enqueued, as the stand-in's clocks have it.
"""

import gc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest

import dispatch as dp
from dispatch import parallel
from dispatch.core.communicator import Communicator
from dispatch.core.request import Plan
from dispatch.device.cuda import CudaDevice
from dispatch.execute.cuda_executor import CudaExecutor
from dispatch.parallel import shards


@pytest.fixture(autouse=True)
def _by_nccl(monkeypatch):
    """The copies of test_copies.py have an order of their own."""
    monkeypatch.setattr(shards, "peers_of", lambda *_: None)


class Ranks(Communicator):
    """A rank of some, whose others are not there."""

    library = "nccl"

    def stop(self):
        pass

    def release(self):
        pass

    def split(self, color, key=0):
        raise AssertionError


class Call:
    """A call as it was enqueued: what it is, on which stream, and what is behind it."""

    def __init__(self, op, stream, clock):
        self.op, self.stream, self.behind, self.number = op, stream, dict(clock), clock[stream]

    def waits_for(self, other):
        """Whether it cannot begin before another has ended."""
        return other is not self and self.behind.get(other.stream, 0) >= other.number


class Traced(Plan):
    __slots__ = ("_driver", "_executor", "_log", "_op")
    is_bare = True

    def __init__(self, request, executor, driver, log):
        super().__init__(SimpleNamespace(name=request.op, run_on=()), capture_safe=False)
        self._op, self._executor, self._driver, self._log = request.op, executor, driver, log

    def enqueue(self, arguments):
        handle = self._executor.stream.c_handle.value
        self._driver.step(handle, *(a for a in arguments if isinstance(a, int) and a))
        self._log.append(Call(self._op, self._driver.identity(handle), self._driver.clock(handle)))


@pytest.fixture
def trace(stand_in, monkeypatch):
    """`trace(work, rank, size)`: the calls of `work(comm, device)`, and a last one that stands for what follows."""
    driver, log = stand_in(1), []
    monkeypatch.setattr(CudaExecutor, "bind", lambda self, request: Traced(request, self, driver, log))

    def run(work, rank=0, size=2):
        def on_thread():
            device = CudaDevice(0, 1)
            comm = Ranks(rank, size, device)
            with device.stream() as stream:
                for turn in range(3):  # memory is handed out again, plans and streams are there
                    log.clear()
                    kept = work(comm, device)
                    handle = stream.c_handle.value
                    if turn < 2:
                        kept = None
                log.append(Call("what follows", driver.identity(handle), driver.clock(handle)))
            del kept
            return list(log)

        with ThreadPoolExecutor(1) as pool:
            calls = pool.submit(on_thread).result(60)
        gc.collect()
        assert (driver.early, driver.touched, driver.lost) == ([], [], [])
        return calls

    return run


def of(calls, *ops):
    return [call for call in calls if call.op in ops]


@pytest.mark.parametrize(
    ("block", "collective", "shapes"),
    [
        ("matmul_all_reduce", "all_reduce", ((64, 16), (16, 32))),
        ("matmul_reduce_scatter", "reduce_scatter", ((64, 16), (16, 32))),
    ],
)
def test_a_chunk_goes_round_while_the_next_is_multiplied(trace, block, collective, shapes):
    def work(comm, device):
        a, b = (device.empty(shape) for shape in shapes)
        return getattr(parallel, block)(a, b, comm=comm, chunks=4)

    calls = trace(work)
    products, sums, last = of(calls, "matmul"), of(calls, collective), calls[-1]
    assert (len(products), len(sums)) == (4, 4)
    for number, one in enumerate(sums):
        assert one.waits_for(products[number])
        assert not any(one.waits_for(product) for product in products[number + 1 :])
        assert not any(product.waits_for(one) for product in products)
        assert last.waits_for(one)


def test_a_chunk_is_multiplied_while_the_next_comes(trace):
    def work(comm, device):
        a, b = device.empty((32, 16)), device.empty((16, 24))
        return parallel.all_gather_matmul(a, b, comm=comm, chunks=4)

    calls = trace(work)
    products, gathered = of(calls, "matmul"), of(calls, "all_gather")
    assert (len(products), len(gathered)) == (4, 4)
    for number, product in enumerate(products):
        assert product.waits_for(gathered[number])
        assert not any(product.waits_for(one) for one in gathered[number + 1 :])
        assert not any(one.waits_for(product) for one in gathered)
        assert calls[-1].waits_for(product)


def test_columns_are_put_in_their_place_while_the_next_chunk_comes(trace):
    def work(comm, device):
        a, b = device.empty((32, 16)), device.empty((16, 24))
        return parallel.matmul_all_gather(a, b, comm=comm, chunks=4)

    calls = trace(work)
    products, gathered, placed = of(calls, "matmul"), of(calls, "all_gather"), of(calls, "roll")
    assert (len(products), len(gathered), len(placed)) == (4, 4, 4)
    for number, one in enumerate(gathered):
        assert one.waits_for(products[number])
        assert placed[number].waits_for(one)
        if number < 3:
            assert not products[number + 1].waits_for(one)
            assert not gathered[number + 1].waits_for(placed[number])


def test_a_block_is_attended_to_while_the_next_one_comes_and_memory_is_two_blocks(trace):
    sizes = {}

    def work(comm, device):
        q, k, v = (device.empty((1, 2, 8, 16), "f16") for _ in range(3))
        found = parallel.ring_attention(q, k, v, comm=comm)
        sizes["comm"] = comm.size
        return found

    calls = trace(work, rank=1, size=5)
    attended, moved = of(calls, "sdpa_fwd"), of(calls, "sendrecv")
    assert (len(attended), len(moved)) == (5, 8)
    steps = [moved[2 * n : 2 * n + 2] for n in range(4)]  # K and V of a block
    for number, step in enumerate(steps):
        for one in step:
            assert attended[number + 1].waits_for(one)
            assert not attended[number].waits_for(one), "the block that is attended to does not wait for the next"
            assert not one.waits_for(attended[number]), "nor the other way"
            if number > 1:
                assert one.waits_for(attended[number - 1]), "its memory was that block's"
    assert len(of(calls, "attention_merge")) == 4


def test_causal_attention_leaves_out_what_lies_ahead(trace):
    def work(comm, device):
        q, k, v = (device.empty((1, 2, 8, 16), "f16") for _ in range(3))
        return parallel.ring_attention(q, k, v, comm=comm, causal=True)

    for rank in range(4):
        calls = trace(work, rank=rank, size=4)
        assert len(of(calls, "sdpa_fwd")) == rank + 1
        assert len(of(calls, "sendrecv")) == 6, "every rank passes all blocks on"


def test_a_bucket_goes_round_while_the_next_gradients_are_computed(trace):
    def work(comm, device):
        buckets = parallel.GradientBuckets([(16, 16)] * 4, comm=comm, bucket_bytes=1024)
        a = device.empty((16, 16))
        for _ in range(2):  # two steps over the same memory
            for place in reversed(range(4)):
                dp.matmul(a, a, out=buckets.gradients[place])
                buckets.ready(place)
            buckets.wait()
        return buckets

    calls = trace(work)
    products, sums = of(calls, "matmul"), of(calls, "all_reduce")
    assert (len(products), len(sums)) == (8, 8)
    for number, one in enumerate(sums):
        assert one.waits_for(products[number])
        step = number // 4 * 4
        for other in range(step, step + 4):
            assert not products[other].waits_for(one)
        if step == 0:
            assert all(product.waits_for(one) for product in products[4:]), "its memory is written again"
        assert calls[-1].waits_for(one)


def test_a_stage_computes_while_what_it_made_goes_on(trace):
    def work(comm, device):
        x = device.empty((4, 8))
        w = device.empty((8, 8))
        parallel.one_forward_one_backward(
            lambda _, given: dp.matmul(x if given is None else given, w),
            lambda _, dy: dp.matmul(x if dy is None else dy, w.T),
            4,
            comm=comm,
            activation=x,
        )
        return x, w

    calls = trace(work, rank=0, size=3)
    products, sent, received = of(calls, "matmul"), of(calls, "send"), of(calls, "recv")
    assert (len(products), len(sent), len(received)) == (8, 4, 4)
    assert sent[0].waits_for(products[0])
    assert not products[1].waits_for(sent[0]), "the second micro-batch begins while the first goes on"
    assert all(calls[-1].waits_for(one) for one in sent), "what follows may use the memory again"


BLOCKS = ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul", "matmul_all_gather", "ring_attention")


@pytest.mark.parametrize("block", BLOCKS)
def test_a_callers_graph_takes_both_streams(block, stand_in, monkeypatch):
    driver, log = stand_in(1), []
    monkeypatch.setattr(CudaExecutor, "bind", lambda self, request: Traced(request, self, driver, log))

    def on_thread():
        device = CudaDevice(0, 1)
        comm = Ranks(0, 2, device)
        if block == "ring_attention":
            operands, choices = [device.empty((1, 2, 8, 16), "f16") for _ in range(3)], {}
        else:
            operands, choices = [device.empty((64, 16)), device.empty((16, 32))], {"chunks": 2}
        call = partial(getattr(parallel, block), *operands, comm=comm, **choices)
        with device.stream() as stream:
            call()
            handle, plain = stream.handle, len(log)
            number = driver.begin_capture(handle, 1)
            kept = call()
            assert len(log) == 2 * plain
            assert [found[0] for found in driver.capturing.values()] == [number, number]
            assert driver.end_capture(handle)
            call()
            driver.end_graph(number)
        return kept.__class__

    with ThreadPoolExecutor(1) as pool:
        pool.submit(on_thread).result(60)
    gc.collect()
    assert (driver.early, driver.touched, driver.lost) == ([], [], [])
