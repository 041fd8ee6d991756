"""CudaExecutor: runs plans on a CUDA stream, our own or another library's, with a workspace and captured graphs.

A plan's first runs call the library; when plan_relocation.py has learnt the call, a graph is launched at any addresses.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from cudabind import driver
from cudabind._fork import anew
from dispatch.core.call_counter import as_trial
from dispatch.device.disposal import dispose, wait_for_collectives
from dispatch.device.storage import NOBODY, Storage
from dispatch.device.stream import NULL_CONTEXT, RELAXED, exchange_mode, order, relaxed
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest
from dispatch.execute.bound import Bound
from dispatch.execute.capturable import CapturableExecutor
from dispatch.execute.cuda_graph import TRIES, GraphExec, capture, recorded
from dispatch.execute.executor import APART
from dispatch.execute.installed import Versions, algorithms, installed
from dispatch.execute.launches import KERNELS, Launches, launch_on_default
from dispatch.execute.plan_relocation import AGAIN, PlanRelocation
from dispatch.execute.relocated_graph import MISFIT
from dispatch.execute.relocations import Relocations
from dispatch.execute.workspace import Workspace
from dispatch.keys import C128, U8

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from dispatch.core.request import Argument, Launchable, Operands, Plan, Request
    from dispatch.device.cuda import CudaDevice
    from dispatch.device.stream import Stream
    from dispatch.execute.algorithm_cache import AlgorithmCache
    from dispatch.keys import Dtype

R = TypeVar("R")

__all__ = ["CudaExecutor"]

SCALARS_PER_PAGE = 1024
MAX_SCALARS = 1 << 14  # numbers in device memory of one executor; beyond it new memory is used


class CudaExecutor(CapturableExecutor):
    """Runs requests on a stream of a GPU."""

    device: CudaDevice
    holds_gil = False  # whether launches hold the GIL

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        # Plans enqueue on the stream with this handle: the executor's own; during a recording, the recorder's.
        self.target = ctypes.c_void_p(stream.c_handle.value)
        # Held while a plan is called or recorded: a plan holds the addresses of one call at a time, and recording
        # changes `target`. Other threads may run a bound call here; it is reentrant for finalizers.
        self._calls = threading.RLock()
        anew(self, "_calls", threading.RLock)
        self._recorder: Stream | None = None
        self._workspace: Workspace | None = None
        self.relocations = Relocations()
        self._calling: set[Plan] = set()
        self._mode = ctypes.c_int()  # the calling thread's capture mode; nested calls have their own
        self._c_mode = ctypes.byref(self._mode)
        self.launches = Launches(stream, ctypes.c_void_p(stream.c_handle.value))
        self._scalars: dict[tuple[complex, int], int] = {}
        self._pages, self._slots = list[Tensor](), list[int]()  # memory of the numbers; free slots of the latest page
        self._outgrown, self._zeros = list[Tensor](), list[Tensor]()

    def _make(self, request: Request) -> Plan:
        wait_for_collectives(self.device)
        with self.device.context, relaxed(), self.preparing():  # handles, events and modules belong to the context
            return super()._make(request)

    def claimed(self) -> AbstractContextManager[None]:
        """As in Executor: claims another library's stream, which is alive in its `with` blocks and during a call."""
        stream: Any = self.stream
        return NULL_CONTEXT if stream.is_ours or stream.is_current else stream.claimed()

    # -- running ------------------------------------------------------------------------------------------------
    def run(self, request: Request) -> Any:
        bound = request.bound
        if bound is None or bound.plans is not self.plans:
            bound = self._bind(request)
        return bound.run(request)

    def _bind(self, request: Request) -> Bound:
        self.check()
        bound = Bound(self, request)
        object.__setattr__(request, "bound", bound)
        return bound

    def run_into(self, request: Request, outputs: Operands) -> None:
        bound = request.bound
        if bound is None or bound.plans is not self.plans:
            bound = self._bind(request)
        arguments = request.arguments(outputs)
        self.enqueue(bound.plan, arguments, bound.reads, (*bound.writes, *outputs.values()))

    def launch(self, graph: Launchable, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...]) -> None:
        """Launch a recorded call, ordered after the uses of its tensors on other streams."""
        self.wait_for_uses(reads, writes)
        if status := graph.launch():
            self.failed(status)

    def wait_for_uses(self, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...]) -> None:
        """Make the stream wait for the uses of these tensors on other streams."""
        stream = self.stream
        for tensor in reads:
            storage = tensor.storage
            if storage.owner is not stream and stream not in storage.readers:
                storage.use(stream, write=False)
        for tensor in writes:
            if tensor.storage.owner is not stream:
                tensor.storage.use(stream, write=True)

    def failed(self, status: int) -> NoReturn:
        """Raise the error of a launch."""
        self.device.fail(status, "cuGraphLaunch")

    def enqueue(
        self, plan: Plan, arguments: tuple[Argument, ...], reads: tuple[Tensor, ...], writes: tuple[Tensor, ...]
    ) -> None:
        """Run a plan at these addresses: by its relocated graph, or by its library if there is no graph."""
        launch = plan.launch
        if launch is None or (self.stream.external and self.captured):
            self._enqueue_by_library(plan, arguments, reads, writes)
            return
        stream = self.stream  # `wait_for_uses`, inlined, because the call took 0.1 us longer
        for tensor in reads:
            storage = tensor.storage
            if storage.owner is not stream and stream not in storage.readers:
                storage.use(stream, write=False)
        for tensor in writes:
            if tensor.storage.owner is not stream:
                tensor.storage.use(stream, write=True)
        status = launch(arguments)
        if status == MISFIT:
            self._enqueue_by_library(plan, arguments, reads, writes)
        elif status:
            self.failed(status)

    def enqueue_at(self, plan: Plan, arguments: tuple[Argument, ...]) -> None:
        """As `enqueue`, for another library's stream and operands; that library keeps the order of their uses."""
        launch = plan.launch
        if launch is None or (self.target.value and self.captured):  # nobody captures the legacy default stream
            self._enqueue_by_library(plan, arguments, (), ())
            return
        status = launch(arguments)
        if status == MISFIT:
            self._enqueue_by_library(plan, arguments, (), ())
        elif status:
            self.failed(status)

    def _enqueue_by_library(
        self, plan: Plan, arguments: tuple[Argument, ...], reads: tuple[Tensor, ...], writes: tuple[Tensor, ...]
    ) -> None:
        with self._calls:
            if plan.is_bare:
                plan.hold((*reads, *writes))
            if plan.counter is not None:
                arguments = (*arguments, plan.counter.take())
            if self.captured:
                self._enqueue_captured(plan, arguments, reads, writes)
                return
            if reads or writes:
                self.wait_for_uses(reads, writes)
            relocation = plan.relocation
            if relocation is None:
                self.call(plan, arguments)
                if plan.relocation is None:  # a finalizer may have called the plan, too
                    plan.relocation = PlanRelocation(plan)
                return
            if relocation.graphs:
                status = relocation.other(plan, arguments)
                if not status:
                    return
                if status != MISFIT:
                    self.failed(status)
            self.call(plan, arguments)
            relocation.calls = calls = relocation.calls + 1
            if calls == AGAIN:
                self.relocations.wait(plan, arguments)
            if calls >= relocation.due or relocation.graphs:
                with self.device.context:  # memset nodes are set with the current context
                    relocation.follow(self, plan, arguments)

    def relocate(self, plan: Plan, arguments: tuple[Argument, ...]) -> str:
        """Learn at once how a plan's call depends on such arguments; returns "", or why the library still runs it."""
        with self._calls, self.device.context:
            relocation: PlanRelocation = plan.relocation or PlanRelocation(plan)
            plan.relocation = relocation
            return relocation.learn_now(self, plan, as_trial(plan, arguments))

    def learn(self) -> bool:
        with self._calls, self.device.context:
            return self.relocations.learn(self)

    def relocation_stats(self) -> dict[str, int]:
        return self.relocations.stats()

    def call(self, plan: Plan, arguments: tuple[Argument, ...]) -> None:
        """Call a plan's library, in the device's context and in a capture mode that ends no other capture."""
        if plan in self._calling:
            from dispatch.execute.reentry import refuse_reentry

            refuse_reentry(plan, CudaExecutor.call.__code__)
        if len(self._scalars) > MAX_SCALARS:
            self._renew_scalars()
        self.launches.left -= KERNELS
        context, mode = self.device.context, self._c_mode  # inlined, because `with` blocks took 1 us longer
        if self._calling:
            mode = ctypes.byref(ctypes.c_int(RELAXED))
        else:
            self._mode.value = RELAXED
        if status := context.push():
            self.device.fail(status, "cuCtxPushCurrent")
        exchange = exchange_mode()
        exchange(mode)
        try:
            self._calling.add(plan)
            plan.enqueue(arguments)
        finally:
            self._calling.discard(plan)
            exchange(mode)
            context.pop()

    def _enqueue_captured(
        self, plan: Plan, arguments: tuple[Argument, ...], reads: tuple[Tensor, ...], writes: tuple[Tensor, ...]
    ) -> None:
        """Make a library call part of the graph that the caller captures; the graph keeps the memory that it uses.

        Nothing is recorded or launched here: the caller captures the library's own call.
        """
        if not (plan.capture_safe or plan.is_bare):
            why = f"another for {plan.row.name}: a call that waits for the GPU, or writes memory of its own"
            raise BadRequest("stream", "a stream under capture", why, "run it outside of the capture")
        storages = {tensor.storage for tensor in (*reads, *writes)}
        with Storage.ordering:  # a use on another stream in between would be lost
            for storage in storages:
                for user in storage.users():
                    self.stream.wait_for_uses(user)
            for storage in storages:
                storage.owner = storage.writer = self.stream
                storage.readers = NOBODY
            order.sync_epoch += 1
        memory = (self._workspace, *self._pages, *self._zeros)
        self.device.graphs.keep(self.stream, plan, *memory, *(storage for storage in storages if storage.keep is None))
        self.call(plan, arguments)
        if [*map(id, memory)] != [*map(id, (self._workspace, *self._pages, *self._zeros))]:  # the call allocated more
            self.device.graphs.keep(self.stream, self._workspace, *self._pages, *self._zeros)

    def _renew_scalars(self) -> None:
        """Start new memory for numbers; only between calls, because one call may use several.

        Enqueued work still reads the old memory, recordings keep it, and a finalizer's call may use its last slots.
        """
        self._outgrown, self._pages, self._slots, self._scalars = self._pages, [], [], {}

    def capture(self, enqueue: Callable[[], None], *, tries: int = TRIES) -> GraphExec | None:
        """Record what plans of this executor enqueue; None if other libraries ended every attempt."""
        graph = self._recorded(partial(capture, enqueue, holds_gil=self.holds_gil, tries=tries))
        if graph is not None and self.stream.context is not NULL_CONTEXT:
            graph.launch = partial(launch_on_default, self.stream.context, graph.launch)
        return graph

    def _recorded(self, record: Callable[..., R | None]) -> R | None:
        """Record with a function of cuda_graph.py on a separate stream, which is replaced if the recording is lost."""
        with self._calls, self.device.context, relaxed():
            recorder = self._recorder or self.device.stream()
            self._recorder = None  # set again if the recording succeeds
            result = record(self.target, recorder.c_handle, self.device.recordings)
        if result is not None:
            self._recorder = recorder
        return result

    def record(self, plan: Plan, arguments: tuple[Argument, ...]) -> GraphExec | None:
        """Record a plan at these addresses; None if every attempt was ended by other libraries."""
        return self.record_calls([(plan, arguments)])

    def record_calls(self, calls: Sequence[tuple[Plan, tuple[Argument, ...]]]) -> GraphExec | None:
        """Record calls of several plans, one after another, as one graph; None as for `record`."""
        if len(self._scalars) > MAX_SCALARS:
            self._renew_scalars()

        def enqueue() -> None:
            for plan, arguments in calls:
                plan.enqueue(arguments)

        graph = self.capture(enqueue)
        if graph is not None:
            graph.keep = self.lasting()
        return graph

    def recorded(self, plan: Plan, arguments: tuple[Argument, ...]) -> ctypes.c_void_p | None:
        """The graph of a plan's call at these addresses, which the caller must destroy; None as for `record`."""
        if len(self._scalars) > MAX_SCALARS:
            self._renew_scalars()
        return self._recorded(partial(recorded, lambda: plan.enqueue(arguments)))

    def launcher(self, executable: ctypes.c_void_p, nodes: int) -> Callable[[], int]:
        """A function that launches an executable graph with this number of nodes on the executor's stream."""
        return self.launches.of(executable, nodes, holds_gil=self.holds_gil)

    def lasting(self) -> tuple[Any, ...]:
        """The memory whose addresses a recorded call may contain; later numbers go to the same pages."""
        return self._outgrown, self._pages, tuple(self._zeros), self._workspace

    @property
    def numbers_in_memory(self) -> int:
        """How many numbers this executor has placed in device memory."""
        return len(self._scalars)

    @property
    def versions(self) -> Versions:
        return installed

    # -- resources for plans --------------------------------------------------------------------------------------
    @property
    def workspace(self) -> Workspace:
        if self._workspace is None:
            with self.preparing():
                self._workspace = Workspace(self.device, self.stream)
        return self._workspace

    def algorithms(self, library: str) -> AlgorithmCache:
        """The outcomes of autotune for this GPU and the installed version of a library, if it has one."""
        return algorithms(self.device.model, library, ".".join(map(str, self.versions.get(library, ()))))

    def scalar(self, value: complex, dtype: Dtype) -> int:
        """The address of a number in device memory, valid for one call (later `_renew_scalars` may move it)."""
        key = (value, dtype.cuda)
        address = self._scalars.get(key)
        if address is None:
            with self.preparing():
                if not self._slots:
                    self._pages.append(page := self.empty((SCALARS_PER_PAGE, 2), (2, 1), C128))
                    self._slots = [page.ptr + 16 * slot for slot in reversed(range(SCALARS_PER_PAGE))]
                address = self._slots.pop()  # reserved first: a finalizer may add a number during the write
                self.write(address, value, dtype)
            self._scalars[key] = address
        return address

    def write(self, address: int, value: complex, dtype: Dtype) -> None:
        """Write one number to device memory, on this executor's stream."""
        number = np.array(value, dtype.numpy)
        with self.device.context:
            driver.cuMemcpyHtoDAsync(address, number.ctypes.data, number.nbytes, self.stream.c_handle.value)
            self.stream.synchronize()

    def zeros(self, nbytes: int) -> int:
        """The address of `nbytes` of zeros, which must not be written."""
        if not self._zeros or self._zeros[-1].nbytes < nbytes:
            with self.preparing(), self.device.context:
                tensor = self.empty((nbytes,), (1,), U8)
                driver.cuMemsetD8Async(tensor.ptr, 0, nbytes, self.stream.c_handle.value)
            self._zeros.append(tensor)  # captured calls may still read the smaller ones
        return self._zeros[-1].ptr

    def clone(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor in new memory, with the same strides and the same offset from a multiple of `APART`."""
        layout = tensor.layout
        size, misalignment = layout.high - layout.low, (tensor.ptr + layout.low) % APART
        storage = self.device.allocate(size + misalignment, self.stream)
        ptr = storage.base + misalignment - layout.low
        copy = Tensor(storage, ptr, self.device.layout(layout.dtype, layout.shape, layout.strides, ptr))
        tensor.storage.use(self.stream, write=False)
        if size:
            with self.device.context:
                driver.cuMemcpyDtoDAsync(ptr + layout.low, tensor.ptr + layout.low, size, self.stream.c_handle.value)
        return copy

    def forget(self) -> None:
        super().forget()
        self.relocations.forget()

    def release(self) -> None:
        super().release()
        if not self.prepared:
            self._workspace = None
            self._scalars, self._slots, self._pages, self._outgrown, self._zeros = {}, [], [], [], []

    def close(self) -> None:
        super().close()
        self.launches.close()
        self._workspace = None

    def __del__(self) -> None:
        if not self.closed and self.device.alive and not sys.is_finalizing():
            dispose(CudaExecutor.close, self)
