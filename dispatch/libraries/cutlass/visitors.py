"""An epilogue tree in CUTLASS's terms: the visitor type, its arguments, and the words that the arguments are read from.

sm90_gemm.py puts the text into a kernel's source. A tree becomes nested `Sm90EVT`s; a tree in which a node is read
twice becomes a `Sm90TopologicalVisitor`, which evaluates each node once. A tree that CUTLASS cannot build is refused
here, before anything is compiled.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dispatch.errors import BadRequest, Refused
from dispatch.keys import BF16, F8E4M3, F8E5M2, F16, F32, F64, I8, I32, U8, Dtype
from dispatch.libraries.cutlass.evt import Binary, Clamp, Fma, Leaf, Node, Reduce, Store, Unary, walk
from dispatch.refusal import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ELEMENT", "Operand", "Visitors", "Word", "lower", "operands_of"]

ELEMENT: dict[Dtype, str] = {
    F64: "double",
    F32: "float",
    F16: "cutlass::half_t",
    BF16: "cutlass::bfloat16_t",
    F8E4M3: "cutlass::float_e4m3_t",
    F8E5M2: "cutlass::float_e5m2_t",
    I8: "int8_t",
    U8: "uint8_t",
    I32: "int32_t",
}
STRIDE = {"row": "cutlass::layout::RowMajor", "column": "cutlass::layout::ColumnMajor"}
FUNCTION = {
    "relu": "cutlass::epilogue::thread::ReLu",
    "gelu": "cutlass::epilogue::thread::GELU",
    "gelu_tanh": "cutlass::epilogue::thread::GELU_taylor",
    "silu": "Silu",
    "sigmoid": "Sigmoid",
    "tanh": "cutlass::epilogue::thread::Tanh",
    "add": "cutlass::plus",
    "sub": "cutlass::minus",
    "mul": "cutlass::multiplies",
    "maximum": "cudabind::larger",
    "minimum": "cudabind::smaller",
    "clamp": "cutlass::epilogue::thread::Clamp",
    "fma": "cutlass::homogeneous_multiply_add",
    "identity": "cutlass::epilogue::thread::Identity",
}
# Our own functions, for trees in f32: e^-x and the reciprocal are the hardware's approximations, precise to some units
# in the last place for small |x|, and to 1e-5 of the value for |x| = 80. CUTLASS's own functions use an IEEE division,
# with a branch for each element that keeps all others waiting: 16384 x 4096 x 512 with bias, silu and a residual took
# 247 us on an H200 with them, and takes 175 without.
SIGMOID = """\
template <class Array> CUTLASS_HOST_DEVICE Array sigmoid(Array const& x) {
  Array y;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < Array::kElements; ++i) {
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y[i]) : "f"(x[i] * -1.44269504f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y[i]) : "f"(1.f + y[i]));
  }
  return y;
}
template <class Array> struct Sigmoid {
  CUTLASS_HOST_DEVICE Array operator()(Array const& x) const { return sigmoid(x); }
};
template <class Array> struct Silu {
  CUTLASS_HOST_DEVICE Array operator()(Array const& x) const { return cutlass::multiplies<Array>{}(x, sigmoid(x)); }
};"""
# Reductions in registers, across a warp, and in memory, with their initial values.
REDUCTION = {
    "sum": ("cutlass::plus", "cutlass::plus", "cutlass::atomic_add", "0.f"),
    "mean": ("cutlass::plus", "cutlass::plus", "cutlass::atomic_add", "0.f"),
    "max": ("cudabind::larger", "cudabind::larger", "cutlass::atomic_maximum", "cudabind::lowest"),
    "min": ("cudabind::smaller", "cudabind::smaller", "cudabind::atomic_minimum", "cudabind::highest"),
    "amax": ("cudabind::magnitude", "cudabind::larger", "cutlass::atomic_maximum", "0.f"),
}
READ = {"int": "integer", "pointer": "pointer", "number": "number"}
WHOLE = ("add", "sub", "mul", "maximum", "minimum", "fma", "identity")  # operations that are exact in integers
CHEAP = ("accumulator", "source", "constant", "scalar")  # leaves that may be read twice at no cost
MAX_NODES = 40  # of one tree; NVRTC's time grows with their number
ROUND = "cutlass::FloatRoundStyle::round_to_nearest"


@dataclass(frozen=True)
class Operand:
    """An operand that a tree names: how it is used, its dtype, and whether its rows or its columns are dense."""

    kind: str  # scalar, row, col, load, store, reduce
    dtype: Dtype
    order: str = "row"


@dataclass(frozen=True)
class Word:
    """One 64-bit word that a kernel's parameters are made from: its name, and how it is read."""

    name: str
    kind: str = "int"  # or "pointer", or "number", an f32 in the low half


