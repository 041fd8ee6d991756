"""The product of two sparse matrices by the library: an estimate, the product, and a copy of it.

In between the library reports on the host the required memory and the number of elements, so it waits for the device
and cannot be captured. Follows https://docs.nvidia.com/cuda/cusparse/#cusparsespgemm.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from cudabind import driver
from cudabind.sys import cusparse
from dispatch.errors import BadRequest
from dispatch.libraries.cusparse.calls import Call
from dispatch.libraries.cusparse.descriptors import NULL_ADDRESS, SparseMatrix
from dispatch.libraries.cusparse.handle import handle_of
from dispatch.libraries.finalizer import Held

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.device.storage import Storage
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cusparse.descriptors import SparseSpec

__all__ = ["SparseProduct"]

CHUNK = 0.2  # the fraction of the product that ALG3 computes at a time, as in NVIDIA's sample
OPERANDS = 6  # of two matrices in CSR, the first of the addresses
CHUNKED_ALGORITHMS = (
    cusparse.cusparseSpGEMMAlg_t.CUSPARSE_SPGEMM_ALG2,
    cusparse.cusparseSpGEMMAlg_t.CUSPARSE_SPGEMM_ALG3,
)


class SpgemmDescriptor(Held):
    """A `cusparseSpGEMMDescr_t` of one product, and its memory."""

    __slots__ = ("memory",)

    def __init__(self) -> None:
        super().__init__(cusparse.cusparseSpGEMMDescr_t(), cusparse.cusparseSpGEMM_destroyDescr)
        self.memory: list[Storage] = []
        cusparse.cusparseSpGEMM_createDescr(self.c)


class SparseProduct:
    """A step that multiplies two sparse matrices; with a `number`, one that counts the elements of the product.

    `arguments` are those up to the second matrix and beta; `spec` describes the product, and its `nnz` is checked. A
    count with a stamp passes its product to the next step with that stamp over the same operands.
    """

    __slots__ = ("_algorithm", "_call", "_executor", "_key", "_kind", "_number", "_spec", "_stamp", "_target")

    def __init__(
        self,
        executor: CudaExecutor,
        arguments: Sequence[Any],
        spec: SparseSpec,
        kind: int,
        algorithm: int,
        number: int | None,
        *,
        stamp: int,
        key: tuple[Any, ...],
    ) -> None:
        """`number` is the place of the address to write the number of elements to, if only that is wanted.

        `stamp` is the place of a stamp, negative for none; `key` is all that a product depends on except addresses.
        """
        self._stamp, self._key = stamp, key
        self._executor, self._spec, self._number = executor, spec, number
        self._kind, self._algorithm = cusparse.cudaDataType(kind), cusparse.cusparseSpGEMMAlg_t(algorithm)
        self._call = Call(executor, "cusparseSpGEMM", arguments)

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Multiply; BadRequest if the number of elements is not the expected one."""
        self._call.set_arguments(addresses)
        stamp, handle = int(addresses[self._stamp]), handle_of(self._executor)
        operands = (*self._key, *addresses[:OPERANDS])
        pending, handle.counted_product = handle.counted_product, None
        if self._number is None and pending is not None and pending[:2] == (stamp, operands):
            work, self._target, count = pending[2]
        else:
            del pending
            work = SpgemmDescriptor()
            count = self._multiply(work)
        if self._number is not None:
            if stamp >= 0:
                handle.counted_product = stamp, operands, (work, self._target, count)
            counted = np.array([count], np.int64)
            at, stream = addresses[self._number], self._executor.target.value
            driver.cuMemcpyHtoDAsync(at, counted.ctypes.data, counted.nbytes, stream)  # reads `counted` before return
            return
        if count != self._spec.nnz:
            raise BadRequest("nnz", str(self._spec.nnz), f"{count}, the number that spgemm_nnz counts")
        values, rows, columns = (addresses[place] for place in (self._spec.values, self._spec.rows, self._spec.columns))
        cusparse.cusparseCsrSetPointers(self._target.c, rows, columns or None, values or None)
        self._call.invoke("cusparseSpGEMM_copy", *self._trailing_arguments(work))

    def _multiply(self, work: SpgemmDescriptor) -> int:
        """Multiply; returns the number of elements of the product."""
        self._target = SparseMatrix(self._spec._replace(nnz=0), NULL_ADDRESS)
        self._query_and_call(work, "cusparseSpGEMM_workEstimation")
        if self._algorithm in CHUNKED_ALGORITHMS:
            self._estimate_memory(work)
        else:
            self._query_and_call(work, "cusparseSpGEMM_compute")
        rows, columns, count = (ctypes.c_int64() for _ in range(3))
        sizes = map(ctypes.byref, (rows, columns, count))
        cusparse.cusparseSpMatGetSize(self._target.c, *sizes)
        return count.value

    def _trailing_arguments(self, work: SpgemmDescriptor) -> tuple[Any, ...]:
        return self._target.c, self._kind, self._algorithm, work.c

    def _allocate(self, work: SpgemmDescriptor, nbytes: int) -> Any:
        """Memory of at least one byte: without an address the library would report the size again."""
        work.memory.append(self._executor.device.allocate(max(1, nbytes), self._executor.stream))
        return ctypes.c_void_p(work.memory[-1].base)

    def _query_and_call(self, work: SpgemmDescriptor, name: str) -> None:
        """Ask a function for the size of its memory, and call it with memory of that size."""
        size = ctypes.c_size_t()
        self._call.invoke(name, *self._trailing_arguments(work), ctypes.byref(size), None)
        buffer = self._allocate(work, size.value)
        self._call.invoke(name, *self._trailing_arguments(work), ctypes.byref(size), buffer)

    def _estimate_memory(self, work: SpgemmDescriptor) -> None:
        """Multiply by an algorithm that works in parts: first estimate the memory for one part."""
        name, share = "cusparseSpGEMM_estimateMemory", ctypes.c_float(CHUNK)
        first, second = ctypes.c_size_t(), ctypes.c_size_t()
        sizes = ctypes.byref(first), ctypes.byref(second)
        self._call.invoke(name, *self._trailing_arguments(work), share, sizes[0], None, sizes[1])
        buffer = self._allocate(work, first.value)
        self._call.invoke(name, *self._trailing_arguments(work), share, sizes[0], buffer, sizes[1])
        buffer = self._allocate(work, second.value)
        self._call.invoke("cusparseSpGEMM_compute", *self._trailing_arguments(work), sizes[1], buffer)
