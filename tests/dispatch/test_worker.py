"""Workers: order, ownership and what becomes of requests that are not as others, on the host."""

import gc
import threading
import weakref

import numpy as np
import pytest

import dispatch as dp
from cudabind.errors import CublasLtError, CudaDriverError
from dispatch.device.cuda import OUT_OF_MEMORY
from dispatch.device.stream import current
from dispatch.errors import BadRequest, DeadlineExceeded, NoRow, OutOfMemory, StaleTensor, WorkerFailed
from dispatch.execute.host_executor import HostExecutor
from dispatch.supervise.queue import WorkerQueue

PATIENCE = 120  # seconds, on a machine that has other things to do


class Hold:
    """Keeps a worker busy from `entered` until `release`."""

    def __init__(self) -> None:
        self.entered, self.release = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.release.wait(PATIENCE)


def test_requests_at_one_worker_run_in_their_order(probe):
    ran = []
    with dp.Supervisor("host", streams=1) as sup:
        futures = [sup.submit(probe(lambda i=i: ran.append(i))) for i in range(200)]
        futures += sup.submit_many([probe(lambda i=i: ran.append(i)) for i in range(200, 400)])
        futures[-1].result(PATIENCE)
    assert ran == list(range(400))


def test_each_worker_has_a_thread_and_an_executor_of_its_own(probe):
    def executor() -> object:
        return current.executor, threading.current_thread().name

    with dp.Supervisor("host", streams=3) as sup:
        found = [sup.submit(probe(executor), worker=i).result(PATIENCE) for i in (0, 1, 2, 0)]
    assert len({id(executor) for executor, _ in found}) == 3
    assert found[0][0] is found[3][0]
    assert [name for _, name in found] == [f"dispatch host worker {i}" for i in (0, 1, 2, 0)]
    assert all(executor.closed for executor, _ in found)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dispatch host")]


def test_a_worker_lets_requests_and_results_go(probe):
    alive = []

    def make() -> dp.Future:
        request = probe()
        alive.append(weakref.ref(request))
        return sup.submit(request)

    with dp.Supervisor("host", streams=1) as sup:
        future = make()
        future.result(PATIENCE)
        sup.submit(probe()).result(PATIENCE)  # then the worker has left the one before for good
        assert alive[0]() is None
        gone = weakref.ref(future)
        del future
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize(
    "error", [BadRequest("a", "x", "y"), StaleTensor("gone"), CublasLtError("cublasLt", "cublasLtMatmul", 7)]
)
def test_a_failing_request_fails_alone(probe, error):
    def fail() -> None:
        raise error

    with dp.Supervisor("host", streams=1) as sup:
        before, bad, after = sup.submit_many([probe(lambda: 1), probe(fail), probe(lambda: 2)])
        assert bad.exception(PATIENCE) is error
        assert (before.result(PATIENCE), after.result(PATIENCE)) == (1, 2)
        assert sup.stats().restarts == 0
        assert (sup.stats().done, sup.stats().failed) == (2, 1)


def test_a_failure_does_not_hold_its_future_in_a_cycle(probe):
    def fail() -> None:
        raise BadRequest("a", "x", "y")

    with dp.Supervisor("host", streams=1) as sup:
        future = sup.submit(probe(fail))
        error = future.exception(PATIENCE)
        frames = []
        trace = error.__traceback__
        while trace is not None:
            frames.append(trace.tb_frame.f_code.co_name)
            trace = trace.tb_next
    assert frames[0] == "run"  # of the executor: the worker's own frame, which holds the future, is cut off
    assert frames[-1] == "fail"


def test_no_row_and_what_is_no_request_fail_their_futures(probe):
    a = dp.device("host").array(np.ones((2, 2), np.int32))
    with dp.Supervisor("host", streams=1) as sup:
        with pytest.raises(NoRow):
            sup.submit(dp.MatmulRequest(a, a)).result(PATIENCE)
        for junk in (None, 42, "matmul"):
            with pytest.raises(BadRequest, match=r"expected a dispatch\.Request"):
                sup.submit(junk).result(PATIENCE)
        assert sup.submit(probe(lambda: 3)).result(PATIENCE) == 3
        assert sup.stats().restarts == 0


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemory("full"),
        MemoryError("full"),
        CudaDriverError("cuda", "cuMemAlloc", OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)
