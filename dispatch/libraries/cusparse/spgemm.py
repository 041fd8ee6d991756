"""The product of two sparse matrices, as the library has it: an estimate, the product, and a copy of it.

How much memory it works in, and how many elements there are, the library says as it goes, so that it waits for the
device and cannot be captured. Follows https://docs.nvidia.com/cuda/cusparse/#cusparsespgemm.
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
from dispatch.libraries.cusparse.handle import handle_of
from dispatch.libraries.finalizer import Held

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.device.storage import Storage
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cusparse.descriptors import Sparse

__all__ = ["SparseProduct"]

CHUNK = 0.2  # of the product that ALG3 makes at a time: the share that NVIDIA's sample takes
OPERANDS = 6  # of two matrices in CSR, which stand first among the addresses
IN_PARTS = (
    cusparse.cusparseSpGEMMAlg_t.CUSPARSE_SPGEMM_ALG2,
    cusparse.cusparseSpGEMMAlg_t.CUSPARSE_SPGEMM_ALG3,
)


class Work(Held):
    """A `cusparseSpGEMMDescr_t` of one product, and the memory that it works in."""

    __slots__ = ("memory",)

    def __init__(self) -> None:
        super().__init__(cusparse.cusparseSpGEMMDescr_t(), cusparse.cusparseSpGEMM_destroyDescr)
        self.memory: list[Storage] = []
        cusparse.cusparseSpGEMM_createDescr(self.c)


class SparseProduct:
    """A step that multiplies two sparse matrices; without `count`, one that tells how many elements that gives.

    `arguments` are those up to the second matrix and beta; `said` describes the product, and its `nnz` is compared.
    A count with a stamp leaves the product that it has made to the next step with that stamp over the same operands.
    """

    __slots__ = ("_algorithm", "_call", "_executor", "_kind", "_number", "_of", "_said", "_stamp", "_target")

    def __init__(
        self,
        executor: CudaExecutor,
        arguments: Sequence[Any],
        said: Sparse,
        kind: int,
        algorithm: int,
        number: int | None,
        *,
        stamp: int,
        of: tuple[Any, ...],
    ) -> None:
        """`number` is the place of the address where the number of elements goes, if that alone is wanted.

        `stamp` is the place of a stamp, below 0 for none, and `of` says all that a product depends on but addresses.
        """
        self._stamp, self._of = stamp, of
        self._executor, self._said, self._number = executor, said, number
        self._kind, self._algorithm = cusparse.cudaDataType(kind), cusparse.cusparseSpGEMMAlg_t(algorithm)
        self._call = Call(executor, "cusparseSpGEMM", arguments)

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Multiply; BadRequest where there are other than so many elements."""
        self._call.set(addresses)
        stamp, handle = int(addresses[self._stamp]), handle_of(self._executor)
        operands = (*self._of, *addresses[:OPERANDS])
        left, handle.left = handle.left, None
        if self._number is None and left is not None and left[:2] == (stamp, operands):
            work, self._target, count = left[2]
        else:
            del left
            work = Work()
            count = self._multiplied(work)
        if self._number is not None:
            if stamp >= 0:
                handle.left = stamp, operands, (work, self._target, count)
            found = np.array([count], np.int64)
            at, stream = addresses[self._number], self._executor.target.value
            driver.cuMemcpyHtoDAsync(at, found.ctypes.data, found.nbytes, stream)  # read before it returns
            return
        if count != self._said.nnz:
            raise BadRequest("nnz", str(self._said.nnz), f"{count}, as spgemm_nnz counts them")
        values, rows, columns = (addresses[place] for place in (self._said.values, self._said.rows, self._said.columns))
        cusparse.cusparseCsrSetPointers(self._target.c, rows, columns or None, values or None)
        self._call.of("cusparseSpGEMM_copy", *self._behind(work))

    def _multiplied(self, work: Work) -> int:
        """Multiply, and how many elements that gives."""
        self._target = SparseMatrix(self._said._replace(nnz=0), NOWHERE)
        self._twice(work, "cusparseSpGEMM_workEstimation")
        if self._algorithm in IN_PARTS:
            self._estimate_memory(work)
        else:
            self._twice(work, "cusparseSpGEMM_compute")
        rows, columns, count = (ctypes.c_int64() for _ in range(3))
        sizes = map(ctypes.byref, (rows, columns, count))
        cusparse.cusparseSpMatGetSize(self._target.c, *sizes)
        return count.value

    def _behind(self, work: Work) -> tuple[Any, ...]:
        return self._target.c, self._kind, self._algorithm, work.c

    def _room(self, work: Work, nbytes: int) -> Any:
        """Memory, though it be for nothing: without an address the library would tell the size once more."""
        work.memory.append(self._executor.device.allocate(max(1, nbytes), self._executor.stream))
        return ctypes.c_void_p(work.memory[-1].base)

    def _twice(self, work: Work, name: str) -> None:
        """Ask a function for the size of its memory, and call it with that."""
        size = ctypes.c_size_t()
        self._call.of(name, *self._behind(work), ctypes.byref(size), None)
        buffer = self._room(work, size.value)
        self._call.of(name, *self._behind(work), ctypes.byref(size), buffer)

    def _estimate_memory(self, work: Work) -> None:
        """Of algorithms that multiply part by part, the memory for one part; it is known before they begin."""
        name, share = "cusparseSpGEMM_estimateMemory", ctypes.c_float(CHUNK)
        first, second = ctypes.c_size_t(), ctypes.c_size_t()
        sizes = ctypes.byref(first), ctypes.byref(second)
        self._call.of(name, *self._behind(work), share, sizes[0], None, sizes[1])
        buffer = self._room(work, first.value)
        self._call.of(name, *self._behind(work), share, sizes[0], buffer, sizes[1])
        room = self._room(work, second.value)
        self._call.of("cusparseSpGEMM_compute", *self._behind(work), sizes[1], room)