@dataclass
class Visitors:
    """A lowered tree: declarations, the type's name, the expression of its arguments, and the words it reads."""

    declarations: list[str] = field(default_factory=list)
    type: str = ""
    arguments: str = ""
    words: list[Word] = field(default_factory=list)


def operands_of(tree: Node) -> dict[str, str]:
    """The kind of each operand that a tree names, in the tree's order; BadRequest if a name has two kinds."""
    kinds: dict[str, str] = {}
    for node in walk(tree):
        if isinstance(node, Leaf) and node.name:
            kind = node.kind
        elif isinstance(node, (Store, Reduce)):
            kind = "store" if isinstance(node, Store) else "reduce"
        else:
            continue
        name: str = node.name
        if name in kinds and (kind != kinds[name] or kind in ("store", "reduce")):
            raise BadRequest("epilogue", f"the name {name!r} for two operands", "a different name for each operand")
        kinds[name] = kind
    return kinds


def lower(tree: Node, operands: Mapping[str, Operand], d: Dtype, c: Dtype | None) -> Visitors:
    """CUTLASS's visitor for a tree whose root becomes D; Refused if CUTLASS has none."""
    nodes = list(walk(tree))
    _check(nodes, operands, c, d)
    if not isinstance(tree, (Unary, Binary, Clamp, Fma)) or operands_needed(tree):
        tree = Unary("identity", tree)  # the root converts to D's dtype
        nodes.append(tree)
    readers = Counter(child for node in nodes for child in node.inputs)
    shared = any(count > 1 and not (isinstance(node, Leaf) and node.kind in CHEAP) for node, count in readers.items())
    compute = "int32_t" if d is I32 else "float"
    lowering = _Lowering(operands, d, compute)
    if any(isinstance(node, Unary) and node.function in ("silu", "sigmoid") for node in nodes):
        lowering.visitors.declarations.append(SIGMOID)
    names = {node: lowering.declare(node, root=node is tree) for node in nodes}
    visitors = lowering.visitors
    if shared:
        places = {node: place for place, node in enumerate(nodes)}
        edges = ", ".join(f"cute::seq<{', '.join(str(places[i]) for i in node.inputs)}>" for node in nodes)
        types = ", ".join(names[node] for node in nodes)
        visitors.type = f"cutlass::epilogue::fusion::Sm90TopologicalVisitor<{compute}, cute::tuple<{edges}>, {types}>"
        visitors.arguments = _group([(names[node], lowering.arguments[node]) for node in nodes])
    else:
        visitors.type, visitors.arguments = lowering.type_and_arguments(tree, names)
    return visitors


def operands_needed(tree: Node) -> bool:
    """Whether the root is a node without its own output type."""
    return isinstance(tree, (Leaf, Store, Reduce))


def _check(nodes: list[Node], operands: Mapping[str, Operand], c: Dtype | None, d: Dtype) -> None:
    if len(nodes) > MAX_NODES:
        raise Refused(f"needs an epilogue of {MAX_NODES} nodes at most, has {len(nodes)}", Kind.RULE)
    if not any(isinstance(node, Leaf) and node.kind == "accumulator" for node in nodes):
        raise Refused("needs an epilogue that reads the accumulator, has one that does not", Kind.RULE)
    for node in nodes:
        if d is I32:
            _check_whole(node)
        if isinstance(node, Leaf) and node.kind == "source" and c is None:
            raise Refused("needs c for an epilogue that reads the source, has none", Kind.RULE)
        name = getattr(node, "name", "")
        if not name:
            continue
        operand = operands[name]
        if operand.dtype not in ELEMENT or operand.dtype in (F64, U8):
            raise Refused(f"needs {name} of f32, f16, bf16, fp8, i8 or i32, has {operand.dtype}", Kind.RULE)
        number = I32 if d is I32 and operand.kind == "scalar" else F32
        if operand.kind in ("scalar", "reduce") and operand.dtype is not number:
            raise Refused(f"needs {name} of {number}, has {operand.dtype}", Kind.RULE)


