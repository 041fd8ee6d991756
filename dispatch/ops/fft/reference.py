"""Discrete Fourier transforms by NumPy: the host's implementation, and in extended precision the expected results.

NumPy's transforms keep single precision from NumPy 2 on, and extended precision if the machine has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import NumpyPlan, values, work_of
from dispatch.ops.fft.request import DftKind, DftRequest, TransformRequest

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.layout import Array

__all__ = ["evaluate", "exact", "numpy_dft", "transformed"]


def evaluate(request: DftRequest, work: np.dtype[Any]) -> Results:
    """The output by name, computed in a working dtype."""
    return {"out": transformed(_multiplied(request, work), request, work)}


def exact(request: DftRequest, work: np.dtype[Any]) -> Results:
    """The output by name, computed in extended precision and rounded to a dtype."""
    widest = np.dtype(np.longdouble)
    return {"out": values(transformed(_multiplied(request, widest), request, widest), work)}


def _multiplied(request: DftRequest, work: np.dtype[Any]) -> Array:
    """The operand times its factors, in a working dtype."""
    if request.factors is None:
        return np.asarray(request.a)
    return np.asarray(values(request.a, work) * values(request.factors, work))


def transformed(a: Array, request: TransformRequest[Any], work: np.dtype[Any]) -> Array:
    """The transform of an array that a request describes: the sums first, then the factor."""
    spectrum = np.result_type(work, np.complex64)
    converted: Any = values(a, work)
    axes, points, inverse = request.transformed, request.points, request.inverse
    result: Any
    if request.kind == DftKind.R2C:
        result = np.fft.rfftn(converted, points, axes)
        result = result.conj() if inverse else result
    elif request.kind == DftKind.C2R and not converted.size:  # NumPy 2.4's irfft returns uninitialized memory then
        extents = dict(zip(axes, points, strict=True))
        result = np.zeros([extents.get(axis, extent) for axis, extent in enumerate(a.shape)], spectrum).real
    elif request.kind == DftKind.C2R:
        result = np.fft.irfftn(converted if inverse else converted.conj(), points, axes, norm="forward")
    elif not axes:
        result = converted.astype(spectrum)
    else:
        result = (
            np.fft.ifftn(converted, points, axes, norm="forward") if inverse else np.fft.fftn(converted, points, axes)
        )
    return np.asarray(result * result.real.dtype.type(request.factor))


def numpy_dft(request: DftRequest, executor: object, row: Row) -> NumpyPlan:
    """A plan that computes with NumPy, in the precision of the result."""
    del request, executor
    return NumpyPlan(row, evaluate, work_of(row.dtypes[1]))
