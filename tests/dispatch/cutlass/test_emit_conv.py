"""What is emitted for a convolution: types, steps and words of each kind of kernel, and nothing of its extents."""

from dataclasses import replace

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import Refused
from dispatch.keys import BF16, F16, F32, Arch
from dispatch.libraries.cutlass import compile as compiler
from dispatch.libraries.cutlass import evt, headers
from dispatch.libraries.cutlass.emit import sm80_conv as emit_conv80
from dispatch.libraries.cutlass.emit import sm90_conv as emit_conv
from dispatch.libraries.cutlass.emit.sm80_conv import MultistageConvSpec
from dispatch.libraries.cutlass.emit.sm90_conv import ConvSpec, problem_words
from dispatch.libraries.cutlass.visitors import Operand
from dispatch.ops.conv import channels_last
from dispatch.ops.conv.config import LARGE, MEDIUM
from dispatch.ops.conv.cutlass import spec_of
from dispatch.ops.conv.problem import words_of
from dispatch.ops.conv.sm80 import spec_of as multistage_spec

try:
    headers.find()
    MISSING = ""
except headers.HeadersMissing as missing:
    MISSING = str(missing)

SPEC = ConvSpec(
    arch=Arch(90),
    mode="fwd",
    dims=2,
    dtype=BF16,
    c=None,
    d=BF16,
    tile=(128, 256, 64),
    cluster=(2, 1),
    schedule="cooperative",
    scheduler="persistent",
    epilogue=evt.linear_combination(with_source=False),
    operands=(("alpha", Operand("scalar", F32)),),
)
PLAIN = MultistageConvSpec(Arch(90), "fwd", 2, F16, F16, False, "", (16, 16), False, False)

# Operator, how an operand's axes are tiled, and how the result lies.
GOLDEN = {
    ("fwd", 2): ("kFprop", "cute::_128, cute::_256, cute::Shape<cute::_64>", "TensorNHWC", "RowMajor"),
    ("bwd_data", 3): ("kDgrad", "cute::_128, cute::_256, cute::Shape<cute::_64>", "TensorNDHWC", "RowMajor"),
    ("bwd_filter", 2): ("kWgrad", "cute::_128, cute::Shape<cute::_256>, cute::_64", "TensorNHWC", "TensorKCSR"),
    ("bwd_filter", 3): ("kWgrad", "cute::_128, cute::Shape<cute::_256>, cute::_64", "TensorNDHWC", "TensorKCSRT"),
}


@pytest.mark.parametrize(("mode", "dims"), GOLDEN)
def test_a_kernel_of_tensor_maps_has_these_types(mode, dims):
    operator, tile, images, result = GOLDEN[mode, dims]
    text = emit_conv.emit(replace(SPEC, mode=mode, dims=dims)).text
    assert f"using Tile = cute::Shape<{tile}>;" in text
    built = (
        f"OpClassTensorOp, cutlass::conv::Operator::{operator},\n    Element, cutlass::layout::{images}, 8, Element,"
    )
    assert built in text
    assert f"ElementC, cutlass::layout::{result}, 8, ElementD, cutlass::layout::{result}, 8," in text
    assert "ConvMainloop<Built, cutlass::gemm::KernelTmaWarpSpecializedCooperative, 2>" in text


def test_schedules_have_their_warp_groups_and_stream_k_its_workspace():
    text = emit_conv.emit(replace(SPEC, schedule="pingpong", tile=(64, 64, 64))).text
    assert "ConvMainloop<Built, cutlass::gemm::KernelTmaWarpSpecializedPingpong, 1>" in text
    assert "get_workspace_size" not in text
    assert "int64_t(Gemm::get_workspace_size(arguments))" in emit_conv.emit(replace(SPEC, scheduler="stream_k")).text


def test_a_source_and_f32_operands():
    text = emit_conv.emit(replace(SPEC, dtype=F32, c=F32, d=F32, tile=(128, 128, 32))).text
    assert "using Element = float;" in text  # which the copy to shared memory rounds to TF32
    assert "arguments.epilogue.ptr_C" in text
    assert "arguments.epilogue.ptr_C" not in emit_conv.emit(SPEC).text


def test_vectors_are_refused_where_channels_and_taps_are_one_mode():
    bias = replace(SPEC, epilogue=evt.accumulator() + evt.row("bias"), operands=(("bias", Operand("row", F32)),))
    assert "Sm90RowBroadcast" in emit_conv.emit(bias).text
    with pytest.raises(Refused, match="scalars for the gradient of filters, has bias"):
        emit_conv.emit(replace(bias, mode="bwd_filter"))


