"""The object-like macros of a header as Python values: libclang evaluates them, not this file.

Called by `parse`. Each macro is used in a probe variable of a second parse; what does not compile as an expression
(attributes, calling conventions, guards) is no constant and drops out by itself.
"""

from __future__ import annotations

import ctypes
from itertools import islice
from typing import TYPE_CHECKING

from clang.cindex import Cursor, CursorKind, Diagnostic, TranslationUnit, conf

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PROBE = "cudabind_probe_"
INT, FLOAT, TEXTS = 1, 2, (4, 5)  # CXEvalResultKind


def names(root: Cursor, wanted: Callable[[Cursor], bool]) -> list[str]:
    """The macros without parameters and with a body, in the order of the header."""
    return [
        cursor.spelling
        for cursor in root.get_children()
        if cursor.kind is CursorKind.MACRO_DEFINITION
        and wanted(cursor)
        and len(list(islice(cursor.get_tokens(), 2))) == 2
        and not conf.lib.clang_Cursor_isMacroFunctionLike(cursor)
    ]


def probe(macros: Sequence[str]) -> str:
    """The lines that make the compiler evaluate the macros; a text in parentheses would not be evaluated."""
    return "".join(f"static const __auto_type {PROBE}{name} = {name};\n" for name in macros)


def probes(unit: TranslationUnit) -> dict[str, Cursor]:
    """The probe variables that compiled, by the macro each is for."""
    wrong = {each.location.line for each in unit.diagnostics if each.severity >= Diagnostic.Error}
    return {
        cursor.spelling.removeprefix(PROBE): cursor
        for cursor in unit.cursor.get_children()
        if cursor.kind is CursorKind.VAR_DECL
        and cursor.spelling.startswith(PROBE)
        and cursor.location.line not in wrong
    }


def renamed(probe_variable: Cursor) -> str:
    """The function that a macro stands for (`#define cublasCreate cublasCreate_v2`), or ``""``."""
    for cursor in probe_variable.walk_preorder():
        target = cursor.referenced if cursor.kind is CursorKind.DECL_REF_EXPR else None
        if target is not None and target.kind is CursorKind.FUNCTION_DECL:
            return str(target.spelling)
    return ""


def evaluate(cursor: Cursor) -> int | float | str | None:
    """The value of a probe variable, or None where it has none at compile time."""
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
