"""`tree_linear`: a product with an epilogue tree, computed by one CUTLASS kernel; it has no gradient."""

from __future__ import annotations

import ast
from dataclasses import fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from dispatch.device.frameworks.torch import THEIRS
from dispatch.errors import BadRequest, shown
from dispatch.keys import Dtype
from dispatch.libraries.cutlass import evt
from dispatch.ops.matmul import matmul as _matmul
from dispatch.torch.shared import autocast, check_tensors, define, dense, rows_at_16, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["tree_linear"]

matmul: Callable[..., Any] = _matmul  # it accepts torch tensors, too
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
        x: (…, in); f16 or bf16, f32 with compute="tf32". Trees that are equivalent to an `Epilogue` also accept f32
            and f64.
        weight: (out, in), of x's dtype.
        tree: a node of `dispatch.evt` that refers to the leaves by name, or a function of the product and of one node
            per leaf.
        out_dtype: the result's dtype; None for x's.
        compute: see `dispatch.matmul`.
        leaves: the operands of the tree: numbers and tensors of one element become `evt.scalar`; (out,) becomes
            `evt.row`; (…, 1) becomes `evt.col`; (…, out) becomes `evt.load`.

    Returns (…, out). If the tree stores or reduces, returns a tuple of that result, the stored tensors (…, out) and the
    reductions: (out,) over "m", x's leading axes over "n". Under autocast x and weight are cast to autocast's dtype.
    There is no gradient: the backward pass raises BadRequest. A tree's kernel is compiled at its first call and cached
    on disk. Raises BadRequest for invalid operands, NoRow if no kernel supports them.
    """
    x, weight = autocast(x, weight)
    check_tensors(DTYPES, x=x, weight=weight)
    if x.ndim < 1 or weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise BadRequest("weight", f"shape {tuple(weight.shape)}", f"(out, in), for x {tuple(x.shape)}")
    shape = (*x.shape[:-1], weight.shape[0])
    kinds = {name: _kind(name, leaf, shape) for name, leaf in leaves.items()}
    if not isinstance(tree, evt.Node):
        if not callable(tree):
            raise BadRequest(
                "tree", f"a {type(tree).__name__}", "a node of dispatch.evt, or a function that returns one"
            )
        tree = tree(evt.accumulator(), **{name: getattr(evt, kind)(name) for name, kind in kinds.items()})
        if not isinstance(tree, evt.Node):
            raise BadRequest("tree", f"a function that returns a {type(tree).__name__}", "one that returns a node")
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise BadRequest("out_dtype", shown(out_dtype), "a torch.dtype, or None")
    for name, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor) and leaf.device != x.device:
            raise BadRequest(name, f"a tensor on {leaf.device}", f"one on {x.device}", "x.to(…)")
    tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    numbers = {name: float(leaf) for name, leaf in leaves.items() if name not in tensors}
    names = [*(f"{kinds[name]} {name}" for name in tensors), *(f"number {name}" for name in numbers)]
    operands = (x, weight, list(tensors.values()), list(numbers.values()))
    results = TREE(*operands, names, _serialize(tree), out_dtype or x.dtype, compute)
    return results[0] if len(results) == 1 else tuple(results)


def _kind(name: str, leaf: Any, shape: tuple[int, ...]) -> str:
    """The kind of leaf for an operand, by its shape."""
    if isinstance(leaf, torch.Tensor):
        leaf_shape = tuple(leaf.shape)
        kinds = {(): "scalar", (1,): "scalar", (*shape[:-1], 1): "col", shape: "load", shape[-1:]: "row"}
        if leaf_shape in kinds:
            return kinds[leaf_shape]
        expected = f"{shape[-1:]}, {(*shape[:-1], 1)} or {shape}, or one element"
        raise BadRequest(name, f"shape {leaf_shape}", expected)
    if isinstance(leaf, bool) or not isinstance(leaf, (int, float)):
        raise BadRequest(name, f"a {type(leaf).__name__}", "a torch.Tensor or a number")
    return "scalar"


# -- a tree as text, which can be an op's argument -----------------------------------------------------------------
def _serialize(node: Any) -> str:
    """A tree as a Python literal: the class name and the fields of each node."""
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
    kind, *literals = literal
    values = [_node(one) for one in literals]
    if kind == "Store" and values[2] is not None:
        values[2] = Dtype.of(values[2])
    return NODES[kind](*values)


def _outputs(tree: evt.Node, shape: tuple[Any, ...], dtype: torch.dtype) -> list[tuple[str, tuple[Any, ...], Any]]:
    """Name, shape and dtype of each result; D comes first."""
    outputs: list[tuple[str, tuple[Any, ...], Any]] = [("out", shape, dtype)]
    for node in evt.walk(tree):
        if isinstance(node, evt.Store):
            outputs.append((node.name, shape, dtype if node.dtype is None else THEIRS[node.dtype]))
        elif isinstance(node, evt.Reduce):
            over: dict[str, tuple[Any, ...]] = {"m": shape[-1:], "n": shape[:-1], "mn": ()}
            outputs.append((node.name, over[node.over], torch.float32))
    return outputs


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
        kind, _, leaf_name = name.partition(" ")
        if kind == "load":
            leaf = rows_at_16(rows_of(leaf))  # noqa: PLW2901
        elif kind != "number":
            leaf = dense(leaf.reshape(-1))  # noqa: PLW2901
        operands[leaf_name] = leaf
    tree, shape = _parse(text), (*x.shape[:-1], weight.shape[0])
    b = rows_at_16(rows_of(weight)).t()
    literal = str(dtype).removeprefix("torch.")
    results = matmul(rows_at_16(rows_of(x)), b, epilogue=tree, operands=operands, out_dtype=literal, compute=compute)
    tensors_out = results if isinstance(results, tuple) else (results,)
    outputs = _outputs(tree, shape, dtype)
    return [t.reshape(extents).contiguous() for t, (_, extents, _) in zip(tensors_out, outputs, strict=True)]


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
    return [x.new_empty(extents, dtype=kind) for _, extents, kind in _outputs(_parse(text), shape, dtype)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Nothing is saved: there is no gradient."""


def _backward(_ctx: Any, *_: Any) -> Any:
    hint = "torch.no_grad(), or dispatch.torch.linear followed by torch's own functions"
    raise BadRequest("tree_linear", "a backward pass through it", "no backward pass: a tree has no gradient", hint)


TREE = define(
    "tree_linear",
    "(Tensor x, Tensor weight, Tensor[] tensors, float[] numbers, str[] names, str tree, ScalarType dtype, "
    "str? compute) -> Tensor[]",
    _forward,
    _forward_fake,
    _save,
    _backward,
)
