"""A graph of cuDNN operations as plain data: wires (tensors), nodes (operations), and a builder that joins them.

Ops in `dispatch/ops` build their graphs with it, and users their own. `lower.py` turns a graph into cuDNN's
descriptors, `reference.py` evaluates it with NumPy; both read the same nodes, so no separate reference is needed.
Nothing here holds a pointer or calls a library.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from cudabind._cached import cached_property
from dispatch.checks import check_int
from dispatch.device.layout import c_strides
from dispatch.errors import BadRequest
from dispatch.keys import BOOL, F32, I32, Dtype
from dispatch.libraries.cudnn.modes import ARITY, ATTRIBUTES, BACKWARD, COMPARE, REDUCTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Builder", "Graph", "Node", "Value", "Wire"]

Shape = tuple[int, ...]
Value = int | float | bool | str | Shape
MAX_ALIGNMENT = 16  # bytes: no engine requires more


@dataclass(frozen=True)
class Wire:
    """A tensor of a graph; a `virtual` one is passed between nodes and is not stored in memory.

    With `value` it is a constant of the graph; with `by_value` a number that the host passes at each run. `ragged` is
    the uid of the offsets of a packed tensor. A `scratch` tensor is stored in memory that belongs to the plan.
    """

    uid: int
    dims: Shape
    strides: Shape
    dtype: Dtype
    virtual: bool = False
    value: float | None = None
    by_value: bool = False
    alignment: int = MAX_ALIGNMENT
    ragged: int = 0
    scratch: bool = False


@dataclass(frozen=True)
class Node:
    """One operation: its kind, its operands by the library's names, and its attributes."""

    kind: str
    ins: tuple[tuple[str, int], ...]
    outs: tuple[tuple[str, int], ...]
    attributes: tuple[tuple[str, Value], ...] = ()

    def get(self, name: str) -> Value:
        """An attribute by name; KeyError if the node does not have it."""
        return dict(self.attributes)[name]

    def has(self, name: str) -> bool:
        return any(name == key for key, _ in self.attributes)


