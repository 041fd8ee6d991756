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

__all__ = ["Described", "Drawing"]

Shape = tuple[int, ...]
Q = TypeVar("Q", bound="OperandRequest")


class Described(NamedTuple):
    """A graph, and for the unique id of each operand its place in the request's arguments."""

    graph: Graph
    places: dict[int, int]


class Drawing(Generic[Q]):
    """The graph of a request as it is drawn; `compute` is what sums are kept in."""

    def __init__(self, request: Q, compute: Dtype = F32) -> None:
        self.request = request
        self.builder = Builder(compute)
        self.places: dict[int, int] = {}

    def operand(self, name: str, dims: Shape, strides: Shape | None, *, ragged: int = 0) -> Wire:
        """The wire of an operand, in the axes that an engine takes it in."""
        layout = self.request.layout_of(name)
        wire = self.builder.tensor(dims, strides, layout.dtype, alignment=layout.alignment, ragged=ragged)
        self.places[wire.uid] = self.request.place_of(name)
        return wire

    def output(self, name: str, value: Wire, strides: Shape | None) -> None:
        """Have what an operation gives written into an operand."""
        layout = self.request.layout_of(name)
        real = self.builder.as_output(value, layout.dtype, strides, layout.alignment)
        self.places[real.uid] = self.request.place_of(name)

    def described(self) -> Described:
        """The graph so far."""
        return Described(self.builder.build(), self.places)
