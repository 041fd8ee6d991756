"""Records the CUDA graphs of one device and keeps their replays in order, for forwards and for training steps.

All graphs of a device are recorded on one stream of our own, and replayed one after the other, on whichever stream is
current: they share the workspaces of that stream.
"""

from __future__ import annotations

import random
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree

from dispatch.device.registry import device as device_of
from dispatch.torch import masks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "ACTIVE",
    "CONSTANTS",
    "FailedCapture",
    "HostGenerators",
    "Pool",
    "Recorder",
    "agree",
    "first_line_of",
    "leaves_of",
    "version_of",
    "with_operands",
]


# Recorders that are recording a training step. Its gradients need the thread that runs all backward passes of a device:
# meanwhile that thread must not wait for the recorder's lock.
ACTIVE: set[Any] = set()


class FailedCapture(Exception):
    """A capture ended in an error; the text says why."""


class Pool:
    """Memory that several graphs share.

    Attributes:
        handle: torch's handle of it; a new one after a failed capture.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle


class Recorder:
    """Records the graphs of one device.

    Attributes:
        lock: held while recording or replaying.
        stream: on which graphs are recorded, and calls run for a recording.
        pool: the memory of graphs of forwards without gradients.
        replayed: an event after the last replay.
    """

    def __init__(self, ordinal: int) -> None:
        self.lock = threading.RLock()
        self._ordinal = ordinal
        self._own_stream = device_of(f"cuda:{ordinal}").stream()  # torch's would be given to others, too
        with torch.cuda.device(ordinal), torch.inference_mode(False):
            external: Any = torch.cuda.ExternalStream
            self.stream = external(self._own_stream.c_handle.value)
            self.pool = self.new_pool()
            event: Any = torch.cuda.Event
            self.replayed = event()
            self.replayed.record()
            self._dummy = torch.zeros(1, device="cuda")

    # -- capturing -------------------------------------------------------------------------------------------------
    @staticmethod
    def new_pool() -> Pool:
        """Memory for graphs that share it with no others."""
        return Pool(torch.cuda.graph_pool_handle())

    def capture(self, pool: Pool, function: Callable[[], Any]) -> tuple[Any, Any]:
        """A graph of what the function enqueues, and the result of the function; raises FailedCapture."""
        graph = torch.cuda.CUDAGraph()
        try:
            with masks.cached_during_capture(), self._capturing(graph, pool):
                found = function()
        except BaseException as error:
            graph.reset()
            self._recover(pool)
            if not isinstance(error, Exception):  # Ctrl-C
                raise
            cause: BaseException = error
            while cause.__context__ is not None:  # the end of a failed capture raises, too
                cause = cause.__context__
            raise FailedCapture(first_line_of(cause)) from None
        return graph, found

    @contextmanager
    def _capturing(self, graph: Any, pool: Pool) -> Iterator[None]:
        """Capture with workspaces of cuBLAS that belong to the pool.

        torch keeps one workspace for each stream. Whoever has all of them freed, as torch.compile does before it
        records graphs of its own, would also free one that a graph uses but that was allocated before the capture: a
        replay then wrote to freed memory.
        """
        _give_workspaces_back()
        try:
            with torch.cuda.graph(graph, pool=pool.handle, stream=self.stream, capture_error_mode="thread_local"):
                yield
        finally:
            _give_workspaces_back()

    def _recover(self, pool: Pool) -> None:
        """Recover from a failed capture: torch (2.11) still takes its generator and its allocator for captured.

        Whether a forward waits for the GPU is not known in advance: models of transformers do so only outside captures.
        """
        with suppress(RuntimeError, AttributeError):  # in a torch that does it at the end of a capture
            torch._C._cuda_endAllocateToPool(self._ordinal, pool.handle)
        pool.handle = torch.cuda.graph_pool_handle()
        with self._capturing(torch.cuda.CUDAGraph(), pool):
            self._dummy.zero_()

    # -- order -----------------------------------------------------------------------------------------------------
    @contextmanager
    def on_own_stream(self) -> Iterator[None]:
        """Run the block on our own stream, after the current one and all replays; the current one waits for it."""
        current = torch.cuda.current_stream()
        current.wait_event(self.replayed)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            current.wait_stream(self.stream)
            self.stream.synchronize()
            self.replayed.record()

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Replay in the block, on the current stream: after all earlier replays and before all later ones."""
        with self.lock:
            self.wait()
            try:
                yield
            finally:  # even if Ctrl-C or a lack of memory ends it, later replays must wait for what was enqueued
                self.replayed.record()

    def wait(self) -> None:
        """Have the current stream wait for the last replay."""
        torch.cuda.current_stream().wait_event(self.replayed)

    def finish(self) -> None:
        """Wait on the host for the last replay, which may use memory that is freed next."""
        self.replayed.synchronize()

    # -- random numbers --------------------------------------------------------------------------------------------
    def generator(self) -> torch.Generator:
        """The generator of the device, from which replays draw as the forward does."""
        return torch.cuda.default_generators[self._ordinal]

    def host_generators(self) -> HostGenerators:
        """The present state of the generators of the host."""
        return HostGenerators()


