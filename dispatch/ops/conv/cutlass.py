"""The plan of a convolution with a CUTLASS kernel for Hopper: its configuration and its spec.

`plan` serves the table's sm_90 rows. The work before and after a launch (initial values of reductions, means) is the
same as for products.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from dispatch.keys import Arch
from dispatch.libraries.cutlass import compile as compiler
from dispatch.libraries.cutlass.emit.sm90_conv import ConvSpec, emit
from dispatch.libraries.cutlass.evt import Reduce, walk
from dispatch.libraries.cutlass.launch import Launch, module
from dispatch.libraries.cutlass.plan import TreePlan, float_bits, multiprocessors
from dispatch.libraries.cutlass.staged import Staged
from dispatch.ops.conv.config import choose
from dispatch.ops.conv.problem import ArgumentOrder, dims_of, operands_of, words_of

if TYPE_CHECKING:
    from dispatch.core.request import Argument, Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cutlass.config import Config
    from dispatch.ops.conv.request import ConvRequest

__all__ = ["CutlassConvPlan", "plan", "spec_of"]

BYTES_K = 128  # of a tile along channels, or along pixels for the gradient of filters: one line of the swizzle


def plan(request: ConvRequest, executor: CudaExecutor, row: Row) -> Plan:
    """Bind a request to an executor: choose the kernel, compile or load it, prepare its parameters."""
    return CutlassConvPlan(request, executor, row)


def spec_of(request: ConvRequest, arch: Arch, config: Config) -> ConvSpec:
    """The spec of the kernel for a request."""
    first = getattr(request, request.operand_names[0]).dtype
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


class CutlassConvPlan(TreePlan):
    """The launch of one kernel for one set of extents, padding, stride and dilation, enqueued as for products."""

    __slots__ = ("_argument_order", "config", "spec")

    def __init__(self, request: ConvRequest, executor: CudaExecutor, row: Row) -> None:
        super().__init__(row, capture_safe=True)
        self._executor = executor
        processors = multiprocessors(executor)
        self.config = choose(request, processors)
        self.spec = spec_of(request, Arch(90), self.config)
        source = emit(self.spec)
        future = compiler.request(source, self.spec.target, f"{row.name} {self.config}: {request.tree}")
        loaded = module(executor.device, compiler.kernel_id(source, self.spec.target), future.result(), source.words)
        self._argument_order = ArgumentOrder.of(request)
        self._names = self._argument_order.names
        self._number = float_bits
        self._values = {**words_of(request, processors), "swizzle": self.config.swizzle}
        self._staged = Staged(executor, {})  # the row requires channels that fill 16 bytes
        self._launch = Launch(loaded, executor, self._values, self.config.cluster)
        reduced = (node.name for node in walk(request.tree) if isinstance(node, Reduce))
        rows, columns = request.extents
        sizes = {name: prod(request.tree_outputs[name].shape) for name in reduced}
        self._reduce(request.tree, sizes, {"m": rows, "n": columns, "mn": rows * columns})

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        super().enqueue(self._argument_order(arguments))
