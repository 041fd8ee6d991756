"""Memory that is let go of: freed, or given back to another library, behind all that may still use it.

One Releases for each GPU (cuda.py); storages come here as they die, on whatever thread collects them. Nothing in here
waits on the host, touches a handle that may be gone, or orders work outside of a capture behind work in it: what cannot
be ordered yet is held, until its stream is named again, the capture ends, or the whole device is waited for.
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

__all__ = ["Held", "Releases"]

_T = TypeVar("_T")


class Held:
    """Memory to be let go of behind the streams in `users`, and behind what consumers have enqueued where it was lent.

    It is of the device's pool, at `ptr`, or another library's, in `keep`; that is kept until `events` have passed.
    `identities` are those of the streams in `lent` as it was lent there. `unnamed`: the consumer's stream is not known.
    """

    __slots__ = ("count", "events", "identities", "keep", "lent", "nbytes", "ptr", "unnamed", "users")

    def __init__(
        self, ptr: int, keep: Any, nbytes: int, users: set[Stream], identities: dict[Stream | None, int]
    ) -> None:
        self.ptr, self.keep, self.nbytes, self.users, self.identities = ptr, keep, nbytes, users, identities
        self.count = len(users)  # of those in `users`, which go from there as the side stream comes to be behind them
        self.lent = [stream for stream in self.identities if isinstance(stream, ExternalStream)]
        self.unnamed = None in self.identities
        self.events: list[tuple[ctypes.c_void_p, Stream | None]] = []  # and the stream that owns it, if not we

    @classmethod
    def of(cls, storage: Storage) -> Held:
        """What a storage that dies leaves behind."""
        return cls(storage.base, storage.keep, storage.nbytes, storage.users(), storage.lent or {})

    def is_of_one(self) -> bool:
        """Whether it was used on one stream, and lent to no other."""
        if self.count != 1 or len(self.users) != 1:
            return False
        (user,) = self.users
        return not self.identities or self.identities == {user: getattr(user, "identity", None)}


class Releases:
    """What one device's memory waits for before it is let go of.

    Guarantees: storages die without a call of the driver, which finalizers could make at any time and on any thread;
    what died is looked at as new memory is asked for, by one thread at a time, which also destroys our streams: a
    stream may be closed by a finalizer at any moment, but its handle is good as long as that thread may use it. Each
    Held is in one place, and who takes it out lets it go or holds it. `side` is behind every stream that has gone, and
    behind all that what is freed on it waits for.
    """

    def __init__(self, device: Device, side: Stream, graphs: CallersGraphs) -> None:
        self._device, self.side, self._graphs = device, side, graphs
        self._dead: deque[tuple[int, Stream]] = deque()  # used on one stream of ours, that nobody else knows
        self._held: deque[Held] = deque()  # to be looked at
        self._orphans: deque[Held] = deque()  # nothing but the whole device tells when their streams are done
        self._awaited: set[ExternalStream] = set()  # streams that have something waiting
        self._parked: deque[tuple[list[tuple[ctypes.c_void_p, Stream | None]], Any]] = deque()
        self.gone: deque[ctypes.c_void_p] = deque()  # handles of our own streams that are closed
        self._collecting = threading.Lock()
        anew(self, "_collecting", threading.Lock)
        self.stuck = 0  # about how many bytes are free but for streams that nobody has named again

    @property
    def pending(self) -> bool:
        """Whether there is something that `collect` may let go of."""
        return bool(self._held or self._parked or self._dead or self.gone or self._graphs.known)

    # -- memory of the pool, and of others --------------------------------------------------------------------------
    def free(self, storage: Storage) -> None:
        """Free memory of the pool behind all its users, those of other libraries included; a little later."""
        writer = storage.writer
        if writer.external or storage.readers or storage.lent:
            self._held.append(Held.of(storage))
        else:
            self._dead.append((storage.base, writer))

    def free_block(self, base: int, stream: Stream) -> None:
        """Free a block of the pool that was used on one stream of ours; a little later."""
        self._dead.append((base, stream))

    def give_back(self, storage: Storage) -> None:
        """Keep another library's memory until our streams are done with it; its own order knows nothing of them."""
        self._held.append(Held.of(storage))
        with relaxed():
            self.collect()  # or the thread does that is about it: only there a handle is good as long as it is used

    def keep_until(self, event: ctypes.c_void_p, keep: Any) -> None:
        """Keep what a copy reads or writes until it has ended, where nobody waits for that."""
        self._parked.append(([(event, None)], keep))

    # -- what died is looked at: all of this in a block of `relaxed()` -----------------------------------------------
    def collect(self) -> None:
        """Let go of what can be by now. One thread does at a time, and others do not wait for it."""
        if not self._collecting.acquire(blocking=False):
            return
        try:
            gone = len(self.gone)
            if self._dead:
                self._free_dead()
            if self._held:
                for held in _taken(self._held):
                    self._let_go(held)
            if self._parked:
                self._unpark()
            if self._graphs.known:
                self._graphs.sweep()
            # They were closed before all that was looked at above, so nobody here has their handles. Who orders uses
            # may have found one open, and be about to name it.
            if gone and Storage.ordering.acquire(blocking=False):
                try:
                    self.destroy(gone)
                finally:
                    Storage.ordering.release()
        finally:
            self._collecting.release()

    def _free_dead(self) -> None:
        while self._dead:
            ptr, stream = self._dead.popleft()
            if stream.external:  # by now somebody else knows it, and may be capturing it
                self._held.append(Held(ptr, None, 0, {stream}, {}))
                continue
            handle = self.side.c_handle if stream.closed else stream.c_handle
            driver.cuMemFreeAsync.unchecked(ctypes.c_uint64(ptr), handle)

    def destroy(self, count: int) -> None:
        """Destroy so many of the streams that are closed, or those that are left; several threads may be about it."""
        for handle in islice(_taken(self.gone), count):
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

    def _let_go(self, held: Held) -> None:
        """Order what is held behind its users as far as they can be, and let it go or hold it."""
        if self.side.closed:
            return  # the whole device is collected as garbage
        try:
            if self._is_ordered(held):
                return
        except (CudaError, DispatchError):  # a fault is told to those who wait for results
            if self._device.fault is not None:
                return  # the memory is gone with the context
        if any(not isinstance(user, ExternalStream) or not user.blind for user in held.users) or (
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

    def _is_ordered(self, held: Held) -> bool:
        """Let go of what is held; False where it has to wait for something that cannot be ordered yet."""
        if held.keep is None and held.is_of_one() and self._free_there(held, *held.users):
            return True
        for user in tuple(held.users):
            if self._behind(held, user):
                held.users.discard(user)
        while held.lent and self._behind_lent(held, held.lent[-1]):
            held.lent.pop()
        if held.users or held.lent or held.unnamed:
            return False
        if held.keep is None:
            driver.cuMemFreeAsync.unchecked(ctypes.c_uint64(held.ptr), self.side.c_handle)
        elif held.events:
            self._parked.append((held.events, held.keep))
        return True

    def _free_there(self, held: Held, user: Stream) -> bool:
        """Free on the only stream that memory was used on, where this thread is on that, too: it comes back at once."""
        if not isinstance(user, ExternalStream):
            if user.closed or (user.external and user.is_capturing()):
                return False
        elif not user.is_current or user.blind or user.is_capturing():
            return False
        with user.context:
            driver.cuMemFreeAsync.unchecked(ctypes.c_uint64(held.ptr), user.c_handle)
        return True

    def _behind(self, held: Held, user: Stream) -> bool:
        """Order what is held behind what this library has enqueued on a stream; False where that cannot be done yet."""
        if user.closed:
            if held.keep is not None:  # the side stream is behind those that are gone
                self._behind_event(held, self._device.recorded(self.side), None)
            return True
        if not isinstance(user, ExternalStream):
            return not (user.external and user.is_capturing()) and self._behind_stream(held, user)
        if not user.lock.acquire(blocking=False):  # its holder may wait for what this thread holds
            return False
        try:
            if user.is_alive:
                return not (user.blind or user.is_capturing()) and self._behind_stream(held, user)
            if user.event is not None:
                self._behind_event(held, user.event, user)
            return not user.blind
        finally:
            user.lock.release()

    def _behind_lent(self, held: Held, stream: ExternalStream) -> bool:
        """Order what is held behind what a consumer has enqueued on its stream, if that is alive for certain."""
        if not stream.lock.acquire(blocking=False):
            return False
        try:
            known = stream.is_alive and held.identities[stream] == stream.identity
            return known and not stream.is_capturing() and self._behind_stream(held, stream)
        finally:
            stream.lock.release()

    def _behind_stream(self, held: Held, stream: Stream) -> bool:
        if held.keep is None:
            self.side.wait_for(stream)
        else:
            self._behind_event(held, self._device.recorded(stream), None)
        return True

    def _behind_event(self, held: Held, event: ctypes.c_void_p, owner: Stream | None) -> None:
        if held.keep is not None:
            held.events.append((event, owner))
        else:
            self.side.wait_for_event(event)

    # -- streams that are named again, and waits for the whole device -------------------------------------------------
    def settle(self, stream: ExternalStream) -> None:
        """Let go of what waits for a stream that is alive now."""
        if not self._collecting.acquire(blocking=False):
            return  # the next time that it is named will do
        try:
            with relaxed():
                for held in _taken(stream.waiting):
                    if held.identities[stream] != stream.identity:  # the handle means another stream by now
                        self._orphans.append(held)
                    else:
                        self.stuck -= held.nbytes
                        self._let_go(held)
            if not stream.waiting:
                self._awaited.discard(stream)
        finally:
            self._collecting.release()

    def gather(self) -> list[Held]:
        """Take out all that waits for streams of which nobody may say any more, before the device is waited for."""
        found = list(_taken(self._orphans))
        self.stuck = 0
        for stream in self._awaited.copy():
            self._awaited.discard(stream)  # first: who adds to what waits for it names it again, behind that
            found.extend(_taken(stream.waiting))
        return found

    def done(self, gathered: Iterable[Held]) -> None:
        """The device has been waited for since these were gathered: let go of them."""
        for held in gathered:
            held.users.clear()
            held.lent.clear()
            held.unnamed = False
            self._held.append(held)
        with relaxed():
            self.collect()

    def abandon(self) -> None:
        """The device was waited for and is closed: its memory goes with the pool, and other libraries have theirs."""
        self._dead.clear()
        for queue in (self._held, self._orphans, *(stream.waiting for stream in self._awaited.copy())):
            queue.clear()
        self._awaited.clear()
        self._parked.clear()

    def put_back(self, gathered: Iterable[Held]) -> None:
        """Nothing was waited for."""
        for held in gathered:
            self.stuck += held.nbytes
            self._orphans.append(held)


def _taken(queue: deque[_T]) -> Iterator[_T]:
    """What is in a queue now, taken out one by one; other threads may take of it as well."""
    with suppress(IndexError):
        for _ in range(len(queue)):
            yield queue.popleft()