def _check_whole(node: Node) -> None:
    """An i32 D is computed in integers, which have no activations and whose reductions CUTLASS does not offer."""
    function = getattr(node, "function", "fma" if isinstance(node, Fma) else "")
    fraction = isinstance(node, Leaf) and not node.value.is_integer()
    if isinstance(node, (Clamp, Reduce)) or fraction or (function and function not in WHOLE):
        raise Refused(f"needs an epilogue of whole numbers for an i32 D, has {node}: use an f32 D", Kind.RULE)


class _Lowering:
    """Names one C++ type for each node, and writes the text of its arguments."""

    def __init__(self, operands: Mapping[str, Operand], d: Dtype, compute: str) -> None:
        self._operands, self._d, self._compute = operands, d, compute
        self.visitors = Visitors()
        self.arguments: dict[Node, str] = {}

    def declare(self, node: Node, *, root: bool) -> str:
        name = f"Node{len(self.arguments)}"
        kind, arguments = self._describe(node, ELEMENT[self._d] if root else self._compute, name)
        self.visitors.declarations.append(f"using {name} = {kind};")
        self.arguments[node] = arguments
        return name

    def type_and_arguments(self, node: Node, names: Mapping[Node, str]) -> tuple[str, str]:
        """The `Sm90EVT` of a node over its inputs, and its arguments."""
        if not node.inputs:
            return names[node], self.arguments[node]
        children = [self.type_and_arguments(child, names) for child in node.inputs]
        types = ", ".join(kind for kind, _ in children)
        kind = f"cutlass::epilogue::fusion::Sm90EVT<{names[node]}, {types}>"
        return kind, _group([*children, (names[node], self.arguments[node])])

    def _word(self, name: str, kind: str = "int") -> str:
        word = Word(name, kind)
        if word not in self.visitors.words:
            self.visitors.words.append(word)
        place = f"{name.replace('.', '_')}_"
        if kind == "number" and self._compute == "int32_t":
            return f"cudabind::whole(in, {place})"
        return f"in.{READ[kind]}({name.replace('.', '_')}_)"

    def _describe(self, node: Node, output: str, name: str) -> tuple[str, str]:
        """The CUTLASS type of a node, and the text of its arguments."""
        if isinstance(node, Leaf):
            return self._leaf(node, name)
        if isinstance(node, Store):
            return self._store(node)
        if isinstance(node, Reduce):
            return self._reduce(node)
        function: str = "clamp" if isinstance(node, Clamp) else getattr(node, "function", "fma")
        kind = f"cutlass::epilogue::fusion::Sm90Compute<{FUNCTION[function]}, {output}, {self._compute}, {ROUND}>"
        return kind, f"{{{node.low!r}f, {node.high!r}f}}" if isinstance(node, Clamp) else "{}"

    def _leaf(self, node: Leaf, name: str) -> tuple[str, str]:
        space = "cutlass::epilogue::fusion::"
        if node.kind == "accumulator":
            return f"{space}Sm90AccFetch", "{}"
        if node.kind == "source":
            return f"{space}Sm90SrcFetch<ElementC>", "{}"
        batched = "cute::Stride<cute::{}, cute::{}, int64_t>"
        if node.kind == "constant":
            return f"{space}Sm90ScalarBroadcast<{self._compute}>", f"{{{{{self._constant(node)}}}, {{nullptr}}, {{}}}}"
        pointer = self._word(f"{node.name}", "pointer")
        if node.kind == "scalar":
            value = self._word(f"{node.name}.value", "number")
            kind = f"{space}Sm90ScalarBroadcast<{self._compute}>"
            return kind, f"{{{{{value}}}, {{({self._compute} const*){pointer}}}, {{}}}}"
        operand = self._operands[node.name]
        element = ELEMENT[operand.dtype]
        batch = self._word(f"{node.name}.batch")
        if node.kind in ("row", "col"):
            broadcast, steps = ("Row", ("_0", "_1")) if node.kind == "row" else ("Col", ("_1", "_0"))
            stride = batched.format(*steps)
            kind = f"{space}Sm90{broadcast}Broadcast<0, Tile, {element}, {self._compute}, {stride}>"
            return kind, f"{{({element} const*){pointer}, {element}(0), {{{{}}, {{}}, {batch}}}}}"
        descriptor = f"{name}Descriptor"
        self.visitors.declarations.append(
            f"using {descriptor} = cutlass::epilogue::collective::detail::AuxLoadDescriptor<"
            f"Descriptor, {STRIDE[operand.order]}, {element}>;"
        )
        kind = (
            f"{space}Sm90AuxLoad<{descriptor}::Stages, {descriptor}::EpilogueTile, {element}, {descriptor}::Stride,"
            f" {descriptor}::SmemLayoutAtom, {descriptor}::CopyOpS2R>"
        )
        stride = f"cudabind::stride<{descriptor}::Stride>({self._word(f'{node.name}.pitch')}, {batch})"
        return kind, f"{{({element} const*){pointer}, {element}(0), {stride}}}"

    def _constant(self, node: Leaf) -> str:
        return f"{node.value!r}f" if self._compute == "float" else str(int(node.value))

    def _store(self, node: Store) -> tuple[str, str]:
        operand = self._operands[node.name]
        element = ELEMENT[operand.dtype]
        descriptor = f"Store{len(self.arguments)}Descriptor"
        self.visitors.declarations.append(
            f"using {descriptor} = cutlass::epilogue::collective::detail::AuxStoreDescriptor<"
            f"Descriptor, {STRIDE[operand.order]}, {element}>;"
        )
        kind = (
            f"cutlass::epilogue::fusion::Sm90AuxStore<{descriptor}::Stages, {descriptor}::EpilogueTile, {element},"
            f" {ROUND}, {descriptor}::Stride, {descriptor}::SmemLayoutAtom, {descriptor}::CopyOpR2S>"
        )
        pitch, batch = self._word(f"{node.name}.pitch"), self._word(f"{node.name}.batch")
        pointer = self._word(node.name, "pointer")
        return kind, f"{{({element}*){pointer}, cudabind::stride<{descriptor}::Stride>({pitch}, {batch})}}"

    def _reduce(self, node: Reduce) -> tuple[str, str]:
        register, shuffle, atomic, identity = REDUCTION[node.function]
        pointer, batch = self._word(node.name, "pointer"), self._word(f"{node.name}.batch")
        space = "cutlass::epilogue::fusion::"
        if node.over == "mn":
            stride = "cute::Stride<cute::_0, cute::_0, int64_t>"
            kind = f"{space}Sm90ScalarReduction<{register}, {atomic}, float, {self._compute}, {ROUND}, {stride}>"
            return kind, f"{{(float*){pointer}, {identity}, {{{{}}, {{}}, {batch}}}}}"
        vector, steps = ("Row", "cute::_0, cute::_1") if node.over == "m" else ("Col", "cute::_1, cute::_0")
        stride = f"cute::Stride<{steps}, int64_t>"
        functions = f"{register}, {shuffle}, {atomic}"
        kind = f"{space}Sm90{vector}Reduction<{functions}, 0, Tile, float, {self._compute}, {ROUND}, {stride}>"
        return kind, f"{{{pointer}, {identity}, {{{{}}, {{}}, {batch}}}}}"


def _group(parts: list[tuple[str, str]]) -> str:
    """The arguments of several visitors together: an aggregate of up to four members, a tuple of more."""
    if len(parts) <= 4:
        return "{" + ", ".join(arguments for _, arguments in parts) + "}"
    return "{" + ", ".join(f"typename {kind}::Arguments{arguments}" for kind, arguments in parts) + "}"
