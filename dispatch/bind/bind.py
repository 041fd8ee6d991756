"""From a request to its plan: the first row that takes it, bound to an executor. Only this floor knows both.

`Executor.plan` comes here for a request that it has not seen.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from itertools import takewhile
from typing import TYPE_CHECKING

from dispatch.device.registry import live_devices
from dispatch.errors import Refused
from dispatch.execute.cuda_executor import CudaExecutor
from dispatch.execute.executor import Executor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dispatch.core.request import Plan, Request
    from dispatch.core.row import Row, Table

__all__ = ["bind", "rows_before"]


def bind(executor: Executor, request: Request) -> Plan:
    """The plan of the first row that takes a request and whose library does; NoRow with every reason.

    Of a request that is to be tuned, the fastest of all such rows.
    """
    from dispatch.table.select import candidates, no_row  # with the first request: `import dispatch` stays quick

    _table()
    refused: dict[Row, Refused] = {}
    rows: Iterable[Row] = candidates(request, executor.device.arch, executor.versions)
    if request.autotune and isinstance(executor, CudaExecutor):
        from dispatch.bind.race import fastest_plan  # few requests are tuned

        with suppress(Refused):
            return fastest_plan(executor, request, list(rows), refused)
        rows = ()
    for row in rows:
        try:
            plan: Plan = row.call(request, executor, row)
            return plan
        except Refused as refusal:  # noqa: PERF203  # nearly always the first row binds
            refused[row] = refusal
    raise no_row(request, executor.device.arch, executor.versions, refused)


def rows_before(_: Executor, request: Request, plan: Plan) -> list[Row]:
    """The rows that are asked before the plan's own for requests of the same dtypes."""
    rows = _table().with_dtypes(request.op, request.signature().dtypes)
    return list(takewhile(lambda row: row is not plan.row, rows))


@cache
def _table() -> Table:
    """The table, whose changes let all devices choose anew from the first choice on."""
    from dispatch.table.table import TABLE

    TABLE.watchers.append(_forget_plans)
    return TABLE


def _forget_plans() -> None:
    """The table changed: requests choose anew; only prepared calls keep their row."""
    for device in live_devices():
        device.forget_plans()


Executor.bind, Executor.rows_before = bind, rows_before  # type: ignore[assignment]  # as methods
