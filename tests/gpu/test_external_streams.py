"""Streams of torch and CuPy that go before the memory used on them does, and processes that end with both.

A kernel of some hundred milliseconds comes first on the other library's stream: whoever frees memory too early, or does
not wait, finds what was written over it meanwhile.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import numpy as np
import pytest

import dispatch as dp
from cudabind import driver

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
