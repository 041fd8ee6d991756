"""How each library tells its version: one function per style of NVIDIA's, each returning such as ``"13.1.0"``.

Called by `_load`, which knows from the row's `version_style` which one to ask. The call may load a part of the library
(cuDNN's does), but it never makes a CUDA context.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

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


STYLES: dict[str, Callable[[Callable[..., int]], str]] = {
    "property": _property,
    "pair": _pair,
    "thousands": _thousands,
    "ten_thousands": _ten_thousands,
    "returned": _returned,
}
