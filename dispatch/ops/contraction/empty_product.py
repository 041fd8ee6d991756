"""The plan of products over an empty mode, which are all alpha: cuTENSOR has no call for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cudabind import driver
from dispatch.core.request import Argument, Plan
from dispatch.keys import member
from dispatch.ops.contraction.choices import TensorOp

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["EmptyProductPlan", "is_empty_product"]

WORD = 4  # bytes


def is_empty_product(request: Any) -> bool:
    """Whether a request multiplies over a mode without elements."""
    return bool(request.op == "reduce_modes" and member(request.reduce) is TensorOp.MUL and not request.a.size)


class EmptyProductPlan(Plan):
    """The number alpha in each element of the result, which has no gaps: a rule checks that."""

    __slots__ = ("_alpha", "_count", "_dtype", "_executor", "_low", "_place")
    is_bare = True

    def __init__(self, request: Any, executor: CudaExecutor, row: Row) -> None:
        super().__init__(row, capture_safe=False)
        layout = request.layout_of("out")
        self._executor, self._place = executor, request.place_of("out")
        self._alpha = len(request.reads) + len(request.writes) + request.numbers.index("alpha")
        self._dtype, self._count, self._low = layout.dtype, layout.size, layout.low

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        address: Any = arguments[self._place]  # addresses are ints
        alpha: Any = arguments[self._alpha]
        number = np.asarray(alpha if self._dtype.is_complex else alpha.real).astype(self._dtype.numpy)
        start, count, stream = address + self._low, self._count, self._executor.target.value
        if number.itemsize < WORD:
            driver.cuMemsetD16Async(start, int(number.view(np.uint16)), count, stream)
            return
        words = [int(word) for word in number.reshape(1).view(np.uint32)]
        if len(set(words)) == 1:
            driver.cuMemsetD32Async(start, words[0], count * len(words), stream)
            return
        for place, word in enumerate(words):  # one word of each element at a time
            driver.cuMemsetD2D32Async(start + WORD * place, number.itemsize, word, 1, count, stream)
