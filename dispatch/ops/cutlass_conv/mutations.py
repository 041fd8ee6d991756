"""Wrong convolutions by CUTLASS that every case must reject: see `dispatch/testing/mutations.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dispatch.libraries.cutlass.evt import Leaf, Reduce, Store, walk
from dispatch.ops.conv.mutations import mutations
from dispatch.ops.cutlass_conv.reference import reference
from dispatch.ops.cutlass_gemm.mutations import node_out
from dispatch.testing.mutations import changed, lines_out, made

if TYPE_CHECKING:
    from dispatch.device.layout import Array

    Results = dict[str, Array]

__all__ = ["MUTATIONS", "named"]

named = made


def _operand(kind: str) -> Any:
    def wrong(request: Any) -> Results | None:
        """One operand of this kind of the tree with a line left out."""
        for name, value in request.operands:
            if request.kinds.get(name) == kind and name not in request.produced:
                other = changed(value, lines_out(value, -1))
                return reference(
                    replace(request, operands=[(n, other if n == name else v) for n, v in request.operands])
                )
        return None

    return wrong


def one_node(request: Any) -> Results | None:
    """The last node of the tree that computes something left out."""
    if request.epilogue is None:
        return None
    nodes = [node for node in walk(request.epilogue) if not isinstance(node, (Leaf, Store, Reduce))]
    tree = node_out(request.epilogue, nodes[-1])
    kept = {leaf.name for leaf in walk(tree) if isinstance(leaf, Leaf)} | set(request.produced)
    return reference(replace(request, epilogue=tree, operands=[(n, v) for n, v in request.operands if n in kept]))


MUTATIONS = {
    **mutations(reference),
    **{f"a {kind} of the tree off": _operand(kind) for kind in ("row", "col", "load")},
    "a node of the tree left out": one_node,
}
