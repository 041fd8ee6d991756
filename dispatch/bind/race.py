"""Autotune across rows: the plans of all rows that take a request race, and the winner is remembered on disk.

`bind` comes here with requests that say `autotune`. Within its row a library has chosen its own fastest algorithm by
then; here the rows are held against each other, by the same measurement. Where one row alone binds, nothing is timed.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from dispatch.core.call_counter import as_trial
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

ROWS = "rows"  # of an op, in the memory, beside what libraries remember there


def fastest_plan(executor: CudaExecutor, request: Request, rows: Sequence[Row], refused: dict[Row, Refused]) -> Plan:
    """The plan of the fastest of the rows that bind, or of the one remembered; Refused where none binds.

    What a library says to a row is put into `refused`. The first row runs in every race and is the one that others must
    beat, as the library's own choice is within one.
    """
    memory = executor.algorithms(_remembering(executor, rows)) if len(rows) > 1 else None
    key = stored_key(request) if memory is not None else ""
    if memory is not None:
        known = memory.get(f"{request.op} {ROWS}", key)
        winner = None if known is None else next((row for row in rows if row.name == _name(known)), None)
        if winner is not None:
            rows = [winner, *(row for row in rows if row is not winner)]
            plan = _bound(executor, request, winner, refused)
            if plan is not None:
                return plan
    executor.refuse_capture("a request that is to be tuned")
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
    """The library with whose version outcomes are forgotten: the first that has one; kernels of one's own have none."""
    return next((row.library for row in rows if row.library in executor.versions), rows[0].library)


def _bound(executor: CudaExecutor, request: Request, row: Row, refused: dict[Row, Refused]) -> Plan | None:
    """The plan of a row; None where its library refuses."""
    try:
        plan: Plan = row.call(request, executor, row)
    except Refused as refusal:
        refused[row] = refusal
        return None
    return plan


def _name(known: Algorithm) -> str:
    """The row that an outcome names; "" for what names none."""
    try:
        return str(json.loads(known.blob)["row"])
    except (ValueError, KeyError, TypeError):
        return ""


def stored_key(request: Request) -> str:
    """The request in words, and a digest of all that its plan depends on: the same in every process.

    It is the same whether outputs are given or not, where those that are given lie as they would.
    """
    uses = request.tensors()
    layouts = [(name, *_lies(tensor.layout)) for name, tensor, _ in uses]
    layouts += [(name, str(made[2]), made[0], made[1], 256, False) for name, made in request.unallocated().items()]
    digest = hashlib.sha256(repr((sorted(layouts), _choices(request.key()))).encode()).hexdigest()[:16]
    read = ", ".join(f"{name} {tensor.layout}" for name, tensor, written in uses if not written)
    return f"{request.op}({read}) {digest}"


def _lies(layout: Layout) -> tuple[Any, ...]:
    return str(layout.dtype), layout.shape, layout.strides, layout.alignment, layout.readonly


def _choices(part: Any) -> Any:
    """What of a key is no layout, without anything that is of this process alone."""
    if isinstance(part, (tuple, list)):
        return [_choices(each) for each in part]
    return repr(None if isinstance(part, Layout) else part)