@dataclass(frozen=True)
class Graph:
    """Wires and nodes; hashable, because equal graphs have the same plans."""

    wires: tuple[Wire, ...]
    nodes: tuple[Node, ...]
    compute: Dtype

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.wires, self.nodes, self.compute))

    def __getstate__(self) -> dict[str, Any]:
        """Pickle only the fields, because hashes of strings differ between processes."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def wire(self, uid: int) -> Wire:
        """A wire by its unique id."""
        return self.wires[uid - 1]

    @property
    def inputs(self) -> tuple[Wire, ...]:
        """The wires that a run reads from memory: not virtual, not constant, and not written by a node."""
        written = {uid for node in self.nodes for _, uid in node.outs}
        return tuple(w for w in self.wires if not w.virtual and w.value is None and w.uid not in written)

    @property
    def outputs(self) -> tuple[Wire, ...]:
        """The wires that a run writes to memory, except scratch."""
        written = {uid for node in self.nodes for _, uid in node.outs}
        return tuple(w for w in self.wires if not w.virtual and not w.scratch and w.uid in written)

    def text(self) -> str:
        """The graph as a text that is the same in every process: the key of its tuning results."""
        return repr((self.wires, self.nodes, self.compute))


class Builder:
    """Builds a graph from wires and nodes, in the order in which they are added; unique ids start at 1.

    `compute` is the precision of the nodes and the dtype of virtual tensors.
    """

    def __init__(self, compute: Dtype = F32) -> None:
        self.compute = compute
        self._wires: list[Wire] = []
        self._nodes: list[Node] = []
        self._changes = 0
        self._built: tuple[int, Graph] | None = None  # the number of changes at the last build, and its graph

    def build(self) -> Graph:
        """The graph so far; the same object until something is added or becomes an output."""
        built, changes = self._built, self._changes
        if built is None or built[0] != changes:
            built = self._built = changes, Graph(tuple(self._wires), tuple(self._nodes), self.compute)
        return built[1]

    # -- wires ----------------------------------------------------------------------------------------------------
    def tensor(
        self, dims: Shape, strides: Shape | None, dtype: Dtype, *, alignment: int = MAX_ALIGNMENT, ragged: int = 0
    ) -> Wire:
        """A tensor in memory; strides in elements, None for a dense one."""
        strides = c_strides(dims) if strides is None else strides
        return self._wire(dims, strides, dtype, alignment=min(alignment, MAX_ALIGNMENT), ragged=ragged)

    def scalar(self, value: float, rank: int, dtype: Dtype = F32) -> Wire:
        """A constant number of the graph."""
        return self._wire((1,) * rank, (1,) * rank, dtype, value=value, by_value=True)

    def number(self, rank: int, dtype: Dtype = F32) -> Wire:
        """A number that the host passes at each run."""
        return self._wire((1,) * rank, (1,) * rank, dtype, by_value=True)

    def scratch(self, dims: Shape, dtype: Dtype, strides: Shape | None = None) -> Wire:
        """Memory in which some engines keep data between kernels."""
        return self._wire(dims, strides or c_strides(dims), dtype, scratch=True)

    def virtual(
        self, dims: Shape, dtype: Dtype | None = None, strides: Shape | None = None, *, ragged: int = 0
    ) -> Wire:
        """A tensor that is passed between nodes and not stored."""
        return self._wire(dims, strides or c_strides(dims), dtype or self.compute, virtual=True, ragged=ragged)

    def _wire(
        self,
        dims: Shape,
        strides: Shape,
        dtype: Dtype,
        *,
        virtual: bool = False,
        value: float | None = None,
        by_value: bool = False,
        alignment: int = MAX_ALIGNMENT,
        ragged: int = 0,
        scratch: bool = False,
    ) -> Wire:
        wire = Wire(len(self._wires) + 1, dims, strides, dtype, virtual, value, by_value, alignment, ragged, scratch)
        self._wires.append(wire)
        self._changes += 1
        return wire

    # -- nodes ----------------------------------------------------------------------------------------------------
    def node(
        self, kind: str, ins: Mapping[str, Wire | None], outs: Mapping[str, Wire | None], **attributes: Value
    ) -> None:
        """Add an operation; operands that are None are left out."""
        inputs = tuple((name, wire.uid) for name, wire in ins.items() if wire is not None)
        outputs = tuple((name, wire.uid) for name, wire in outs.items() if wire is not None)
        self._nodes.append(Node(kind, inputs, outputs, tuple(sorted(attributes.items()))))
        self._changes += 1

    def pointwise(self, mode: str, x: Wire, *others: Wire, out: Wire | None = None, **attributes: Value) -> Wire:
        """One of cuDNN's pointwise modes, with NumPy's broadcasting of axes of extent 1.

        Attributes are those of cuDNN for the mode; MATH_PREC sets a compute dtype other than the graph's.
        Forward modes take x, or x and b, or for BINARY_SELECT x, b and t (the condition); backward modes dy and x.
        """
        if mode not in ARITY:
            raise BadRequest("mode", repr(mode), f"a mode of cudnnPointwiseMode_t: {', '.join(ARITY)}")
        if 1 + len(others) != ARITY[mode]:
            raise BadRequest("operands", f"{1 + len(others)} operands of {mode}", f"{ARITY[mode]}")
        valid = ATTRIBUTES.get(mode, ())
        for name, value in attributes.items():
            if name not in (*valid, "MATH_PREC"):
                raise BadRequest(name, repr(value), f"an attribute of {mode}: {', '.join(valid) or 'it has none'}")
        if mode == "GEN_INDEX":
            check_int("AXIS", attributes.get("AXIS"), 0, len(x.dims) - 1)
        names = ("DYDESC", "XDESC") if mode in BACKWARD else ("XDESC", "BDESC", "TDESC")
        operands = (x, *others)
        dims = _broadcast(operands)
        made = out or self.virtual(dims, _dtype_of(mode, self.compute), _order(dims, operands))
        result = "DXDESC" if mode in BACKWARD else "YDESC"
        named = dict(zip(names, operands, strict=False))
        self.node("POINTWISE", named, {result: made}, MODE=mode, **attributes)
        return made

    def matmul(self, a: Wire, b: Wire, *, out: Wire | None = None, **overrides: Wire | float | None) -> Wire:
        """A (…, m, k) times B (…, k, n); if B has fewer heads (axis -3), each is used for a group of A's heads."""
        if a.dims[-1] != b.dims[-2]:
            raise BadRequest("b", f"shape {b.dims}", f"{a.dims[-1]} rows, the columns of a {a.dims}")
        last = len(a.dims) - 3
        for axis, (one, other) in enumerate(zip(a.dims[:-2], b.dims[:-2], strict=True)):
            shared = axis == last and 0 < other < one and one % other == 0
            if one != other and 1 not in (one, other) and not shared:
                expected = f"batch axes that broadcast with those of a {a.dims}, or a divisor of its heads"
                raise BadRequest("b", f"shape {b.dims}", expected)
        batch = tuple(max(one, other) for one, other in zip(a.dims[:-2], b.dims[:-2], strict=True))
        made = out or self.virtual((*batch, a.dims[-2], b.dims[-1]))
        ins: dict[str, Wire | None] = {"ADESC": a, "BDESC": b}
        attributes: dict[str, Value] = {}
        for name, value in overrides.items():
            if isinstance(value, Wire):
                ins[f"GEMM_{name.upper()}_OVERRIDE_DESC"] = value
            elif value is not None:
                attributes["PADDING_VALUE"] = value
        self.node("MATMUL", ins, {"CDESC": made}, **attributes)
        return made

    def reduction(self, mode: str, x: Wire, dims: Shape, *, out: Wire | None = None) -> Wire:
        """Reduce the axes whose extent becomes 1: ADD, MUL, MIN, MAX, AMAX, AVG, NORM1, NORM2."""
        if mode not in REDUCTIONS:
            raise BadRequest("mode", repr(mode), f"one of {', '.join(REDUCTIONS)}")
        if len(dims) != len(x.dims) or any(d not in (1, e) for d, e in zip(dims, x.dims, strict=True)):
            raise BadRequest("dims", str(dims), f"{x.dims} with extent 1 along each reduced axis")
        made = out or self.virtual(dims)
        self.node("REDUCTION", {"XDESC": x}, {"YDESC": made}, OPERATOR=mode)
        return made

    def convolution(self, kind: str, ins: Mapping[str, Wire], out: Mapping[str, Wire], **attributes: Value) -> None:
        """CONVOLUTION_FORWARD (X, W -> Y), _BACKWARD_DATA (DY, W -> DX) or _BACKWARD_FILTER (DY, X -> DW)."""
        self.node(kind, ins, out, **attributes)

    def as_output(self, wire: Wire, dtype: Dtype, strides: Shape | None = None, alignment: int = MAX_ALIGNMENT) -> Wire:
        """Make a wire an output that is written to memory in a dtype; returns the new wire."""
        strides = strides or c_strides(wire.dims)
        real = replace(wire, virtual=False, dtype=dtype, strides=strides, alignment=min(alignment, MAX_ALIGNMENT))
        self._wires[wire.uid - 1] = real
        self._changes += 1
        return real


