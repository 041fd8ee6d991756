"""Lanes: what one thread holds to run requests on one stream.

The request functions, bound calls and workers enqueue here. A lane owns its library handles, workspace, plans and
captured graphs, and never crosses threads. The first run of a plan at some addresses calls the library; the second
records that call as a graph, and from then on the graph is launched.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Mapping
from functools import cache, partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from cudabind import LIBRARIES, _load, driver
from dispatch.errors import BadRequest, Closed, Refused
from dispatch.keys import C128, U8
from dispatch.replay import Replay, capture
from dispatch.select import ANY_VERSION, Versions, candidates, no_row
from dispatch.stream import NOWHERE, order, relaxed
from dispatch.table import TABLE
from dispatch.tensor import Tensor
from dispatch.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from dispatch.cuda import CudaDevice
    from dispatch.device import Device
    from dispatch.keys import Dtype
    from dispatch.request import Argument, Operands, Plan, Request
    from dispatch.row import Row
    from dispatch.stream import Stream
    from dispatch.tuning import AlgorithmCache

__all__ = ["Bound", "CudaLane", "HostLane", "Lane", "algorithms"]

MAX_PLANS = 4096  # on one lane; the oldest goes first
MAX_REPLAYS = 1024  # on one lane; the oldest goes first
MAX_SEEN = 1024  # arguments of one plan that wait for their second run
SCALARS_PER_PAGE = 1024


class Lane:
    """One thread's way to run requests on one stream; `plans` is empty once the device is closed or lost."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.device: Device = stream.device
        self.device.activate()
        self.closed = False
        self.prepared = False  # whether there were prepared calls, whose graphs hold this lane's addresses
        self.at_close: list[Callable[[], None]] = []  # what rooms that hold something for this lane let go of with it
        self.plans: dict[tuple[Any, ...], Plan] = {}
        self.shortcuts: dict[Any, Any] = {}  # what the request functions remember of their calls, by layouts,
        self.patterns: dict[Any, Any] = {}  # and by what layouts of other extents have in common

    @property
    def versions(self) -> Versions:
        """The versions of the libraries that rows on this lane end in."""
        return ANY_VERSION

    def plan(self, request: Request) -> Plan:
        """The plan of a request: the one made before, or the first row that takes it; NoRow with every reason."""
        key = (type(request), *request.key())
        plan = self.plans.get(key)
        if plan is None:
            self.check()
            if request.device is not self.device:
                request.device.check()
                raise BadRequest("request", f"operands on {request.device!r}", f"operands on {self.device!r}")
            plan = self._make(request)
            if len(self.plans) >= MAX_PLANS:
                self.plans.pop(next(iter(self.plans)))
            self.plans[key] = plan
        return plan

    def _make(self, request: Request) -> Plan:
        refused: dict[Row, str] = {}
        for row in candidates(request, self.device.arch, self.versions):
            try:
                plan: Plan = row.call(request, self, row)
                return plan
            except Refused as refusal:  # noqa: PERF203  # nearly always the first row binds
                refused[row] = str(refusal)
        raise no_row(request, self.device.arch, self.versions, refused)

    def rows_before(self, request: Request, plan: Plan) -> list[Row]:
        """The rows that are asked before the plan's own for requests of the same dtypes."""
        rows = TABLE.with_dtypes(request.op, request.signature().dtypes)
        return list(takewhile(lambda row: row is not plan.row, rows))

    def outputs(self, request: Request) -> Operands:
        """Fresh memory for the outputs that a request leaves open."""
        return {name: self.empty(*made) for name, made in request.missing().items()}

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Dtype) -> Tensor:
        """An uninitialized tensor of these strides (elements), on this lane's stream."""
        elements = 0 if 0 in shape else 1
        if elements:
            for extent, stride in zip(shape, strides, strict=True):
                elements += (extent - 1) * stride
        storage = self.device.allocate((elements * dtype.bits + 7) // 8, self.stream)
        return Tensor(storage, storage.base, self.device.layout(dtype, shape, strides, storage.base))

    def check(self) -> None:
        """Raise what ended this lane."""
        self.device.check()
        if self.closed:
            raise Closed(f"this lane of {self.device} was closed with its thread or supervisor")

    def close(self) -> None:
        """End the lane; its plans and graphs are let go, then what was kept for them, the latest first."""
        self.lose()
        while self.at_close:
            self.at_close.pop()()

    def lose(self) -> None:
        """End the lane of a device that is lost: nothing is given back to a library, which could not take it."""
        self.closed = True
        order.epoch += 1  # bound calls look again, and find it closed
        self.forget()

    def forget(self) -> None:
        """Let all plans go; the next request chooses anew."""
        self.plans = {}  # another one, by which a bound request sees that it must choose anew
        self.shortcuts = {}
        self.patterns = {}

    def release(self) -> None:
        """Let go of all that can be made again, memory included; prepared calls keep what they need."""
        self.forget()

    def run_into(self, request: Request, outputs: Operands) -> None:
        """Enqueue a request with memory for the outputs that it leaves open."""
        raise Closed("a lane without a device")

    def failed(self, status: int) -> NoReturn:
        """Raise what a launch ended in."""
        raise Closed(f"a lane without a GPU was given status {status}")

    def run(self, request: Request) -> Any:
        """Enqueue a request and return its outputs."""
        raise Closed("a lane without a device")


class HostLane(Lane):
    """Runs requests with NumPy, at once, on the calling thread."""

    def run(self, request: Request) -> Any:
        outputs = self.outputs(request)
        self.run_into(request, outputs)
        return request.result(outputs)

    def run_into(self, request: Request, outputs: Operands) -> None:
        self.plan(request).run(request, outputs)


class CudaLane(Lane):
    """Runs requests on a stream of a GPU."""

    device: CudaDevice
    holding = False  # whether launches keep the interpreter's lock

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        # Plans enqueue on the stream that this names: the lane's own, and during a recording the recorder's.
        self.target = ctypes.c_void_p(stream.c_handle.value)
        self._recorder: Stream | None = None
        self._workspace: Workspace | None = None
        self._cublaslt: Any = None
        self._replays: deque[tuple[Plan, tuple[Argument, ...]]] = deque()
        self._scalars: dict[tuple[complex, int], int] = {}
        self._pages: list[Tensor] = []
        self._zeros: list[Tensor] = []

    def _make(self, request: Request) -> Plan:
        with self.device.here:  # what rows make, handles and events and modules, belongs to the current context
            return super()._make(request)

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

    def launch(self, replay: Replay, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...]) -> None:
        """Launch a recorded call behind all uses of its tensors on other streams."""
        stream = self.stream
        for tensor in reads:
            storage = tensor.storage
            if storage.owner is not stream and stream not in storage.readers:
                storage.use(stream, write=False)
        for tensor in writes:
            if tensor.storage.owner is not stream:
                tensor.storage.use(stream, write=True)
        status = replay.launch()
        if status:
            self.failed(status)

    def failed(self, status: int) -> NoReturn:
        """Raise what a launch ended in."""
        self.device.fail(status, "cuGraphLaunch")

    def enqueue(
        self, plan: Plan, arguments: tuple[Argument, ...], reads: tuple[Tensor, ...], writes: tuple[Tensor, ...]
    ) -> None:
        """Run a plan at some addresses: by its library the first time, from the second on as a recorded call."""
        if self.captured:  # nothing is recorded meanwhile: to instantiate a graph may end the caller's capture
            self._settle((*reads, *writes))
        else:
            replay = plan.replays.get(arguments)
            if replay is None and plan.capture_safe and arguments in plan.seen:
                replay = self.record(plan, arguments)
            if replay is not None:
                self.launch(replay, reads, writes)
                return
        for tensor in reads:
            tensor.storage.use(self.stream, write=False)
        for tensor in writes:
            tensor.storage.use(self.stream, write=True)
        if len(plan.seen) >= MAX_SEEN:
            plan.seen.clear()
        plan.seen[arguments] = None
        here = self.device.here  # as a block it took 0.5 us longer
        status = here.push()
        if status:
            self.device.fail(status, "cuCtxPushCurrent")
        try:
            plan.enqueue(arguments)
        finally:
            here.pop()

    def _settle(self, tensors: tuple[Tensor, ...]) -> None:
        """Wait here for the other streams of some tensors: a graph under capture cannot wait for work outside it."""
        with relaxed():
            for tensor in tensors:
                for stream in tensor.storage.users() - {self.stream}:
                    stream.synchronize()
                tensor.storage.owner = tensor.storage.writer = self.stream
                tensor.storage.readers = set()

    @property
    def captured(self) -> bool:
        """Whether the caller records this lane's stream into a graph of its own: then only plain calls may go on it."""
        return self.stream.foreign and self.stream.is_capturing()

    def refuse_capture(self, what: str) -> None:
        """Raise BadRequest where the caller captures the stream: what is written now would be part of his graph."""
        if self.captured:
            hint = "run the request once before the capture"
            raise BadRequest("stream", "a stream under capture", f"none for the first run of {what}", hint)

    def capture(self, enqueue: Callable[[], None]) -> Replay:
        """Record what plans of this lane enqueue."""
        with self.device.here:
            if self._recorder is None:
                self._recorder = self.device.stream()
            replay = capture(enqueue, self.target, self._recorder.c_handle, holding=self.holding)
        if self.stream.here is not NOWHERE:
            replay.launch = partial(_launch_on_default, self.stream.here, replay.launch)
        return replay

    def record(self, plan: Plan, arguments: tuple[Argument, ...]) -> Replay:
        """Record a plan at some addresses; the oldest record of the lane goes where there are too many."""
        replay = self.capture(lambda: plan.enqueue(arguments))
        plan.seen.pop(arguments, None)
        plan.replays[arguments] = replay
        self._replays.append((plan, arguments))
        if len(self._replays) > MAX_REPLAYS:
            oldest, gone = self._replays.popleft()
            oldest.replays.pop(gone, None)
        return replay

    @property
    def versions(self) -> Versions:
        return _installed

    # -- what plans take from their lane ------------------------------------------------------------------------
    @property
    def workspace(self) -> Workspace:
        if self._workspace is None:
            self._workspace = Workspace(self.device, self.stream)
        return self._workspace

    @property
    def cublaslt(self) -> Any:
        """This lane's `cublasLtHandle_t`."""
        if self._cublaslt is None:
            from cudabind.sys import cublasLt as lt

            handle = lt.cublasLtHandle_t()
            with self.device.here:
                lt.cublasLtCreate(handle)
            self._cublaslt = handle
        return self._cublaslt

    @property
    def algorithms(self) -> AlgorithmCache:
        """What autotune has found for this GPU and this cuBLASLt."""
        return algorithms(self.device.model, ".".join(map(str, self.versions["cublasLt"])))

    def scalar(self, value: complex, dtype: Dtype) -> int:
        """The address of a number in device memory; it stays there as long as the lane."""
        key = (value, dtype.cuda)
        address = self._scalars.get(key)
        if address is None:
            self.refuse_capture("a number that is read on the device")
            slot = len(self._scalars) % SCALARS_PER_PAGE
            if slot == 0:
                self._pages.append(self.empty((SCALARS_PER_PAGE, 2), (2, 1), C128))
            page = self._pages[-1]
            address = page.ptr + slot * 16
            self.write(address, value, dtype)
            self._scalars[key] = address
        return address

    def write(self, address: int, value: complex, dtype: Dtype) -> None:
        """Write one number to device memory, on this lane's stream."""
        number = np.array(value, dtype.numpy)
        with self.device.here:
            driver.cuMemcpyHtoDAsync(address, number.ctypes.data, number.nbytes, self.stream.c_handle.value)
            self.stream.synchronize()

    def zeros(self, nbytes: int) -> int:
        """The address of so many bytes of zeros, which nobody may write."""
        if not self._zeros or self._zeros[-1].nbytes < nbytes:
            self.refuse_capture("a product with k = 0")
            self._zeros.append(self.empty((nbytes,), (1,), U8))  # captured calls may still read the smaller ones
            with self.device.here:
                driver.cuMemsetD8Async(self._zeros[-1].ptr, 0, nbytes, self.stream.c_handle.value)
        return self._zeros[-1].ptr

    def twin(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor in memory of its own, of the same strides."""
        copy = self.empty(tensor.shape, tensor.layout.strides, tensor.dtype)
        tensor.storage.use(self.stream, write=False)
        size = tensor.layout.high - tensor.layout.low
        if size:
            with self.device.here:
                driver.cuMemcpyDtoDAsync(copy.ptr, tensor.ptr, size, self.stream.c_handle.value)
        return copy

    def release(self) -> None:
        super().release()
        self._replays.clear()  # no plan that is left runs again: whoever has one sees that the lane has forgotten it
        if not self.prepared:
            self._workspace = None
            self._scalars, self._pages, self._zeros = {}, [], []

    def close(self) -> None:
        super().close()
        self._replays.clear()
        self._workspace = None
        if self._cublaslt is not None and self.device.fault is None:
            from cudabind.sys import cublasLt as lt

            with self.device.here:
                lt.cublasLtDestroy(self._cublaslt)
        self._cublaslt = None

    def __del__(self) -> None:
        if not self.closed and self.device.alive and not sys.is_finalizing():
            self.close()


def _launch_on_default(here: AbstractContextManager[None], launch: Callable[[], int]) -> int:
    """Launch on a default stream, which is the lane's only in its device's context."""
    with here:
        return launch()


class Bound:
    """A request's plan on one lane, with what its runs need and nothing that would keep the request alive."""

    __slots__ = ("arguments", "lane", "plan", "plans", "reads", "result", "writes")

    def __init__(self, lane: CudaLane, request: Request, outputs: Operands | None = None) -> None:
        self.lane, self.plans = lane, lane.plans
        self.plan = lane.plan(request)
        operands = list(request.tensors())
        self.reads = tuple(tensor for _, tensor, written in operands if not written)
        self.writes = tuple(tensor for _, tensor, written in operands if written)
        self.arguments: tuple[Argument, ...] | None = None
        self.result: Any = None
        if outputs is not None:
            self.writes += tuple(outputs.values())
        if outputs is not None or not request.missing():
            self.arguments = request.arguments(outputs or {})
            self.result = request.result(outputs or {})

    def run(self, request: Request) -> Any:
        """Run once, into the request's outputs or into fresh ones."""
        lane = self.lane
        if lane.closed:
            lane.check()
        if self.arguments is not None:
            replay = self.plan.replays.get(self.arguments)
            if replay is not None and not lane.stream.foreign:
                lane.launch(replay, self.reads, self.writes)
            else:
                lane.enqueue(self.plan, self.arguments, self.reads, self.writes)
            return self.result
        outputs = lane.outputs(request)
        lane.run_into(request, outputs)
        return request.result(outputs)


class _Installed(Mapping[str, tuple[int, ...]]):
    """The version of each library, asked when a row of it first is; one that is missing says so with its own error.

    A library that cudabind does not bind is a user's: it is not in here, and taken to be new enough.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, ...]] = {}

    def __getitem__(self, name: str) -> tuple[int, ...]:
        found = self._known.get(name)
        if found is None:
            if name not in LIBRARIES:
                raise KeyError(name)
            found = self._known[name] = tuple(int(part) for part in str(_load.version(name)).split("."))
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


_installed = _Installed()


@cache
def algorithms(gpu: str, library: str) -> AlgorithmCache:
    """The one cache of this process for a GPU model and a version of cuBLASLt."""
    from dispatch.tuning import AlgorithmCache  # at first use: few requests are tuned

    return AlgorithmCache(gpu, f"cublasLt-{library}")
