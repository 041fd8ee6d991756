"""The formula of every op of the family, which its mutations modify."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.ops.sparse import block_jacobi_reference, direct_reference, krylov_reference, reference

if TYPE_CHECKING:
    import numpy as np

    from dispatch.core.host_plan import Results

__all__ = ["evaluate"]

ITERATED = ("cg", "bicgstab", "gmres", "minres")


def evaluate(request: Any, work: np.dtype[Any]) -> Results:
    """The outputs of a request by name, in a working dtype."""
    if request.op == "block_jacobi":
        return block_jacobi_reference.evaluate(request, work)
    if request.op == "spsolve":
        return direct_reference.evaluate_direct(request, work)
    if request.op == "spsolve_batched":
        is_list = isinstance(request.values, tuple)
        formula = direct_reference.evaluate_lists if is_list else direct_reference.evaluate_batch
        return formula(request, work)
    formula = krylov_reference.evaluate_krylov if request.op in ITERATED else reference.evaluate
    return formula(request, work)
