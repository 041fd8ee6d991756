"""RaySupervisor: requests to a supervisor that is an actor of Ray, and the futures and handles that come back.

An actor that ends costs what it had in flight and in memory, and nothing else: each such request fails with ActorLost,
for it may have run, and none is run twice. A handle of memory that is gone is refused with StaleTensor. This module is
what callers hold; actor.py is the other end.
"""

from __future__ import annotations

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

RETRY_SECONDS = 0.1  # seconds until an actor that is being started is asked again
EXTRA_CALLS = 8  # calls that may be in an actor beside its requests
CLOSE_TIMEOUT = 60.0  # seconds that the work of an actor that is closed may take


def unwrap_ray_error(error: BaseException) -> BaseException:
    """What an error of Ray's stands for: the one that was raised in the actor, or ActorLost."""
    exceptions = ray().exceptions
    if isinstance(error, exceptions.RayTaskError):
        inner = error.cause
        return unwrap_ray_error(inner) if isinstance(inner, exceptions.RayError) else inner
    if isinstance(error, exceptions.RayActorError):
        what = "the actor has ended, or is being started anew; what it had in flight may have run or not"
        made = ActorLost(f"{what}: {str(error).splitlines()[0]}")
        made.__cause__ = error
        return made
    if isinstance(error, exceptions.GetTimeoutError):
        return TimeoutError(str(error))
    return error


class RemoteTensor:
    """A tensor in an actor's device memory, which stays there; the actor lets go of it when this handle ends.

    An operand of further requests to the same actor. `fetch()` copies it here. A handle that was pickled may be used
    elsewhere, as long as this one is there.

    Attributes:
        shape, dtype: of the tensor, `dtype` by its name here.
        generation: of the actor in which it is.
    """

    def __init__(self, reference: TensorReference, actor: Any, *, is_owner: bool = True) -> None:
        self._reference, self._actor, self._is_owner = reference, actor, is_owner
        self.shape, self.dtype, self.generation = reference.shape, reference.dtype, reference.generation

    def fetch(self, timeout: float | None = None) -> np.ndarray[Any, Any]:
        """A copy as a NumPy array; StaleTensor where its actor has been started anew, ActorLost, TimeoutError."""
        found: np.ndarray[Any, Any] = _get(self._actor.fetch.remote(self._reference), timeout)
        return found

    numpy = fetch

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_handle, (self._reference, self._actor)

    def __del__(self) -> None:
        if self._is_owner and ray().is_initialized():
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
        ref: Ray's ObjectRef of the result, for further tasks and actors, on any node; of a request that is kept it
            holds references, which mean something to its actor alone.
    """

    def __init__(self, ref: Any, wrap: Callable[[Any], Any], keeper: RaySupervisor | None) -> None:
        self.ref, self._wrap, self._keeper = ref, wrap, keeper
        self._handles: Any = None  # of what is kept: it lives as long as this future, or they

    def result(self, timeout: float | None = None) -> Any:
        """Wait and return the result: NumPy arrays, or handles where it is kept; raises what the request failed with.

        That is the error that was raised in the actor, ActorLost where it has ended, or TimeoutError.
        """
        return self._wrap_result(_get(self.ref, timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait and return what the request failed with, or None; TimeoutError after `timeout` seconds."""
        if not ray().wait([self.ref], timeout=timeout, fetch_local=False)[0]:
            raise TimeoutError(f"the request has not ended within {timeout} s")
        try:
            self.result()
        except Exception as error:  # noqa: BLE001  # it is what is asked for
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
        if self._keeper is not None and self._handles is None and ray().is_initialized():
            self._keeper._actor.drop.remote([self.ref])  # nobody has asked for it; in a list, or Ray would wait for it


