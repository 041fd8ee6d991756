"""A plan that initializes outputs before a graph runs, which reductions in particular require.

In the kernels that cuDNN compiles for a reduction, each thread block combines its part with the output by an atomic
operation (such as add or maximum), and nothing initializes the output (as seen in the templates in 9.19's
libcudnn_engines_runtime_compiled). Plans of graphs that end in reductions are wrapped here.
"""

from __future__ import annotations

import math
import struct
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind import driver
from dispatch.core.axes import merge
from dispatch.core.request import Plan
from dispatch.errors import Refused
from dispatch.keys import F32

if TYPE_CHECKING:
    from dispatch.core.request import Argument
    from dispatch.device.layout import Layout
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cudnn.graph import Graph

__all__ = ["Clear", "Fill", "reduction_fills", "with_prefill", "zero_fills"]

START = {"ADD": 0.0, "AMAX": 0.0, "MAX": -math.inf, "MIN": math.inf, "MUL": 1.0}


class Fill(NamedTuple):
    """`size` f32 numbers of one value, at an argument's address."""

    place: int
    value: float
    size: int

    @property
    def bits(self) -> int:
        """The value's bits, as an integer for the driver."""
        (bits,) = struct.unpack("I", struct.pack("f", self.value))
        return int(bits)


class Clear(NamedTuple):
    """Zeros: `height` rows of `width` bytes, `pitch` bytes apart, `start` bytes after an argument's address."""

    place: int
    start: int
    pitch: int
    width: int
    height: int


def zero_fills(place: int, layout: Layout) -> tuple[Clear, ...]:
    """The clears that set an operand with positive strides and a dense last axis to zeros, and nothing else."""
    if layout.size == 0:
        return ()
    item = layout.dtype.itemsize
    axes = merge([layout], [0] * len(layout.shape))
    width = axes.pop().extent * item if axes and axes[-1].strides[0] == 1 else item
    rows = axes.pop() if axes else None
    height, pitch = (rows.extent, rows.strides[0] * item) if rows else (1, width)
    starts = product(*(range(0, axis.extent * axis.strides[0] * item, axis.strides[0] * item) for axis in axes))
    return tuple(Clear(place, sum(start), pitch, width, height) for start in starts)


def reduction_fills(graph: Graph, places: dict[int, int]) -> tuple[Fill, ...]:
    """The initial values of a graph's reductions; Refused for an output with gaps, which must not be overwritten."""
    fills = []
    for node in graph.nodes:
        wire = graph.wire(node.outs[0][1])
        if node.kind != "REDUCTION" or wire.virtual or wire.dtype is not F32:
            continue
        reach = 1 + sum((extent - 1) * step for extent, step in zip(wire.dims, wire.strides, strict=True))
        if reach != math.prod(wire.dims):
            raise Refused(
                f"a reduction's output is initialized first and must be dense: {wire.dims} with {wire.strides}"
            )
        fills.append(Fill(places[wire.uid], START.get(str(node.get("OPERATOR")), 0.0), reach))
    return tuple(fills)


def with_prefill(executor: CudaExecutor, plan: Plan, fills: tuple[Fill, ...], clears: tuple[Clear, ...] = ()) -> Plan:
    """A plan that first writes these values; the plan itself if there are none."""
    return _PrefilledPlan(executor, plan, fills, clears) if fills or clears else plan


class _PrefilledPlan(Plan):
    """A plan that first writes values to memory."""

    __slots__ = ("_clears", "_executor", "_fills", "_plan")

    def __init__(self, executor: CudaExecutor, plan: Plan, fills: tuple[Fill, ...], clears: tuple[Clear, ...]) -> None:
        super().__init__(plan.row, capture_safe=plan.capture_safe)
        self._executor, self._plan, self._fills, self._clears = executor, plan, fills, clears

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        for place, start, pitch, width, height in self._clears:
            address: Any = arguments[place]  # addresses are ints
            stream = self._executor.target.value
            if height == 1 or pitch == width:
                driver.cuMemsetD8Async(address + start, 0, width * height, stream)
            else:
                driver.cuMemsetD2D8Async(address + start, pitch, 0, width, height, stream)
        for fill in self._fills:
            driver.cuMemsetD32Async(arguments[fill.place], fill.bits, fill.size, self._executor.target.value)
        self._plan.enqueue(arguments)
