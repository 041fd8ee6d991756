"""ChildPool: what a child's workers share; and ChildQueue, what each of them has in the place of a queue.

`child_main.py` makes them; the workers and its main thread use them. The pool owns the control connection, on which
the parent tells of memory and the child says that it is ready or lost.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import socket
import sys
import threading
from time import perf_counter
from typing import TYPE_CHECKING, Any

from cudabind.errors import CudaError
from dispatch.errors import DispatchError, OutOfMemory, WorkerFailed, words
from dispatch.supervise.cuda_worker import IN_FLIGHT
from dispatch.supervise.process import messages
from dispatch.supervise.queue import OPEN, WorkerQueue

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor
    from dispatch.supervise.process.child_device import AttachedCuda, AttachedHost
    from dispatch.supervise.process.mailbox import Mailbox
    from dispatch.supervise.process.messages import Connection

__all__ = ["ChildPool", "ChildQueue", "chunk_message"]

LOST = 70  # the exit status of a child whose device is lost; the reason is on the control connection
UNABLE = 71  # and of one that cannot take what it is given; the reason is on stderr
# Seconds for which a worker looks for what comes next before it sleeps, while all others sleep: thrice what one who
# waits for each request takes to have the result and send the next. To be woken takes 15 us and more.
AWAKE = 50e-6
PATIENCE = 20e-6  # seconds for which one who is likely to look for a request's end in the mailbox may not yet do so
RAREST = 6  # it looks before one message in 2 ** 6 where that has found nothing so often in a row
WORDS = 1000  # characters of a reason that is too long for a message


class _Pollfd(ctypes.Structure):
    """The system's `struct pollfd`."""

    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class _Timespec(ctypes.Structure):
    """The system's `struct timespec`."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None)
_libc.ppoll.argtypes = (ctypes.POINTER(_Pollfd), ctypes.c_ulong, ctypes.POINTER(_Timespec), ctypes.c_void_p)


def chunk_message(control: socket.socket) -> tuple[Any, Any, list[int]]:
    """What the parent says next, and the descriptors that come with it; ends the process where the parent is gone."""
    data, fds, flags, _ = socket.recv_fds(control, 1 << 16, 1)
    if not data:
        os._exit(0)
    if flags & socket.MSG_CTRUNC:
        print("this child has no file descriptor left for the memory that it is to map (ulimit -n)", file=sys.stderr)
        os._exit(UNABLE)
    first, second = json.loads(data)
    return first, second, fds


class ChildQueue(WorkerQueue):
    """A worker's place; it sleeps until something comes in, or another thread of the child wakes it."""

    __slots__ = ("_ends", "_misses", "_unheard", "_unlooked", "bell", "link", "untold")

    def __init__(self, index: int, link: Connection) -> None:
        super().__init__(index, IN_FLIGHT)
        self.link = link
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ends = (_Pollfd * 2)(*(_Pollfd(fd, select.POLLIN) for fd in (self.bell, link.socket.fileno())))
        self._misses = self._unlooked = 0  # looks in a row that found nothing, and messages to wait for without any
        self.untold = 0  # the number of a request whose end stands in the mailbox alone
        self._unheard = 0.0  # until when it does so if nobody is seen to look there

    def wake(self) -> None:
        os.eventfd_write(self.bell, 1)

    def wait(self, seconds: float) -> None:
        self._sleep(2, seconds)

    def wait_for_wakeup(self, seconds: float) -> None:
        self._sleep(1, seconds)

    def receive(self, *, wait: bool) -> list[Any] | None:
        """As the connection's, without what was found in the mailbox before."""
        message = self.link.receive(wait=wait)
        mailbox = self.link.mailbox
        if message and mailbox is not None:
            if message[0][0] <= mailbox.taken:
                message = [entry for entry in message if not 0 < entry[0] <= mailbox.taken]
            if message:
                number, first, *names = message[-1]
                mailbox.latest = max(mailbox.latest, number if number > 0 else first + len(names[0]) - 1)
        return message

    def leave_in_mailbox(self, number: int) -> bool:
        """Say there, if the parent looks there, that a request has ended well, where nothing else is in flight.

        It stands there alone until the parent has found it, or is not seen to look: `next_message`, which must be the
        next that is called, then says it over the connection.
        """
        mailbox = self.link.mailbox
        if self._unlooked or mailbox is None or not mailbox.end(number):
            return False
        self.untold = number
        self._unheard = perf_counter() + PATIENCE
        return True

    def next_message(self, others: list[ChildQueue]) -> list[Any]:
        """The next message of the parent's; before it sleeps it looks for one, while all others sleep.

        None but an empty list where it has seen to an end in the mailbox: the worker may have something to do.
        It looks ever more rarely where that is of no use, as where nothing comes so soon, or the parent has the same
        processor: it then runs once this sleeps.
        """
        if self._unlooked:
            self._unlooked -= 1
        else:
            ends = perf_counter() + AWAKE
            had_end = self.untold > 0
            try:
                message = self._look(ends, others)
            finally:
                if self.untold:
                    self._tell()
            if message is not None and perf_counter() < ends:
                self._misses = 0
                return message
            self._misses = min(self._misses + 1, RAREST)
            self._unlooked = 2**self._misses + had_end
            if message is not None or had_end:
                return message or []
        self.asleep = True
        try:
            return self.receive(wait=True) or []
        finally:
            self.asleep = False

    def _look(self, ends: float, others: list[ChildQueue]) -> list[Any] | None:
        mailbox = self.link.mailbox
        while True:
            message = self.receive(wait=False) or None
            if mailbox is not None:
                if message is None:
                    message = self._look_into(mailbox)
                if self.untold:
                    self._see_to_end(mailbox)
            if message is not None or perf_counter() > ends or not all(other.asleep for other in others):
                return message

    def _look_into(self, mailbox: Mailbox) -> list[Any] | None:
        entry = mailbox.request()
        if entry is None:
            return None
        self.untold = 0  # the parent asks here only once it has heard of all ends
        return [entry]

    def _see_to_end(self, mailbox: Mailbox) -> None:
        """Look whether the parent has found the end that stands in the mailbox alone, or is not about to."""
        number = self.untold
        if mailbox.is_heard(number):
            self.untold = 0
        elif not mailbox.is_waited_for(number) and perf_counter() > self._unheard:
            self._tell()

    def _tell(self) -> None:
        number, self.untold = self.untold, 0
        self.link.send([number])

    def _sleep(self, ends: int, seconds: float) -> None:
        """Sleep until something is at the first of so many ends, to the microsecond: select.poll counts whole
        milliseconds, and select.select takes few descriptors."""
        time = None if seconds < 0 else ctypes.byref(_Timespec(int(seconds), int(seconds % 1 * 1e9)))
        if _libc.ppoll(self._ends, ends, time, None) > 0 and self._ends[0].revents:
            os.eventfd_read(self.bell)


