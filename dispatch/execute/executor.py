"""Executor: runs requests on one stream, for one thread.

Request functions, bound calls and workers enqueue here. An executor owns its library handles, its plans and its memory
of repeated calls, and belongs to one thread. host_executor.py and cuda_executor.py implement how a plan runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from dispatch.device.stream import NULL_CONTEXT, order
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, Closed
from dispatch.execute.installed import ANY_VERSION, Versions

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from dispatch.core.request import Argument, Operands, Plan, R_co, Request
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.frameworks.framework import Framework
    from dispatch.device.layout import Layout
    from dispatch.device.stream import Stream
    from dispatch.execute.cuda_graph import GraphExec
    from dispatch.keys import Dtype

__all__ = ["APART", "Executor"]

MAX_PLANS = 4096  # on one executor; the oldest is dropped first
MAX_OUTPUT_LAYOUTS = 4096  # cached layouts of outputs on a device; beyond it all are dropped
APART = 256  # bytes: the largest alignment that a layout distinguishes


class Executor:
    """Runs requests on one stream, for one thread; `plans` is empty once the device is closed or lost."""

    closed = True  # until __init__ has run
    # Set by dispatch/bind/bind.py, which knows the table: make a request's plan; list the rows tried before its row.
    bind: Callable[[Request], Plan]
    rows_before: Callable[[Request, Plan], list[Row]]

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.device: Device = stream.device
        self.device.activate()
        self.closed = False
        self.prepared = False  # whether calls were prepared here: their graphs contain addresses of this executor
        self.handles: dict[str, Any] = {}  # library handles, by library name
        self.at_close: list[Callable[[], None]] = []  # called by `close`, the latest first
        self.plans: dict[tuple[Any, ...], Plan] = {}
        self.calls: dict[
            Any, Any
        ] = {}  # the fast path of repeated calls, by class, layouts and choices (core/call_cache.py)
        self.shortcuts: dict[Any, Any] = {}  # that of `matmul`, by layouts (ops/matmul/shortcut.py),
        self.patterns: dict[Any, Any] = {}  # and by what layouts with other extents have in common

    @property
    def versions(self) -> Versions:
        """The versions of the libraries that rows on this executor call."""
        return ANY_VERSION

    def plan(self, request: Request) -> Plan:
        """The plan of a request: the cached one, or that of the first row that supports it; NoRow if none does."""
        key = (type(request), *request.key())
        plans = self.plans  # a local: if the table changes while the plan is made, `self.plans` is another dict
        plan = plans.get(key)
        if plan is None:
            self.check()
            if request.device is not self.device:
                request.device.check()
                raise BadRequest("request", f"operands on {request.device!r}", f"operands on {self.device!r}")
            plan = self._make(request)
            if len(plans) >= MAX_PLANS:
                plans.pop(next(iter(plans)), None)
            plans[key] = plan
        return plan

    def _make(self, request: Request) -> Plan:
        return self.bind(request)

    def outputs(self, request: Request) -> Operands:
        """New tensors for the outputs that a request does not provide."""
        if request.framework is not None:
            return {name: self._of(request.framework, spec) for name, spec in request.unallocated().items()}
        return {name: self.empty(*spec) for name, spec in request.unallocated().items()}

    def _of(self, framework: Framework, spec: tuple[tuple[int, ...], tuple[int, ...], Dtype]) -> Tensor:
        """Memory from the library of the request's operands, or our own if that is not aligned as plans expect."""
        tensor = framework.allocate(self.device, *spec)
        if tensor is None or not (self.device.is_host or tensor.ptr % APART == 0):
            return self.empty(*spec)
        return tensor

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Dtype) -> Tensor:
        """An uninitialized tensor of these strides (elements), on this executor's stream."""
        device = self.device
        measured = device.output_layouts.get((shape, strides, dtype.cuda))
        if measured is None:
            measured = self._measure(shape, strides, dtype)
        nbytes, layout = measured
        storage = device.allocate(nbytes, self.stream)
        base = storage.base
        if base % APART:
            layout = device.layout(dtype, shape, strides, base)
        return Tensor(storage, base, layout)

    def _measure(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Dtype) -> tuple[int, Layout]:
        """The bytes of a tensor, and its layout at a multiple of `APART` bytes; cached in its device."""
        elements = 0 if 0 in shape else 1
        if elements:
            for extent, stride in zip(shape, strides, strict=True):
                elements += (extent - 1) * stride
        # Tensor maps write whole units of 16 bytes, so one must fit after the last line (cutlass/staged.py).
        nbytes = -(-elements * dtype.bits // 128) * 16
        layout = self.device.layout(dtype, shape, strides, APART)
        if len(self.device.output_layouts) >= MAX_OUTPUT_LAYOUTS:
            self.device.output_layouts = {}
        measured = self.device.output_layouts[shape, strides, dtype.cuda] = nbytes, layout
        return measured

    def check(self) -> None:
        """Raise if the executor was closed, or its device was closed or lost."""
        self.device.check()
        if self.closed:
            raise Closed(f"this executor of {self.device} was closed with its stream, thread or supervisor")

    def claimed(self) -> AbstractContextManager[None]:
        """A block for calls on this executor outside of a `with` block of its stream."""
        return NULL_CONTEXT

    def close(self) -> None:
        """End the executor: drop its plans and graphs, then call `at_close`, the latest first."""
        self.lose()
        while self.at_close:
            self.at_close.pop()()

    def lose(self) -> None:
        """End the executor of a lost device: no library is called, because none could release anything."""
        self.closed = True
        order.sync_epoch += 1  # so that bound calls check again, and see that it is closed
        self.forget()

    def forget(self) -> None:
        """Drop all plans; the next request selects its row again."""
        plans, self.plans = self.plans, {}  # a new dict: bound requests compare it and then select again
        plans.clear()  # bound requests refer to the old one, and so does a frame in which a plan is being made
        self.calls, self.patterns, self.shortcuts = {}, {}, {}  # shortcuts last: they are made of patterns

    def release(self) -> None:
        """Drop everything that can be made again, memory included; prepared calls keep what they need."""
        self.forget()

    def run_into(self, request: Request, outputs: Operands) -> None:
        """Enqueue a request that writes to these outputs, which it does not provide."""
        raise Closed("an executor without a device")

    def launch(self, graph: GraphExec, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...]) -> None:
        """Launch a recorded call, ordered after the uses of its tensors on other streams."""
        raise Closed("an executor without a GPU")

    def enqueue(
        self, plan: Plan, arguments: tuple[Argument, ...], reads: tuple[Tensor, ...], writes: tuple[Tensor, ...]
    ) -> None:
        """Run a plan at these addresses, ordered after the uses of its tensors on other streams."""
        raise Closed("an executor without a GPU")

    def wait_for_uses(self, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...]) -> None:
        """Make the stream wait for the uses of these tensors on other streams."""
        raise Closed("an executor without a GPU")

    def learn(self) -> bool:
        """Take one step of learning a plan's call, for an idle worker; False if nothing is left to learn."""
        return False

    def relocation_stats(self) -> dict[str, int]:
        """Counts of relocated graphs and of calls that were refused or compared; empty on the host."""
        return {}

    def failed(self, status: int) -> NoReturn:
        """Raise the error of a launch."""
        raise Closed(f"an executor without a GPU received status {status}")

    def run(self, request: Request[R_co]) -> R_co:
        """Enqueue a request and return its outputs."""
        raise Closed("an executor without a device")
