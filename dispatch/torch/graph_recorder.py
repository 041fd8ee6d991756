"""What records CUDA graphs on one device and has them replayed one behind the other, for forwards and for training.

All graphs of a device are recorded on one stream, which is ours alone, and replayed one behind the other, on whichever
stream is current: they share the workspaces of that stream.
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
    "HostNumbers",
    "LostCapture",
    "Pool",
    "Recorder",
    "leaves_of",
    "said_of",
    "same",
    "version_of",
    "with_operands",
]


# Recorders that record a training step now. Its gradients need the thread that runs all backward passes of a device:
# nothing in there may wait for the recorder's lock meanwhile.
ACTIVE: set[Any] = set()


class LostCapture(Exception):
    """A capture that ended in an error; the text says why."""


class Pool:
    """Memory that some graphs share.

    Attributes:
        handle: torch's name for it; another one after a capture that was lost.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle


class Recorder:
    """Records the graphs of one device.

    Attributes:
        lock: who has it may record or replay.
        stream: what is recorded, and run for a recording, runs on it.
        pool: the memory of graphs of forwards without gradients.
        replayed: an event behind the last replay.
    """

    def __init__(self, ordinal: int) -> None:
        self.lock = threading.RLock()
        self._ordinal = ordinal
        self._own = device_of(f"cuda:{ordinal}").stream()  # torch's would be given to others, too
        with torch.cuda.device(ordinal), torch.inference_mode(False):
            external: Any = torch.cuda.ExternalStream
            self.stream = external(self._own.c_handle.value)
            self.pool = self.new_pool()
            event: Any = torch.cuda.Event
            self.replayed = event()
            self.replayed.record()
            self._nothing = torch.zeros(1, device="cuda")

    # -- capturing -------------------------------------------------------------------------------------------------
    @staticmethod
    def new_pool() -> Pool:
        """Memory for graphs that share it with no others."""
        return Pool(torch.cuda.graph_pool_handle())

    def capture(self, pool: Pool, function: Callable[[], Any]) -> tuple[Any, Any]:
        """A graph of what the function enqueues, and what it gave back; LostCapture where it cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        try:
            with masks.kept_in_a_capture(), self._capturing(graph, pool):
                found = function()
        except BaseException as error:
            graph.reset()
            self._mend(pool)
            if not isinstance(error, Exception):  # Ctrl-C
                raise
            cause: BaseException = error
            while cause.__context__ is not None:  # the end of a capture that was lost raises, too
                cause = cause.__context__
            raise LostCapture(said_of(cause)) from None
        return graph, found

    @contextmanager
    def _capturing(self, graph: Any, pool: Pool) -> Iterator[None]:
        """Capture with workspaces of cuBLAS that are the pool's own.

        torch keeps one for each stream, and whoever has all of them given back, as torch.compile does before it records
        graphs of its own, would take one that was there before the capture away from the graph: a replay then wrote to
        memory that was not there any more.
        """
        _give_workspaces_back()
        try:
            with torch.cuda.graph(graph, pool=pool.handle, stream=self.stream, capture_error_mode="thread_local"):
                yield
        finally:
            _give_workspaces_back()

    def _mend(self, pool: Pool) -> None:
        """After a capture that was lost: torch (2.11) goes on to take its generator and its allocator for captured.

        That a forward waits for the GPU is not known before: models of transformers do so only where nobody captures.
        """
        with suppress(RuntimeError, AttributeError):  # of a torch whose end of a capture does it
            torch._C._cuda_endAllocateToPool(self._ordinal, pool.handle)
        pool.handle = torch.cuda.graph_pool_handle()
        with self._capturing(torch.cuda.CUDAGraph(), pool):
            self._nothing.zero_()

    # -- order -----------------------------------------------------------------------------------------------------
    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run what is in here on our own stream, behind the current one and all replays, and that one behind it."""
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
    def turn(self) -> Iterator[None]:
        """Replay in here, on the current stream, behind the replays before; the next ones are behind this."""
        with self.lock:
            self.wait()
            try:
                yield
            finally:  # where Ctrl-C or a lack of memory ends it, what was enqueued is still to be waited for
                self.replayed.record()

    def wait(self) -> None:
        """Have the current stream wait for the last replay."""
        torch.cuda.current_stream().wait_event(self.replayed)

    def finish(self) -> None:
        """Wait for the last replay, which may read and write what goes away now."""
        self.replayed.synchronize()

    # -- random numbers --------------------------------------------------------------------------------------------
    def generator(self) -> torch.Generator:
        """The generator of the device, from which replays draw as the forward does."""
        return torch.cuda.default_generators[self._ordinal]

    def host_numbers(self) -> HostNumbers:
        """How the generators of the host stand."""
        return HostNumbers()


