"""Errors that come out of functions which users gave: formulas, rules of rows, launches of kernels.

What such a function raises is its author's error and no defect of this library. So a worker fails the one request with
it, as it is, and goes on.
"""

from __future__ import annotations

from dispatch.refusal import callers

__all__ = ["is_of_own_code"]


def is_of_own_code(error: BaseException) -> bool:
    """Whether an error was raised within a user's function that such a function called.

    KeyboardInterrupt and SystemExit are none of a request's errors, wherever they come from: they are to end what runs
    it. Others that are no Exception, such as asyncio.CancelledError, are as any of a request's.
    """
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return False
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        called = frames.tb_next
        module = str(called.tb_frame.f_globals.get("__name__", ""))
        if frames.tb_frame.f_code in callers and module.partition(".")[0] not in ("dispatch", "cudabind"):
            return True
        frames = called
    return False
