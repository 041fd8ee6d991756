"""Code of users: request classes, plans, the functions that make them, formulas, rules, launches of kernels.

An error in it is not a defect of this library. So a worker fails only that request, with the unchanged error, and goes
on.
"""

from __future__ import annotations

from dispatch.core.request import Request
from dispatch.refusal import user_code_callers

__all__ = ["is_of_user_code"]

PACKAGES = ("dispatch", "cudabind")


def is_of_user_code(error: BaseException, request: object = None) -> bool:
    """Whether an error comes from a user's code.

    It does if the class of `request` is a user's own, or if the error's traceback has a function of `user_code_callers`
    as the caller of a function of another package.
    """
    if isinstance(request, Request) and not _is_ours(type(request).__module__):
        return True  # a method may also return a value that raises only later, in this library
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        called = frames.tb_next
        is_caller = frames.tb_frame.f_code in user_code_callers
        if is_caller and not _is_ours(str(called.tb_frame.f_globals.get("__name__", ""))):
            return True
        frames = called
    return False


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES
