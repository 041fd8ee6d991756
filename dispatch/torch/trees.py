"""`tree_linear`: a product with an epilogue tree, which one kernel of CUTLASS computes; forward alone."""

from __future__ import annotations

import ast
from dataclasses import fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from dispatch.device.frameworks.torch import THEIRS
from dispatch.errors import BadRequest
from dispatch.keys import Dtype
from dispatch.libraries.cutlass import evt
from dispatch.ops.matmul import matmul as _matmul
from dispatch.torch.shared import autocast, check_tensors, define, dense, lines_at_16, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["tree_linear"]

matmul: Callable[..., Any] = _matmul  # which takes torch's tensors, too
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
NODES = {kind.__name__: kind for kind in (evt.Leaf, evt.Unary, evt.Clamp, evt.Binary, evt.Fma, evt.Store, evt.Reduce)}


def tree_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    tree: evt.Node | Callable[..., evt.Node],
    *,
    out_dtype: torch.dtype | None = None,
    compute: str | None = None,
    **leaves: torch.Tensor | float,
) -> Any:
    """tree(x · weightᵀ, **leaves), in one kernel: gates, scales, residuals, reductions.

        silu_gate = lambda product, bias, gate: evt.silu(product + bias) * gate
        y = tree_linear(x, weight, silu_gate, bias=bias, gate=gate)

    Args:
        x: (…, in); f16 or bf16, f32 with compute="tf32". Trees that an `Epilogue` says take f32 and f64 as well.
        weight: (out, in), of x's dtype.
        tree: a node of `dispatch.evt` that names the leaves, or a function of the product and of a node for each.
        out_dtype: the result's dtype; None for x's.
        compute: see `dispatch.matmul`.
        leaves: what the tree reads: numbers and tensors of one element as `evt.scalar`; (out,) as `evt.row`; (…, 1) as
            `evt.col`; (…, out) as `evt.load`.

    Gives back (…, out), and behind it, as a tuple, what the tree stores (…, out) and reduces: (out,) over "m", x's
    leading axes over "n". Under autocast x and weight are in autocast's dtype. There is no gradient: it is refused with
    BadRequest in the backward. A kernel is compiled at a tree's first call, and kept on disk. Raises BadRequest for
    operands that do not fit, NoRow for what no kernel takes.
    """
    x, weight = autocast(x, weight)
    check_tensors(DTYPES, x=x, weight=weight)
    if x.ndim < 1 or weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise BadRequest("weight", f"shape {tuple(weight.shape)}", f"(out, in), for x {tuple(x.shape)}")
    shape = (*x.shape[:-1], weight.shape[0])
    kinds = {name: _kind(name, leaf, shape) for name, leaf in leaves.items()}
    if not isinstance(tree, evt.Node):
        if not callable(tree):
            raise BadRequest("tree", f"a {type(tree).__name__}", "a node of dispatch.evt, or a function that gives one")
        tree = tree(evt.accumulator(), **{name: getattr(evt, kind)(name) for name, kind in kinds.items()})
        if not isinstance(tree, evt.Node):
            raise BadRequest("tree", f"a function that gives a {type(tree).__name__}", "one that gives a node")
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise BadRequest("out_dtype", repr(out_dtype), "a torch.dtype, or None")
    for name, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor) and leaf.device != x.device:
            raise BadRequest(name, f"a tensor on {leaf.device}", f"one on {x.device}", "x.to(…)")
    given = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    numbers = {name: float(leaf) for name, leaf in leaves.items() if name not in given}
    names = [*(f"{kinds[name]} {name}" for name in given), *(f"number {name}" for name in numbers)]
    tensors = list(given.values())
    found = TREE(x, weight, tensors, list(numbers.values()), names, _serialize(tree), out_dtype or x.dtype, compute)
    return found[0] if len(found) == 1 else tuple(found)


def _kind(name: str, leaf: Any, shape: tuple[int, ...]) -> str:
    """As which leaf of a tree an operand is read."""
    if isinstance(leaf, torch.Tensor):
        given = tuple(leaf.shape)
        kinds = {(): "scalar", (1,): "scalar", (*shape[:-1], 1): "col", shape: "load", shape[-1:]: "row"}
        if given in kinds:
            return kinds[given]
        wanted = f"{shape[-1:]}, {(*shape[:-1], 1)} or {shape}, or one element"
        raise BadRequest(name, f"shape {given}", wanted)
    if isinstance(leaf, bool) or not isinstance(leaf, (int, float)):
        raise BadRequest(name, f"a {type(leaf).__name__}", "a torch.Tensor or a number")
    return "scalar"


