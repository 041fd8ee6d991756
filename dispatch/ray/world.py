"""RayWorld: Ray actors as the ranks of one world; `run` calls a function on all of them."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any, Literal

from dispatch.checks import check_int, check_number
from dispatch.errors import ActorLost, Closed, CollectiveError, RankLost
from dispatch.ray.pool import place_bundles
from dispatch.ray.supervisor import unwrap_ray_error
from dispatch.supervise.arguments import check_at_least, check_choice
from dispatch.world.ray_rendezvous import ray, rendezvous_actor
from dispatch.world.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Self

    from dispatch.libraries.nccl.config import NcclConfig

__all__ = ["ActorWorld", "RankActor", "RayWorld"]

RETRY_SECONDS = 0.1  # seconds between calls of an actor that is being restarted


class ActorWorld(World):
    """The world that is passed to functions on a RayWorld's ranks; it also keeps data between calls.

    Attributes:
        kept: a dict in this rank's process; it is empty after Ray has restarted the process.
    """

    kept: dict[str, Any]


class RankActor:
    """One rank. A restarted actor joins the next rendezvous of its world at once."""

    def __init__(self, name: str, rank: int, size: int, device: str | None, choices: dict[str, Any]) -> None:
        self._world = ActorWorld.from_ray(name, rank, size, device, **choices)
        self._world.kept = {}
        self._is_new = True  # whether it has just joined, so it is in the newest generation

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function with the world. An error other than CollectiveError aborts the collectives of all ranks."""
        self._is_new = False
        try:
            return function(self._world, *args, **kwargs)
        except CollectiveError:
            raise
        except BaseException as error:
            self._world.abort(f"rank {self._world.rank} raised {type(error).__name__}")
            raise

    def rebuild(self, grace: float | None) -> int:
        """Make the next communicator, unless this rank has just joined it, and return its generation."""
        if not self._is_new or self._world.communicator.error is not None:
            self._world.rebuild(grace=grace)
        self._is_new = True
        return self._world.generation

    def generation(self) -> int:
        """The generation of its world."""
        return self._world.generation

    def close(self) -> None:
        """Leave the world."""
        self._world.close()


class RayWorld:
    """The ranks of a world as actors of Ray; `run` calls a function on each.

    Args:
        size: the number of ranks.
        device: the device of each rank; "cuda:0" is the GPU that Ray assigns to it. None: that GPU, or the host if
            `num_gpus` is 0.
        num_cpus, num_gpus, resources: the resources that Ray reserves for each rank.
        strategy: the strategy of the placement group.
        max_restarts: how often Ray restarts each actor; `rebuild` then includes it in the next communicator.
        deadline: seconds that a collective may take, and within which all ranks must join.
        placing: seconds within which Ray must place all actors.
        options: Ray's options of the actors: runtime_env, …
    """

    def __init__(
        self,
        size: int,
        device: str | None = None,
        *,
        num_cpus: float = 1,
        num_gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK",
        max_restarts: int = 0,
        deadline: float = 300.0,
        config: NcclConfig | None = None,
        placing: float = 60.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        check_int("size", size, 1, 1 << 16)
        check_at_least("max_restarts", max_restarts, -1)
        check_choice("strategy", strategy, ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"))
        check_number("deadline", deadline, low=1e-3, high=1e9)
        self.size, self.closed, self._deadline, self._generation = size, False, deadline, 0
        name = secrets.token_hex(8)
        bundle = {name: amount for name, amount in {"CPU": num_cpus, "GPU": num_gpus}.items() if amount}
        self._group, strategies = place_bundles(size, bundle | dict(resources or {}), strategy, placing)
        self._rendezvous_actor = rendezvous_actor(name)  # owned by this process, so that it outlives ranks
        actor_options: dict[str, Any] = {"num_cpus": num_cpus, "num_gpus": num_gpus, "max_restarts": max_restarts}
        actor_options |= {"resources": dict(resources)} if resources else {}
        choices = {"restarts": max_restarts != 0, "deadline": deadline, "config": config}
        self._actors = [
            ray()
            .remote(RankActor)
            .options(**actor_options, scheduling_strategy=strategies[rank], **(options or {}))
            .remote(name, rank, size, device, choices)
            for rank in range(size)
        ]
        try:
            self._call_all("generation")
        except BaseException:
            self.close()
            raise

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call `function(world, …)` on each rank, and return the results in the order of the actors.

        If ranks fail, the first error that is not a CollectiveError is raised, because the others follow from it. If an
        actor has ended, this is RankLost. After that, call `rebuild` first. The result of a rank that is not restarted
        is None.
        """
        return self._call_all("run", function, args, kwargs)

    def rebuild(self, *, grace: float | None = None) -> Self:
        """Make the next communicator on all ranks, including restarted ones; see `World.rebuild`.

        `world.kept` of surviving ranks is unchanged. CollectiveError if a rank is lost meanwhile: call it again.
        """
        self._check()
        self._generation = max(each for each in self._call_all("rebuild", grace) if each is not None)
        return self

    def _call_all(self, method: str, *args: Any) -> list[Any]:
        self._check()
        module = ray()
        until = time.monotonic() + self._deadline
        refs = {rank: getattr(actor, method).remote(*args) for rank, actor in enumerate(self._actors) if actor}
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []
        while refs:
            rank, ref = next(iter(refs.items()))
            del refs[rank]
            try:
                results[rank] = module.get(ref)
            except module.exceptions.ActorUnavailableError as error:
                if method == "run" or time.monotonic() > until:
                    errors.append(_rank_lost(rank, unwrap_ray_error(error)))
                    continue
                time.sleep(RETRY_SECONDS)  # Ray is restarting it
                refs[rank] = getattr(self._actors[rank], method).remote(*args)
            except module.exceptions.RayError as error:
                cause = unwrap_ray_error(error)
                if isinstance(cause, ActorLost):
                    self._actors[rank] = None  # it is not restarted again
                    if method == "rebuild":
                        continue
                    cause = _rank_lost(rank, cause)
                errors.append(cause)
        if errors:
            rank_losses = [error for error in errors if isinstance(error, RankLost)]
            raise next((each for each in errors if not isinstance(each, CollectiveError)), (rank_losses or errors)[0])
        return results

    def _check(self) -> None:
        if self.closed:
            raise Closed(f"{self!r} was closed")

    def close(self) -> None:
        """End all ranks, and remove the placement group; a second call does nothing."""
        if self.closed:
            return
        self.closed = True
        module = ray()
        living = [actor for actor in self._actors if actor]
        module.wait([actor.close.remote() for actor in living], num_returns=len(living), timeout=10)
        for actor in (*living, self._rendezvous_actor):
            module.kill(actor)
        from importlib import import_module

        import_module("ray.util.placement_group").remove_placement_group(self._group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RayWorld: {self.size} ranks, generation {self._generation}>"


def _rank_lost(rank: int, cause: BaseException) -> RankLost:
    error = RankLost(f"rank {rank}: {cause}", (rank,))
    error.__cause__ = cause
    return error
