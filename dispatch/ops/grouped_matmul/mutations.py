"""Wrong grouped products that every case must reject: see `dispatch/testing/mutations.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.libraries.cutlass.mutations import typical_k
from dispatch.ops.grouped_matmul.reference import reference, reference_list
from dispatch.testing.mutations import changed

if TYPE_CHECKING:
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor
    from dispatch.ops.grouped_matmul.request import GroupedMatmulRequest

    Results = dict[str, Array]

__all__ = ["MUTATIONS", "named"]


def named(request: Any, result: Any) -> dict[str, Tensor]:
    """The outputs by name."""
    del request
    return {f"out[{g}]": t for g, t in enumerate(result)} if isinstance(result, tuple) else {"out": result}


def _matrices(request: Any) -> tuple[Array, Array, int]:
    """A, the B of the group with the most rows, and the number of that group."""
    if hasattr(request, "extents"):
        return np.asarray(request.a[0]), np.asarray(request.b[0]), 0
    ends = np.asarray(request.ends)
    group = int(np.argmax(np.diff(ends, prepend=0)))
    return np.asarray(request.a), np.asarray(request.b)[group], group


def _reference(request: Any, **fields: Any) -> Results:
    wrong = replace(request, **fields)
    return reference_list(wrong) if hasattr(request, "extents") else reference(wrong)


def _with_a(request: Any, columns: Any) -> Results:
    values, _, _ = _matrices(request)
    values = values.copy()
    values[..., columns] = 0
    if hasattr(request, "extents"):
        return _reference(request, a=(changed(request.a[0], values), *request.a[1:]))
    return _reference(request, a=changed(request.a, values))


def one_k(request: Any) -> Results | None:
    """One term of each sum is left out, in the first product or in all groups."""
    a, b, _ = _matrices(request)
    return _with_a(request, typical_k(a, b))


def half_of_k(request: Any) -> Results | None:
    """The second half of each sum is left out."""
    return _with_a(request, slice(_matrices(request)[0].shape[-1] // 2, None))


def alpha(request: Any) -> Results | None:
    """alpha 2% too large."""
    return _reference(request, alpha=float(np.asarray(request.alpha).reshape(())) * 1.02)


def b_of_next(request: Any) -> Results | None:
    """A group is multiplied by the B of the next one."""
    if hasattr(request, "extents") or request.groups < 2:
        return None
    _, _, group = _matrices(request)
    values = np.asarray(request.b).copy()
    values[group] = values[(group + 1) % request.groups]
    return _reference(request, b=changed(request.b, values))


def row_of_next(request: Any) -> Results | None:
    """The last row of a group belongs to the next one."""
    if hasattr(request, "extents") or request.groups < 2:
        return None
    _, _, group = _matrices(request)
    ends = np.asarray(request.ends).copy()
    if group == request.groups - 1:
        ends[group - 1] += 1
    else:
        ends[group : group + 1] -= 1
    return _reference(request, ends=changed(request.ends, ends))


def products_exchanged(request: Any) -> Results | None:
    """Two products of the same extents have exchanged their B."""
    extents = getattr(request, "extents", None)
    if extents is None or extents[0] != extents[1]:
        return None
    return _reference(request, b=(request.b[1], request.b[0], *request.b[2:]))


def activation(request: GroupedMatmulRequest) -> Results | None:
    """The epilogue is left out."""
    return None if getattr(request, "epilogue", None) is None else _reference(request, epilogue=None)


MUTATIONS = {
    "one k left out": one_k,
    "half of k left out": half_of_k,
    "alpha off": alpha,
    "B of the next group": b_of_next,
    "a row of the next group": row_of_next,
    "two products exchanged": products_exchanged,
    "the epilogue left out": activation,
}
