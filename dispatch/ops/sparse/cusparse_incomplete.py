"""Incomplete factorizations by cuSPARSE, in place in a copy in the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.keys import C64, C128, F32, F64
from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer
from dispatch.libraries.cusparse.calls import Steps
from dispatch.libraries.cusparse.incomplete import Elimination

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.layout import Layout
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.sparse.incomplete import IncompleteRequest

__all__ = ["plan"]

LETTERS = {F32: "S", F64: "D", C64: "C", C128: "Z"}
NAMES = {"ilu0": "csrilu02", "ic0": "csric02"}


def plan(request: IncompleteRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; parts that are not aligned to 16 bytes are copied, because other functions require it."""
    steps = Steps(executor, row, len(request.reads) + len(request.writes))
    layout = request.layout_of("out")
    target = steps.aligned_operand(layout, request.place_of("out"))
    steps.copy(_column(request.values.layout, request.place_of("values")), target)
    rows, columns = (_aligned(request, steps, name) for name in ("rows", "columns"))
    places = target.pointer.operand, rows, columns, request.place_of("info")
    steps.append(
        Elimination(
            executor,
            NAMES[request.op],
            LETTERS[request.values.dtype],
            (request.form.shape[0], layout.size),
            places,
            (request.place_of("rows"), request.place_of("columns")),
            base=request.form.base,
            nbytes=layout.size * layout.dtype.itemsize,
            keeps=request.form.pattern is not None,
        )
    )
    steps.copy(target, _column(layout, request.place_of("out")))
    return steps.plan(capture_safe=False)


def _aligned(request: IncompleteRequest, steps: Steps, name: str) -> int:
    """The place of a part, or of its copy, that is aligned to 16 bytes."""
    layout, place = request.layout_of(name), request.place_of(name)
    part = steps.aligned_operand(layout, place)
    steps.copy(_column(layout, place), part)
    return part.pointer.operand


def _column(layout: Layout, operand: int) -> Matrix:
    return Matrix(OperandPointer(operand), layout.dtype, layout.size, 1, 1, max(1, layout.size))
