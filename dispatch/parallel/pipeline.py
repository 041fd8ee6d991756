"""A model whose stages are on different ranks: activations go to the next rank, gradients to the previous one.

`one_forward_one_backward` is the schedule of PipeDream-Flush, which keeps the activations of as many micro-batches as
there are stages at most: https://arxiv.org/abs/2006.09503. An activation and a gradient that two neighbours exchange at
the same time are one group on both, so that neither waits for the other to begin; everything else is sent alone. NCCL
needs the groups of two ranks to match (https://github.com/NVIDIA/nccl/issues/1279), or ncclGroupEnd fails with an
internal error.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from dispatch.checks import check_int
from dispatch.errors import BadRequest
from dispatch.ops.collective import collective_group, recv, send
from dispatch.parallel.side_stream import SideStream, check_operand

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
    """A stage's steps for `count` micro-batches: forward passes (warm-up), both in turns, then backward passes."""
    check_int("stages", stages, 1)
    check_int("stage", stage, 0, stages - 1)
    check_int("count", count, 0)
    warmup = min(stages - 1 - stage, count)
    steps = [Step(True, number) for number in range(warmup)]
    for number in range(count - warmup):
        steps += [Step(True, warmup + number), Step(False, number)]
    return [*steps, *(Step(False, number) for number in range(count - warmup, count))]


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
        forward: `forward(number, x)` returns the stage's output for a micro-batch, which goes to the next rank; x is
            the output of the previous rank, None on the first. The output of the last stage is dropped.
        backward: `backward(number, dy)` returns the gradient of x, which goes to the previous rank, if there is one; dy
            is the gradient of the output, None on the last stage, which has the loss.
        count: how many micro-batches there are, the same on all ranks.
        comm: the ranks, in the order of the stages.
        activation: a tensor of the shape and dtype of x, on all ranks but the first; it is not read.

    Outputs and gradients are dense; dy has the output's shape and dtype. Both functions enqueue on the current stream.
    """
    Stage(forward, backward, check_int("count", count, 1), SideStream(comm), activation).run()


class Stage:
    """One rank's part of a step."""

    def __init__(self, forward: Any, backward: Any, count: int, side: SideStream, activation: Tensor | None) -> None:
        self.forward, self.backward, self.count, self.side = forward, backward, count, side
        stage, stages = side.comm.rank, side.comm.size
        self.previous = stage - 1 if stage else None
        self.next = stage + 1 if stage + 1 < stages else None
        self.steps = schedule(stage, stages, count)
        self.warmup = min(stages - 1 - stage, count)  # forward passes before the first backward one
        if self.previous is not None and activation is None:
            raise BadRequest(
                "activation", "None", "a tensor like the output of the previous rank, because this is not the first"
            )
        self.activation = None if activation is None else check_operand("activation", activation, side)
        self.outputs: dict[int, Tensor] = {}  # outputs whose gradients have not come yet; they have the same shapes

    def run(self) -> None:
        """Run the steps; after each, send its output and receive what the next step needs."""
        received = self.receive(self.steps[0])
        self.wait_for_input(received)
        for step, following in zip(self.steps, [*self.steps[1:], None], strict=True):
            result = (
                self.forward(step.micro_batch, received) if step.forward else self.backward(step.micro_batch, received)
            )
            peer = self.next if step.forward else self.previous
            if peer is not None:
                result = check_operand("the output" if step.forward else "the gradient", result, self.side)
                if step.forward:
                    self.outputs[step.micro_batch] = result
                else:
                    self.outputs.pop(step.micro_batch, None)
            both = self.exchanges_both(step, following) and peer is not None
            with collective_group() if both else nullcontext():
                if peer is not None:
                    self.send(result, peer)
                received = self.receive(following)
            self.wait_for_input(received)
        self.side.join()

    def exchanges_both(self, step: Step, following: Step | None) -> bool:
        """Whether this rank and a neighbour send to each other at this time, which must be one group."""
        if following is None or step.forward == following.forward:
            return False
        return not step.forward or step.micro_batch >= self.warmup

    def wait_for_input(self, coming: Tensor | None) -> None:
        """Make the main stream wait for a received tensor."""
        if coming is not None:
            self.side.wait_for_reads(coming)

    def send(self, made: Tensor, peer: int) -> None:
        """Send a tensor on the side stream."""
        with self.side.stream:
            send(made, comm=self.side.comm, peer=peer)

    def receive(self, following: Step | None) -> Tensor | None:
        """Receive, on the side stream, the input of a step from a neighbour; None if it needs no input."""
        peer = None if following is None else (self.previous if following.forward else self.next)
        if peer is None or following is None:
            return None
        like: Any = self.activation if following.forward else self.outputs[following.micro_batch]
        with self.side.stream:
            received: Tensor = self.side.device.empty(like.shape, like.dtype)
            recv(received, comm=self.side.comm, peer=peer)
        return received
