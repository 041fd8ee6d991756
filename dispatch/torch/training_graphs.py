"""Training steps of a fused model as CUDA graphs: which calls are recorded, which replayed, and which run themselves.

A call with gradients runs itself some times, and it is noted which of its results are given gradients, and how. One
that goes on alike is recorded (training_recording.py), and replayed from then on (training_step.py) where the model and
torch's modes are as they were and no backward pass of a replay before is still to come.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree

from dispatch.torch import training_call
from dispatch.torch.graph_recorder import ACTIVE, CONSTANTS, version_of
from dispatch.torch.model_state import TrainedState
from dispatch.torch.shared import nobody_listens
from dispatch.torch.training_call import Call, results_of
from dispatch.torch.training_recording import Unrecorded, record
from dispatch.torch.training_step import Memory, Step, Token, is_last

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from dispatch.torch.graph_recorder import Recorder

__all__ = ["Training", "modes"]

BEFORE = 3  # calls that look alike and run themselves before one is recorded: plans are learnt meanwhile
MOST = 8  # steps of a model, each with memory for all of its gradients
SEEN = 512  # kinds of calls that are known
FAILURES = 2  # captures that end in an error before none is tried any more
UNUSED = 32  # calls without a backward pass after which none is waited for
BUSY = "another call is being recorded"
RARELY = 4096  # the most calls before a model that changes all the time is recorded again

_in_backward: Callable[[], int] = torch._C._current_graph_task_id
_hooks_of_saved: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def modes() -> tuple[Any, ...] | str:
    """The modes of torch's that a recorded step depends on; or why none stands for a call under them."""
    if not nobody_listens():
        return "torch compiles, traces, transforms or profiles it"
    if torch.is_anomaly_enabled():
        return "torch looks for anomalies"
    if _hooks_of_saved is None or _hooks_of_saved(True) is not None:
        return "what is saved for the gradient has hooks"
    if _in_backward() != -1:
        return "it is called within a backward pass"
    place = training_call.PLACE
    dtype = torch.get_autocast_dtype(place) if torch.is_autocast_enabled(place) else None
    return (dtype, torch._C._get_cudnn_deterministic(), torch.is_deterministic_algorithms_warn_only_enabled())


