"""The results of an epilogue tree in NumPy, in any precision: the reference of every tree, and the host's rows.

`evaluate` takes the accumulator and the operands by name, and returns D and all outputs of the tree. It follows the
tree node by node and rounds nothing: the caller rounds the results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dispatch.keys import F8E4M3, F8E5M2, FP8
from dispatch.libraries.cutlass.evt import Binary, Clamp, Fma, Leaf, Node, Reduce, Store, Unary, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dispatch.device.layout import Array
    from dispatch.keys import Dtype

__all__ = ["evaluate", "rounded"]

LARGEST = {F8E4M3: 448.0, F8E5M2: 57344.0}


def evaluate(tree: Node, accumulator: Array, operands: Mapping[str, Array], source: Array | None) -> dict[str, Array]:
    """D as "out", and each stored or reduced output by its name; all in the accumulator's dtype.

    `accumulator` is (…, m, n); rows are (…, n), cols (…, m), scalars of one element.
    """
    with np.errstate(all="ignore"):  # as on a GPU, an overflow gives a value and no warning
        return _evaluate(tree, accumulator, operands, source)


def _evaluate(tree: Node, accumulator: Array, operands: Mapping[str, Array], source: Array | None) -> dict[str, Array]:
    values: dict[Node, Array] = {}
    outputs: dict[str, Array] = {}
    for node in walk(tree):
        inputs = [values[child] for child in node.inputs]
        if isinstance(node, Leaf):
            values[node] = _leaf(node, accumulator, operands, source)
        elif isinstance(node, (Store, Reduce)):
            values[node] = inputs[0]
            matrix = np.broadcast_to(inputs[0], accumulator.shape)
            outputs[node.name] = matrix if isinstance(node, Store) else REDUCE[node.function](matrix, AXES[node.over])
        else:
            values[node] = _compute(node, inputs)
    return {"out": np.broadcast_to(values[tree], accumulator.shape), **outputs}


def _leaf(node: Leaf, accumulator: Array, operands: Mapping[str, Array], source: Array | None) -> Array:
    if node.kind == "accumulator":
        return accumulator
    if node.kind == "constant":
        return np.asarray(node.value, accumulator.dtype)
    if node.kind == "source":
        if source is None:
            raise KeyError("c")
        return source.astype(accumulator.dtype)
    operand = operands[node.name].astype(accumulator.dtype)
    if node.kind == "scalar":
        return operand.reshape(())
    return operand[..., None, :] if node.kind == "row" else operand[..., :, None] if node.kind == "col" else operand


def _compute(node: Node, inputs: list[Array]) -> Array:
    if isinstance(node, Clamp):
        return np.clip(inputs[0], node.low, node.high)
    if isinstance(node, Fma):
        return np.asarray(inputs[0] * inputs[1] + inputs[2])
    if isinstance(node, (Unary, Binary)):
        return np.asarray(FUNCTIONS[node.function](*inputs))
    raise TypeError(f"{type(node).__name__} is not a node of an epilogue tree")


def _sigmoid(x: Array) -> Array:
    # 1 / (1 + exp(-x)) overflows for large negative x; the formula with tanh does not.
    return np.asarray(0.5 * (1 + np.tanh(0.5 * x)))


def _erf(x: Array) -> Array:
    from math import erf

    return np.asarray(np.vectorize(erf, otypes=[np.float64])(x)).astype(x.dtype)


def _gelu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + _erf(x / np.sqrt(2.0))))


def _gelu_tanh(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))


FUNCTIONS: dict[str, Callable[..., Array]] = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": lambda x: np.asarray(x * _sigmoid(x)),
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
}

AXES = {"m": -2, "n": -1, "mn": (-2, -1)}
REDUCE: dict[str, Callable[..., Array]] = {
    "sum": lambda x, axis: np.asarray(x.sum(axis=axis)),
    "mean": lambda x, axis: np.asarray(x.mean(axis=axis)),
    "max": lambda x, axis: np.asarray(x.max(axis=axis)),
    "min": lambda x, axis: np.asarray(x.min(axis=axis)),
    "amax": lambda x, axis: np.asarray(np.abs(x).max(axis=axis)),
}


def rounded(values: Array, dtype: Dtype) -> Array:
    """Round to an output's dtype as the GPU does: to nearest, and to the largest finite fp8 or i8 beyond its range."""
    if dtype in FP8:
        largest = LARGEST[dtype]
        values = np.where(np.isnan(values), values, np.clip(values, -largest, largest))
    elif dtype.numpy.kind == "i":
        limits = np.iinfo(dtype.numpy)
        values = np.clip(np.rint(values), limits.min, limits.max)
    with np.errstate(all="ignore"):  # on overflow, infinity as on the GPU
        return values.astype(dtype.numpy)
