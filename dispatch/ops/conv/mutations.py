"""Wrong convolutions that every case must reject: see `dispatch/testing/mutations.py`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.libraries.cutlass.evt import Leaf, Reduce, Store, walk
from dispatch.libraries.cutlass.mutations import node_out
from dispatch.ops.conv.reference import evaluate
from dispatch.ops.conv.request import Activation, ConvFwdRequest
from dispatch.testing.mutations import altered, changed, lines_out, neighbour, of_operand, typical, with_fields

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results

__all__ = ["MUTATIONS"]


def _axis_of_sum(request: Any) -> tuple[str, int]:
    """An operand and an axis along which all products are summed: channels, filters or images."""
    if request.op.endswith("_fwd"):
        return "w", 1
    return ("w", 0) if request.op.endswith("bwd_data") else ("dy", 0)


def channel(request: Any) -> Results | None:
    """One channel, filter or image left out of the sum."""
    name, axis = _axis_of_sum(request)
    return altered(evaluate, request, **{name: lines_out(getattr(request, name), axis)})


def tap(request: Any) -> Results | None:
    """One tap left out; of a filter's gradient, one pixel of the images."""
    name = "w" if "w" in request.reads else request.reads[0]
    values = np.array(getattr(request, name))
    flat = np.abs(values.astype(np.float64)).sum(axis=(0, 1))
    position = np.unravel_index(typical(flat.ravel()), flat.shape)
    index: Any = (slice(None), slice(None), *position)
    values[index] = 0
    return altered(evaluate, request, **{name: values})


def group(request: Any) -> Results | None:
    """Each group with its neighbour's channels."""
    if request.groups < 2:
        return None
    name = request.reads[0]
    values = np.asarray(getattr(request, name))
    return altered(evaluate, request, **{name: np.roll(values, values.shape[1] // request.groups, axis=1)})


def alpha(request: Any) -> float | None:
    """alpha 2% too large; doubled for integers."""
    is_integer = request.dtypes[0].numpy.kind == "i"
    return None if request.epilogue is not None else request.alpha * (2 if is_integer else 1.02)


def added(request: Any) -> Results | None:
    """The addend that beta scales left out."""
    if request.z is not None:
        return altered(evaluate, request, z=np.zeros(request.z.shape))
    has_beta = not request.op.endswith("_fwd") and bool(request.beta)
    return altered(evaluate, request, beta=0.0) if has_beta else None


def activation(request: Any) -> Activation | None:
    """The activation left out."""
    fused = isinstance(request, ConvFwdRequest) and request.activation is not Activation.IDENTITY
    return Activation.IDENTITY if fused else None


def _operand(kind: str) -> Any:
    def wrong(request: Any) -> Results | None:
        """One operand of this kind of the tree with a line left out."""
        for name, value in request.operands:
            if request.kinds.get(name) == kind and name not in request.tree_outputs:
                other = changed(value, lines_out(value, -1))
                return altered(
                    evaluate, request, operands=[(n, other if n == name else v) for n, v in request.operands]
                )
        return None

    return wrong


def one_node(request: Any) -> Results | None:
    """The last node of the tree that computes something left out."""
    if request.epilogue is None:
        return None
    nodes = [node for node in walk(request.epilogue) if not isinstance(node, (Leaf, Store, Reduce))]
    tree = node_out(request.epilogue, nodes[-1])
    names = {leaf.name for leaf in walk(tree) if isinstance(leaf, Leaf)} | set(request.tree_outputs)
    return altered(evaluate, request, epilogue=tree, operands=[(n, v) for n, v in request.operands if n in names])


MUTATIONS = {
    "one channel left out": channel,
    "one tap left out": tap,
    "groups exchanged": group,
    "alpha off": with_fields(evaluate, alpha=alpha),
    "what beta scales left out": added,
    "bias of the channel beside": of_operand(evaluate, "bias", partial(neighbour, axis=0)),
    "bias left out": of_operand(evaluate, "bias", np.zeros_like),
    "activation left out": with_fields(evaluate, activation=activation),
    **{f"a {kind} of the tree off": _operand(kind) for kind in ("row", "col", "load")},
    "a node of the tree left out": one_node,
}
