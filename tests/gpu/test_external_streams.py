"""Streams of torch and CuPy that go before the memory used on them does, and memory let go of beside captures.

A kernel of some hundred milliseconds comes first on the other library's stream: whoever frees memory too early, or does
not wait, finds what was written over it meanwhile.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import dispatch as dp
from cudabind import driver
from dispatch.errors import BadRequest

CYCLES = 300_000_000  # about a sixth of a second
N = 256
MIB = 1 << 20
ADD = r"""
extern "C" __global__ void spin_then_add(const float* x, float* y, long long n, long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
    for (long long i = threadIdx.x; i < n; i += blockDim.x) y[i] = x[i] + 1;
}
"""


@pytest.fixture
def add(cupy):
    kernel = cupy.RawKernel(ADD, "spin_then_add")

    def enqueue(x, y, cycles=CYCLES):
        kernel((1,), (256,), (x, y, x.size, cycles))

    one = cupy.zeros(1, cupy.float32)
    enqueue(one, one, 1)
    cupy.cuda.Device().synchronize()
    return enqueue


@pytest.fixture
def eye(dev):
    """An identity matrix, after products with it: handles and kernels are there, so that later calls only enqueue."""
    matrix = dev.array(np.eye(N, dtype=np.float32))
    for _ in range(3):
        dp.matmul(matrix, matrix, out=dev.empty((N, N)))
    dev.synchronize()
    return matrix


def full(dev, value):
    return dev.array(np.full((N, N), value, np.float32))


def write_over(dev, count=24):
    """Take what memory has come back, and write to it at once."""
    return [full(dev, -1.0) for _ in range(count)]


def run_in_threads(*works):
    """Run them at the same time; raises what any of them did."""
    with ThreadPoolExecutor(len(works)) as pool:
        for future in [pool.submit(work) for work in works]:
            future.result()


# -- streams that are gone ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("first", ["stream", "memory"])
def test_memory_and_the_stream_it_was_used_on_go_in_any_order(dev, cupy, first):
    kept = []
    for _ in range(50):
        theirs = cupy.cuda.Stream(non_blocking=True)
        with theirs, dp.Stream.from_handle(dev, theirs.ptr):
            x = dp.from_dlpack(cupy.ones((64, 64), cupy.float32))
            kept.append(dp.matmul(x, x))
        if first == "stream":
            theirs.synchronize()
            del theirs, x
            gc.collect()
    if first == "stream":
        assert all((one.numpy() == 64).all() for one in kept), "what is read on our stream needs no handle of theirs"
    kept.clear()
    x = theirs = None
    gc.collect()
    dev.synchronize()
    assert (full(dev, 2.0).numpy() == 2).all()


def test_work_of_ours_on_a_stream_that_is_gone_is_waited_for(dev, cupy, add, eye):
    """The stream is destroyed with work under way: what it has yet to write is read, and written over, after that."""
    for turn in range(3):
        theirs = cupy.cuda.Stream(non_blocking=True)
        with theirs, dp.Stream.from_handle(dev, theirs.ptr):
            source, target = cupy.full((N, N), float(turn), cupy.float32), cupy.zeros((N, N), cupy.float32)
            add(source, target)
            x = dp.from_dlpack(target)
            y = dp.matmul(x, eye)
        del theirs
        gc.collect()
        z = dp.matmul(y, eye)  # on our own stream
        del x, y, target, source
        junk = write_over(dev)
        assert (z.numpy() == turn + 1).all()
        del junk


def test_a_handle_that_means_another_stream_by_now_is_in_order(dev, cupy, add, eye):
    """The driver gives a handle out again once the work of its stream is done, and not always to the next that asks."""
    reused = 0
    for turn in range(12):
        source, target = cupy.full((N, N), float(turn), cupy.float32), cupy.zeros((N, N), cupy.float32)
        cupy.cuda.Device().synchronize()
        one = cupy.cuda.Stream(non_blocking=True)
        handle = one.ptr
        kept = dp.Stream.from_handle(dev, handle)
        with one, kept:
            add(source, target, CYCLES // 3)
            y = dp.matmul(dp.from_dlpack(target), eye)
        del one
        gc.collect()
        others = [cupy.cuda.Stream(non_blocking=True)]
        if turn % 2:
            cupy.cuda.Device().synchronize()
            others += [cupy.cuda.Stream(non_blocking=True) for _ in range(64)]
        other = next((one for one in others if one.ptr == handle), others[0])
        reused += other.ptr == handle
        with other, dp.Stream.from_handle(dev, other.ptr) as named:
            assert (named is kept) == (other.ptr == handle)
            z = dp.matmul(y, eye)  # which is not behind y by their doing
        assert (z.numpy() == turn + 1).all()
    if not reused:
        pytest.skip("the driver has given none of twelve handles out again")


@pytest.mark.parametrize("give", ["from_dlpack", "asarray"])
@pytest.mark.parametrize("goes_first", ["stream", "memory", "both at once"])
def test_memory_lent_to_a_stream_that_goes_is_not_used_again_too_early(dev, cupy, add, give, goes_first):
    results = []
    for turn in range(4):
        ours = full(dev, float(turn))
        theirs = cupy.cuda.Stream(non_blocking=True)
        with theirs:
            borrowed, target = getattr(cupy, give)(ours), cupy.zeros((N, N), cupy.float32)
            add(borrowed, target)
            results.append((turn, target))
        if goes_first == "stream":
            del theirs
            gc.collect()
            del borrowed, ours
        elif goes_first == "memory":
            del borrowed, ours
            gc.collect()
            del theirs
        else:
            holder = [theirs, borrowed, ours]
            del theirs, borrowed, ours
            cleared = threading.Thread(target=holder.clear)
            cleared.start()
            cleared.join()
        junk = write_over(dev)
    cupy.cuda.Device().synchronize()
    for turn, target in results:
        assert (target.get() == turn + 1).all()
    del junk


def test_letting_go_of_lent_memory_waits_for_nobody_on_the_host(dev, cupy, add):
    theirs = cupy.cuda.Stream(non_blocking=True)
    ours = full(dev, 1.0)
    with theirs:
        borrowed, target = cupy.from_dlpack(ours), cupy.zeros((N, N), cupy.float32)
        add(borrowed, target, 10 * CYCLES)
    other = dev.stream()
    with other:
        full(dev, 0.0).numpy()  # an executor that is ready
        del ours, borrowed
        gc.collect()
        full(dev, 3.0)
        assert (full(dev, 2.0).numpy() == 2).all()
    assert not theirs.done, "their kernel runs on"
    theirs.synchronize()
    assert (target.get() == 2).all()


@pytest.mark.alone
def test_memory_that_nobody_can_order_any_more_comes_back_at_last(dev, cupy):
    """Lent to streams that were never named again: it is held, but not without an end."""
    size, rounds = 256 * MIB, 200
    assert size * rounds > 2 * int(driver.cuDeviceTotalMem(dev.handle)) // 8
    start = dev.bytes_in_use()
    most = 0
    for _ in range(rounds):
        cupy.asarray(dev.empty((size,), "u8"))
        most = max(most, dev.bytes_in_use() - start)
    assert most < int(driver.cuDeviceTotalMem(dev.handle)) // 4
    gc.collect()
    dev.synchronize()
    assert dev.bytes_in_use() <= start + size
    dev.trim()


def test_one_handle_is_one_stream_and_its_executors_are_few(dev, cupy):
    theirs = cupy.cuda.Stream(non_blocking=True)
    one = dp.Stream.from_handle(dev, theirs.ptr)
    assert dp.Stream.from_handle(dev, theirs.ptr) is one
    assert dp.Stream.from_handle(dev, 0) is dp.Stream.from_handle(dev, 1)
    x = full(dev, 1.0)
    dev.synchronize()
    before = dev.bytes_in_use()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(64)]
    for stream in streams:
        with dp.Stream.from_handle(dev, stream.ptr):
            dp.matmul(x, x)
    gc.collect()
    dev.synchronize()
    assert dev.bytes_in_use() - before < 32 * 40 * MIB, "an executor has a workspace of 32 MiB"


# -- beside recordings and captures ---------------------------------------------------------------------------------
def test_results_lent_to_torch_are_let_go_of_while_other_threads_record(dev, torch):
    weights = dev.array(np.ones((64, 32), np.float32))

    def work():
        stream = torch.cuda.Stream()
        for i in range(60):
            with torch.cuda.stream(stream):
                x = torch.full((16 + i % 7, 64), float(i), device="cuda")
                result = torch.from_dlpack(dp.matmul(dp.from_dlpack(x), weights)) + 0
            stream.synchronize()
            assert bool((result == 64.0 * i).all())

    run_in_threads(*[work] * 8)


def test_sixty_four_threads_come_and_go_and_lose_no_recording(dev, rng):
    operands = [(rng.standard_normal((64, 64)), rng.standard_normal((64, 48))) for _ in range(4)]
    expected = [a @ b for a, b in operands]

    def work(number):
        a, b = (dev.array(x, "f32") for x in operands[number % 4])
        for turn in range(60):
            out = dp.matmul(a, b)
            if turn % 20 == 19:
                assert np.allclose(out.numpy(), expected[number % 4], atol=1e-3)

    errors = []

    def guarded(number):
        try:
            work(number)
        except BaseException as error:
            errors.append(error)
            raise

    for _ in range(3):
        threads = [threading.Thread(target=guarded, args=(number,)) for number in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors[:2]


def test_recording_goes_on_beside_waits_for_the_device_and_ends_of_threads(dev, rng):
    a = dev.array(rng.standard_normal((64, 64)), "f32")
    right = a.numpy().astype(np.float64) @ a.numpy()
    ended = threading.Event()

    def record():
        for rows in range(1, 60):
            part = a[:rows]
            for _ in range(3):
                out = dp.matmul(part, a)
            assert np.allclose(out.numpy(), right[:rows], atol=1e-3)

    def wait():
        while not ended.is_set():
            dev.synchronize()

    def trim():
        while not ended.is_set():
            dev.trim()

    def come_and_go():
        while not ended.is_set():
            one = threading.Thread(target=lambda: dp.matmul(a, a))
            one.start()
            one.join()

    with ThreadPoolExecutor(3) as others:
        running = [others.submit(work) for work in (wait, trim, come_and_go)]
        try:
            run_in_threads(*[record] * 4)
        finally:
            ended.set()
        for future in running:
            future.result()


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_what_other_threads_do_here_leaves_a_capture_of_torch_alone(dev, torch, mode):
    weights = dev.array(np.ones((64, 64), np.float32))
    side = torch.cuda.Stream()

    def everything(turn):
        x = dev.array(np.full((8 + turn % 5, 64), 1.0, np.float32))
        for _ in range(3):
            y = dp.matmul(x, weights)
        assert (y.numpy() == 64).all()
        lent = torch.from_dlpack(dp.matmul(x, weights))
        del lent, x, y
        zeros = dev.zeros((64, 64))
        zeros.copy_from_async(dev.pinned((64, 64))).result()
        zeros.numpy_async().result()
        dev.bytes_in_use()
        stream = dev.stream()
        with stream:
            dp.softmax(weights)
        stream.close()
        gc.collect()

    everything(0)
    begun, done = threading.Event(), threading.Event()

    def beside():
        begun.wait()
        try:
            for turn in range(20):
                everything(turn)
        finally:
            done.set()

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(beside)
        x = torch.ones(64, device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=side, capture_error_mode=mode):
                y = x + 1
                begun.set()
                done.wait()
                z = y * 2
        finally:
            begun.set()
            other.result()
        x.fill_(4.0)
        graph.replay()
        torch.cuda.synchronize()
        assert bool((z == 10.0).all())
    torch.rand(4, device="cuda")


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_relocated_launches_of_another_thread_leave_a_capture_of_torch_alone(dev, torch, rng, mode):
    """To set a node of an executable graph must not be what ends it: each launch is at addresses of its own."""
    begun, done = threading.Event(), threading.Event()
    products = [[dev.array(rng.standard_normal((64, 64)), "f32") for _ in range(3)] for _ in range(40)]
    attention = [[dev.array(rng.standard_normal((1, 2, 64, 64)), "f16") for _ in range(4)] for _ in range(20)]
    expected = [a.numpy().astype(np.float64) @ b.numpy() for a, b, _ in products]

    def beside():
        with dev.stream():
            executor = dev.executor()
            works = [dp.MatmulRequest(a, b, out=out) for a, b, out in products]
            works += [dp.SdpaFwdRequest(q, k, v, out=out) for q, k, v, out in attention]  # with a memset in front
            plans = {executor.plan(request): request for request in works}
            assert [executor.relocate(plan, request.arguments({})) for plan, request in plans.items()] == ["", ""]
            begun.wait()
            try:
                for _ in range(5):
                    for request in works:
                        dp.run(request)
                assert all(plan.relocation.launches > len(products) for plan in plans)
            finally:
                done.set()
            executor.stream.synchronize()

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(beside)
        x = torch.ones(64, device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode=mode):
                y = x + 1
                begun.set()
                done.wait()
                z = y * 2
        finally:
            begun.set()
            other.result()
    x.fill_(4.0)
    graph.replay()
    torch.cuda.synchronize()
    assert bool((z == 10.0).all())
    assert all(np.allclose(out.numpy(), want, atol=1e-3) for (_, _, out), want in zip(products, expected, strict=True))


def test_a_recording_that_is_lost_is_repeated_and_then_given_up(dev, rng, monkeypatch):
    a, b = dev.array(rng.standard_normal((64, 64)), "f32"), dev.array(rng.standard_normal((64, 64)), "f32")
    right = a.numpy().astype(np.float64) @ b.numpy()
    with dev.stream():
        out = dev.empty((64, 64))
        request = dp.MatmulRequest(a, b, out=out)
        plan = dev.executor().plan(request)
        kind, enqueue, lost = type(plan), type(plan).enqueue, []

        def ended(self, arguments):
            enqueue(self, arguments)
            recording = self._executor.target.value != self._executor.stream.c_handle.value
            if recording and len(lost) < losses:
                lost.append(driver.cuCtxSynchronize.unchecked())  # what another library may do meanwhile

        monkeypatch.setattr(kind, "enqueue", ended)
        executor = dev.executor()
        given_up = "its captures end again and again: by other libraries, or by what it copies"
        for losses, why in ((1000, given_up), (2, ""), (0, "")):  # noqa: B007  # of `ended`
            plan.relocation = plan.launch = None
            lost.clear()
            assert executor.relocate(plan, request.arguments({})) == why
            for _ in range(2):
                out.copy_from(np.full((64, 64), np.nan))
                dp.run(request)
                assert np.allclose(out.numpy(), right, atol=1e-3)
            assert (plan.launch is None) == bool(why)
        call = dp.prepare(request)
        losses = 1000
        lost.clear()
        unrecorded = dp.prepare(request)
        for one in (call, unrecorded):
            out.copy_from(np.full((64, 64), np.nan))
            assert np.allclose(one().numpy(), right, atol=1e-3)


def test_an_error_while_recording_leaves_the_executor_usable(dev, rng, monkeypatch):
    a = dev.array(rng.standard_normal((64, 64)), "f32")
    right = a.numpy().astype(np.float64) @ a.numpy()
    with dev.stream():
        out = dev.empty((64, 64))
        dp.matmul(a, a, out=out)
        executor = dev.executor()
        target = executor.target.value
        plan = executor.plan(dp.MatmulRequest(a, a, out=out))
        for error in (BadRequest("x", "y", "z"), KeyboardInterrupt()):

            def fail(*_, error=error):
                raise error

            with monkeypatch.context() as patch:
                patch.setattr(type(plan), "enqueue", fail)
                with pytest.raises(type(error)):
                    dp.matmul(a, a, out=out)
            assert executor.target.value == target
        for _ in range(200):
            out.copy_from(np.full((64, 64), np.nan))
            assert np.allclose(dp.matmul(a, a, out=out).numpy(), right, atol=1e-3)
        assert plan.launch


# -- the end of the process -----------------------------------------------------------------------------------------
LEAVE = """
import sys, numpy as np, dispatch as dp, {library} as library
dev = dp.device("cuda:0")
ours = [dev.array(np.ones((64, 64), np.float32)) for _ in range(4)]
library.kept = [library.from_dlpack(one) for one in ours]
library.more = [dp.from_dlpack(one + 0) for one in library.kept]
sys.kept = [library.from_dlpack(dp.matmul(a, b)) for a, b in zip(ours, library.more)]
if {cycle}:
    ring = [ours, library.kept, library.more]
    ring.append(ring)
if {thread}:
    import threading
    give = lambda: sys.kept.append(library.from_dlpack(dp.matmul(ours[0], ours[1])))
    other = threading.Thread(target=give)
    other.start()
    other.join()
print("leaving")
"""


@pytest.mark.parametrize("library", ["torch", "cupy"])
@pytest.mark.parametrize(("cycle", "thread"), [(False, False), (True, False), (False, True)])
def test_a_process_ends_well_with_lent_and_borrowed_memory(library, cycle, thread):
    pytest.importorskip(library, reason=f"{library} is not installed")
    code = LEAVE.format(library=library, cycle=cycle, thread=thread)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout.strip()) == (0, "leaving"), ran.stderr
    assert not any(word in ran.stderr for word in ("Traceback", "Exception ignored", "Fatal", "terminate")), ran.stderr