class RaySupervisor:
    """A supervisor in an actor of Ray, on this node or another one.

    Args:
        device: in the actor: "cuda:0" is the first GPU that Ray gives it; None for that, or the host without one.
        num_cpus, num_gpus, resources: what Ray reserves for the actor.
        max_restarts: how often Ray starts the actor anew where its process ends; -1 for always.
        max_pending: requests that this handle may have in flight.
        when_full: "block" until there is room, or "raise" QueueFull.
        options: of the actor, as Ray has them: scheduling_strategy, name, runtime_env, …
        supervisor: further arguments of `dispatch.Supervisor`: streams, isolation, …

    Requests begin in the order of their submission. What is in flight when the actor ends fails with ActorLost, and so
    does what is submitted until it is there again; `ready()` waits for that. An actor whose device had a fault that
    it cannot go on from ends by itself, once it has told so.
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
        known = signature_of(Supervisor).parameters.keys()
        if any(name not in known for name in supervisor):  # else the actor says so, once Ray has started it again
            refuse_arguments("Supervisor", Supervisor, (), supervisor)
        check_at_least("max_pending", max_pending, 1)
        check_at_least("max_restarts", max_restarts, -1)
        check_choice("when_full", when_full, ("block", "raise"))
        check_number("num_cpus", num_cpus, low=0)
        check_number("num_gpus", num_gpus, low=0)
        given: dict[str, Any] = {
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            "max_restarts": max_restarts,
            "max_task_retries": 0,
        }
        given |= {"max_concurrency": max_pending + EXTRA_CALLS} | ({"resources": dict(resources)} if resources else {})
        self._actor = ray().remote(SupervisorActor).options(**given, **(options or {})).remote(device, supervisor)
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
        """Send a request and return its future: a class of requests and its fields, or a request over host tensors.

        Operands are NumPy arrays, handles of what the actor keeps, futures of other requests, and ObjectRefs of arrays,
        which Ray brings there from wherever they are. With `keep` the result stays in the actor, and its future gives
        handles. `timeout` is as in `Supervisor.submit`. QueueFull where there is no room, and `when_full` is "raise" or
        the timeout is over; Closed; TypeError for a field that the class has not. What else is wrong with the request
        comes from the future.
        """
        check_bool("keep", keep)
        if timeout is not None:
            check_number("timeout", timeout, low=0)
        kind, given = (request, fields) if isinstance(request, type) else (type(request), _fields(request, fields))
        known: Any = kind
        if issubclass(known, Request) and any(name not in signature_of(kind).parameters for name in given):
            refuse_arguments(kind.__name__, kind, (), given)
        sent = {name: self._field_to_send(name, value) for name, value in given.items()}
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
        found: RemoteTensor = self._wrap(_get(self._actor.put.remote(_value_to_send(source), name), timeout))
        return found

    def _wait_for_room(self, until: float | None) -> None:
        """Let go of what has ended, and wait while there are too many."""
        self._check()
        if len(self._in_flight) < self._max_pending:
            return
        wait = ray().wait
        _, self._in_flight = wait(self._in_flight, num_returns=len(self._in_flight), timeout=0, fetch_local=False)
        if len(self._in_flight) < self._max_pending:
            return
        left = None if until is None else max(0.0, until - time.monotonic())
        if self._when_full == "block":
            _, self._in_flight = wait(self._in_flight, num_returns=1, timeout=left, fetch_local=False)
        if len(self._in_flight) >= self._max_pending:
            raise QueueFull(f"{self!r} has {len(self._in_flight)} requests in flight (max_pending={self._max_pending})")

    def _field_to_send(self, name: str, value: Any) -> Any:
        if isinstance(value, RayFuture):
            return value.ref

        def part(one: Any) -> Any:
            if isinstance(one, (RayFuture, ray().ObjectRef)):
                raise BadRequest(
                    name, f"a {type(one).__name__} in a sequence", "arrays and handles", "ask for its result"
                )
            return _value_to_send(one)

        return value if isinstance(value, ray().ObjectRef) else map_nested(part, value)

    def _wrap(self, value: Any) -> Any:
        return RemoteTensor(value, self._actor) if isinstance(value, TensorReference) else value

    # -- the actor ----------------------------------------------------------------------------------------------------
    @property
    def pending(self) -> int:
        """How many requests of this handle are in flight."""
        with self._lock:
            if self._in_flight:
                count = len(self._in_flight)
                _, self._in_flight = ray().wait(self._in_flight, num_returns=count, timeout=0, fetch_local=False)
            return len(self._in_flight)

    def ready(self, timeout: float = 60.0) -> ActorInfo:
        """Wait until the actor is there, also after a restart; which process it is, and its generation.

        A later process has a larger generation. ActorLost where it is not started any more, TimeoutError.
        """
        self._check()
        until, module = time.monotonic() + timeout, ray()
        while True:
            left = until - time.monotonic()
            try:
                found: ActorInfo = module.get(self._actor.info.remote(), timeout=max(left, 0.0))
            except module.exceptions.ActorUnavailableError as error:
                if left < RETRY_SECONDS:
                    raise unwrap_ray_error(error) from None
                time.sleep(RETRY_SECONDS)
            except module.exceptions.RayError as error:
                raise unwrap_ray_error(error) from None
            else:
                return found

    def stats(self, timeout: float | None = None) -> Any:
        """What the actor's supervisor has counted."""
        return _get(self._actor.stats.remote(), timeout)

    def close(self, wait: bool = True) -> None:
        """Wait for what is in flight, and end the actor; a second call does nothing."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        if wait:
            module = ray()
            try:
                module.get(self._actor.close.remote(), timeout=CLOSE_TIMEOUT)
            except module.exceptions.RayError as error:
                own = unwrap_ray_error(error)
                if isinstance(own, DispatchError) and not isinstance(own, ActorLost):
                    raise own from None
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
        raise BadRequest("request", f"a {type(request).__name__}", "a request, or a class of requests with its fields")
    if further:
        raise BadRequest("fields", ", ".join(further), "a class of requests with fields, or a request alone")
    own: Any = request
    return {field.name: getattr(request, field.name) for field in fields_of(own) if field.init}


def _value_to_send(value: Any) -> Any:
    """What can be sent: handles by their references, tensors of the host as arrays."""
    if isinstance(value, RemoteTensor):
        return value._reference
    if isinstance(value, Tensor):
        return value.numpy()
    return value
