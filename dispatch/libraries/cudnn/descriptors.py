"""A descriptor of cuDNN's backend API: created, filled, finalized, destroyed exactly once.

`lower.py` and `engines.py` are built on it. Descriptors need no GPU. This module does not depend on operations.
"""

from __future__ import annotations

import ctypes
from typing import Any

from cudabind.sys import cudnn
from dispatch.libraries.finalizer import finalizer

__all__ = ["BackendDescriptor"]

KIND: Any = cudnn.cudnnBackendDescriptorType_t
ATTRIBUTE: Any = cudnn.cudnnBackendAttributeName_t
TYPE: Any = cudnn.cudnnBackendAttributeType_t

C_TYPE: dict[str, Any] = {
    "HANDLE": cudnn.cudnnHandle_t,
    "BACKEND_DESCRIPTOR": ctypes.c_void_p,
    "INT64": ctypes.c_int64,
    "INT32": ctypes.c_int32,
    "FLOAT": ctypes.c_float,
    "DOUBLE": ctypes.c_double,
    "BOOLEAN": ctypes.c_bool,
    "VOID_PTR": ctypes.c_void_p,
}  # all other types are enums


class BackendDescriptor:
    """One `cudnnBackendDescriptor_t`; it keeps the descriptors that it refers to."""

    __slots__ = ("_parts", "c")

    def __init__(self, kind: str) -> None:
        self.c = cudnn.cudnnBackendDescriptor_t()
        self._parts: list[BackendDescriptor] = []
        cudnn.cudnnBackendCreateDescriptor(KIND[f"CUDNN_BACKEND_{kind}_DESCRIPTOR"], self.c)

    def set(self, name: str, kind: str, *values: Any) -> BackendDescriptor:
        """Set an attribute, named without CUDNN_ATTR_, from values of a type named without CUDNN_TYPE_."""
        if kind == "BACKEND_DESCRIPTOR":
            self._parts.extend(values)
            values = tuple(part.c.value for part in values)
        array = (C_TYPE.get(kind, ctypes.c_int) * len(values))(*values)
        attribute, number = ATTRIBUTE[f"CUDNN_ATTR_{name}"], TYPE[f"CUDNN_TYPE_{kind}"]
        cudnn.cudnnBackendSetAttribute(self.c, attribute, number, len(values), array)
        return self

    def set_text(self, name: str, text: bytes) -> BackendDescriptor:
        """Set a text attribute."""
        attribute = ATTRIBUTE[f"CUDNN_ATTR_{name}"]
        cudnn.cudnnBackendSetAttribute(self.c, attribute, TYPE.CUDNN_TYPE_CHAR, len(text), text)
        return self

    def finalize(self) -> BackendDescriptor:
        """Make cuDNN check the descriptor, which cannot be changed any more after that."""
        cudnn.cudnnBackendFinalize(self.c)
        return self

    def get_ints(self, name: str, kind: str = "INT64", most: int = 1) -> list[int]:
        """Up to `most` integers (or enums) of an attribute."""
        array = (C_TYPE.get(kind, ctypes.c_int) * most)()
        return list(array[: self._get(name, kind, most, array)])

    def get_text(self, name: str) -> bytes:
        """A text attribute."""
        size = self._get(name, "CHAR", 0, None)
        text = ctypes.create_string_buffer(size)
        self._get(name, "CHAR", size, text)
        return text.raw

    def get_descriptors(self, name: str, empty: list[BackendDescriptor]) -> list[BackendDescriptor]:
        """Fill empty descriptors with those of an attribute; returns the filled ones."""
        array = (ctypes.c_void_p * len(empty))(*(one.c.value for one in empty))
        return empty[: self._get(name, "BACKEND_DESCRIPTOR", len(empty), array)]

    def _get(self, name: str, kind: str, most: int, array: Any) -> int:
        count = ctypes.c_int64()
        attribute, number = ATTRIBUTE[f"CUDNN_ATTR_{name}"], TYPE[f"CUDNN_TYPE_{kind}"]
        cudnn.cudnnBackendGetAttribute(self.c, attribute, number, most, ctypes.byref(count), array)
        return count.value

    @finalizer
    def __del__(self) -> None:
        if self.c.value:
            cudnn.cudnnBackendDestroyDescriptor.unchecked(self.c)
            self.c.value = None
