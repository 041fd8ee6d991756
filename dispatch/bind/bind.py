"""From a request to its plan: the first row that takes it, bound to an executor. Only this floor knows both.

`Executor.plan` comes here for a request that it has not seen.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from dispatch.errors import Refused
from dispatch.execute.executor import Executor
from dispatch.table.select import candidates, no_row
from dispatch.table.table import TABLE

if TYPE_CHECKING:
    from dispatch.core.request import Plan, Request
    from dispatch.core.row import Row

__all__ = ["bind", "rows_before"]


def bind(executor: Executor, request: Request) -> Plan:
    """The plan of the first row that takes a request and whose library does; NoRow with every reason."""
    refused: dict[Row, Refused] = {}
    for row in candidates(request, executor.device.arch, executor.versions):
        try:
            plan: Plan = row.call(request, executor, row)
            return plan
        except Refused as refusal:  # noqa: PERF203  # nearly always the first row binds
            refused[row] = refusal
    raise no_row(request, executor.device.arch, executor.versions, refused)


def rows_before(_: Executor, request: Request, plan: Plan) -> list[Row]:
    """The rows that are asked before the plan's own for requests of the same dtypes."""
    rows = TABLE.with_dtypes(request.op, request.signature().dtypes)
    return list(takewhile(lambda row: row is not plan.row, rows))


Executor.bind, Executor.rows_before = bind, rows_before  # type: ignore[assignment]  # as methods
