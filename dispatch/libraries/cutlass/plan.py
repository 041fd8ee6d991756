"""The part that plans of products and convolutions share: one kernel for one set of layouts, and its launch.

A family's plan chooses the kernel and sets the words that do not change. In each run, the classes here write addresses
and numbers, initialize reductions, launch the kernel, and compute means from sums.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from cudabind import driver
from dispatch.core.request import Argument, Plan
from dispatch.keys import Arch
from dispatch.libraries.cutlass import compile as compiler
from dispatch.libraries.cutlass.evt import Reduce, walk
from dispatch.libraries.cutlass.launch import Launch, module

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype
    from dispatch.libraries.cutlass.emit.sm90_gemm import Source
    from dispatch.libraries.cutlass.evt import Node
    from dispatch.libraries.cutlass.staged import Staged

__all__ = ["MultistageKernelPlan", "TreePlan", "float_bits", "multiprocessors", "whole_bits"]

INFINITY = 0x7F800000
START = {"max": INFINITY | 1 << 31, "min": INFINITY}  # f32 bits; other reductions start from zero


def multiprocessors(executor: CudaExecutor) -> int:
    """The number of multiprocessors of the executor's GPU."""
    return int(executor.device.attribute(driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT))


def float_bits(value: float) -> int:
    """The word of a number that a kernel reads as f32; that of an infinity for a number beyond its range."""
    try:
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    except OverflowError:
        return INFINITY if value > 0 else INFINITY | 1 << 31


def whole_bits(value: float) -> int:
    """The word of a number that a kernel reads as i32."""
    return int(value) & 0xFFFF_FFFF


class TreePlan(Plan):
    """A kernel whose epilogue is a tree; the constructor of a subclass sets the slots."""

    __slots__ = ("_executor", "_finish", "_launch", "_names", "_number", "_staged", "_starts", "_values")
    _executor: CudaExecutor
    _launch: Launch
    _names: tuple[str, ...]  # of the arguments, in their order
    _number: Callable[[float], int]
    _staged: Staged
    _values: dict[str, int]  # the words that do not change from run to run

    def _reduce(self, tree: Node, sizes: Mapping[str, int], extents: Mapping[str, int]) -> None:
        """Store the initial values of a tree's reductions, and the factors that turn sums into means.

        `sizes` are those of the reductions' outputs, `extents` the numbers of elements that are reduced.
        """
        reductions = [node for node in walk(tree) if isinstance(node, Reduce)]
        self._starts = tuple((node.name, START.get(node.function, 0), sizes[node.name]) for node in reductions)
        self._finish = tuple(
            (node.name, sizes[node.name], 1 / extents[node.over]) for node in reductions if node.function == "mean"
        )

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        values = dict(self._values)
        for name, argument in zip(self._names, arguments, strict=True):
            if type(argument) is int:
                values[name] = argument
            else:
                values[f"{name}.value"] = self._number(argument.real)
        stream = self._executor.target.value or 0
        for name, bits, count in self._starts:
            driver.cuMemsetD32Async(values[name], bits, count, stream)
        self._launch.enqueue({**values, **self._staged.addresses}, stream)
        self._staged.copy_out(values, stream)
        for name, count, factor in self._finish:
            self._launch.scale(values[name], count, factor, stream)


class MultistageKernelPlan(Plan):
    """A multistage kernel, whose epilogue is alpha and beta, both read on the device."""

    __slots__ = ("_accumulator", "_executor", "_launch", "_names", "_values", "spec")

    def __init__(self, request: Any, executor: CudaExecutor, row: Row) -> None:
        super().__init__(row, capture_safe=True)
        self._executor = executor
        arch = Arch(80) if executor.device.arch < 89 else executor.device.arch  # sm_86 runs kernels for sm_80
        self.spec, source, words, self._accumulator = self._kernel(request, arch, multiprocessors(executor))
        future = compiler.request(source, self.spec.target, f"{row.name}: {request.tree}")
        kernel = compiler.kernel_id(source, self.spec.target)
        loaded = module(executor.device, kernel, future.result(), source.words)
        self._names = ("a", "b", "c", "out", *request.kinds)
        self._values = {**words, "alpha": 1, "beta": 1}
        self._launch = Launch(loaded, executor, self._values, (1, 1))

    @staticmethod
    def _kernel(request: Any, arch: Arch, processors: int) -> tuple[Any, Source, dict[str, int], Dtype]:
        """The kernel's spec, its source, the words of its launch, and the dtype of alpha and beta."""
        raise NotImplementedError

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        values = {**self._values, "beta": self._executor.scalar(0.0, self._accumulator)}
        for name, argument in zip(self._names, arguments, strict=True):
            number = type(argument) is not int
            values[name] = self._executor.scalar(argument, self._accumulator) if number else int(argument.real)
        self._launch.enqueue(values, self._executor.target.value or 0)
