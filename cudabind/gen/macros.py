"""The object-like macros of a header as Python values: libclang evaluates them, not this file.

Called by `parse`. Each macro is used in a probe variable of a second parse; what does not compile as an expression
(attributes, calling conventions, guards) is no constant and drops out by itself.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from clang.cindex import Cursor, CursorKind, TranslationUnit, conf

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PROBE = "cudabind_probe_"
INT, FLOAT, TEXTS = 1, 2, (4, 5)  # CXEvalResultKind


def names(root: Cursor, wanted: Callable[[Cursor], bool]) -> dict[str, list[str]]:
    """The macros without parameters and with a body, by name, with the body's tokens."""
    found = {}
    for cursor in root.get_children():
        if cursor.kind is not CursorKind.MACRO_DEFINITION or not wanted(cursor):
            continue
        tokens = list(cursor.get_tokens())
        if len(tokens) < 2 or conf.lib.clang_Cursor_isMacroFunctionLike(cursor):
            continue
        found[cursor.spelling] = [token.spelling for token in tokens[1:]]
    return found


def probe(macros: Sequence[str]) -> str:
    """The lines that make the compiler evaluate the macros."""
    return "".join(f"static const __auto_type {PROBE}{name} = ({name});\n" for name in macros)


def values(unit: TranslationUnit, macros: Sequence[str]) -> dict[str, int | float | str]:
    """The values of those macros that are constants, in the order of the header."""
    probes = {cursor.spelling: cursor for cursor in unit.cursor.get_children() if cursor.kind is CursorKind.VAR_DECL}
    found = {name: _evaluate(probes[PROBE + name]) for name in macros if PROBE + name in probes}
    return {name: value for name, value in found.items() if value is not None}


def _evaluate(cursor: Cursor) -> int | float | str | None:
    lib = conf.lib
    lib.clang_Cursor_Evaluate.restype = ctypes.c_void_p
    lib.clang_Cursor_Evaluate.argtypes = [Cursor]
    result = ctypes.c_void_p(lib.clang_Cursor_Evaluate(cursor))
    if result.value is None:
        return None
    lib.clang_EvalResult_getAsUnsigned.restype = ctypes.c_ulonglong
    lib.clang_EvalResult_getAsLongLong.restype = ctypes.c_longlong
    lib.clang_EvalResult_getAsDouble.restype = ctypes.c_double
    lib.clang_EvalResult_getAsStr.restype = ctypes.c_char_p
    kind = lib.clang_EvalResult_getKind(result)
    value: int | float | str | None = None
    if kind == INT:
        unsigned = lib.clang_EvalResult_isUnsignedInt(result)
        value = lib.clang_EvalResult_getAsUnsigned(result) if unsigned else lib.clang_EvalResult_getAsLongLong(result)
    elif kind == FLOAT:
        value = lib.clang_EvalResult_getAsDouble(result)
    elif kind in TEXTS:
        value = lib.clang_EvalResult_getAsStr(result).decode()
    lib.clang_EvalResult_dispose(result)
    return value
