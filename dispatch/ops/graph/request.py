"""GraphRequest: a drawn graph and the tensors it runs on; made by `builder.py`, run like any other request.

Making one validates it: every operand has the shape, dtype and strides that the drawing says. This file calls nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from cudabind._cached import cached_property
from dispatch.checks import check_kinds, check_type, shown
from dispatch.core.operand_checks import check_writable
from dispatch.core.overlap import overlap
from dispatch.core.request import Argument, NamedArguments, Operands, Request, Signature, Unpacked, Use
from dispatch.device.frameworks.frameworks import adopt
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest
from dispatch.keys import F32
from dispatch.libraries.cudnn.graph import Graph
from dispatch.libraries.cudnn.reference import evaluate as evaluate_graph
from dispatch.unknown_arguments import refuse_operand

if TYPE_CHECKING:
    from typing_extensions import Self

    from dispatch.core.host_plan import Results
    from dispatch.device.device import Device
    from dispatch.keys import Dtype
    from dispatch.libraries.cudnn.graph import Wire

__all__ = ["GraphRequest", "evaluate"]


@dataclass(frozen=True, eq=False)
class GraphRequest(Request):
    """A graph, the unique id of each named operand, and the tensors in that order; outputs may be None.

    `tf32` lets f32 products be computed in TF32; `deterministic` asks for the same bits at every run; `autotune` times
    cuDNN's candidates once and remembers the fastest.
    """

    op: ClassVar[str] = "cudnn_graph"
    unpacked: ClassVar[Unpacked | None] = Unpacked(several=("operands",))  # of the board's call
    advice: ClassVar[str] = "fewer operations: one product or convolution, pointwise modes behind it, a reduction last"
    graph: Graph
    named: tuple[tuple[str, int], ...]
    given: tuple[Tensor | None, ...]
    tf32: bool = False
    deterministic: bool = False
    autotune: bool = False

    def __post_init__(self) -> None:
        adopt(self)
        self._check_kinds()
        written = {wire.uid for wire in self.graph.outputs}
        if not written or not self.graph.nodes:
            raise BadRequest("graph", "no output", "at least one node whose result is written", "call output(…)")
        unnamed = [w.uid for w in (*self.graph.inputs, *self.graph.outputs) if w.uid not in dict(self.named).values()]
        if unnamed:
            raise BadRequest("graph", f"wires {unnamed} without names", "a name for each")
        for (name, uid), tensor in zip(self.named, self.given, strict=True):
            if tensor is None and uid not in written:
                raise BadRequest(name, "nothing", "a tensor", f"pass {name}=…")
            if tensor is not None:
                self._check(name, tensor, self.graph.wire(uid))
        self.device.check(*(tensor for _, tensor, _ in self.tensors()))
        for name, tensor, is_written in self.tensors():
            if tensor.device is not self.device:
                raise BadRequest(name, f"a tensor on {tensor.device!r}", f"one on {self.device!r}")
            if is_written:
                check_writable(name, tensor)
            for other_name, other, _ in self.tensors():
                if is_written and other_name != name and overlap(tensor, other):
                    raise BadRequest(name, f"memory that overlaps {other_name}", "memory of its own")

    def _check_kinds(self) -> None:
        """The fields are what `Graph.request` makes of a drawing."""
        check_type("graph", self.graph, Graph)
        named: Any = self.named
        is_sound = isinstance(named, tuple) and all(isinstance(one, tuple) and len(one) == 2 for one in named)
        if not is_sound or not all(isinstance(name, str) and type(uid) is int for name, uid in named):
            raise BadRequest("named", shown(named), "pairs of a name and the number of a wire")
        known = {wire.uid for wire in (*self.graph.inputs, *self.graph.outputs)}
        if len({name for name, _ in named}) < len(named) or not {uid for _, uid in named} <= known:
            raise BadRequest("named", shown(named), "each wire of the graph's operands once")
        given: Any = self.given
        if not isinstance(given, tuple) or len(given) != len(named):
            raise BadRequest("given", shown(given), f"a tuple of {len(named)} tensors or None, as they are named")
        check_kinds(self)

    def _check(self, name: str, tensor: Any, wire: Wire) -> None:
        if not isinstance(tensor, Tensor):
            raise BadRequest(name, f"a {type(tensor).__name__}", "a dispatch Tensor", "use dev.array(x)")
        steps = zip(tensor.shape, tensor.layout.strides, wire.strides, strict=False)
        if (tensor.shape, tensor.dtype) != (wire.dims, wire.dtype) or any(e > 1 and s != t for e, s, t in steps):
            wanted = f"{wire.dtype}{list(wire.dims)} strides {wire.strides}, as drawn"
            raise BadRequest(name, str(tensor.layout), wanted)
        if tensor.layout.alignment < wire.alignment:
            raise BadRequest(name, f"an address of {tensor.layout.alignment} bytes", f"a multiple of {wire.alignment}")

    # -- the contract of Request ----------------------------------------------------------------------------------
    @property
    def device(self) -> Device:
        first = next(tensor for tensor in self.given if tensor is not None)
        return first.device

    @cached_property
    def places(self) -> dict[int, int]:
        """For the unique id of each operand its place in the arguments."""
        return {uid: place for place, (_, uid) in enumerate(self.named)}

    @property
    def multiplies_f32(self) -> bool:
        """Whether f32 operands go into products, which tensor cores would take as TF32."""
        read = {uid for node in self.graph.nodes if node.kind != "POINTWISE" for _, uid in node.ins}
        return any(wire.dtype is F32 and wire.uid in read for wire in self.graph.inputs)

    @cached_property
    def _written(self) -> dict[str, Wire]:
        outputs = {wire.uid: wire for wire in self.graph.outputs}
        return {name: outputs[uid] for name, uid in self.named if uid in outputs}

    def signature(self) -> Signature:
        return Signature((self.graph.compute,))

    def key(self) -> tuple[Any, ...]:
        return (self.graph, self.named, self.tf32, self.deterministic, self.autotune)

    def arguments(self, outputs: Operands) -> tuple[Argument, ...]:
        tensors = (outputs.get(name, given) for (name, _), given in zip(self.named, self.given, strict=True))
        return tuple(0 if tensor is None else tensor.ptr for tensor in tensors)

    def named_arguments(self) -> NamedArguments:
        return NamedArguments(tuple(name for name, _ in self.named))

    def tensors(self) -> tuple[Use, ...]:
        pairs = zip(self.named, self.given, strict=True)
        return tuple((name, tensor, name in self._written) for (name, _), tensor in pairs if tensor is not None)

    def unallocated(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], Dtype]]:
        here = {name for name, _, _ in self.tensors()}
        return {n: (wire.dims, wire.strides, wire.dtype) for n, wire in self._written.items() if n not in here}

    def result(self, outputs: Operands) -> Any:
        here = {name: tensor for name, tensor, _ in self.tensors()}
        found = tuple(outputs.get(name, here.get(name)) for name in self._written)
        return found[0] if len(found) == 1 else found

    def replace(self, **operands: Tensor) -> Self:
        names = [name for name, _ in self.named]
        for name in operands:
            if name not in names:
                refuse_operand(name, names)
        given = tuple(operands.get(name, old) for name, old in zip(names, self.given, strict=True))
        return replace(self, given=given)

    def __getattr__(self, name: str) -> Tensor | None:
        """An operand by its name."""
        for (own, _), tensor in zip(self.__dict__.get("named", ()), self.__dict__.get("given", ()), strict=False):
            if own == name:
                found: Tensor | None = tensor
                return found
        raise AttributeError(name)

    def describe(self) -> str:
        kinds = [str(dict(node.attributes).get("MODE", node.kind)) for node in self.graph.nodes]
        parts = [f"{name} {tensor.layout}" for name, tensor, _ in self.tensors()]
        return f"cudnn_graph({', '.join(parts)}) {' > '.join(kinds)}"


def evaluate(request: GraphRequest, work: np.dtype[Any]) -> Results:
    """The outputs of a request, by name."""
    feeds = {
        uid: np.asarray(tensor)
        for (name, uid), tensor in zip(request.named, request.given, strict=True)
        if tensor is not None and name not in request._written
    }
    found = evaluate_graph(request.graph, feeds, work.type)
    return {name: found[wire.uid] for name, wire in request._written.items()}
