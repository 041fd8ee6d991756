"""Calls of a plan from within a call of it, by a finalizer or a signal handler between any two lines of that.

A plan keeps the addresses of a call in memory of its own until the library has read them, so that one from within would
have the library read some of both.
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
    """WorkerFailed where the caller of this thread's caller, or one further up, is the function `code` with this plan.

    An interrupt may have left a call noted that is over: the stack tells.
    """
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code is code and frame.f_locals.get("plan") is plan:
            raise WorkerFailed(
                f"{plan.row.name} was called from a finalizer or a signal handler while a call of the same plan was"
                " being made; nothing was enqueued. Call it there with `with dev.stream():`, or later"
            )
        frame = frame.f_back  # type: ignore[assignment]
