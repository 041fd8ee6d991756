"""Completion: how a GPU's worker learns that a batch has ended, in three ways with one interface.

cuda_worker.py makes one for each worker, passes it every batch, and asks it about the oldest. In all three ways the
status is the driver's own for the event recorded after the batch. This module enqueues nothing except the callback.

For one caller at a time, the time from submit to result of a product of 64^3 on an H200 is 30 to 37 us with "poll", 47
to 57 with "block" and 77 to 84 with "callback" (measured with a host function in Python). They use 1.0, 1.1 and 1.2 CPU
seconds per second; for a product of 5 ms all three use 0.06 to 0.08. So, as "poll" pauses, the others save little.
tests/benchmarks/bench_completion.py measures this.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from cudabind import driver
from dispatch.device.stream import NOT_READY, RELAXED, exchange_mode

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.device.cuda import CudaDevice
    from dispatch.device.stream import Stream
    from dispatch.supervise.batch import Batch
    from dispatch.supervise.queue import WorkerQueue

__all__ = ["COMPLETIONS", "Blocking", "Callback", "Completion", "Polling"]

SECONDS_PER_REQUEST = 2e-6  # seconds; a GPU needs at least this for each request, so a batch is not polled before that
POLLS_BEFORE_PAUSE = 20  # polls before the first pause: about 10 us, as long as a small kernel takes
SHORTEST, LONGEST = 20e-6, 1e-3  # pauses between later polls, in seconds
PAUSE_SHARE = 0.25  # the share of the time waited so far by which a pause may delay a result
PR_SET_TIMERSLACK = 29
TIMER_SLACK_NS = (
    1000  # nanoseconds by which the kernel may prolong such a pause; the default, 50 us, exceeds some pauses
)
CALLBACK_TIMEOUT = (
    0.05  # seconds without a callback after which the event is polled: after a fault there are no callbacks
)


class Completion(Protocol):
    """The interface; all but `close` is called only by the worker's own thread."""

    def event(self) -> ctypes.c_void_p:
        """An event to be recorded after a batch."""

    def recycle(self, event: ctypes.c_void_p) -> None:
        """Take back an event that is complete, or was not recorded."""

    def watch(self, batch: Batch) -> None:
        """A batch is enqueued and its event recorded."""

    def ended(self, batch: Batch) -> bool:
        """Whether the oldest batch has ended without error; raises the error that it ended in."""

    def pause(self, batches: deque[Batch], *, full: bool) -> None:
        """Wait, because nothing has ended and nothing can be enqueued; `full`: there is no room for queued requests."""

    def close(self) -> None:
        """No more batches will come."""


class Polling:
    """The worker polls the event: the fastest for small requests, and the only way without a second thread.

    It polls without pauses at first, then pauses for a share of the time waited so far.
    """

    def __init__(self, device: CudaDevice, queue: WorkerQueue, _stream: Stream) -> None:
        self._device, self._queue = device, queue
        self.event, self.recycle = device.event, device.recycle
        self._polls = 0
        self._since = 0.0
        if sys.platform == "linux":  # for this thread, the worker's
            ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS, 0, 0, 0)

    def watch(self, batch: Batch) -> None:
        self._polls = 0

    def ended(self, batch: Batch) -> bool:
        status = driver.cuEventQuery.unchecked_holding_gil(batch.event)
        if status == NOT_READY:
            return False
        if status:
            self._device.fail(status, "cuEventQuery")
        self._polls = 0
        return True

    def pause(self, batches: deque[Batch], *, full: bool) -> None:
        self._polls += 1
        seconds = 0.0
        if self._polls == 1:
            self._since = time.perf_counter()
            seconds = (
                len(batches[0].futures) * SECONDS_PER_REQUEST
            )  # earlier polling would only take the GIL from other threads
            if seconds > SHORTEST:  # the first requests have run while the last were enqueued
                seconds = max(seconds - (self._since - batches[0].began), SHORTEST)
        elif self._polls >= POLLS_BEFORE_PAUSE:
            seconds = min(max((time.perf_counter() - self._since) * PAUSE_SHARE, SHORTEST), LONGEST)
        if seconds < SHORTEST:
            return
        if full:
            time.sleep(seconds)
        else:
            self._queue.wait(seconds)

    def close(self) -> None:
        """Nothing to end."""


