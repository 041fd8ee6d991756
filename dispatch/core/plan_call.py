"""What makes the plans of a row and is imported only when it is first called, for libraries that no import may bind."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Plan
    from dispatch.core.row import Row

__all__ = ["plan_call"]


def plan_call(name: str, module: str, said: str, function: str = "plan") -> Callable[[Any, Any, Row], Plan]:
    """The call of a row by its name in the family's package, and its documentation: `function` of a module there.

    The module is imported at the first call, so that importing `dispatch` binds no library.
    """

    def call(request: Any, executor: Any, row: Row) -> Plan:
        plan: Plan = getattr(import_module(module), function)(request, executor, row)
        return plan

    call.__module__ = module.rpartition(".")[0]  # the op's family, by which its cases are found
    call.__doc__ = said
    call.__name__ = call.__qualname__ = name  # what `explain` shows
    return call
