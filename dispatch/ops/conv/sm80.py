"""The plan of a convolution with a multistage CUTLASS kernel, for GPUs from sm_80 on.

`plan` serves the table's sm_80 rows: strided gradients, groups, TF32 gradients, and channels that tensor maps cannot
describe. The kernel reads alpha and beta in device memory; the executor puts given numbers there once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.keys import F32
from dispatch.libraries.cutlass.emit.sm80_conv import MultistageConvSpec, emit
from dispatch.libraries.cutlass.plan import MultistageKernelPlan
from dispatch.ops.conv.problem import ArgumentOrder, alignments, dims_of, words_of
from dispatch.ops.conv.rules import TILE

if TYPE_CHECKING:
    from dispatch.core.request import Argument, Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Arch, Dtype
    from dispatch.libraries.cutlass.emit.sm90_gemm import Source
    from dispatch.ops.conv.request import ConvRequest

__all__ = ["MultistageConvPlan", "plan", "spec_of"]

LARGE_TILE = 128


def plan(request: ConvRequest, executor: CudaExecutor, row: Row) -> Plan:
    """Bind a request to an executor: compile or load the kernel, prepare its parameters."""
    return MultistageConvPlan(request, executor, row)


def spec_of(request: ConvRequest, arch: Arch, processors: int) -> MultistageConvSpec:
    """The spec of a request's kernel, with the small tile for groups, or if large ones left multiprocessors idle."""
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
        dtype=getattr(request, request.operand_names[0]).dtype,
        d=request.result_dtype,
        strided=request.mode == "bwd_data" and max(request.steps.stride) > 1,
        groups=grouped,
        alignment=(16, alignments(request)[1]) if dims == 3 else alignments(request),
        source=request.c is not None,
        small=tiles < processors or bool(grouped),
    )


class MultistageConvPlan(MultistageKernelPlan):
    """The launch of one kernel for one set of extents, padding, stride and dilation."""

    __slots__ = ("_argument_order",)

    def __init__(self, request: ConvRequest, executor: CudaExecutor, row: Row) -> None:
        super().__init__(request, executor, row)
        self._argument_order = ArgumentOrder.of(request)
        self._names = self._argument_order.names

    @staticmethod
    def _kernel(request: Any, arch: Arch, processors: int) -> tuple[Any, Source, dict[str, int], Dtype]:
        spec = spec_of(request, arch, processors)
        return spec, emit(spec), words_of(request, processors), F32

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        super().enqueue(self._argument_order(arguments))
