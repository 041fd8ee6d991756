"""A descriptor of cuDNN's backend API: created, filled, finalized, destroyed exactly once; and cuDNN's dtype numbers.

`lower.py` and `engines.py` are built on it. Descriptors need no GPU. This module does not depend on operations.
"""

from __future__ import annotations

import ctypes
from typing import Any

from cudabind.sys import cudnn
from dispatch.keys import BF16, BOOL, E8M0, F8E4M3, F8E5M2, F16, F32, F64, I8, I32, I64, U8, Dtype
from dispatch.libraries.finalizer import finalizer

__all__ = ["DATA_TYPE", "Descriptor"]

KIND: Any = cudnn.cudnnBackendDescriptorType_t
ATTRIBUTE: Any = cudnn.cudnnBackendAttributeName_t
TYPE: Any = cudnn.cudnnBackendAttributeType_t

DATA_TYPE: dict[Dtype, int] = {
    F32: cudnn.cudnnDataType_t.CUDNN_DATA_FLOAT,
    F64: cudnn.cudnnDataType_t.CUDNN_DATA_DOUBLE,
    F16: cudnn.cudnnDataType_t.CUDNN_DATA_HALF,
    BF16: cudnn.cudnnDataType_t.CUDNN_DATA_BFLOAT16,
    F8E4M3: cudnn.cudnnDataType_t.CUDNN_DATA_FP8_E4M3,
    F8E5M2: cudnn.cudnnDataType_t.CUDNN_DATA_FP8_E5M2,
    E8M0: cudnn.cudnnDataType_t.CUDNN_DATA_FP8_E8M0,
    I8: cudnn.cudnnDataType_t.CUDNN_DATA_INT8,
    U8: cudnn.cudnnDataType_t.CUDNN_DATA_UINT8,
    I32: cudnn.cudnnDataType_t.CUDNN_DATA_INT32,
    I64: cudnn.cudnnDataType_t.CUDNN_DATA_INT64,
    BOOL: cudnn.cudnnDataType_t.CUDNN_DATA_BOOLEAN,
}
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


class Descriptor:
    """One `cudnnBackendDescriptor_t`; it keeps the descriptors that it refers to."""

    __slots__ = ("_parts", "c")

    def __init__(self, kind: str) -> None:
        self.c = cudnn.cudnnBackendDescriptor_t()
        self._parts: list[Descriptor] = []
        cudnn.cudnnBackendCreateDescriptor(KIND[f"CUDNN_BACKEND_{kind}_DESCRIPTOR"], self.c)

    def set(self, name: str, kind: str, *values: Any) -> Descriptor:
        """Set an attribute, named without CUDNN_ATTR_, from values of a type named without CUDNN_TYPE_."""
        if kind == "BACKEND_DESCRIPTOR":
            self._parts.extend(values)
            values = tuple(part.c.value for part in values)
        array = (C_TYPE.get(kind, ctypes.c_int) * len(values))(*values)
        attribute, number = ATTRIBUTE[f"CUDNN_ATTR_{name}"], TYPE[f"CUDNN_TYPE_{kind}"]
        cudnn.cudnnBackendSetAttribute(self.c, attribute, number, len(values), array)
        return self

    def set_text(self, name: str, text: bytes) -> Descriptor:
        """Set a text attribute."""
        attribute = ATTRIBUTE[f"CUDNN_ATTR_{name}"]
        cudnn.cudnnBackendSetAttribute(self.c, attribute, TYPE.CUDNN_TYPE_CHAR, len(text), text)
        return self

    def finalize(self) -> Descriptor:
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

    def get_descriptors(self, name: str, empty: list[Descriptor]) -> list[Descriptor]:
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
