"""Wrong products that every case must reject: see `dispatch/testing/mutations.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.device.tensor import Tensor
from dispatch.keys import Epilogue, ScaleMode
from dispatch.libraries.cutlass.evt import Clamp, Leaf, Node, Reduce, Store, walk
from dispatch.libraries.cutlass.mutations import node_out
from dispatch.ops.matmul.reference import Results, reference
from dispatch.testing.mutations import changed, host_array, lines_out, neighbour, typical

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.device.layout import Array
    from dispatch.ops.matmul.request import MatmulRequest

    Mutation = Callable[[MatmulRequest], Results | None]

__all__ = ["MUTATIONS", "named"]

FEW = 16  # elements; in a smaller D some mutations may be within the bounds
TILE = 64  # along k: one stage of a CUTLASS kernel in bf16, half of one in fp8


def named(request: MatmulRequest, result: Any) -> dict[str, Tensor]:
    """The outputs by the names of their results."""
    results = list(result) if isinstance(result, tuple) else [result]
    if request.has_tree:
        return dict(zip(("out", *request.form.tree_outputs), results, strict=True))
    names = ["out"]
    names += ["aux"] if request.plain_epilogue.writes_aux else []
    names += ["bgrad"] if request.plain_epilogue.writes_bgrad else []
    outputs = dict(zip(names, results, strict=True))
    for name in ("amax_d", "amax_aux"):
        tensor = getattr(request.scales, name)
        if tensor is not None and (name == "amax_d" or "aux" in outputs):
            outputs[name] = tensor
    return outputs


def plain(mutation: Mutation) -> Mutation:
    """A mutation that does not apply to requests with a tree."""

    def mutated(request: MatmulRequest) -> Results | None:
        return None if request.has_tree else mutation(request)

    mutated.__doc__ = mutation.__doc__
    return mutated


def _values(tensor: Tensor) -> Array:
    return np.asarray(tensor).astype(np.complex128 if tensor.dtype.is_complex else np.float64)


def without_k(request: MatmulRequest, columns: slice | int) -> Results | None:
    """The results without some columns of A."""
    if request.k == 0 or 0 in request.shape:
        return None
    values = np.asarray(request.a).copy()
    values[..., columns] = 0
    return reference(replace(request, a=host_array(request.a, values)))


def one_k(request: MatmulRequest) -> Results | None:
    """One k left out, one whose contribution is typical."""
    if request.k == 0 or 0 in request.shape:
        return None
    lines = (np.abs(_values(tensor)).reshape(-1, request.k) for tensor in (request.a, request.b.mT))
    shares = np.prod([sizes.mean(axis=0) for sizes in lines], axis=0)
    return without_k(request, typical(shares))


def half_of_k(request: MatmulRequest) -> Results | None:
    """A product over half of k."""
    return without_k(request, slice(request.k // 2, None))


def last_tile(request: MatmulRequest) -> Results | None:
    """The last tile of k left out."""
    return without_k(request, slice((request.k - 1) // TILE * TILE, None)) if request.has_tree else None


def alpha(request: MatmulRequest) -> Results | None:
    """alpha 2% too large, or 1 too large for integers. Not for few elements, which may be mostly bias and C."""
    if np.prod(request.shape) < FEW or (request.has_tree and not request.form.is_linear):
        return None
    value = _by_value(request.alpha)
    wrong = value + 1 if request.a.dtype.numpy.kind == "i" else value * 1.02
    return reference(replace(request, alpha=wrong, beta=_by_value(request.beta)))


def alpha_doubled(request: MatmulRequest) -> Results | None:
    """alpha doubled."""
    if request.has_tree:
        return None
    return reference(replace(request, alpha=2 * _by_value(request.alpha), beta=_by_value(request.beta)))


def _by_value(number: Any) -> Any:
    return np.asarray(number).reshape(())[()].item() if isinstance(number, Tensor) else number


def beta(request: MatmulRequest) -> Results | None:
    """C left out."""
    if request.has_tree:
        zeros = None if request.c is None else host_array(request.c, np.zeros(request.c.shape))
        return None if zeros is None else reference(replace(request, c=zeros, out=None))
    if not request.has_beta:
        return None
    return reference(replace(request, alpha=_by_value(request.alpha), beta=0.0))


def source_beside(request: MatmulRequest) -> Results | None:
    """Each row with the C of the neighbouring row."""
    if not request.has_tree or request.c is None:
        return None
    return reference(replace(request, c=changed(request.c, neighbour(request.c, -2))))


def bias(request: MatmulRequest) -> Results | None:
    """The bias left out."""
    if request.bias is None:
        return None
    return reference(replace(request, bias=host_array(request.bias, np.zeros(request.bias.shape))))


def bias_beside(request: MatmulRequest) -> Results | None:
    """Each column with its neighbour's bias."""
    if request.bias is None:
        return None
    return reference(replace(request, bias=host_array(request.bias, np.roll(np.asarray(request.bias), 1, axis=-1))))


def bias_of_first(request: MatmulRequest) -> Results | None:
    """All batches with the first one's bias."""
    if request.bias is None or request.bias.ndim < 2:
        return None
    values = np.asarray(request.bias)
    first = values[(0,) * (values.ndim - 1)]
    return reference(replace(request, bias=host_array(request.bias, np.broadcast_to(first, values.shape))))


@plain
def activation(request: MatmulRequest) -> Results | None:
    """The activation left out. Not for few elements, which may all be where the activation is nearly linear."""
    if not request.plain_epilogue.activation or request.plain_epilogue.is_gradient or np.prod(request.shape) < FEW:
        return None
    plain = Epilogue.BIAS if request.plain_epilogue.adds_bias else Epilogue.NONE
    return {"out": reference(_bare(request, plain))["out"]}


