"""L·D·Lᴴ of one matrix by LAPACK through SciPy: the host's results, and the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.ops.linalg.packed import are_sound, expanded
from dispatch.ops.linalg.spectral_reference import FAILED, lapack

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.device.layout import Array

__all__ = ["SYMMETRIC", "factored", "solved"]


def _routine(name: str, dtype: Any, *, hermitian: bool) -> Any:
    return lapack(("he" if hermitian and dtype.kind == "c" else "sy") + name, dtype)


def factored(a: Array, *, lower: bool, hermitian: bool) -> tuple[Array, Array, int]:
    """The packed factors with zeros in the other triangle, LAPACK's pivots, and its status; NaN gives NaN."""
    part = np.tril(a) if lower else np.triu(a)
    if hermitian and a.dtype.kind == "c":
        np.fill_diagonal(part, np.diag(part).real)
    if not np.isfinite(part).all():
        triangle = np.tri(len(a), dtype=np.bool_)
        return np.where(triangle if lower else triangle.T, np.nan, part), np.arange(1, len(a) + 1), FAILED
    work = max(1, 64 * len(a))
    packed, pivots, info = _routine("trf", a.dtype, hermitian=hermitian)(part, lower=lower, lwork=work)
    return np.tril(packed) if lower else np.triu(packed), pivots.astype(np.int64), info


def solved(packed: Array, pivots: Array, b: Array, *, lower: bool, hermitian: bool) -> Array:
    """The x of A·x = b from the packed factors; infinite or NaN where D is singular."""
    routine = _routine("trs", packed.dtype, hermitian=hermitian)
    return np.asarray(routine(packed, pivots, b, lower=lower)[0].reshape(b.shape))


def _ldl(request: Any, a: Array) -> dict[str, Any]:
    if not a.size:
        none = np.zeros(0, np.int64)
        return {"out": a, "pivots": none, "lu": a, "d": a, "perm": none, "info": 0}
    kind = {"lower": request.lower, "hermitian": request.hermitian and a.dtype.kind == "c"}
    out, pivots, info = factored(a, **kind)
    results = {"out": out, "pivots": pivots, "info": info}
    if request.expand:
        results |= dict(zip(("lu", "d", "perm"), expanded(out, pivots, **kind), strict=True))
    return results


def _ldl_solve(request: Any, ldu: Array, pivots: Array, b: Array) -> dict[str, Any]:
    if not b.size:
        return {"out": b}
    if not are_sound(pivots, lower=request.lower):
        from dispatch.errors import BadRequest

        raise BadRequest("pivots", f"{pivots.tolist()[:8]}", "the factors that `ldl` returned with the same `lower`")
    return {"out": solved(ldu, pivots, b, lower=request.lower, hermitian=request.hermitian)}


SYMMETRIC: dict[str, Callable[..., dict[str, Any]]] = {"ldl": _ldl, "ldl_solve": _ldl_solve}
