"""CUDA graphs of a fused model's forward: calls whose operands look alike are recorded and replayed.

A small model's forward is bound by the host: each of its hundreds of kernels costs it more than the GPU. A graph of all
of them is one launch. What a replay cannot know is asked first, and where anything is not as it was when the graph was
recorded, the forward itself runs: another layout of an operand, parameters at other addresses, an attribute or a
submodule that was set, hooks, autocast, modes of torch's, a capture of the caller's. Calls with gradients are those of
training_graphs.py.

Operands are copied to where the graph reads them, results are copied from where it writes them: they are the caller's.
All graphs of a device are recorded on one stream, which is ours alone, and replayed one behind the other, on whichever
stream is current: they share the workspaces of that stream, and one pool of memory.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree

from dispatch.torch import training_graphs
from dispatch.torch.graph_recorder import (
    ACTIVE,
    CONSTANTS,
    FailedCapture,
    Recorder,
    agree,
    leaves_of,
    version_of,
    with_operands,
)
from dispatch.torch.model_state import ModelState
from dispatch.torch.shared import is_plain_inference, on_gpu

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = ["NAME", "Graphs", "graphed_forward"]

NAME = "_dispatch_graphs"  # where a model keeps its own
RUNS_BEFORE = 3  # calls that look alike and run themselves before one is recorded: plans are learnt meanwhile
MAX_GRAPHS = 16  # graphs of a model: the one that was replayed longest ago makes room
MAX_KINDS = 512  # kinds of calls that are counted
MAX_FAILURES = (
    2  # recordings that end in an error before none is tried any more: torch's allocator may suffer from each
)


class Graphs:
    """The recorded calls of one model.

    Attributes:
        recorded: how many graphs were recorded; that of a forward and of its backward pass are one.
        replayed: how many calls were replays.
        reasons: how many calls ran the forward itself, by the reason.
    """

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0
        self.reasons: Counter[str] = Counter()
        self._training = training_graphs.Training(self)
        self._graphs: OrderedDict[Any, _Graph] = OrderedDict()
        self._call_counts: OrderedDict[Any, int | str] = OrderedDict()  # how often, or why it is not recorded
        self._failures = 0
        self._lock = threading.Lock()

    def __deepcopy__(self, _memo: Any) -> Graphs:
        return Graphs()  # a copy of the model has parameters of its own

    def __reduce__(self) -> Any:
        return Graphs, ()

    def __repr__(self) -> str:
        reasons = "; ".join(f"{count} x {reason}" for reason, count in self.reasons.most_common(4))
        return f"<Graphs: {self.recorded} recorded, {self.replayed} replays; {reasons or 'no other calls'}>"

    def call(self, model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """What `forward` gives for the operands: by a graph, if one stands for it."""
        tensors: list[torch.Tensor] = []
        key = _key(args, kwargs, tensors)
        if torch.is_grad_enabled():
            if type(key) is not str:
                recorder = _recorder(tensors[0].get_device())
                found = self._training.call(key, recorder, model, forward, args, kwargs, tensors)
                if type(found) is not str:
                    return found[0]
                key = found
            self.reasons[key] += 1
            return self._training.run(forward, args, kwargs)
        if ACTIVE:
            key = "a training step is being recorded"
        if type(key) is not str:
            graph = self._find(key)
            if graph is not None:
                return graph.replay(tensors)
            found = self._learn(key, model, forward, args, kwargs, tensors)
            if type(found) is not str:
                return found[0]
            key = found
        self.reasons[key] += 1
        return forward(*args, **kwargs)

    def _find(self, key: Any) -> _Graph | None:
        """The graph of calls like this one, unless the model is another meanwhile."""
        with self._lock:
            graph = self._graphs.get(key)
            if graph is None:
                return None
            if graph.is_valid():
                self._graphs.move_to_end(key)
                self.replayed += 1
                return graph
            del self._graphs[key]
            self._call_counts.pop(key, None)
        graph.finish()
        return None

    def _learn(
        self,
        key: Any,
        model: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Any,
        tensors: list[torch.Tensor],
    ) -> tuple[Any] | str:
        """The result of a call that is made itself, or of its graph if it was made often enough; or why of neither."""
        count = self._call_counts.get(key, 0)
        if isinstance(count, str):
            return count
        if model.training:
            return "the model is in training mode: model.eval()"
        if self._failures >= MAX_FAILURES:
            return "recordings of other calls failed"
        if count < RUNS_BEFORE:
            state = ModelState(model)
            if why := state.why_not():
                return why
            versions = [(t, version_of(t)) for t in (*state.tensors, *tensors)]
            y = forward(*args, **kwargs)
            self.reasons["it is learnt"] += 1
            self._remember(key, _why_not_recordable(state, versions, y) or count + 1)
            return (y,)
        recorder = _recorder(tensors[0].get_device())
        found = recorder.record(model, forward, args, kwargs, tensors)
        if isinstance(found, str):
            self._failures += recorder.failed
            self._remember(key, found)
            return found
        self.recorded += 1
        self.replayed += 1
        with self._lock:
            self._graphs[key] = found
            outdated = self._graphs.popitem(last=False)[1] if len(self._graphs) > MAX_GRAPHS else None
        if outdated is not None:
            outdated.finish()
        return (found.replay(tensors),)

    def _remember(self, key: Any, what: int | str) -> None:
        with self._lock:
            self._call_counts[key] = what
            while len(self._call_counts) > MAX_KINDS:
                self._call_counts.popitem(last=False)


def graphed_forward(inner: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a model that keeps `Graphs`, over its forward of before as a function of the model."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            return inner(self, *args, **kwargs)

        if torch.compiler.is_compiling():
            return run(*args, **kwargs)
        graphs: Graphs | None = self.__dict__.get(NAME)
        if graphs is None:  # they were undone, and a forward that somebody set over this one still calls it
            return run(*args, **kwargs)
        return graphs.call(self, run, args, kwargs)

    return forward


# -- what a call is known by -------------------------------------------------------------------------------------------
def _key(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
    """What calls of one graph have in common, and the operands that are tensors; or why none stands for the call."""
    followed = torch.is_grad_enabled()
    mode = training_graphs.modes() if followed else None
    if type(mode) is str:
        return mode
    if not followed and not is_plain_inference():
        return "torch compiles, traces, transforms, profiles or casts it"
    parts: list[Any] = [mode, len(args), *kwargs]
    for x in chain(args, kwargs.values()):
        kind = type(x)
        if kind is torch.Tensor:
            if not on_gpu(x) or x.layout is not torch.strided or x.is_conj() or x.is_neg():
                return "an operand is no plain tensor of a GPU"
            tensors.append(x)
            parts.append((x.dtype, x.shape, x.stride(), x.get_device(), followed and x.requires_grad))
        elif kind in CONSTANTS:
            parts.append((kind, x))
        else:
            return f"an operand is a {kind.__name__}, which a graph does not know"
    if not tensors:
        return "no operand is a tensor"
    device = tensors[0].get_device()
    if any(x.get_device() != device for x in tensors) or device != _current_device():
        return "operands lie on several devices, or not on the current one"
    if _captured():
        return "the caller captures it"
    parts.append(torch.are_deterministic_algorithms_enabled())
    return tuple(parts)


_current_device: Callable[[], int] = torch.cuda.current_device
_captured: Callable[[], bool] = torch.cuda.is_current_stream_capturing


def _why_not_recordable(state: ModelState, versions: list[tuple[torch.Tensor, int]], y: Any) -> str:
    """Why a call that was made cannot be recorded; empty where nothing speaks against it."""
    if any(version_of(t) != before for t, before in versions):
        return "it writes to its operands, parameters or buffers"
    leaves = _pytree.tree_leaves(y)
    unknown = next((x for x in leaves if type(x) is not torch.Tensor and type(x) not in CONSTANTS), None)
    if unknown is not None:
        return f"it gives back a {type(unknown).__name__}, which is no tensor"
    inputs = {t.untyped_storage().data_ptr() for t in state.tensors}
    if any(x.untyped_storage().data_ptr() in inputs for x in leaves if type(x) is torch.Tensor):
        return "it gives back memory of a parameter or buffer"
    return ""


# -- recording ---------------------------------------------------------------------------------------------------------
class _Recorder(Recorder):
    """Records the graphs of forwards without gradients, too."""

    failed = False

    def record(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
    ) -> _Graph | str:
        """A graph of the call, held against two calls of the forward itself; or why there is none."""
        self.failed = False
        with self.lock:
            current = torch.cuda.current_stream()
            self.wait()
            with torch.inference_mode(False), torch.no_grad():
                inputs = [torch.empty_like(x).copy_(x) for x in tensors]
            args, kwargs = with_operands(inputs, args, kwargs)
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream):
                expected, again = (leaves_of(forward(*args, **kwargs)) for _ in range(2))
            state = ModelState(model)
            self.stream.synchronize()
            try:
                graph, y = self.capture(self.pool, lambda: forward(*args, **kwargs))
            except FailedCapture as error:
                self.failed = True
                return f"it cannot be captured: {error}"
            leaves, spec = _pytree.tree_flatten(y)
            found = _Graph(self, graph, state, inputs, leaves, spec)
            graph.replay()
            current.synchronize()
            if not agree(expected, again):
                return "two calls of it with the same operands differ"
            if not agree(expected, leaves_of(y)):
                return "its graph gives other results than it does: it depends on more than its operands"
            if not state.is_unchanged():
                return "it sets attributes at each call"
            self.replayed.record()
            return found


class _Graph:
    """One recorded call: where it reads its operands, where it writes its results."""

    __slots__ = ("_graph", "_inputs", "_leaves", "_recorder", "_spec", "_state")

    def __init__(
        self,
        recorder: _Recorder,
        graph: Any,
        state: ModelState,
        inputs: list[torch.Tensor],
        leaves: list[Any],
        spec: Any,
    ) -> None:
        self._recorder, self._graph, self._state = recorder, graph, state
        self._inputs, self._leaves, self._spec = inputs, leaves, spec

    def finish(self) -> None:
        """Wait for the last replay, which may read and write what goes away with this."""
        self._recorder.finish()

    def is_valid(self) -> bool:
        """Whether the model is as it was recorded."""
        return self._state.is_unchanged()

    def replay(self, tensors: list[torch.Tensor]) -> Any:
        """What the forward gives for these operands, in memory of the caller's."""
        recorder = self._recorder
        with recorder.lock:
            torch.cuda.current_stream().wait_event(recorder.replayed)
            copies: dict[int, Any] = {}
            try:
                with torch.inference_mode(False), torch.no_grad():
                    torch._foreach_copy_(self._inputs, tensors)
                self._graph.replay()
                for x in self._leaves:
                    if type(x) is torch.Tensor and id(x) not in copies:
                        copies[id(x)] = x.clone()
            finally:  # where Ctrl-C or a lack of memory ends it, what was enqueued is still to be waited for
                recorder.replayed.record()
        return _pytree.tree_unflatten([copies.get(id(x), x) for x in self._leaves], self._spec)


_RECORDERS: dict[int, _Recorder] = {}
_RECORDERS_LOCK = threading.Lock()


def _recorder(ordinal: int) -> _Recorder:
    with _RECORDERS_LOCK:
        if ordinal not in _RECORDERS:
            _RECORDERS[ordinal] = _Recorder(ordinal)
        return _RECORDERS[ordinal]
