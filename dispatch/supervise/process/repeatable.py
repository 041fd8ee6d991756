"""Which requests that were in flight when the child was lost may run again.

recovery.py uses it. This module only compares requests and memory ranges. A request may run again if a second run gives
the same result: neither the request itself nor a later request in flight writes memory that it reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dispatch.core.request import Operands, Request
    from dispatch.device.storage import Storage
    from dispatch.device.tensor import Tensor
    from dispatch.supervise.future import Future

__all__ = ["InFlightRequest", "unsafe_to_repeat", "written_tensors"]


class InFlightRequest(NamedTuple):
    """A request that was sent to a child and has not been reported; `number` counts in the order of sending."""

    number: int
    future: Future
    request: Request
    outputs: Operands
    queue: Any
    waits: tuple[tuple[int, int], ...] = ()  # dependencies that had not ended when it was sent, as (worker, number)
    bound: Any = None  # its RemoteBound; `request.bound` may belong to another supervisor by now


def written_tensors(sent: InFlightRequest) -> list[Tensor]:
    """The tensors that a request writes: the outputs that it was given, and those allocated for it."""
    return [tensor for _, tensor, is_written in sent.request.tensors() if is_written] + list(sent.outputs.values())


def unsafe_to_repeat(suspects: Iterable[InFlightRequest]) -> dict[int, str]:
    """The numbers of the suspects that must not run again, with the reasons; suspects are in the order of sending."""
    suspects = list(suspects)
    writes: dict[Storage, list[tuple[int, int, int]]] = {}  # (low, high, number)
    for sent in suspects:
        for tensor in written_tensors(sent):
            writes.setdefault(tensor.storage, []).append((*_span(tensor), sent.number))
    reasons: dict[int, str] = {}
    for sent in suspects:
        if not sent.request.repeatable:
            reasons[sent.number] = "it reads an operand that it writes, so a second run would give another result"
            continue
        for name, tensor, is_written in sent.request.tensors():
            if is_written:
                continue
            low, high = _span(tensor)
            for start, end, number in writes.get(tensor.storage, ()):
                if number > sent.number and start < high and low < end:
                    reasons[sent.number] = f"a later request, which is also in flight, overwrites its operand {name}"
    return reasons


def _span(tensor: Tensor) -> tuple[int, int]:
    return tensor.ptr + tensor.layout.low, tensor.ptr + tensor.layout.high
