"""What a row of convolution may ask of a request beyond its dtypes: what cuDNN has engines for.

Each rule gives the reason in the words "needs …, has …", or "" where the request is fine. They were read off the
engine heuristics of cuDNN 9.19 for sm_90.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.core.layouts import lies_dense
from dispatch.keys import F32, F64, Compute
from dispatch.ops.conv.request import Activation

if TYPE_CHECKING:
    from dispatch.ops.conv.request import ConvFwdRequest, ConvRequest

__all__ = ["dense_filter", "dense_nhwc", "fixed_epilogue", "fp8_form", "fuses", "fuses_in_nhwc", "plain", "sound_tanh"]

# With a bias and one of these, cuDNN has kernels made beforehand, in any layout; all else it compiles, for NHWC alone.
FIXED = (Activation.IDENTITY, Activation.RELU_FWD, Activation.SIGMOID_FWD, Activation.TANH_FWD)


def _fixed(request: ConvFwdRequest) -> bool:
    if not request.fused:
        return True
    return (
        request.bias is not None and request.activation in FIXED and request.alpha == 1 and request.beta in (0, 1)
    ) and (request.z is None or request.activation is Activation.RELU_FWD)


def fixed_epilogue(request: ConvFwdRequest) -> str:
    """f64: a bias with no activation, RELU, SIGMOID or TANH, or a residual, bias and RELU."""
    if _fixed(request):
        return ""
    return "needs a bias with IDENTITY, RELU_FWD, SIGMOID_FWD or TANH_FWD, or z, bias and RELU_FWD, has " + _said(
        request
    )


def fuses_in_nhwc(request: ConvFwdRequest) -> str:
    """What is not bias + RELU, SIGMOID or TANH is fused in NHWC alone."""
    if _fixed(request) or request.channels_last:
        return ""
    return f"needs x, w and z with channels last for {_said(request)}, has {request.x.layout}"


def sound_tanh(request: ConvFwdRequest) -> str:
    """TANH_FWD with channels last, of f16, bf16 or TF32: cuDNN compiles it, and what was made beforehand gives NaN.

    Of an argument above 44, or 354 in f64 (seen on an H200, cuDNN 9.19).
    """
    if request.activation is not Activation.TANH_FWD:
        return ""
    if not request.channels_last:
        return f"needs x, w and z with channels last for TANH_FWD, has {request.x.layout}: activation() does it apart"
    if request.x.dtype is F64 or (request.x.dtype is F32 and request.compute is not Compute.COMPUTE_32F_FAST_TF32):
        return f"needs f16, bf16 or TF32 for TANH_FWD, has {request.x.dtype}: activation() does it apart"
    return ""


def plain(request: ConvFwdRequest) -> str:
    """i8: nothing is fused; what fuses has a row of its own."""
    return f"needs a convolution alone, has {_said(request)}" if request.fused else ""


def fuses(request: ConvFwdRequest) -> str:
    """i8 with something fused: a bias, a residual or an activation."""
    return "" if request.fused else "needs a bias, z or an activation, has a convolution alone"


def dense_filter(request: ConvRequest) -> str:
    """The filter has no gaps."""
    layout = request.layout_of("out" if request.op == "conv_bwd_filter" else "w")
    reach = 1 + sum((extent - 1) * stride for extent, stride in zip(layout.shape, layout.strides, strict=True))
    return (
        "" if reach == layout.size else f"needs a filter without gaps, has {layout}: copy it with dev.array(w.numpy())"
    )


def fp8_form(request: ConvFwdRequest) -> str:
    """fp8: two or three spatial axes, and one group, or groups of a multiple of 8 channels."""
    if request.x.ndim == 3:
        return f"needs two spatial axes or three, has x {request.x.layout}"
    if request.groups > 1 and request.w_shape[1] % 8:
        return f"needs groups of a multiple of 8 channels, has {request.w_shape[1]}"
    return ""


def dense_nhwc(request: ConvFwdRequest) -> str:
    """Every operand is dense, with its channels last (seen on an H200: other layouts are taken and come out wrong)."""
    for name in ("x", "w", "z", "out"):
        if name == "z" and request.z is None:
            continue
        layout = request.layout_of(name)
        if not lies_dense(layout, last=True):
            return f"needs {name} dense with channels last, has {layout}"
    return ""


def _said(request: ConvFwdRequest) -> str:
    parts = [name for name in ("z", "bias") if getattr(request, name) is not None]
    return f"{' + '.join([*parts, request.activation.name])} with alpha {request.alpha} and beta {request.beta}"
