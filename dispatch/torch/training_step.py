"""A forward and its backward pass as two CUDA graphs behind one autograd node.

The first graph reads copies of the operands, and the parameters in place. The second graph reads the tensors saved by
the first and copies of the results' gradients. It writes the gradients of operands and parameters, and autograd gets
copies of them. The saved tensors stay valid until the next forward in the same memory is replayed, which happens only
when the backward pass has run or can no longer run. If a backward pass is not the recorded one, the forward runs again
from its operands with the same random numbers, and the gradients are computed from that run.
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
    "Trying to backward through the graph a second time: the tensors saved by the replay are gone. Specify "
    "retain_graph=True when you call backward the first time"
)
OVERWRITTEN = "the tensors saved by the replay of this forward were overwritten by a later replay"
SECOND_DERIVATIVE = (
    "a recorded forward has no gradient of the gradient; from the next call on the model's own forward runs, which has "
    "one"
)

_keeps_graph: Callable[[], bool] | None = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)


def is_last() -> bool | None:
    """Whether the current backward pass frees the saved tensors; None if this version of torch does not report it."""
    return None if _keeps_graph is None else not _keeps_graph()


# -- who uses the memory -----------------------------------------------------------------------------------------------
class ReplayToken:
    """One replay of a forward; it lives as long as its autograd node.

    Attributes:
        number: its number among the replays of the model.
        generator_state: the state of the device's generator before the replay, if the forward draws from it.
        spent: whether its backward pass has run.
    """

    __slots__ = ("__weakref__", "generator_state", "number", "spent")

    def __init__(self, number: int) -> None:
        self.number = number
        self.generator_state: torch.Tensor | None = None
        self.spent = False


class StepMemory:
    """The memory that the steps of one model share, and the token of the forward whose saved tensors it holds.

    Attributes:
        pool: the memory pool of the graphs.
        number: the number of the last token.
    """

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.number = 0
        self._last: Callable[[], ReplayToken | None] = lambda: None

    def is_free(self) -> bool:
        """Whether no pending backward pass needs the tensors saved by the last forward."""
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
        recorder: the recorder that replays it.
        memory: the memory of its graphs.
        call: the recorded call.
        state: the state of the model at the recording.
        mutated: buffers that the forward writes to.
        draws: whether the forward draws random numbers.
        differentiable: for each result, whether it has a gradient.
        on_change: called with a reason if a backward pass is not the recorded one.
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
        output_gradients: list[torch.Tensor | None],
        reached: list[bool],
        gradients: list[torch.Tensor | None],
        saved: list[torch.Tensor],
    ) -> None:
        """Set the second graph.

        Args:
            graph: the graph.
            output_gradients: the tensor from which it reads the gradient of each result; None for results without one.
            reached: for each operand that requires a gradient and each parameter, whether a result depends on it.
            gradients: the tensors to which it writes the gradients of those reached; None for those without one.
            saved: tensors of the model that the backward pass reads.
        """
        self._backward, self._output_gradients, self._reached, self._saved = graph, output_gradients, reached, saved
        self._mask = [g is not None for g in output_gradients]
        self._places = [i for i, g in enumerate(gradients) if g is not None]
        self._gradients = [g.detach() for g in gradients if g is not None]
        self._count = len(gradients)

    # -- forward ---------------------------------------------------------------------------------------------------
    def __call__(self, token: ReplayToken, tensors: list[torch.Tensor]) -> Any:
        """The result of the forward for these operands, copied to new memory, with an autograd node."""
        operands = [t for t, requires_grad in zip(tensors, self.call.requires_grad, strict=True) if requires_grad]
        sources = [*operands, *self.state.parameters]
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
            results = [x.clone() for x in self._results]
        if self.mutated:
            torch.autograd.graph.increment_version(self.mutated)
        return results

    # -- backward --------------------------------------------------------------------------------------------------
    def backward(
        self, token: ReplayToken, output_gradients: tuple[torch.Tensor | None, ...]
    ) -> list[torch.Tensor | None]:
        """The gradients, by the second graph or by running the forward itself."""
        if token.spent:
            raise RuntimeError(SECOND_BACKWARD)
        if token.number != self.memory.number:
            raise RuntimeError(OVERWRITTEN)
        last = is_last()
        mask = [g is not None for g in output_gradients]
        if not any(mask):
            return [None] * self._count
        if mask != self._mask:
            self.on_change("gradients are given for other results than in the recording")
        if not last:
            self.on_change("its gradient is taken more than once (retain_graph=True)")
        if not last or mask != self._mask or not self._acquire_turn():
            gradients = self._run_eagerly(token, output_gradients)
        else:
            try:
                gradients = self._replay_backward(output_gradients)
            finally:
                self.recorder.lock.release()
        token.spent = bool(last)
        return gradients

    def _acquire_turn(self) -> bool:
        """Acquire the recorder's lock; False if a training step is being recorded, which may wait for this thread."""
        lock = self.recorder.lock
        while not lock.acquire(timeout=0.02):
            if self.recorder in ACTIVE:
                return False
        return True

    def replay_both(self, output_gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Replay both graphs with the current contents of the inputs; returns results and gradients."""
        self._forward.replay()
        results = [x.clone() for x in self._results]
        return [*results, *self._replay_backward(output_gradients)]

    def _replay_backward(self, output_gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        with self.recorder.in_order(), torch.no_grad():
            destinations = [t for t in self._output_gradients if t is not None]
            torch._foreach_copy_(destinations, [g for g in output_gradients if g is not None])
            self._backward.replay()
            copies = copies_of(self._gradients)
        gradients: list[torch.Tensor | None] = [None] * self._count
        for i, g in zip(self._places, copies, strict=True):
            gradients[i] = g
        return gradients

    def _run_eagerly(
        self, token: ReplayToken, output_gradients: tuple[torch.Tensor | None, ...]
    ) -> list[torch.Tensor | None]:
        """The gradients of the forward itself, which runs again from the same state."""
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
                    pairs = [(y, g) for y, g in zip(results, output_gradients, strict=True) if g is not None]
                    return self.call.gradients([y for y, _ in pairs], [g for _, g in pairs], sources)
            finally:
                if before is not None:
                    generator.set_state(before)

    def is_valid(self) -> bool:
        """Whether the model is unchanged since the recording."""
        return self.state.is_unchanged()

    def finish(self) -> None:
        """Wait for the last replay, which may use memory that is freed with this object."""
        self.recorder.finish()


_clones: Callable[[list[torch.Tensor]], Any] | None = getattr(torch, "_foreach_clone", None)


def copies_of(tensors: list[torch.Tensor]) -> Any:
    """Copies of the tensors, made by few kernels."""
    return torch._foreach_mul(tensors, 1) if _clones is None else _clones(tensors)


class _Replay(torch.autograd.Function):
    """The autograd node whose forward and backward are the two graphs."""

    @staticmethod
    def forward(ctx: Any, step: Step, token: ReplayToken, tensors: list[torch.Tensor], *sources: torch.Tensor) -> Any:
        del sources
        ctx.step, ctx.token = step, token
        ctx.set_materialize_grads(False)
        results = step.forward(token, tensors)
        ctx.mark_non_differentiable(
            *(y for y, differentiable in zip(results, step.differentiable, strict=True) if not differentiable)
        )
        ctx.save_for_backward(*step._saved)  # so that torch reports changes to them before the backward pass
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *output_gradients: torch.Tensor | None) -> Any:
        _ = ctx.saved_tensors  # raises if they have changed
        create_graph = torch.is_grad_enabled()
        with torch.no_grad():
            gradients = ctx.step.backward(ctx.token, output_gradients)
        if create_graph:
            ctx.step.on_change("a gradient of its gradient is asked for")
            places = [i for i, g in enumerate(gradients) if g is not None]
            anchor = torch.zeros((), requires_grad=True)
            apply: Any = _OnceDifferentiable.apply
            for i, g in zip(places, apply(anchor, *(gradients[i] for i in places)), strict=True):
                gradients[i] = g
        return (None, None, None, *gradients)


class _OnceDifferentiable(torch.autograd.Function):
    """Passes gradients on; a gradient of them is refused."""

    @staticmethod
    def forward(_ctx: Any, _anchor: torch.Tensor, *gradients: torch.Tensor) -> Any:
        return tuple(g.clone() for g in gradients)

    @staticmethod
    def backward(_ctx: Any, *_: Any) -> Any:
        raise RuntimeError(SECOND_DERIVATIVE)