class Gate:
    """Lets either many threads run a model's forward, or one alone that gives it other parameters meanwhile."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: Counter[int] = Counter()
        self._alone: int | None = None

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Run the forward in here; a backward pass, which somebody may wait for, does not wait."""
        me = threading.get_ident()
        with self._changed:
            if _in_backward() == -1:
                self._changed.wait_for(lambda: self._alone in (None, me))
            self._inside[me] += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside[me] -= 1
                if not self._inside[me]:
                    del self._inside[me]
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other thread runs the forward meanwhile."""
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._alone is None and not self._inside.keys() - {me})
            self._alone = me
        try:
            yield
        finally:
            with self._changed:
                self._alone = None
                self._changed.notify_all()


class Learnt:
    """What is known of calls that look alike.

    Attributes:
        why: why they are not recorded; empty where nothing speaks against it.
        count: how often one ran itself since it began or the model was another.
        needed: how often it is to.
        given: which results were given a gradient; None before the first backward pass.
        samples: such gradients, from the last call before it is recorded until then.
    """

    def __init__(self) -> None:
        self.why = ""
        self.count = 0
        self.needed = BEFORE
        self.given: list[bool] | None = None
        self.samples: list[torch.Tensor | None] | None = None
        self._closed = False

    def note(self, given: tuple[torch.Tensor | None, ...]) -> None:
        """A backward pass gives these gradients to the results."""
        which = [g is not None for g in given]
        if torch.is_grad_enabled():
            self.why = "a gradient of its gradient is asked for"
        elif not is_last():
            self.why = "its gradient is taken more than once (retain_graph=True)"
        elif self.given not in (None, which):
            self.why = "its results have gradients now here, now there"
        elif not self._closed:
            self.given = which
            if self.count >= self.needed:
                self.samples = [None if g is None else g.detach().clone() for g in given]

    def close(self) -> None:
        """It is recorded, or will not be."""
        self.samples, self._closed = None, True

    def again(self) -> None:
        """The model was another: each time it takes twice as long until the next recording."""
        self.count, self.needed, self._closed = 0, min(2 * self.needed, RARELY), False


class Training:
    """The recorded training steps of one model.

    Attributes:
        counts: where recordings, replays, and reasons why not are counted.
    """

    def __init__(self, counts: Any) -> None:
        self.counts = counts
        self._gate = Gate()
        self._kept: OrderedDict[Any, Step] = OrderedDict()
        self._learnt: OrderedDict[Any, Learnt] = OrderedDict()
        self._sampled: OrderedDict[Any, Learnt] = OrderedDict()
        self._memory: dict[Any, Memory] = {}
        self._failures = 0
        self._recording = False
        self._lock = threading.RLock()

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward itself, not while it is recorded."""
        with self._gate.inside():
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
        """The result of a call that is learnt or replayed; or why of neither."""
        key = (key, model.training)
        with self._lock:
            if recorder in ACTIVE or self._recording:
                return BUSY
            memory = self._memory.get(recorder)
            if memory is None:
                memory = self._memory[recorder] = Memory(recorder.new_pool())
            learnt = self._known(key)
            if learnt.why:
                learnt.close()
                self._forget(key)
                return learnt.why
            if not memory.is_free():
                return "the backward pass of a replay before is still to come"
            step = self._standing(key, learnt)
            is_known = learnt.count >= learnt.needed and learnt.samples is not None
            if step is not None:
                token = memory.take()
            elif is_known:
                self._recording = True
        if step is not None:
            return (step(token, tensors),)
        if not is_known:
            return self._learn(key, learnt, model, forward, args, kwargs, tensors)
        found = self._record(key, learnt, recorder, memory, Call(model, forward, args, kwargs, tensors), tensors)
        if isinstance(found, str):
            return found
        return (found[0](found[1], tensors),)

    def _standing(self, key: Any, learnt: Learnt) -> Step | None:
        """The step of calls like this one, unless the model is another meanwhile."""
        step = self._kept.get(key)
        if step is None:
            return None
        if step.stands():
            self._kept.move_to_end(key)
            self.counts.replayed += 1
            return step
        self._forget(key)
        learnt.again()
        return None

    def _known(self, key: Any) -> Learnt:
        learnt = self._learnt.get(key)
        if learnt is None:
            learnt = self._learnt[key] = Learnt()
            while len(self._learnt) > SEEN:
                self._forget(self._learnt.popitem(last=False)[0])
        return learnt

    def _forget(self, key: Any) -> None:
        step = self._kept.pop(key, None)
        if step is not None:
            step.finish()

    # -- learning --------------------------------------------------------------------------------------------------
    def _learn(
        self,
        key: Any,
        learnt: Learnt,
        model: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
    ) -> tuple[Any] | str:
        """The result of a call that runs itself, by which it is seen whether it can be recorded."""
        if is_last() is None:
            return "this torch does not tell whether a backward pass is the last one"
        if self._failures >= FAILURES:
            return "recordings of other calls failed"
        state = TrainedState(model)
        if why := state.why_not():
            return why
        written = {id(b) for b in state.buffers}
        versions = [(t, version_of(t)) for t in (*state.tensors, *tensors) if id(t) not in written]
        y = self.run(forward, args, kwargs)
        learnt.count += 1
        if learnt.count >= learnt.needed:
            self._make_room_for_samples(key, learnt)
        leaves, spec = _pytree.tree_flatten(y)
        if any(version_of(t) != before for t, before in versions):
            learnt.why = "it writes to its operands or parameters"
        elif odd := next((x for x in leaves if type(x) is not torch.Tensor and type(x) not in CONSTANTS), None):
            learnt.why = f"it gives back a {type(odd).__name__}, which is no tensor"
        elif _overlap(leaves, [*state.tensors, *tensors]):
            learnt.why = "it gives back memory of an operand, a parameter or a buffer"
        elif not any(x.requires_grad for x in leaves if type(x) is torch.Tensor):
            learnt.why = "nothing of it requires a gradient: call under torch.no_grad()"
        elif learnt.count > UNUSED and learnt.samples is None:
            learnt.why = "no gradient is taken of it: call under torch.no_grad()"
        self.counts.reasons[learnt.why or "it is learnt"] += 1
        return (y,) if learnt.why else (_observed(learnt, leaves, spec),)

    def _make_room_for_samples(self, key: Any, learnt: Learnt) -> None:
        """Gradients of results can be large: few kinds of calls have some at a time."""
        with self._lock:
            self._sampled[key] = learnt
            self._sampled.move_to_end(key)
            while len(self._sampled) > MOST:
                self._sampled.popitem(last=False)[1].samples = None

    # -- recording -------------------------------------------------------------------------------------------------
    def _record(
        self, key: Any, learnt: Learnt, recorder: Recorder, memory: Memory, call: Call, tensors: list[torch.Tensor]
    ) -> tuple[Step, Token] | str:
        """The step of a call, whose turn it is; or why there is none."""

        def changed(why: str) -> None:
            learnt.why = why
            self.counts.reasons[f"its gradient was computed anew: {why}"] += 1

        try:
            step = record(recorder, memory, call, tensors, learnt.samples or [], self._gate.alone, changed)
            with self._lock:
                learnt.close()
                self.counts.recorded += 1
                self.counts.replayed += 1
                self._kept[key] = step
                if len(self._kept) > MOST:
                    outdated = next(iter(self._kept))
                    self._forget(outdated)
                    self._learnt[outdated].again()
                return step, memory.take()
        except Unrecorded as error:
            self._failures += error.failed
            if error.for_good:
                learnt.why = str(error)
                learnt.close()
            else:
                learnt.again()
            return str(error)
        finally:
            self._recording = False


def _overlap(leaves: list[Any], others: list[torch.Tensor]) -> bool:
    own = {t.untyped_storage().data_ptr() for t in others if t.numel()}
    return any(x.untyped_storage().data_ptr() in own for x in leaves if type(x) is torch.Tensor and x.numel())


# -- which results have gradients --------------------------------------------------------------------------------------
def _observed(learnt: Learnt, leaves: list[Any], spec: Any) -> Any:
    """The result, whose gradients are noted."""
    results = results_of(leaves)
    apply: Any = _Seen.apply
    seen = apply(learnt, [y.requires_grad for y in results], *results)
    found = {id(y): one for y, one in zip(results, seen, strict=True)}
    return _pytree.tree_unflatten([found.get(id(x), x) for x in leaves], spec)


class _Seen(torch.autograd.Function):
    """Results as they are, in memory of their own; notes which of them are given gradients."""

    @staticmethod
    def forward(ctx: Any, learnt: Learnt, followed: list[bool], *results: torch.Tensor) -> Any:
        ctx.learnt = learnt
        ctx.set_materialize_grads(False)
        copies = tuple(y.clone() for y in results)
        ctx.mark_non_differentiable(*(y for y, is_followed in zip(copies, followed, strict=True) if not is_followed))
        return copies

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor | None) -> Any:
        ctx.learnt.note(given)
        return (None, None, *given)
