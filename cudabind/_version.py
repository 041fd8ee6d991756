"""Reads the version of a library: one function for each of NVIDIA's styles, each returns a text such as ``"13.1.0"``.

`_load` calls the one that the row's `version_style` names. The call may load a part of the library (cuDNN's does), but
it never creates a CUDA context.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import TYPE_CHECKING, Any

from cudabind._lazy import key

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["STYLES"]


def _property(function: Callable[..., int]) -> str:
    """Major, minor and patch by libraryPropertyType 0, 1, 2, as cublasLtGetProperty has it."""
    value = ctypes.c_int()
    return ".".join(str(value.value) for kind in range(3) if function(kind, ctypes.byref(value)) == 0)


def _pair(function: Callable[..., int]) -> str:
    """Major and minor in two results, as nvrtcVersion has it."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    function(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _thousands(function: Callable[..., int]) -> str:
    """One number, 1000 major + 10 minor, as cuDriverGetVersion has it."""
    value = ctypes.c_int()
    function(ctypes.byref(value))
    return f"{value.value // 1000}.{value.value % 1000 // 10}"


def _ten_thousands(function: Callable[..., int]) -> str:
    """One number, 10000 major + 100 minor + patch, as ncclGetVersion has it."""
    value = ctypes.c_int()
    function(ctypes.byref(value))
    return _three_parts(value.value)


def _returned(function: Callable[..., int]) -> str:
    """The same number, but returned, as cutensorGetVersion has it."""
    return _three_parts(function())


def _three_parts(number: int) -> str:
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _triple(function: Callable[..., int]) -> str:
    """Major, minor and patch in three results, as mathdxGetVersionEx has it."""
    parts = [ctypes.c_int() for _ in range(3)]
    function(*map(ctypes.byref, parts))
    return ".".join(str(part.value) for part in parts)


def _pointer(function: Any) -> str:
    """The address of three ints, as nppGetLibVersion has it."""
    function.restype = ctypes.POINTER(ctypes.c_int * 3)
    return ".".join(map(str, function().contents))


def _cupti(function: Callable[..., int]) -> str:
    """One number, 10000 major + 100 minor from CUDA 13.0 on, a running number before, as cuptiGetVersion has it."""
    value = ctypes.c_int()
    if function(ctypes.byref(value)) != 0:  # newer ones fail without a driver
        return ""
    if value.value < 10000:
        return "12.9" if value.value >= 28 else "12.8"
    return f"{value.value // 10000}.{value.value // 100 % 100}"


class _Struct(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("others", ctypes.c_uint32 * 3))


class _TaggedStruct(ctypes.Structure):
    _fields_ = (("tag", ctypes.c_int), ("size", ctypes.c_size_t), ("next", ctypes.c_void_p), ("own", _Struct))


def _struct(function: Callable[..., int]) -> str:
    """A number in front of a struct, 1000 major + 100 minor + patch, as nvcompGetProperties has it."""
    filled = _Struct()
    function(ctypes.byref(filled))
    return _thousands_and_hundreds(filled.version)


def _tagged_struct(function: Callable[..., int]) -> str:
    """The same, after the tag, the size and the link at the start of all structs of nvImageCodec."""
    filled = _TaggedStruct(1, _TaggedStruct.own.offset + 8)
    function(ctypes.byref(filled))
    return _thousands_and_hundreds(filled.own.version)


def _thousands_and_hundreds(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 100}.{number % 100}"


def by_symbols(dll: ctypes.CDLL, module: str, oldest: str) -> str:
    """The version of a library that reports none: the newest version that first had one of its exported functions."""
    since: dict[str, str] = importlib.import_module(module).SINCE
    return max([oldest, *(version for name, version in since.items() if hasattr(dll, name))], key=key)


STYLES: dict[str, Callable[[Callable[..., int]], str]] = {
    "property": _property,
    "pair": _pair,
    "thousands": _thousands,
    "ten_thousands": _ten_thousands,
    "returned": _returned,
    "triple": _triple,
    "pointer": _pointer,
    "cupti": _cupti,
    "struct": _struct,
    "tagged_struct": _tagged_struct,
}
