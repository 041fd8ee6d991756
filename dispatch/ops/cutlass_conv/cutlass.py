"""A convolution carried out by a CUTLASS kernel for Hopper: its configuration, its spec, and its plan.

The table's sm_90 rows end here, by `plan`. What goes before and behind a launch (reductions' first values, means) is as
for cutlass_gemm.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from cudabind import driver
from dispatch.core.request import Plan
from dispatch.keys import Arch
from dispatch.libraries.cutlass import compile as compiler
from dispatch.libraries.cutlass.emit.sm90_conv import ConvSpec, emit
from dispatch.libraries.cutlass.evt import Reduce, walk
from dispatch.libraries.cutlass.launch import Launch, module
from dispatch.libraries.cutlass.staged import Staged
from dispatch.ops.cutlass_conv.config import choose
from dispatch.ops.cutlass_conv.problem import dims_of, operands_of, words_of
from dispatch.ops.cutlass_gemm.cutlass import START, CutlassPlan, _float

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cutlass.config import Config
    from dispatch.ops.cutlass_conv.base import TreedConvRequest

__all__ = ["CutlassConvPlan", "plan", "spec_of"]

BYTES_K = 128  # of a tile along channels, or along pixels for the gradient of filters: a line of the swizzle


def plan(request: TreedConvRequest, executor: CudaExecutor, row: Row) -> Plan:
    """Bind a request to an executor: choose the kernel, compile or load it, learn its parameters."""
    return CutlassConvPlan(request, executor, row)


def spec_of(request: TreedConvRequest, arch: Arch, config: Config) -> ConvSpec:
    """The kernel of a request."""
    first = getattr(request, request.reads[0]).dtype
    return ConvSpec(
        arch=arch,
        mode=request.mode,
        dims=dims_of(request),
        dtype=first,
        c=None if request.c is None else request.c.dtype,
        d=request.result_dtype,
        tile=(*config.tile, BYTES_K * 8 // first.bits),
        cluster=config.cluster,
        schedule=config.schedule,
        scheduler=config.scheduler,
        epilogue=request.tree,
        operands=tuple(operands_of(request).items()),
    )


class CutlassConvPlan(CutlassPlan):
    """One kernel for one set of extents and steps; it is enqueued as a product is."""

    __slots__ = ()

    def __init__(self, request: TreedConvRequest, executor: CudaExecutor, row: Row) -> None:
        Plan.__init__(self, row, capture_safe=True)
        self._executor = executor
        processors = executor.device.attribute(driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        self.config = choose(request, processors)
        spec = spec_of(request, Arch(90), self.config)
        self.spec = spec  # type: ignore[assignment]  # of a convolution, where the other plan has a product's
        source = emit(spec)
        future = compiler.request(source, spec.target, f"{row.name} {self.config}: {request.tree}")
        loaded = module(executor.device, compiler.kernel_id(source, spec.target), future.result(), source.words)
        self._names = ("a", "b", "c", "out", *request.kinds)
        self._number = _float
        self._values = {**words_of(request, processors), "swizzle": self.config.swizzle}
        self._staged = Staged(executor, {})  # channels fill 16 bytes, or the row refuses the request
        self._launch = Launch(loaded, executor, self._values, self.config.cluster)
        reductions = [node for node in walk(request.tree) if isinstance(node, Reduce)]
        sizes = {node.name: prod(request.produced[node.name].shape) for node in reductions}
        self._starts = tuple((node.name, START.get(node.function, 0), sizes[node.name]) for node in reductions)
        rows, columns = request.extents
        extents = {"m": rows, "n": columns, "mn": rows * columns}
        self._finish = tuple(
            (node.name, sizes[node.name], 1 / extents[node.over]) for node in reductions if node.function == "mean"
        )
