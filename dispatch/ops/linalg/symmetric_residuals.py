"""The error of L·D·Lᴴ, in units of n·eps; see residuals.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.ops.linalg.norms import norm, scaled_error, solve_errors, zero_or_inf
from dispatch.ops.linalg.packed import are_sound, blocks, expanded, mirrored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from dispatch.device.layout import Array

    Ratios: TypeAlias = Iterator[tuple[str, float]]

__all__ = ["SYMMETRIC"]


def _is_zero(d: Array, info: int) -> bool:
    """Whether a status agrees with D: the index of a block of one row that is exactly 0, or 0 if there is none."""
    off_diagonal = np.abs(d - np.diag(np.diag(d))).sum(axis=0)
    places = np.flatnonzero((np.diag(d) == 0) & (off_diagonal == 0)) + 1
    return info in places if places.size else info == 0


def _adjoint(request: Any, factor: Array) -> Array:
    adjoint: Array = factor.conj().T if request.hermitian else factor.T
    return adjoint


def _ldl(request: Any, a: Array, given: Any, found: Any, eps: float) -> Ratios:
    del given
    lower, kind = request.lower, {"lower": request.lower, "hermitian": request.hermitian}
    exact = mirrored(a, **kind)
    if request.expand:
        outer, d, order = found["lu"], found["d"], found["perm"]
        is_order = np.array_equal(np.sort(order), np.arange(len(a)))
        yield "perm, no order of rows, for which this", 0.0 if is_order else np.inf
        triangle = outer[order] if is_order else outer
        yield "what is beside the triangle", zero_or_inf(np.triu(triangle, 1) if lower else np.tril(triangle, -1))
        yield "a diagonal that is not 1", zero_or_inf(np.diag(triangle) - 1)
        yield "what of D is no block", zero_or_inf(np.triu(d, 2) + np.tril(d, -2))
    else:
        packed, pivots = found["out"], found["pivots"]
        yield "what is in the other triangle", zero_or_inf(np.triu(packed, 1) if lower else np.tril(packed, -1))
        if not are_sound(pivots, lower=lower):
            yield "pivots that name rows that were passed", np.inf
            return
        outer, d, _ = expanded(packed, pivots, **kind)
        determinants = [abs(np.linalg.det(d[i : j + 1, i : j + 1])) for i, j in blocks(pivots) if i != j]
        yield "a block of two rows that is singular", 0.0 if all(determinants) else np.inf
    yield "A - L·D·Lᴴ", scaled_error(outer @ d @ _adjoint(request, outer) - exact, norm(exact), eps, len(a))
    yield "D - Dᴴ", zero_or_inf(d - _adjoint(request, d))
    yield "another status than D has zeros on its diagonal", 0.0 if _is_zero(d, int(found["info"])) else np.inf


def _ldl_solve(request: Any, ldu: Array, given: Any, found: Any, eps: float) -> Ratios:
    outer, d, _ = expanded(ldu, given["pivots"], lower=request.lower, hermitian=request.hermitian)
    yield from solve_errors(outer @ d @ _adjoint(request, outer), given["b"], found["out"], eps)


SYMMETRIC: dict[str, Callable[[Any, Array, Any, Any, float], Any]] = {"ldl": _ldl, "ldl_solve": _ldl_solve}
