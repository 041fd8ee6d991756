"""What is loaded once for each GPU, by threads that may wait for theirs."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from dispatch.device.once_per_gpu import OncePerGpu


class Gpu:
    """An object that stands for one."""


def test_each_value_is_made_once_for_each_gpu():
    known, made, gpus = OncePerGpu(), [], (Gpu(), Gpu())
    barrier = threading.Barrier(16)

    def ask(number):
        barrier.wait()
        return known.get(gpus[number % 2], number % 4 // 2, lambda: made.append(number) or number)

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(ask, range(16)))
    assert len(made) == 4
    assert all(found[number] == found[number % 4] for number in range(16))


def test_a_thread_that_waits_for_one_gpu_holds_up_none_of_another():
    known, gpus, began, may_end = OncePerGpu(), (Gpu(), Gpu()), threading.Event(), threading.Event()

    def slow():
        began.set()
        assert may_end.wait(60)
        return "slow"

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(known.get, gpus[0], "kernel", slow)
        assert began.wait(60)
        assert known.get(gpus[1], "kernel", lambda: "quick") == "quick"
        assert not waiting.done()
        may_end.set()
        assert waiting.result() == "slow"


def test_what_failed_is_made_again_and_values_go_with_their_gpu():
    known, gpu = OncePerGpu(), Gpu()
    with pytest.raises(ZeroDivisionError):
        known.get(gpu, "kernel", lambda: 1 / 0)
    gone = weakref.ref(known.get(gpu, "kernel", Gpu))
    assert known.get(gpu, "kernel", Gpu) is gone()
    del gpu
    gc.collect()
    assert gone() is None


def test_a_value_may_ask_for_another_of_its_gpu():
    known, gpu = OncePerGpu(), Gpu()
    assert known.get(gpu, "outer", lambda: known.get(gpu, "inner", lambda: 1) + 1) == 2
