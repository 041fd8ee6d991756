"""ChildPool: the state that a child's workers share; ChildQueue: the end of a worker's connection, as its queue.

`child_main.py` makes them; the workers and the main thread use them. The pool owns the control connection, on which the
parent announces chunks of memory, and the child reports that it is ready or lost.
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
from dispatch.errors import DispatchError, OutOfMemory, WorkerFailed, error_text
from dispatch.supervise.cuda_worker import IN_FLIGHT
from dispatch.supervise.process import messages
from dispatch.supervise.queue import OPEN, WorkerQueue

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor
    from dispatch.supervise.process.child_device import AttachedCuda, AttachedHost
    from dispatch.supervise.process.mailbox import Mailbox
    from dispatch.supervise.process.messages import Connection

__all__ = ["ChildPool", "ChildQueue", "chunk_message"]

EXIT_LOST = 70  # the exit status of a child whose device is lost; the reason was sent on the control connection
EXIT_NO_DESCRIPTORS = 71  # and of one that is out of descriptors; the reason is on stderr
# Seconds for which a worker polls for the next message before it sleeps, while all others sleep: three times what a
# caller that waits for each request takes to get a result and send the next. Being woken takes 15 us or more.
POLL_SECONDS = 50e-6
CONFIRM_SECONDS = 20e-6  # seconds within which a parent that will likely read the mailbox must begin reading it
MAX_BACKOFF = 6  # after so many misses in a row, it polls only before one message in 2 ** 6
MAX_REASON_CHARS = 1000  # characters of a reason that is too long for a message


class _Pollfd(ctypes.Structure):
    """The system's `struct pollfd`."""

    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class _Timespec(ctypes.Structure):
    """The system's `struct timespec`."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None)
_libc.ppoll.argtypes = (ctypes.POINTER(_Pollfd), ctypes.c_ulong, ctypes.POINTER(_Timespec), ctypes.c_void_p)


def chunk_message(control: socket.socket) -> tuple[Any, Any, list[int]]:
    """The parent's next message, with the descriptors sent along; exits the process if the parent has ended."""
    data, fds, flags, _ = socket.recv_fds(control, 1 << 16, 1)
    if not data:
        os._exit(0)
    if flags & socket.MSG_CTRUNC:
        print(
            "this child process has no free file descriptor for memory that it must map (raise ulimit -n)",
            file=sys.stderr,
        )
        os._exit(EXIT_NO_DESCRIPTORS)
    first, second = json.loads(data)
    return first, second, fds


class ChildQueue(WorkerQueue):
    """A worker's queue in the child; a worker sleeps until a message arrives or another thread wakes it."""

    __slots__ = ("_confirm_by", "_misses", "_pollfds", "_skips_left", "link", "unconfirmed", "wake_fd")

    def __init__(self, index: int, link: Connection) -> None:
        super().__init__(index, IN_FLIGHT)
        self.link = link
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pollfds = (_Pollfd * 2)(*(_Pollfd(fd, select.POLLIN) for fd in (self.wake_fd, link.socket.fileno())))
        self._misses = self._skips_left = 0  # polls in a row without success; messages to wait for without polling
        self.unconfirmed = 0  # the number of a request whose end is announced in the mailbox only
        self._confirm_by = 0.0  # until then no message is needed, even if the parent is not seen reading the mailbox

    def wake(self) -> None:
        os.eventfd_write(self.wake_fd, 1)

    def wait(self, seconds: float) -> None:
        self._sleep(2, seconds)

    def wait_for_wakeup(self, seconds: float) -> None:
        self._sleep(1, seconds)

    def receive(self, *, wait: bool) -> list[Any] | None:
        """The connection's next message, without requests that were taken from the mailbox before."""
        message = self.link.receive(wait=wait)
        mailbox = self.link.mailbox
        if message and mailbox is not None:
            if message[0][0] <= mailbox.taken:
                message = [entry for entry in message if not 0 < entry[0] <= mailbox.taken]
            if message:
                number, first, *names = message[-1]
                mailbox.latest = max(mailbox.latest, number if number > 0 else first + len(names[0]) - 1)
        return message

    def announce_end(self, number: int) -> bool:
        """Announce in the mailbox that a request has succeeded, if nothing else is in flight and the parent reads it.

        If the parent does not confirm it, `next_message`, which must be called next, sends it over the connection.
        """
        mailbox = self.link.mailbox
        if self._skips_left or mailbox is None or not mailbox.announce_end(number):
            return False
        self.unconfirmed = number
        self._confirm_by = perf_counter() + CONFIRM_SECONDS
        return True

    def next_message(self, others: list[ChildQueue]) -> list[Any]:
        """The parent's next message; polls for it before sleeping, while all other workers sleep.

        Returns an empty list after an end was announced in the mailbox, because the worker may have other work. After
        misses it polls more and more rarely: requests may come slowly, or the parent may share this CPU, and then runs
        only once this thread sleeps.
        """
        if self._skips_left:
            self._skips_left -= 1
        else:
            ends = perf_counter() + POLL_SECONDS
            had_end = self.unconfirmed > 0
            try:
                message = self._poll(ends, others)
            finally:
                if self.unconfirmed:
                    self._send_unconfirmed()
            if message is not None and perf_counter() < ends:
                self._misses = 0
                return message
            self._misses = min(self._misses + 1, MAX_BACKOFF)
            self._skips_left = 2**self._misses + had_end
            if message is not None or had_end:
                return message or []
        self.asleep = True
        try:
            return self.receive(wait=True) or []
        finally:
            self.asleep = False

    def _poll(self, ends: float, others: list[ChildQueue]) -> list[Any] | None:
        mailbox = self.link.mailbox
        while True:
            message = self.receive(wait=False) or None
            if mailbox is not None:
                if message is None:
                    message = self._poll_mailbox(mailbox)
                if self.unconfirmed:
                    self._check_confirmed(mailbox)
            if message is not None or perf_counter() > ends or not all(other.asleep for other in others):
                return message

    def _poll_mailbox(self, mailbox: Mailbox) -> list[Any] | None:
        entry = mailbox.request()
        if entry is None:
            return None
        self.unconfirmed = 0  # the parent announces a request only after all others have ended
        return [entry]

    def _check_confirmed(self, mailbox: Mailbox) -> None:
        """Check whether the parent has seen the end in the mailbox; if it does not read it, send it as a message."""
        number = self.unconfirmed
        if mailbox.is_confirmed(number):
            self.unconfirmed = 0
        elif not mailbox.is_waited_for(number) and perf_counter() > self._confirm_by:
            self._send_unconfirmed()

    def _send_unconfirmed(self) -> None:
        number, self.unconfirmed = self.unconfirmed, 0
        self.link.send([number])

    def _sleep(self, ends: int, seconds: float) -> None:
        """Sleep until one of the first `ends` descriptors is readable, with microsecond resolution.

        select.poll has a resolution of milliseconds, and select.select supports few descriptors.
        """
        time = None if seconds < 0 else ctypes.byref(_Timespec(int(seconds), int(seconds % 1 * 1e9)))
        if _libc.ppoll(self._pollfds, ends, time, None) > 0 and self._pollfds[0].revents:
            os.eventfd_read(self.wake_fd)


