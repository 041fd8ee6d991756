"""LocalWorld: the world of one process, with a thread for each rank, each on its own GPU or all on the host."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from threading import get_ident
from typing import TYPE_CHECKING, Any, Concatenate, TypeVar

from dispatch.checks import check_number
from dispatch.device.disposal import start_disposal_thread, stop_disposal_thread
from dispatch.errors import BadRequest, Closed, CollectiveError
from dispatch.world.membership import Membership
from dispatch.world.mesh import ThreadMesh
from dispatch.world.ranks import CommunicatorMaker, RankWorld
from dispatch.world.start import nccl_maker, resolve_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from typing_extensions import ParamSpec, Self

    from dispatch.core.communicator import Communicator
    from dispatch.device.device import Device
    from dispatch.libraries.nccl.config import NcclConfig

    P = ParamSpec("P")

__all__ = ["LocalWorld"]

T = TypeVar("T")


class LocalWorld:
    """The ranks of one process; `run` calls a function on the thread of each.

    Attributes:
        worlds: the world of each rank, in rank order. One thread may make the calls of all of them, in a
            `collective_group()`.
    """

    def __init__(
        self,
        devices: Sequence[Device | str],
        *,
        deadline: float = 300.0,
        kind: type[RankWorld] = RankWorld,
        config: NcclConfig | None = None,
    ) -> None:
        check_number("deadline", deadline, low=1e-3, high=1e9)
        if isinstance(devices, str) or not isinstance(devices, Iterable):
            raise BadRequest("devices", repr(devices), "a list with a device for each rank", 'such as ["host"] * 4')
        homes = [resolve_device(each, "host") for each in devices]
        if not homes or len({home.is_host for home in homes}) > 1:
            raise BadRequest("devices", f"{[str(home) for home in homes]}", "only GPUs, or only the host, repeated")
        if not homes[0].is_host and len(set(homes)) < len(homes):
            raise BadRequest(
                "devices", f"{[str(home) for home in homes]}", "each GPU once, because NCCL does not accept a GPU twice"
            )
        self.closed, self._deadline, self._devices, self._kind = False, deadline, homes, kind
        self._maker = _threads_maker() if homes[0].is_host else nccl_maker(config)
        self._has_disposal_thread = False
        self._threads = [ThreadPoolExecutor(1, f"rank {number}") for number in range(len(homes))]
        self._calling_threads: set[int] = set()  # the threads that are in a function of `run`
        self._process = os.getpid()
        self._generation = 0
        self.worlds: tuple[RankWorld, ...] = ()
        try:
            if len(homes) > 1:
                start_disposal_thread()
                self._has_disposal_thread = True
            self._start_worlds()
        except BaseException:
            self._stop()
            raise

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self._devices)

    def _start_worlds(self) -> None:
        """Make the worlds of all ranks, each on its own thread."""
        shared: list[ThreadMesh] = []
        meshes = [ThreadMesh(rank, shared) for rank in range(self.size)]
        agreed = Membership(tuple(range(self.size)), self._generation, self._maker.payload(self.size))
        worlds = [
            thread.submit(self._kind, mesh, agreed, device, self._deadline, self._maker)
            for thread, mesh, device in zip(self._threads, meshes, self._devices, strict=True)
        ]
        self._meshes, self.worlds = meshes, tuple(each.result() for each in worlds)

    def run(self, function: Callable[Concatenate[RankWorld, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Call `function(world, …)` on each rank's thread, and return the results in rank order.

        If a function raises, its rank is lost to the others, whose collectives fail; they may `rebuild` and continue.
        Once all have ended, the first error other than a CollectiveError is raised here, or else the first error,
        because CollectiveErrors follow from others. Different errors of other ranks are added as notes (Python 3.11).
        After that, call `rebuild` first.
        """
        self._check()
        errors: list[BaseException] = []  # in the order in which they were raised
        futures = [
            thread.submit(self._on_rank, rank, errors, function, args, kwargs)
            for rank, thread in enumerate(self._threads)
        ]
        wait(futures)
        for mesh in self._meshes:
            mesh.forget_lost()  # all threads are idle again: ranks that failed may rebuild together
        if errors:
            raise _root_error(errors)
        return [future.result() for future in futures]

    def _on_rank(self, rank: int, errors: list[BaseException], function: Callable[..., T], args: Any, kwargs: Any) -> T:
        world = self.worlds[rank]
        self._calling_threads.add(get_ident())
        try:
            return function(world, *args, **kwargs)
        except BaseException as error:
            errors.append(error)  # before the other ranks learn of it, so that their errors come later
            self._meshes[rank].mark_lost()
            raise
        finally:
            self._calling_threads.discard(get_ident())

    def rebuild(self) -> Self:
        """Make a new communicator over all ranks, including those that failed; their memory is unchanged."""
        self._check()
        self._generation = 1 + max(world.generation for world in self.worlds)
        for world in self.worlds:
            world.communicator.abort("its world was rebuilt")
            world.close()
        self._start_worlds()
        return self

    def _check(self) -> None:
        if self._process != os.getpid():
            raise Closed(
                f"{self!r} was created before os.fork(), and its threads do not exist in the child; create a world in"
                " the child"
            )
        if self.closed:
            raise Closed(f"{self!r} was closed")
        self._refuse_ranks("run")

    def _refuse_ranks(self, method: str) -> None:
        """BadRequest on the thread of a rank, which would wait for itself."""
        if get_ident() in self._calling_threads:
            hint = "a rank calls the methods of the `world` that its function receives"
            raise BadRequest(method, "a call inside a rank's function", "a call outside of it", hint)

    def close(self) -> None:
        """Close all worlds and end the threads; a second call does nothing."""
        if self._process != os.getpid():  # a forked child has no thread to end
            self.closed = True
        if not self.closed:
            self._refuse_ranks("close")
            self.closed = True
            for thread, world in zip(self._threads, self.worlds, strict=True):
                thread.submit(world.close)  # all at once, because each waits for the others' work
            self._stop()

    def _stop(self) -> None:
        for thread in self._threads:
            thread.shutdown()
        if self._has_disposal_thread:
            stop_disposal_thread()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            for world in self.worlds:
                world.communicator.abort(f"the block of its world ended with {type(error).__name__}")
        self.close()

    def __repr__(self) -> str:
        return f"<LocalWorld: {self.size} ranks on {', '.join(map(str, self._devices))}>"


def _root_error(errors: list[BaseException]) -> BaseException:
    """The error that the others follow from, with the others as notes."""
    first = next((error for error in errors if not isinstance(error, CollectiveError)), errors[0])
    if hasattr(first, "add_note"):
        for text in dict.fromkeys(f"{type(error).__name__}: {error}" for error in errors if error is not first):
            if text != f"{type(first).__name__}: {first}":
                first.add_note(f"on another rank: {text}")
    return first


def _threads_maker() -> CommunicatorMaker:
    """Makes communicators of threads, which share a Rendezvous."""
    from dispatch.libraries.threads.communicator import Rendezvous, ThreadCommunicator

    def make(agreed: Membership, rank: int, device: Device, deadline: float) -> Communicator:
        return ThreadCommunicator(agreed.payload, rank, device, generation=agreed.generation, deadline=deadline)

    return CommunicatorMaker(Rendezvous, make)
