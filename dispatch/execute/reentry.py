"""Refuses reentrant calls of a plan: by a finalizer or a signal handler that runs inside a call of the same plan.

A plan stores the addresses of a call in its own memory until the library has read them. With a nested call the library
would read a mixture of both.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from dispatch.errors import WorkerFailed

if TYPE_CHECKING:
    from types import CodeType

    from dispatch.core.request import Plan

__all__ = ["refuse_reentry"]


def refuse_reentry(plan: Plan, code: CodeType) -> None:
    """WorkerFailed if the function `code` is running with this plan further up this thread's stack.

    It checks the stack, because Ctrl-C may have left a finished call in the executor's set of running calls.
    """
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code is code and frame.f_locals.get("plan") is plan:
            raise WorkerFailed(
                f"{plan.row.name} was called from a finalizer or a signal handler during a call of the same plan;"
                " nothing was enqueued. Call it there inside `with dev.stream():`, or call it later"
            )
        frame = frame.f_back  # type: ignore[assignment]