# fmt: off
MULTISTAGE = {
    "forward": ({}, "conv2d_fprop", "DefaultConv2dFprop", "kOptimized, cutlass::conv::StrideSupport::kUnity, 8, 8"),
    "four bytes": ({"alignment": (4, 4)}, "conv2d_fprop", "DefaultConv2dFprop",
                   "kOptimized, cutlass::conv::StrideSupport::kUnity, 2, 2"),
    "several groups": ({"groups": "kMultipleGroup", "small": True}, "conv2d_group_fprop", "DefaultConv2dGroupFprop",
                       "kAnalytic, cutlass::conv::StrideSupport::kUnity, 8, 8"),
    "one group": ({"groups": "kSingleGroup", "small": True}, "conv2d_group_fprop", "DefaultConv2dGroupFprop",
                  "kOptimized, cutlass::conv::StrideSupport::kUnity, 8, 8"),
    "stride": ({"mode": "bwd_data", "strided": True}, "conv2d_dgrad", "DefaultConv2dDgrad",
               "kOptimized, cutlass::conv::StrideSupport::kStrided, 8, 8"),
    "volume": ({"mode": "bwd_data", "strided": True, "dims": 3}, "conv3d_dgrad", "DefaultConv3dDgrad",
               "kAnalytic, cutlass::conv::StrideSupport::kStrided"),
    "filters": ({"mode": "bwd_filter", "dtype": F32, "d": F32}, "conv2d_wgrad", "DefaultConv2dWgrad",
                "kOptimized, cutlass::conv::StrideSupport::kStrided, 4, 4"),
}
# fmt: on


@pytest.mark.parametrize("name", MULTISTAGE)
def test_a_multistage_kernel_steps_so(name):
    change, header, kernel, options = MULTISTAGE[name]
    spec = replace(PLAIN, **change)
    text = emit_conv80.emit(spec).text
    assert f'#include "cutlass/conv/kernel/default_{header}.h"' in text
    assert f"cutlass::conv::kernel::{kernel}<" in text
    group = f"cutlass::conv::GroupMode::{spec.groups}, " if spec.groups else ""
    assert f"\n    {group}cutlass::conv::IteratorAlgorithm::{options}>::Kernel;" in text
    assert ("StridedDgrad" in text) == (name == "stride")


def test_the_operands_of_a_multistage_kernel_are_those_of_its_mode():
    for mode, (a, b, out) in {
        "fwd": ("x", "w", "y"),
        "bwd_data": ("y", "w", "x"),
        "bwd_filter": ("y", "x", "w"),
    }.items():
        text = emit_conv80.emit(replace(PLAIN, mode=mode)).text
        assert f"(Element*)in.pointer(a_), {a}_layout}}, {{(Element*)in.pointer(b_), {b}_layout}}" in text
        assert f"(ElementD*)in.pointer(out_), {out}_layout}}" in text


# -- requests -------------------------------------------------------------------------------------------------------
def forward(x, w, **choices):
    dev = dp.device("host")
    return dp.ConvFwdRequest(*(channels_last(dev.array(np.zeros(s), "bf16")) for s in (x, w)), **choices)


SMALL = forward((2, 16, 9, 10), (24, 16, 3, 2), pad=((1, 0), (2, 1)), stride=(2, 1), dilation=(1, 3))


def test_no_extent_and_no_step_is_part_of_a_kernel():
    other = forward((8, 64, 56, 56), (128, 64, 1, 1))
    assert emit_conv.emit(spec_of(SMALL, Arch(90), LARGE)) == emit_conv.emit(spec_of(other, Arch(90), LARGE))
    one, two = (emit_conv80.emit(multistage_spec(r, Arch(90), 1)) for r in (SMALL, other))
    assert one == two


def test_the_words_of_a_problem():
    values = words_of(SMALL, 132)
    made = [values[word.name] for word in problem_words(2)]
    assert made == [2, 9, 10, 16, 24, 3, 2, 16, *SMALL.y_shape[2:], 1, 2, 0, 1, 2, 1, 1, 3, 1]


def test_a_line_is_an_image_of_one_row():
    line = forward((2, 16, 33), (24, 16, 5), pad=((2, 1),), stride=3, dilation=2)
    assert spec_of(line, Arch(90), MEDIUM) == spec_of(SMALL, Arch(90), MEDIUM)
    values = words_of(line, 132)
    made = [values[word.name] for word in problem_words(2)]
    assert made == [2, 1, 33, 16, 24, 1, 5, 16, 1, *line.y_shape[2:], 0, 2, 0, 1, 1, 3, 1, 2, 1]


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.timeout(900)  # ten seconds of one core, which a busy machine makes many times that
def test_a_kernel_compiles():
    """The leanest of all. The others of the rows' cases were compiled when they were written, and are on a GPU."""
    spec = replace(PLAIN, mode="bwd_data", strided=True, small=True)
    code = compiler.request(emit_conv80.emit(spec), spec.target, "test: a gradient under a stride").result()
    for symbol in (b"\0gemm\0", b"\0fill\0", b"\0scale\0"):
        assert symbol in code
