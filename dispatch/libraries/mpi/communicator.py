"""MPI's communicators: each call begins without waiting, and is polled until it is done or its deadline is over.

MPI itself waits for ever for a rank that hangs. If the library is fault-tolerant (Open MPI under `mpirun --with-ft
ulfm`, MPI 5's chapter on fault tolerance), the end of a rank is reported at once, and `Revoke` reports it to all ranks.
This module does not ask MPI which ranks are alive then, because MPI would wait for a stopped rank: `World.rebuild`
determines the living ranks, and makes the next communicator with `regroup`. MPI has no floating-point types of 16 and 8
bits: ops/collective converts the data. This module does not depend on any op.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dispatch.core.communicator import DEADLINE, Communicator, check_split
from dispatch.core.timeout import call_with_timeout
from dispatch.errors import BadRequest, CollectiveError, CollectiveTimeout, DeviceUnavailable, RankLost
from dispatch.libraries.mpi.process_exit import exit_without_finalize

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

    from dispatch.device.device import Device

    Comm = Any  # mpi4py.MPI.Intracomm, whose types exist only if it is installed

__all__ = ["MpiCommunicator", "mpi"]

SPIN = 200e-6  # seconds for which a request is polled without a pause: small calls are done by then
SHORTEST, LONGEST = 20e-6, 1e-3  # seconds between polls after that
_abandoned: list[Any] = []  # requests that never end, and their memory, which MPI may still read or write


def mpi() -> Any:
    """mpi4py's module MPI, which initializes MPI if needed; DeviceUnavailable if it is not installed."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py without an MPI raises RuntimeError
        requirement = "mpi4py and an MPI: pip install 'cudabind[mpi]'"
        raise DeviceUnavailable(f"collectives between processes of the host need {requirement}; {error}") from error
    return MPI


