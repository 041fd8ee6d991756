"""RaySupervisor: requests to a supervisor in a Ray actor, with the futures and handles of their results.

When an actor ends, only its requests in flight and its memory are lost: each such request fails with ActorLost, because
it may have run, and none is run twice. A handle of lost memory is refused with StaleTensor. This module is the caller's
side; actor.py is the other one.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import fields as fields_of
from typing import TYPE_CHECKING, Any, Literal

from dispatch.checks import check_bool, check_number
from dispatch.core.request import Request
from dispatch.device.tensor import Tensor
from dispatch.errors import ActorLost, BadRequest, Closed, DispatchError, QueueFull
from dispatch.ray.actor import ActorInfo, SupervisorActor, TensorReference, map_nested
from dispatch.supervise.arguments import check_at_least, check_choice
from dispatch.supervise.supervisor import Supervisor
from dispatch.unknown_arguments import refuse_arguments, signature_of
from dispatch.world.ray_rendezvous import ray

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    import numpy as np
    from typing_extensions import Self

__all__ = ["RayFuture", "RaySupervisor", "RemoteTensor", "unwrap_ray_error"]

RETRY_SECONDS = 0.1  # seconds between calls of an actor that is being restarted
EXTRA_CALLS = 8  # concurrent calls of an actor besides its requests
CLOSE_TIMEOUT = 60.0  # seconds within which an actor must finish its work when it is closed


def unwrap_ray_error(error: BaseException) -> BaseException:
    """Convert an error of Ray to the error that was raised in the actor, or to ActorLost."""
    exceptions = ray().exceptions
    if isinstance(error, exceptions.RayTaskError):
        inner = error.cause
        return unwrap_ray_error(inner) if isinstance(inner, exceptions.RayError) else inner
    if isinstance(error, exceptions.RayActorError):
        text = "the actor has ended, or is being restarted; its requests in flight may have run or not"
        lost_error = ActorLost(f"{text}: {str(error).splitlines()[0]}")
        lost_error.__cause__ = error
        return lost_error
    if isinstance(error, exceptions.GetTimeoutError):
        return TimeoutError(str(error))
    return error


class RemoteTensor:
    """A handle of a tensor that stays in an actor's device memory; the actor drops it when this handle dies.

    It can be an operand of further requests to the same actor. `fetch()` copies it here. A pickled handle can be used
    elsewhere as long as this one lives.

    Attributes:
        shape, dtype: the tensor's shape, and the name of its dtype in this library.
        generation: the generation of its actor.
    """

    def __init__(self, reference: TensorReference, actor: Any, *, is_owner: bool = True) -> None:
        self._reference, self._actor, self._is_owner = reference, actor, is_owner
        self.shape, self.dtype, self.generation = reference.shape, reference.dtype, reference.generation

    def fetch(self, timeout: float | None = None) -> np.ndarray[Any, Any]:
        """A copy as a NumPy array; raises StaleTensor if its actor was restarted, ActorLost or TimeoutError."""
        array: np.ndarray[Any, Any] = _get(self._actor.fetch.remote(self._reference), timeout)
        return array

    numpy = fetch

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_handle, (self._reference, self._actor)

    def __del__(self) -> None:
        if self._is_owner and not sys.is_finalizing() and ray().is_initialized():
            self._actor.release.remote(self.generation, [self._reference.key])

    def __repr__(self) -> str:
        return f"<RemoteTensor: {self.dtype} {list(self.shape)} in actor {self._reference.actor[:8]}>"


def _unpickle_handle(reference: TensorReference, actor: Any) -> RemoteTensor:
    return RemoteTensor(reference, actor, is_owner=False)


def _get(ref: Any, timeout: float | None = None) -> Any:
    try:
        return ray().get(ref, timeout=timeout)
    except ray().exceptions.RayError as error:
        raise unwrap_ray_error(error) from None


class RayFuture:
    """The outcome of a request that an actor runs: `result()`, or `await` it.

    Attributes:
        ref: Ray's ObjectRef of the result, for further tasks and actors on any node; for a kept result it contains
            references, which only its actor understands.
    """

    def __init__(self, ref: Any, wrap: Callable[[Any], Any], keeper: RaySupervisor | None) -> None:
        self.ref, self._wrap, self._keeper = ref, wrap, keeper
        self._handles: Any = None  # handles of a kept result, which lives as long as this future or they do

    def result(self, timeout: float | None = None) -> Any:
        """Wait and return the result: NumPy arrays, or handles if it is kept; raises the request's error.

        That is the error raised in the actor, ActorLost if the actor has ended, or TimeoutError.
        """
        return self._wrap_result(_get(self.ref, timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait and return the request's error, or None; TimeoutError after `timeout` seconds."""
        if not ray().wait([self.ref], timeout=timeout, fetch_local=False)[0]:
            raise TimeoutError(f"the request has not completed within {timeout} s")
        try:
            self.result()
        except Exception as error:  # noqa: BLE001  # it is the result of this call
            return error
        return None

    def done(self) -> bool:
        """Whether it has ended."""
        return bool(ray().wait([self.ref], timeout=0, fetch_local=False)[0])

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            value = yield from self.ref.__await__()
        except ray().exceptions.RayError as error:
            raise unwrap_ray_error(error) from None
        return self._wrap_result(value)

    def _wrap_result(self, value: Any) -> Any:
        if self._keeper is None:
            return value
        if self._handles is None:
            self._handles = map_nested(self._wrap, value)
        return self._handles

    def __del__(self) -> None:
        if self._keeper is None or self._handles is not None or sys.is_finalizing():
            return
        if ray().is_initialized():  # the result was not read; in a list, because Ray would wait for a plain argument
            self._keeper._actor.drop.remote([self.ref])


