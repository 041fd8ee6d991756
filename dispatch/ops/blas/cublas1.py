"""BLAS level 1 in the terms of cuBLAS: the routines that carry out a request, and whether there are such.

Numbers are written to the device by cuBLAS itself (pointer mode device), so that no call waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.libraries.cublas.calls import Operand, Routine, Work, Zero, plan_of
from dispatch.ops.blas.cublas2 import Misfit, Vectors
from dispatch.ops.blas.orders import misplaced

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["cublas_level1", "lower", "steps_fit"]


def steps_fit(request: Any) -> str:
    """Rule: vectors that cuBLAS takes as they lie."""
    try:
        lower(request)
    except Misfit as misfit:
        return str(misfit)
    return ""


def cublas_level1(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request of level 1."""
    return plan_of(executor, row, lower(request))


def lower(request: Any) -> list[Work]:
    """What cuBLAS is to do for a request, in order; Misfit where there is no such thing."""
    terms = Vectors(request)
    n, out = request.x.size, request.layout_of("out")
    if "alpha" in request.numbers:
        if n == 0:
            return []
        if request.op == "axpy":
            arguments = (n, terms.number("alpha"), *terms.vector("x"), *terms.vector("out"))
            return [*terms.copied("y"), Routine("axpy", terms.dtype, arguments)]
        out_at, step = terms.vector("out")
        return [*terms.copied("x"), Routine("scal", terms.dtype, (n, terms.number("alpha"), out_at, abs(step)))]
    vectors: tuple[Any, ...]
    if text := misplaced(out):
        raise Misfit(f"out: {text}")
    place = request.place_of("out")
    if n == 0:
        return [Zero(place, out.dtype.itemsize)]
    x_at, step = terms.vector("x")
    if request.op in ("iamax", "iamin") and step < 0:
        raise Misfit(f"needs x with a stride above 0, has {request.x.layout}: copy it")
    # Of a single vector that goes backwards BLAS sees no element, and its sum is the same forwards.
    vectors = (x_at, step, *terms.vector("y")) if "y" in request.reads else (x_at, abs(step))
    return [Routine(request.op, terms.dtype, (n, *vectors, Operand(place)), on_device=True)]
