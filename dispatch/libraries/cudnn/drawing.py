"""Requests drawn as graphs: a builder, and where the operands of the request stand in its arguments.

The graphs of the ops derive from it. Pure: it calls no library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from dispatch.keys import F32
from dispatch.libraries.cudnn.graph import Builder, Graph

if TYPE_CHECKING:
    from dispatch.core.operands import OperandRequest
    from dispatch.keys import Dtype
    from dispatch.libraries.cudnn.graph import Wire

__all__ = ["Described", "Drawing", "Held", "PlacedGraph", "held"]

Shape = tuple[int, ...]
Q = TypeVar("Q", bound="OperandRequest")


class Described(NamedTuple):
    """A graph, and for the unique id of each operand its place in the request's arguments."""

    graph: Graph
    places: dict[int, int]


class Held(NamedTuple):
    """Memory that a graph reads or writes: its place in the arguments, its dtype, the multiple that it begins at."""

    place: int
    dtype: Dtype
    alignment: int = 256


def held(request: OperandRequest, name: str) -> Held:
    """The memory of an operand."""
    layout = request.layout_of(name)
    return Held(request.place_of(name), layout.dtype, layout.alignment)


class PlacedGraph:
    """A graph as it is drawn over memory, and the places of its wires; `compute` is what sums are kept in."""

    def __init__(self, compute: Dtype = F32) -> None:
        self.builder = Builder(compute)
        self.places: dict[int, int] = {}

    def wire(self, memory: Held, dims: Shape, strides: Shape | None, *, ragged: int = 0) -> Wire:
        """Memory as a tensor in the axes that an engine takes it in."""
        made = self.builder.tensor(dims, strides, memory.dtype, alignment=memory.alignment, ragged=ragged)
        self.places[made.uid] = memory.place
        return made

    def write(self, memory: Held, value: Wire, strides: Shape | None) -> None:
        """Have what an operation gives written to memory."""
        real = self.builder.as_output(value, memory.dtype, strides, memory.alignment)
        self.places[real.uid] = memory.place

    def described(self) -> Described:
        """The graph so far."""
        return Described(self.builder.build(), self.places)


class Drawing(PlacedGraph, Generic[Q]):
    """The graph of a request as it is drawn over its operands."""

    def __init__(self, request: Q, compute: Dtype = F32) -> None:
        super().__init__(compute)
        self.request = request

    def operand(self, name: str, dims: Shape, strides: Shape | None, *, ragged: int = 0) -> Wire:
        """The wire of an operand."""
        return self.wire(held(self.request, name), dims, strides, ragged=ragged)

    def output(self, name: str, value: Wire, strides: Shape | None) -> None:
        """Have what an operation gives written into an operand."""
        self.write(held(self.request, name), value, strides)
