"""Communicators of gloo, as packaged with PyTorch: each call begins without waiting, and is polled until it is done.

They are for processes on the host that mpirun has not started, such as Ray actors: Open MPI refuses ports between
those. The ranks meet at a `TCPStore`, which one of them serves. Gloo only moves bytes; ops/collective reduces the data.
When a rank ends, its connections close and the other ranks notice at once; a rank that hangs exceeds the deadline.
Follows https://docs.pytorch.org/docs/stable/distributed.html. This module does not depend on any op.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.communicator import DEADLINE, Communicator, check_split
from dispatch.core.timeout import call_with_timeout
from dispatch.errors import BadRequest, CollectiveError, CollectiveTimeout, DeviceUnavailable, RankLost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

    from dispatch.device.device import Device
    from dispatch.device.layout import Array

__all__ = ["GlooCommunicator", "StoreAddress", "gloo", "serve_store"]

SPIN = 200e-6  # seconds for which a call is polled without a pause
SHORTEST, LONGEST = 20e-6, 1e-3  # seconds between polls after that
RANK_LOST_WAIT = 0.2  # seconds to wait for the world to report the rank whose connection has ended
_abandoned: list[Any] = []  # calls that may never end, and their memory, which gloo may still read or write


def gloo() -> Any:
    """The module torch.distributed, with gloo; DeviceUnavailable if it is not installed."""
    requirement = "collectives between processes of the host that mpirun has not started need PyTorch with gloo"
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise DeviceUnavailable(f"{requirement}: pip install torch; {error}") from error
    if not dist.is_available() or not dist.is_gloo_available():
        raise DeviceUnavailable(f"{requirement}, and this build of PyTorch has no gloo")
    return dist


class StoreAddress(NamedTuple):
    """The address of the store that one rank of a communicator serves, and a name that only these ranks use."""

    host: str
    port: int
    name: str


def serve_store(host: str, deadline: float) -> Any:
    """A store that listens at a free port of this machine while it is referenced; `host` is this machine's address."""
    dist = gloo()
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=deadline))


