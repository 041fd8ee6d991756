"""A timeout for library calls that may block forever."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeVar

from dispatch.errors import CollectiveError, CollectiveTimeout, DispatchError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["call_with_timeout"]

T = TypeVar("T")


def call_with_timeout(seconds: float, call: Callable[[], T], what: str) -> T:
    """The result of a blocking call; CollectiveTimeout if it takes longer, CollectiveError if it fails.

    After a timeout the call goes on, on a daemon thread.
    """
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.extend((call(), None))
        except BaseException as error:  # noqa: BLE001  # it is raised in the waiting thread
            outcome.extend((None, error))

    thread = threading.Thread(target=run, name=what, daemon=True)
    thread.start()
    thread.join(seconds)
    if len(outcome) < 2:
        raise CollectiveTimeout(f"{what} did not complete within {seconds:g} s")
    result, error = outcome
    if isinstance(error, DispatchError):
        raise error
    if error is not None:
        raise CollectiveError(f"{what} failed: {error}") from error
    returned: T = result
    return returned
