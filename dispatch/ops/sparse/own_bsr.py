"""Plans between CSR, BSR and dense matrices by the kernels of bsr_kernels.py."""

from __future__ import annotations

import ctypes
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind import driver
from dispatch.libraries.cusolver.copies import Copy, CopyMode
from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer
from dispatch.libraries.cusparse.calls import CusparsePlan, IdlePlan
from dispatch.libraries.nvrtc.launching import LaunchStep
from dispatch.ops.sparse.bsr_conversions import refuse_count
from dispatch.ops.sparse.bsr_kernels import SOURCE, WORD, options
from dispatch.ops.sparse.compression_kernels import CHUNK, THREADS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["CountCheckStep", "plan"]

COUNT_BYTES, WORD_BYTES = 8, 4
ROUND = 8  # bytes: parts of workspace begin at multiples of it


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request."""
    return MAKERS[request.op](BsrPlanMaker(request, executor, row))


class ZeroFillStep:
    """Zeros in memory of a plan, as a step of it."""

    __slots__ = ("_executor", "_nbytes", "_place")

    def __init__(self, executor: CudaExecutor, place: int, nbytes: int) -> None:
        self._executor, self._place, self._nbytes = executor, place, nbytes

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Write the zeros."""
        driver.cuMemsetD8Async(addresses[self._place], 0, self._nbytes, self._executor.target.value)


