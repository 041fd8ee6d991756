"""What a row of convolution requires of a request beyond its dtypes: the limits of cuDNN's engines and CUTLASS.

Each rule returns the reason for a refusal in the words "needs …, has …", or "" if it is met. cuDNN's rules follow the
engine heuristics of cuDNN 9.19 for sm_90; the limits of im2col tensor maps are those of `cuTensorMapEncodeIm2col`.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

from dispatch.core.layouts import lies_dense
from dispatch.device.tensor import Tensor
from dispatch.errors import Refused
from dispatch.keys import F32, F64, Compute, member
from dispatch.libraries.cutlass.evt import linear_combination
from dispatch.libraries.cutlass.visitors import lower
from dispatch.ops.conv.problem import alignments, dims_of, images, operands_of, spatial_extents
from dispatch.ops.conv.request import Activation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.device.layout import Layout
    from dispatch.ops.conv.request import ConvFwdRequest, ConvRequest

__all__ = [
    "buildable",
    "by_4_bytes",
    "by_16_bytes",
    "channels_last",
    "dense_filter",
    "dense_nhwc",
    "dense_vectors",
    "exact_tanh",
    "fixed_epilogue",
    "fp8_form",
    "fuses_in_nhwc",
    "gaps_in_one_order",
    "grouped_forward",
    "im2col_limits",
    "linear",
    "multistage_limits",
    "no_cudnn_choices",
    "no_tree",
    "nothing_fused",
    "one_group",
    "scalars_only",
    "something_fused",
    "unit_stride",
]

STEPS_LIMIT = 8  # the largest traversal stride of a tensor map
TAPS_LIMIT = 32  # the bits of a multistage kernel's masks
BYTES_LIMIT = 1 << 31
INT_LIMIT = 1 << 31
RATIO_LIMIT = 1 << 40  # far from f32's overflow and underflow, whatever the sums are
TILE = 64  # the filters of a multistage kernel's small tile

# With a bias and one of these, cuDNN has precompiled kernels for any layout; it compiles others, only for NHWC.
FIXED = (Activation.IDENTITY, Activation.RELU_FWD, Activation.SIGMOID_FWD, Activation.TANH_FWD)


def _has_fixed_epilogue(request: ConvFwdRequest) -> bool:
    if not request.fused:
        return True
    return (
        request.bias is not None and request.activation in FIXED and request.alpha == 1 and request.beta in (0, 1)
    ) and (request.z is None or request.activation is Activation.RELU_FWD)


def fixed_epilogue(request: ConvFwdRequest) -> str:
    """f64: a bias with no activation, RELU, SIGMOID or TANH, or a residual, bias and RELU."""
    if _has_fixed_epilogue(request):
        return ""
    return (
        "needs a bias with IDENTITY, RELU_FWD, SIGMOID_FWD or TANH_FWD, or z, bias and RELU_FWD, has "
        + _fusion_text(request)
    )


def fuses_in_nhwc(request: ConvFwdRequest) -> str:
    """Other fused operations than bias + RELU, SIGMOID or TANH are supported only in NHWC.

    cuDNN 9.19 accepts other orders of some operands, but gives wrong results (seen on an H200).
    """
    if _has_fixed_epilogue(request):
        return ""
    names = _image_and_filter_names(request)
    for name in names:
        layout = request.layout_of(name)
        if not request.channels_last or not _is_in_order(layout, (0, *range(2, len(layout.shape)), 1)):
            listed = f"{', '.join(names[:-1])} and {names[-1]}"
            return f"needs {listed} with channels last for {_fusion_text(request)}, has {name} {layout}"
    alpha, beta = abs(float(request.alpha)), abs(float(request.beta or 0))
    if request.z is not None and alpha and beta and not 1 / RATIO_LIMIT <= alpha / beta <= RATIO_LIMIT:
        # The sum is scaled by beta, and the convolution by alpha / beta in f32 (graph.py).
        return f"needs alpha / beta from 2^-40 to 2^40 if z is added, has {request.alpha} and {request.beta}: scale z"
    return ""


def _image_and_filter_names(request: ConvRequest) -> list[str]:
    """The names of the operands that are images or filters, the result's last."""
    return [*request.operand_names[:2], *(["z"] if request.z is not None else []), "out"]