def _give_workspaces_back() -> None:
    """Have torch forget the workspaces of cuBLAS, whose memory is its allocator's again, in stream order."""
    with suppress(AttributeError):  # of a torch that has no such function
        torch._C._cuda_clearCublasWorkspaces()


class HostNumbers:
    """How the generators of the host stood: a graph does not draw what a forward draws from them."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._torch = torch.get_rng_state()
        self._numpy = _numpys()

    def are_as_before(self) -> bool:
        """Whether nothing was drawn meanwhile."""
        return (
            random.getstate() == self._python
            and torch.equal(torch.get_rng_state(), self._torch)
            and repr(_numpys()) == repr(self._numpy)
        )

    def restore(self) -> None:
        """Have them draw again what they drew since."""
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)


def _numpys() -> Any:
    """The state of NumPy's generator, where somebody uses NumPy, as lists and numbers."""
    module: Any = sys.modules.get("numpy.random")
    if module is None:
        return None
    name, key, *others = module.get_state(legacy=True)
    return (name, key.tolist(), *others)


def said_of(error: BaseException) -> str:
    """The first line of what an error says."""
    return [*str(error).strip().splitlines(), type(error).__name__][0]


# -- operands and results ----------------------------------------------------------------------------------------------
CONSTANTS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))


def version_of(t: torch.Tensor) -> int:
    """How often torch counted a change of a tensor; nothing is counted of those of inference."""
    return -1 if t.is_inference() else t._version


def with_operands(own: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The arguments with tensors of our own in the place of the caller's."""
    left = iter(own)
    args = tuple(next(left) if type(x) is torch.Tensor else x for x in args)
    return args, {name: next(left) if type(x) is torch.Tensor else x for name, x in kwargs.items()}


def leaves_of(y: Any) -> list[Any]:
    """What a result consists of, the tensors copied."""
    return [x.clone() if type(x) is torch.Tensor else x for x in _pytree.tree_leaves(y)]


def same(one: list[Any], other: list[Any], eps: float | None = None) -> bool:
    """Whether two results are one but for rounding: kernels may add in another order, or be others under capture.

    Each tensor's error is measured by its own norm; with `eps`, what the roughest dtype in them rounds to, also by that
    of an average one of its size: some gradients are 0 but for rounding, as that of a bias of attention's keys.
    """
    if len(one) != len(other):
        return False
    floor = 0.0 if eps is None else _root_mean_square(one)
    return all(_alike(a, b, eps, floor) for a, b in zip(one, other, strict=True))


def _root_mean_square(values: list[Any]) -> float:
    """That of all numbers in all tensors, of those that are finite."""
    tensors = [x for x in values if type(x) is torch.Tensor and x.is_floating_point()]
    count = sum(x.numel() for x in tensors)
    total = sum(float(x.detach().double().nan_to_num(0, 0, 0).square().sum()) for x in tensors)
    return (total / count) ** 0.5 if count else 0.0


def _alike(a: Any, b: Any, eps: float | None, floor: float) -> bool:
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