class ChildPool:
    """What the child's workers share: the device, and the word to the parent (queue.WorkerOwner)."""

    def __init__(self, device: AttachedHost | AttachedCuda, control: socket.socket, completion: str) -> None:
        self.device = device
        self.state = OPEN
        self.blocked = 0
        self.completion = completion
        self.ordered = False  # whether a worker waits for another, or ever has
        self.launch_lock = threading.Lock()
        self.workers: list[Any] = []
        self._control = control
        self._arrived = threading.Condition()

    def tell(self, *message: Any) -> None:
        """Say something on the control connection; nobody may be there to hear it."""
        try:
            self._control.send(json.dumps(message).encode())
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                raise
            os._exit(0)

    def listen(self) -> None:
        """Map the chunks that the parent makes, and unmap those that it gives back, until it is gone."""
        while True:
            first, second, fds = chunk_message(self._control)
            if first == "drop":
                for number in second:
                    self.device.detach(number)
                for fd in fds:
                    os.close(fd)  # the parent waits for that
                continue
            with self._arrived:
                try:
                    self.device.attach(first, second, fds[0])
                except (OSError, CudaError, DispatchError) as error:
                    self.exit_lost(OutOfMemory(f"a child process cannot map {second / 2**20:,.0f} MiB: {error}"))
                self._arrived.notify_all()

    def tensor(self, place: Any, *layout: Any) -> Tensor:
        """The tensor at a place, once its chunk is mapped: that comes on another connection than requests."""
        if place[0] not in self.device.chunks:
            with self._arrived:
                self._arrived.wait_for(lambda: place[0] in self.device.chunks)
        return self.device.at(place, *layout)

    def exit_lost(self, error: BaseException) -> None:
        """The device is lost, and this process with it: say why, and which requests had begun and not ended."""
        begun = sorted(number for worker in self.workers for number in worker.begun())
        why = words(self.device.fault or error, str)
        try:
            self.tell("lost", why, messages.pack_error(error).hex(), begun)
        except OSError:  # a user's own error may be longer than a message
            self.tell("lost", why[:WORDS], messages.pack_error(WorkerFailed(why[:WORDS])).hex(), begun)
        os._exit(LOST)  # nothing of the driver works any more, and its destructors would hang

    def opened(self, executor: Any, queue: WorkerQueue) -> None:
        """Its owner knows the worker by its connection."""

    def failed(self, *_: Any) -> None:
        """Workers here report for themselves."""

    def launched(self) -> None:
        """A worker has gone on: wake those that may wait for that."""
        for worker in self.workers:
            if worker.is_held:
                worker.queue.wake()

    callbacks_failed = make_room = lost = failed  # nothing of it happens here

    def replace(self, worker: Any, defect: BaseException) -> bool:
        return False

    def reason(self) -> DispatchError:
        return DispatchError("a child's worker has no queue")
