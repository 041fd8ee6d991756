"""The product of two sparse matrices of fixed patterns: analysed once, and computed again for other values.

The analysis holds the pattern of the product, in memory of the plan. The analysis is repeated if indices are at other
addresses. A repeated call is one launch over the terms that spgemm_values.py has listed. If an algorithm is named, or a
row is too long for that, the library multiplies with its own analysis, and the pattern is copied to the result.
Follows https://docs.nvidia.com/cuda/cusparse/#cusparsespgemmreuse.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from cudabind import driver
from cudabind.sys import cusparse
from dispatch.errors import BadRequest, Refused
from dispatch.libraries.cusparse.calls import Call
from dispatch.libraries.cusparse.descriptors import SparseMatrix
from dispatch.libraries.cusparse.spgemm import SpgemmDescriptor
from dispatch.libraries.cusparse.spgemm_values import PatternProduct, entries_of, longest_row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.device.storage import Storage
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cusparse.descriptors import SparseSpec

__all__ = ["ReusedProduct"]


class Analysis:
    """The pattern of a product, in its own memory, and a kernel's launch or the library's analysis."""

    __slots__ = ("columns", "indices_at", "launch", "rows", "target", "work")

    def __init__(self, at: Any, work: SpgemmDescriptor, target: SparseMatrix, rows: Storage, columns: Storage) -> None:
        self.indices_at, self.target = at, target  # the addresses of the indices that were analysed
        self.rows, self.columns = rows, columns
        self.work: SpgemmDescriptor | None = work
        self.launch: PatternProduct | None = None


class ReusedProduct:
    """A step that multiplies two sparse matrices in CSR of fixed patterns.

    `front` are the operations and the two matrices, `factors` alpha and beta; `spec` describes the product, whose `nnz`
    is compared with the number from the analysis.
    """

    __slots__ = (
        *("_algorithm", "_alpha", "_executor", "_indices", "_kept", "_kind", "_matrices", "_patterns", "_spec"),
        "_values",
    )

    def __init__(
        self,
        executor: CudaExecutor,
        front: tuple[Any, Any, SparseMatrix, SparseMatrix],
        factors: tuple[Any, Any],
        spec: SparseSpec,
        kind: int,
        algorithm: int,
    ) -> None:
        self._executor, self._spec = executor, spec
        self._kind, self._algorithm = cusparse.cudaDataType(kind), cusparse.cusparseSpGEMMAlg_t(algorithm)
        op_a, op_b, a, b = front
        alpha, beta = factors
        self._matrices, self._alpha = (a.spec, b.spec), alpha.value
        self._indices = [place for one in self._matrices for place in (one.rows, one.columns)]
        self._patterns = Call(executor, "cusparseSpGEMMreuse", front)
        self._values = Call(executor, "cusparseSpGEMMreuse_compute", (op_a, op_b, alpha, a, b, beta))
        self._kept: Analysis | None = None

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Multiply, after an analysis if needed; BadRequest if the number of elements is not the expected one."""
        at, analysis = tuple(addresses[place] for place in self._indices), self._kept
        if analysis is None or analysis.indices_at != at:
            self._kept = None
            self._patterns.set_arguments(addresses)
            analysis = self._analyse(at)
        if analysis.launch is not None:
            analysis.launch.enqueue(addresses)
            self._kept = analysis
            return
        self._values.set_arguments(addresses)
        spec, stream = self._spec, self._executor.target.value
        values, rows, columns = (addresses[place] for place in (spec.values, spec.rows, spec.columns))
        self._point(analysis, values)
        work = analysis.work
        if spec.nnz and work is not None:
            nbytes = spec.nnz * self._element_bytes
            driver.cuMemsetD8Async(values, 0, nbytes, stream)  # undocumented: whether 0 times old values is added
            self._values.invoke("cusparseSpGEMMreuse_compute", analysis.target.c, self._kind, self._algorithm, work.c)
            driver.cuMemcpyDtoDAsync(columns, analysis.columns.base, spec.nnz * spec.column_bytes, stream)
        driver.cuMemcpyDtoDAsync(rows, analysis.rows.base, (spec.shape[0] + 1) * spec.row_bytes, stream)
        self._kept = analysis

    @property
    def _element_bytes(self) -> int:
        return ELEMENT_BYTES[self._spec.value_type]

    def _point(self, found: Analysis, values: int) -> None:
        """Set the addresses of the product's descriptor: the analysed pattern, and the values of a run."""
        columns = found.columns.base if self._spec.nnz else None
        cusparse.cusparseCsrSetPointers(found.target.c, found.rows.base, columns, values or None)

    def _allocate(self, nbytes: int) -> Storage:
        return self._executor.device.allocate(max(1, nbytes), self._executor.stream)

    def _analyse(self, at: Any) -> Analysis:
        spec, work = self._spec, SpgemmDescriptor()
        rows = self._allocate((spec.shape[0] + 1) * spec.row_bytes)
        target = SparseMatrix(spec._replace(nnz=0), rows.base)  # without elements only the address of rows is set
        behind = (target.c, self._algorithm, work.c)
        sizes = [ctypes.c_size_t() for _ in range(5)]
        size_pointers = [ctypes.byref(size) for size in sizes]
        name = "cusparseSpGEMMreuse_workEstimation"
        self._patterns.invoke(name, *behind, size_pointers[0], None)
        first = self._allocate(sizes[0].value)  # this and the second are not read after the elements are counted
        self._patterns.invoke(name, *behind, size_pointers[0], ctypes.c_void_p(first.base))
        name, three = "cusparseSpGEMMreuse_nnz", size_pointers[1:4]
        self._patterns.invoke(name, *behind, *(each for size in three for each in (size, None)))
        second, third, fourth = (self._allocate(size.value) for size in sizes[1:4])
        pairs = zip(three, (second, third, fourth), strict=True)
        self._patterns.invoke(
            name, *behind, *(each for size, buffer in pairs for each in (size, ctypes.c_void_p(buffer.base)))
        )
        counted = [ctypes.c_int64() for _ in range(3)]
        cusparse.cusparseSpMatGetSize(target.c, *map(ctypes.byref, counted))
        if counted[2].value != spec.nnz:
            raise BadRequest("nnz", str(spec.nnz), f"{counted[2].value}, the number that spgemm_nnz counts")
        columns, values = self._allocate(spec.nnz * spec.column_bytes), self._allocate(spec.nnz * self._element_bytes)
        analysis = Analysis(at, work, target, rows, columns)
        self._point(analysis, values.base)
        name = "cusparseSpGEMMreuse_copy"
        self._patterns.invoke(name, *behind, size_pointers[4], None)
        fifth = self._allocate(sizes[4].value)
        self._patterns.invoke(name, *behind, size_pointers[4], ctypes.c_void_p(fifth.base))
        work.memory += [fourth, fifth]
        analysis.launch = self._launch_for((rows.base, columns.base), at)
        if analysis.launch is not None:
            analysis.work = None  # the library's own data is not needed any more
        return analysis

    def _launch_for(self, pattern: tuple[int, int], at: Any) -> PatternProduct | None:
        """The launch of our kernel for a pattern; None if the library multiplies."""
        spec = self._spec
        if int(self._algorithm):
            return None
        sizes = entries_of(longest_row(self._executor, pattern[0], spec.shape[0]))
        if sizes is None:
            return None
        try:
            return PatternProduct(self._executor, self._matrices, spec, self._alpha, pattern, at, sizes)
        except Refused:  # NVRTC is missing, or there are too many terms to list
            return None


ELEMENT_BYTES = {
    int(cusparse.cudaDataType.CUDA_R_32F): 4,
    int(cusparse.cudaDataType.CUDA_R_64F): 8,
    int(cusparse.cudaDataType.CUDA_C_32F): 8,
    int(cusparse.cudaDataType.CUDA_C_64F): 16,
}