def _falls(layout: Layout, axes: Sequence[int]) -> bool:
    """Whether the strides fall in this order of the axes; axes of extent 1 do not count."""
    return all(before > after for before, after in pairwise(layout.strides[x] for x in axes if layout.shape[x] > 1))


def _is_in_order(layout: Layout, axes: Sequence[int]) -> bool:
    """Whether the strides fall in this order of the axes, the last of which is dense; axes of extent 1 do not count."""
    is_dense = layout.shape[axes[-1]] == 1 or layout.strides[axes[-1]] == 1
    return is_dense and _falls(layout, axes)


def exact_tanh(request: ConvFwdRequest) -> str:
    """TANH_FWD needs channels last, and f16, bf16 or TF32: cuDNN compiles these kernels; its precompiled ones give NaN.

    They give NaN for an argument above 44, or 354 in f64 (seen on an H200, cuDNN 9.19).
    """
    if request.activation is not Activation.TANH_FWD:
        return ""
    if not request.channels_last:
        return f"needs x, w and z with channels last for TANH_FWD, has {request.x.layout}: call activation() separately"
    if request.x.dtype is F64 or (request.x.dtype is F32 and request.compute is not Compute.COMPUTE_32F_FAST_TF32):
        return f"needs f16, bf16 or TF32 for TANH_FWD, has {request.x.dtype}: call activation() separately"
    return ""


def nothing_fused(request: ConvFwdRequest) -> str:
    """i8: nothing is fused; fused operations have a row of their own."""
    return f"needs a convolution without fused operations, has {_fusion_text(request)}" if request.fused else ""


def something_fused(request: ConvFwdRequest) -> str:
    """i8 with something fused: a bias, a residual or an activation."""
    return "" if request.fused else "needs a bias, z or an activation, has none of them"


def no_tree(request: ConvRequest) -> str:
    """No epilogue tree: cuDNN fuses only what its engines support, and adds only the content of `out` to a gradient."""
    if request.epilogue is not None:
        return f"needs no epilogue tree, has {request.epilogue}"
    if request.config is not None:
        return f"needs no config of a CUTLASS kernel, has {request.config}"
    if request.mode != "fwd" and request.z is not None:
        return f"needs out as the operand that beta scales, has z {request.z.layout}"
    return ""


def dense_filter(request: ConvRequest) -> str:
    """The filter is dense, with channels first or last; cuDNN 9.19 accepts other orders, but gives wrong results."""
    layout = request.layout_of("out" if request.op == "conv_bwd_filter" else "w")
    if lies_dense(layout, last=False) or lies_dense(layout, last=True):
        return ""
    return f"needs a filter without gaps, with channels first or last, has {layout}: copy it with w.copy()"


def gaps_in_one_order(request: ConvRequest) -> str:
    """If an image has gaps, all operands have their channels first, or all last.

    On an H200 cuDNN 9.19 gave wrong results for an f64 gradient of filters with channels last, from a dense and a
    gapped image with channels first. Dense images of any orders were right.
    """
    layouts = {name: request.layout_of(name) for name in _image_and_filter_names(request)}
    gapped = next((name for name, one in layouts.items() if one.high - one.low > one.size * one.dtype.itemsize), None)
    rank = len(request.x_shape)
    orders = (tuple(range(rank)), (0, *range(2, rank), 1))
    if gapped is None or any(all(_falls(layout, axes) for layout in layouts.values()) for axes in orders):
        return ""
    others = ", ".join(f"{name} {layout}" for name, layout in layouts.items() if name != gapped)
    needs = f"needs all operands with channels first, or all with channels last, because {gapped} has gaps"
    return f"{needs}, has {gapped} {layouts[gapped]}, {others}: copy it with {gapped}.copy()"


