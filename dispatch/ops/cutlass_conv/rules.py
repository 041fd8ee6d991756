"""What a row of CUTLASS's convolutions asks of a request beyond its dtypes: what its kernels can step through.

Each rule gives the reason in the words "needs …, has …", or "" where the request is fine. The limits of im2col tensor
maps are those of `cuTensorMapEncodeIm2col`.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from dispatch.core.layouts import lies_dense
from dispatch.device.tensor import Tensor
from dispatch.errors import Refused
from dispatch.libraries.cutlass.evt import linear_combination
from dispatch.libraries.cutlass.visitors import lower
from dispatch.ops.cutlass_conv.problem import alignments, dims_of, images, operands_of, spatial

if TYPE_CHECKING:
    from dispatch.ops.cutlass_conv.base import TreedConvRequest

__all__ = [
    "buildable",
    "by_4_bytes",
    "by_16_bytes",
    "channels_last",
    "dense_vectors",
    "grouped_forward",
    "im2col_limits",
    "linear",
    "multistage_limits",
    "numbers_alone",
    "one_group",
    "unit_stride",
]

STEPS_LIMIT = 8  # of a tensor map's traversal
TAPS_LIMIT = 32  # bits of a multistage kernel's masks
BYTES_LIMIT = 1 << 31
INT_LIMIT = 1 << 31
TILE = 64  # filters of a multistage kernel's small tile


def channels_last(request: TreedConvRequest) -> str:
    """Kernels step through channels first: NCHW has to be copied to NHWC, which nothing here does behind one's back."""
    wrong = [f"{name} {tensor.layout}" for name, tensor in images(request).items() if not _last(tensor)]
    hint = "channels_last(x) of dispatch.ops.cutlass_conv copies one"
    return f"needs images and filters dense with channels last, has {' and '.join(wrong)}: {hint}" if wrong else ""


def _last(tensor: Tensor) -> bool:
    return lies_dense(tensor.layout, last=True)


def by_16_bytes(request: TreedConvRequest) -> str:
    """Tensor maps: everything starts at a multiple of 16 bytes, and the channels fill multiples of 16 bytes."""
    low = min(alignments(request))
    wrong = [name for name, x in images(request).items() if x.layout.alignment < 16]
    wrong += [
        name for name, made in request.produced.items() if len(made.shape) > 2 and _odd(made.shape[1], made.dtype)
    ]
    wrong += [name for name, x in images(request).items() if _odd(x.shape[1], x.dtype)]
    if low >= 16 and not wrong:
        return ""
    return f"needs channels of and at multiples of 16 bytes, has {_said(request)}"


def _odd(channels: int, dtype: object) -> bool:
    bits: int = getattr(dtype, "bits", 8)
    return channels * bits % 128 != 0


def by_4_bytes(request: TreedConvRequest) -> str:
    """Multistage kernels copy at least 4 bytes at a time; those of three axes 16."""
    inside, result = alignments(request)
    if dims_of(request) == 3 and inside < 16:
        return f"needs channels of and at multiples of 16 bytes for three axes, has {_said(request)}"
    if inside < 4 or result < request.result_dtype.bits // 8:
        return f"needs channels of and at multiples of 4 bytes, has {_said(request)}"
    return ""


def _said(request: TreedConvRequest) -> str:
    return ", ".join(f"{name} {tensor.layout}" for name, tensor in images(request).items())


def one_group(request: TreedConvRequest) -> str:
    """CUTLASS's kernels for sm_90, and its gradients, know no groups."""
    return f"needs one group, has {request.groups}" if request.groups > 1 else ""


def grouped_forward(request: TreedConvRequest) -> str:
    """Groups: the filters of each fill tiles of 64, or several groups fill one; two spatial axes at most."""
    if request.groups == 1:
        return ""
    if dims_of(request) == 3:
        return f"needs one group for three axes, has {request.groups}"
    each = request.w_shape[0] // request.groups
    if each % TILE and TILE % each:
        return f"needs a multiple or a divisor of {TILE} filters in each group, has {each}"
    return ""