def _bare(request: MatmulRequest, epilogue: Epilogue) -> MatmulRequest:
    """The request with another epilogue, one with neither aux nor bias gradient."""
    scales = replace(request.scales, aux=None, amax_aux=None)
    return replace(request, epilogue=epilogue, aux=None, bgrad=None, scales=scales)


@plain
def gradient(request: MatmulRequest) -> Results | None:
    """The gradient of the activation left out of D."""
    if not request.plain_epilogue.is_gradient:
        return None
    return {"out": reference(_bare(request, Epilogue.NONE))["out"]}


@plain
def aux_of_neighbour(request: MatmulRequest) -> Results | None:
    """One row with the aux of the neighbouring row."""
    if not request.plain_epilogue.is_gradient or request.aux is None or request.m < 2:
        return None
    values = np.asarray(request.aux).copy()
    row = request.m // 2
    values[..., row - 1, :] = values[..., row, :]
    return reference(replace(request, aux=changed(request.aux, values)))


@plain
def aux_of_first(request: MatmulRequest) -> Results | None:
    """All batches with the first one's aux."""
    if not request.plain_epilogue.is_gradient or request.aux is None or not request.batch:
        return None
    values = np.asarray(request.aux)
    first = values[(0,) * len(request.batch)]
    return reference(replace(request, aux=changed(request.aux, np.broadcast_to(first, values.shape))))


@plain
def bgrad_summed(request: MatmulRequest) -> Results | None:
    """A bias gradient summed over the batches."""
    if not request.plain_epilogue.writes_bgrad or not request.batch:
        return None
    right = reference(request)["bgrad"]
    axes = tuple(range(len(request.batch)))
    return {"bgrad": np.broadcast_to(right.sum(axis=axes, keepdims=True), right.shape)}


@plain
def bgrad_short(request: MatmulRequest) -> Results | None:
    """A bias gradient without one of its terms."""
    epilogue = request.plain_epilogue
    if not epilogue.writes_bgrad:
        return None
    if epilogue in (Epilogue.BGRADA, Epilogue.BGRADB):
        terms = _values(request.a) if epilogue is Epilogue.BGRADA else _values(request.b.mT)
        terms = np.broadcast_to(terms, (*request.batch, *terms.shape[-2:]))
    else:
        terms = np.swapaxes(reference(replace(request, scales=type(request.scales)()))["out"], -1, -2)
    if not terms.size:
        return None
    left_out = typical(np.abs(terms).reshape(-1, terms.shape[-1]).mean(axis=0))
    return {"bgrad": reference(request)["bgrad"] - terms[..., left_out]}


def _tree_operand(kind: str) -> Any:
    def wrong(request: MatmulRequest) -> Results | None:
        for name, value in request.operands if request.has_tree else ():
            if request.form.kinds[name] != kind or name in request.form.tree_outputs:
                continue
            if kind == "scalar":
                other: Any = float(np.asarray(value).reshape(())) * 1.05
            else:
                other = changed(value, lines_out(value, -1))
            pairs = [(n, other if n == name else v) for n, v in request.operands]
            return reference(replace(request, operands=pairs))
        return None

    wrong.__doc__ = f"One {kind} of the tree with a line left out, or a scalar 5% too large."
    return wrong


def tree_node(request: MatmulRequest) -> Results | None:
    """The last computing node of the tree left out; what the tree stores and reduces stays."""
    tree = request.epilogue
    if not isinstance(tree, Node):
        return None
    nodes = [node for node in walk(tree) if not isinstance(node, (Leaf, Store, Reduce, Clamp))]
    deep = [n for n in nodes if any(not isinstance(c, Leaf) or c.kind == "accumulator" for c in n.inputs)]
    if not deep:
        return None
    left = node_out(tree, deep[-1])
    remaining = {leaf.name for leaf in walk(left) if isinstance(leaf, Leaf)} | set(request.form.tree_outputs)
    return reference(replace(request, epilogue=left, operands=[(n, v) for n, v in request.operands if n in remaining]))


def _scale(name: str) -> Any:
    @plain
    def left_out(request: MatmulRequest) -> Results | None:
        factor, mode = getattr(request.scales, name), getattr(request.scales, f"{name}_mode", ScaleMode.SCALAR_32F)
        if factor is None or (isinstance(factor, Tensor) and not factor.size):
            return None
        if mode is ScaleMode.SCALAR_32F:
            wrong: Any = 1.0
        else:  # one of many factors doubled
            values = np.asarray(factor).copy()
            values.flat[0] = values.flat[0] * values.dtype.type(2)
            wrong = host_array(factor, values)
        return reference(replace(request, scales=replace(request.scales, **{name: wrong})))

    left_out.__doc__ = f"The factor of {name} left out."
    return left_out


MUTATIONS = {
    "one k left out": one_k,
    "half of k left out": half_of_k,
    "a tile of k left out": last_tile,
    "alpha off": alpha,
    "alpha doubled": alpha_doubled,
    "C left out": beta,
    "C of the row beside": source_beside,
    "bias left out": bias,
    "bias of the column beside": bias_beside,
    "bias of the first batch": bias_of_first,
    "activation left out": activation,
    "gradient of the activation left out": gradient,
    "aux of the row beside": aux_of_neighbour,
    "aux of the first batch": aux_of_first,
    "bgrad summed over batches": bgrad_summed,
    "bgrad with a term left out": bgrad_short,
    **{f"a {kind} of the tree off": _tree_operand(kind) for kind in ("row", "col", "load", "scalar")},
    "a node of the tree left out": tree_node,
    **{f"scale of {name} off": _scale(name) for name in ("a", "b", "c", "d", "aux")},
}
