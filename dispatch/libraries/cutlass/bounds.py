"""The allowed errors of a kernel's epilogue: error bounds that propagate through a tree, node by node.

cases.py starts with the product's own error. Bounds are for the magnitude of errors, element by element, and hold for
any order of summation. This file does arithmetic on arrays, and knows no device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dispatch.keys import F64, FP8, I8, Compute, Dtype
from dispatch.libraries.cutlass.arithmetic import evaluate
from dispatch.libraries.cutlass.evt import Binary, Clamp, Fma, Leaf, Node, Reduce, Store, Unary, walk
from dispatch.testing.roundoff import stored as stored_in
from dispatch.testing.roundoff import tf32_error
from dispatch.testing.tensor_cores import CUT_OFF

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dispatch.device.layout import Array

__all__ = ["SUMS", "errors_of", "product_error", "stored"]

SUMS = {True: 2.0**-52, False: 2.0**-23}  # of f64, and of all other dtypes

UNIT = 2.0**-23  # of f32, in which trees are computed: a whole unit, because the GPU may not fuse products
# The steepest slope of each function, and what the GPU's approximation adds: absolute, and as a share of |x|.
# The error of tanh.approx is 2^-10.99; sigmoid, silu and the tanh form of gelu use it or ex2.approx.
FUNCTIONS = {
    "relu": (1.0, 0.0, 0.0),
    "gelu": (1.13, 1e-6, 2e-6),
    "gelu_tanh": (1.13, 1e-6, 1e-3),
    "silu": (1.1, 1e-6, 1e-3),
    "sigmoid": (0.25, 1e-3, 0.0),
    "tanh": (1.0, 1e-3, 0.0),
    "identity": (1.0, 0.0, 0.0),
}


def product_error(a: Array, b: Array, dtype: Dtype, compute: Compute | None, *, on_host: bool) -> Array:
    """The allowed error of A · B: rounding errors grow like √k, and TF32's operands and fp8's sums are truncated."""
    if dtype is I8:
        return np.zeros(())
    size = np.abs(a) @ np.abs(b)
    error = (8 + 4 * np.sqrt(a.shape[-1])) * SUMS[dtype is F64] * size
    if compute is Compute.COMPUTE_32F_FAST_TF32:
        error = error + tf32_error(size, a @ b, np.sqrt(a**2 @ b**2))
    if dtype in FP8 and not on_host:
        error = error + CUT_OFF.product(a, b, np.dtype(np.float64))
    return np.asarray(error)


def errors_of(
    tree: Node,
    accumulator: Array,
    error: Array,
    operands: Mapping[str, Array],
    source: Array | None,
    unit: float = UNIT,
) -> dict[str, Array]:
    """The bound of each output by name, before it is rounded to its dtype.

    `error` is the accumulator's own; `unit` is that of the precision in which the tree is computed.
    """
    values: dict[Node, Array] = {}
    errors: dict[Node, Array] = {}
    outputs: dict[str, Array] = {}
    for node in walk(tree):
        values[node] = _value(node, accumulator, operands, source)
        inputs = [(values[child], errors[child]) for child in node.inputs]
        if isinstance(node, Leaf):
            errors[node] = error if node.kind == "accumulator" else np.zeros(())
        elif isinstance(node, (Store, Reduce)):
            errors[node] = inputs[0][1]
            outputs[node.name] = _output(node, *(np.broadcast_to(part, accumulator.shape) for part in inputs[0]))
        else:
            errors[node] = _step(node, inputs, unit) + unit * np.abs(values[node])
    return {"out": np.broadcast_to(errors[tree], accumulator.shape), **outputs}


def _value(node: Node, accumulator: Array, operands: Mapping[str, Array], source: Array | None) -> Array:
    return evaluate(node, accumulator, operands, source)["out"]


def _step(node: Node, inputs: list[tuple[Array, Array]], unit: float) -> Array:
    """The error of a node's result from its inputs' errors."""
    (x, ex), *rest = inputs
    if isinstance(node, Unary):
        slope, absolute, share = FUNCTIONS[node.function]
        return np.asarray(slope * ex + absolute + share * np.abs(x))
    if isinstance(node, Clamp):
        return ex
    y, ey = rest[0]
    product = np.abs(x) * ey + np.abs(y) * ex + ex * ey
    if isinstance(node, Fma):
        z, ez = rest[1]
        return np.asarray(product + ez + unit * (np.abs(x * y) + np.abs(z)))
    if isinstance(node, Binary) and node.function == "mul":
        return np.asarray(product)
    return np.asarray(np.maximum(ex, ey) if isinstance(node, Binary) and node.function[0] == "m" else ex + ey)


def _output(node: Node, values: Array, errors: Array) -> Array:
    """The bound of a stored matrix, or of a reduction: sums grow like the root of their length, others pick one."""
    if not isinstance(node, Reduce):
        return errors
    axis: tuple[int, ...] = {"m": (-2,), "n": (-1,), "mn": (-2, -1)}[node.over]
    if node.function not in ("sum", "mean"):
        return np.asarray(errors.max(axis=axis))
    count = float(np.prod([values.shape[a] for a in axis]))
    # The errors of the terms are independent, except for a common part, which the error of their sum contains.
    together = np.sqrt((errors * errors).sum(axis=axis))
    total = together + (8 + 4 * np.sqrt(count)) * UNIT * np.abs(values).sum(axis=axis)
    return np.asarray(total / count if node.function == "mean" else total)


def stored(error: Array, values: Array, dtype: Dtype) -> Array:
    """The bound after rounding to a dtype, or to the nearest value that it can represent."""
    if dtype.numpy.kind == "i":
        return np.asarray(
            error + 0.5 + np.maximum(np.abs(values) - np.iinfo(dtype.numpy).max, 0) + 1e-6 * np.abs(values)
        )
    return stored_in(error, values, dtype)