def fp8_form(request: ConvFwdRequest) -> str:
    """fp8: two or three spatial axes, and one group, or groups of a multiple of 8 channels."""
    if request.x.ndim == 3:
        return f"needs two or three spatial axes, has x {request.x.layout}"
    if request.groups > 1 and request.w_shape[1] % 8:
        return f"needs groups of a multiple of 8 channels, has {request.w_shape[1]}"
    return ""


def dense_nhwc(request: ConvFwdRequest) -> str:
    """All operands are dense, with channels last (seen on an H200: others are accepted but give wrong results)."""
    for name in ("x", "w", "z", "out"):
        if name == "z" and request.z is None:
            continue
        layout = request.layout_of(name)
        if not lies_dense(layout, last=True):
            return f"needs {name} dense with channels last, has {layout}"
    return ""


def _fusion_text(request: ConvFwdRequest) -> str:
    parts = [name for name in ("z", "bias") if getattr(request, name) is not None]
    return f"{' + '.join([*parts, member(request.activation).name])} with alpha {request.alpha} and beta {request.beta}"


# -- CUTLASS -----------------------------------------------------------------------------------------------------------
def no_cudnn_choices(request: ConvRequest) -> str:
    """The request uses no options of cuDNN: a kernel fuses the operations of its tree, and there is one algorithm."""
    set_apart = ("activation", "deterministic", "workspace")
    neutral = (None, False, Activation.IDENTITY)
    wrong = [f"{name} {value}" for name in set_apart if (value := getattr(request, name, None)) not in neutral]
    return f"needs none of {', '.join(set_apart)}, has {' and '.join(wrong)}" if wrong else ""


def channels_last(request: ConvRequest) -> str:
    """Images and filters have channels last: NCHW must be copied to NHWC, and no row does this implicitly."""
    wrong = [f"{name} {tensor.layout}" for name, tensor in images(request).items() if not _is_channels_last(tensor)]
    hint = "channels_last(x) of dispatch.ops.conv copies one"
    return f"needs images and filters dense with channels last, has {' and '.join(wrong)}: {hint}" if wrong else ""


def _is_channels_last(tensor: Tensor) -> bool:
    return lies_dense(tensor.layout, last=True)


def by_16_bytes(request: ConvRequest) -> str:
    """Tensor maps: everything starts at a multiple of 16 bytes, and the channels fill multiples of 16 bytes."""
    low = min(alignments(request))
    wrong = [name for name, x in images(request).items() if x.layout.alignment < 16]
    wrong += [
        name
        for name, output in request.tree_outputs.items()
        if len(output.shape) > 2 and _is_unaligned(output.shape[1], output.dtype)
    ]
    wrong += [name for name, x in images(request).items() if _is_unaligned(x.shape[1], x.dtype)]
    if low >= 16 and not wrong:
        return ""
    return f"needs channels of and at multiples of 16 bytes, has {_layouts_text(request)}"


def _is_unaligned(channels: int, dtype: object) -> bool:
    bits: int = getattr(dtype, "bits", 8)
    return channels * bits % 128 != 0


def by_4_bytes(request: ConvRequest) -> str:
    """Multistage kernels copy at least 4 bytes at a time; those for three axes copy 16."""
    inside, result = alignments(request)
    if dims_of(request) == 3 and inside < 16:
        return f"needs channels of and at multiples of 16 bytes for three axes, has {_layouts_text(request)}"
    if inside < 4 or result < request.result_dtype.bits // 8:
        return f"needs channels of and at multiples of 4 bytes, has {_layouts_text(request)}"
    return ""


