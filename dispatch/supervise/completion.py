"""Completion: how a GPU's worker learns that its stream has passed an event. Three ways behind one interface.

cuda_worker.py makes one for each worker, shows it every batch, and asks it for the oldest. Whatever announces an end,
the status is the driver's own for the event behind the work. This module enqueues nothing but the announcement.

From submit to result one caller at a time waits, on an H200, 30 to 37 us by "poll", 47 to 57 by "block" and 77 to 84 by
"callback" for a product of 64^3, with 1.0, 1.1 and 1.2 CPU seconds per second; for one of 5 ms all take 0.06 to 0.08.
So the pauses of "poll" leave little to be saved by the others. tests/benchmarks/bench_completion.py repeats it.
"""

from __future__ import annotations

import ctypes
import itertools
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

QUICKEST = 2e-6  # seconds; a GPU ends no request in less, so a batch is not looked at before that time for each
LOOKS = 20  # at an event, before the first pause: about 10 us, as long as a small kernel takes
SHORTEST, LONGEST = 20e-6, 1e-3  # pauses between later looks, in seconds
SHARE = 0.25  # of the time waited so far: a pause delays a result by that much at most
PR_SET_TIMERSLACK = 29
PUNCTUAL = 1000  # nanoseconds by which the system may end such a pause late; else it is 50 us, more than some last
SILENCE = 0.05  # seconds without a callback, after which the event is looked at: after a fault there are no callbacks


class Completion(Protocol):
    """What a worker needs of it; all but `close` is called by the worker's own thread alone."""

    def event(self) -> ctypes.c_void_p:
        """An event to be recorded behind a batch."""

    def recycle(self, event: ctypes.c_void_p) -> None:
        """Take an event back that is complete, or was not recorded."""

    def watch(self, batch: Batch) -> None:
        """A batch is enqueued and its event recorded."""

    def ended(self, batch: Batch) -> bool:
        """Whether the oldest batch has ended well; raises what it ended in."""

    def pause(self, batches: deque[Batch], *, full: bool) -> None:
        """Nothing has ended and nothing can be enqueued; `full`: whatever is queued, there is no room for it."""

    def close(self) -> None:
        """No more batches will come."""


class Polling:
    """The worker looks at the event: the quickest for small requests, and the only one without a second thread.

    A worker that waits looks without a pause at first, and then for a share of the time waited so far.
    """

    def __init__(self, device: CudaDevice, queue: WorkerQueue, _stream: Stream) -> None:
        self._device, self._queue = device, queue
        self.event, self.recycle = device.event, device.recycle
        self._looks = 0
        self._since = 0.0
        if sys.platform == "linux":  # for this thread, the worker's
            ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, PUNCTUAL, 0, 0, 0)

    def watch(self, batch: Batch) -> None:
        self._looks = 0

    def ended(self, batch: Batch) -> bool:
        status = driver.cuEventQuery.unchecked_holding_gil(batch.event)
        if status == NOT_READY:
            return False
        if status:
            self._device.fail(status, "cuEventQuery")
        self._looks = 0
        return True

    def pause(self, batches: deque[Batch], *, full: bool) -> None:
        self._looks += 1
        seconds = 0.0
        if self._looks == 1:
            self._since = time.perf_counter()
            seconds = len(batches[0].futures) * QUICKEST  # a look before that only takes the lock from others
            if seconds > SHORTEST:  # the first have run while the last were enqueued
                seconds = max(seconds - (self._since - batches[0].began), SHORTEST)
        elif self._looks >= LOOKS:
            seconds = min(max((time.perf_counter() - self._since) * SHARE, SHORTEST), LONGEST)
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
        self._events: deque[ctypes.c_void_p] = deque()  # of their own kind
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
        # While a thread captures in the default mode, others may not even wait for an event; this one may.
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


class Callback:
    """The driver calls a host function behind each batch, which wakes the worker.

    A host function is not told of errors, and none is called after a fault: so it is the event that says what the batch
    ended in, and it is also looked at when nothing was heard for a while.
    """

    def __init__(self, device: CudaDevice, queue: WorkerQueue, stream: Stream) -> None:
        self._device, self._queue, self._stream = device, queue, stream
        self.event, self.recycle = device.event, device.recycle
        self._number = ctypes.c_void_p(next(_numbers))
        self._called = self._sent = 0
        self._in_doubt = False
        _listeners[self._number.value or 0] = self._hear

    def _hear(self) -> None:
        self._called += 1
        self._queue.wake()

    def watch(self, batch: Batch) -> None:
        self._sent += 1
        batch.mark = self._sent
        status = driver.cuLaunchHostFunc.unchecked(self._stream.c_handle, _announce, self._number)
        if status:
            self._device.fail(status, "cuLaunchHostFunc")

    def ended(self, batch: Batch) -> bool:
        if self._called < batch.mark and not self._in_doubt:
            return False
        self._in_doubt = False
        status = driver.cuEventQuery.unchecked_holding_gil(batch.event)
        if status == NOT_READY:
            return False
        if status:
            self._device.fail(status, "cuEventQuery")
        return True

    def pause(self, batches: deque[Batch], *, full: bool) -> None:
        before = self._called
        self._queue.wait_for_wakeup(SILENCE) if full else self._queue.wait(SILENCE)
        self._in_doubt = self._called == before

    def close(self) -> None:
        del _listeners[self._number.value or 0]


_numbers = itertools.count(1)
_listeners: dict[int, Callable[[], None]] = {}


def _call(number: int) -> None:
    hear = _listeners.get(number)
    if hear is not None:
        hear()


# What the driver calls, on a thread of its own; it lives as long as the process, for the driver may be late.
_announce = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_call)

COMPLETIONS: dict[str, Callable[[CudaDevice, WorkerQueue, Stream], Completion]] = {
    "poll": Polling,
    "block": Blocking,
    "callback": Callback,
}
