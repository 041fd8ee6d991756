"""World: the constructors, one for each way of starting a program's ranks. ranks.py has the implementation."""

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
    """The ranks of a program, from the view of one of them.

    Collective requests take it as `comm`. Each communicator is one generation of the world: once it has failed, because
    a rank was lost or a deadline passed, every call on it raises, on all ranks, and `rebuild` makes the next one over
    the living ranks. These are numbered 0, 1, … again, in the same order; `members` are their first numbers.

    Attributes:
        rank, size: this rank, and the number of ranks, in the present generation.
        device: the device whose memory its collectives use.
        generation: 0 for the first communicator, and one more for each later one.
        deadline: seconds that a collective may take.
        members: the first numbers of the present ranks, in order.
        communicator: the communicator of the present generation; passing it as `comm` is faster than passing the world.
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
        """The world of processes started by torchrun, or by another launcher with the same environment variables.

        RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR identify the ranks, which meet at `port`, by default one above
        MASTER_PORT. `device` is cuda:LOCAL_RANK by default; `config` configures NCCL. CollectiveTimeout if not all
        ranks come in time.
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
        """The world of processes started by mpirun; `comm` is a communicator of mpi4py, COMM_WORLD for None.

        On the host, the default device, MPI moves the data; on GPUs NCCL does. With Open MPI use `mpirun --with-ft
        ulfm`: otherwise mpirun ends all ranks when one ends.
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
        """The world of Ray actors. Each calls this with its rank, and all with the same name, which must be unique.

        `device` is by default the first GPU that Ray has assigned to the actor (`num_gpus=1`), else the host. NCCL
        moves the data between GPUs; on the host gloo does, which comes with PyTorch, because MPI connects only
        processes that mpirun has started. With `restarts` a rebuild also waits `grace` seconds for ranks that have
        ended, because Ray restarts them (`max_restarts`): a restarted actor calls this again, and waits here until the
        others rebuild. CollectiveTimeout if not all ranks come in time, DeviceUnavailable without Ray, or on the host
        without PyTorch.
        """
        return from_ray(cls, name, rank, size, device, deadline, config, restarts)

    @classmethod
    def local(
        cls, devices: Sequence[Device | str], *, deadline: float = 300.0, config: NcclConfig | None = None
    ) -> LocalWorld:
        """The world of one process: a thread for each GPU, or several on the host. See `LocalWorld.run`."""
        return LocalWorld(devices, deadline=deadline, kind=cls, config=config)
