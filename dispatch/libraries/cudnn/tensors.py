"""cuDNN's descriptors as objects that free themselves: a tensor's from its layout, and any other kind by its name.

The plans of the ops make them once and hold them. Descriptors need no GPU. This module launches nothing.
"""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any

from cudabind.sys import cudnn
from dispatch.device.layout import c_strides
from dispatch.keys import BF16, BOOL, F8E4M3, F8E5M2, F16, F32, F64, I8, I32, I64, U8

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
    I8: T.CUDNN_DATA_INT8,
    U8: T.CUDNN_DATA_UINT8,
    I32: T.CUDNN_DATA_INT32,
    I64: T.CUDNN_DATA_INT64,
    BOOL: T.CUDNN_DATA_BOOLEAN,
}
MIN_AXES = 4  # what a descriptor of a tensor must have


class Descriptor:
    """A descriptor of any kind, destroyed with this object, once; `handle` is what cuDNN's functions take."""

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
    """The descriptor of a tensor of up to eight axes; shorter ones get axes of one element behind."""
    more = max(0, MIN_AXES - len(extents))
    dims, steps = (*extents, *[1] * more), (*strides, *[1] * more)
    made = Descriptor("Tensor")
    kind = ctypes.c_int32 * len(dims)
    cudnn.cudnnSetTensorNdDescriptor(made.handle, DTYPES[dtype], len(dims), kind(*dims), kind(*steps))
    return made


def tensor_3d(layout: Layout) -> Descriptor:
    """The descriptor of a tensor of three axes, which the recurrent networks and CTC want to be no more.

    Axes of one element step as in a dense tensor: a view may have any stride there, such as the 0 of `x[:, None]`.
    """
    made = Descriptor("Tensor")
    kind = ctypes.c_int32 * 3
    own = zip(layout.shape, layout.strides, c_strides(layout.shape), strict=True)
    dims, steps = kind(*layout.shape), kind(*(step if extent > 1 else dense for extent, step, dense in own))
    cudnn.cudnnSetTensorNdDescriptor(made.handle, DTYPES[layout.dtype], 3, dims, steps)
    return made


def scalar_type(dtype: Dtype) -> Any:
    """The C type of alpha and beta for tensors of a dtype: double for f64, else float."""
    return ctypes.c_double if dtype is F64 else ctypes.c_float
