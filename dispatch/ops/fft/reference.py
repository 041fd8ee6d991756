"""Discrete Fourier transforms by NumPy: what the host computes, and in extended precision what is right.

NumPy's transforms keep single precision from NumPy 2 on, and extended precision where the machine has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import NumpyPlan, work_of
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
    out = transformed(_multiplied(request, widest), request, widest)
    return {"out": out.astype(np.result_type(work, np.complex64) if out.dtype.kind == "c" else work)}


def _multiplied(request: DftRequest, work: np.dtype[Any]) -> Array:
    """The operand with its factors, in a working dtype."""
    a = np.asarray(request.a)
    if request.factors is None:
        return a
    given = (np.asarray(one) for one in (a, request.factors))
    one, other = (x.astype(np.result_type(work, np.complex64) if x.dtype.kind == "c" else work) for x in given)
    return np.asarray(one * other)


def transformed(a: Array, request: TransformRequest[Any], work: np.dtype[Any]) -> Array:
    """The transform of an array as a request describes it; the sums first, the factor behind them."""
    spectrum = np.result_type(work, np.complex64)
    given: Any = a.astype(spectrum if a.dtype.kind == "c" else work)
    axes, points, inverse = request.transformed, request.points, request.inverse
    found: Any
    if request.kind == DftKind.R2C:
        found = np.fft.rfftn(given, points, axes)
        found = found.conj() if inverse else found
    elif request.kind == DftKind.C2R:
        found = np.fft.irfftn(given if inverse else given.conj(), points, axes, norm="forward")
    elif not axes:
        found = given.astype(spectrum)
    else:
        found = np.fft.ifftn(given, points, axes, norm="forward") if inverse else np.fft.fftn(given, points, axes)
    return np.asarray(found * found.real.dtype.type(request.factor))


def numpy_dft(request: DftRequest, executor: object, row: Row) -> NumpyPlan:
    """A plan that computes with NumPy, in the precision of the result."""
    del request, executor
    return NumpyPlan(row, evaluate, work_of(row.dtypes[1]))
