"""NCCL's communicators, with a deadline for all calls and their work, whether NCCL's calls block or not.

Each call records the time by which it must return, and then an event after its work, which monitor.py polls: if a call
or its work is not done by the deadline, or NCCL reports an error, the communicator is aborted, which ends both. Follows
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html, in particular its error handling.
This module does not depend on any op.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from cudabind import driver
from cudabind.sys import nccl
from dispatch.checks import check_int
from dispatch.core.communicator import DEADLINE, Communicator, check_split
from dispatch.core.timeout import call_with_timeout
from dispatch.device.disposal import members, register_collectives
from dispatch.device.failed_collectives import clear_failed, mark_failed
from dispatch.device.stream import relaxed
from dispatch.errors import BadRequest, CollectiveError, CollectiveTimeout, RankLost
from dispatch.libraries.nccl import monitor
from dispatch.libraries.nccl.config import NcclConfig, c_config, require

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

    from dispatch.device.cuda import CudaDevice
    from dispatch.device.device import Device

__all__ = ["NcclCommunicator", "solo", "unique_id"]

SUCCESS, INVALID_ARGUMENT, REMOTE, IN_PROGRESS = 0, 4, 6, 7  # values of ncclResult_t
SHORTEST, LONGEST = 20e-6, 1e-3  # seconds between two queries
LONGEST_CALL = 0.2  # seconds that an abort waits for a call inside NCCL to end by itself
NO_COLOR, ABORTING = -1, 1  # NCCL_SPLIT_NOCOLOR; NCCL_SHRINK_ABORT: end the running calls first


class PendingWork:
    """A call whose work may not be done yet, or the last of several calls on one stream."""

    __slots__ = ("event", "stream", "until", "what")

    def __init__(self, event: ctypes.c_void_p, stream: int | None, until: float, what: str) -> None:
        self.event, self.stream, self.until, self.what = event, stream, until, what  # until: a time of time.monotonic


def unique_id() -> bytes:
    """The id of a new communicator, 128 bytes: one rank creates it and sends it to all ranks."""
    nccl.ncclGetUniqueId(ctypes.byref(c_id := nccl.ncclUniqueId()))
    return bytes(c_id)


class NcclCommunicator(Communicator):
    """A communicator of NCCL over one GPU of each rank.

    Guarantees: no call of the library begins on a handle that was aborted or destroyed, by whichever thread; a failed
    communicator is aborted once; no call stays inside the library for longer than the deadline.
    """

    library = "nccl"
    device: CudaDevice

    def __init__(
        self,
        c_handle: Any,
        rank: int,
        size: int,
        device: Device,
        config: NcclConfig,
        *,
        generation: int = 0,
        deadline: float = DEADLINE,
    ) -> None:
        super().__init__(rank, size, device, generation=generation, deadline=deadline)
        self.c_handle, self.config = c_handle, config
        self.lock = threading.RLock()  # held while the handle is used
        self.pending: deque[PendingWork] = deque()
        self.pending_lock = threading.Lock()  # held while an event of `pending` is recorded, or queried and removed
        self.call_deadline = math.inf  # when a call inside NCCL must return (`time.monotonic`)
        self.is_aborted = False
        self.in_graphs = False  # whether a caller's graph contains calls of it
        self.graphs: WeakSet[Any] = WeakSet()  # this library's graphs of its calls, which it destroys at its end
        self._barrier_token: Any = None  # the element that barriers sum
        register_collectives(self)

    # -- beginning ------------------------------------------------------------------------------------------------
    @classmethod
    def create(
        cls,
        device: Device,
        rank: int,
        size: int,
        identity: bytes,
        config: NcclConfig | None = None,
        *,
        generation: int = 0,
        deadline: float = DEADLINE,
    ) -> Self:
        """Join a new communicator as one of its ranks; all ranks call this together, with the same `unique_id`.

        CollectiveTimeout if not all do so within the deadline, CollectiveError if NCCL cannot set it up.
        """
        comm = cls._without_handle(device, rank, size, config, generation, deadline)
        c_id = nccl.ncclUniqueId.from_buffer_copy(identity)

        def start(handle: Any, settings: Any) -> int:
            call = nccl.ncclCommInitRankConfig.unchecked
            return int(call(ctypes.byref(handle), ctypes.c_int(size), c_id, ctypes.c_int(rank), ctypes.byref(settings)))

        return comm._init_handle("ncclCommInitRankConfig", start)

    @classmethod
    def join(
        cls,
        device: Device,
        rank: int,
        size: int,
        identity: bytes,
        config: NcclConfig | None = None,
        *,
        generation: int = 0,
        deadline: float = DEADLINE,
    ) -> Self:
        """Become a rank of a communicator that others `grow` to `size` ranks; `identity` is the `growing_id` of one.

        New ranks are numbered from the old size on. Refused before NCCL 2.29; otherwise as `create`.
        """
        comm = cls._without_handle(device, rank, size, config, generation, deadline)
        require((2, 29, 0), "ncclCommGrow")
        c_id = nccl.ncclUniqueId.from_buffer_copy(identity)
        return comm._init_handle("ncclCommGrow", partial(_grow, nccl.ncclComm_t(), size, c_id, rank))

    @classmethod
    def _without_handle(
        cls, device: Device, rank: int, size: int, config: NcclConfig | None, generation: int, deadline: float
    ) -> Self:
        if device.is_host:
            raise BadRequest("device", str(device), "a GPU", "use MPI, gloo or threads for data on the host")
        return cls(
            nccl.ncclComm_t(), rank, size, device, config or NcclConfig(), generation=generation, deadline=deadline
        )

    def _init_handle(self, function: str, start: Callable[[Any, Any], int]) -> Self:
        """Make the handle by a call that all ranks make; a handle that is made after the deadline is aborted."""
        handle, settings = self.c_handle, c_config(self.config)

        def call() -> int:
            status = start(handle, settings)
            if self.error is not None and handle.value and not self.is_aborted:  # no thread waits for it any more
                nccl.ncclCommAbort.unchecked(handle)
            return status

        try:
            self.wait_for(function, call)
        except CollectiveError:
            clear_failed(self.device, self)  # it had no calls that write memory
            raise
        monitor.watch(self)
        return self

    def wait_for(self, function: str, start: Callable[[], int]) -> None:
        """Make a call that the other ranks make, too, and wait until NCCL has enqueued it; raises as `settle`."""

        def call() -> int:
            with self.device.context, relaxed():
                return start()

        try:  # a blocking call runs on a separate thread, which may stay inside NCCL
            status = call_with_timeout(self.deadline, call, function) if self.config.blocking else call()
        except CollectiveError as error:
            self.raise_failed(error)
        with self.device.context, relaxed():
            self.settle(function, status)

    def split(self, color: int | None, key: int = 0) -> Self | None:
        numbers = [ctypes.c_int(NO_COLOR if number is None else number) for number in check_split(color, key)]

        def start(handle: Any, settings: Any) -> int:
            return int(nccl.ncclCommSplit.unchecked(self.c_handle, *numbers, *map(ctypes.byref, (handle, settings))))

        return self._derive("ncclCommSplit", start)

    def shrink(self, exclude: Sequence[int], *, aborting: bool = False) -> Self:
        """The communicator of the ranks not in `exclude`; only these call it. `aborting` ends running calls first."""
        listed = (ctypes.c_int * len(exclude))(*exclude)

        def start(handle: Any, settings: Any) -> int:
            count, flags = ctypes.c_int(len(exclude)), ctypes.c_int(ABORTING if aborting else 0)
            result, c_settings = ctypes.byref(handle), ctypes.byref(settings)
            return int(nccl.ncclCommShrink.unchecked(self.c_handle, listed, count, result, c_settings, flags))

        return self._derive_one("ncclCommShrink", start)

    def growing_id(self) -> bytes:
        """The id, 128 bytes, of one growth: one rank gets it, and passes it to new ranks' `join` and its own `grow`."""
        self.check()
        require((2, 29, 0), "ncclCommGrow")
        with self.device.context, relaxed(), self.lock:
            nccl.ncclCommGetUniqueId(self.c_handle, ctypes.byref(c_id := nccl.ncclUniqueId()))
        return bytes(c_id)

    def grow(self, size: int, identity: bytes | None = None) -> Self:
        """The communicator of these ranks, with the same numbers, and of new ones that `join`; `size` ranks in total.

        All ranks call this; the one with the `growing_id` passes it. This communicator is kept. Needs NCCL 2.29.
        """
        check_int("size", size, self.size + 1, 1 << 30)
        require((2, 29, 0), "ncclCommGrow")
        c_id = None if identity is None else nccl.ncclUniqueId.from_buffer_copy(identity)
        return self._derive_one("ncclCommGrow", partial(_grow, self.c_handle, size, c_id, -1))

    def _derive_one(self, function: str, start: Callable[[Any, Any], int]) -> Self:
        comm = self._derive(function, start)
        if comm is None:
            raise CollectiveError(f"{self!r}: {function} made no communicator")
        return comm

    def _derive(self, function: str, start: Callable[[Any, Any], int]) -> Self | None:
        self.check()
        handle, settings = nccl.ncclComm_t(), c_config(self.config)
        self.wait_for(function, lambda: start(handle, settings))
        if not handle.value:
            return None
        ranks = [ctypes.c_int(), ctypes.c_int()]
        comm = type(self)(handle, 0, 1, self.device, self.config, generation=self.generation, deadline=self.deadline)
        with self.device.context, relaxed():
            comm.settle(function, IN_PROGRESS)
            nccl.ncclCommUserRank(handle, ctypes.byref(ranks[0]))
            nccl.ncclCommCount(handle, ctypes.byref(ranks[1]))
            comm.rank, comm.size = (each.value for each in ranks)
        monitor.watch(comm)
        return comm

    wait_for_work = monitor.wait_for_work
    is_idle = property(monitor.is_idle)

    # -- calls ----------------------------------------------------------------------------------------------------
    def settle(self, function: str, status: int) -> None:
        """Wait until NCCL has finished a call that returned a status; CollectiveTimeout, RankLost, CollectiveError.

        The call's work is enqueued then, but not done.
        """
        if status == SUCCESS:
            return
        until, pause = time.monotonic() + self.deadline, SHORTEST
        while status == IN_PROGRESS:
            status = self.async_status()
            if status == IN_PROGRESS:
                if time.monotonic() > until:
                    self.raise_failed(CollectiveTimeout(f"{self!r}: {function} took more than {self.deadline:g} s"))
                time.sleep(pause)
                pause = min(2 * pause, LONGEST)
        if status:
            self.raise_status(function, status)

    def raise_status(self, function: str, status: int) -> None:
        """Raise the error of a status; the communicator fails, unless the call had no effect."""
        if self.error is not None:
            raise self.failure()
        cause = getattr(nccl, function).error(status)
        error = (RankLost if status == REMOTE else CollectiveError)(f"{self!r}: {cause}")
        error.__cause__ = cause
        if status == INVALID_ARGUMENT:
            raise error
        self.raise_failed(error)

    def async_status(self) -> int:
        """NCCL's status of the communicator: 0, 7 while a call is in progress, or an error."""
        result = ctypes.c_int()
        if not self.lock.acquire(timeout=LONGEST_CALL):  # another thread's call is inside NCCL
            return IN_PROGRESS
        try:
            self.check()
            status = nccl.ncclCommGetAsyncError.unchecked(self.c_handle, ctypes.byref(result))
        finally:
            self.lock.release()
        return int(status or result.value)

    def record_work(self, stream: ctypes.c_void_p, what: str) -> None:
        """Make the monitor watch the work that was enqueued last on a stream.

        There are at most two events per stream: that of the oldest call, and one for all later calls, which each of
        them records again. Once the oldest call is done, the other event is polled, with the deadline of the latest
        call. So the monitor queries two events and not one for each call; the calling thread waits while it does.
        """
        until, handle = time.monotonic() + self.deadline, stream.value
        with self.pending_lock:
            last = self.pending[-1] if len(self.pending) > 1 else None
            if last is not None and last.stream == handle:
                status = driver.cuEventRecord.unchecked(last.event, stream)
                last.until, last.what = until, what
            else:
                with self.device.context:
                    event = self.device.event()
                status = driver.cuEventRecord.unchecked(event, stream)
                if status:
                    self.device.recycle(event)
                else:
                    self.pending.append(PendingWork(event, handle, until, what))
        if status:
            self.device.fail(status, "cuEventRecord")

    def watch(self, stream: Any = None) -> None:
        """Apply the deadline to the work on a stream so far, such as a launched graph that contains collectives."""
        watched = self.device.executor().stream if stream is None else stream
        with self.device.context, relaxed():
            self.record_work(watched.c_handle, "a graph")

    @property
    def barrier_token(self) -> Any:
        """One element of device memory for barriers; its value is never read."""
        if self._barrier_token is None:
            self._barrier_token = self.device.zeros((1,), "u8")
        return self._barrier_token

    # -- the end ----------------------------------------------------------------------------------------------------
    def stop(self) -> None:
        """Abort: kernels of its collectives end, and their outputs must not be read."""
        mark_failed(self.device, self, self.failure())
        has_lock = self.lock.acquire(timeout=LONGEST_CALL)  # else a call is inside NCCL, and the abort ends it
        try:
            handle, self.c_handle = self.c_handle, nccl.ncclComm_t()
        finally:
            if has_lock:
                self.lock.release()
        if handle.value:
            self.is_aborted = True
            # It may wait for the GPU, on which other work may hang: the failing thread must not wait for that.
            threading.Thread(target=self._abort, args=(handle,), name="nccl abort", daemon=True).start()
            if self.graphs:  # the abort ends their kernels first, and then waits until they are destroyed
                threading.Thread(target=self._destroy_graphs, name="nccl graphs", daemon=True).start()

    def _destroy_graphs(self) -> None:
        for graph in members(self.graphs):
            graph.destroy()

    def _abort(self, handle: Any) -> None:
        with relaxed(), self.device.context:
            nccl.ncclCommAbort.unchecked(handle)

    def release(self) -> None:
        """Wait for the running calls on all ranks, and destroy the communicator."""
        self._destroy_graphs()
        with self.lock:
            handle, self.c_handle = self.c_handle, nccl.ncclComm_t()
        if not handle.value or not self.device.alive or self.device.fault is not None:
            return
        claim = threading.Lock()  # only the thread that acquires it ends the handle
        if self.in_graphs:  # NCCL waits until the caller destroys these graphs
            is_done = self.wait_for_work(self.deadline)
            end = partial(self._finalize, handle, claim) if is_done else partial(self._abort, handle)
            threading.Thread(target=end, name="ncclCommFinalize", daemon=True).start()
            return
        try:
            call_with_timeout(self.deadline, lambda: self._finalize(handle, claim), "ncclCommFinalize")
        except CollectiveError:  # the running calls do not end
            if claim.acquire(blocking=False):
                threading.Thread(target=self._abort, args=(handle,), name="nccl abort", daemon=True).start()

    def _finalize(self, handle: Any, claim: threading.Lock) -> None:
        """Wait for the running calls, and destroy the communicator, unless another thread has aborted it."""
        with relaxed(), self.device.context:
            if claim.locked():  # this thread began so late that the handle was aborted before
                return
            status, result = nccl.ncclCommFinalize.unchecked(handle), ctypes.c_int()
            while status == IN_PROGRESS and not claim.locked():
                time.sleep(LONGEST)
                status = nccl.ncclCommGetAsyncError.unchecked(handle, ctypes.byref(result)) or result.value
            if claim.acquire(blocking=False):
                end = nccl.ncclCommAbort if status else nccl.ncclCommDestroy  # abort it if it could not be finalized
                end.unchecked(handle)

    def close(self) -> None:
        super().close()
        clear_failed(self.device, self)
        with self.pending_lock:
            while self.pending:
                self.device.recycle(self.pending.popleft().event)


def _grow(comm: Any, size: int, c_id: Any, rank: int, handle: Any, settings: Any) -> int:
    identity = None if c_id is None else ctypes.byref(c_id)
    arguments = (comm, ctypes.c_int(size), identity, ctypes.c_int(rank), ctypes.byref(handle), ctypes.byref(settings))
    return int(nccl.ncclCommGrow.unchecked(*arguments))


def solo(device: Device) -> NcclCommunicator:
    """A communicator of one rank, this GPU."""
    return NcclCommunicator.create(device, 0, 1, unique_id())
