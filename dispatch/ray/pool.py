"""RayPool: supervisors on the bundles of a placement group, which Ray places on nodes and GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from dispatch.checks import check_int
from dispatch.errors import BadRequest, DeviceUnavailable
from dispatch.ray.supervisor import RayFuture, RaySupervisor, RemoteTensor
from dispatch.supervise.arguments import check_choice
from dispatch.world.ray_rendezvous import ray

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

__all__ = ["RayPool", "place_bundles"]


def place_bundles(count: int, bundle: Mapping[str, float], strategy: str, timeout: float) -> tuple[Any, list[Any]]:
    """A placement group of `count` equal bundles, and the scheduling strategy for an actor on each.

    DeviceUnavailable if Ray does not place it in time.
    """
    from importlib import import_module

    module = ray()
    groups = import_module("ray.util.placement_group")
    strategies = import_module("ray.util.scheduling_strategies")
    group = groups.placement_group([dict(bundle)] * count, strategy=strategy)
    try:
        module.get(group.ready(), timeout=timeout)
    except module.exceptions.RayError as error:
        groups.remove_placement_group(group)
        free = {name: amount for name, amount in module.available_resources().items() if name in bundle}
        bundles = f"{count} times {dict(bundle)} with strategy {strategy}; available are {free}"
        raise DeviceUnavailable(f"Ray has not placed {bundles} within {timeout:g} s") from error
    kind = strategies.PlacementGroupSchedulingStrategy
    return group, [kind(placement_group=group, placement_group_bundle_index=number) for number in range(count)]


class RayPool:
    """Several supervisors in Ray actors; a request goes to the one that has its operands, or to the least busy one.

    Args:
        count: the number of supervisors.
        strategy: of the placement: "PACK" on few nodes, "SPREAD" over many, "STRICT_PACK" and "STRICT_SPREAD".
        num_cpus, num_gpus, resources: of each actor.
        placing: seconds within which Ray must place all actors; otherwise DeviceUnavailable.
        choices: further arguments of each `RaySupervisor`.

    Attributes:
        supervisors: in the order of the bundles.
    """

    def __init__(
        self,
        count: int,
        strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK",
        *,
        num_cpus: float = 1,
        num_gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        placing: float = 60.0,
        options: Mapping[str, Any] | None = None,
        **choices: Any,
    ) -> None:
        check_int("count", count, 1, 1 << 16)
        check_choice("strategy", strategy, ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"))
        bundle = {"CPU": num_cpus, "GPU": num_gpus, **(resources or {})}
        bundle = {name: amount for name, amount in bundle.items() if amount}
        if not bundle:
            raise BadRequest("num_cpus", "0", "something that Ray can place: CPUs, GPUs or resources")
        self._group, strategies = place_bundles(count, bundle, strategy, placing)
        arguments = {"num_cpus": num_cpus, "num_gpus": num_gpus, "resources": resources, **choices}
        self.supervisors: tuple[RaySupervisor, ...] = ()
        try:
            for each in strategies:
                supervisor = RaySupervisor(**arguments, options={"scheduling_strategy": each, **(options or {})})
                self.supervisors += (supervisor,)
        except BaseException:
            self.close()
            raise

    def submit(self, request: Any, /, **fields: Any) -> RayFuture:
        """As `RaySupervisor.submit`, on the supervisor that has an operand, or else on the least busy one."""
        for value in fields.values():
            if isinstance(value, RemoteTensor):
                return self._owner(value).submit(request, **fields)
            if isinstance(value, RayFuture) and value._keeper in self.supervisors:
                return value._keeper.submit(request, **fields)
        return min(self.supervisors, key=lambda one: one.pending).submit(request, **fields)

    def _owner(self, tensor: RemoteTensor) -> RaySupervisor:
        for each in self.supervisors:
            if each._actor._actor_id == tensor._actor._actor_id:
                return each
        raise BadRequest("operand", repr(tensor), "a tensor that a supervisor of this pool keeps")

    def close(self) -> None:
        """Close all supervisors, and remove the placement group."""
        from importlib import import_module

        try:
            for each in self.supervisors:
                each.close()
        finally:
            import_module("ray.util.placement_group").remove_placement_group(self._group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RayPool: {len(self.supervisors)} supervisors>"
