"""World: the ways in which a program's ranks begin. What a world is and does stands in ranks.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.world.from_ray import from_ray
from dispatch.world.local import LocalWorld
from dispatch.world.ranks import RankWorld
from dispatch.world.start import from_env, from_mpi

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

    from dispatch.device.device import Device
    from dispatch.libraries.nccl.config import NcclConfig

__all__ = ["World"]


class World(RankWorld):
    """The ranks of a program, as one of them sees them.

    Collective requests take it for their `comm`. Its communicator is one generation of it: once that has failed, as a
    rank was lost or a deadline passed, every call on it raises, on all ranks, and `rebuild` makes the next over those
    that live. Their numbers are 0, 1, … again, in the order that they had; `members` are those they began with.

    Attributes:
        rank, size: this rank, and how many there are, of the present generation.
        device: whose memory its collectives move.
        generation: 0, and one more with each communicator.
        deadline: seconds that a collective may take.
        members: the numbers with which the present ranks began, in their order.
        communicator: of the present generation; a call that is to be quick is given this one.
    """

    @classmethod
    def from_env(
        cls,
        device: Device | str | None = None,
        *,
        deadline: float = 300.0,
        port: int | None = None,
        config: NcclConfig | None = None,
    ) -> Self:
        """The world of processes that torchrun has started, or another launcher with its variables.

        RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR say who is who; they meet at `port`, one above MASTER_PORT where it
        is not said. `device` is cuda:LOCAL_RANK unless it is said, `config` how NCCL is to work. CollectiveTimeout
        where not all come in time.
        """
        return from_env(cls, device, deadline, port, config)

    @classmethod
    def from_mpi(
        cls,
        comm: Any = None,
        device: Device | str | None = None,
        *,
        deadline: float = 300.0,
        config: NcclConfig | None = None,
    ) -> Self:
        """The world of processes that mpirun has started: those of a communicator of mpi4py, COMM_WORLD for None.

        On the host, which is where it is unless a GPU is said, MPI moves the data; on GPUs NCCL. Under Open MPI begin
        with `mpirun --with-ft ulfm`: else mpirun ends all ranks where one ends.
        """
        return from_mpi(cls, comm, device, deadline, config)

    @classmethod
    def from_ray(
        cls,
        name: str,
        rank: int,
        size: int,
        device: Device | str | None = None,
        *,
        restarts: bool = False,
        deadline: float = 300.0,
        config: NcclConfig | None = None,
    ) -> Self:
        """The world of Ray's actors, each of which calls this with its rank, and all with one name that only they use.

        `device` is the first GPU that Ray has given the actor (`num_gpus=1`), or the host where it has none. NCCL moves
        the data between GPUs; on the host gloo does, which is PyTorch's: MPI connects no processes that mpirun has not
        started. With `restarts` a rebuild waits `grace` seconds for ranks that have ended, too, because Ray starts them
        anew (`max_restarts`): such an actor calls this as it did before, and waits here for the others to rebuild.
        CollectiveTimeout where not all come in time, DeviceUnavailable without Ray, or on the host without PyTorch.
        """
        return from_ray(cls, name, rank, size, device, deadline, config, restarts)

    @classmethod
    def local(
        cls, devices: Sequence[Device | str], *, deadline: float = 300.0, config: NcclConfig | None = None
    ) -> LocalWorld:
        """The world of one process: a thread for each GPU, or several on the host. See `LocalWorld.run`."""
        return LocalWorld(devices, deadline=deadline, kind=cls, config=config)
