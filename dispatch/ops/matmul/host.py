"""The plan of a matmul request on the host: the formulas of reference.py in the compute precision, rounded once.

`plan` serves the table's host rows; the host's executor runs it. It reads operands in place, with any strides, and
never uses a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from dispatch.core.host_plan import store
from dispatch.core.precision import Precision, _by_parts, to_tf32
from dispatch.core.request import Plan
from dispatch.keys import Compute, member
from dispatch.ops.matmul.reference import evaluate, evaluate_tree

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dispatch.core.request import Operands
    from dispatch.core.row import Row
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor
    from dispatch.ops.matmul.request import MatmulRequest

__all__ = ["NumpyMatmul", "NumpyTreePlan", "plan"]


def to_bf16(values: Array) -> Array:
    """To the nearest bf16."""
    if values.dtype.kind == "c":
        return _by_parts(values, to_bf16)
    return values.astype(ml_dtypes.bfloat16).astype(values.dtype)


def to_f16(values: Array) -> Array:
    """To the nearest f16; infinity beyond its range."""
    if values.dtype.kind == "c":
        return _by_parts(values, to_f16)
    return values.astype(np.float16).astype(values.dtype)


PRECISION = {
    Compute.COMPUTE_16F: Precision(np.float32, sums=to_f16),
    Compute.COMPUTE_32F: Precision(np.float32),
    Compute.COMPUTE_64F: Precision(np.float64),
    Compute.COMPUTE_32I: Precision(),
    Compute.COMPUTE_32F_FAST_16F: Precision(np.float32, operand=to_f16),
    Compute.COMPUTE_32F_FAST_16BF: Precision(np.float32, operand=to_bf16),
    Compute.COMPUTE_32F_FAST_TF32: Precision(np.float32, operand=to_tf32),
    Compute.COMPUTE_32F_EMULATED_16BFX9: Precision(np.float32),
    Compute.COMPUTE_64F_EMULATED_FIXEDPOINT: Precision(np.float64),
}


class NumpyMatmul(Plan):
    """A product on the host. It runs requests, not addresses, because NumPy needs the layouts."""

    __slots__ = ("precision",)

    def __init__(self, precision: Precision, row: Row) -> None:
        super().__init__(row, capture_safe=False)
        self.precision = precision

    def run(self, request: MatmulRequest, outputs: Operands) -> None:
        """Compute a request into its outputs; `outputs` holds those that were allocated for it."""
        results = evaluate(request, self.precision)
        for name, tensor in _targets(request, outputs):
            store(results[name], tensor)


def plan(request: MatmulRequest, executor: Any, row: Row) -> NumpyMatmul:
    """The plan of a request on the host, in the request's compute type, else in the row's."""
    del executor  # NumPy needs no handle, no stream and no workspace
    return NumpyMatmul(PRECISION[member(request.compute) or row.compute or Compute.COMPUTE_32F], row)


class NumpyTreePlan(Plan):
    """An epilogue tree over NumPy's product in float32, as CUTLASS's kernels compute it, rounded once at the end."""

    __slots__ = ()

    def run(self, request: MatmulRequest, outputs: Operands) -> None:
        """Compute a request into its outputs; `outputs` holds those that were allocated for it."""
        from dispatch.libraries.cutlass.arithmetic import rounded

        targets: dict[str, Any] = {"out": request.out, **request.form.operand_values, **outputs}
        for name, values in evaluate_tree(request, np.float32).items():
            target = np.asarray(targets[name])
            target[...] = rounded(values, targets[name].dtype)


def _targets(request: MatmulRequest, outputs: Operands) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a run writes, by the name of their result."""
    targets = {
        "out": outputs.get("out", request.out),
        "aux": outputs.get("aux", request.aux) if request.plain_epilogue.writes_aux else None,
        "bgrad": outputs.get("bgrad", request.bgrad),
        "amax_d": request.scales.amax_d,
        "amax_aux": request.scales.amax_aux if request.plain_epilogue.writes_aux else None,
    }
    for name, tensor in targets.items():
        if tensor is not None:
            yield name, tensor
