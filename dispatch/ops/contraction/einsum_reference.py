"""einsum by NumPy: two operands at a time by its C loops, in the order of the request's path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import NumpyPlan, values, work_of
from dispatch.ops.contraction.reference import einsum_of

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.layout import Array
    from dispatch.ops.contraction.einsum import EinsumRequest

__all__ = ["einsum_steps", "numpy_einsum"]


def einsum_steps(request: EinsumRequest, work: np.dtype[Any]) -> Results:
    """The result, computed in a working dtype."""
    arrays = [values(tensor, work) for tensor in request.operands]
    for step in request.schedule.steps:
        inputs, output = step.spec.split("->")
        terms = inputs.split(",")
        operands = [
            np.conj(arrays[number]) if conj else arrays[number]
            for number, conj in zip(step.inputs, step.conj, strict=True)
        ]
        wide = [
            np.broadcast_to(one, [request.sizes[mode] for mode in term])
            for one, term in zip(operands, terms, strict=True)
        ]
        arrays.append(einsum_of(wide, terms, output))
    return {"out": _diagonal(request, arrays[-1])}


def _diagonal(request: EinsumRequest, found: Array) -> Array:
    """The result, with zeros outside its diagonal if it has a mode twice."""
    output = request.parsed[1]
    unique = "".join(dict.fromkeys(output))
    if unique == output:
        return np.broadcast_to(found, request.shape)
    wide = np.zeros(request.shape, found.dtype)
    places = np.indices([request.sizes[mode] for mode in unique], sparse=True)
    wide[tuple(places[unique.index(mode)] for mode in output)] = found
    return wide


def numpy_einsum(request: object, executor: object, row: Row) -> NumpyPlan:
    """A plan that computes with NumPy: in f64 where the result is f64 or c128, else in f32."""
    del request, executor
    return NumpyPlan(row, einsum_steps, work_of(row.dtypes[-1]))
