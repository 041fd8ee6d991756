"""Training steps of a fused model as CUDA graphs: decides which calls are recorded, replayed or run eagerly.

At first calls with gradients run eagerly, and it is observed which of their results get gradients. After several such
calls of the same kind, one is recorded (training_recording.py). From then on it is replayed (training_step.py), as long
as the model and torch's modes are unchanged and no backward pass of an earlier replay is pending.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree

from dispatch.torch import training_call
from dispatch.torch.graph_recorder import ACTIVE, MAX_FAILURES, MAX_KINDS, RUNS_BEFORE, unsupported_result, version_of
from dispatch.torch.model_state import TrainedState
from dispatch.torch.shared import is_plain_eager
from dispatch.torch.training_call import Call, results_of
from dispatch.torch.training_recording import Unrecorded, record
from dispatch.torch.training_step import ReplayToken, Step, StepMemory, is_last

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from dispatch.torch.graph_recorder import Recorder

__all__ = ["Training", "modes"]

MAX_STEPS = 8  # recorded steps per model, each with memory for all of its gradients
UNUSED = 32  # calls without a backward pass before the kind is given up
BUSY = "another call is being recorded"
MAX_NEEDED = 4096  # the maximum number of eager calls before a model that keeps changing is recorded again

_in_backward: Callable[[], int] = torch._C._current_graph_task_id
_hooks_of_saved: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def modes() -> tuple[Any, ...] | str:
    """The modes of torch that a recorded step depends on; or the reason why no step can be recorded under them."""
    if not is_plain_eager():
        return "torch compiles, traces, transforms or profiles it"
    if torch.is_anomaly_enabled():
        return "anomaly detection is on"
    if _hooks_of_saved is None or _hooks_of_saved(True) is not None:
        return "there are saved-tensor hooks"
    if _in_backward() != -1:
        return "it is called inside a backward pass"
    device_type = training_call.DEVICE_TYPE
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    return (dtype, torch._C._get_cudnn_deterministic(), torch.is_deterministic_algorithms_warn_only_enabled())


class ForwardLock:
    """A lock: many threads may run a model's forward, or one thread that replaces its parameters meanwhile."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sharing: Counter[int] = Counter()
        self._exclusive: int | None = None

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Run the forward in the block. It does not wait in a backward pass, because others may wait for that pass."""
        me = threading.get_ident()
        with self._changed:
            if _in_backward() == -1:
                self._changed.wait_for(lambda: self._exclusive in (None, me))
            self._sharing[me] += 1
        try:
            yield
        finally:
            with self._changed:
                self._sharing[me] -= 1
                if not self._sharing[me]:
                    del self._sharing[me]
                self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Run the block while no other thread runs the forward."""
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._exclusive is None and not self._sharing.keys() - {me})
            self._exclusive = me
        try:
            yield
        finally:
            with self._changed:
                self._exclusive = None
                self._changed.notify_all()


class CallHistory:
    """Observations of calls of one kind.

    Attributes:
        why: the reason why they are not recorded; empty if there is none.
        count: how many ran eagerly since the first one, or since the model changed.
        needed: how many must run eagerly before one is recorded.
        gradients_given: which results were given a gradient; None before the first backward pass.
        samples: examples of such gradients, kept from the last eager call until the recording.
    """

    def __init__(self) -> None:
        self.why = ""
        self.count = 0
        self.needed = RUNS_BEFORE
        self.gradients_given: list[bool] | None = None
        self.samples: list[torch.Tensor | None] | None = None
        self._closed = False

    def note_gradients(self, gradients_given: tuple[torch.Tensor | None, ...]) -> None:
        """Called by a backward pass with the gradients of the results."""
        which = [g is not None for g in gradients_given]
        if torch.is_grad_enabled():
            self.why = "a gradient of its gradient is asked for"
        elif not is_last():
            self.why = "its gradient is taken more than once (retain_graph=True)"
        elif self.gradients_given not in (None, which):
            self.why = "different results have gradients in different calls"
        elif not self._closed:
            self.gradients_given = which
            if self.count >= self.needed:
                self.samples = [None if g is None else g.detach().clone() for g in gradients_given]

    def close(self) -> None:
        """Stop observing: a step was recorded, or will not be."""
        self.samples, self._closed = None, True

    def restart(self) -> None:
        """Start again after the model changed: each time the next recording takes twice as many calls."""
        self.count, self.needed, self._closed = 0, min(2 * self.needed, MAX_NEEDED), False


