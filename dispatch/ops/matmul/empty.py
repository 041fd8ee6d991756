"""The plan of a product without elements, for which no library is called."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from cudabind import driver
from dispatch.core.request import Argument, Plan
from dispatch.ops.matmul.arguments import BGRAD, FIRST_FACTOR
from dispatch.ops.matmul.scales import AMAX, FACTORS_AND_AMAX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype
    from dispatch.ops.matmul.request import MatmulRequest

__all__ = ["EmptyPlan"]


class EmptyPlan(Plan):
    """A product without elements: no kernel is launched; the bias gradient and amax, if any, are set to zero."""

    __slots__ = ("_target", "_zeroed")
    is_bare = True

    def __init__(self, request: MatmulRequest, executor: CudaExecutor, row: Row) -> None:
        super().__init__(row, capture_safe=False)
        self._target = executor.target
        self._zeroed = [
            (FIRST_FACTOR + index, 0, 4)
            for index, name in enumerate(FACTORS_AND_AMAX)
            if name in AMAX and getattr(request.scales, name) is not None
        ]
        bgrad_layout = request.unallocated().get("bgrad")
        if request.bgrad is not None:
            layout = request.bgrad.layout
            bgrad_layout = (layout.shape, layout.strides, layout.dtype)
        if bgrad_layout is not None:
            self._zeroed += [(BGRAD, start, size) for start, size in _lines(*bgrad_layout)]

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        for index, start, nbytes in self._zeroed:
            driver.cuMemsetD8Async(int(arguments[index].real) + start, 0, nbytes, self._target.value)


def _lines(shape: tuple[int, ...], strides: tuple[int, ...], dtype: Dtype) -> Iterator[tuple[int, int]]:
    """The offset and size, in bytes, of each line of a tensor with a dense last axis."""
    if 0 not in shape:
        for index in product(*map(range, shape[:-1])):
            start = sum(i * step for i, step in zip(index, strides, strict=False))
            yield start * dtype.itemsize, shape[-1] * dtype.itemsize
