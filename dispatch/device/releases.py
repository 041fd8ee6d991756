"""Releases memory, to the pool or to the library that owns it, after all work that may still use it.

There is one Releases for each GPU (cuda.py). Dying storages arrive here on any thread that collects them. Nothing here
blocks the host, uses a handle that may be dead, or orders work outside of a capture after work inside it. Memory that
cannot be ordered yet is held until its stream is used again, the capture ends, or the whole device is synchronized.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from cudabind import driver
from cudabind._fork import anew
from cudabind.errors import CudaError
from dispatch.device.external import ExternalStream
from dispatch.device.storage import Storage
from dispatch.device.stream import Stream, relaxed
from dispatch.errors import DispatchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dispatch.device.callers_graph import CallersGraphs
    from dispatch.device.device import Device

__all__ = ["PendingRelease", "Releases"]

_T = TypeVar("_T")


class PendingRelease:
    """Memory to release after the work of the streams in `users` and of the consumers that it was lent to.

    It belongs to the device's pool (at `ptr`) or to another library (in `keep`, until `events` have passed).
    `identities` has the identities of the streams in `lent` at the time of lending. `unnamed` means that the stream of
    some consumer is unknown.
    """

    __slots__ = ("count", "events", "identities", "keep", "lent", "nbytes", "ptr", "unnamed", "users")

    def __init__(
        self, ptr: int, keep: Any, nbytes: int, users: set[Stream], identities: dict[Stream | None, int]
    ) -> None:
        self.ptr, self.keep, self.nbytes, self.users, self.identities = ptr, keep, nbytes, users, identities
        self.count = len(users)  # at first; a user is removed once the side stream waits for it
        self.lent = [stream for stream in self.identities if isinstance(stream, ExternalStream)]
        self.unnamed = None in self.identities
        self.events: list[tuple[ctypes.c_void_p, Stream | None]] = []  # each with its owner; None: this library

    @classmethod
    def of(cls, storage: Storage) -> PendingRelease:
        """The memory of a dying storage."""
        keep, held = storage.keep, getattr(storage, "held", None)  # that of another library may have both
        keep = keep if held is None else (keep, held)
        return cls(storage.base, keep, storage.nbytes, storage.users(), storage.lent or {})

    def is_of_one(self) -> bool:
        """Whether it was used on one stream only, and not lent to another."""
        if self.count != 1 or len(self.users) != 1:
            return False
        (user,) = self.users
        return not self.identities or self.identities == {user: getattr(user, "identity", None)}


class Releases:
    """The queues of memory that waits to be released on one device.

    Guarantees: a dying storage makes no driver call, because finalizers run at any time and on any thread. Dead memory
    is processed when new memory is allocated, by one thread at a time (`collect`). That thread also destroys closed
    streams: a finalizer may close a stream at any moment, but its handle stays valid as long as that thread may use it.
    Each PendingRelease is in one queue; the thread that takes it out releases it or puts it into another. The stream
    `side` waits for every stream that is destroyed, and for all users of the memory that is freed on it.
    """

    def __init__(self, device: Device, side: Stream, graphs: CallersGraphs) -> None:
        self._device, self.side, self._graphs = device, side, graphs
        self._dead: deque[tuple[int, Stream]] = deque()  # used only on one of our streams, unknown to other libraries
        self._held: deque[PendingRelease] = deque()  # all other memory, for the next `collect`
        self._orphans: deque[PendingRelease] = deque()  # can be released only after the whole device was synchronized
        self._awaited: set[ExternalStream] = set()  # streams whose `waiting` is not empty
        self._parked: deque[tuple[list[tuple[ctypes.c_void_p, Stream | None]], Any]] = deque()
        self.closed_handles: deque[ctypes.c_void_p] = deque()  # handles of our own streams that are closed
        self._collecting = threading.Lock()
        anew(self, "_collecting", threading.Lock)
        self.stuck = 0  # about how many bytes are held only for streams that were not used again

    @property
    def pending(self) -> bool:
        """Whether there is something for `collect` to do."""
        return bool(self._held or self._parked or self._dead or self.closed_handles or self._graphs.known)

    # -- memory of the pool, and of others --------------------------------------------------------------------------
    def free(self, storage: Storage) -> None:
        """Free memory of the pool after all its users, those of other libraries included, at the next `collect`."""
        writer = storage.writer
        if writer.external or storage.readers or storage.lent:
            self._held.append(PendingRelease.of(storage))
        else:
            self._dead.append((storage.base, writer))

    def free_block(self, base: int, stream: Stream) -> None:
        """Free a block of the pool that was used only on one of our streams, at the next `collect`."""
        self._dead.append((base, stream))

    def give_back(self, storage: Storage) -> None:
        """Keep another library's memory alive until our streams, which that library does not know, are done with it."""
        self._held.append(PendingRelease.of(storage))
        with relaxed():
            self.collect()  # if another thread is in it, that one does it; the handles are safe to use only there

    def keep_until(self, event: ctypes.c_void_p, keep: Any) -> None:
        """Keep an object alive until an event has completed, such as the memory of a copy that nobody waits for."""
        self._parked.append(([(event, None)], keep))

    # -- releasing: these methods are called inside `with relaxed():` ------------------------------------------------
    def collect(self) -> None:
        """Release what can be released by now. One thread at a time does this; others return at once."""
        if not self._collecting.acquire(blocking=False):
            return
        try:
            closed = len(self.closed_handles)
            if self._dead:
                self._free_dead()
            if self._held:
                for held in _taken(self._held):
                    self._release(held)
            if self._parked:
                self._unpark()
            if self._graphs.known:
                self._graphs.sweep()
            # These were closed before everything above was processed, so nothing here uses their handles any more. A
            # thread that orders uses may still have seen one open, and be about to use its handle: hence the lock.
            if closed and Storage.ordering.acquire(blocking=False):
                try:
                    self.destroy(closed)
                finally:
                    Storage.ordering.release()
        finally:
            self._collecting.release()

    def _free_dead(self) -> None:
        while self._dead:
            ptr, stream = self._dead.popleft()
            if stream.external:  # another library knows the stream now, and may be capturing it
                self._held.append(PendingRelease(ptr, None, 0, {stream}, {}))
                continue
            handle = self.side.c_handle if stream.closed else stream.c_handle
            driver.cuMemFreeAsync.unchecked(ctypes.c_uint64(ptr), handle)

    def destroy(self, count: int) -> None:
        """Destroy the first `count` closed streams, or as many as are left; several threads may do this at once."""
        for handle in islice(_taken(self.closed_handles), count):
            driver.cuStreamDestroy.unchecked(handle)

    def _unpark(self) -> None:
        while self._parked:
            events, _ = self._parked[0]
            if any(driver.cuEventQuery.unchecked_holding_gil(event) for event, _ in events):
                return
            self._parked.popleft()
            for event, owner in events:
                if owner is None:
                    self._device.recycle(event)

    def _release(self, held: PendingRelease) -> None:
        """Order memory after the users that can be ordered now; then release it, or hold it for the other users."""
        if self.side.closed:
            return  # the whole device is collected as garbage
        try:
            if self._is_ordered(held):
                return
        except (CudaError, DispatchError):  # a fault is reported to callers that wait for results
            if self._device.fault is not None:
                return  # the memory is gone with the context
        if any(not isinstance(user, ExternalStream) or not user.unmarked for user in held.users) or (
            not held.users and not held.unnamed and held.lent and held.lent[-1].is_alive
        ):
            self._held.append(held)
        else:
            self.stuck += held.nbytes
            if held.users or held.unnamed or not held.lent:
                self._orphans.append(held)
            else:
                held.lent[-1].waiting.append(held)
                self._awaited.add(held.lent[-1])

    def _is_ordered(self, held: PendingRelease) -> bool:
        """Release memory; False if it depends on work that cannot be ordered yet."""
        if held.keep is None and held.is_of_one() and self._free_on(held, *held.users):
            return True
        for user in tuple(held.users):
            if self._order_after(held, user):
                held.users.discard(user)
        while held.lent and self._order_after_consumer(held, held.lent[-1]):
            held.lent.pop()
        if held.users or held.lent or held.unnamed:
            return False
        if held.keep is None:
            driver.cuMemFreeAsync.unchecked(ctypes.c_uint64(held.ptr), self.side.c_handle)
        elif held.events:
            self._parked.append((held.events, held.keep))
        return True

    def _free_on(self, held: PendingRelease, user: Stream) -> bool:
        """Free memory on the only stream that used it, if this thread may use that stream: it can be reused at once."""
        if not isinstance(user, ExternalStream):
            if user.closed or (user.external and user.is_capturing()):
                return False
        elif not user.is_current or user.unmarked or user.is_capturing():
            return False
        with user.context:
            driver.cuMemFreeAsync.unchecked(ctypes.c_uint64(held.ptr), user.c_handle)
        return True

    def _order_after(self, held: PendingRelease, user: Stream) -> bool:
        """Order memory after the work that this library has enqueued on a stream; False if that cannot be done yet."""
        if user.closed:
            if held.keep is not None:  # the side stream waits for all streams that were closed
                self._order_after_event(held, self._device.recorded(self.side), None)
            return True
        if not isinstance(user, ExternalStream):
            return not (user.external and user.is_capturing()) and self._order_after_stream(held, user)
        if not user.lock.acquire(blocking=False):  # waiting could deadlock with its holder
            return False
        try:
            if user.is_alive:
                return not (user.unmarked or user.is_capturing()) and self._order_after_stream(held, user)
            if user.event is not None:
                self._order_after_event(held, user.event, user)
            return not user.unmarked
        finally:
            user.lock.release()

    def _order_after_consumer(self, held: PendingRelease, stream: ExternalStream) -> bool:
        """Order memory after the work that a consumer has enqueued on its stream, if the stream is certainly alive."""
        if not stream.lock.acquire(blocking=False):
            return False
        try:
            is_same = stream.is_alive and held.identities[stream] == stream.identity
            return is_same and not stream.is_capturing() and self._order_after_stream(held, stream)
        finally:
            stream.lock.release()

    def _order_after_stream(self, held: PendingRelease, stream: Stream) -> bool:
        if held.keep is None:
            self.side.wait_for(stream)
        else:
            self._order_after_event(held, self._device.recorded(stream), None)
        return True

    def _order_after_event(self, held: PendingRelease, event: ctypes.c_void_p, owner: Stream | None) -> None:
        if held.keep is not None:
            held.events.append((event, owner))
        else:
            self.side.wait_for_event(event)

    # -- streams that are used again, and waits for the whole device --------------------------------------------------
    def release_waiting(self, stream: ExternalStream) -> None:
        """Release the memory that waits for a stream, which is alive now."""
        if not self._collecting.acquire(blocking=False):
            return  # it is released at the next use of the stream
        try:
            with relaxed():
                for held in _taken(stream.waiting):
                    if held.identities[stream] != stream.identity:  # the handle now refers to another stream
                        self._orphans.append(held)
                    else:
                        self.stuck -= held.nbytes
                        self._release(held)
            if not stream.waiting:
                self._awaited.discard(stream)
        finally:
            self._collecting.release()

    def gather(self) -> list[PendingRelease]:
        """Remove and return all memory that waits for possibly dead streams, before a wait for the whole device."""
        gathered = list(_taken(self._orphans))
        self.stuck = 0
        for stream in self._awaited.copy():
            self._awaited.discard(stream)  # first: a thread that adds to `waiting` now adds the stream again afterwards
            gathered.extend(_taken(stream.waiting))
        return gathered

    def done(self, gathered: Iterable[PendingRelease]) -> None:
        """Release the gathered memory: the device has been synchronized since."""
        for held in gathered:
            held.users.clear()
            held.lent.clear()
            held.unnamed = False
            self._held.append(held)
        with relaxed():
            self.collect()

    def abandon(self) -> None:
        """Drop everything: the device was synchronized and is closed, and its pool frees the memory."""
        self._dead.clear()
        for queue in (self._held, self._orphans, *(stream.waiting for stream in self._awaited.copy())):
            queue.clear()
        self._awaited.clear()
        self._parked.clear()

    def put_back(self, gathered: Iterable[PendingRelease]) -> None:
        """Hold the gathered memory again: the wait for the device has failed."""
        for held in gathered:
            self.stuck += held.nbytes
            self._orphans.append(held)


def _taken(queue: deque[_T]) -> Iterator[_T]:
    """Remove and yield the items that are in a queue now, one by one; other threads may remove some as well."""
    with suppress(IndexError):
        for _ in range(len(queue)):
            yield queue.popleft()
