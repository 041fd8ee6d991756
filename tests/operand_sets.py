"""Operands of a request laid out anew, at addresses no more aligned than their layouts promise, among guard bytes.

tests/gpu/test_relocation.py runs a plan at such addresses by the library's own call and by its relocated graph. What a
plan is given at other addresses are other arguments and nothing else: no request is made for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

import dispatch as dp
from dispatch.keys import U8
from dispatch.testing.memory import POISON_BYTE, Mismatch, poison

if TYPE_CHECKING:
    from collections.abc import Sequence

GUARD = 512  # bytes before, between and behind the operands, at least
LINE = 256  # what layouts count an address's alignment to
ROOM = 16  # bytes whose multiples allocated outputs take up
MANY_RUNS = 100  # of the library's own call, where two gave the same bits and a relocated one did not
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass
class Region:
    """What lies around one address: one operand, or several that begin there."""

    address: int
    low: int
    high: int
    tensors: list[tuple[dp.Tensor, bool]] = field(default_factory=list)  # and whether each is written
    before: Bytes = field(default_factory=lambda: np.empty(0, np.uint8))
    written: Mask = field(default_factory=lambda: np.empty(0, bool))
    room: int = 0  # bytes behind an allocated output that are its own

    @property
    def alignment(self) -> int:
        return min(self.address & -self.address, LINE) or LINE

    def window(self) -> dp.Tensor:
        """Its bytes as a tensor."""
        first, _ = self.tensors[0]
        start, home = self.address + self.low, first.device
        return dp.Tensor(first.storage, start, home.layout(U8, (self.high - self.low,), (1,), start))


class OperandSet:
    """The operands of a request as they lie before its run, where it leaves them open with memory of their own."""

    def __init__(self, executor: Any, request: dp.Request) -> None:
        self.request, self.plan, self.executor = request, executor.plan(request), executor
        made = executor.outputs(request)
        for tensor in made.values():
            tensor.copy_from(poison(tensor.dtype, tensor.shape))
        self.arguments, self.result = request.arguments(made), request.result(made)
        uses = [(tensor, written) for _, tensor, written in request.tensors()]
        regions: dict[int, Region] = {}
        for tensor, written in (*uses, *((tensor, True) for tensor in made.values())):
            layout = tensor.layout
            region = regions.setdefault(tensor.ptr, Region(tensor.ptr, 0, 0))
            region.low, region.high = min(region.low, layout.low), max(region.high, layout.high)
            region.tensors.append((tensor, written))
        for tensor in made.values():
            regions[tensor.ptr].room = -tensor.layout.high % ROOM
        self.regions = list(regions.values())
        for region in self.regions:
            size = region.high - region.low
            region.before = region.window().numpy() if size else np.empty(0, np.uint8)
            region.written = np.zeros(size, bool)
            for tensor, written in region.tensors:
                if written:
                    mark(region, tensor)

    def at(self, addresses: Sequence[int]) -> tuple[Any, ...]:
        """The arguments of the plan with each region at another address."""
        new = {region.address: address for region, address in zip(self.regions, addresses, strict=True)}
        return tuple(new.get(x, x) if type(x) is int and x else x for x in self.arguments)

    def put_back(self, placement: Placement, after: Bytes) -> None:
        """Write what a run left in the outputs of a placement into the request's own, for its check to look at."""
        for region, start in zip(self.regions, placement.starts, strict=True):
            if region.written.any():
                now = region.window().numpy()
                left = after[start + region.low : start + region.high]
                region.window().copy_from(np.where(region.written, left, now))


