"""A forward and its backward pass as two CUDA graphs behind one node of autograd.

The first graph reads copies of the operands, and the parameters in place. The second reads what the first saved and
copies of the results' gradients, and writes the gradients of operands and parameters, of which autograd gets copies.
What the first graph saved remains until the next forward in the same memory is replayed: not before the backward pass
has run, or can no longer run. If a backward pass is not the one that was recorded, the forward runs again from its
operands with the same random numbers, and the gradients are taken of that.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree

from dispatch.torch.graph_recorder import ACTIVE
from dispatch.torch.training_call import Call, buffers_restored, results_of, separate_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.torch.graph_recorder import Recorder
    from dispatch.torch.model_state import TrainedState

__all__ = ["ReplayToken", "Step", "StepMemory", "is_last"]

SECOND_BACKWARD = (
    "Trying to backward through the graph a second time: what a replay saved is gone. Specify retain_graph=True when "
    "you take the gradient the first time"
)
OVERWRITTEN = "what the replay of this forward saved was overwritten by a later one"
SECOND_DERIVATIVE = (
    "a gradient of the gradient of a recorded forward is not there; from the next call on the model's forward itself "
    "runs, which has one"
)

_keeps_graph: Callable[[], bool] | None = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)


def is_last() -> bool | None:
    """Whether the current backward pass frees what was saved for it; None if this torch does not tell."""
    return None if _keeps_graph is None else not _keeps_graph()


# -- whose turn the memory is ------------------------------------------------------------------------------------------
class ReplayToken:
    """One replay of a forward; it lives as long as its node of autograd.

    Attributes:
        number: its number among the replays of the model.
        drawn: how the device's generator stood before, where the forward draws from it.
        spent: its backward pass was.
    """

    __slots__ = ("__weakref__", "generator_state", "number", "spent")

    def __init__(self, number: int) -> None:
        self.number = number
        self.generator_state: torch.Tensor | None = None
        self.spent = False


class StepMemory:
    """What the steps of one model share: the memory of their graphs, and the token of the forward that it holds.

    Attributes:
        pool: the recorder's name for it.
        number: that of the last token.
    """

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.number = 0
        self._last: Callable[[], ReplayToken | None] = lambda: None

    def is_free(self) -> bool:
        """Whether no pending backward pass reads what the last forward saved."""
        last = self._last()
        return last is None or last.spent

    def take(self) -> ReplayToken:
        """The token of the next forward."""
        self.number += 1
        token = ReplayToken(self.number)
        self._last = weakref.ref(token)
        return token


# -- what is replayed --------------------------------------------------------------------------------------------------
class Step:
    """A recorded forward and its backward pass.

    Attributes:
        recorder: which replays it.
        memory: of its graphs.
        call: what it stands for.
        state: the model as it was recorded.
        mutated: buffers that the forward writes to.
        draws: whether it draws random numbers.
        followed: which results have a gradient.
        changed: is told why where a backward pass was not the recorded one.
    """

    def __init__(
        self,
        recorder: Recorder,
        memory: StepMemory,
        call: Call,
        state: TrainedState,
        exclusive: Callable[[], Any],
        on_change: Callable[[str], None],
    ) -> None:
        self.recorder, self.memory, self.call, self.state = recorder, memory, call, state
        self._exclusive, self.on_change = exclusive, on_change
        self.mutated: list[torch.Tensor] = []
        self.draws = False
        self.differentiable: list[bool] = []
        self._inputs: list[torch.Tensor] = []

    def set_inputs(self, inputs: list[torch.Tensor]) -> None:
        """Set the tensors from which the graphs read the operands."""
        self._inputs = [t.detach() for t in inputs]

    def set_forward(self, graph: Any, leaves: list[Any], spec: Any) -> None:
        """Set the first graph, and the tensors that it writes its results to."""
        self._forward, self._spec = graph, spec
        results = results_of(leaves)
        place = {id(x): i for i, x in enumerate(results)}
        self._leaves = [place[id(x)] if type(x) is torch.Tensor else None for x in leaves]
        self._constants = [None if type(x) is torch.Tensor else x for x in leaves]
        self._results = [x.detach() for x in results]
        self.differentiable = [x.requires_grad for x in results]

    def set_backward(
        self,
        graph: Any,
        given: list[torch.Tensor | None],
        reached: list[bool],
        gradients: list[torch.Tensor | None],
        saved: list[torch.Tensor],
    ) -> None:
        """Set the second graph.

        Args:
            graph: the graph.
            given: the tensors from which it reads the gradient of each result; None for results without one.
            reached: for each operand that requires a gradient and each parameter, whether a result depends on it.
            gradients: the tensors to which it writes the gradients of those reached; None for those without one.
            saved: tensors of the model that the backward pass reads.
        """
        self._backward, self._given, self._reached, self._saved = graph, given, reached, saved
        self._mask = [g is not None for g in given]
        self._places = [i for i, g in enumerate(gradients) if g is not None]
        self._gradients = [g.detach() for g in gradients if g is not None]
        self._count = len(gradients)

    # -- forward ---------------------------------------------------------------------------------------------------
    def __call__(self, token: ReplayToken, tensors: list[torch.Tensor]) -> Any:
        """The result of the forward for these operands, in the caller's own memory, with its gradient."""
        asking = [t for t, requires_grad in zip(tensors, self.call.requires_grad, strict=True) if requires_grad]
        sources = [*asking, *self.state.parameters]
        if not all(self._reached):
            sources = [t for t, reached in zip(sources, self._reached, strict=True) if reached]
        apply: Any = _Replay.apply
        results = apply(self, token, tensors, *sources)
        leaves = [x if i is None else results[i] for i, x in zip(self._leaves, self._constants, strict=True)]
        return _pytree.tree_unflatten(leaves, self._spec)

    def forward(self, token: ReplayToken, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Replay the first graph."""
        with self.recorder.in_order():
            with torch.inference_mode(False), torch.no_grad():
                torch._foreach_copy_(self._inputs, tensors)
            if self.draws:
                token.generator_state = self.recorder.generator().get_state()
            self._forward.replay()
            found = [x.clone() for x in self._results]
        if self.mutated:
            torch.autograd.graph.increment_version(self.mutated)
        return found

    # -- backward --------------------------------------------------------------------------------------------------
    def backward(self, token: ReplayToken, given: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
        """The gradients, by the second graph or by running the forward itself."""
        if token.spent:
            raise RuntimeError(SECOND_BACKWARD)
        if token.number != self.memory.number:
            raise RuntimeError(OVERWRITTEN)
        last = is_last()
        mask = [g is not None for g in given]
        if not any(mask):
            return [None] * self._count
        if mask != self._mask:
            self.on_change("other results have gradients than when it was recorded")
        if not last:
            self.on_change("its gradient is taken more than once (retain_graph=True)")
        if not last or mask != self._mask or not self._acquire_turn():
            found = self._run_eagerly(token, given)
        else:
            try:
                found = self._replay_backward(given)
            finally:
                self.recorder.lock.release()
        token.spent = bool(last)
        return found

    def _acquire_turn(self) -> bool:
        """Acquire the recorder's lock; False if a training step is being recorded, which may wait for this thread."""
        lock = self.recorder.lock
        while not lock.acquire(timeout=0.02):
            if self.recorder in ACTIVE:
                return False
        return True

    def replay_both(self, given: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Replay both graphs over the present operands; returns results and gradients."""
        self._forward.replay()
        results = [x.clone() for x in self._results]
        return [*results, *self._replay_backward(given)]

    def _replay_backward(self, given: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        with self.recorder.in_order(), torch.no_grad():
            into = [t for t in self._given if t is not None]
            torch._foreach_copy_(into, [g for g in given if g is not None])
            self._backward.replay()
            copies = copies_of(self._gradients)
        found: list[torch.Tensor | None] = [None] * self._count
        for i, g in zip(self._places, copies, strict=True):
            found[i] = g
        return found

    def _run_eagerly(self, token: ReplayToken, given: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
        """The gradients of the forward itself, which is run again in the same state."""
        self.recorder.wait()
        generator = self.recorder.generator()
        with torch.inference_mode(False), torch.no_grad():
            inputs = [t.clone().requires_grad_(a) for t, a in zip(self._inputs, self.call.requires_grad, strict=True)]
        before = generator.get_state() if token.generator_state is not None else None
        with self._exclusive(), buffers_restored(self.state.buffers):
            try:
                if token.generator_state is not None:
                    generator.set_state(token.generator_state)
                with separate_parameters(self.call.model, self.state.parameters) as parameters:
                    results = results_of(_pytree.tree_leaves(self.call.run(inputs)))
                    sources = [*(t for t in inputs if t.requires_grad), *parameters]
                    sources = [t for t, reached in zip(sources, self._reached, strict=True) if reached]
                    pairs = [(y, g) for y, g in zip(results, given, strict=True) if g is not None]
                    return self.call.gradients([y for y, _ in pairs], [g for _, g in pairs], sources)
            finally:
                if before is not None:
                    generator.set_state(before)

    def is_valid(self) -> bool:
        """Whether the model is as it was recorded."""
        return self.state.is_unchanged()

    def finish(self) -> None:
        """Wait for the last replay, which may read and write what goes away with this."""
        self.recorder.finish()


_clones: Callable[[list[torch.Tensor]], Any] | None = getattr(torch, "_foreach_clone", None)


def copies_of(tensors: list[torch.Tensor]) -> Any:
    """Copies of the tensors, by few kernels."""
    return torch._foreach_mul(tensors, 1) if _clones is None else _clones(tensors)


class _Replay(torch.autograd.Function):
    """The node of autograd whose forward and backward are the two graphs."""

    @staticmethod
    def forward(ctx: Any, step: Step, token: ReplayToken, tensors: list[torch.Tensor], *sources: torch.Tensor) -> Any:
        del sources
        ctx.step, ctx.token = step, token
        ctx.set_materialize_grads(False)
        found = step.forward(token, tensors)
        ctx.mark_non_differentiable(
            *(y for y, differentiable in zip(found, step.differentiable, strict=True) if not differentiable)
        )
        ctx.save_for_backward(*step._saved)  # torch tells where they change before the gradient reads them
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor | None) -> Any:
        _ = ctx.saved_tensors
        twice = torch.is_grad_enabled()
        with torch.no_grad():
            found = ctx.step.backward(ctx.token, given)
        if twice:
            ctx.step.on_change("a gradient of its gradient is asked for")
            places = [i for i, g in enumerate(found) if g is not None]
            anchor = torch.zeros((), requires_grad=True)
            apply: Any = _OnceDifferentiable.apply
            for i, g in zip(places, apply(anchor, *(found[i] for i in places)), strict=True):
                found[i] = g
        return (None, None, None, *found)


class _OnceDifferentiable(torch.autograd.Function):
    """Makes gradients whose own gradient is refused."""

    @staticmethod
    def forward(_ctx: Any, _anchor: torch.Tensor, *gradients: torch.Tensor) -> Any:
        return tuple(g.clone() for g in gradients)

    @staticmethod
    def backward(_ctx: Any, *_: Any) -> Any:
        raise RuntimeError(SECOND_DERIVATIVE)
