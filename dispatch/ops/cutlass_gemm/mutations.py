"""Wrong products through epilogue trees that every case must reject: see `dispatch/testing/mutations.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.libraries.cutlass.evt import Clamp, Leaf, Reduce, Store, walk
from dispatch.libraries.cutlass.mutations import node_out, typical_k
from dispatch.ops.cutlass_gemm.reference import reference
from dispatch.testing.mutations import changed, lines_out, neighbour

if TYPE_CHECKING:
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor
    from dispatch.ops.cutlass_gemm.request import CutlassGemmRequest

    Results = dict[str, Array]

__all__ = ["MUTATIONS", "named"]

TILE = 64  # of k: what a stage of a kernel holds of bf16, and half of what it does of fp8


def named(request: CutlassGemmRequest, result: Any) -> dict[str, Tensor]:
    """The outputs by the names of their results."""
    given = list(result) if isinstance(result, tuple) else [result]
    return dict(zip(("out", *request.writes), given, strict=True))


def _without(request: CutlassGemmRequest, columns: Any) -> Results:
    values = np.asarray(request.a).copy()
    values[..., columns] = 0
    return reference(replace(request, a=changed(request.a, values)))


def one_k(request: CutlassGemmRequest) -> Results | None:
    """One k left out."""
    return _without(request, typical_k(np.asarray(request.a), np.asarray(request.b)))


def one_tile(request: CutlassGemmRequest) -> Results | None:
    """The last tile of k left out."""
    return _without(request, slice((request.k - 1) // TILE * TILE, None))


def half_of_k(request: CutlassGemmRequest) -> Results | None:
    """A product over half of k."""
    return _without(request, slice(request.k // 2, None))


def alpha(request: CutlassGemmRequest) -> Results | None:
    """alpha 2% too large; of whole numbers, one more."""
    if request.epilogue is not None or np.prod(request.shape) < 16:
        return None
    value = float(np.asarray(request.alpha).reshape(()))
    return reference(replace(request, alpha=value + 1 if request.a.dtype.numpy.kind == "i" else value * 1.02))


def source(request: CutlassGemmRequest) -> Results | None:
    """C left out."""
    return None if request.c is None else reference(replace(request, c=changed(request.c, np.zeros(request.c.shape))))


def source_beside(request: CutlassGemmRequest) -> Results | None:
    """C of the row beside."""
    return None if request.c is None else reference(replace(request, c=changed(request.c, neighbour(request.c, -2))))


def _operand(kind: str) -> Any:
    def wrong(request: Any) -> Results | None:
        """One operand of this kind of the tree with a line left out, or a scalar 5% too large."""
        for name, value in request.operands:
            if request.kinds[name] != kind or name in request.writes:
                continue
            if kind == "scalar":
                other: Any = float(np.asarray(value).reshape(())) * 1.05
            else:
                other = changed(value, lines_out(value, -1))
            pairs = [(n, other if n == name else v) for n, v in request.operands]
            return reference(replace(request, operands=pairs))
        return None

    return wrong


def one_node(request: Any) -> Results | None:
    """The last node of the tree that computes something left out, and all that it stores and reduces as it is."""
    if request.epilogue is None:
        return None
    nodes = [node for node in walk(request.epilogue) if not isinstance(node, (Leaf, Store, Reduce, Clamp))]
    deep = [n for n in nodes if any(not isinstance(c, Leaf) or c.kind == "accumulator" for c in n.inputs)]
    if not deep:
        return None
    pairs = list(request.operands)
    tree = node_out(request.epilogue, deep[-1])
    kept = {leaf.name for leaf in walk(tree) if isinstance(leaf, Leaf)} | set(request.writes)
    return reference(replace(request, epilogue=tree, operands=[(n, v) for n, v in pairs if n in kept]))


MUTATIONS = {
    "one k left out": one_k,
    "a tile of k left out": one_tile,
    "half of k left out": half_of_k,
    "alpha off": alpha,
    "C left out": source,
    "C of the row beside": source_beside,
    **{f"a {kind} of the tree off": _operand(kind) for kind in ("row", "col", "load", "scalar")},
    "a node of the tree left out": one_node,
}
