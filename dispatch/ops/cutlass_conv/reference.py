"""The host rows of CUTLASS's convolutions, and the float64 reference: cuDNN's geometry, then the tree, in NumPy.

The table's host rows end here, by `plan`; `reference` is what the tests compare with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.precision import to_tf32
from dispatch.core.request import Plan
from dispatch.device.tensor import Tensor
from dispatch.keys import Compute
from dispatch.libraries.cudnn import convolve
from dispatch.libraries.cutlass.arithmetic import evaluate
from dispatch.ops.cutlass_gemm.reference import rounded

if TYPE_CHECKING:
    from dispatch.core.request import Operands
    from dispatch.core.row import Row
    from dispatch.device.layout import Array
    from dispatch.ops.cutlass_conv.base import TreedConvRequest

__all__ = ["NumpyCutlassConv", "convolved", "image", "matrix", "plan", "reference", "tree_operands"]


def reference(request: TreedConvRequest, precision: type = np.float64) -> dict[str, Array]:
    """Every output by name, unrounded; in f32, operands are rounded to TF32 where the request says so."""
    operands = []
    for name in request.reads[:2]:
        values: Array = np.asarray(getattr(request, name)).astype(precision)
        tf32 = request.compute is Compute.COMPUTE_32F_FAST_TF32 and precision is np.float32
        operands.append(to_tf32(np.ascontiguousarray(values)) if tf32 else values)
    product = matrix(request, convolved(request, *operands))
    source = None if request.c is None else matrix(request, np.asarray(request.c))
    outputs = evaluate(request.tree, product, tree_operands(request), source)
    return {name: image(request, name, values) for name, values in outputs.items()}


def convolved(request: TreedConvRequest, one: Array, other: Array) -> Array:
    """The convolution, or the gradient, of these values, with its axes as in the request."""
    if request.mode == "fwd":
        return convolve.forward(one, other, request.steps)
    if request.mode == "bwd_data":
        return convolve.backward_data(one, other, request.x_shape, request.steps)
    return convolve.backward_filter(one, other, request.w_shape, request.steps)


def tree_operands(request: TreedConvRequest) -> dict[str, Array]:
    """What the tree reads, as it is shaped for a matrix."""
    found = {}
    for name, given in request.given.items():
        if name in request.produced:
            continue
        values = np.asarray(given.numpy() if isinstance(given, Tensor) else given)
        kind = request.kinds[name]
        found[name] = matrix(request, values) if kind == "load" else values.reshape(-1) if kind == "col" else values
    return found


def matrix(request: TreedConvRequest, values: Array) -> Array:
    """A result as the tree sees it: pixels by channels; filters by taps and channels."""
    return np.moveaxis(values, 1, -1).reshape(request.extents)


def image(request: TreedConvRequest, name: str, values: Array) -> Array:
    """An output of the tree as the request has it."""
    made = request.made()[name]
    if name != "out" and request.kinds[name] == "reduce":
        return values.reshape(made.shape)
    shape = request.result_shape
    return np.moveaxis(values.reshape(shape[0], *shape[2:], shape[1]), -1, 1)


def plan(row: Row) -> Plan:
    """A plan that computes with NumPy."""
    return NumpyCutlassConv(row, capture_safe=False)


class NumpyCutlassConv(Plan):
    """The tree over NumPy's convolution in float32, rounded once on the way out."""

    __slots__ = ()

    def run(self, request: TreedConvRequest, outputs: Operands) -> None:
        """Compute a request into its outputs and those made for it."""
        with np.errstate(all="ignore"):  # as on a GPU, an overflow is a value and no warning
            results = reference(request, np.float32)
            targets: dict[str, Any] = {"out": request.out, **request.given, **outputs}
            for name, values in results.items():
                target = np.asarray(targets[name])
                target[...] = rounded(values, targets[name].dtype)
