"""A convolution carried out by a multistage kernel, as sm_80 introduced them and every newer GPU runs them.

The table's sm_80 rows end here, by `plan`: strides of gradients, groups, TF32 gradients, and channels that tensor maps
cannot step through. Alpha and beta are read on the device, so a number among them is put there once by the executor.
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
    """Bind a request to an executor: compile or load the kernel, learn its parameters."""
    return MultistageConvPlan(request, executor, row)


def spec_of(request: ConvRequest, arch: Arch, processors: int) -> MultistageConvSpec:
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
        dtype=getattr(request, request.operand_names[0]).dtype,
        d=request.result_dtype,
        strided=request.mode == "bwd_data" and max(request.steps.stride) > 1,
        groups=grouped,
        alignment=(16, alignments(request)[1]) if dims == 3 else alignments(request),
        source=request.c is not None,
        small=tiles < processors or bool(grouped),
    )


class MultistageConvPlan(MultistageKernelPlan):
    """One kernel for one set of extents and steps."""

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
