"""A model whose stages lie on the ranks: activations go to the next one, gradients to the one before.

`one_forward_one_backward` is the schedule of PipeDream-Flush, which keeps the activations of as many micro-batches as
there are stages at most: https://arxiv.org/abs/2006.09503. An activation and a gradient that two neighbours exchange at
one time are one group on both, so that neither waits for the other to begin; everything else goes alone. NCCL needs the
groups of two ranks to match (https://github.com/NVIDIA/nccl/issues/1279), or its ncclGroupEnd is an internal error.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from dispatch.checks import check_int
from dispatch.errors import BadRequest
from dispatch.ops.collective import collective_group, recv, send
from dispatch.parallel.beside import Beside, check_operand

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.communicator import Ranks
    from dispatch.device.tensor import Tensor

__all__ = ["Step", "one_forward_one_backward", "schedule"]


class Step(NamedTuple):
    """What a stage does at one time: the forward or the backward pass of a micro-batch."""

    forward: bool
    micro_batch: int


def schedule(stage: int, stages: int, count: int) -> list[Step]:
    """What a stage does for so many micro-batches, in order: some forward passes, both in turns, the backward rest."""
    ahead = min(stages - 1 - stage, count)
    steps = [Step(True, number) for number in range(ahead)]
    for number in range(count - ahead):
        steps += [Step(True, ahead + number), Step(False, number)]
    return [*steps, *(Step(False, number) for number in range(count - ahead, count))]


def one_forward_one_backward(
    forward: Callable[[int, Any], Any],
    backward: Callable[[int, Any], Any],
    count: int,
    *,
    comm: Ranks,
    activation: Tensor | None = None,
) -> None:
    """Run this rank's stage for all micro-batches of a step.

    Args:
        forward: `forward(number, x)` gives the stage's output for a micro-batch, which goes to the next rank; x is what
            the rank before has given, None on the first. What the last stage gives goes nowhere.
        backward: `backward(number, dy)` gives the gradient of x, which goes to the rank before, where there is one; dy
            is the gradient of the output, None on the last stage, which has the loss.
        count: how many micro-batches there are, the same on all ranks.
        comm: the ranks, in the order of the stages.
        activation: a tensor of the shape and dtype of x, on all ranks but the first; it is not read.

    Outputs and gradients are dense; dy has the output's shape and dtype. Both functions enqueue on the current stream.
    """
    Stage(forward, backward, check_int("count", count, 1), Beside(comm), activation).run()


class Stage:
    """One rank's part of a step."""

    def __init__(self, forward: Any, backward: Any, count: int, beside: Beside, activation: Tensor | None) -> None:
        self.forward, self.backward, self.count, self.beside = forward, backward, count, beside
        stage, stages = beside.comm.rank, beside.comm.size
        self.before = stage - 1 if stage else None
        self.behind = stage + 1 if stage + 1 < stages else None
        self.steps = schedule(stage, stages, count)
        self.ahead = min(stages - 1 - stage, count)  # forward passes before the first in turns with a backward one
        if self.before is not None and activation is None:
            raise BadRequest(
                "activation", "None", "a tensor like what the rank before gives, for this is not the first"
            )
        self.like = None if activation is None else check_operand("activation", activation, beside)
        self.outputs: dict[int, Tensor] = {}  # that wait for their gradients: these have their shapes

    def run(self) -> None:
        """The steps; behind each, what it has made goes out, and what the next one needs comes."""
        coming = self.receive(self.steps[0])
        self.read(coming)
        for step, following in zip(self.steps, [*self.steps[1:], None], strict=True):
            made = self.forward(step.micro_batch, coming) if step.forward else self.backward(step.micro_batch, coming)
            peer = self.behind if step.forward else self.before
            if peer is not None:
                made = check_operand("the output" if step.forward else "the gradient", made, self.beside)
                if step.forward:
                    self.outputs[step.micro_batch] = made
                else:
                    self.outputs.pop(step.micro_batch, None)
            both = self.in_turns(step, following) and peer is not None
            with collective_group() if both else nullcontext():
                if peer is not None:
                    self.send(made, peer)
                coming = self.receive(following)
            self.read(coming)
        self.beside.join()

    def in_turns(self, step: Step, following: Step | None) -> bool:
        """Whether the neighbour does the opposite of both at this time: sends what is received here, and receives."""
        if following is None or step.forward == following.forward:
            return False
        return not step.forward or step.micro_batch >= self.ahead

    def read(self, coming: Tensor | None) -> None:
        """Have the stage's stream wait for what comes."""
        if coming is not None:
            self.beside.read_here(coming)

    def send(self, made: Tensor, peer: int) -> None:
        """Beside the stage's work."""
        with self.beside.stream:
            send(made, comm=self.beside.comm, peer=peer)

    def receive(self, following: Step | None) -> Tensor | None:
        """What a step needs from its neighbour, if anything; beside the stage's work."""
        peer = None if following is None else (self.before if following.forward else self.behind)
        if peer is None or following is None:
            return None
        like: Any = self.like if following.forward else self.outputs[following.micro_batch]
        with self.beside.stream:
            received: Tensor = self.beside.device.empty(like.shape, like.dtype)
            recv(received, comm=self.beside.comm, peer=peer)
        return received
