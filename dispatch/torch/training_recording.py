"""Records a training step: runs it eagerly, captures forward and backward, and compares a replay with it.

A recording has no side effects: the buffers that the forward writes to, the random generators and the parameters'
gradients are restored.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree

from dispatch.torch.graph_recorder import ACTIVE, FailedCapture, Recorder, agree, first_line_of
from dispatch.torch.model_state import TrainedState
from dispatch.torch.training_call import Call, buffers_restored, restore, results_of, separate_parameters
from dispatch.torch.training_step import Step, StepMemory

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Unrecorded", "record"]

HOST_RANDOM = "it draws random numbers on the host"
FOREIGN_TENSORS = "it reads tensors that require a gradient and are not parameters of the model"
DIFFER = "two calls with the same operands gave different results"
OTHER_RESULTS = "its graphs and the model give different results or gradients: it depends on more than its operands"


class Unrecorded(Exception):
    """A step could not be recorded; the text says why.

    Attributes:
        failed: whether a capture ended in an error; each such error may harm torch's allocator.
        for_good: whether another attempt would fail, too.
    """

    def __init__(self, why: str, *, failed: bool = False, for_good: bool = True) -> None:
        super().__init__(why)
        self.failed, self.for_good = failed, for_good


def record(
    recorder: Recorder,
    memory: StepMemory,
    call: Call,
    tensors: list[torch.Tensor],
    samples: list[torch.Tensor | None],
    exclusive: Callable[[], Any],
    on_change: Callable[[str], None],
) -> Step:
    """The recorded step of a call, compared with an eager run; raises Unrecorded if it cannot be recorded.

    Args:
        recorder: the device's recorder.
        memory: the memory of the model's steps; it must be free.
        call: the call and its modes.
        tensors: the operands.
        samples: an example gradient for each result that gets one in the backward pass, None for the others.
        exclusive: a context manager during which no other thread runs the model's forward.
        on_change: called with a reason if a backward pass differs from the recorded one.
    """
    with exclusive(), recorder.lock:  # in this order: a forward that `exclusive` waits for may need the lock
        ACTIVE.add(recorder)
        try:
            state = TrainedState(call.model)
            if why := state.why_not():
                raise Unrecorded(why)
            with recorder.on_recording_stream():
                step = Step(recorder, memory, call, state, exclusive, on_change)
                _Recording(step, tensors, samples).run()
            if not state.is_unchanged():
                raise Unrecorded("it sets attributes at each call")
            return step
        finally:
            ACTIVE.discard(recorder)


class _Recording:
    """One recording.

    Results are kept without their autograd graph, so that the memory of saved tensors is freed.
    """

    def __init__(self, step: Step, tensors: list[torch.Tensor], samples: list[torch.Tensor | None]) -> None:
        self._step, self._samples = step, samples
        self._recorder, self._call, self._state = step.recorder, step.call, step.state
        with torch.inference_mode(False), torch.no_grad():
            self._inputs = [torch.empty_like(x).copy_(x) for x in tensors]
        for x, requires_grad in zip(self._inputs, self._call.requires_grad, strict=True):
            x.requires_grad_(requires_grad)
        step.set_inputs(self._inputs)
        self._generator = self._recorder.generator()
        self._generator_state = self._generator.get_state()

    def run(self) -> None:
        """Record the step, and restore all state afterwards."""
        host = self._recorder.host_generators()
        try:
            with ExitStack() as stack:
                self._buffers = stack.enter_context(buffers_restored(self._state.buffers))
                self._parameters = stack.enter_context(separate_parameters(self._call.model, self._state.parameters))
                self._possible_sources = [*(x for x in self._inputs if x.requires_grad), *self._parameters]
                self._run_eagerly()
                self._rewind()
                expected = self._run_eagerly()
                if not host.are_unchanged():
                    raise Unrecorded(HOST_RANDOM)
                self._capture()
                self._compare(expected)
        except Unrecorded:
            raise
        except FailedCapture as error:
            raise Unrecorded(f"it cannot be captured: {error}", failed=True) from None
        except Exception as error:  # noqa: BLE001  # a user's forward may raise anything
            raise Unrecorded(f"it fails during a recording: {first_line_of(error)}") from None
        finally:
            self._generator.set_state(self._generator_state)
            host.restore()

    def _rewind(self) -> None:
        """Restore the state, so that the next run starts from the same one as the first."""
        restore(self._state.buffers, self._buffers)
        self._generator.set_state(self._generator_state)

    # -- eager run -------------------------------------------------------------------------------------------------
    def _run_eagerly(self) -> list[Any]:
        """The results, gradients and buffers of an eager run; also sets the properties of the step.

        In the first run, libraries initialize state for the recording stream that cannot be initialized in a capture.
        """
        owned = {t.untyped_storage().data_ptr() for t in (*self._state.tensors, *self._inputs)}
        saved_storages: set[int] = set()

        def note(t: torch.Tensor) -> torch.Tensor:
            saved_storages.add(t.untyped_storage().data_ptr())
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            leaves = _pytree.tree_leaves(self._call.run(self._inputs))
        results = results_of(leaves)
        if [y.requires_grad for y, g in zip(results, self._samples, strict=True) if g is not None].count(False):
            raise Unrecorded(DIFFER)
        if any(y.untyped_storage().data_ptr() in owned for y in results):
            raise Unrecorded("it returns memory of an operand, a parameter or a buffer")
        reached = _variables(results)
        self._reached = [id(t) in reached for t in self._possible_sources]
        if len(reached) != sum(self._reached):
            raise Unrecorded(FOREIGN_TENSORS)
        self._sources = [t for t, is_reached in zip(self._possible_sources, self._reached, strict=True) if is_reached]
        self._saved = [t for t in self._state.tensors if t.untyped_storage().data_ptr() in saved_storages]
        outputs = self._with_gradients(results)
        self._step.draws = not torch.equal(self._generator.get_state(), self._generator_state)
        changed = [not torch.equal(b, before) for b, before in zip(self._state.buffers, self._buffers, strict=True)]
        self._step.mutated = [b for b, is_changed in zip(self._state.buffers, changed, strict=True) if is_changed]
        constants = [x for x in leaves if type(x) is not torch.Tensor]
        return [*outputs, *self._buffers_now(), *constants]

    def _with_gradients(self, results: list[torch.Tensor]) -> list[Any]:
        """Copies of the results, and the gradients of the sources."""
        pairs = [(y, g) for y, g in zip(results, self._samples, strict=True) if g is not None]
        gradients = self._call.gradients([y for y, _ in pairs], [g for _, g in pairs], self._sources)
        if any(g is not None and g.layout is not torch.strided for g in gradients):
            raise Unrecorded("a gradient is sparse")
        return [*(y.detach().clone() for y in results), *gradients]

    def _buffers_now(self) -> list[torch.Tensor]:
        return [b.detach().clone() for b in self._state.buffers]

    # -- the graphs ------------------------------------------------------------------------------------------------
    def _capture(self) -> None:
        self._rewind()
        pool = self._step.memory.pool
        graph, (leaves, spec) = self._recorder.capture(pool, lambda: _pytree.tree_flatten(self._call.run(self._inputs)))
        self._step.set_forward(graph, leaves, spec)
        results = results_of(leaves)
        self._constants = [x for x in leaves if type(x) is not torch.Tensor]
        del leaves
        output_gradients = [
            None if g is None else torch.empty_like(y) for y, g in zip(results, self._samples, strict=True)
        ]
        pairs = [(y, g) for y, g in zip(results, output_gradients, strict=True) if g is not None]
        del results
        graph, gradients = self._recorder.capture(
            pool, lambda: self._call.gradients([y for y, _ in pairs], [g for _, g in pairs], self._sources)
        )
        self._step.set_backward(graph, output_gradients, self._reached, gradients, self._saved)

    def _compare(self, expected: list[Any]) -> None:
        """Compare a replay of both graphs with the eager run."""
        self._rewind()
        replayed = [*self._step.replay_both(self._samples), *self._buffers_now(), *self._constants]
        dtypes = {x.dtype for x in (*expected, *self._possible_sources) if isinstance(x, torch.Tensor)}
        dtypes |= {self._call.dtype or torch.float64}
        eps = max(torch.finfo(d).eps for d in dtypes if d.is_floating_point)
        gradients = expected[len(self._samples) :][: len(self._sources)]
        if any(g is not None and not g.isfinite().all() for g in gradients):
            raise Unrecorded("its gradients are not finite", for_good=False)
        if agree(expected, replayed, eps):
            return
        self._rewind()
        results = results_of(_pytree.tree_leaves(self._call.run(self._inputs)))
        again = [*self._with_gradients(results), *self._buffers_now(), *self._constants]
        raise Unrecorded(OTHER_RESULTS if agree(expected, again, eps) else DIFFER)


def _variables(results: list[torch.Tensor]) -> set[int]:
    """The ids of the leaf tensors for which a backward pass from the results accumulates gradients."""
    variables: set[int] = set()
    nodes = {y.grad_fn for y in results if y.grad_fn is not None}
    remaining: list[Any] = list(nodes)
    while remaining:
        node = remaining.pop()
        if type(node).__name__ == "AccumulateGrad":
            variables.add(id(node.variable))
        for following, _ in node.next_functions:
            if following is not None and following not in nodes:
                nodes.add(following)
                remaining.append(following)
    return variables
