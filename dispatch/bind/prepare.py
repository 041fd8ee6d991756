"""BoundCall: a request bound to a stream for repeated calls; also connects executors to devices and table.

`prepare` makes one, `prepare_all` several. A bound call launches its recorded graph, and checks the stream order of its
tensors only when that may have changed; in all other cases its executor runs the request.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic

from dispatch.bind import (
    bind,  # noqa: F401  # sets Executor.bind
    tensor_product,  # noqa: F401  # sets Tensor.product
)
from dispatch.bind.refit import refit
from dispatch.checks import check_bool, names_arguments
from dispatch.core.call_cache import CACHE_MISS
from dispatch.core.prepared_call_cache import fast_call_of
from dispatch.core.request import R_co, as_requests, check_request, on_framework_stream, refuse_moved, run
from dispatch.device.cuda import CudaDevice
from dispatch.device.frameworks.framework import ForeignStorage, ordered_with
from dispatch.device.frameworks.frameworks import framework_of
from dispatch.device.host import HostDevice
from dispatch.device.stream import NULL_CONTEXT, order
from dispatch.errors import BadRequest
from dispatch.execute.bound import Bound
from dispatch.execute.cuda_executor import CudaExecutor
from dispatch.execute.host_executor import HostExecutor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from dispatch.core.request import Launchable, Operands, Request
    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.executor import Executor

__all__ = ["BoundCall", "prepare", "prepare_all"]

MAX_FAST_CALLS = 64  # cached sets of names of replaced operands, for each prepared call


class BoundCall(Generic[R_co]):
    """A prepared request: `call()` runs it again into the same outputs, `call(a=…)` with other operands.

    Preparing a Request[R] gives a BoundCall[R], whose calls return an R.

    It belongs to the stream that was current when it was prepared, and launches a graph recorded there. Over operands
    of torch or CuPy that is their library's stream; if another of its streams is current at a call, the request runs on
    that one, without the graph. Other operands of the same layouts use the same plan, as in calls that are not
    prepared. Several threads may call it; each call enqueues its own work.
    """

    __slots__ = (
        "_bound",
        "_epoch",
        "_executor",
        "_fast_calls",
        "_framework",
        "_framework_epoch",
        "_graph",
        "_is_mixed",
        "_is_moved",
        "_launch",
        "_own_outputs",
        "_plans",
        "_result",
        "_writes",
        "_written_storages",
        "request",
    )  # fmt: skip
    _result: R_co

    def __init__(self, executor: Executor, request: Request[R_co], outputs: Operands, *, graph: bool = False) -> None:
        self.request: Request[R_co] = request.replace(**outputs) if outputs else request
        self._executor = executor
        executor.prepared = True
        self._epoch = self._framework_epoch = -1
        self._graph: Launchable | None = None
        self._fast_calls: dict[tuple[str, ...], Callable[..., Any] | None] = {}  # by the names of the replaced operands
        self._plans = executor.plans  # the executor's plans when `_fast_calls` were made
        # Outputs in this library's memory, where that of the operands' library does not suit; given as its arrays.
        self._own_outputs: list[Tensor] = []
        if self.request.framework is not None:
            self._own_outputs = [each for each in outputs.values() if not isinstance(each.storage, ForeignStorage)]
        uses = [(name, tensor.storage) for name, tensor, written in self.request.tensors() if written]
        self._writes = frozenset(name for name, _ in uses)
        # Other libraries' operands that are written; these libraries must be notified.
        self._written_storages = {name: storage for name, storage in uses if isinstance(storage, ForeignStorage)}
        stream, framework = executor.stream, self.request.framework
        on_its_stream = framework is not None and stream.external and framework.stream(executor.device) is stream
        # The library on whose current stream it runs; None if the library has no streams.
        self._framework = framework if on_its_stream else None
        foreign = [each.storage for _, each, _ in self.request.tensors() if isinstance(each.storage, ForeignStorage)]
        self._is_moved = _moved_test(foreign, self._written_storages.values())
        # Whether there are operands of a second library; each call is then also ordered with that library's stream.
        self._is_mixed = stream.external and any(each.first is not stream for each in foreign)
        if isinstance(executor, CudaExecutor):
            self._bound = Bound(executor, self.request)
            self._result = self._given(self._bound.result)
            plan, arguments = self._bound.plan, self._bound.arguments
            if graph:
                executor.refuse_capture(f"prepare(graph=True) of {plan.row.name}", always=True)
            if arguments is not None and not executor.captured:
                if plan.capture_safe and plan.counter is None:
                    self._graph = executor.record(plan, arguments)
                elif graph:
                    self._graph = plan.as_graph(arguments)
                else:
                    self._graph = plan.as_calls(arguments, tuple(tensor for _, tensor, _ in self.request.tensors()))
                if self._graph is not None:
                    self._launch: Callable[[], int] = self._graph.launch
        else:
            executor.plan(self.request)
            if graph:
                raise BadRequest("graph", "True", "False on the host, which has no graphs")

    @property
    def row(self) -> Row:
        """The row of the table whose function runs it."""
        row: Row = self._executor.plan(self.request).row
        return row

    def __call__(self, **operands: Tensor) -> R_co:
        """Enqueue it and return its outputs without waiting.

        `operands` are named as in the request, and each counts for this call only. A name that is no identifier, as
        those of `einsum`, is passed as `call(**{"operands[0]": x})`. Other fields, such as `alpha`, `epilogue` and
        `library`, may be given as well; those that need another plan make one, without the recorded graph. The outputs
        are always those of the call: so `call(beta=2)` of a product without `c` adds to what the last call has left in
        `out`, which then is C, as in a request with `out`.
        """
        if self._epoch == order.sync_epoch and not operands:
            status = self._launch()
            if status:
                self._executor.failed(status)
            if self._written_storages:
                self._tell_written(operands)
            return self._result
        if operands and not self._executor.stream.external:
            return self._run_over(operands)
        return self._run_checked(operands)

    def _run_checked(self, operands: dict[str, Tensor]) -> R_co:
        """Run it after checking what may have changed: operands, their uses on other streams, a closed executor."""
        executor, framework = self._executor, self._framework
        if self._is_moved is not None and self._is_moved():
            refuse_moved(self.request.replace(**operands) if operands else self.request)
        if self._framework_epoch == order.sync_epoch and not operands and self._is_on_current_stream():
            if status := self._launch():
                executor.failed(status)
            self._tell_written(operands)
            return self._result
        executor.check()
        if framework is not None and framework.stream(executor.device) is not executor.stream:
            found: R_co = self._given(run(self.request.replace(**operands) if operands else self.request))
            return found
        with executor.claimed(), self._ordered_with_others():
            if operands:
                return self._run_over(operands)
            if not isinstance(executor, CudaExecutor) or self._graph is None or executor.captured:
                result: R_co = self._given(executor.run(self.request))
                self._tell_written(operands)
                return result
            epoch = order.sync_epoch  # before the check
            executor.launch(self._graph, self._bound.reads, self._bound.writes)
            if order.sync_epoch == epoch:
                stream: Any = executor.stream
                if not stream.external:
                    self._epoch = epoch
                elif getattr(stream, "is_lasting", False) and not self._is_mixed:  # of another library
                    self._framework_epoch = epoch
            self._tell_written(operands)
            return self._result

    def _given(self, result: Any) -> Any:
        """The result as arrays of the operands' library."""
        if not self._own_outputs:
            return result
        framework: Any = self.request.framework
        return framework.given_back(result, self._own_outputs)

    def _is_on_current_stream(self) -> bool:
        """Whether the call's stream is its library's current one and is not capturing."""
        executor: Any = self._executor
        handle = executor.stream.c_handle.value or 0
        framework: Any = self._framework  # not None if `_framework_epoch` equals the epoch of the order
        return framework.is_current(executor.device, handle) and not (handle and executor.captured)

    def _ordered_with_others(self) -> AbstractContextManager[None]:
        """A context that is ordered with the streams of a second library's operands."""
        return ordered_with(self._executor.stream, self.request.tensors()) if self._is_mixed else NULL_CONTEXT

    def _tell_written(self, operands: dict[str, Any]) -> None:
        """Notify the other libraries that their operands were written."""
        for name, storage in self._written_storages.items():
            if name not in operands:
                storage.framework.written(storage.keep)
        for name, operand in operands.items():
            if name in self._writes:
                framework = framework_of(type(operand))
                if framework is not None:
                    framework.written(operand)

    def _run_over(self, operands: dict[str, Tensor]) -> R_co:
        """Run it over other operands, without a request if they differ from its own only in their addresses."""
        executor, names = self._executor, tuple(operands)
        if self._is_moved is not None and self._is_moved():
            refuse_moved(self.request.replace(**operands))
        if executor.plans is self._plans:  # otherwise the plans were discarded, or the executor was closed
            fast_call = self._fast_calls.get(names)
            if fast_call is not None:
                result: R_co = fast_call(executor, **operands)
                if result is not CACHE_MISS:
                    self._tell_written(operands)
                    return self._given(result) if self._own_outputs else result
        executor.check()
        request = self.request.replace(**operands)
        result = self._given(executor.run(request))
        self._tell_written(operands)
        self._learn(names, request)
        return result

    def _learn(self, names: tuple[str, ...], request: Request) -> None:
        """Let the next run over operands of these names skip the request, if this request has the call's own plan."""
        bound, plans = request.bound, self._executor.plans
        if plans is not self._plans:
            self._fast_calls, self._plans = {}, plans
        is_full = len(self._fast_calls) >= MAX_FAST_CALLS
        if is_full or names in self._fast_calls or getattr(bound, "plans", None) is not plans:
            return
        if self._bound.arguments is not None and request.key() == self.request.key():
            self._fast_calls[names] = fast_call_of(self.request, bound.plan, self._bound.arguments, self._result, names)

    def refit(self, weights: Any = None, **operands: Any) -> None:
        """Overwrite the weights (`b`, or `weights` of a recurrent network), or operands by name, in stream order.

        Memory and plan stay the same; work in flight still reads the old values. Takes arrays, also those of torch and
        CuPy, or tensors of the same device, with exactly the same shape and dtype; BadRequest for others, and for an
        operand that the call does not read.
        """
        if weights is not None:
            target = "weights" if any(name == "weights" for name, _, _ in self.request.tensors()) else "b"
            if target in operands:
                raise BadRequest("weights", f"an array, as well as {target}", f"one of these: both overwrite {target}")
            operands = {target: weights, **operands}
        if self._is_moved is not None and self._is_moved():
            refuse_moved(self.request)
        with self._executor.claimed(), self._in_order():
            refit(self._executor, self.request, operands)

    @contextmanager
    def _in_order(self) -> Iterator[None]:
        """A context that is ordered with the current stream of the operands' library, and of a second library."""
        stream = self._executor.stream
        current: Any = stream if self._framework is None else self._framework.stream(self._executor.device)
        with current.claimed() if current is not stream else NULL_CONTEXT, self._ordered_with_others():
            if current is not stream:
                stream.wait_for_uses(current)
            yield
            if current is not stream:
                current.wait_for_uses(stream)

    def __repr__(self) -> str:
        try:
            return f"<{self.row.name}: {self.request.describe()}>"
        except Exception as error:  # noqa: BLE001  # the device was closed, or is lost
            return f"<BoundCall of {self.request!r}, which runs no more: {type(error).__name__}>"


