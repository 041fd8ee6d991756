"""Records the CUDA graphs of one device and orders their replays, for forwards and for training steps.

All graphs of a device are recorded on one dedicated stream, and share the workspaces of that stream. Therefore they are
replayed one after the other, on whichever stream is current.
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
    "MAX_FAILURES",
    "MAX_KINDS",
    "RUNS_BEFORE",
    "FailedCapture",
    "HostGenerators",
    "Pool",
    "Recorder",
    "agree",
    "first_line_of",
    "leaves_of",
    "unsupported_result",
    "version_of",
    "with_operands",
]

RUNS_BEFORE = 3  # eager calls of a kind before one is recorded: their plans are learnt during them
MAX_KINDS = 512  # kinds of calls that are remembered for one model
MAX_FAILURES = 2  # failed captures before no more are tried: each may harm torch's allocator

# Recorders that are recording a training step. Recording its gradients needs the autograd thread of the device, so that
# thread must not wait for the recorder's lock meanwhile.
ACTIVE: set[Any] = set()


class FailedCapture(Exception):
    """A capture ended in an error; the text says why."""


class Pool:
    """A memory pool that several graphs share.

    Attributes:
        handle: torch's handle of the pool; a new one after a failed capture.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle


class Recorder:
    """Records the graphs of one device.

    Attributes:
        lock: held while recording or replaying.
        stream: the stream of recordings, and of the eager calls that a recording is compared with.
        pool: the memory pool for graphs of forwards without gradients.
        replayed: an event recorded after the last replay.
    """

    def __init__(self, ordinal: int) -> None:
        self.lock = threading.RLock()
        self._ordinal = ordinal
        self._stream_owner = device_of(f"cuda:{ordinal}").stream()  # torch would give its streams to other code, too
        with torch.cuda.device(ordinal), torch.inference_mode(False):
            external: Any = torch.cuda.ExternalStream
            self.stream = external(self._stream_owner.c_handle.value)
            self.pool = self.new_pool()
            event: Any = torch.cuda.Event
            self.replayed = event()
            self.replayed.record()
            self._dummy = torch.zeros(1, device="cuda")

    # -- capturing -------------------------------------------------------------------------------------------------
    @staticmethod
    def new_pool() -> Pool:
        """A new memory pool."""
        return Pool(torch.cuda.graph_pool_handle())

    def capture(self, pool: Pool, function: Callable[[], Any]) -> tuple[Any, Any]:
        """A graph of the work that the function enqueues, and the function's result; raises FailedCapture."""
        graph = torch.cuda.CUDAGraph()
        try:
            with masks.cached_during_capture(), self._capturing(graph, pool):
                result = function()
        except BaseException as error:
            graph.reset()
            self._recover(pool)
            if not isinstance(error, Exception):  # Ctrl-C
                raise
            cause: BaseException = error
            while cause.__context__ is not None:  # ending a failed capture raises another error
                cause = cause.__context__
            raise FailedCapture(first_line_of(cause)) from None
        return graph, result

    @contextmanager
    def _capturing(self, graph: Any, pool: Pool) -> Iterator[None]:
        """Capture with cuBLAS workspaces that are allocated in the pool.

        torch keeps one workspace per stream. Code that frees all of them, such as torch.compile before it records its
        own graphs, would also free a workspace that a graph uses but that was allocated before the capture. A replay
        would then write to freed memory.
        """
        _free_cublas_workspaces()
        try:
            with torch.cuda.graph(graph, pool=pool.handle, stream=self.stream, capture_error_mode="thread_local"):
                yield
        finally:
            _free_cublas_workspaces()

    def _recover(self, pool: Pool) -> None:
        """Recover from a failed capture: in torch 2.11 the generator and the allocator stay in capture mode.

        It is not known in advance whether a forward waits for the GPU: transformers models do so only outside captures.
        """
        with suppress(RuntimeError, AttributeError):  # versions of torch that do this at the end of a capture
            torch._C._cuda_endAllocateToPool(self._ordinal, pool.handle)
        pool.handle = torch.cuda.graph_pool_handle()
        with self._capturing(torch.cuda.CUDAGraph(), pool):
            self._dummy.zero_()

    # -- order -----------------------------------------------------------------------------------------------------
    @contextmanager
    def on_recording_stream(self) -> Iterator[None]:
        """Run the block on the recording stream, after the current stream and all replays; the current stream waits."""
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
        """Order the replays in the block, on the current stream, after all earlier and before all later ones."""
        with self.lock:
            self.wait()
            try:
                yield
            finally:  # even after Ctrl-C or a memory error: later replays must wait for the enqueued work
                self.replayed.record()

    def wait(self) -> None:
        """Make the current stream wait for the last replay."""
        torch.cuda.current_stream().wait_event(self.replayed)

    def finish(self) -> None:
        """Block the host until the last replay has ended: it may use memory that is freed next."""
        self.replayed.synchronize()

    # -- random numbers --------------------------------------------------------------------------------------------
    def generator(self) -> torch.Generator:
        """The device's generator; replays draw from it as the forward does."""
        return torch.cuda.default_generators[self._ordinal]

    def host_generators(self) -> HostGenerators:
        """The present state of the generators of the host."""
        return HostGenerators()


