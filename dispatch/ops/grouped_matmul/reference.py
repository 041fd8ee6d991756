"""The plans of grouped_matmul on the host, and the float64 reference: NumPy, group by group.

`plan` serves the table's host rows; `reference` is what the tests compare with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dispatch.core.precision import as_is, to_tf32
from dispatch.core.request import Plan
from dispatch.keys import F64, Compute, member
from dispatch.libraries.cutlass.arithmetic import evaluate, rounded
from dispatch.ops.grouped_matmul.request import check_ends

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dispatch.core.request import Operands
    from dispatch.core.row import Row
    from dispatch.device.layout import Array
    from dispatch.ops.grouped_matmul.request import GroupedMatmulRequest
    from dispatch.ops.grouped_matmul.request_lists import GroupedMatmulListRequest

__all__ = ["NumpyGroupedPlan", "NumpyListPlan", "plan", "products", "reference", "reference_list"]

FAST_TF32 = Compute.COMPUTE_32F_FAST_TF32


def products(request: GroupedMatmulRequest, precision: type) -> Iterator[tuple[slice, Array, Array]]:
    """The rows, and A and B, of each group that has any."""
    a: Array = np.asarray(request.a).astype(precision)
    b: Array = np.asarray(request.b).astype(precision)
    begin = 0
    for group, end in enumerate(np.asarray(request.ends).tolist()):
        if end > begin:
            yield slice(begin, end), a[begin:end], b[group]
        begin = max(begin, end)


def reference(request: GroupedMatmulRequest, precision: type = np.float64) -> dict[str, Array]:
    """D, unrounded; rows after the last group are NaN."""
    out: Array = np.full(request.shape, np.nan, precision)
    operands = {"alpha": np.asarray(request.alpha)}
    for rows, a, b in products(request, precision):
        out[rows] = evaluate(request.tree, a @ b, operands, None)["out"]
    return {"out": out}


def reference_list(request: GroupedMatmulListRequest, precision: type = np.float64) -> dict[str, Array]:
    """Each D, unrounded."""
    operands = {"alpha": np.asarray(request.alpha)}
    pairs = zip(request.a, request.b, strict=True)
    short = to_tf32 if member(request.compute) is FAST_TF32 and precision is np.float32 else as_is
    exact = (short(np.asarray(a).astype(precision)) @ short(np.asarray(b).astype(precision)) for a, b in pairs)
    return {f"out[{g}]": evaluate(request.tree, x, operands, None)["out"] for g, x in enumerate(exact)}


def plan(request: GroupedMatmulRequest | GroupedMatmulListRequest, row: Row) -> Plan:
    """A plan that computes with NumPy."""
    kind = NumpyListPlan if hasattr(request, "extents") else NumpyGroupedPlan
    return kind(row, capture_safe=False)


class NumpyGroupedPlan(Plan):
    """A plan that evaluates the tree over each group's product in float32, and rounds once at the end."""

    __slots__ = ()

    def run(self, request: GroupedMatmulRequest, outputs: Operands) -> None:
        """Compute a request into its output; BadRequest for invalid ends."""
        target = np.asarray(outputs.get("out", request.out))
        ends = np.asarray(request.ends)  # may share another array's memory, whose values are not validated
        check_ends(ends, request.a.shape[0], str(ends.tolist()))
        values = reference(request, np.float32)["out"]
        for rows, _, _ in products(request, np.float32):
            target[rows] = rounded(values[rows], request.d_dtype)


class NumpyListPlan(Plan):
    """A plan that evaluates the tree over each product in float32, or float64 for f64, and rounds once at the end."""

    __slots__ = ()

    def run(self, request: GroupedMatmulListRequest, outputs: Operands) -> None:
        """Compute a request into its outputs; `outputs` holds those that were allocated for it."""
        results = reference_list(request, np.float64 if request.d_dtype is F64 else np.float32)
        for target, values in zip(request.result(outputs), results.values(), strict=True):
            np.asarray(target)[...] = rounded(values, request.d_dtype)
