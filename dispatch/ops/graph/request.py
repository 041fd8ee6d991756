"""GraphRequest: a graph and the tensors that it runs on; made by `builder.py`, run like any other request.

It is validated when it is made: every operand has the shape, dtype and strides of the graph. This file calls no
library.
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

    `tf32` allows TF32 for f32 products; `deterministic` asks for the same bits in every run; `autotune` times cuDNN's
    candidates once and remembers the fastest.
    """

    op: ClassVar[str] = "cudnn_graph"
    unpacked: ClassVar[Unpacked | None] = Unpacked(several=("operands",))  # the argument of Graph.__call__
    advice: ClassVar[str] = (
        "use fewer operations: one product or convolution, then pointwise modes, and a reduction last"
    )
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
        """Check that the fields are what `Graph.request` passes."""
        check_type("graph", self.graph, Graph)
        named: Any = self.named
        is_sound = isinstance(named, tuple) and all(isinstance(one, tuple) and len(one) == 2 for one in named)
        if not is_sound or not all(isinstance(name, str) and type(uid) is int for name, uid in named):
            raise BadRequest("named", shown(named), "pairs of a name and the number of a wire")
        uids = {wire.uid for wire in (*self.graph.inputs, *self.graph.outputs)}
        if len({name for name, _ in named}) < len(named) or not {uid for _, uid in named} <= uids:
            raise BadRequest("named", shown(named), "each wire of the graph's operands once")
        tensors: Any = self.given
        if not isinstance(tensors, tuple) or len(tensors) != len(named):
            raise BadRequest(
                "given", shown(tensors), f"a tuple of {len(named)} tensors or None, in the order of the names"
            )
        check_kinds(self)

    def _check(self, name: str, tensor: Any, wire: Wire) -> None:
        if not isinstance(tensor, Tensor):
            raise BadRequest(name, f"a {type(tensor).__name__}", "a dispatch Tensor", "use dev.array(x)")
        axes = zip(tensor.shape, tensor.layout.strides, wire.strides, strict=False)
        if (tensor.shape, tensor.dtype) != (wire.dims, wire.dtype) or any(e > 1 and s != t for e, s, t in axes):
            wanted = f"{wire.dtype}{list(wire.dims)} strides {wire.strides}, as in the graph"
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
        """The index of each operand among the arguments, by its unique id."""
        return {uid: index for index, (_, uid) in enumerate(self.named)}

    @property
    def multiplies_f32(self) -> bool:
        """Whether products have f32 operands, which tensor cores would round to TF32."""
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
        tensors = (outputs.get(name, operand) for (name, _), operand in zip(self.named, self.given, strict=True))
        return tuple(0 if tensor is None else tensor.ptr for tensor in tensors)

    def named_arguments(self) -> NamedArguments:
        return NamedArguments(tuple(name for name, _ in self.named))

    def tensors(self) -> tuple[Use, ...]:
        pairs = zip(self.named, self.given, strict=True)
        return tuple((name, tensor, name in self._written) for (name, _), tensor in pairs if tensor is not None)

    def unallocated(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], Dtype]]:
        given_names = {name for name, _, _ in self.tensors()}
        return {n: (wire.dims, wire.strides, wire.dtype) for n, wire in self._written.items() if n not in given_names}

    def result(self, outputs: Operands) -> Any:
        tensors = {name: tensor for name, tensor, _ in self.tensors()}
        results = tuple(outputs.get(name, tensors.get(name)) for name in self._written)
        return results[0] if len(results) == 1 else results

    def replace(self, **operands: Tensor) -> Self:
        names = [name for name, _ in self.named]
        for name in operands:
            if name not in names:
                refuse_operand(name, names)
        tensors = tuple(operands.get(name, old) for name, old in zip(names, self.given, strict=True))
        return replace(self, given=tensors)

    def __getattr__(self, name: str) -> Tensor | None:
        """An operand by its name."""
        for (field_name, _), tensor in zip(
            self.__dict__.get("named", ()), self.__dict__.get("given", ()), strict=False
        ):
            if field_name == name:
                operand: Tensor | None = tensor
                return operand
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
    results = evaluate_graph(request.graph, feeds, work.type)
    return {name: results[wire.uid] for name, wire in request._written.items()}
