"""A dense matrix pruned to a sparse one: the library counts the remaining elements, then writes them.

It reports the number of remaining elements on the host, waiting for the device, so it cannot be captured. Follows
https://docs.nvidia.com/cuda/cusparse/#cusparsetprunedense2csr and #cusparsetprunedense2csrpercentage.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cudabind import driver
from cudabind.sys import cusparse
from dispatch.errors import BadRequest
from dispatch.libraries.cusparse.handle import handle_of
from dispatch.libraries.cusparse.sorting import LegacyDescriptor
from dispatch.libraries.finalizer import Held

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["PruneCriterion", "Pruning"]

OFFSET_BYTES = 4
ROUND = 256  # bytes


class PruneCriterion(NamedTuple):
    """The criterion for dropping elements: up to a threshold, or a percentage."""

    letter: str  # S or D
    threshold: float | None
    percentage: float | None


class PruneInfo(Held):
    """A `pruneInfo_t`."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(cusparse.pruneInfo_t(), cusparse.cusparseDestroyPruneInfo)
        cusparse.cusparseCreatePruneInfo(self.c)


class Pruning:
    """A step that prunes a column-major matrix (m, n) at a place, with a leading dimension of `ld` elements.

    With a `number`, it writes the number of remaining elements to this place; else `parts` are the places of values,
    rows and columns of the result, of `nnz` elements.
    """

    def __init__(
        self,
        executor: CudaExecutor,
        shape: tuple[int, int],
        ld: int,
        a: int,
        criterion: PruneCriterion,
        *,
        number: int | None = None,
        parts: tuple[int, int, int] = (0, 0, 0),
        nnz: int = 0,
    ) -> None:
        self._executor, self._handle = executor, handle_of(executor)
        self._shape, self._ld, self._a, self._criterion = shape, ld, a, criterion
        self._number, self._parts, self._nnz = number, parts, nnz
        self._descriptor = LegacyDescriptor(0)
        self._info = None if criterion.percentage is None else PruneInfo()
        real = ctypes.c_float if criterion.letter == "S" else ctypes.c_double
        self._threshold = real(criterion.threshold or 0.0)

    def _name(self, nnz: str = "", ending: str = "") -> Any:
        by = "" if self._info is None else "ByPercentage"
        return getattr(cusparse, f"cusparse{self._criterion.letter}pruneDense2csr{nnz}{by}{ending}")

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Prune; BadRequest if the number of remaining elements is not `nnz`."""
        (m, n), handle, info = self._shape, self._handle.follow(), self._info
        amount = ctypes.byref(self._threshold) if info is None else float(self._criterion.percentage or 0.0)
        behind = () if info is None else (info.c,)
        a = ctypes.c_void_p(addresses[self._a])
        front = (handle, m, n, a, self._ld, amount, self._descriptor.c)
        values, rows, columns = (ctypes.c_void_p(addresses[part]) for part in self._parts)
        size, count = ctypes.c_size_t(), ctypes.c_int32()
        self._name(ending="_bufferSizeExt")(*front, values, rows, columns, *behind, ctypes.byref(size))
        offsets = -(-(m + 1) * OFFSET_BYTES // ROUND) * ROUND
        memory = self._executor.device.allocate(offsets + max(1, size.value), self._executor.stream)
        buffer = ctypes.c_void_p(memory.base + offsets)
        if self._number is not None:
            rows = ctypes.c_void_p(memory.base)
        self._name("Nnz")(*front, rows, ctypes.byref(count), *behind, buffer)
        if self._number is not None:
            remaining, stream = np.array([count.value], np.int64), self._executor.target.value
            driver.cuMemcpyHtoDAsync(addresses[self._number], remaining.ctypes.data, remaining.nbytes, stream)
            return
        if count.value != self._nnz:
            raise BadRequest("nnz", str(self._nnz), f"{count.value}, the number that prune_nnz counts")
        if count.value:
            self._name()(*front, values, rows, columns, *behind, buffer)
