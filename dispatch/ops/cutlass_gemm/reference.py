"""The host rows of cutlass_gemm, and the float64 reference: the same tree in NumPy, at two precisions.

The table's host rows end here, by `plan`; `reference` is what the tests compare with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.request import Plan
from dispatch.keys import F64, I8, Compute
from dispatch.libraries.cutlass.arithmetic import evaluate, rounded

if TYPE_CHECKING:
    from dispatch.core.request import Operands
    from dispatch.core.row import Row
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor
    from dispatch.ops.cutlass_gemm.request import CutlassGemmRequest

__all__ = ["NumpyCutlassGemm", "plan", "reference"]


def reference(request: CutlassGemmRequest, precision: type = np.float64) -> dict[str, Array]:
    """Every output by name, unrounded; operands of f32 are rounded to TF32 where the request says so."""
    exact = request.a.dtype in (F64, I8)  # float64 holds a sum of i8 products exactly, as integers do
    work = np.float64 if exact else precision
    a: Array = _operand(request, request.a).astype(work)
    b: Array = _operand(request, request.b).astype(work)
    operands = {name: np.asarray(x) for name, x in request.given.items() if name not in request.writes}
    source = None if request.c is None else np.asarray(request.c)
    with np.errstate(all="ignore"):
        accumulator = np.matmul(a, b)
    return evaluate(request.tree, accumulator, operands, source)


def _operand(request: CutlassGemmRequest, tensor: Tensor) -> Array:
    values = np.asarray(tensor)
    if request.compute is not Compute.COMPUTE_32F_FAST_TF32:
        return values
    word = values.view(np.uint32)
    nearest = (word + np.uint32(0xFFF) + ((word >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(values), nearest, word).view(np.float32)


def plan(row: Row) -> Plan:
    """A plan that computes with NumPy."""
    return NumpyCutlassGemm(row, capture_safe=False)


class NumpyCutlassGemm(Plan):
    """The tree over NumPy's product in float32, rounded once on the way out."""

    __slots__ = ()

    def run(self, request: CutlassGemmRequest, outputs: Operands) -> None:
        """Compute a request into its outputs and those made for it."""
        results = reference(request, np.float32)
        targets: dict[str, Any] = {"out": request.out, **request.given, **outputs}
        for name, values in results.items():
            target = np.asarray(targets[name])
            target[...] = rounded(values, targets[name].dtype)
