"""ProcessCrew: the policy over workers that run in a child process, and the warden, the one thread that carries it out.

supervisor.py holds it as it holds a Crew of threads. The warden starts children, reads what they report, and replaces
one that is lost; inquest.py says what then becomes of what was in flight.
"""

from __future__ import annotations

import heapq
import itertools
import os
import select
import socket
import threading
from contextlib import ExitStack, suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from dispatch import trace
from dispatch.crew import Crew
from dispatch.errors import DeadlineExceeded, DispatchError, WorkerFailed
from dispatch.isolate import wire
from dispatch.isolate.inquest import Loss, hold
from dispatch.isolate.launch import Child, Reserve
from dispatch.isolate.recovery import Sent, written
from dispatch.isolate.seat import RemoteSeat
from dispatch.seat import BROKEN, CANCELLING, OPEN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.future import TimedFuture
    from dispatch.isolate.memory import SharedCuda, SharedHost
    from dispatch.isolate.wire import Link

__all__ = ["ProcessCrew"]

TICK = 0.25  # seconds between looks at whether the child was stopped
QUIET = 0.5  # seconds after a start before others are started to stand by: they would take its processor time


class ProcessCrew(Crew):
    """The workers of one supervisor, in a child.

    Guarantees: only the warden starts, reads and ends children, and settles what they were given. A request is settled
    by its report, by its deadline, or by a recovery, whichever takes it out of its seat's `sent`.
    """

    device: Any  # a SharedHost or SharedCuda
    seats: list[Any]  # RemoteSeats

    def __init__(
        self,
        device: SharedHost | SharedCuda,
        streams: int,
        queue_size: int,
        max_restarts: int,
        max_seconds: float,
        setup: Sequence[str] = (),
        spare: int = 0,
        hang_seconds: float = 1.0,
        completion: str = "poll",
    ) -> None:
        self.hang_seconds = hang_seconds
        self.numbers, self.names = itertools.count(1), itertools.count(1)
        self.generation = 0
        self._setup = tuple(setup)
        self.reserve = Reserve(self._launch, spare)
        self._refill_at = 0.0
        self._child: Child | None = None
        self._ended: list[Child] = []  # killed and not yet gone
        self._starting = threading.Lock()  # held while a child is started and while it is told of other chunks
        self._observers: list[Callable[[int], object]] = []
        self._deadlines: list[tuple[float, int, RemoteSeat, TimedFuture]] = []
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.epoll()
        self._poll.register(self._bell, select.EPOLLIN)
        self.hush = False  # who reads in the place of the warden shall leave that to it
        self._started = threading.Event()
        self._start_error: BaseException | None = None
        super().__init__(device, streams, queue_size, max_restarts, max_seconds, completion)
        self.homes = {seat: seat for seat in self.seats}
        self._warden = threading.Thread(target=self._watch, name=f"dispatch {device} warden", daemon=True)

    def make_seats(self, streams: int, queue_size: int) -> list[Any]:
        return [RemoteSeat(index, queue_size, self) for index in range(streams)]

    def start(self) -> None:
        self._warden.start()
        self._started.wait()
        if self._start_error is not None:
            raise self._start_error

    # -- what any thread may call ---------------------------------------------------------------------------------
    def ring(self) -> None:
        """Have the warden look."""
        with suppress(OSError, ValueError):  # it has ended, and looks at nothing any more
            os.eventfd_write(self._bell, 1)

    def end(self, ending: int, refusal: DispatchError) -> None:
        super().end(ending, refusal)
        self.ring()

    def abandon(self) -> None:
        super().abandon()
        self.ring()

    def is_own_thread(self) -> bool:
        return threading.current_thread() is self._warden

    def join(self, seconds: float | None = None) -> None:
        if not self.is_own_thread():
            self._warden.join(seconds)

    def after_fork(self) -> None:
        super().after_fork()
        for child in self._children():
            child.disconnect()

    def _children(self) -> list[Child]:
        return [*self.reserve.children, *([] if self._child is None else [self._child])]

    def watch_deadline(self, future: TimedFuture, number: int, seat: RemoteSeat) -> None:
        with self.lock:
            heapq.heappush(self._deadlines, (future.deadline, number, seat, future))
        self.ring()

    def watch_generation(self, observer: Callable[[int], object]) -> None:
        self._observers.append(observer)

    def _follow(self, done: int | None = None) -> None:
        """Have the children map the chunks that the device has, and no others; called from any thread."""
        with self._starting:
            for child in self._children():
                child.follow(self.device.chunks, done)

    # -- the warden -------------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        try:
            self.device.on_chunks = self._follow
            self._take_child()
            self.connect()
            if self.reserve.spare:
                self._restock()
        except BaseException as error:  # noqa: BLE001  # raised by `start`
            self._start_error = error
            self.end(BROKEN, WorkerFailed(f"no child process could be started: {error}"))
            self._started.set()
            return
        self._started.set()
        try:
            while not self._is_over():
                self._turn()
        except BaseException as error:  # noqa: BLE001  # a defect here must leave no future without an end
            broken = WorkerFailed(f"the warden of {self.device} broke: {error!r}")
            broken.__cause__ = error
            self.end(BROKEN, broken)
        self._finish()

    def _is_over(self) -> bool:
        if self.ending == OPEN:
            return False
        if self.ending == BROKEN:
            return True
        queued = any(len(seat.items) for seat in self.seats) if self.ending < CANCELLING else False
        return not queued and not any(seat.sent for seat in self.seats)

    def _finish(self) -> None:
        """End the children, and whatever has not been settled."""
        self._disconnect()
        for seat in self.seats:
            for sent in list(seat.sent.values()):
                self.give_up(sent, self.reason())
            seat.vacate(self)
        if self._child is not None:
            self._child.kill() if self.ending == BROKEN else self._child.close()
            self._child = None
        self.reserve.end()
        for child in self._ended:
            child.process.wait()
        self.device.on_chunks = None
        self._poll.close()
        os.close(self._bell)
        self._bell = -1

    def listen(self, link: Link, on: bool) -> None:
        """Have the warden read a link, or leave that to somebody else."""
        with suppress(OSError, ValueError):  # its child is being replaced
            self._poll.modify(link.socket.fileno(), select.EPOLLIN if on else 0)

    def _disconnect(self) -> None:
        """Let nobody send to the child or read from it any more; what it has reported is settled."""
        for seat in self.seats:
            with seat.pumping:
                seat.link = None
        if self._child is None:
            return
        for seat, link in zip(self.seats, self._child.links, strict=True):
            with suppress(OSError):
                link.socket.shutdown(socket.SHUT_RDWR)  # who waits for a report wakes, and leaves
            with seat.reading, suppress(EOFError, OSError):
                while seat.take(link):
                    pass

    def _turn(self) -> None:
        """Wait until something happens, and deal with it; returns when there is another child, or an end."""
        child = self.present()
        by_fd = {link.socket.fileno(): seat for link, seat in zip(child.links, self.seats, strict=True)}
        control = child.control.fileno()
        for fd in (control, *by_fd):
            self._poll.register(fd, select.EPOLLIN)  # what is closed is no longer in it
        while child is self._child and not self._is_over():
            loss: Loss | None = None
            heard = False
            for fd, _ in self._poll.poll(self._patience()):
                if fd == self._bell:
                    os.eventfd_read(self._bell)
                    for seat in self.seats:
                        seat.wake()
                        loss = loss or self._read(seat)
                elif fd == control:
                    heard = True
                else:
                    loss = loss or self._read(by_fd[fd])
            if loss is not None or heard:
                loss = self.last_words(child) or loss
            loss = loss or self._late() or self._stopped(child)
            if loss is not None:
                self._recover(loss)
            elif self._refill_at and monotonic() > self._refill_at:
                self._restock()

    def _restock(self) -> None:
        """What is done when there is time: let children stand by, and take note of those that have ended."""
        self._refill_at = 0.0
        self.reserve.refill()
        self._ended = [each for each in self._ended if each.process.poll() is None]

    def _patience(self) -> float:
        """Seconds that the warden may sleep: who submits does not wake it, so it looks at the clock by itself."""
        with self.lock:
            while self._deadlines and self._deadlines[0][3]._status:
                heapq.heappop(self._deadlines)
            due = self._deadlines[0][0] - monotonic() if self._deadlines else TICK
        return min(max(due, 0.001), TICK)

    def _read(self, seat: RemoteSeat) -> Loss | None:
        """Settle what a worker reports, unless somebody who waits for it does."""
        link = seat.link
        if link is None or not seat.reading.acquire(False):
            return None
        try:
            while seat.take(link):
                pass
        except (EOFError, OSError):
            return Loss("the child process died")
        finally:
            seat.reading.release()
        return None

    def hear(self, child: Child) -> Loss | None:
        said = child.hear()
        if said is None:
            return Loss("the child process died")
        if said[0] == "lost":
            return Loss(said[1], wire.error_from(bytes.fromhex(said[2])), frozenset(said[3]))
        if said[0] == "defect":
            self.allow(WorkerFailed(f"worker {said[1]} broke: {said[2]}"))
        return None

    def _stopped(self, child: Child) -> Loss | None:
        if any(seat.sent for seat in self.seats) and child.is_stopped():
            return Loss("the child process was stopped")
        return None

    def _late(self) -> Loss | None:
        """Deal with requests that run beyond their deadline: one that hangs costs the child."""
        if not self._deadlines or self._deadlines[0][0] > monotonic():
            return None
        self.hush = True
        with ExitStack() as stack:  # what has ended must not change while it is looked at
            for seat in self.seats:
                stack.enter_context(seat.reading)
            self.hush = False
            return self._hanging(monotonic())

    def _hanging(self, now: float) -> Loss | None:
        while self._deadlines and self._deadlines[0][0] <= now:
            with self.lock:
                _, number, seat, future = self._deadlines[0]
                if future._status or number not in seat.sent:
                    heapq.heappop(self._deadlines)
                    continue
            if next(iter(seat.sent)) != number and now - seat.since < self.hang_seconds:
                return None  # it may only be late: another look at the next tick
            with self.lock:
                heapq.heappop(self._deadlines)
            text = "it had not ended when the time it was submitted with was over, and its process was replaced"
            self.give_up(seat.sent[number], DeadlineExceeded(text))
            oldest = frozenset(next(iter(other.sent)) for other in self.seats if other.sent)
            return Loss("a request hung beyond its deadline", hanging=oldest)
        return None

    def give_up(self, sent: Sent, error: BaseException) -> None:
        """Fail a request that was in flight; what it writes may be half written."""
        sent.seat.sent.pop(sent.number, None)
        for tensor in written(sent):
            self.device.taint(tensor, f"{type(error).__name__} ended the request that wrote it")
        sent.seat.fail(sent.future, error)

    def last_words(self, child: Child) -> Loss | None:
        """What a child that is gone said of it, if it did."""
        try:
            while wire.ready([child.control], 0):
                loss = self.hear(child)
                if loss is not None:
                    return loss
        except OSError:
            pass
        return None

    # -- replacing a child --------------------------------------------------------------------------------------------
    def present(self) -> Child:
        if self._child is None:
            raise WorkerFailed("there is no child process")
        return self._child

    def _launch(self) -> Child:
        with self._starting:
            return Child(self.device, len(self.seats), self._setup, self.completion)

    def _take_child(self) -> None:
        """Have a child that is ready."""
        begun = monotonic()
        self._child = child = self.reserve.take()
        self._follow()  # while it was being taken, it was nobody's child, and heard of no chunk
        self.generation += 1
        self._refill_at = monotonic() + (0 if self.reserve.spare else QUIET)
        self._note("child started", begun, pid=child.process.pid, seconds=child.took)
        for seat in self.seats:
            seat.defined, seat.forget = set(), []
            seat.since = monotonic()

    def renew(self, loss: Loss) -> bool:
        """Another child in place of the present one; False, and the circuit is open, where none can be had.

        The old one is waited for, as what it launched may run on until it is gone. After a fault nothing does.
        """
        begun = monotonic()
        if self._child is not None:
            self._child.kill(wait=not loss.proven)
            self._note("child lost", begun, pid=self._child.process.pid, cause=str(loss.cause))
            self._ended.append(self._child)
            self._child = None
        try:
            self._take_child()
        except DispatchError as error:
            error.__cause__ = loss.cause
            self.end(BROKEN, error)
            return False
        self._tell_observers()  # before anything ends in the new generation
        return True

    def _recover(self, loss: Loss) -> None:
        """Replace the child; see to what was in flight; go on."""
        begun = monotonic()
        self._disconnect()
        if self.allow(loss.cause) and hold(self, loss):
            self.connect()
            self._note("child replaced", begun, cause=loss.why)

    def _note(self, event: str, begun: float, **facts: object) -> None:
        """Log what was done, and how long it took."""
        common = {"device": self.device.name, "generation": self.generation}
        trace.log(event, {**common, **facts, "milliseconds": round((monotonic() - begun) * 1000, 1)})

    def connect(self) -> None:
        """Let the seats send to the present child; first what was sent to another and has not ended, if it may run."""
        if self.device.taints or self.holding:  # in order, for what fails here may be what another waits for
            for _, sent in sorted((number, sent) for seat in self.seats for number, sent in seat.sent.items()):
                error = sent.seat.refusal(sent)
                if error is not None:
                    del sent.seat.sent[sent.number]
                    sent.seat.fail(sent.future, error)
        for seat, link in zip(self.seats, self.present().links, strict=True):
            seat.resume(link)

    def allow(self, cause: BaseException) -> bool:
        """Count a restart; False, and the circuit is open, where there were too many in too short a time."""
        now = monotonic()
        with self.lock:
            if self.ending >= CANCELLING:
                return False
            self._breaks.append(now)
            while self._breaks[0] < now - self._max_seconds:
                self._breaks.popleft()
            if len(self._breaks) <= self._max_restarts:
                self.restarts += 1
                return True
            text = (
                f"the child of {self.device} was lost {len(self._breaks)} times in {self._max_seconds:g} s"
                f" (max_restarts={self._max_restarts}), the last time with {cause}; make a new supervisor"
            )
        broken = WorkerFailed(text)
        broken.__cause__ = cause
        self.end(BROKEN, broken)
        return False

    def _tell_observers(self) -> None:
        errors: list[BaseException] = []
        for observer in list(self._observers):
            try:
                observer(self.generation)
            except Exception as error:  # noqa: BLE001, PERF203  # delivered when the supervisor is closed
                errors.append(error)
        if errors:
            self.callbacks_failed(errors)
