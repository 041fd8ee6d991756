"""The plan of grouped_matmul with a grouped CUTLASS kernel.

`plan` serves CUTLASS's GPU rows: plans.py has the sequence of launches, this file the kernel and the arrays that it
reads.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from cudabind import driver
from dispatch.keys import F32, U8, Arch
from dispatch.libraries.cutlass import compile as compiler
from dispatch.libraries.cutlass.emit.sm90_grouped_gemm import GroupedSpec, emit
from dispatch.libraries.cutlass.launch import Launch, module
from dispatch.libraries.cutlass.layout import order_of
from dispatch.libraries.cutlass.visitors import Operand
from dispatch.ops.grouped_matmul import plans
from dispatch.ops.grouped_matmul.config import choose

if TYPE_CHECKING:
    from dispatch.core.request import Argument, Plan
    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cutlass.config import Config
    from dispatch.ops.grouped_matmul.plans import Requests

__all__ = ["CutlassProduct", "array_offsets", "plan", "spec_of"]

ARRAYS = ("addresses_a", "addresses_b", "addresses_d", "steps_a", "steps_b", "steps_d")
SHAPE_BYTES = 12  # the three extents of a group


def plan(request: Requests, executor: CudaExecutor, row: Row) -> Plan:
    """Bind a request to an executor: compile or load the kernel, prepare its parameters."""
    return plans.plan(request, executor, row, CutlassProduct(request, executor, row))


def spec_of(request: Requests, arch: Arch, config: Config) -> GroupedSpec:
    """The spec of a request's kernel, the same for both requests."""
    a, b = request.first("a"), request.first("b")
    return GroupedSpec(
        arch=arch,
        a=a.dtype,
        b=b.dtype,
        d=request.d_dtype,
        orders=(order_of(a), order_of(b)),
        tile=(*config.tile, 1024 // a.dtype.bits),
        cluster=config.cluster,
        schedule=config.schedule,
        epilogue=request.tree,
        operands=(("alpha", Operand("scalar", F32)),) if "alpha" in str(request.tree) else (),
        fast_accumulation=request.fast_accum,
    )


def array_offsets(groups: int) -> tuple[dict[str, int], int]:
    """The offset of each array, and the bytes of all arrays.

    Each begins at a multiple of 16 bytes, because CUTLASS first makes its tensor maps from the arrays' own addresses.
    """
    step = 8 * (groups + groups % 2)
    offsets = {name: step * index for index, name in enumerate((*ARRAYS, "shapes"))}
    return offsets, offsets["shapes"] + SHAPE_BYTES * groups


class CutlassProduct:
    """The kernel, and device memory for the arrays that it reads."""

    __slots__ = ("_executor", "_launch", "_memory", "_module", "_values", "arrays", "shapes", "spec")

    def __init__(self, request: Requests, executor: CudaExecutor, row: Row) -> None:
        self._executor = executor
        device = executor.device
        processors = device.attribute(driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        config = choose(request.rows, request.groups, request.n, processors, request.config)
        self.spec = spec_of(request, Arch(90), config)
        source = emit(self.spec)
        future = compiler.request(source, self.spec.target, f"{row.name} {config}: {request.tree}")
        self._module = module(device, compiler.kernel_id(source, self.spec.target), future.result(), source.words)
        groups = request.groups
        offsets, size = array_offsets(groups)
        self._memory: Tensor = executor.empty((size,), (1,), U8)
        self._values = {
            "groups": groups,
            "multiprocessors": processors,
            **{name: self._memory.ptr + offset for name, offset in offsets.items()},
            "alpha": 0 if not hasattr(request.alpha, "ptr") else 1,
        }
        self.shapes, self.arrays = self._values["shapes"], self._values["addresses_a"]
        self._launch = Launch(self._module, executor, self._values, config.cluster)

    def setup_kernel(self, entry: str) -> Any:
        """One of the two setup kernels."""
        return self._module.function(entry.encode())

    def enqueue(self, alpha: Argument) -> None:
        """Launch the kernel for an alpha: its address, or the number."""
        values = dict(self._values)
        if type(alpha) is int:
            values["alpha"] = alpha
        else:
            values["alpha.value"] = int(struct.unpack("<I", struct.pack("<f", alpha.real))[0])
        self._launch.enqueue(values, self._executor.target.value or 0)