class Training:
    """The recorded training steps of one model.

    Attributes:
        counts: the Graphs object, which counts recordings, replays and reasons.
    """

    def __init__(self, counts: Any) -> None:
        self.counts = counts
        self._forward_lock = ForwardLock()
        self._steps: OrderedDict[Any, Step] = OrderedDict()
        self._histories: OrderedDict[Any, CallHistory] = OrderedDict()
        self._sampled: OrderedDict[Any, CallHistory] = OrderedDict()
        self._memory: dict[Any, StepMemory] = {}
        self._failures = 0
        self._recording = False
        self._lock = threading.RLock()

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward itself, but not while it is being recorded."""
        with self._forward_lock.shared():
            return forward(*args, **kwargs)

    def call(
        self,
        key: Any,
        recorder: Recorder,
        model: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
    ) -> tuple[Any] | str:
        """The result of a call that was observed or replayed; or the reason why it was neither."""
        key = (key, model.training)
        with self._lock:
            if recorder in ACTIVE or self._recording:
                return BUSY
            memory = self._memory.get(recorder)
            if memory is None:
                memory = self._memory[recorder] = StepMemory(recorder.new_pool())
            history = self._history_of(key)
            if history.why:
                history.close()
                self._forget(key)
                return history.why
            if not memory.is_free():
                return "the backward pass of an earlier replay is pending"
            step = self._valid_step(key, history)
            can_record = history.count >= history.needed and history.samples is not None
            if step is not None:
                token = memory.take()
            elif can_record:
                self._recording = True
        if step is not None:
            return (step(token, tensors),)
        if not can_record:
            return self._observe(key, history, model, forward, args, kwargs, tensors)
        recorded = self._record(key, history, recorder, memory, Call(model, forward, args, kwargs, tensors), tensors)
        if isinstance(recorded, str):
            return recorded
        step, token = recorded
        return (step(token, tensors),)

    def _valid_step(self, key: Any, history: CallHistory) -> Step | None:
        """The step of calls of this kind, unless the model has changed meanwhile."""
        step = self._steps.get(key)
        if step is None:
            return None
        if step.is_valid():
            self._steps.move_to_end(key)
            self.counts.replayed += 1
            return step
        self._forget(key)
        history.restart()
        return None

    def _history_of(self, key: Any) -> CallHistory:
        history = self._histories.get(key)
        if history is None:
            history = self._histories[key] = CallHistory()
            while len(self._histories) > MAX_KINDS:
                self._forget(self._histories.popitem(last=False)[0])
        return history

    def _forget(self, key: Any) -> None:
        step = self._steps.pop(key, None)
        if step is not None:
            step.finish()

    # -- observing -------------------------------------------------------------------------------------------------
    def _observe(
        self,
        key: Any,
        history: CallHistory,
        model: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
    ) -> tuple[Any] | str:
        """Run a call eagerly and observe whether it can be recorded; returns its result, or why it cannot."""
        if is_last() is None:
            return "this version of torch does not report whether a backward pass retains its graph"
        if self._failures >= MAX_FAILURES:
            return "recordings of other calls failed"
        state = TrainedState(model)
        if why := state.why_not():
            return why
        written = {id(b) for b in state.buffers}
        versions = [(t, version_of(t)) for t in (*state.tensors, *tensors) if id(t) not in written]
        y = self.run(forward, args, kwargs)
        history.count += 1
        if history.count >= history.needed:
            self._make_room_for_samples(key, history)
        leaves, spec = _pytree.tree_flatten(y)
        if any(version_of(t) != before for t, before in versions):
            history.why = "it writes to its operands or parameters"
        elif why := unsupported_result(leaves):
            history.why = why
        elif _overlap(leaves, [*state.tensors, *tensors]):
            history.why = "it returns memory of an operand, a parameter or a buffer"
        elif not any(x.requires_grad for x in leaves if type(x) is torch.Tensor):
            history.why = "none of its results requires a gradient: call under torch.no_grad()"
        elif history.count > UNUSED and history.samples is None:
            history.why = "no backward pass follows it: call under torch.no_grad()"
        self.counts.reasons[history.why or "it runs eagerly before a recording"] += 1
        return (y,) if history.why else (_observe_gradients(history, leaves, spec),)

    def _make_room_for_samples(self, key: Any, history: CallHistory) -> None:
        """Limit how many kinds of calls keep samples: gradients of results can be large."""
        with self._lock:
            self._sampled[key] = history
            self._sampled.move_to_end(key)
            while len(self._sampled) > MAX_STEPS:
                self._sampled.popitem(last=False)[1].samples = None

    # -- recording -------------------------------------------------------------------------------------------------
    def _record(
        self,
        key: Any,
        history: CallHistory,
        recorder: Recorder,
        memory: StepMemory,
        call: Call,
        tensors: list[torch.Tensor],
    ) -> tuple[Step, ReplayToken] | str:
        """Record the step of a call; returns it with the token of its first replay, or the reason why it failed."""

        def on_change(why: str) -> None:
            history.why = why
            self.counts.reasons[f"its forward ran again for the gradient: {why}"] += 1

        try:
            step = record(
                recorder, memory, call, tensors, history.samples or [], self._forward_lock.exclusive, on_change
            )
            with self._lock:
                history.close()
                self.counts.recorded += 1
                self.counts.replayed += 1
                self._steps[key] = step
                if len(self._steps) > MAX_STEPS:
                    outdated = next(iter(self._steps))
                    self._forget(outdated)
                    self._histories[outdated].restart()
                return step, memory.take()
        except Unrecorded as error:
            self._failures += error.failed
            if error.for_good:
                history.why = str(error)
                history.close()
            else:
                history.restart()
            return str(error)
        finally:
            self._recording = False


def _overlap(leaves: list[Any], others: list[torch.Tensor]) -> bool:
    storages = {t.untyped_storage().data_ptr() for t in others if t.numel()}
    return any(x.untyped_storage().data_ptr() in storages for x in leaves if type(x) is torch.Tensor and x.numel())


# -- which results have gradients --------------------------------------------------------------------------------------
def _observe_gradients(history: CallHistory, leaves: list[Any], spec: Any) -> Any:
    """The result, with its tensors passed through the observer of gradients."""
    results = results_of(leaves)
    apply: Any = _GradientObserver.apply
    observed = apply(history, [y.requires_grad for y in results], *results)
    copy_of = {id(y): copy for y, copy in zip(results, observed, strict=True)}
    return _pytree.tree_unflatten([copy_of.get(id(x), x) for x in leaves], spec)


class _GradientObserver(torch.autograd.Function):
    """Copies results, and notes which of the copies get gradients."""

    @staticmethod
    def forward(ctx: Any, history: CallHistory, differentiable: list[bool], *results: torch.Tensor) -> Any:
        ctx.history = history
        ctx.set_materialize_grads(False)
        copies = tuple(y.clone() for y in results)
        ctx.mark_non_differentiable(
            *(y for y, has_gradient in zip(copies, differentiable, strict=True) if not has_gradient)
        )
        return copies

    @staticmethod
    def backward(ctx: Any, *gradients_given: torch.Tensor | None) -> Any:
        ctx.history.note_gradients(gradients_given)
        return (None, None, *gradients_given)