def unit_stride(request: TreedConvRequest) -> str:
    """The gradient of the data by im2col steps over every pixel."""
    return "" if set(request.steps.stride) == {1} else f"needs stride 1, has {request.steps.stride}"


def im2col_limits(request: TreedConvRequest) -> str:
    """An im2col tensor map holds corners and the reach of the filter in 8 bits for two axes, in 5 for three."""
    dims = dims_of(request)
    corner, reach = 1 << (16 // dims - 1), (1 << (16 // dims)) - 1
    along = spatial(request)
    for place in range(dims):
        size, step, dilation = (along[name][place] for name in ("w", "stride", "dilation"))
        before, behind = along["pre"][place], along["post"][place]
        span = (size - 1) * dilation
        lower, upper = -before, behind - span
        if request.mode == "bwd_data":
            lower = before - span
            upper = lower + along["x"][place] - along["y"][place]
        if span >= reach or not all(-corner <= value < corner for value in (lower, upper)):
            return (
                f"needs padding up to {corner} and a filter that reaches {reach} at most, has {before} and {span + 1}"
            )
        if step > STEPS_LIMIT:
            return f"needs a stride of {STEPS_LIMIT} at most, has {step}"
    return _countable(request)


def _countable(request: TreedConvRequest) -> str:
    most = max(prod(shape) for shape in (request.x_shape, request.w_shape, request.y_shape))
    return "" if most < INT_LIMIT else f"needs tensors of less than {INT_LIMIT} elements, has {most}"


def multistage_limits(request: TreedConvRequest) -> str:
    """Multistage kernels count bytes in 31 bits and taps in a mask; under a stride, gradients know no dilation."""
    size = max(request.dtypes[0].bits, request.result_dtype.bits) // 8  # type: ignore[union-attr]  # it is there
    most = size * max(prod(shape) for shape in (request.x_shape, request.w_shape, request.y_shape))
    if most >= BYTES_LIMIT:
        return f"needs tensors of less than {BYTES_LIMIT} bytes, has {most}"
    if max(request.w_shape[2:]) > TAPS_LIMIT:
        return f"needs filters of {TAPS_LIMIT} taps along an axis at most, has {request.w_shape[2:]}"
    steps = request.steps
    strided = request.mode == "bwd_data" and max(steps.stride) > 1 and dims_of(request) == 2
    if strided and max(steps.dilation) > 1:
        return f"needs dilation 1 under a stride, has {steps.dilation}"
    return ""


def buildable(request: TreedConvRequest) -> str:
    """CUTLASS has visitors for the whole tree, over operands of these dtypes."""
    try:
        lower(request.tree, operands_of(request), request.result_dtype, None if request.c is None else request.c.dtype)
    except Refused as refused:
        return str(refused)
    return ""


def numbers_alone(request: TreedConvRequest) -> str:
    """The gradient of filters has channels and taps in one mode, along which CUTLASS has no vectors."""
    others = [name for name, kind in request.kinds.items() if kind != "scalar"]
    return f"needs an epilogue of numbers and c, has {', '.join(others)}" if others else ""


def dense_vectors(request: TreedConvRequest) -> str:
    """Vectors are read and reduced element after element."""
    wrong = [
        f"a dense {name}, has {given.layout}"
        for name, given in request.given.items()
        if isinstance(given, Tensor)
        and request.kinds[name] in ("row", "col", "reduce")
        and not given.layout.is_contiguous
    ]
    return f"needs {' and '.join(wrong)}" if wrong else ""


def linear(request: TreedConvRequest) -> str:
    """Multistage kernels scale and add."""
    if request.tree != linear_combination(with_source=request.c is not None):
        return f"needs no epilogue but alpha, beta and c, has {request.epilogue}"
    return f"needs no config, has {request.config}" if request.config is not None else ""
