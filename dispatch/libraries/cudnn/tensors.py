"""cuDNN's legacy descriptors as objects that free themselves: of tensors by layout, and of any other kind by name.

The plans of the ops create them once and keep them. Descriptors need no GPU. This module launches nothing.
"""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any

from cudabind.sys import cudnn
from dispatch.device.layout import c_strides
from dispatch.keys import BF16, BOOL, E8M0, F8E4M3, F8E5M2, F16, F32, F64, I8, I32, I64, U8

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.device.layout import Layout
    from dispatch.keys import Dtype

__all__ = ["DTYPES", "Descriptor", "scalar_type", "tensor", "tensor_3d"]

T = cudnn.cudnnDataType_t
DTYPES = {
    F32: T.CUDNN_DATA_FLOAT,
    F64: T.CUDNN_DATA_DOUBLE,
    F16: T.CUDNN_DATA_HALF,
    BF16: T.CUDNN_DATA_BFLOAT16,
    F8E4M3: T.CUDNN_DATA_FP8_E4M3,
    F8E5M2: T.CUDNN_DATA_FP8_E5M2,
    E8M0: T.CUDNN_DATA_FP8_E8M0,
    I8: T.CUDNN_DATA_INT8,
    U8: T.CUDNN_DATA_UINT8,
    I32: T.CUDNN_DATA_INT32,
    I64: T.CUDNN_DATA_INT64,
    BOOL: T.CUDNN_DATA_BOOLEAN,
}
MIN_AXES = 4  # the minimum number of axes of a tensor descriptor


class Descriptor:
    """A descriptor of any kind, destroyed once with this object; `handle` is the argument for cuDNN's functions."""

    __slots__ = ("_destroy", "handle")

    def __init__(self, kind: str) -> None:
        """`kind` as in `cudnnCreate<kind>Descriptor`: Tensor, Pooling, Activation, …"""
        create: Any = getattr(cudnn, f"cudnnCreate{kind}Descriptor")
        destroy: Any = getattr(cudnn, f"cudnnDestroy{kind}Descriptor")
        self._destroy: Callable[[Any], int] = destroy.unchecked
        self.handle: Any = getattr(cudnn, f"cudnn{kind}Descriptor_t")()
        create(ctypes.byref(self.handle))

    def __del__(self) -> None:
        handle = getattr(self, "handle", None)
        if handle and not sys.is_finalizing():
            self._destroy(handle)


def tensor(dtype: Dtype, extents: Sequence[int], strides: Sequence[int]) -> Descriptor:
    """The descriptor of a tensor of up to eight axes; axes of one element are appended up to MIN_AXES."""
    missing = max(0, MIN_AXES - len(extents))
    dims, padded_strides = (*extents, *[1] * missing), (*strides, *[1] * missing)
    descriptor = Descriptor("Tensor")
    kind = ctypes.c_int32 * len(dims)
    cudnn.cudnnSetTensorNdDescriptor(descriptor.handle, DTYPES[dtype], len(dims), kind(*dims), kind(*padded_strides))
    return descriptor


def tensor_3d(layout: Layout) -> Descriptor:
    """The descriptor of a tensor of three axes; recurrent networks and CTC require exactly three.

    Axes of one element get the stride of a dense tensor: a view may have any stride there, such as the 0 of
    `x[:, None]`.
    """
    descriptor = Descriptor("Tensor")
    kind = ctypes.c_int32 * 3
    axes = zip(layout.shape, layout.strides, c_strides(layout.shape), strict=True)
    dims, strides = kind(*layout.shape), kind(*(stride if extent > 1 else dense for extent, stride, dense in axes))
    cudnn.cudnnSetTensorNdDescriptor(descriptor.handle, DTYPES[layout.dtype], 3, dims, strides)
    return descriptor


def scalar_type(dtype: Dtype) -> Any:
    """The C type of alpha and beta for tensors of a dtype: double for f64, else float."""
    return ctypes.c_double if dtype is F64 else ctypes.c_float
