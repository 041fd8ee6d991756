"""Autotune across rows: times the plans of all rows that take a request, and stores the winner on disk.

`bind` calls it for requests with `autotune=True`. Each row's library has already chosen its own fastest algorithm; the
same measurement compares the rows here. If only one row binds, nothing is timed.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from dispatch.core.call_counter import as_trial
from dispatch.core.request import plan_of
from dispatch.device.layout import Layout
from dispatch.errors import Refused
from dispatch.execute.algorithm_cache import Algorithm
from dispatch.execute.autotune import fastest, fastest_call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.core.request import Argument, Plan, Request
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["fastest_plan", "stored_key"]

ROWS = "rows"  # added to the op in keys of the algorithm cache, which libraries use as well


def fastest_plan(executor: CudaExecutor, request: Request, rows: Sequence[Row], refused: dict[Row, Refused]) -> Plan:
    """The plan of the fastest row, or of the winner stored before; Refused if no row binds.

    A row whose library refuses the request is added to `refused`. The first row runs in every race, and another row
    must be faster by more than the noise (execute/autotune.py).
    """
    memory = executor.algorithms(_remembering(executor, rows)) if len(rows) > 1 else None
    key = stored_key(request) if memory is not None else ""
    if memory is not None:
        stored = memory.get(f"{request.op} {ROWS}", key)
        winner = None if stored is None else next((row for row in rows if row.name == _name(stored)), None)
        if winner is not None:
            rows = [winner, *(row for row in rows if row is not winner)]
            plan = _bound(executor, request, winner, refused)
            if plan is not None:
                return plan
    executor.refuse_capture("a request with autotune=True")
    plans = [plan for row in rows if row not in refused and (plan := _bound(executor, request, row, refused))]
    if not plans:
        raise Refused("no row binds")
    if len(plans) == 1 or memory is None:
        return plans[0]

    def run(number: int, arguments: tuple[Argument, ...]) -> None:
        plans[number].enqueue(as_trial(plans[number], arguments))

    measure = fastest if all(plan.capture_safe for plan in plans) else fastest_call
    best = plans[measure(executor, request, run, len(plans))]
    memory.put(f"{request.op} {ROWS}", key, Algorithm(json.dumps({"row": best.row.name}).encode(), 0))
    return best


def _remembering(executor: CudaExecutor, rows: Sequence[Row]) -> str:
    """The library whose version invalidates stored outcomes: the first with a version; our own kernels have none."""
    return next((row.library for row in rows if row.library in executor.versions), rows[0].library)


def _bound(executor: CudaExecutor, request: Request, row: Row, refused: dict[Row, Refused]) -> Plan | None:
    """The plan of a row; None if its library refuses the request."""
    try:
        plan = plan_of(row, request, executor)
    except Refused as refusal:
        refused[row] = refusal
        return None
    return plan


def _name(known: Algorithm) -> str:
    """The name of the row in a stored outcome; "" if it has none."""
    try:
        return str(json.loads(known.blob)["row"])
    except (ValueError, KeyError, TypeError):
        return ""


def stored_key(request: Request) -> str:
    """The key of a request: its op and operands as text, and a digest of everything that its plan depends on.

    It is the same in every process. It does not depend on whether outputs are given, if these have the default layout.
    """
    uses = request.tensors()
    layouts = [(name, *_lies(tensor.layout)) for name, tensor, _ in uses]
    layouts += [(name, str(new[2]), new[0], new[1], 256, False) for name, new in request.unallocated().items()]
    digest = hashlib.sha256(repr((sorted(layouts), _choices(request.key()))).encode()).hexdigest()[:16]
    read = ", ".join(f"{name} {tensor.layout}" for name, tensor, written in uses if not written)
    return f"{request.op}({read}) {digest}"


def _lies(layout: Layout) -> tuple[Any, ...]:
    return str(layout.dtype), layout.shape, layout.strides, layout.alignment, layout.readonly


def _choices(part: Any) -> Any:
    """The part of a key that is not layouts, as text that is the same in every process."""
    if isinstance(part, (tuple, list)):
        return [_choices(each) for each in part]
    return repr(None if isinstance(part, Layout) else part)
