"""A graph of cuDNN operations as plain data: wires (tensors), nodes (operations), and a builder that joins them.

Ops of `dispatch/ops` describe themselves with it, users build their own chains. `lower.py` turns a graph into cuDNN's
descriptors, `reference.py` into NumPy; both read the same nodes, so a reference is never written twice. Nothing here
holds a pointer or calls a library.
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
MAX_ALIGNMENT = 16  # no engine asks for more


@dataclass(frozen=True)
class Wire:
    """A tensor of a graph; `virtual` ones pass from node to node and never lie in memory.

    `value` makes it a number that is part of the graph; `by_value` one that the host gives at each run. `ragged` is the
    wire of offsets of a packed tensor. `scratch` lies in memory that the plan provides and nobody else sees.
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
        """An attribute by name; KeyError where the node has none such."""
        return dict(self.attributes)[name]

    def has(self, name: str) -> bool:
        return any(name == own for own, _ in self.attributes)


@dataclass(frozen=True)
class Graph:
    """Wires and nodes, hashable: two equal graphs have the same plans. `io` are the wires that lie in memory."""

    wires: tuple[Wire, ...]
    nodes: tuple[Node, ...]
    compute: Dtype

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.wires, self.nodes, self.compute))

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle holds: the fields alone, for names have another hash in each process."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def wire(self, uid: int) -> Wire:
        """A wire by its unique id."""
        return self.wires[uid - 1]

    @property
    def inputs(self) -> tuple[Wire, ...]:
        """What must be there at a run: no virtual wire, no constant, nothing that a node writes."""
        written = {uid for node in self.nodes for _, uid in node.outs}
        return tuple(w for w in self.wires if not w.virtual and w.value is None and w.uid not in written)

    @property
    def outputs(self) -> tuple[Wire, ...]:
        """What a run writes."""
        written = {uid for node in self.nodes for _, uid in node.outs}
        return tuple(w for w in self.wires if not w.virtual and not w.scratch and w.uid in written)

    def text(self) -> str:
        """The graph in words that are the same in every process: what its tuning is remembered by."""
        return repr((self.wires, self.nodes, self.compute))