class RaySupervisor:
    """A supervisor in a Ray actor, on this node or another one.

    Args:
        device: the device in the actor, where "cuda:0" is the first GPU that Ray assigns to it. None: that GPU, or the
            host if it has no GPU.
        num_cpus, num_gpus, resources: the resources that Ray reserves for the actor.
        max_restarts: how often Ray restarts the actor if its process ends; -1 for always.
        max_pending: requests that this handle may have in flight.
        when_full: "block" until there is room, or "raise" QueueFull.
        options: Ray's options of the actor: scheduling_strategy, name, runtime_env, …
        supervisor: further arguments of `dispatch.Supervisor`: streams, isolation, …

    Requests start in the order of submission. When the actor ends, requests in flight fail with ActorLost, and so do
    requests submitted before it is running again; `ready()` waits until it is. If the actor's device has a fault from
    which it cannot recover, the actor reports it and then exits.
    """

    def __init__(
        self,
        device: str | None = None,
        *,
        num_cpus: float = 1,
        num_gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        max_restarts: int = 3,
        max_pending: int = 64,
        when_full: Literal["block", "raise"] = "block",
        options: Mapping[str, Any] | None = None,
        **supervisor: Any,
    ) -> None:
        supervisor_names = signature_of(Supervisor).parameters.keys()
        if any(
            name not in supervisor_names for name in supervisor
        ):  # otherwise the actor would fail each time Ray starts it
            refuse_arguments("Supervisor", Supervisor, (), supervisor)
        check_at_least("max_pending", max_pending, 1)
        check_at_least("max_restarts", max_restarts, -1)
        check_choice("when_full", when_full, ("block", "raise"))
        check_number("num_cpus", num_cpus, low=0)
        check_number("num_gpus", num_gpus, low=0)
        actor_options: dict[str, Any] = {
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            "max_restarts": max_restarts,
            "max_task_retries": 0,
        }
        actor_options |= {"max_concurrency": max_pending + EXTRA_CALLS} | (
            {"resources": dict(resources)} if resources else {}
        )
        self._actor = (
            ray().remote(SupervisorActor).options(**actor_options, **(options or {})).remote(device, supervisor)
        )
        self._max_pending, self._when_full = max_pending, when_full
        self._lock, self._in_flight, self.closed = threading.Lock(), [], False  # type: tuple[Any, list[Any], bool]

    # -- requests -----------------------------------------------------------------------------------------------------
    def submit(
        self,
        request: Request[Any] | type[Request[Any]],
        /,
        *,
        keep: bool = False,
        timeout: float | None = None,
        priority: int = 0,
        **fields: Any,
    ) -> RayFuture:
        """Send a request and return its future: a request class with its fields, or a request over host tensors.

        Operands are NumPy arrays, handles of tensors in the actor, futures of other requests, and ObjectRefs of arrays,
        which Ray transfers from wherever they are. With `keep` the result stays in the actor, and its future returns
        handles. `timeout` is as in `Supervisor.submit`. Raises QueueFull if there is no room and `when_full` is "raise"
        or the timeout is over; Closed; TypeError for a field that the class lacks. The future raises all other errors
        of the request.
        """
        check_bool("keep", keep)
        if timeout is not None:
            check_number("timeout", timeout, low=0)
        kind, arguments = (request, fields) if isinstance(request, type) else (type(request), _fields(request, fields))
        request_class: Any = kind
        if issubclass(request_class, Request) and any(name not in signature_of(kind).parameters for name in arguments):
            refuse_arguments(kind.__name__, kind, (), arguments)
        sent = {name: self._field_to_send(name, value) for name, value in arguments.items()}
        until = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            self._wait_for_room(until)
            choices = {"priority": priority, "timeout": None if until is None else max(0.0, until - time.monotonic())}
            ref = self._actor.run.remote(kind, choices, keep, list(sent), *sent.values())
            self._in_flight.append(ref)
        return RayFuture(ref, self._wrap, self if keep else None)

    def array(self, source: Any, dtype: Any = None, timeout: float | None = None) -> RemoteTensor:
        """Copy an array into the actor's device memory, and return its handle; `source` may be an ObjectRef of one."""
        self._check()
        name = None if dtype is None else str(dtype)
        handle: RemoteTensor = self._wrap(_get(self._actor.put.remote(_value_to_send(source), name), timeout))
        return handle

    def _wait_for_room(self, until: float | None) -> None:
        """Remove requests that have ended, and wait while there are too many."""
        self._check()
        if len(self._in_flight) < self._max_pending:
            return
        wait = ray().wait
        _, self._in_flight = wait(self._in_flight, num_returns=len(self._in_flight), timeout=0, fetch_local=False)
        if len(self._in_flight) < self._max_pending:
            return
        seconds = None if until is None else max(0.0, until - time.monotonic())
        if self._when_full == "block":
            _, self._in_flight = wait(self._in_flight, num_returns=1, timeout=seconds, fetch_local=False)
        if len(self._in_flight) >= self._max_pending:
            raise QueueFull(f"{self!r} has {len(self._in_flight)} requests in flight (max_pending={self._max_pending})")

    def _field_to_send(self, name: str, value: Any) -> Any:
        if isinstance(value, RayFuture):
            return value.ref

        def part(one: Any) -> Any:
            if isinstance(one, (RayFuture, ray().ObjectRef)):
                raise BadRequest(name, f"a {type(one).__name__} in a sequence", "arrays and handles", "use its result")
            return _value_to_send(one)

        return value if isinstance(value, ray().ObjectRef) else map_nested(part, value)

    def _wrap(self, value: Any) -> Any:
        return RemoteTensor(value, self._actor) if isinstance(value, TensorReference) else value

    # -- the actor ----------------------------------------------------------------------------------------------------
    @property
    def pending(self) -> int:
        """The number of requests of this handle in flight."""
        with self._lock:
            if self._in_flight:
                count = len(self._in_flight)
                _, self._in_flight = ray().wait(self._in_flight, num_returns=count, timeout=0, fetch_local=False)
            return len(self._in_flight)

    def ready(self, timeout: float = 60.0) -> ActorInfo:
        """Wait until the actor is running, also after a restart; returns its process and its generation.

        A later process has a larger generation. ActorLost if it is not restarted any more, TimeoutError.
        """
        self._check()
        until, module = time.monotonic() + timeout, ray()
        while True:
            seconds = until - time.monotonic()
            try:
                info: ActorInfo = module.get(self._actor.info.remote(), timeout=max(seconds, 0.0))
            except module.exceptions.ActorUnavailableError as error:
                if seconds < RETRY_SECONDS:
                    raise unwrap_ray_error(error) from None
                time.sleep(RETRY_SECONDS)
            except module.exceptions.RayError as error:
                raise unwrap_ray_error(error) from None
            else:
                return info

    def stats(self, timeout: float | None = None) -> Any:
        """The counts of the actor's supervisor."""
        return _get(self._actor.stats.remote(), timeout)

    def close(self, wait: bool = True) -> None:
        """Wait for the requests in flight, and end the actor; a second call does nothing."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        if wait:
            module = ray()
            try:
                module.get(self._actor.close.remote(), timeout=CLOSE_TIMEOUT)
            except module.exceptions.RayError as error:
                cause = unwrap_ray_error(error)
                if isinstance(cause, DispatchError) and not isinstance(cause, ActorLost):
                    raise cause from None
            finally:
                module.kill(self._actor)
            return
        ray().kill(self._actor)

    def _check(self) -> None:
        if self.closed:
            raise Closed(f"{self!r} was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RaySupervisor: actor {self._actor._actor_id.hex()[:8]}{', closed' if self.closed else ''}>"


def _fields(request: Any, further: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(request, Request):
        raise BadRequest("request", f"a {type(request).__name__}", "a request, or a request class with its fields")
    if further:
        raise BadRequest("fields", ", ".join(further), "a request class with fields, or a request without fields")
    instance: Any = request
    return {field.name: getattr(request, field.name) for field in fields_of(instance) if field.init}


def _value_to_send(value: Any) -> Any:
    """The form in which a value is sent: handles as references, host tensors as arrays."""
    if isinstance(value, RemoteTensor):
        return value._reference
    if isinstance(value, Tensor):
        return value.numpy()
    return value
