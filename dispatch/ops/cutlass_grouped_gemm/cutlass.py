"""A CutlassGroupedGemmRequest carried out by a grouped kernel: one small kernel that arranges the groups, then it.

The table's GPU rows end here, by `plan`. The groups' extents never come to the host: `arrange` reads where they end and
writes the arrays that the kernel reads, in memory of the plan's own.
"""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING

from cudabind import driver
from dispatch.cutlass import compile as compiler
from dispatch.cutlass.emit_grouped import GroupedSpec, emit
from dispatch.cutlass.launch import Launch, module
from dispatch.cutlass.visitors import Operand
from dispatch.keys import F32, U8, Arch
from dispatch.ops.cutlass_gemm.layout import order_of, pitch
from dispatch.request import Argument, Plan

if TYPE_CHECKING:
    from dispatch.lane import CudaLane
    from dispatch.ops.cutlass_grouped_gemm.request import CutlassGroupedGemmRequest
    from dispatch.row import Row
    from dispatch.tensor import Tensor

__all__ = ["GroupedPlan", "plan", "spec_of"]

TILE, CLUSTER = (128, 128), (2, 1)
ARRAYS = ("addresses_a", "addresses_b", "addresses_d", "steps_a", "steps_b", "steps_d")
SHAPE_BYTES = 12  # three extents of a group
THREADS = 256


def plan(request: CutlassGroupedGemmRequest, lane: CudaLane, row: Row) -> Plan:
    """Bind a request to a lane: compile or load the kernel, learn its parameters."""
    return GroupedPlan(request, lane, row)


def spec_of(request: CutlassGroupedGemmRequest, arch: Arch) -> GroupedSpec:
    """The kernel of a request."""
    return GroupedSpec(
        arch=arch,
        a=request.a.dtype,
        b=request.b.dtype,
        d=request.d_dtype,
        orders=(order_of(request.a), order_of(request.b)),
        tile=(*TILE, 1024 // request.a.dtype.bits),
        cluster=CLUSTER,
        epilogue=request.tree,
        operands=(("alpha", Operand("scalar", F32)),) if "alpha" in str(request.tree) else (),
        fast_accumulation=request.fast_accum,
    )


class GroupedPlan(Plan):
    """One kernel for one set of layouts and any ends of groups."""

    __slots__ = ("_arrange", "_fixed", "_lane", "_launch", "_memory", "_values", "spec")

    def __init__(self, request: CutlassGroupedGemmRequest, lane: CudaLane, row: Row) -> None:
        super().__init__(row, capture_safe=True)
        self._lane = lane
        lane.refuse_capture("a CUTLASS kernel")
        device = lane.device
        processors = device.attribute(driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        self.spec = spec_of(request, Arch(90))
        source = emit(self.spec)
        future = compiler.request(source, self.spec.target, f"{row.name}: {request.tree}")
        loaded = module(device, compiler.kernel_id(source, self.spec.target), future.result(), source.words)
        self._arrange = loaded.function(b"arrange")
        groups = request.groups
        self._memory: Tensor = lane.empty((groups * (8 * len(ARRAYS) + SHAPE_BYTES),), (1,), U8)
        places = {name: self._memory.ptr + 8 * groups * index for index, name in enumerate(ARRAYS)}
        self._values = {
            "groups": groups,
            "multiprocessors": processors,
            "shapes": self._memory.ptr + 8 * groups * len(ARRAYS),
            **places,
            "alpha": 0 if not hasattr(request.alpha, "ptr") else 1,
        }
        self._launch = Launch(loaded, lane, self._values, CLUSTER)
        out = request.missing().get("out")
        d_strides = out[1] if out is not None else request.out.layout.strides  # type: ignore[union-attr]
        steps = (pitch(t.shape, t.layout.strides) for t in (request.a, request.b))
        self._fixed = (
            groups,
            request.n,
            request.k,
            *steps,
            request.b.layout.strides[0],
            pitch(request.shape, d_strides),
        )

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        a, b, ends, out, alpha = arguments
        stream = self._lane.target.value or 0
        groups, n, k, a_step, b_step, b_group, d_step = self._fixed
        numbers = (ends, groups, n, k, a, a_step, b, b_step, b_group, out, d_step)
        words = [ctypes.c_int64(int(x.real)) for x in (*numbers, self._values["shapes"], self._values["addresses_a"])]
        pointers = (ctypes.c_void_p * len(words))(*(ctypes.addressof(word) for word in words))
        driver.cuLaunchKernel(self._arrange, 1, 1, 1, THREADS, 1, 1, 0, stream, ctypes.addressof(pointers), 0)
        values = dict(self._values)
        if type(alpha) is int:
            values["alpha"] = alpha
        else:
            values["alpha.value"] = int(struct.unpack("<I", struct.pack("<f", alpha.real))[0])
        self._launch.enqueue(values, stream)