def test_out_of_memory_is_tried_again_once_with_caches_freed(probe, error):
    tries = []

    def short(times: int) -> object:
        tries.append(len(current.executor.plans))
        if len(tries) <= times:
            raise error
        return "fits"

    with dp.Supervisor("host", streams=1) as sup:
        assert sup.submit(probe(lambda: short(1))).result(PATIENCE) == "fits"
        assert len(tries) == 2
        tries.clear()
        never = sup.submit(probe(lambda: short(9)))
        with pytest.raises(OutOfMemory, match=r"not have enough memory|full"):
            never.result(PATIENCE)
        assert len(tries) == 2
        assert sup.submit(probe(lambda: 4)).result(PATIENCE) == 4
        assert sup.stats().restarts == 0


def test_a_defect_behind_a_shortage_of_memory_is_still_a_defect(probe):
    raised = [KeyError("defect"), MemoryError()]

    def short() -> None:
        raise raised.pop()

    with dp.Supervisor("host", streams=1) as sup:
        with pytest.raises(WorkerFailed, match="defect"):
            sup.submit(probe(short)).result(PATIENCE)
        assert sup.submit(probe(lambda: 5)).result(PATIENCE) == 5
        assert sup.stats().restarts == 1


def test_a_deadline_that_passed_in_the_queue_keeps_the_request_from_running(probe):
    ran, hold = [], Hold()
    with dp.Supervisor("host", streams=1) as sup:
        sup.submit(probe(hold))
        assert hold.entered.wait(PATIENCE)
        late = sup.submit(probe(lambda: ran.append("late")), timeout=0)
        timely = sup.submit(probe(lambda: ran.append("timely")), timeout=PATIENCE)
        back = sup.submit(probe(lambda: ran.append("cancelled")), timeout=PATIENCE)
        assert back.cancel()
        hold.release.set()
        with pytest.raises(DeadlineExceeded, match="was not run"):
            late.result(PATIENCE)
        timely.result(PATIENCE)
    assert ran == ["timely"]
    assert sup.stats().cancelled == 1


def test_a_request_that_cannot_describe_itself_still_fails_with_its_own_defect(probe):
    class Mute(probe):
        __module__ = probe.__module__

        def describe(self) -> str:
            raise RuntimeError("no words")

    def fail() -> None:
        raise KeyError("the defect")

    with dp.Supervisor("host", streams=1) as sup:
        future = sup.submit(Mute(fail))
        with pytest.raises(WorkerFailed, match=r"Mute whose describe\(\) raised .*the defect") as caught:
            future.result(PATIENCE)
        assert isinstance(caught.value.__cause__, KeyError)


def test_a_wake_up_before_the_rest_is_not_lost_and_a_second_one_does_no_harm():
    queue = WorkerQueue(0, 1)
    queue.wake()
    queue.wake()
    queue.wait(-1)  # would never end if the wake-up were lost
    queue.wait(0)
    assert not queue.asleep


def test_what_is_kept_for_an_executor_goes_as_it_is_closed_the_latest_first_and_once(probe):
    gone: list[str] = []

    def keep() -> None:
        current.executor.at_close.extend(lambda name=name: gone.append(name) for name in ("first", "second"))

    with dp.Supervisor("host", streams=1) as sup:
        sup.submit(probe(keep)).result(PATIENCE)
        assert gone == []
    assert gone == ["second", "first"]


def test_an_executor_that_is_lost_gives_nothing_back():
    executor = HostExecutor(dp.device("host").stream())
    executor.at_close.append(lambda: pytest.fail("a library was called after the device was lost"))
    executor.lose()
    assert executor.closed