class Builder:
    """Joins wires and nodes in the order in which they are made; unique ids count from 1.

    `compute` is the precision of the nodes and the dtype of what passes between them.
    """

    def __init__(self, compute: Dtype = F32) -> None:
        self.compute = compute
        self._wires: list[Wire] = []
        self._nodes: list[Node] = []
        self._changes = 0
        self._built: tuple[int, Graph] | None = None  # after how many changes, and what it was then

    def build(self) -> Graph:
        """The graph so far; the very same one until something is added or becomes an output."""
        built, changes = self._built, self._changes
        if built is None or built[0] != changes:
            built = self._built = changes, Graph(tuple(self._wires), tuple(self._nodes), self.compute)
        return built[1]

    # -- wires ----------------------------------------------------------------------------------------------------
    def tensor(
        self, dims: Shape, strides: Shape | None, dtype: Dtype, *, alignment: int = MAX_ALIGNMENT, ragged: int = 0
    ) -> Wire:
        """A tensor in memory; strides in elements, None for a dense one."""
        steps = c_strides(dims) if strides is None else strides
        return self._wire(dims, steps, dtype, alignment=min(alignment, MAX_ALIGNMENT), ragged=ragged)

    def scalar(self, value: float, rank: int, dtype: Dtype = F32) -> Wire:
        """A number that is part of the graph."""
        return self._wire((1,) * rank, (1,) * rank, dtype, value=value, by_value=True)

    def number(self, rank: int, dtype: Dtype = F32) -> Wire:
        """A number that the host gives at each run."""
        return self._wire((1,) * rank, (1,) * rank, dtype, by_value=True)

    def scratch(self, dims: Shape, dtype: Dtype, strides: Shape | None = None) -> Wire:
        """What some engines keep in memory from one kernel to the next."""
        return self._wire(dims, strides or c_strides(dims), dtype, scratch=True)

    def virtual(
        self, dims: Shape, dtype: Dtype | None = None, strides: Shape | None = None, *, ragged: int = 0
    ) -> Wire:
        """What passes from one node to the next."""
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
        given = tuple((name, wire.uid) for name, wire in ins.items() if wire is not None)
        made = tuple((name, wire.uid) for name, wire in outs.items() if wire is not None)
        self._nodes.append(Node(kind, given, made, tuple(sorted(attributes.items()))))
        self._changes += 1

    def pointwise(self, mode: str, x: Wire, *others: Wire, out: Wire | None = None, **attributes: Value) -> Wire:
        """One of cuDNN's pointwise modes, with NumPy's broadcasting of axes of extent 1.

        Attributes are cuDNN's for the mode; MATH_PREC names another dtype to compute in than the graph's.
        Forward modes take x, or x and b, or for BINARY_SELECT x, b and t (the choice); backward ones dy and x.
        """
        if mode not in ARITY:
            raise BadRequest("mode", repr(mode), f"a mode of cudnnPointwiseMode_t: {', '.join(ARITY)}")
        if 1 + len(others) != ARITY[mode]:
            raise BadRequest("operands", f"{1 + len(others)} operands of {mode}", f"{ARITY[mode]}")
        own = ATTRIBUTES.get(mode, ())
        for name, value in attributes.items():
            if name not in (*own, "MATH_PREC"):
                raise BadRequest(name, repr(value), f"an attribute of {mode}: {', '.join(own) or 'it has none'}")
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
        """A (…, m, k) times B (…, k, n); where B has fewer heads in the axis before, each serves a group of A's."""
        if a.dims[-1] != b.dims[-2]:
            raise BadRequest("b", f"shape {b.dims}", f"{a.dims[-1]} rows, the columns of a {a.dims}")
        last = len(a.dims) - 3
        for axis, (one, other) in enumerate(zip(a.dims[:-2], b.dims[:-2], strict=True)):
            shared = axis == last and 0 < other < one and one % other == 0
            if one != other and 1 not in (one, other) and not shared:
                wanted = f"batch axes that broadcast with those of a {a.dims}, or a divisor of its heads"
                raise BadRequest("b", f"shape {b.dims}", wanted)
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
            raise BadRequest("dims", str(dims), f"{x.dims} with 1 for each axis that is reduced")
        made = out or self.virtual(dims)
        self.node("REDUCTION", {"XDESC": x}, {"YDESC": made}, OPERATOR=mode)
        return made

    def convolution(self, kind: str, ins: Mapping[str, Wire], out: Mapping[str, Wire], **attributes: Value) -> None:
        """CONVOLUTION_FORWARD (X, W -> Y), _BACKWARD_DATA (DY, W -> DX) or _BACKWARD_FILTER (DY, X -> DW)."""
        self.node(kind, ins, out, **attributes)

    def as_output(self, wire: Wire, dtype: Dtype, strides: Shape | None = None, alignment: int = MAX_ALIGNMENT) -> Wire:
        """Have a wire written to memory, in a dtype; gives the wire as it is then."""
        steps = strides or c_strides(wire.dims)
        real = replace(wire, virtual=False, dtype=dtype, strides=steps, alignment=min(alignment, MAX_ALIGNMENT))
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
    """Dense strides in the order of the first operand that is as large as the result: channels last stays so."""
    steps = next((wire.strides for wire in operands if wire.dims == dims), c_strides(dims))
    strides, step = [0] * len(dims), 1
    for axis in sorted(range(len(dims)), key=lambda axis: (steps[axis], dims[axis] > 1, -axis)):
        strides[axis] = step
        step *= dims[axis]
    return tuple(strides)


def _dtype_of(mode: str, compute: Dtype) -> Dtype:
    if mode == "GEN_INDEX":
        return I32
    return BOOL if mode in COMPARE else compute
