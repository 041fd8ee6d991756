"""bind: makes a request's plan with the first row that takes it. Only this package knows both table and executors.

`Executor.plan` calls it for a request without a cached plan.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from itertools import takewhile
from typing import TYPE_CHECKING

from dispatch.core.request import plan_of
from dispatch.device.registry import live_devices
from dispatch.errors import Refused
from dispatch.execute.cuda_executor import CudaExecutor
from dispatch.execute.executor import Executor
from dispatch.refusal import calls_user_code

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dispatch.core.request import Plan, Request
    from dispatch.core.row import Row, Table

__all__ = ["bind", "rows_before"]


def bind(executor: Executor, request: Request) -> Plan:
    """The plan of the first row that takes a request and whose library accepts it; NoRow with every row's reasons.

    With `autotune=True`, the plan of the fastest of these rows.
    """
    from dispatch.table.select import no_row, takes  # not by `import dispatch`, to keep it quick

    refused: dict[Row, Refused] = {}
    wanted, where = request.signature(), (executor.device.arch, executor.versions)
    # No generator calls the rules: Python would replace their StopIteration by RuntimeError.
    rows: Iterable[Row] = _table().with_dtypes(request.op, wanted.dtypes)
    if request.autotune and isinstance(executor, CudaExecutor):
        from dispatch.bind.race import fastest_plan  # imported here because few requests are tuned

        with suppress(Refused):
            takers = [row for row in rows if takes(row, request, wanted, *where)]
            return fastest_plan(executor, request, takers, refused)
        rows = ()
    for row in rows:
        if not takes(row, request, wanted, *where):
            continue
        try:
            return plan_of(row, request, executor)
        except Refused as refusal:  # the first row nearly always binds
            refused[row] = refusal
    raise no_row(request, *where, refused)


def rows_before(_: Executor, request: Request, plan: Plan) -> list[Row]:
    """The rows for the request's dtypes that come before the plan's own."""
    rows = _table().with_dtypes(request.op, request.signature().dtypes)
    return list(takewhile(lambda row: row is not plan.row, rows))


@cache
def _table() -> Table:
    """The table; the first call registers `_forget_plans`, so that after changes all devices select rows again."""
    from dispatch.table.table import TABLE

    TABLE.watchers.append(_forget_plans)
    return TABLE


def _forget_plans() -> None:
    """After a change of the table: make requests select their rows again; prepared calls keep their rows."""
    for device in live_devices():
        device.forget_plans()


Executor.bind, Executor.rows_before = bind, rows_before  # type: ignore[assignment]  # as methods
calls_user_code(CudaExecutor.call)  # which calls `Plan.enqueue`