class Blocking:
    """A thread for each worker waits in `cuEventSynchronize`, asleep, and wakes the worker."""

    def __init__(self, device: CudaDevice, queue: WorkerQueue, _stream: Stream) -> None:
        self._device, self._queue = device, queue
        self._events: deque[ctypes.c_void_p] = deque()  # a pool: these events have a flag that the device's lack
        self._batches: SimpleQueue[Batch | None] = SimpleQueue()
        name = f"dispatch {device} waiter {queue.index}"
        self._thread = threading.Thread(target=self._wait, name=name, daemon=True)
        self._thread.start()

    def event(self) -> ctypes.c_void_p:
        if self._events:
            return self._events.pop()
        flags = driver.CUevent_flags
        kind = int(flags.CU_EVENT_BLOCKING_SYNC) | int(flags.CU_EVENT_DISABLE_TIMING)
        return ctypes.c_void_p(int(driver.cuEventCreate(kind)))

    def recycle(self, event: ctypes.c_void_p) -> None:
        self._events.append(event)

    def watch(self, batch: Batch) -> None:
        batch.mark = NOT_READY
        self._batches.put(batch)

    def _wait(self) -> None:
        self._device.activate()
        # While any thread captures in the default mode, others must not even wait for an event; this one may.
        exchange_mode()(ctypes.byref(ctypes.c_int(RELAXED)))
        while True:
            batch = self._batches.get()
            if batch is None:
                return
            batch.mark = driver.cuEventSynchronize.unchecked(batch.event)
            self._queue.wake()

    def ended(self, batch: Batch) -> bool:
        status = batch.mark
        if status == NOT_READY:
            return False
        if status:
            self._device.fail(status, "cuEventSynchronize")
        return True

    def pause(self, batches: deque[Batch], *, full: bool) -> None:
        self._queue.wait_for_wakeup(-1) if full else self._queue.wait(-1)

    def close(self) -> None:
        self._batches.put(None)
        self._thread.join()
        if self._device.fault is None:
            for event in self._events:
                driver.cuEventDestroy(int(event.value or 0))
        self._events.clear()


class Semaphore:
    """A POSIX semaphore to which a host function of the driver posts, without Python and so without the GIL.

    A host function in Python can deadlock the process: it waits for the GIL; the thread that holds the GIL may wait for
    the context; and a copy to pageable memory, which waits for the host function, may hold the context.
    """

    def __init__(self) -> None:
        self._memory = (ctypes.c_char * SEMAPHORE)()
        self.address = ctypes.c_void_p(ctypes.addressof(self._memory))
        libc.sem_init(self.address, 0, 0)

    def wait(self) -> None:
        """Sleep until there is a post; signals end the sleep early."""
        libc.sem_wait(self.address)

    def post(self) -> None:
        libc.sem_post(self.address)


SEMAPHORE = 64  # bytes, more than a sem_t has anywhere
libc = ctypes.CDLL(None, use_errno=True)


class Callback:
    """The driver calls a host function after each batch; it wakes a thread, which wakes the worker.

    A host function gets no status, and none is called after a fault. So the event's status decides, and it is polled
    as well when no callback has come for a while.
    """

    def __init__(self, device: CudaDevice, queue: WorkerQueue, stream: Stream) -> None:
        self._device, self._queue, self._stream = device, queue, stream
        self.event, self.recycle = device.event, device.recycle
        self._semaphore = Semaphore()
        _semaphores.append(self._semaphore)
        self._post = ctypes.cast(libc.sem_post, ctypes.c_void_p)
        self._called = self._sent = 0
        self._must_poll = self._is_closed = False
        name = f"dispatch {device} listener {queue.index}"
        self._thread = threading.Thread(target=self._listen, name=name, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            self._semaphore.wait()
            if self._is_closed:
                return
            self._called += 1  # may count too many after a signal or a late host function: the event decides
            self._queue.wake()

    def watch(self, batch: Batch) -> None:
        self._sent += 1
        batch.mark = self._sent
        status = driver.cuLaunchHostFunc.unchecked(self._stream.c_handle, self._post, self._semaphore.address)
        if status:
            self._device.fail(status, "cuLaunchHostFunc")

    def ended(self, batch: Batch) -> bool:
        if self._called < batch.mark and not self._must_poll:
            return False
        self._must_poll = False
        status = driver.cuEventQuery.unchecked_holding_gil(batch.event)
        if status == NOT_READY:
            return False
        if status:
            self._device.fail(status, "cuEventQuery")
        return True

    def pause(self, batches: deque[Batch], *, full: bool) -> None:
        before = self._called
        self._queue.wait_for_wakeup(CALLBACK_TIMEOUT) if full else self._queue.wait(CALLBACK_TIMEOUT)
        self._must_poll = self._called == before

    def close(self) -> None:
        self._is_closed = True
        self._semaphore.post()
        self._thread.join()


_semaphores: list[Semaphore] = []  # kept until the process ends, because the driver may post late

COMPLETIONS: dict[str, Callable[[CudaDevice, WorkerQueue, Stream], Completion]] = {
    "poll": Polling,
    "block": Blocking,
    "callback": Callback,
}