def _free_cublas_workspaces() -> None:
    """Make torch free its cuBLAS workspaces; their memory returns to its allocator in stream order."""
    with suppress(AttributeError):  # a version of torch without this function
        torch._C._cuda_clearCublasWorkspaces()


class HostGenerators:
    """The state of the host's generators. A replay does not draw from them, although the forward may."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._torch = torch.get_rng_state()
        self._numpy = _numpy_state()

    def are_unchanged(self) -> bool:
        """Whether nothing was drawn since."""
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
    name, key, *rest = module.get_state(legacy=True)
    return (name, key.tolist(), *rest)


def first_line_of(error: BaseException) -> str:
    """The first line of an error's text."""
    return [*str(error).strip().splitlines(), type(error).__name__][0]


# -- operands and results ----------------------------------------------------------------------------------------------
CONSTANTS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))


def version_of(t: torch.Tensor) -> int:
    """torch's version counter of a tensor; -1 for inference tensors, which have none."""
    return -1 if t.is_inference() else t._version


def with_operands(tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The arguments with these tensors in place of the caller's."""
    remaining = iter(tensors)
    args = tuple(next(remaining) if type(x) is torch.Tensor else x for x in args)
    return args, {name: next(remaining) if type(x) is torch.Tensor else x for name, x in kwargs.items()}


def unsupported_result(leaves: list[Any]) -> str:
    """The reason why a result cannot come from a graph, because one of its leaves is no tensor; empty if it can."""
    unknown = next((x for x in leaves if type(x) is not torch.Tensor and type(x) not in CONSTANTS), None)
    return "" if unknown is None else f"it returns a {type(unknown).__name__}, which is not a tensor"


def leaves_of(y: Any) -> list[Any]:
    """The leaves of a result, with copies of its tensors."""
    return [x.clone() if type(x) is torch.Tensor else x for x in _pytree.tree_leaves(y)]


def agree(one: list[Any], other: list[Any], eps: float | None = None) -> bool:
    """Whether two results agree up to rounding: under capture, other kernels or another order of sums may be used.

    Each tensor's error is relative to its norm. With `eps`, the roundoff of the least precise dtype among them, it may
    also be relative to the norm of an average tensor of that size: some gradients are 0 except for rounding errors, for
    example the gradient of a key's bias.
    """
    if len(one) != len(other):
        return False
    floor = 0.0 if eps is None else _root_mean_square(one)
    return all(_tensors_agree(a, b, eps, floor) for a, b in zip(one, other, strict=True))


def _root_mean_square(values: list[Any]) -> float:
    """The root mean square of all numbers in all tensors; infinities and NaN count as 0."""
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
