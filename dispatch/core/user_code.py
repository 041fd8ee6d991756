"""Errors raised in functions that users passed in: formulas, rules of rows, launches of kernels.

Such an error is not a defect of this library. So a worker fails only that request, with the unchanged error, and goes
on.
"""

from __future__ import annotations

from dispatch.refusal import user_code_callers

__all__ = ["is_of_user_code"]


def is_of_user_code(error: BaseException) -> bool:
    """Whether an error comes from a user's function: its traceback has a function of `user_code_callers` as the caller.

    Never true for KeyboardInterrupt and SystemExit, wherever they were raised, because they must end the worker.
    Other BaseExceptions, such as asyncio.CancelledError, count like any error.
    """
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return False
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        called = frames.tb_next
        module = str(called.tb_frame.f_globals.get("__name__", ""))
        if frames.tb_frame.f_code in user_code_callers and module.partition(".")[0] not in ("dispatch", "cudabind"):
            return True
        frames = called
    return False
