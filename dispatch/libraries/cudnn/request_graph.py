"""Base classes that turn a request into a cuDNN graph, with the index of each operand in the request's arguments.

The ops derive from them. No library is called here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from dispatch.keys import F32
from dispatch.libraries.cudnn.graph import Builder, Graph

if TYPE_CHECKING:
    from dispatch.core.operands import OperandRequest
    from dispatch.keys import Dtype
    from dispatch.libraries.cudnn.graph import Wire

__all__ = ["GraphMemory", "LoweredGraph", "PlacedGraphBuilder", "RequestGraphBuilder", "operand_memory"]

Shape = tuple[int, ...]
Q = TypeVar("Q", bound="OperandRequest")


class LoweredGraph(NamedTuple):
    """A graph, and for the unique id of each operand its index in the request's arguments."""

    graph: Graph
    places: dict[int, int]


class GraphMemory(NamedTuple):
    """Memory that a graph reads or writes: its index in the arguments, its dtype, and its alignment in bytes."""

    place: int
    dtype: Dtype
    alignment: int = 256


def operand_memory(request: OperandRequest, name: str) -> GraphMemory:
    """The memory of an operand."""
    layout = request.layout_of(name)
    return GraphMemory(request.place_of(name), layout.dtype, layout.alignment)


class PlacedGraphBuilder:
    """Builds a graph over memory, and notes the argument index of each wire; `compute` is the dtype of sums."""

    def __init__(self, compute: Dtype = F32) -> None:
        self.builder = Builder(compute)
        self.places: dict[int, int] = {}

    def wire(self, memory: GraphMemory, dims: Shape, strides: Shape | None, *, ragged: int = 0) -> Wire:
        """Memory as a tensor with the axes that an engine expects."""
        wire = self.builder.tensor(dims, strides, memory.dtype, alignment=memory.alignment, ragged=ragged)
        self.places[wire.uid] = memory.place
        return wire

    def write(self, memory: GraphMemory, value: Wire, strides: Shape | None) -> None:
        """Write the result of an operation to memory."""
        real = self.builder.as_output(value, memory.dtype, strides, memory.alignment)
        self.places[real.uid] = memory.place

    def lowered(self) -> LoweredGraph:
        """The graph so far."""
        return LoweredGraph(self.builder.build(), self.places)


class RequestGraphBuilder(PlacedGraphBuilder, Generic[Q]):
    """Builds the graph of a request over its operands."""

    def __init__(self, request: Q, compute: Dtype = F32) -> None:
        super().__init__(compute)
        self.request = request

    def operand(self, name: str, dims: Shape, strides: Shape | None, *, ragged: int = 0) -> Wire:
        """The wire of an operand."""
        return self.wire(operand_memory(self.request, name), dims, strides, ragged=ragged)

    def output(self, name: str, value: Wire, strides: Shape | None) -> None:
        """Write the result of an operation to an operand."""
        self.write(operand_memory(self.request, name), value, strides)
