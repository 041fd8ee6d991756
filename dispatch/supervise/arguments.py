"""Checks of a supervisor's arguments: choices, minimum counts, names of modules, and futures to run after.

supervisor.py calls them; limits.py checks times. They raise BadRequest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.checks import shown
from dispatch.errors import BadRequest
from dispatch.supervise.future import ConditionalFuture, Future, TimedFuture

if TYPE_CHECKING:
    from dispatch.core.request import R_co, Request

__all__ = ["check_at_least", "check_choice", "check_futures", "check_names", "conditional_future"]


def conditional_future(request: Request[R_co], deadline: float | None, after: Any) -> ConditionalFuture[R_co]:
    """A future with a deadline (monotonic seconds, or None), and with others that it depends on."""
    dependencies = check_futures(after)
    return (
        ConditionalFuture(request, dependencies) if deadline is None else TimedFuture(request, deadline, dependencies)
    )


def check_futures(after: Any) -> tuple[Future, ...]:
    """The futures to run after, as a tuple; BadRequest for anything else."""
    try:
        futures = (after,) if isinstance(after, Future) else tuple(after)
    except Exception as error:
        raise BadRequest("after", shown(after), "futures of requests that were submitted before") from error
    for future in futures:
        if not isinstance(future, Future):
            raise BadRequest("after", shown(future), "futures of requests that were submitted before")
    return futures


def check_choice(name: str, given: Any, accepted: tuple[str, ...]) -> None:
    if not isinstance(given, str) or given not in accepted:
        raise BadRequest(name, repr(given), " or ".join(map(repr, accepted)))


def check_at_least(name: str, given: Any, least: int) -> None:
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise BadRequest(name, shown(given), f"an integer of {least} or more")


def check_names(name: str, given: Any) -> None:
    if not isinstance(given, (list, tuple)) or not all(isinstance(module, str) and module for module in given):
        raise BadRequest(name, shown(given), "names of modules, in a list or tuple")