def _give_workspaces_back() -> None:
    """Have torch free the workspaces of cuBLAS, whose memory returns to its allocator in stream order."""
    with suppress(AttributeError):  # of a torch that has no such function
        torch._C._cuda_clearCublasWorkspaces()


class HostGenerators:
    """The state of the generators of the host: a replay does not draw what a forward draws from them."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._torch = torch.get_rng_state()
        self._numpy = _numpy_state()

    def are_unchanged(self) -> bool:
        """Whether nothing was drawn meanwhile."""
        return (
            random.getstate() == self._python
            and torch.equal(torch.get_rng_state(), self._torch)
            and repr(_numpy_state()) == repr(self._numpy)
        )

    def restore(self) -> None:
        """Set the generators back to this state."""
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)


def _numpy_state() -> Any:
    """The state of NumPy's generator as lists and numbers; None if NumPy's is not imported."""
    module: Any = sys.modules.get("numpy.random")
    if module is None:
        return None
    name, key, *others = module.get_state(legacy=True)
    return (name, key.tolist(), *others)


def first_line_of(error: BaseException) -> str:
    """The first line of what an error says."""
    return [*str(error).strip().splitlines(), type(error).__name__][0]


# -- operands and results ----------------------------------------------------------------------------------------------
CONSTANTS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))


def version_of(t: torch.Tensor) -> int:
    """How many changes of a tensor torch has counted; -1 for inference tensors, which have no counter."""
    return -1 if t.is_inference() else t._version


def with_operands(own: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The arguments with our own tensors in place of the caller's."""
    left = iter(own)
    args = tuple(next(left) if type(x) is torch.Tensor else x for x in args)
    return args, {name: next(left) if type(x) is torch.Tensor else x for name, x in kwargs.items()}


def leaves_of(y: Any) -> list[Any]:
    """The leaves of a result, its tensors copied."""
    return [x.clone() if type(x) is torch.Tensor else x for x in _pytree.tree_leaves(y)]


def agree(one: list[Any], other: list[Any], eps: float | None = None) -> bool:
    """Whether two results agree up to rounding: kernels may add in another order, or be others under capture.

    Each tensor's error is measured by its own norm; with `eps`, the roundoff of the least precise dtype among them,
    also by the norm of an average tensor of its size: some gradients are 0 but for rounding, as that of a key's bias.
    """
    if len(one) != len(other):
        return False
    floor = 0.0 if eps is None else _root_mean_square(one)
    return all(_tensors_agree(a, b, eps, floor) for a, b in zip(one, other, strict=True))


def _root_mean_square(values: list[Any]) -> float:
    """The root mean square of all numbers in all tensors; those that are not finite count as 0."""
    tensors = [x for x in values if type(x) is torch.Tensor and x.is_floating_point()]
    count = sum(x.numel() for x in tensors)
    total = sum(float(x.detach().double().nan_to_num(0, 0, 0).square().sum()) for x in tensors)
    return (total / count) ** 0.5 if count else 0.0


def _tensors_agree(a: Any, b: Any, eps: float | None, floor: float) -> bool:
    if type(a) is not torch.Tensor or type(b) is not torch.Tensor:
        return type(a) is type(b) and bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()):
        return False
    bound = max(torch.finfo(a.dtype).eps, eps or 0.0) ** 0.5
    a, b = (x.double().where(finite, 0) for x in (a, b))
    return bool((a - b).norm() <= bound * max(float(a.norm()), floor * a.numel() ** 0.5))
