"""A forward and its backward pass as two CUDA graphs behind one node of autograd.

The first graph reads copies of the operands and the parameters where they lie; the second reads what the first saved
and copies of the results' gradients, and writes those of operands and parameters, which autograd is given copies of.
What the first graph saved is there until the next forward of the same memory is replayed: there is none before the
backward pass was, or cannot come any more. Where a backward pass is not the one that was recorded, the forward runs
again from its operands with the random numbers of then, and the gradients are taken of that.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree

from dispatch.torch.graph_recorder import ACTIVE
from dispatch.torch.training_call import Call, buffers_restored, parameters_apart, results_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.torch.graph_recorder import Recorder
    from dispatch.torch.model_state import TrainedState

__all__ = ["Memory", "Step", "Token", "is_last"]

AGAIN = (
    "Trying to backward through the graph a second time: what a replay saved is gone. Specify retain_graph=True when "
    "you take the gradient the first time"
)
LATE = "what the replay of this forward saved was overwritten by a later one"
TWICE = (
    "a gradient of the gradient of a recorded forward is not there; from the next call on the model's forward itself "
    "runs, which has one"
)

_keeps: Callable[[], bool] | None = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)


def is_last() -> bool | None:
    """Whether the backward pass that runs frees what was saved for it; None where torch does not tell."""
    return None if _keeps is None else not _keeps()


# -- whose turn the memory is ------------------------------------------------------------------------------------------
class Token:
    """One replay of a forward, as long as its node of autograd is there.

    Attributes:
        number: how many there were before.
        drawn: how the device's generator stood before, where the forward draws from it.
        spent: its backward pass was.
    """

    __slots__ = ("__weakref__", "drawn", "number", "spent")

    def __init__(self, number: int) -> None:
        self.number = number
        self.drawn: torch.Tensor | None = None
        self.spent = False


class Memory:
    """What the steps of one model share: the memory of their graphs, and which forward's results are in there.

    Attributes:
        pool: the recorder's name for it.
        number: that of the last token.
    """

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.number = 0
        self._last: Callable[[], Token | None] = lambda: None

    def is_free(self) -> bool:
        """Whether no backward pass is to come that reads what the last forward saved."""
        last = self._last()
        return last is None or last.spent

    def take(self) -> Token:
        """Of the next forward."""
        self.number += 1
        token = Token(self.number)
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
        memory: Memory,
        call: Call,
        state: TrainedState,
        alone: Callable[[], Any],
        changed: Callable[[str], None],
    ) -> None:
        self.recorder, self.memory, self.call, self.state = recorder, memory, call, state
        self._alone, self.changed = alone, changed
        self.mutated: list[torch.Tensor] = []
        self.draws = False
        self.followed: list[bool] = []
        self._own: list[torch.Tensor] = []

    def reads(self, own: list[torch.Tensor]) -> None:
        """Where the graphs read the operands."""
        self._own = [t.detach() for t in own]

    def goes_forward(self, graph: Any, leaves: list[Any], spec: Any) -> None:
        """The first graph, and where it writes its results."""
        self._forward, self._spec = graph, spec
        results = results_of(leaves)
        place = {id(x): i for i, x in enumerate(results)}
        self._leaves = [place[id(x)] if type(x) is torch.Tensor else None for x in leaves]
        self._constants = [None if type(x) is torch.Tensor else x for x in leaves]
        self._results = [x.detach() for x in results]
        self.followed = [x.requires_grad for x in results]

    def goes_back(
        self,
        graph: Any,
        given: list[torch.Tensor | None],
        reached: list[bool],
        gradients: list[torch.Tensor | None],
        saved: list[torch.Tensor],
    ) -> None:
        """The second graph.

        Args:
            graph: it.
            given: where it reads the gradient of each result; None where none was given.
            reached: which of operands that ask for a gradient and parameters a result depends on.
            gradients: where it writes those of these that are reached; None where it has none.
            saved: tensors of the model that the gradient reads.
        """
        self._backward, self._given, self._reached, self._saved = graph, given, reached, saved
        self._mask = [g is not None for g in given]
        self._places = [i for i, g in enumerate(gradients) if g is not None]
        self._gradients = [g.detach() for g in gradients if g is not None]
        self._count = len(gradients)

    # -- forward ---------------------------------------------------------------------------------------------------
    def __call__(self, token: Token, tensors: list[torch.Tensor]) -> Any:
        """What the forward gives for these operands, in memory of the caller's, with its gradient."""
        asking = [t for t, asked in zip(tensors, self.call.asked, strict=True) if asked]
        sources = [*asking, *self.state.parameters]
        if not all(self._reached):
            sources = [t for t, reached in zip(sources, self._reached, strict=True) if reached]
        apply: Any = _Replay.apply
        results = apply(self, token, tensors, *sources)
        leaves = [x if i is None else results[i] for i, x in zip(self._leaves, self._constants, strict=True)]
        return _pytree.tree_unflatten(leaves, self._spec)

    def forward(self, token: Token, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Replay the first graph."""
        with self.recorder.turn():
            with torch.inference_mode(False), torch.no_grad():
                torch._foreach_copy_(self._own, tensors)
            if self.draws:
                token.drawn = self.recorder.generator().get_state()
            self._forward.replay()
            found = [x.clone() for x in self._results]
        if self.mutated:
            torch.autograd.graph.increment_version(self.mutated)
        return found

    # -- backward --------------------------------------------------------------------------------------------------
    def back(self, token: Token, given: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
        """The gradients, by the second graph or of the forward itself."""
        if token.spent:
            raise RuntimeError(AGAIN)
        if token.number != self.memory.number:
            raise RuntimeError(LATE)
        last = is_last()
        mask = [g is not None for g in given]
        if not any(mask):
            return [None] * self._count
        if mask != self._mask:
            self.changed("other results have gradients than when it was recorded")
        if not last:
            self.changed("its gradient is taken more than once (retain_graph=True)")
        if not last or mask != self._mask or not self._enter():
            found = self._by_itself(token, given)
        else:
            try:
                found = self._replayed(given)
            finally:
                self.recorder.lock.release()
        token.spent = bool(last)
        return found

    def _enter(self) -> bool:
        """Wait for our turn; not for a recording, which may wait for this very thread."""
        lock = self.recorder.lock
        while not lock.acquire(timeout=0.02):
            if self.recorder in ACTIVE:
                return False
        return True

    def once(self, given: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Results and gradients of a replay of both graphs over the operands that are there."""
        self._forward.replay()
        results = [x.clone() for x in self._results]
        return [*results, *self._replayed(given)]

    def _replayed(self, given: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        with self.recorder.turn(), torch.no_grad():
            into = [t for t in self._given if t is not None]
            torch._foreach_copy_(into, [g for g in given if g is not None])
            self._backward.replay()
            copies = copies_of(self._gradients)
        found: list[torch.Tensor | None] = [None] * self._count
        for i, g in zip(self._places, copies, strict=True):
            found[i] = g
        return found

    def _by_itself(self, token: Token, given: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
        """The gradients of the forward itself, called again as it was."""
        self.recorder.wait()
        generator = self.recorder.generator()
        with torch.inference_mode(False), torch.no_grad():
            own = [t.clone().requires_grad_(a) for t, a in zip(self._own, self.call.asked, strict=True)]
        before = generator.get_state() if token.drawn is not None else None
        with self._alone(), buffers_restored(self.state.buffers):
            try:
                if token.drawn is not None:
                    generator.set_state(token.drawn)
                with parameters_apart(self.call.model, self.state.parameters) as parameters:
                    results = results_of(_pytree.tree_leaves(self.call.run(own)))
                    sources = [*(t for t in own if t.requires_grad), *parameters]
                    sources = [t for t, reached in zip(sources, self._reached, strict=True) if reached]
                    pairs = [(y, g) for y, g in zip(results, given, strict=True) if g is not None]
                    return self.call.gradients([y for y, _ in pairs], [g for _, g in pairs], sources)
            finally:
                if before is not None:
                    generator.set_state(before)

    def stands(self) -> bool:
        """Whether the model is as it was recorded."""
        return self.state.is_as_it_was()

    def finish(self) -> None:
        """Wait for the last replay, which may read and write what goes away with this."""
        self.recorder.finish()


_clones: Callable[[list[torch.Tensor]], Any] | None = getattr(torch, "_foreach_clone", None)


def copies_of(tensors: list[torch.Tensor]) -> Any:
    """Copies, by some few kernels."""
    return torch._foreach_mul(tensors, 1) if _clones is None else _clones(tensors)


class _Replay(torch.autograd.Function):
    """The node of autograd whose forward and backward are the two graphs."""

    @staticmethod
    def forward(ctx: Any, step: Step, token: Token, tensors: list[torch.Tensor], *sources: torch.Tensor) -> Any:
        del sources
        ctx.step, ctx.token = step, token
        ctx.set_materialize_grads(False)
        found = step.forward(token, tensors)
        ctx.mark_non_differentiable(*(y for y, followed in zip(found, step.followed, strict=True) if not followed))
        ctx.save_for_backward(*step._saved)  # torch tells where they change before the gradient reads them
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor | None) -> Any:
        _ = ctx.saved_tensors
        twice = torch.is_grad_enabled()
        with torch.no_grad():
            found = ctx.step.back(ctx.token, given)
        if twice:
            ctx.step.changed("a gradient of its gradient is asked for")
            places = [i for i, g in enumerate(found) if g is not None]
            anchor = torch.zeros((), requires_grad=True)
            apply: Any = _Once.apply
            for i, g in zip(places, apply(anchor, *(found[i] for i in places)), strict=True):
                found[i] = g
        return (None, None, None, *found)


class _Once(torch.autograd.Function):
    """Gradients that have none."""

    @staticmethod
    def forward(_ctx: Any, _anchor: torch.Tensor, *gradients: torch.Tensor) -> Any:
        return tuple(g.clone() for g in gradients)

    @staticmethod
    def backward(_ctx: Any, *_: Any) -> Any:
        raise RuntimeError(TWICE)
