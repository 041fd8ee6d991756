"""The convolutions that test_conv.py, bench_cutlass.py and examples/12_convolution.py need, for kernels.py to compile.

Which kernel a request takes is asked of the plans' own functions, for a GPU of as many multiprocessors as an H200 has.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import dispatch as dp
from dispatch.keys import Arch
from dispatch.libraries.cutlass import evt
from dispatch.libraries.cutlass.emit import sm80_conv as emit_conv80
from dispatch.libraries.cutlass.emit import sm90_conv as emit_conv
from dispatch.ops.conv import channels_last, cutlass
from dispatch.ops.conv import sm80 as multistage
from dispatch.ops.conv.cases import cases
from dispatch.ops.conv.config import CONFIGS, MEDIUM, choose

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dispatch.libraries.cutlass.emit.sm90_gemm import Source
    from dispatch.ops.conv.base import ConvRequest

__all__ = ["convolutions"]

EXAMPLES = Path(__file__).parents[3] / "examples"
OPS = ("conv_fwd", "conv_bwd_data", "conv_bwd_filter")
PROCESSORS = 132
SM90 = Arch(90)
DEV = dp.device("host")
Output = tuple["Source", str, str]


def convolutions() -> Iterator[Output]:
    """The source, the target and a label of each kernel; several may be one."""
    yield from _cases()
    yield from _tests()
    yield from _example()


def _cases() -> Iterator[Output]:
    for row in (row for op in OPS for row in dp.TABLE.of(op) if row.library == "cutlass"):
        for case in cases(row):
            request = case.request(DEV, np.random.default_rng(0))
            label = f"{row.name} {case.id}"
            if row.function == "CollectiveConv":
                yield _hopper(request, label)
            else:
                spec = multistage.spec_of(request, SM90, PROCESSORS)
                yield emit_conv80.emit(spec), spec.target, label


def _tests() -> Iterator[Output]:
    """Those of the tests beside the rows' cases; the benchmark's configurations are among them."""
    request = dp.ConvFwdRequest(_image(2, 64, 9, 9), _image(64, 64, 3, 3), pad=1)
    for config in CONFIGS:
        yield _hopper(replace(request, config=config), f"forward {config}")
    for channels, filters, extent in ((16, 64, 56), (64, 128, 28), (256, 512, 7)):
        x, w = _image(4, channels, extent, extent), _image(filters, channels, 3, 3)
        y = _image(4, filters, extent, extent)
        yield _hopper(dp.ConvFwdRequest(x, w, pad=1), "a layer")
        yield _hopper(dp.ConvBwdDataRequest(y, w, pad=1), "a layer's gradient")
        yield _hopper(dp.ConvBwdFilterRequest(y, x, w_extents=(3, 3), pad=1), "a layer's gradient of filters")
    yield _hopper(dp.ConvFwdRequest(_image(4, 64, 28, 28), _image(128, 64, 3, 3), pad=1, stride=2), "against torch")
    tree = evt.relu(evt.scalar("alpha") * evt.accumulator() + evt.row("bias"))
    operands = {"bias": DEV.zeros(24, "f32")}
    x, w = _image(2, 16, 9, 9), _image(24, 16, 3, 3)
    repeated = dp.ConvFwdRequest(x, w, epilogue=tree, operands=operands, config=MEDIUM)
    yield _hopper(repeated, "repeated")
    spec = multistage.spec_of(dp.ConvFwdRequest(_image(2, 8, 9, 9), _image(16, 8, 3, 3)), SM90, PROCESSORS)
    yield emit_conv80.emit(replace(spec, alignment=(4, 16))), spec.target, "misaligned"


def _example() -> Iterator[Output]:
    sys.path.insert(0, str(EXAMPLES))
    block = import_module("12_convolution")
    sys.path.remove(str(EXAMPLES))
    shape = (block.BATCH, block.CHANNELS, block.EXTENT, block.EXTENT)
    x, w, bias = _image(*shape), _image(block.CHANNELS, block.CHANNELS, 3, 3), DEV.zeros(block.CHANNELS, "f32")
    for tree, operands in ((block.FIRST, {"bias": bias}), (block.SECOND, {"bias": bias, "residual": x})):
        yield _hopper(dp.ConvFwdRequest(x, w, pad=1, epilogue=tree, operands=operands), "residual block")


def _image(*shape: int) -> dp.Tensor:
    return channels_last(DEV.array(np.zeros(shape), "bf16"))


def _hopper(request: ConvRequest, label: str) -> Output:
    spec = cutlass.spec_of(request, SM90, choose(request, PROCESSORS))
    return emit_conv.emit(spec), spec.target, label
