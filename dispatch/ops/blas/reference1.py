"""BLAS level 1 in NumPy: for the host's rows in their own precision, as the reference in float64 or complex128."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import values
from dispatch.ops.blas import reference_rotations
from dispatch.ops.blas.reference3 import scaled, work_with

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.device.layout import Array

__all__ = ["ROUTINES", "evaluate", "sizes"]

ROUTINES = (
    *("axpy", "scal", "copy", "asum", "nrm2", "iamax", "iamin", "dot", "dotu", "dotc"),
    *reference_rotations.ROUTINES,
)


def sizes(x: Array) -> Array:
    """|x_i|; for complex elements |Re x_i| + |Im x_i|."""
    return np.abs(x.real) + np.abs(x.imag) if x.dtype.kind == "c" else np.abs(x)


def evaluate(request: Any, work: np.dtype[Any]) -> Results:
    """The output of a request of level 1, in a working dtype."""
    work = work_with(request, work)
    if request.op in reference_rotations.ROUTINES:
        return reference_rotations.evaluate(request, work)
    x = values(request.x, work)
    if request.op == "copy":
        return {"out": x}
    if request.op == "axpy":
        return {"out": scaled(request, "alpha", x) + values(request.y, work)}
    if request.op == "scal":
        return {"out": x.dtype.type(request.factor("alpha")) * x}
    if request.op == "asum":
        return {"out": np.asarray(sizes(x).sum())}
    if request.op == "nrm2":
        largest = np.abs(x).max(initial=0)
        scale = largest if np.isfinite(largest) and largest else largest.dtype.type(1)
        return {"out": np.asarray(scale * np.sqrt((np.abs(x / scale) ** 2).sum()))}
    if request.op in ("iamax", "iamin"):
        find = np.argmax if request.op == "iamax" else np.argmin
        return {"out": np.asarray(find(sizes(x)) + 1 if x.size else 0)}
    y = values(request.y, work)
    return {"out": np.asarray(((np.conj(x) if request.op == "dotc" else x) * y).sum())}