# -- a tree as text, which an op can be given ---------------------------------------------------------------------
def _serialize(node: Any) -> str:
    """A tree as a literal of Python: the class of each node and its fields."""
    if isinstance(node, evt.Node):
        return "(" + "".join(f"{_serialize(one)}, " for one in (type(node).__name__, *_fields(node))) + ")"
    return repr(node.name if isinstance(node, Dtype) else node)


def _fields(node: evt.Node) -> tuple[Any, ...]:
    return tuple(getattr(node, field.name) for field in fields(node))


@lru_cache(maxsize=256)
def _parse(text: str) -> evt.Node:
    tree: evt.Node = _node(ast.literal_eval(text))
    return tree


def _node(literal: Any) -> Any:
    if not isinstance(literal, tuple):
        return literal
    kind, *given = literal
    made = [_node(one) for one in given]
    if kind == "Store" and made[2] is not None:
        made[2] = Dtype.of(made[2])
    return NODES[kind](*made)


def _outputs(tree: evt.Node, shape: tuple[Any, ...], dtype: torch.dtype) -> list[tuple[str, tuple[Any, ...], Any]]:
    """Name, shape and dtype of each result, D's first."""
    found: list[tuple[str, tuple[Any, ...], Any]] = [("out", shape, dtype)]
    for node in evt.walk(tree):
        if isinstance(node, evt.Store):
            found.append((node.name, shape, dtype if node.dtype is None else THEIRS[node.dtype]))
        elif isinstance(node, evt.Reduce):
            over: dict[str, tuple[Any, ...]] = {"m": shape[-1:], "n": shape[:-1], "mn": ()}
            found.append((node.name, over[node.over], torch.float32))
    return found


def _forward(
    x: Any,
    weight: Any,
    tensors: list[Any],
    numbers: list[float],
    names: list[str],
    text: str,
    dtype: Any,
    compute: str | None,
) -> list[Any]:
    operands: dict[str, Any] = {}
    for name, leaf in zip(names, [*tensors, *numbers], strict=True):
        kind, _, own = name.partition(" ")
        if kind == "load":
            leaf = lines_at_16(rows_of(leaf))  # noqa: PLW2901
        elif kind != "number":
            leaf = dense(leaf.reshape(-1))  # noqa: PLW2901
        operands[own] = leaf
    tree, shape = _parse(text), (*x.shape[:-1], weight.shape[0])
    b = lines_at_16(rows_of(weight)).t()
    literal = str(dtype).removeprefix("torch.")
    results = matmul(lines_at_16(rows_of(x)), b, epilogue=tree, operands=operands, out_dtype=literal, compute=compute)
    made = results if isinstance(results, tuple) else (results,)
    wanted = _outputs(tree, shape, dtype)
    return [one.reshape(own).contiguous() for one, (_, own, _) in zip(made, wanted, strict=True)]


def _forward_fake(
    x: Any,
    weight: Any,
    _tensors: list[Any],
    _numbers: list[float],
    _names: list[str],
    text: str,
    dtype: Any,
    _compute: str | None,
) -> list[Any]:
    shape = (*x.shape[:-1], weight.shape[0])
    return [x.new_empty(own, dtype=kind) for _, own, kind in _outputs(_parse(text), shape, dtype)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Nothing is kept: there is no gradient."""


def _backward(_ctx: Any, *_: Any) -> Any:
    hint = "torch.no_grad(), or dispatch.torch.linear and torch's own functions behind it"
    raise BadRequest("tree_linear", "a backward through it", "no gradient: a tree is computed forward alone", hint)


TREE = define(
    "tree_linear",
    "(Tensor x, Tensor weight, Tensor[] tensors, float[] numbers, str[] names, str tree, ScalarType dtype, "
    "str? compute) -> Tensor[]",
    _forward,
    _forward_fake,
    _save,
    _backward,
)
