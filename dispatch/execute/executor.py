"""Executor: what one thread holds to run requests on one stream.

The request functions, bound calls and workers enqueue here. An executor owns its library handles, plans and what it
remembers of calls, and never crosses threads. host_executor.py and cuda_executor.py say how a plan runs.
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

MAX_PLANS = 4096  # on one executor; the oldest goes first
MAX_MADE = 4096  # shapes of outputs that a device remembers; then it begins anew
APART = 256  # bytes; no layout says more of a pointer


class Executor:
    """One thread's way to run requests on one stream; `plans` is empty once the device is closed or lost."""

    closed = True  # until it is made
    # The table's side, which dispatch/bind/bind.py puts in: which row carries a request out, and which it asks before.
    bind: Callable[[Request], Plan]
    rows_before: Callable[[Request, Plan], list[Row]]

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.device: Device = stream.device
        self.device.activate()
        self.closed = False
        self.prepared = False  # whether there were prepared calls, whose graphs hold this executor's addresses
        self.handles: dict[str, Any] = {}  # of libraries, by their names
        self.at_close: list[Callable[[], None]] = []  # how modules let go of what they hold for this executor
        self.plans: dict[tuple[Any, ...], Plan] = {}
        self.calls: dict[
            Any, Any
        ] = {}  # what is remembered of calls, by class, layouts and choices (core/remembered.py)
        self.shortcuts: dict[Any, Any] = {}  # the same of `matmul`, which has ways of its own: by layouts,
        self.patterns: dict[Any, Any] = {}  # and by what layouts of other extents have in common

    @property
    def versions(self) -> Versions:
        """The versions of the libraries that rows on this executor end in."""
        return ANY_VERSION

    def plan(self, request: Request) -> Plan:
        """The plan of a request: the one made before, or the first row that takes it; NoRow with every reason."""
        key = (type(request), *request.key())
        plans = self.plans  # those of the table as it is now, which may change while one is made
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
        """Fresh memory for the outputs that a request leaves open."""
        if request.framework is not None:
            return {name: self._of(request.framework, made) for name, made in request.unallocated().items()}
        return {name: self.empty(*made) for name, made in request.unallocated().items()}

    def _of(self, home: Framework, made: tuple[tuple[int, ...], tuple[int, ...], Dtype]) -> Tensor:
        """Memory of the library whose operands a request has; ours, where that allocates none as plans expect it."""
        tensor = home.allocate(self.device, *made)
        if tensor is None or not (self.device.is_host or tensor.ptr % APART == 0):
            return self.empty(*made)
        return tensor

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Dtype) -> Tensor:
        """An uninitialized tensor of these strides (elements), on this executor's stream."""
        device = self.device
        known = device.made.get((shape, strides, dtype.cuda))
        if known is None:
            known = self._measure(shape, strides, dtype)
        nbytes, layout = known
        storage = device.allocate(nbytes, self.stream)
        base = storage.base
        if base % APART:
            layout = device.layout(dtype, shape, strides, base)
        return Tensor(storage, base, layout)

    def _measure(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Dtype) -> tuple[int, Layout]:
        """The bytes of a tensor, and its layout at a multiple of `APART` bytes; remembered by its device."""
        elements = 0 if 0 in shape else 1
        if elements:
            for extent, stride in zip(shape, strides, strict=True):
                elements += (extent - 1) * stride
        # Tensor maps write whole 16 bytes: behind the last line, too, there is room for them (cutlass/staged.py).
        nbytes = -(-elements * dtype.bits // 128) * 16
        layout = self.device.layout(dtype, shape, strides, APART)
        if len(self.device.made) >= MAX_MADE:
            self.device.made = {}
        found = self.device.made[shape, strides, dtype.cuda] = nbytes, layout
        return found

    def check(self) -> None:
        """Raise what ended this executor."""
        self.device.check()
        if self.closed:
            raise Closed(f"this executor of {self.device} was closed with its stream, thread or supervisor")

    def claimed(self) -> AbstractContextManager[None]:
        """Calls on this executor outside of `with` blocks of its stream are made in here."""
        return NULL_CONTEXT

    def close(self) -> None:
        """End the executor; its plans and graphs are let go, then what was kept for them, the latest first."""
        self.lose()
        while self.at_close:
            self.at_close.pop()()

    def lose(self) -> None:
        """End the executor of a device that is lost: nothing is given back to a library, which could not take it."""
        self.closed = True
        order.sync_epoch += 1  # bound calls look again, and find it closed
        self.forget()

    def forget(self) -> None:
        """Let all plans go; the next request chooses anew."""
        self.plans = {}  # another one, by which a bound request sees that it must choose anew
        self.calls, self.patterns, self.shortcuts = {}, {}, {}  # shortcuts last: they are made of patterns

    def release(self) -> None:
        """Let go of all that can be made again, memory included; prepared calls keep what they need."""
        self.forget()

    def run_into(self, request: Request, outputs: Operands) -> None:
        """Enqueue a request with memory for the outputs that it leaves open."""
        raise Closed("an executor without a device")

    def launch(self, graph: GraphExec, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...]) -> None:
        """Launch a recorded call behind all uses of its tensors on other streams."""
        raise Closed("an executor without a GPU")

    def enqueue(
        self, plan: Plan, arguments: tuple[Argument, ...], reads: tuple[Tensor, ...], writes: tuple[Tensor, ...]
    ) -> None:
        """Run a plan at some addresses, behind all uses of its tensors on other streams."""
        raise Closed("an executor without a GPU")

    def wait_for_uses(self, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...]) -> None:
        """Have the stream wait for the uses of tensors on others."""
        raise Closed("an executor without a GPU")

    def learn(self) -> bool:
        """Learn a little of its plans, for who has nothing else to do; False where nothing is left."""
        return False

    def relocation_stats(self) -> dict[str, int]:
        """What became of the calls of its plans, by name; nothing on the host."""
        return {}

    def failed(self, status: int) -> NoReturn:
        """Raise what a launch ended in."""
        raise Closed(f"an executor without a GPU was given status {status}")

    def run(self, request: Request[R_co]) -> R_co:
        """Enqueue a request and return its outputs."""
        raise Closed("an executor without a device")
