"""Epilogue trees: the operations on each element of an accumulator before it is stored, as comparable values.

Users build a tree from the functions below and pass it to a request as its `epilogue`; visitors.py translates it to
CUTLASS's types, and arithmetic.py evaluates it with NumPy. Leaves name the request's operands. This file knows no
device.

    x = evt.silu(evt.accumulator() + evt.row("bias"))
    tree = evt.reduce(x * evt.load("gate"), "amax", "amax", over="mn")
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from dispatch.checks import check_dtype, check_number, names_arguments, shown
from dispatch.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dispatch.keys import Dtype

__all__ = [
    "BINARY",
    "REDUCTIONS",
    "UNARY",
    "Binary",
    "Clamp",
    "Fma",
    "Leaf",
    "Node",
    "Reduce",
    "Store",
    "Unary",
    "accumulator",
    "amax",
    "clamp",
    "col",
    "constant",
    "fma",
    "gelu",
    "gelu_tanh",
    "linear_combination",
    "load",
    "maximum",
    "minimum",
    "quantize",
    "reduce",
    "relu",
    "row",
    "scalar",
    "sigmoid",
    "silu",
    "source",
    "store",
    "tanh",
    "walk",
]

UNARY = ("relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh")
BINARY = ("add", "sub", "mul", "maximum", "minimum")
REDUCTIONS = ("sum", "max", "min", "mean", "amax")
OVER = ("m", "n", "mn")


@dataclass(frozen=True)
class Node:
    """One node of a tree; `+`, `-`, `*` make a new node, and numbers become constants."""

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The nodes that this one reads, in order."""
        return tuple(value for field in fields(self) if isinstance(value := getattr(self, field.name), Node))

    def __add__(self, other: Node | float) -> Node:
        return Binary("add", self, _node(other))

    def __radd__(self, other: float) -> Node:
        return Binary("add", _node(other), self)

    def __sub__(self, other: Node | float) -> Node:
        return Binary("sub", self, _node(other))

    def __rsub__(self, other: float) -> Node:
        return Binary("sub", _node(other), self)

    def __mul__(self, other: Node | float) -> Node:
        return Binary("mul", self, _node(other))

    def __rmul__(self, other: float) -> Node:
        return Binary("mul", _node(other), self)


@dataclass(frozen=True)
class Leaf(Node):
    """An input of a tree: kind accumulator, source, constant (a value), scalar, row, col or load (a name)."""

    kind: str
    name: str = ""
    value: float = 0.0

    def __str__(self) -> str:
        return {"accumulator": "acc", "source": "c", "constant": f"{self.value:g}"}.get(
            self.kind, f"{self.kind}({self.name})"
        )


@dataclass(frozen=True)
class Unary(Node):
    """An activation."""

    function: str
    x: Node

    def __str__(self) -> str:
        return f"{self.function}({self.x})"


@dataclass(frozen=True)
class Clamp(Node):
    """x between two bounds."""

    x: Node
    low: float
    high: float

    def __str__(self) -> str:
        return f"clamp({self.x}, {self.low:g}, {self.high:g})"


@dataclass(frozen=True)
class Binary(Node):
    """Two nodes combined, element by element."""

    function: str
    x: Node
    y: Node

    def __str__(self) -> str:
        return f"{self.function}({self.x}, {self.y})"


@dataclass(frozen=True)
class Fma(Node):
    """x · y + z, rounded once."""

    x: Node
    y: Node
    z: Node

    def __str__(self) -> str:
        return f"fma({self.x}, {self.y}, {self.z})"


@dataclass(frozen=True)
class Store(Node):
    """Returns x, and stores it as the output `name` (…, m, n)."""

    x: Node
    name: str
    dtype: Dtype | None = None

    def __str__(self) -> str:
        return f"store({self.x}, {self.name})"


@dataclass(frozen=True)
class Reduce(Node):
    """Returns x, and reduces it over m, n or both into the f32 output `name`."""

    x: Node
    name: str
    function: str
    over: str

    def __str__(self) -> str:
        return f"{self.function}[{self.over}]({self.x}, {self.name})"


def _node(value: Any) -> Node:
    """A node unchanged, a number as a constant; BadRequest for anything else."""
    if isinstance(value, Node):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadRequest("epilogue", shown(value), "a node of dispatch.evt, or a number")
    return constant(value)


# Names that the words of a kernel's parameters use already.
TAKEN = (
    *("a", "b", "c", "out", "m", "n", "k"),
    *("batches", "multiprocessors", "clusters", "swizzle", "raster", "workspace"),
)
SUFFIXES = ("_pitch", "_batch", "_value")


def _named(name: Any) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise BadRequest(
            "epilogue", f"the name {shown(name)}", "an identifier, under which the request passes the operand"
        )
    if name in TAKEN or name.endswith(SUFFIXES):
        raise BadRequest(
            "epilogue", f"the name {name!r}", f"a name other than {', '.join(TAKEN)}, without the suffixes {SUFFIXES}"
        )
    return name


def accumulator() -> Node:
    """A · B."""
    return Leaf("accumulator")