class GlooCommunicator(Communicator):
    """A communicator of gloo, in memory of the host."""

    library = "gloo"
    counts_calls = True

    def __init__(
        self,
        group: Any,
        store: Any,
        own_host: str,
        rank: int,
        size: int,
        device: Device,
        *,
        generation: int = 0,
        deadline: float = DEADLINE,
    ) -> None:
        super().__init__(rank, size, device, generation=generation, deadline=deadline)
        self._group, self._store, self._own_host = group, store, own_host
        self._splits = 0
        self._self_messages: deque[Array] = deque()  # messages of this rank to itself

    @classmethod
    def create(
        cls,
        device: Device,
        rank: int,
        size: int,
        address: StoreAddress,
        own_host: str,
        *,
        generation: int = 0,
        deadline: float = DEADLINE,
    ) -> Self:
        """Join a communicator as one of its ranks; all ranks call this together. `own_host` is this rank's address.

        CollectiveTimeout if not all ranks join within the deadline.
        """
        if not device.is_host:
            raise BadRequest("device", str(device), "the host", "for tensors on GPUs use NCCL")
        dist, most = gloo(), timedelta(seconds=deadline)

        def connect() -> tuple[Any, Any]:
            store = dist.TCPStore(address.host, address.port, is_master=False, wait_for_workers=False, timeout=most)
            return _group(store, address.name, own_host, rank, size, deadline), store

        group, store = call_with_timeout(deadline, connect, f"meeting at {address.host}:{address.port}")
        return cls(group, store, own_host, rank, size, device, generation=generation, deadline=deadline)

    # -- calls --------------------------------------------------------------------------------------------------------
    def begin(self, what: str, start: Callable[[Any], Any], *keep: Any) -> Callable[[], None]:
        """Begin a call, `start(group)`; the returned function waits for it. `keep` is the memory that it uses.

        Raises CollectiveTimeout if it is not done by the deadline, RankLost if a connection has ended.
        """
        self.check()
        until = time.monotonic() + self.deadline
        try:
            work = start(self._group)
        except RuntimeError as error:
            self._raise(what, error)

        def finish() -> None:
            try:
                self._wait(what, work, until)
            except BaseException:
                _abandoned.append((work, keep))
                raise

        return finish

    def exchange(self, what: str, parts: Sequence[Array], sizes: Sequence[int]) -> Callable[[], list[Array]]:
        """Send each rank its part (bytes, one-dimensional) and receive a part of `sizes[rank]` bytes from each.

        The returned function waits for the parts and returns them. Empty parts are not sent.
        """
        import torch

        sent, buffer = np.concatenate(parts), np.empty(sum(sizes), np.uint8)
        input_sizes = [part.size for part in parts]
        into, out_of = torch.from_numpy(buffer), torch.from_numpy(sent)
        options = gloo().AllToAllOptions()
        wait = self.begin(
            what, lambda group: group.alltoall_base(into, out_of, list(sizes), input_sizes, options), into, out_of
        )

        def finish() -> list[Array]:
            wait()
            ends = np.cumsum(sizes)
            return [buffer[end - size : end] for end, size in zip(ends, sizes, strict=True)]

        return finish

    def broadcast(self, what: str, data: Array, root: int) -> Callable[[], None]:
        """Overwrite `data` (bytes, one-dimensional) on all ranks with that of the root."""
        import torch

        options, tensor = gloo().BroadcastOptions(), torch.from_numpy(data)
        options.rootRank, options.rootTensor = root, 0
        return self.begin(what, lambda group: group.broadcast([tensor], options), tensor)

    def send(self, what: str, data: Array, peer: int, tag: int) -> Callable[[], None]:
        """Send bytes to one rank, which calls `receive`."""
        import torch

        if peer == self.rank:  # gloo has no connection of a rank to itself
            self._self_messages.append(data)
            return self.check
        tensor = torch.from_numpy(data)
        return self.begin(what, lambda group: _Message(group.send([tensor], peer, tag), self.deadline), tensor)

    def receive(self, what: str, buffer: Array, peer: int, tag: int) -> Callable[[], None]:
        """Receive bytes from one rank into a buffer."""
        import torch

        if peer == self.rank:
            return lambda: self._receive_from_self(what, buffer)
        tensor = torch.from_numpy(buffer)
        return self.begin(what, lambda group: _Message(group.recv([tensor], peer, tag), self.deadline), tensor)

    def _receive_from_self(self, what: str, buffer: Array) -> None:
        self.check()
        if not self._self_messages:
            self.raise_failed(
                CollectiveTimeout(f"{self!r}: {what}: it waits for a message from itself that it has not sent")
            )
        buffer[:] = self._self_messages.popleft()

    def compare(self, call: str) -> Callable[[], None]:
        """Begin to compare the description of a call between all ranks; the returned function waits for that.

        It raises CollectiveError on all ranks if the descriptions differ, RankLost if a rank has closed its world and
        does not make this call. A digest of 8 bytes is exchanged.
        """
        import torch

        dist = gloo()
        self.count_call()
        digest = int.from_bytes(hashlib.blake2b(call.encode(), digest_size=8).digest(), "little", signed=True)
        maxima, options = torch.tensor([digest, ~digest]), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        wait = self.begin(call, lambda group: group.allreduce([maxima], options), maxima)

        def finish() -> None:
            wait()
            largest, smallest = maxima.tolist()
            if largest != ~smallest:
                difference = f"this rank calls {call}, another rank makes a different call"
                self.raise_failed(CollectiveError(f"{self!r}: ranks disagree: {difference}"))

        return finish

    def _wait(self, what: str, work: Any, until: float) -> None:
        begun, pause = time.monotonic(), SHORTEST
        while not work.is_completed():
            self._check_error()
            now = time.monotonic()
            if now > until:
                self.raise_failed(CollectiveTimeout(f"{self!r}: {what} did not complete within {self.deadline:g} s"))
            if now - begun > SPIN:
                time.sleep(min(pause, until - now + 1e-6))
                pause = min(2 * pause, LONGEST)
        try:
            work.wait()  # raises the error of the call, if any
        except RuntimeError as error:
            self._raise(what, error)

    def _check_error(self) -> None:
        if self.error is not None:
            raise self.failure()

    def _raise(self, what: str, error: RuntimeError) -> Any:
        """Fail with the error that corresponds to gloo's message."""
        text = str(error).split("] ", 1)[-1].split(". This is")[0]
        if "Timed out" in text:
            failed: CollectiveError = CollectiveTimeout(
                f"{self!r}: {what} did not complete before its deadline: {text}"
            )
        elif "onnection" in text or "Broken pipe" in text or "closed" in text:
            self._wait_for_lost_rank()
            failed = RankLost(f"{self!r}: {what}: another rank has ended, or has aborted the communicator: {text}")
        else:
            failed = CollectiveError(f"{self!r}: {what} failed: {text}")
        failed.__cause__ = error
        return self.raise_failed(failed)

    def _wait_for_lost_rank(self) -> None:
        """Give the world a moment to report which rank has ended, because gloo does not know that."""
        until = time.monotonic() + RANK_LOST_WAIT
        while self.error is None and time.monotonic() < until:
            time.sleep(LONGEST)

    # -- the end ------------------------------------------------------------------------------------------------------
    def stop(self) -> None:
        """Close the connections, so that waiting ranks notice."""
        threading.Thread(target=_abort, args=(self._group,), name="gloo abort", daemon=True).start()

    def release(self) -> None:
        """Drop the group; calls that others wait for are done."""
        group, self._group, self._store = self._group, None, None
        del group

    def split(self, color: int | None, key: int = 0) -> Self | None:
        color, key = check_split(color, key)
        self.check()
        own_entry = np.array([color is not None, color or 0, key], np.int64).view(np.uint8)
        parts = self.exchange("split", [own_entry] * self.size, [own_entry.size] * self.size)()
        entries = [part.view(np.int64).tolist() for part in parts]
        self._splits += 1
        if color is None:
            return None
        ranks = sorted(rank for rank in range(self.size) if entries[rank][0] and entries[rank][1] == color)
        ranks.sort(key=lambda rank: entries[rank][2])
        new_rank, size, name = ranks.index(self.rank), len(ranks), f"split {self._splits}/{color}"

        def connect() -> Any:
            return _group(self._store, name, self._own_host, new_rank, size, self.deadline)

        group = call_with_timeout(self.deadline, connect, f"making {name}")
        store = gloo().PrefixStore(name, self._store)  # for splits of the new communicator
        return type(self)(
            group,
            store,
            self._own_host,
            new_rank,
            size,
            self.device,
            generation=self.generation,
            deadline=self.deadline,
        )


class _Message:
    """A message between two ranks: gloo reports its end only to a waiting thread, so a separate thread waits."""

    def __init__(self, work: Any, deadline: float) -> None:
        self._error: RuntimeError | None = None
        self._thread = threading.Thread(target=self._run, args=(work, deadline), name="gloo message", daemon=True)
        self._thread.start()

    def _run(self, work: Any, deadline: float) -> None:
        try:
            work.wait(timedelta(seconds=deadline))
        except RuntimeError as error:
            self._error = error

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        if self._error is not None:
            raise self._error


def _group(store: Any, name: str, own_host: str, rank: int, size: int, deadline: float) -> Any:
    """A process group of gloo, with connections between all ranks."""
    dist = gloo()
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=deadline)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_host)]
    return dist.ProcessGroupGloo(dist.PrefixStore(f"{name}/", store), rank, size, options)


def _abort(group: Any) -> None:
    with suppress(RuntimeError, AttributeError):  # PyTorch before 2.8 has no abort: its calls end by gloo's timeout
        group.abort()
