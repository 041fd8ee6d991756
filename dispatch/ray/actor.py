"""The actor of a RaySupervisor: it makes requests from the fields that it receives, and submits them to a supervisor.

One event loop runs everything: calls of one caller begin in order, and wait for the supervisor's futures concurrently.
Kept tensors have keys, to which handles refer.
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

EXIT_DELAY = 1.0  # seconds after which a broken actor exits, so that its answers are still sent


class TensorReference(NamedTuple):
    """A reference to a tensor in an actor: its key there, and the generation of the actor."""

    actor: str
    generation: int
    key: int
    shape: tuple[int, ...]
    dtype: str


class ActorInfo(NamedTuple):
    """The present process of an actor."""

    actor: str
    generation: int
    device: str
    pid: int
    node: str


def map_nested(function: Any, value: Any) -> Any:
    """Apply a function to every item of nested tuples, lists and mappings."""
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
    """A supervisor in a process that Ray restarts if it ends; a restarted one has a larger generation."""

    def __init__(self, device: str | None, options: dict[str, Any]) -> None:
        from dispatch.world.ray_rendezvous import ray

        context = ray().get_runtime_context()
        self._actor, self._node = context.get_actor_id(), context.get_node_id()
        self._generation = time.time_ns()
        self._supervisor = Supervisor(device_of(actor_device() if device is None else device).name, **options)
        self._kept: dict[int, Tensor] = {}
        self._keys = 0

    async def info(self) -> ActorInfo:
        """Information about this process."""
        return ActorInfo(self._actor, self._generation, self._supervisor.device.name, os.getpid(), self._node)

    async def put(self, array: Any, dtype: str | None) -> TensorReference:
        """Copy an array to the device, and keep it."""
        reference: TensorReference = self._keep(self._supervisor.device.array(array, dtype))
        return reference

    async def fetch(self, reference: TensorReference) -> Any:
        """A kept tensor as an array."""
        return self._tensor(reference).numpy()

    async def release(self, generation: int, keys: Sequence[int]) -> None:
        """Drop kept tensors; callers do not wait for this."""
        if generation == self._generation:
            for key in keys:
                self._kept.pop(key, None)

    async def drop(self, refs: Sequence[Any]) -> None:
        """Drop the kept tensors of a result that was never read; a failed request has none."""
        try:
            result = await refs[0]
        except Exception:  # noqa: BLE001  # raised where the result is read
            return
        map_nested(
            lambda value: self._kept.pop(value.key, None) if isinstance(value, TensorReference) else None, result
        )

    async def run(
        self, kind: type[Request[Any]], choices: dict[str, Any], keep: bool, names: Sequence[str], *values: Any
    ) -> Any:
        """Make a request from its class and fields, run it, and return its result as arrays, or as references."""
        fields = {name: map_nested(self._operand, value) for name, value in zip(names, values, strict=True)}
        if not issubclass(kind, Request):
            raise BadRequest("request", repr(kind), "a class of requests, such as dispatch.MatmulRequest")
        try:
            result = await self._supervisor.submit(kind(**fields), **choices)
        except (DeviceFault, WorkerFailed):
            if self._supervisor.device.fault is not None or self._is_broken():
                asyncio.get_running_loop().call_later(EXIT_DELAY, os._exit, 1)  # Ray restarts the actor
            raise
        return map_nested(self._keep if keep else _array, result)

    async def stats(self) -> Any:
        """The supervisor's counts."""
        return self._supervisor.stats()

    async def close(self) -> None:
        """Wait for all work. Errors were raised where results were read."""
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
            hint = "fetch the tensor, or run the request on its actor"
            raise BadRequest("operand", f"a tensor of actor {reference.actor}", f"a tensor of {self._actor}", hint)
        if reference.generation != self._generation:
            reason = f"generation {reference.generation} of its actor has ended, and its memory was freed"
            raise StaleTensor(f"a kept tensor {list(reference.shape)}: {reason}; this is {self._generation}")
        tensor = self._kept.get(reference.key)
        if tensor is None:
            raise StaleTensor(f"a kept tensor {list(reference.shape)} was released when its handle was deleted")
        return tensor

    def _operand(self, value: Any) -> Any:
        if isinstance(value, TensorReference):
            return self._tensor(value)
        if isinstance(value, np.ndarray):
            return self._supervisor.device.array(value)
        return value


def _array(value: Any) -> Any:
    return value.numpy() if isinstance(value, Tensor) else value