class ChildPool:
    """The state that the child's workers share: the device and the control connection (a queue.WorkerOwner)."""

    def __init__(self, device: AttachedHost | AttachedCuda, control: socket.socket, completion: str) -> None:
        self.device = device
        self.state = OPEN
        self.blocked = 0
        self.completion = completion
        self.ordered = False  # whether a request has ever depended on another worker's
        self.launch_lock = threading.Lock()
        self.workers: list[Any] = []
        self._control = control
        self._chunks_changed = threading.Condition()

    def send_control(self, *message: Any) -> None:
        """Send a message on the control connection; exits if the parent has ended."""
        try:
            self._control.send(json.dumps(message).encode())
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                raise
            os._exit(0)

    def listen(self) -> None:
        """Map the chunks that the parent creates, and unmap those that it frees, until it has ended."""
        while True:
            first, second, fds = chunk_message(self._control)
            if first == "drop":
                for number in second:
                    self.device.detach(number)
                for fd in fds:
                    os.close(fd)  # the parent waits for this
                continue
            with self._chunks_changed:
                try:
                    self.device.attach(first, second, fds[0])
                except (OSError, CudaError, DispatchError) as error:
                    self.exit_lost(OutOfMemory(f"a child process cannot map {second / 2**20:,.0f} MiB: {error}"))
                self._chunks_changed.notify_all()

    def tensor(self, location: Any, *layout: Any) -> Tensor:
        """The tensor at a location; waits until its chunk is mapped, which is announced on another connection."""
        if location[0] not in self.device.chunks:
            with self._chunks_changed:
                self._chunks_changed.wait_for(lambda: location[0] in self.device.chunks)
        return self.device.tensor_at(location, *layout)

    def exit_lost(self, error: BaseException) -> None:
        """Exit because the device is lost; first report why, and which requests had started and not ended."""
        started = sorted(number for worker in self.workers for number in worker.started_numbers())
        why = error_text(self.device.fault or error, str)
        try:
            self.send_control("lost", why, messages.pack_error(error).hex(), started)
        except OSError:  # the error may be longer than a message
            self.send_control(
                "lost", why[:MAX_REASON_CHARS], messages.pack_error(WorkerFailed(why[:MAX_REASON_CHARS])).hex(), started
            )
        os._exit(EXIT_LOST)  # the driver does not work any more, and its destructors would hang

    def on_worker_opened(self, executor: Any, queue: WorkerQueue) -> None:
        """Nothing to do: the parent knows a worker by its connection."""

    def on_request_failed(self, *_: Any) -> None:
        """Nothing to do: workers here report by themselves."""

    def on_enqueued(self) -> None:
        """A worker has enqueued requests: wake the workers that may wait for them."""
        for worker in self.workers:
            if worker.is_waiting:
                worker.queue.wake()

    on_callback_errors = make_room = on_device_lost = on_request_failed  # these do not occur in a child

    def replace(self, worker: Any, defect: BaseException) -> bool:
        return False

    def reason(self) -> DispatchError:
        return DispatchError("a worker of a child process has no queue")
