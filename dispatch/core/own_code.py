"""Errors that come out of functions which users gave: formulas, rules of rows, launches of kernels.

What such a function raises is its author's error and no defect of this library. So a worker fails the one request with
it, as it is, and goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import CodeType

__all__ = ["any_says", "calls_own_code", "is_of_own_code"]

F = TypeVar("F", bound="Callable[..., object]")

_callers: set[CodeType] = set()


def calls_own_code(function: F) -> F:
    """Note that a function calls one that may be a user's; it stays as it is, so calls of it cost nothing more."""
    _callers.add(function.__code__)
    return function


@calls_own_code
def any_says(rules: Iterable[Callable[[Any], str]], request: Any) -> bool:
    """Whether a rule of a row has a reason against a request."""
    for rule in rules:  # noqa: SIM110  # `any` would call them from a frame of its own
        if rule(request):
            return True
    return False


def is_of_own_code(error: BaseException) -> bool:
    """Whether an error was raised within a user's function that such a function called.

    What is no Exception, such as SystemExit, is none of a request's errors, wherever it comes from.
    """
    if not isinstance(error, Exception):
        return False
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        called = frames.tb_next
        module = str(called.tb_frame.f_globals.get("__name__", ""))
        if frames.tb_frame.f_code in _callers and module.partition(".")[0] not in ("dispatch", "cudabind"):
            return True
        frames = called
    return False