class Placement:
    """Where the regions of a set lie in one piece of memory: at random, each exactly as aligned as it was."""

    def __init__(self, operands: OperandSet, rng: np.random.Generator) -> None:
        regions = operands.regions
        self.starts = [0] * len(regions)  # in bytes from the beginning of the memory, which is a multiple of LINE
        end = GUARD
        for number in rng.permutation(len(regions)):
            region = regions[number]
            start = drawn(end - region.low, region.alignment, rng)
            self.starts[number] = start
            end = start + region.high + region.room + GUARD
        self.nbytes = -(-end // LINE) * LINE
        self.image = np.full(self.nbytes, POISON_BYTE, np.uint8)
        self.free = np.zeros(self.nbytes, bool)  # what a run may change
        for region, start in zip(regions, self.starts, strict=True):
            inside = slice(start + region.low, start + region.high)
            self.image[inside] = region.before
            self.free[inside] = region.written
            self.free[inside.stop : inside.stop + region.room] = True

    def check_beside(self, after: Bytes, name: str) -> None:
        """Mismatch where something but the outputs was written: an input, a guard, a gap between elements."""
        wrong = np.flatnonzero((after != self.image) & ~self.free)
        if wrong.size:
            raise Mismatch(f"{name}: {wrong.size} bytes beside the outputs were written, from {wrong[0]} of {self}")

    def __str__(self) -> str:
        return f"{self.nbytes} bytes with operands at {self.starts}"


def drawn(least: int, alignment: int, rng: np.random.Generator) -> int:
    """A place from `least` on that is a multiple of an alignment, and below LINE of no larger power of two."""
    step = LINE if alignment >= LINE else 2 * alignment
    start = -(-least // step) * step + step * int(rng.integers(8))
    return start if alignment >= LINE else start + alignment


def mark(region: Region, tensor: dp.Tensor) -> None:
    """Note the bytes of a tensor's elements as written."""
    layout, item = tensor.layout, tensor.dtype.itemsize
    if not layout.size:
        return
    if tensor.dtype.bits < 8:  # they are dense
        region.written[layout.low - region.low : layout.high - region.low] = True
        return
    strides = (*(stride * item for stride in layout.strides), 1)
    elements = np.ndarray((*layout.shape, item), bool, region.written.data, -region.low, strides)
    elements[...] = True


# -- runs -------------------------------------------------------------------------------------------------------------
OWN, AGAIN, RELOCATED = range(3)


def run_all(
    executor: Any, operands: OperandSet, placements: Sequence[Placement], rng: np.random.Generator
) -> list[list[Bytes]]:
    """What runs leave at each placement: two of the library's own call and one of `enqueue`, each on a copy.

    They are enqueued in random order, and nothing is waited for before the last.
    """
    device = executor.device
    memories = [[device.array(placement.image) for _ in (OWN, AGAIN, RELOCATED)] for placement in placements]
    device.synchronize()
    jobs = [(number, kind) for number in range(len(placements)) for kind in (OWN, AGAIN, RELOCATED)]
    for job in rng.permutation(len(jobs)):
        number, kind = jobs[job]
        memory = memories[number][kind]
        assert memory.ptr % LINE == 0
        arguments = operands.at([memory.ptr + start for start in placements[number].starts])
        if kind == RELOCATED:
            executor.enqueue(operands.plan, arguments, (memory,), (memory,))
        else:
            executor.call(operands.plan, arguments)
    device.synchronize()
    return [[memory.numpy() for memory in three] for three in memories]


def compare(check: Any, operands: OperandSet, placements: Sequence[Placement], left: Sequence[Sequence[Bytes]]) -> bool:
    """Whether the library's own call gives the same bits each time; Mismatch for what the relocated call gave else.

    Bits are compared where the library's own call gives the same ones, and the results of all else are held to the
    bounds of the case, those at the first placement in any event. A request whose `same_bits` is False says that the
    library promises none: of such calls, whose sums come in another order once in many runs, bits may differ, too.
    """
    name, is_loose = check.name, False
    for number, (placement, (own, again, relocated)) in enumerate(zip(placements, left, strict=True)):
        placement.check_beside(own, f"{name}, the library's own call")
        placement.check_beside(relocated, name)
        loose = not np.array_equal(own, again)
        if not loose and not np.array_equal(own, relocated):
            loose = not getattr(check.request, "same_bits", True) or varies(operands, placement, own)
        is_loose = is_loose or loose
        if not loose and not np.array_equal(own, relocated):
            places = np.flatnonzero(own != relocated)
            wrong = f"{places.size} bytes are not what the library's own call gives, from {places[0]} of {placement}"
            raise Mismatch(f"{name}: {wrong}")
        if loose or number == 0:
            operands.put_back(placement, relocated)
            check.verify(operands.result)
    return not is_loose


def varies(operands: OperandSet, placement: Placement, own: Bytes) -> bool:
    """Whether one of many more runs of the library's own call gives other bits: two may be equal by chance."""
    device = operands.executor.device
    for _ in range(MANY_RUNS):
        memory = device.array(placement.image)
        device.synchronize()
        operands.executor.call(operands.plan, operands.at([memory.ptr + start for start in placement.starts]))
        device.synchronize()
        if not np.array_equal(memory.numpy(), own):
            return True
    return False
