"""Products with Q of a QR factorization without forming Q: `geqrf`, followed by `ormqr` or `unmqr`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.libraries.cusolver.copies import CopyMode
from dispatch.ops.linalg.cusolver import factor_qr
from dispatch.ops.linalg.cusolver_reflectors import apply_q
from dispatch.ops.linalg.multiply import QrSide

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.ops.linalg.multiply import QrMultiplyRequest
    from dispatch.ops.linalg.steps import LinalgSteps

__all__ = ["qr_multiply"]


def qr_multiply(request: QrMultiplyRequest, steps: LinalgSteps) -> Plan:
    """Factorize a copy of A, copy R out of it, and multiply C by Q; for Q·C, C is padded with zero rows first."""
    a, c, out, r = (steps.matrix(name) for name in ("a", "c", "out", "r"))
    if not request.a.size:
        steps.copy(out, out, CopyMode.ZERO)  # empty sums
        return steps.idle()
    least = min(a.rows, a.cols)
    factors, tau = steps.scratch_matrix(a.dtype, a.rows, a.cols), steps.scratch(least * a.dtype.itemsize)
    steps.copy(a, factors)
    factor_qr(steps, factors, tau)
    steps.copy(factors.first_rows(least), r, CopyMode.UPPER)
    if not request.c.size:
        return steps.plan(capture_safe=True)
    is_left = request.mode is QrSide.LEFT
    if is_left:
        target = steps.target(out)
        if least < a.rows:
            steps.copy(target, target, CopyMode.ZERO)
        steps.copy(c, target.first_rows(least))
    else:
        target = steps.target(out) if least == a.rows else steps.scratch_matrix(a.dtype, c.rows, a.rows)
        steps.copy(c, target)
    apply_q(steps, factors.first_columns(least), tau, target, side=request.mode)
    steps.finish(target.first_columns(out.cols), out)
    return steps.plan(capture_safe=True)
