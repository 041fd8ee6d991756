"""`--import MODULE`: a module with rows and ops, for one command; packages use entry points instead (core/row.py)."""

from __future__ import annotations

import importlib
import os
import sys
import traceback

from dispatch.checks import shown
from dispatch.errors import BadRequest, DispatchError

__all__ = ["load"]

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def load(module: str) -> None:
    """Import a module, also from the current folder; DispatchError with the error and its location."""
    if not all(module.split(".")) or module.endswith(".py") or os.sep in module:
        raise BadRequest("--import", shown(module), "the name of a module, as in an import statement")
    folder = os.getcwd()
    if "" not in sys.path and folder not in sys.path:  # as with the console script
        sys.path.append(folder)
    try:
        importlib.import_module(module)
    except (KeyboardInterrupt, BrokenPipeError):
        raise
    except BaseException as error:  # noqa: BLE001  # importing it runs unknown code, which may even exit
        raise DispatchError(f"--import {module} failed: {_describe_error(error)}") from None


def _describe_error(error: BaseException) -> str:
    """The error in one line, with its file and line."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_machinery(frame.filename)]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    text = traceback.format_exception_only(error)[-1].strip()
    return f"{text}{where}"


def _is_machinery(file: str) -> bool:
    """Whether a file belongs to this library or to Python's import system."""
    return file == importlib.__file__ or file.startswith(("<frozen ", f"{PACKAGE}{os.sep}"))
