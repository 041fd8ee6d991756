"""The `call` of rows whose module binds a library: it is imported at the first call, not with the table."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Plan
    from dispatch.core.row import Row

__all__ = ["plan_call"]


def plan_call(name: str, module: str, said: str) -> Callable[[Any, Any, Row], Plan]:
    """A row's `call` with a name and a docstring (`said`), which runs `plan` of `module`.

    The module is imported at the first call, so that importing `dispatch` binds no library.
    """

    def call(request: Any, executor: Any, row: Row) -> Plan:
        plan: Plan = import_module(module).plan(request, executor, row)
        return plan

    call.__module__ = module.rpartition(".")[0]  # the op's family, which has its cases
    call.__doc__ = said
    call.__name__ = call.__qualname__ = name  # shown by `explain`
    return call