class MpiCommunicator(Communicator):
    """A communicator of MPI, for host memory; `comm` is mpi4py's communicator of the same ranks.

    `base` is the group of processes that later communicators are made of, and `name` a name that only these ranks use.
    """

    library = "mpi"
    counts_calls = True

    def __init__(
        self, comm: Comm, device: Device, name: str, *, generation: int = 0, deadline: float = DEADLINE
    ) -> None:
        if not device.is_host:
            raise BadRequest("device", str(device), "the host", "for tensors on GPUs use NCCL")
        super().__init__(comm.rank, comm.size, device, generation=generation, deadline=deadline)
        self.comm, self.name = comm, name
        self.base = comm.Get_group()
        self._splits = 0

    @classmethod
    def duplicate(cls, comm: Comm, device: Device, name: str, *, deadline: float = DEADLINE) -> Self:
        """A duplicate of a user's communicator, with separate messages; all ranks of the communicator call this."""
        duplicate = call_with_timeout(deadline, comm.Dup, f"duplicating {name}")
        return cls(duplicate, device, name, deadline=deadline)

    def regroup(self, ranks: Sequence[int], generation: int, deadline: float) -> Self:
        """The communicator of the surviving ranks of this one, in this order; only these call it, at the same time."""
        name = f"{self.name}/{generation}"
        return type(self)(self._create_comm(ranks, name), self.device, name, generation=generation, deadline=deadline)

    def _create_comm(self, ranks: Sequence[int], name: str) -> Comm:
        group = self.base.Incl(list(ranks))
        # The only call that needs nothing from the other ranks, whether they have ended, are stopped, or are unknown.
        return call_with_timeout(
            self.deadline, lambda: mpi().Intracomm.Create_from_group(group, name), f"making {name}"
        )

    def begin(self, what: str, start: Callable[[], Any], *keep: Any) -> Callable[[], None]:
        """Begin a call that returns an MPI request; the returned function waits for it. `keep` is memory that it uses.

        Raises CollectiveTimeout if it is not done by the deadline, RankLost if MPI reports that a rank has ended.
        """
        self.check()
        until = time.monotonic() + self.deadline
        try:
            request = start()
        except mpi().Exception as error:
            self._raise(what, error)

        def finish() -> None:
            try:
                self._wait(what, request, until)
            except BaseException:
                _abandoned.append((request, keep))
                raise

        return finish

    def compare(self, call: str) -> Callable[[], None]:
        """Begin to compare the description of a call between all ranks; the returned function waits for that.

        It raises CollectiveError on all ranks if the descriptions differ, RankLost if a rank has closed its world and
        does not make this call. A digest of 8 bytes is exchanged.
        """
        import numpy as np

        self.count_call()
        digest = int.from_bytes(hashlib.blake2b(call.encode(), digest_size=8).digest(), "little", signed=True)
        local, largest = np.array([digest, ~digest], np.int64), np.empty(2, np.int64)
        wait = self.begin(call, lambda: self.comm.Iallreduce(local, largest, mpi().MAX), local, largest)

        def finish() -> None:
            wait()
            if largest[0] != ~largest[1]:  # the largest digest differs from the smallest
                difference = f"this rank calls {call}, another rank makes a different call"
                self.raise_failed(CollectiveError(f"{self!r}: ranks disagree: {difference}"))

        return finish

    def abandon(self, call: object) -> None:
        """Keep a call, with its memory, that has begun but that no thread waits for any more."""
        _abandoned.append(call)

    def _wait(self, what: str, request: Any, until: float) -> None:
        begun, pause = time.monotonic(), SHORTEST
        while True:
            try:
                if request.Test():
                    return
            except mpi().Exception as error:
                self._raise(what, error)
            if self.error is not None:
                if not self.error.has_closed:  # else the other ranks find out by their own next call
                    self._revoke()
                raise self.failure()
            now = time.monotonic()
            if now > until:
                self._revoke()
                self.raise_failed(CollectiveTimeout(f"{self!r}: {what} did not complete within {self.deadline:g} s"))
            if now - begun > SPIN:
                time.sleep(min(pause, until - now + 1e-6))
                pause = min(2 * pause, LONGEST)

    def _raise(self, what: str, error: Any) -> Any:
        """Fail with MPI's error; if ranks have ended, MPI knows which."""
        self._revoke()
        kind = error.Get_error_class()
        MPI = mpi()
        lost_codes = {
            getattr(MPI, name, None) for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
        }
        if kind not in lost_codes:
            failed = CollectiveError(f"{self!r}: {what} failed: {error}")
        else:
            ranks = self._failed_ranks()
            who = (
                f"rank {', '.join(map(str, ranks))} has ended" if ranks else "another rank has aborted the communicator"
            )
            failed = RankLost(f"{self!r}: {what}: {who}", ranks)
        failed.__cause__ = error
        return self.raise_failed(failed)

    def _failed_ranks(self) -> tuple[int, ...]:
        """The ranks that have ended, as far as MPI knows."""
        MPI = mpi()
        with suppress(MPI.Exception, NotImplementedError, AttributeError):
            ended = self.comm.Get_failed()
            base_ranks = MPI.Group.Translate_ranks(ended, list(range(ended.Get_size())), self.base)
            return tuple(int(rank) for rank in base_ranks if rank >= 0)
        return ()

    def _revoke(self) -> None:
        """End the other ranks' calls on this communicator, if MPI can; only the thread that calls MPI may do this."""
        with suppress(mpi().Exception, NotImplementedError, AttributeError):
            self.comm.Revoke()

    def stop(self) -> None:
        """Skip MPI_Finalize, which would wait for lost ranks; threads that wait for a request see the error.

        Ranks that have only closed their worlds are not lost to it: they call it, and would wait there for this one.
        """
        if self.error is None or not self.error.has_closed:
            exit_without_finalize()

    def release(self) -> None:
        """Free it, together with the other ranks; if they do not call this, it ends with the process."""
        if not mpi().Is_finalized():
            with suppress(CollectiveError):
                call_with_timeout(self.deadline, self.comm.Free, "freeing a communicator")

    def split(self, color: int | None, key: int = 0) -> Self | None:
        color, key = check_split(color, key)
        entries = [[0, 0, 0] for _ in range(self.size)]
        own_entry = [color is not None, color or 0, key]
        import numpy as np

        sent, received = np.array(own_entry, np.int64), np.empty((self.size, 3), np.int64)
        self.begin("split", lambda: self.comm.Iallgather(sent, received), sent, received)()
        self._splits += 1
        entries = received.tolist()
        if color is None:
            return None
        ranks = [rank for rank in range(self.size) if entries[rank][0] and entries[rank][1] == color]
        ranks.sort(key=lambda rank: entries[rank][2])
        name = f"{self.name}/split {self._splits}/{color}"
        comm = self._create_comm(ranks, name)
        return type(self)(comm, self.device, name, generation=self.generation, deadline=self.deadline)