def _layouts_text(request: ConvRequest) -> str:
    return ", ".join(f"{name} {tensor.layout}" for name, tensor in images(request).items())


def one_group(request: ConvRequest) -> str:
    """One group: CUTLASS's kernels for sm_90 and its gradients do not support groups."""
    return f"needs one group, has {request.groups}" if request.groups > 1 else ""


def grouped_forward(request: ConvRequest) -> str:
    """Groups: the filters of each fill tiles of 64, or several groups fill one tile; two spatial axes at most."""
    if request.groups == 1:
        return ""
    if dims_of(request) == 3:
        return f"needs one group for three axes, has {request.groups}"
    filters = request.w_shape[0] // request.groups
    if filters % TILE and TILE % filters:
        return f"needs a multiple or a divisor of {TILE} filters in each group, has {filters}"
    return ""


def unit_stride(request: ConvRequest) -> str:
    """Stride 1: the gradient of the data with im2col visits every pixel."""
    return "" if set(request.steps.stride) == {1} else f"needs stride 1, has {request.steps.stride}"


def im2col_limits(request: ConvRequest) -> str:
    """An im2col tensor map stores corners and the extent of the filter in 8 bits for two axes, in 5 for three."""
    dims = dims_of(request)
    corner, reach = 1 << (16 // dims - 1), (1 << (16 // dims)) - 1
    extents = spatial_extents(request)
    for axis in range(dims):
        size, step, dilation = (extents[name][axis] for name in ("w", "stride", "dilation"))
        before, after = extents["pre"][axis], extents["post"][axis]
        span = (size - 1) * dilation
        lower, upper = -before, after - span
        if request.mode == "bwd_data":
            lower = before - span
            upper = lower + extents["x"][axis] - extents["y"][axis]
        if span >= reach or not all(-corner <= value < corner for value in (lower, upper)):
            return (
                f"needs padding up to {corner} and a filter that reaches {reach} at most, has {before} and {span + 1}"
            )
        if step > STEPS_LIMIT:
            return f"needs a stride of {STEPS_LIMIT} at most, has {step}"
    return _element_limits(request)


def _element_limits(request: ConvRequest) -> str:
    most = max(prod(shape) for shape in (request.x_shape, request.w_shape, request.y_shape))
    return "" if most < INT_LIMIT else f"needs tensors of less than {INT_LIMIT} elements, has {most}"


def multistage_limits(request: ConvRequest) -> str:
    """Multistage kernels count bytes in 31 bits and taps in a mask; strided gradients do not support dilation."""
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


def buildable(request: ConvRequest) -> str:
    """CUTLASS has visitors for the whole tree, over operands of these dtypes."""
    try:
        lower(request.tree, operands_of(request), request.result_dtype, None if request.c is None else request.c.dtype)
    except Refused as refused:
        return str(refused)
    return ""


def scalars_only(request: ConvRequest) -> str:
    """Only scalars: the gradient of filters has channels and taps in one mode, for which CUTLASS has no vectors."""
    others = [name for name, kind in request.kinds.items() if kind != "scalar"]
    return f"needs an epilogue of numbers and z, has {', '.join(others)}" if others else ""


def dense_vectors(request: ConvRequest) -> str:
    """Vectors are dense: kernels read and reduce them element by element."""
    wrong = [
        f"a dense {name}, has {operand.layout}"
        for name, operand in request.operand_values.items()
        if isinstance(operand, Tensor)
        and request.kinds[name] in ("row", "col", "reduce")
        and not operand.layout.is_contiguous
    ]
    return f"needs {' and '.join(wrong)}" if wrong else ""


def linear(request: ConvRequest) -> str:
    """The epilogue is alpha, beta and z: multistage kernels have no other."""
    if request.tree != linear_combination(with_source=request.c is not None):
        return f"needs no epilogue but alpha, beta and z, has {request.epilogue}"
    return f"needs no config, has {request.config}" if request.config is not None else ""
