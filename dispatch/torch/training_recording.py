"""Records a training step: runs it by itself, captures forward and backward, and holds a replay against it.

Nothing of it is seen outside: buffers that the forward writes to, and what it draws random numbers from, are after it
as they were before, and so are the parameters' gradients.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree

from dispatch.torch.graph_recorder import ACTIVE, LostCapture, Recorder, said_of, same
from dispatch.torch.model_state import TrainedState
from dispatch.torch.training_call import Call, buffers_restored, parameters_apart, restore, results_of
from dispatch.torch.training_step import Memory, Step

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Unrecorded", "record"]

DRAWN = "it draws random numbers on the host"
HIDDEN = "it reads tensors that require a gradient and are no parameters of the model"
DIFFER = "two calls of it with the same operands differ"
OTHER = "its graphs give other results or gradients than it does: it depends on more than its operands"


class Unrecorded(Exception):
    """There is no recording; the text says why.

    Attributes:
        failed: a capture ended in an error, from each of which torch's allocator may suffer.
        for_good: another try would end as this one.
    """

    def __init__(self, why: str, *, failed: bool = False, for_good: bool = True) -> None:
        super().__init__(why)
        self.failed, self.for_good = failed, for_good


def record(
    recorder: Recorder,
    memory: Memory,
    call: Call,
    tensors: list[torch.Tensor],
    samples: list[torch.Tensor | None],
    alone: Callable[[], Any],
    changed: Callable[[str], None],
) -> Step:
    """The step of a call, held against what it gives by itself; Unrecorded where there is none.

    Args:
        recorder: of the device.
        memory: of the model's steps, which is free.
        call: what is called, and under which modes.
        tensors: the operands.
        samples: a gradient for each of the results that are given one in a backward pass, None for the others.
        alone: within it no other thread runs the model's forward.
        changed: is told by the step where its backward pass is another.
    """
    with alone(), recorder.lock:  # in this order: a forward that is waited for may want the lock
        ACTIVE.add(recorder)
        try:
            state = TrainedState(call.model)
            if why := state.why_not():
                raise Unrecorded(why)
            with recorder.beside():
                step = Step(recorder, memory, call, state, alone, changed)
                _Recording(step, tensors, samples).make()
            if not state.is_as_it_was():
                raise Unrecorded("it sets attributes at each call")
            return step
        finally:
            ACTIVE.discard(recorder)


class _Recording:
    """One recording.

    What `step` gives is kept without its autograd graph, so that the memory of what was saved is free again.
    """

    def __init__(self, step: Step, tensors: list[torch.Tensor], samples: list[torch.Tensor | None]) -> None:
        self._step, self._samples = step, samples
        self._recorder, self._call, self._state = step.recorder, step.call, step.state
        with torch.inference_mode(False), torch.no_grad():
            self._own = [torch.empty_like(x).copy_(x) for x in tensors]
        for x, asked in zip(self._own, self._call.asked, strict=True):
            x.requires_grad_(asked)
        step.reads(self._own)
        self._generator = self._recorder.generator()
        self._drawn = self._generator.get_state()

    def make(self) -> None:
        """Record the step, with everything as it was behind it."""
        host = self._recorder.host_numbers()
        try:
            with ExitStack() as stack:
                self._buffers = stack.enter_context(buffers_restored(self._state.buffers))
                self._parameters = stack.enter_context(parameters_apart(self._call.model, self._state.parameters))
                self._asking = [*(x for x in self._own if x.requires_grad), *self._parameters]
                self._by_itself()
                self._again()
                expected = self._by_itself()
                if not host.are_as_before():
                    raise Unrecorded(DRAWN)
                self._capture()
                self._compare(expected)
        except Unrecorded:
            raise
        except LostCapture as error:
            raise Unrecorded(f"it cannot be captured: {error}", failed=True) from None
        except Exception as error:  # noqa: BLE001  # whatever a forward of others raises
            raise Unrecorded(f"it cannot be run beside: {said_of(error)}") from None
        finally:
            self._generator.set_state(self._drawn)
            host.restore()

    def _again(self) -> None:
        """Have the next run see what the first saw."""
        restore(self._state.buffers, self._buffers)
        self._generator.set_state(self._drawn)

    # -- by itself -------------------------------------------------------------------------------------------------
    def _by_itself(self) -> list[Any]:
        """What results, gradients and buffers are; and what of it the step is to know.

        The first time libraries prepare for our stream what a capture does not let them.
        """
        owned = {t.untyped_storage().data_ptr() for t in (*self._state.tensors, *self._own)}
        seen: set[int] = set()

        def note(t: torch.Tensor) -> torch.Tensor:
            seen.add(t.untyped_storage().data_ptr())
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            leaves = _pytree.tree_leaves(self._call.run(self._own))
        results = results_of(leaves)
        if [y.requires_grad for y, g in zip(results, self._samples, strict=True) if g is not None].count(False):
            raise Unrecorded(DIFFER)
        if any(y.untyped_storage().data_ptr() in owned for y in results):
            raise Unrecorded("it gives back memory of an operand, a parameter or a buffer")
        reached = _variables(results)
        self._reached = [id(t) in reached for t in self._asking]
        if len(reached) != sum(self._reached):
            raise Unrecorded(HIDDEN)
        self._sources = [t for t, is_reached in zip(self._asking, self._reached, strict=True) if is_reached]
        self._saved = [t for t in self._state.tensors if t.untyped_storage().data_ptr() in seen]
        found = self._with_gradients(results)
        self._step.draws = not torch.equal(self._generator.get_state(), self._drawn)
        changed = [not torch.equal(b, then) for b, then in zip(self._state.buffers, self._buffers, strict=True)]
        self._step.mutated = [b for b, is_changed in zip(self._state.buffers, changed, strict=True) if is_changed]
        constants = [x for x in leaves if type(x) is not torch.Tensor]
        return [*found, *self._buffers_now(), *constants]

    def _with_gradients(self, results: list[torch.Tensor]) -> list[Any]:
        """The results and their sources' gradients, copied."""
        pairs = [(y, g) for y, g in zip(results, self._samples, strict=True) if g is not None]
        gradients = self._call.gradients([y for y, _ in pairs], [g for _, g in pairs], self._sources)
        if any(g is not None and g.layout is not torch.strided for g in gradients):
            raise Unrecorded("a gradient is sparse")
        return [*(y.detach().clone() for y in results), *gradients]

    def _buffers_now(self) -> list[torch.Tensor]:
        return [b.detach().clone() for b in self._state.buffers]

    # -- its graphs ------------------------------------------------------------------------------------------------
    def _capture(self) -> None:
        self._again()
        pool = self._step.memory.pool
        graph, (leaves, spec) = self._recorder.capture(pool, lambda: _pytree.tree_flatten(self._call.run(self._own)))
        self._step.goes_forward(graph, leaves, spec)
        results = results_of(leaves)
        self._constants = [x for x in leaves if type(x) is not torch.Tensor]
        del leaves
        given = [None if g is None else torch.empty_like(y) for y, g in zip(results, self._samples, strict=True)]
        pairs = [(y, g) for y, g in zip(results, given, strict=True) if g is not None]
        del results
        graph, gradients = self._recorder.capture(
            pool, lambda: self._call.gradients([y for y, _ in pairs], [g for _, g in pairs], self._sources)
        )
        self._step.goes_back(graph, given, self._reached, gradients, self._saved)

    def _compare(self, expected: list[Any]) -> None:
        """Hold a replay of both against what it gives by itself."""
        self._again()
        found = [*self._step.once(self._samples), *self._buffers_now(), *self._constants]
        dtypes = {x.dtype for x in (*expected, *self._asking) if isinstance(x, torch.Tensor)}
        dtypes |= {self._call.dtype or torch.float64}
        eps = max(torch.finfo(d).eps for d in dtypes if d.is_floating_point)
        gradients = expected[len(self._samples) :][: len(self._sources)]
        if any(g is not None and not g.isfinite().all() for g in gradients):
            raise Unrecorded("its gradients are not finite", for_good=False)
        if same(expected, found, eps):
            return
        self._again()
        results = results_of(_pytree.tree_leaves(self._call.run(self._own)))
        again = [*self._with_gradients(results), *self._buffers_now(), *self._constants]
        raise Unrecorded(OTHER if same(expected, again, eps) else DIFFER)


def _variables(results: list[torch.Tensor]) -> set[int]:
    """The tensors, by id, that the gradients of results end in."""
    found: set[int] = set()
    nodes = {y.grad_fn for y in results if y.grad_fn is not None}
    left: list[Any] = list(nodes)
    while left:
        node = left.pop()
        if type(node).__name__ == "AccumulateGrad":
            found.add(id(node.variable))
        for following, _ in node.next_functions:
            if following is not None and following not in nodes:
                nodes.add(following)
                left.append(following)
    return found
