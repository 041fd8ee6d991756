"""CUDA graphs of a fused model's forward: repeated calls with similar operands are recorded and replayed.

A small model's forward is limited by the host: each of its hundreds of kernels takes the host longer to launch than the
GPU to run. A graph of all of them is one launch. Before a replay, the state that the graph depends on is checked. The
forward itself runs if anything has changed since the recording: the layout of an operand, the address of a parameter,
an attribute or a submodule, hooks, autocast, torch's modes, or if the caller is capturing. training_graphs.py handles
calls with gradients.

Operands are copied to the memory that the graph reads, and results are copied from the memory that it writes, so they
belong to the caller. All graphs of a device are recorded on one dedicated stream and share its workspaces and one
memory pool. Therefore they are replayed one after the other, on whichever stream is current.
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
    MAX_FAILURES,
    MAX_KINDS,
    RUNS_BEFORE,
    FailedCapture,
    Recorder,
    agree,
    leaves_of,
    unsupported_result,
    version_of,
    with_operands,
)
from dispatch.torch.model_state import ModelState
from dispatch.torch.shared import is_plain_inference, on_gpu

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = ["NAME", "Graphs", "graphed_forward"]

NAME = "_dispatch_graphs"  # the attribute of a model that holds its Graphs
MAX_GRAPHS = 16  # graphs per model: the least recently replayed one is dropped


class Graphs:
    """The recorded calls of one model.

    Attributes:
        recorded: how many graphs were recorded; a forward and its backward pass count as one.
        replayed: how many calls were replays.
        reasons: how many calls ran the forward itself, by the reason.
    """

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0
        self.reasons: Counter[str] = Counter()
        self._training = training_graphs.Training(self)
        self._graphs: OrderedDict[Any, _Graph] = OrderedDict()
        self._call_counts: OrderedDict[Any, int | str] = (
            OrderedDict()
        )  # the number of calls, or why the kind is not recorded
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
        """The result of `forward` for the operands, by replaying a graph if there is one for the call."""
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
            found = self._run_or_record(key, model, forward, args, kwargs, tensors)
            if type(found) is not str:
                return found[0]
            key = found
        self.reasons[key] += 1
        return forward(*args, **kwargs)

    def _find(self, key: Any) -> _Graph | None:
        """The graph for calls with this key, unless the model has changed."""
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

    def _run_or_record(
        self,
        key: Any,
        model: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Any,
        tensors: list[torch.Tensor],
    ) -> tuple[Any] | str:
        """The result of an eager call, or of a new graph after enough calls; or the reason why there is neither."""
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
            self.reasons["it runs eagerly before a recording"] += 1
            self._remember(key, _why_not_recordable(state, versions, y) or count + 1)
            return (y,)
        recorder = _recorder(tensors[0].get_device())
        graph = recorder.record(model, forward, args, kwargs, tensors)
        if isinstance(graph, str):
            self._failures += recorder.failed
            self._remember(key, graph)
            return graph
        self.recorded += 1
        self.replayed += 1
        with self._lock:
            self._graphs[key] = graph
            outdated = self._graphs.popitem(last=False)[1] if len(self._graphs) > MAX_GRAPHS else None
        if outdated is not None:
            outdated.finish()
        return (graph.replay(tensors),)

    def _remember(self, key: Any, count_or_reason: int | str) -> None:
        with self._lock:
            self._call_counts[key] = count_or_reason
            while len(self._call_counts) > MAX_KINDS:
                self._call_counts.popitem(last=False)


def graphed_forward(inner: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a model with `Graphs`; `inner` is its previous forward as a function of the model."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            return inner(self, *args, **kwargs)

        if torch.compiler.is_compiling():
            return run(*args, **kwargs)
        graphs: Graphs | None = self.__dict__.get(NAME)
        if graphs is None:  # undone, but a forward that other code has set still calls this one
            return run(*args, **kwargs)
        return graphs.call(self, run, args, kwargs)

    return forward


# -- the key of a call ------------------------------------------------------------------------------------------------
def _key(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
    """The key that all calls of one graph share, or the reason why there can be no graph; appends the tensors."""
    with_gradients = torch.is_grad_enabled()
    mode = training_graphs.modes() if with_gradients else None
    if type(mode) is str:
        return mode
    if not with_gradients and not is_plain_inference():
        return "torch compiles, traces, transforms, profiles or casts it"
    parts: list[Any] = [mode, len(args), *kwargs]
    for x in chain(args, kwargs.values()):
        kind = type(x)
        if kind is torch.Tensor:
            if not on_gpu(x) or x.layout is not torch.strided or x.is_conj() or x.is_neg():
                return "an operand is not a plain CUDA tensor"
            tensors.append(x)
            parts.append((x.dtype, x.shape, x.stride(), x.get_device(), with_gradients and x.requires_grad))
        elif kind in CONSTANTS:
            parts.append((kind, x))
        else:
            return f"an operand is a {kind.__name__}, which a graph does not support"
    if not tensors:
        return "no operand is a tensor"
    device = tensors[0].get_device()
    if any(x.get_device() != device for x in tensors) or device != _current_device():
        return "operands are on several devices, or not on the current one"
    if _is_capturing():
        return "the caller's stream is capturing"
    parts.append(torch.are_deterministic_algorithms_enabled())
    return tuple(parts)


_current_device: Callable[[], int] = torch.cuda.current_device
_is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing


def _why_not_recordable(state: ModelState, versions: list[tuple[torch.Tensor, int]], y: Any) -> str:
    """The reason why a call that was run cannot be recorded; empty if it can."""
    if any(version_of(t) != before for t, before in versions):
        return "it writes to its operands, parameters or buffers"
    leaves = _pytree.tree_leaves(y)
    if why := unsupported_result(leaves):
        return why
    inputs = {t.untyped_storage().data_ptr() for t in state.tensors}
    if any(x.untyped_storage().data_ptr() in inputs for x in leaves if type(x) is torch.Tensor):
        return "it returns memory of a parameter or buffer"
    return ""


# -- recording ---------------------------------------------------------------------------------------------------------
class _Recorder(Recorder):
    """A Recorder that also records forwards without gradients."""

    failed = False

    def record(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
    ) -> _Graph | str:
        """A graph of the call, compared with two calls of the forward itself; or the reason why there is none."""
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
            recorded = _Graph(self, graph, state, inputs, leaves, spec)
            graph.replay()
            current.synchronize()
            if not agree(expected, again):
                return "two calls with the same operands gave different results"
            if not agree(expected, leaves_of(y)):
                return "its graph and the model give different results: it depends on more than its operands"
            if not state.is_unchanged():
                return "it sets attributes at each call"
            self.replayed.record()
            return recorded


class _Graph:
    """One recorded call, with the memory that it reads its operands from and writes its results to."""

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
        """Wait for the last replay, which may use memory that is freed with this object."""
        self._recorder.finish()

    def is_valid(self) -> bool:
        """Whether the model is unchanged since the recording."""
        return self._state.is_unchanged()

    def replay(self, tensors: list[torch.Tensor]) -> Any:
        """The result of the forward for these operands, copied to new memory."""
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
            finally:  # even after Ctrl-C or a memory error: later replays must wait for the enqueued work
                recorder.replayed.record()
        return _pytree.tree_unflatten([copies.get(id(x), x) for x in self._leaves], self._spec)


_RECORDERS: dict[int, _Recorder] = {}
_RECORDERS_LOCK = threading.Lock()


def _recorder(ordinal: int) -> _Recorder:
    with _RECORDERS_LOCK:
        if ordinal not in _RECORDERS:
            _RECORDERS[ordinal] = _Recorder(ordinal)
        return _RECORDERS[ordinal]