class CountCheckStep:
    """A step that waits for a count; BadRequest if it is not the expected one, or reports unsorted rows."""

    __slots__ = ("_executor", "_nnzb", "_place")

    def __init__(self, executor: CudaExecutor, place: int, nnzb: int) -> None:
        self._executor, self._place, self._nnzb = executor, place, nnzb

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Wait, and compare."""
        count, stream = ctypes.c_int64(), self._executor.target.value
        driver.cuMemcpyDtoHAsync(ctypes.addressof(count), addresses[self._place], COUNT_BYTES, stream)
        driver.cuStreamSynchronize(stream)
        refuse_count(self._nnzb, count.value)


class WorkspaceParts(NamedTuple):
    """The parts of workspace, in order: counts of marks per word, their sums, the marks, and two numbers."""

    counts: int
    sums: int
    bits: int
    total: int
    unsorted: int


class BsrPlanMaker:
    """Makes the plan of a request."""

    def __init__(self, request: Any, executor: CudaExecutor, row: Row) -> None:
        self.request, self.executor, self.row = request, executor, row
        self.form = request.form
        self.count: int = request.values.shape[0]  # the number of elements, or of blocks
        self.high, self.wide = getattr(request, "block", self.form.block)
        self.lines = self.form.shape[0] // self.high
        self.arguments = len(request.reads) + len(request.writes)
        self.steps: list[Any] = []
        self.options = options(request.values.dtype, *(getattr(request, n).dtype.itemsize for n in ("rows", "columns")))

    def launch(self, name: str, threads: int, operands: Sequence[str | int], *numbers: int) -> None:
        """Add a kernel over operands, which are named, or numbered for parts of workspace."""
        places = [self.request.place_of(one) if isinstance(one, str) else one for one in operands]
        filled = [(ctypes.c_void_p(), place) for place in places]
        extents = -(-threads // THREADS), THREADS
        arguments = tuple(map(ctypes.c_int64, numbers))
        self.steps.append(LaunchStep(self.executor, (SOURCE, name, self.options), extents, filled, arguments))

    # -- CSR to BSR ---------------------------------------------------------------------------------------------------
    def mark_and_count(self, total: str | int, parts: WorkspaceParts) -> None:
        """Mark the first element of each block, and scan the marks; their number is written to `total`."""
        chunks = -(-self.words // CHUNK)
        self.steps.append(ZeroFillStep(self.executor, parts.unsorted, COUNT_BYTES))
        marked = ("rows", "columns", parts.bits, parts.counts, parts.unsorted)
        self.launch("mark_blocks", self.count + 1, marked, *self.element_numbers())
        self.launch("scan_counts", chunks * THREADS, (parts.counts, parts.sums), self.words, CHUNK)
        self.launch("scan_counts", THREADS, (parts.sums, total), chunks, chunks)
        self.launch("tell_count", 1, (parts.unsorted, total))

    @property
    def words(self) -> int:
        """The number of words of marks: there is one more bit than there are elements."""
        return self.count // WORD + 1

    def parts(self) -> WorkspaceParts:
        """The places of the parts of workspace: the arguments are followed by the workspace, and then by its parts."""
        first = self.arguments + 1
        return WorkspaceParts(*range(first, first + len(WorkspaceParts._fields)))

    def sizes(self) -> WorkspaceParts:
        """The sizes of the parts in bytes."""
        sums = -(-self.words // CHUNK) * COUNT_BYTES
        return WorkspaceParts(self.words * COUNT_BYTES, sums, self.words * WORD_BYTES, COUNT_BYTES, COUNT_BYTES)

    def element_numbers(self) -> tuple[int, int, int, int, int]:
        """Elements and rows of the matrix, the base, and rows and columns of a block."""
        return self.count, self.form.shape[0], self.form.base, self.high, self.wide

    def count_blocks(self) -> Plan:
        """Count the blocks on the device."""
        self.mark_and_count("out", self.parts())
        return self.finish(self.sizes(), capture_safe=True)

    def make_blocks(self) -> Plan:
        """Count the blocks again, to place them, and fill them once the host has compared their number."""
        request, parts = self.request, self.parts()
        self.mark_and_count(parts.total, parts)
        self.steps.append(CountCheckStep(self.executor, parts.total, request.nnzb))
        operands = ("rows", "columns", parts.bits, parts.counts, parts.sums, "out_rows", "out_columns")
        self.launch("place_blocks", max(self.count, self.lines + 1), operands, *self.element_numbers())
        if request.nnzb:
            names = ("values", "rows", "columns", "out_values", "out_rows", "out_columns")
            self.launch("fill_blocks", request.nnzb * self.high * self.wide, names, request.nnzb, *self.block_numbers())
        return self.finish(self.sizes(), capture_safe=False)

    def block_numbers(self) -> tuple[int, int, int, int]:
        """Rows of blocks, the base, and rows and columns of a block."""
        return self.lines, self.form.base, self.high, self.wide

    # -- from BSR -----------------------------------------------------------------------------------------------------
    def expand(self) -> Plan:
        """All elements of all blocks, row by row."""
        operands = ("values", "rows", "columns", "out_values", "out_rows", "out_columns")
        threads = max(self.count * self.high * self.wide, self.form.shape[0] + 1)
        self.launch("expand_blocks", threads, operands, self.count, *self.block_numbers())
        return self.finish((), capture_safe=True)

    def to_dense(self) -> Plan:
        """A dense matrix of any strides: write zeros, then the blocks."""
        out, place = self.request.layout_of("out"), self.request.place_of("out")
        if not out.size:
            return IdlePlan(self.row, capture_safe=False)
        dense = Matrix(OperandPointer(place), out.dtype, *out.shape, *out.strides)
        self.steps.append(Copy(self.executor, dense, dense, 1, CopyMode.ZERO, conj=False))
        if self.count:
            operands, threads = ("values", "rows", "columns", "out"), self.count * self.high * self.wide
            self.launch("unpack_blocks", threads, operands, self.count, *self.block_numbers(), *out.strides)
        return self.finish((), capture_safe=True)

    def finish(self, sizes: Sequence[int], *, capture_safe: bool) -> Plan:
        """The plan of the steps so far, with parts of workspace of these sizes."""
        rounded = [-(-size // ROUND) * ROUND for size in sizes]
        parts = [end - size for end, size in zip(accumulate(rounded), rounded, strict=True)]
        executor = self.executor
        work = executor.device.allocate(sum(rounded), executor.stream) if sizes else None
        return CusparsePlan(executor, self.row, self.steps, work, parts, capture_safe=capture_safe)


MAKERS: dict[str, Callable[[BsrPlanMaker], Plan]] = {
    "csr2bsr_nnz": BsrPlanMaker.count_blocks,
    "csr2bsr": BsrPlanMaker.make_blocks,
    "bsr2csr": BsrPlanMaker.expand,
    "sparse_to_dense": BsrPlanMaker.to_dense,
}