def _broadcast(operands: tuple[Wire, ...]) -> Shape:
    ranks = {len(wire.dims) for wire in operands}
    if len(ranks) != 1:
        raise BadRequest("operands", str([w.dims for w in operands]), "the same number of axes in each")
    extents = []
    for axis, column in enumerate(zip(*(wire.dims for wire in operands), strict=True)):
        larger = {extent for extent in column if extent != 1}
        if len(larger) > 1:
            raise BadRequest("operands", str([w.dims for w in operands]), f"extents of axis {axis} that broadcast")
        extents.append(larger.pop() if larger else 1)
    return tuple(extents)


def _order(dims: Shape, operands: tuple[Wire, ...]) -> Shape:
    """Dense strides in the axis order of the first operand with the result's shape, e.g. channels last."""
    operand_strides = next((wire.strides for wire in operands if wire.dims == dims), c_strides(dims))
    strides, step = [0] * len(dims), 1
    for axis in sorted(range(len(dims)), key=lambda axis: (operand_strides[axis], dims[axis] > 1, -axis)):
        strides[axis] = step
        step *= dims[axis]
    return tuple(strides)


def _dtype_of(mode: str, compute: Dtype) -> Dtype:
    if mode == "GEN_INDEX":
        return I32
    return BOOL if mode in COMPARE else compute
