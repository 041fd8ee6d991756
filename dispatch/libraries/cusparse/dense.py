"""A dense matrix made sparse, as the library has it: an analysis that counts, and the conversion.

How many elements there are the library says behind its analysis: it waits for the device, and cannot be captured.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from cudabind import driver
from cudabind.sys import cusparse
from dispatch.errors import BadRequest
from dispatch.libraries.cusparse.calls import Call
from dispatch.libraries.cusparse.descriptors import NOWHERE, SparseMatrix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cusparse.descriptors import DenseMatrix, Sparse

__all__ = ["Conversion"]

NAME = "cusparseDenseToSparse"


class Conversion:
    """A step that makes a matrix sparse; with a `number`, one that puts there how many elements that gives."""

    __slots__ = ("_call", "_executor", "_number", "_said")

    def __init__(self, executor: CudaExecutor, source: DenseMatrix, said: Sparse, number: int | None) -> None:
        """`said` describes the result, and its `nnz` is compared; `number` is the place of the count's address."""
        self._executor, self._said, self._number = executor, said, number
        self._call = Call(executor, NAME, (source,))

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Convert; BadRequest where there are other than so many elements."""
        self._call.set(addresses)
        target = SparseMatrix(self._said._replace(nnz=0), NOWHERE)
        if self._number is None:
            target.point(addresses)  # an analysis may write offsets
        behind = target.c, cusparse.cusparseDenseToSparseAlg_t.CUSPARSE_DENSETOSPARSE_ALG_DEFAULT
        size = ctypes.c_size_t()
        self._call.of(f"{NAME}_bufferSize", *behind, ctypes.byref(size))
        memory = self._executor.device.allocate(max(1, size.value), self._executor.stream)
        buffer = ctypes.c_void_p(memory.base)
        self._call.of(f"{NAME}_analysis", *behind, buffer)
        numbers = [ctypes.c_int64() for _ in range(3)]
        cusparse.cusparseSpMatGetSize(target.c, *map(ctypes.byref, numbers))
        count = numbers[-1].value
        if self._number is not None:
            found, stream = np.array([count], np.int64), self._executor.target.value
            driver.cuMemcpyHtoDAsync(addresses[self._number], found.ctypes.data, found.nbytes, stream)
            return
        if count != self._said.nnz:
            raise BadRequest("nnz", str(self._said.nnz), f"{count}, as dense_nnz counts them")
        self._call.of(f"{NAME}_convert", *behind, buffer)