def _moved_test(storages: Iterable[ForeignStorage], written: Iterable[ForeignStorage]) -> Callable[[], bool] | None:
    """A function that says whether any of these is moved, or a written one has other memory; None if none can be.

    It has no loop: 0.05 us for each.
    """
    pointers: dict[Any, Any] = {each.held.data_ptr: each.held_at for each in storages if each.held_at is not None}
    pointers |= {each.keep.data_ptr: each.at for each in written if each.held_at is not None}
    if not pointers:
        return None
    scope = {f"pointer_{number}": pointer for number, pointer in enumerate(pointers)}
    tests = (f"{name}() != {at}" for name, at in zip(scope, pointers.values(), strict=True))
    test: Callable[[], bool] = eval(f"lambda: {' or '.join(tests)}", scope)
    return test


@names_arguments
def prepare(request: Request[R_co], *, graph: bool = False) -> BoundCall[R_co]:
    """Bind a request to the calling thread's current stream; the result runs it again without selecting a row.

    Over operands of torch or CuPy that is the current stream of their library. Outputs that are None in the request are
    allocated here, once; each call writes them again. To call it from several threads, give each thread its own `out`.
    It raises the same errors as `run`. A call raises StaleTensor if torch has freed or moved the memory of an operand
    since, or an output was given other memory.

    Calls that can be captured are launched as a CUDA graph. A collective of NCCL is so only with `graph=True`, because
    all its ranks must prepare it, each on its own thread or process, in the same order as their other calls. BadRequest
    for calls that cannot be captured, and if the communicator allows no graphs.
    """
    check_request(request)
    check_bool("graph", graph)
    refuse_moved(request)
    with on_framework_stream(request):
        executor: Executor = request.device.executor()
        executor.check()
        return BoundCall(executor, request, executor.outputs(request), graph=graph)


@names_arguments
def prepare_all(requests: Iterable[Request[R_co]]) -> list[BoundCall[R_co]]:
    """Bind several requests as `prepare` does, but compile all kernels that they need at the same time.

    A CUTLASS kernel that is not cached takes half a minute to compile. Raises the same errors as `prepare`.
    """
    from dispatch.libraries.cutlass import compile as compiler  # imported at first use: only needed here
    from dispatch.progress import finish

    requests = as_requests(requests)
    for request in requests:
        check_request(request)
    calls: dict[int, BoundCall[R_co]] = {}
    with compiler.compiling_in_background() as started:
        for place, request in enumerate(requests):
            with suppress(compiler.StillCompiling):
                calls[place] = prepare(request)
    finish(started)
    return [calls[place] if place in calls else prepare(request) for place, request in enumerate(requests)]


HostDevice.open_executor = HostExecutor
CudaDevice.open_executor = CudaExecutor
