"""What the actor of a RaySupervisor does: it makes requests of what it is sent, and gives them to its own supervisor.

One event loop runs all of it: calls of one caller begin in their order, and wait for the supervisor's futures side by
side. Tensors that are kept have keys, which their handles hold.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.request import Request
from dispatch.device.registry import device as device_of
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, DeviceFault, StaleTensor, WorkerFailed
from dispatch.supervise.supervisor import Supervisor
from dispatch.world.from_ray import actor_device

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ActorInfo", "SupervisorActor", "TensorReference", "map_nested"]

EXIT_DELAY = 1.0  # seconds in which the answers of an actor that is of no use any more still go out


class TensorReference(NamedTuple):
    """A tensor that stays in an actor: by its key there, and the generation of the actor in which it is."""

    actor: str
    generation: int
    key: int
    shape: tuple[int, ...]
    dtype: str


class ActorInfo(NamedTuple):
    """Which process an actor is now."""

    actor: str
    generation: int
    device: str
    pid: int
    node: str


def map_nested(function: Any, value: Any) -> Any:
    """A value with a function applied to all that is in its tuples, lists and mappings."""
    if isinstance(value, TensorReference):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_nested(function, each) for each in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_nested(function, each) for each in value)
    if isinstance(value, dict):
        return {name: map_nested(function, each) for name, each in value.items()}
    return function(value)


class SupervisorActor:
    """A supervisor in a process that Ray starts anew where it ends: then its generation is a larger one."""

    def __init__(self, device: str | None, options: dict[str, Any]) -> None:
        from dispatch.world.ray_rendezvous import ray

        context = ray().get_runtime_context()
        self._actor, self._node = context.get_actor_id(), context.get_node_id()
        self._generation = time.time_ns()
        self._supervisor = Supervisor(device_of(actor_device() if device is None else device).name, **options)
        self._kept: dict[int, Tensor] = {}
        self._keys = 0

    async def info(self) -> ActorInfo:
        """Which process this is."""
        return ActorInfo(self._actor, self._generation, self._supervisor.device.name, os.getpid(), self._node)

    async def put(self, array: Any, dtype: str | None) -> TensorReference:
        """Copy an array to the device, and keep it."""
        made: TensorReference = self._keep(self._supervisor.device.array(array, dtype))
        return made

    async def fetch(self, reference: TensorReference) -> Any:
        """A kept tensor's elements."""
        return self._tensor(reference).numpy()

    async def release(self, generation: int, keys: Sequence[int]) -> None:
        """Keep tensors no longer; nobody waits for this."""
        if generation == self._generation:
            for key in keys:
                self._kept.pop(key, None)

    async def drop(self, refs: Sequence[Any]) -> None:
        """Keep the tensors of a result that nobody has asked for no longer; of a request that failed there are none."""
        try:
            result = await refs[0]
        except Exception:  # noqa: BLE001  # whoever asks for the result is told
            return
        map_nested(
            lambda value: self._kept.pop(value.key, None) if isinstance(value, TensorReference) else None, result
        )

    async def run(
        self, kind: type[Request[Any]], choices: dict[str, Any], keep: bool, names: Sequence[str], *values: Any
    ) -> Any:
        """Make a request of its class and fields, run it, and give its result as arrays, or references to it."""
        fields = {name: map_nested(self._operand, value) for name, value in zip(names, values, strict=True)}
        if not issubclass(kind, Request):
            raise BadRequest("request", repr(kind), "a class of requests, such as dispatch.MatmulRequest")
        try:
            result = await self._supervisor.submit(kind(**fields), **choices)
        except (DeviceFault, WorkerFailed):
            if self._supervisor.device.fault is not None or self._is_broken():
                asyncio.get_running_loop().call_later(EXIT_DELAY, os._exit, 1)  # Ray starts another one
            raise
        return map_nested(self._keep if keep else _array, result)

    async def stats(self) -> Any:
        """What the supervisor has counted."""
        return self._supervisor.stats()

    async def close(self) -> None:
        """Wait for all work. What failed was told to who asked for it."""
        self._kept.clear()
        await asyncio.get_running_loop().run_in_executor(None, self._supervisor.close)

    def _is_broken(self) -> bool:
        return self._supervisor._pool.refusal is not None

    def _keep(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        self._keys += 1
        self._kept[self._keys] = value
        return TensorReference(self._actor, self._generation, self._keys, tuple(value.shape), value.dtype.name)

    def _tensor(self, reference: TensorReference) -> Tensor:
        if reference.actor != self._actor:
            hint = "fetch it, or run the request where it is"
            raise BadRequest("operand", f"a tensor of actor {reference.actor}", f"one of {self._actor}", hint)
        if reference.generation != self._generation:
            gone = f"generation {reference.generation} of its actor has ended, and its memory with it"
            raise StaleTensor(f"a kept tensor {list(reference.shape)}: {gone}; this is {self._generation}")
        found = self._kept.get(reference.key)
        if found is None:
            raise StaleTensor(f"a kept tensor {list(reference.shape)} was released, as its handle ended")
        return found

    def _operand(self, value: Any) -> Any:
        if isinstance(value, TensorReference):
            return self._tensor(value)
        if isinstance(value, np.ndarray):
            return self._supervisor.device.array(value)
        return value


def _array(value: Any) -> Any:
    return value.numpy() if isinstance(value, Tensor) else value
