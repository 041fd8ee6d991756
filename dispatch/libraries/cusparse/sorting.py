"""Sorting the elements of a sparse matrix: the library sorts indices and returns the permutation for the values.

Follows https://docs.nvidia.com/cuda/cusparse/#cusparsexcoosort and #cusparsexcsrsort. The permutation is at the
beginning of the workspace, followed by the library's buffer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cudabind.sys import cusparse
from dispatch.libraries.cusolver.matrix import OperandPointer
from dispatch.libraries.cusparse.calls import Call, Steps
from dispatch.libraries.cusparse.descriptors import DenseVector, SparseVector
from dispatch.libraries.finalizer import Held

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.core.request import Argument

__all__ = ["LegacyDescriptor", "SortSteps"]

ROUND = 256  # bytes
INDEX_BYTES = 4


class LegacyDescriptor(Held):
    """A `cusparseMatDescr_t` of a general matrix."""

    __slots__ = ("base",)

    def __init__(self, base: int) -> None:
        super().__init__(cusparse.cusparseMatDescr_t(), cusparse.cusparseDestroyMatDescr)
        self.base = base
        cusparse.cusparseCreateMatDescr(self.c)
        cusparse.cusparseSetMatIndexBase(self.c, cusparse.cusparseIndexBase_t(base))


class KeepAlive:
    """A step that does nothing but keep an object alive for later steps."""

    __slots__ = ("thing",)

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def enqueue(self, addresses: Sequence[Argument]) -> None:
        """Do nothing."""


class SortSteps(Steps):
    """The steps of a sort, whose indices were copied to the result."""

    def sort_indices(self, sizes: tuple[int, int, int], rows: int, columns: int, base: int | None) -> None:
        """Sort indices at these places: with a `base` those of CSR, row by row, else those of COO by row and column."""
        count = sizes[2]
        offset = -(-count * INDEX_BYTES // ROUND) * ROUND
        work = self._work_place
        arguments = (*sizes, OperandPointer(rows), OperandPointer(columns))
        name = "cusparseXcoosort" if base is None else "cusparseXcsrsort"
        buffer = Call(self.executor, name, arguments).buffer_size("_bufferSizeExt")
        self._work_bytes = max(self._work_bytes, offset + buffer)
        self.append(Call(self.executor, "cusparseCreateIdentityPermutation", (count, OperandPointer(work))))
        memory = (OperandPointer(work), OperandPointer(work, offset))
        if base is None:
            self.append(Call(self.executor, "cusparseXcoosortByRow", (*arguments, *memory)))
            return
        descriptor = LegacyDescriptor(base)
        self.append(KeepAlive(descriptor))
        full: tuple[Any, ...] = (*sizes, descriptor.c, OperandPointer(rows), OperandPointer(columns), *memory)
        self.append(Call(self.executor, name, full))

    def scratch(self, nbytes: int) -> int:
        """The place of so many bytes of workspace, which steps share because they run one after the other."""
        self._work_bytes = max(self._work_bytes, nbytes)
        return self._work_place

    def permute_values(self, count: int, value_type: int, values: int, out: int) -> None:
        """Copy the elements from one place to another in the order of the sort's permutation."""
        places = (self._work_place, out)
        sorted_ = SparseVector((count, count), INDEX_BYTES, 0, value_type, places, self.placeholder)
        dense = DenseVector(count, value_type, values, self.placeholder)
        self.append(Call(self.executor, "cusparseGather", (dense, sorted_)))
