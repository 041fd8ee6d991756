"""What a row of convolution may ask of a request beyond its dtypes: what cuDNN has engines for.

Each rule gives the reason in the words "needs …, has …", or "" where the request is fine. They were read off the
engine heuristics of cuDNN 9.19 for sm_90.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.ops.conv.request import Activation

if TYPE_CHECKING:
    from dispatch.ops.conv.request import ConvFwdRequest, ConvRequest

__all__ = ["dense_filter", "fixed_epilogue", "fp8_layout", "fuses_in_nhwc", "plain"]

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
    residual = request.z is not None and request.bias is not None and request.activation is Activation.RELU_FWD
    if _fixed(request) or residual:
        return ""
    return "needs a bias with IDENTITY, RELU_FWD, SIGMOID_FWD or TANH_FWD, or z, bias and RELU_FWD, has " + _said(
        request
    )


def fuses_in_nhwc(request: ConvFwdRequest) -> str:
    """What is not bias + RELU, SIGMOID or TANH is fused in NHWC alone."""
    if _fixed(request) or request.channels_last:
        return ""
    return f"needs x, w and z with channels last for {_said(request)}, has {request.x.layout}"


def plain(request: ConvFwdRequest) -> str:
    """i8: nothing is fused."""
    return f"needs a convolution alone, has {_said(request)}" if request.fused else ""


def dense_filter(request: ConvRequest) -> str:
    """The filter has no gaps."""
    layout = request.layout_of("out" if request.op == "conv_bwd_filter" else "w")
    reach = 1 + sum((extent - 1) * stride for extent, stride in zip(layout.shape, layout.strides, strict=True))
    return (
        "" if reach == layout.size else f"needs a filter without gaps, has {layout}: copy it with dev.array(w.numpy())"
    )


def fp8_layout(request: ConvRequest) -> str:
    """fp8: channels last, and whole 16 bytes of them."""
    wrong = []
    if not request.channels_last:
        wrong.append("operands with channels last")
    for name, channels in (("x", request.w_shape[1]), ("w", request.w_shape[0])):
        if channels % 16:
            wrong.append(f"a multiple of 16 channels of {name}, has {channels}")
    return f"needs {' and '.join(wrong)}" if wrong else ""


def _said(request: ConvFwdRequest) -> str:
    parts = [name for name in ("z", "bias") if getattr(request, name) is not None]
    return f"{' + '.join([*parts, request.activation.name])} with alpha {request.alpha} and beta {request.beta}"
