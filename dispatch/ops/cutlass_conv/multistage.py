"""A convolution carried out by a multistage kernel, as sm_80 introduced them and every newer GPU runs them.

The table's sm_80 rows end here, by `plan`: strides of gradients, groups, TF32 gradients, and channels that tensor maps
cannot step through. Alpha and beta are read on the device, so a number among them is put there once by the lane.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudabind import driver
from dispatch.cutlass import compile as compiler
from dispatch.cutlass.emit_conv80 import MultistageConvSpec, emit
from dispatch.cutlass.launch import Launch, module
from dispatch.keys import F32, Arch
from dispatch.ops.cutlass_conv.problem import alignments, dims_of, words_of
from dispatch.ops.cutlass_conv.rules import TILE
from dispatch.request import Argument, Plan

if TYPE_CHECKING:
    from dispatch.lane import CudaLane
    from dispatch.ops.cutlass_conv.base import TreedConvRequest
    from dispatch.row import Row

__all__ = ["MultistageConvPlan", "plan", "spec_of"]

LARGE_TILE = 128


def plan(request: TreedConvRequest, lane: CudaLane, row: Row) -> Plan:
    """Bind a request to a lane: compile or load the kernel, learn its parameters."""
    return MultistageConvPlan(request, lane, row)


def spec_of(request: TreedConvRequest, arch: Arch, processors: int) -> MultistageConvSpec:
    """The kernel of a request: the small tile where large ones would leave multiprocessors idle, or hold groups."""
    rows, columns = request.extents
    tiles = -(-rows // LARGE_TILE) * -(-columns // LARGE_TILE)
    grouped = ""
    if request.groups > 1:
        grouped = "kMultipleGroup" if request.w_shape[0] // request.groups % TILE else "kSingleGroup"
    dims = dims_of(request)
    return MultistageConvSpec(
        arch=arch,
        mode=request.mode,
        dims=dims,
        dtype=getattr(request, request.reads[0]).dtype,
        d=request.result_dtype,
        strided=request.mode == "bwd_data" and max(request.steps.stride) > 1,
        groups=grouped,
        alignment=(16, alignments(request)[1]) if dims == 3 else alignments(request),
        source=request.c is not None,
        small=tiles < processors or bool(grouped),
    )


class MultistageConvPlan(Plan):
    """One kernel for one set of extents and steps."""

    __slots__ = ("_lane", "_launch", "_names", "_values", "spec")

    def __init__(self, request: TreedConvRequest, lane: CudaLane, row: Row) -> None:
        super().__init__(row, capture_safe=True)
        self._lane = lane
        lane.refuse_capture("a CUTLASS kernel")
        device = lane.device
        processors = device.attribute(driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        arch = Arch(80) if device.arch < 89 else device.arch  # 86 runs what is compiled for 80
        self.spec = spec_of(request, arch, processors)
        source = emit(self.spec)
        future = compiler.request(source, self.spec.target, f"{row.name}: {request.tree}")
        loaded = module(device, compiler.kernel_id(source, self.spec.target), future.result(), source.words)
        self._names = ("a", "b", "c", "out", *request.kinds)
        self._values = {**words_of(request, processors), "alpha": 1, "beta": 1}
        self._launch = Launch(loaded, lane, self._values, (1, 1))

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        values = {**self._values, "beta": self._lane.scalar(0.0, F32)}
        for name, argument in zip(self._names, arguments, strict=True):
            number = type(argument) is not int
            values[name] = self._lane.scalar(argument, F32) if number else int(argument.real)
        self._launch.enqueue(values, self._lane.target.value or 0)