def source() -> Node:
    """C, the request's `c` (…, m, n)."""
    return Leaf("source")


@names_arguments
def constant(value: float) -> Node:
    """A number that is part of the kernel; `scalar` is one that may change from call to call."""
    check_number("epilogue", value)
    if not math.isfinite(value):
        raise BadRequest("epilogue", shown(value), "a finite number")
    return Leaf("constant", value=float(value))


@names_arguments
def scalar(name: str) -> Node:
    """A number, or an f32 tensor of one element that is read on the device.

    "alpha" and "beta" are the fields of the request with these names; others are in its `operands`.
    """
    return Leaf("scalar", _named(name))


@names_arguments
def row(name: str) -> Node:
    """A vector (n,), the same for each row: a bias or a scale for each column."""
    return Leaf("row", _named(name))


@names_arguments
def col(name: str) -> Node:
    """A vector (m,), the same for each column: a bias or a scale for each row."""
    return Leaf("col", _named(name))


@names_arguments
def load(name: str) -> Node:
    """Another matrix (…, m, n): a residual or a gate."""
    return Leaf("load", _named(name))


def relu(x: Node | float) -> Node:
    """The larger of x and 0."""
    return Unary("relu", _node(x))


def gelu(x: Node | float) -> Node:
    """x · Φ(x), with the error function."""
    return Unary("gelu", _node(x))


def gelu_tanh(x: Node | float) -> Node:
    """GELU's tanh approximation."""
    return Unary("gelu_tanh", _node(x))


def silu(x: Node | float) -> Node:
    """x · sigmoid(x)."""
    return Unary("silu", _node(x))


def sigmoid(x: Node | float) -> Node:
    """1 / (1 + exp(-x))."""
    return Unary("sigmoid", _node(x))


def tanh(x: Node | float) -> Node:
    """The hyperbolic tangent."""
    return Unary("tanh", _node(x))


@names_arguments
def clamp(x: Node | float, low: float, high: float) -> Node:
    """x between `low` and `high`."""
    for name, bound in (("low", low), ("high", high)):
        check_number(name, bound)
    if not low <= high:
        raise BadRequest("epilogue", f"clamp between {low} and {high}", "low <= high")
    return Clamp(_node(x), float(low), float(high))


def maximum(x: Node | float, y: Node | float) -> Node:
    """The larger of the two."""
    return Binary("maximum", _node(x), _node(y))


def minimum(x: Node | float, y: Node | float) -> Node:
    """The smaller of the two."""
    return Binary("minimum", _node(x), _node(y))


@names_arguments
def fma(x: Node | float, y: Node | float, z: Node | float) -> Node:
    """x · y + z."""
    return Fma(_node(x), _node(y), _node(z))


@names_arguments
def store(x: Node | float, name: str, dtype: Any = None) -> Node:
    """x, which is also stored as the output `name` (…, m, n) of `dtype` (None for D's)."""
    return Store(_node(x), _named(name), None if dtype is None else check_dtype("dtype", dtype))


@names_arguments
def reduce(x: Node | float, name: str, function: str = "sum", *, over: str) -> Node:
    """x, which is also reduced into the f32 output `name`: (…, n) over "m", (…, m) over "n", (…,) over "mn".

    `function` is sum, max, min, mean or amax (the largest magnitude). Sums are atomic: their last bits may differ from
    run to run.
    """
    are_names = all(type(name) is str for name in (function, over))  # an array compares element by element
    if not are_names or function not in REDUCTIONS or over not in OVER:
        given = f"reduce {shown(function)} over {shown(over)}"
        raise BadRequest("epilogue", given, f"one of {', '.join(REDUCTIONS)} over m, n or mn")
    return Reduce(_node(x), _named(name), function, over)


def amax(x: Node | float, name: str) -> Node:
    """x, with the largest magnitude of all its elements as the output `name` (…,)."""
    return reduce(x, name, "amax", over="mn")


@names_arguments
def quantize(x: Node | float, scale: Node, name: str = "amax") -> Node:
    """x · scale for an fp8 or i8 D, with the largest magnitude of x before scaling as the output `name`.

    A scale for each column (`row`) or each row (`col`) has a magnitude for each; any other has one for all.
    """
    over = {"row": "m", "col": "n"}.get(scale.kind, "mn") if isinstance(scale, Leaf) else "mn"
    return reduce(x, name, "amax", over=over) * scale


@names_arguments
def linear_combination(*, with_source: bool) -> Node:
    """alpha · A · B, plus beta · C with a source."""
    product = scalar("alpha") * accumulator()
    return fma(scalar("beta"), source(), product) if with_source else product


def walk(tree: Node) -> Iterator[Node]:
    """Each distinct node once, inputs before the nodes that read them; nodes that compare equal are one."""
    seen: set[Node] = set()

    def visit(node: Node) -> Iterator[Node]:
        if node in seen:
            return
        for child in node.inputs:
            yield from visit(child)
        if node not in seen:
            seen.add(node)
            yield node

    yield from visit(tree)
