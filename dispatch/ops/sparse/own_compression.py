"""Plans that make a dense matrix sparse, or count its elements, by the kernels of compression_kernels.py."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind import driver
from dispatch.core.request import Plan
from dispatch.errors import BadRequest
from dispatch.libraries.nvrtc.kernel import loaded
from dispatch.ops.sparse.compression_kernels import CHUNK, LINES, SEGMENT, SOURCE, THREADS, options
from dispatch.ops.sparse.form import SparseFormat

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Argument
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["Compression", "plan"]

COUNT_BYTES = 8


class KernelLaunch(NamedTuple):
    """One launch: the kernel's name, how many blocks, and its arguments as ctypes numbers."""

    name: str
    blocks: int
    arguments: tuple[Any, ...]


class Compression:
    """The launches of a request; the addresses of workspace and of operands are passed for each run."""

    def __init__(self, request: Any) -> None:
        self.request, layout = request, request.a.layout
        self.by_columns = getattr(request, "format", None) is SparseFormat.CSC
        (lines, across), (line_step, step) = layout.shape, layout.strides
        if self.by_columns:
            lines, across, line_step, step = across, lines, step, line_step
        self.segments = -(-across // SEGMENT)
        self.blocks = -(-lines // LINES) * self.segments
        self.count = lines * self.segments
        self.chunks = -(-self.count // CHUNK)
        self.source = tuple(map(ctypes.c_int64, (lines, across, line_step, step, self.segments)))
        self.nbytes = (self.count + self.chunks + 1) * COUNT_BYTES  # counts, sums, and the number of elements

    @property
    def options(self) -> tuple[str, ...]:
        """NVRTC's options."""
        request = self.request
        index_bytes = request.layout_of("out_rows").dtype.itemsize if len(request.writes) > 1 else COUNT_BYTES
        return options(request.a.dtype, index_bytes)

    def total(self, work: int) -> int:
        """The address in workspace to which `counting_launches` write the number of elements."""
        at: int = work + (self.count + self.chunks) * COUNT_BYTES
        return at

    def counting_launches(self, a: int, work: int, total: int) -> tuple[KernelLaunch, ...]:
        """Count each line, and scan the counts."""
        counts, sums = work, work + self.count * COUNT_BYTES
        whole = map(ctypes.c_int64, (self.chunks, self.chunks))
        parts = map(ctypes.c_int64, (self.count, CHUNK))
        return (
            KernelLaunch("count_elements", self.blocks, (*pointers(a, counts), *self.source)),
            KernelLaunch("scan_counts", self.chunks, (*pointers(counts, sums), *parts)),
            KernelLaunch("scan_counts", 1, (*pointers(sums, total), *whole)),
        )

    def filling_launch(self, a: int, work: int, values: int, rows: int, columns: int) -> KernelLaunch:
        """Write the elements of each line one after the other, once `counting_launches` have run."""
        major, minor = (columns, rows) if self.by_columns else (rows, columns)
        ends = 0
        if self.request.format is not SparseFormat.COO:
            major, ends = 0, major
        sums = work + self.count * COUNT_BYTES
        arguments = pointers(a, work, sums, self.total(work), values, minor, major, ends)
        return KernelLaunch("fill_elements", self.blocks, (*arguments, *self.source))


def pointers(*addresses: int) -> tuple[ctypes.c_void_p, ...]:
    """Addresses as a kernel takes them; 0 is a null pointer."""
    return tuple(ctypes.c_void_p(address or None) for address in addresses)


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; without rows or columns it writes zeros as counts or offsets."""
    if not request.a.size:
        return EmptyPlan(request, executor, row)
    return CompressionPlan(request, executor, row)


class EmptyPlan(Plan):
    """A matrix without elements: writes a count of 0, or offsets that are all 0."""

    __slots__ = ("_executor", "_nnz", "_zeros")

    def __init__(self, request: Any, executor: CudaExecutor, row: Row) -> None:
        super().__init__(row, capture_safe=False)
        self._executor, self._nnz = executor, getattr(request, "nnz", 0)
        layouts = ((request.place_of(name), request.layout_of(name)) for name in request.writes)
        self._zeros = [(place, layout.size * layout.dtype.itemsize) for place, layout in layouts if layout.size]

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        check_nnz(self._nnz, 0)
        for place, nbytes in self._zeros:
            address: Any = arguments[place]
            driver.cuMemsetD8Async(address, 0, nbytes, self._executor.target.value)


class CompressionPlan(Plan):
    """The launches one after another; before a result is filled, the host waits for the count."""

    __slots__ = ("_compression", "_counts", "_executor", "_functions", "_nnz", "_work")

    def __init__(self, request: Any, executor: CudaExecutor, row: Row) -> None:
        self._counts = request.op == "dense_nnz"
        super().__init__(row, capture_safe=self._counts)
        self._executor, self._nnz, self._compression = executor, getattr(request, "nnz", 0), Compression(request)
        names = (
            ("count_elements", "scan_counts") if self._counts else ("count_elements", "scan_counts", "fill_elements")
        )
        chosen = self._compression.options
        self._functions = {name: loaded(SOURCE, name, chosen, executor.device) for name in names}
        self._work = executor.device.allocate(self._compression.nbytes, executor.stream)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        work, executor = self._work, self._executor
        if work.owner is not executor.stream:
            # Created during a capture of the executor's stream, on another stream that has been synchronized since.
            work.owner = work.writer = executor.stream
        args: Any = arguments
        compression, base = self._compression, work.base
        total = args[1] if self._counts else compression.total(base)
        for launched in compression.counting_launches(args[0], base, total):
            self._launch(launched)
        if self._counts:
            return
        count = ctypes.c_int64()
        stream = executor.target.value
        driver.cuMemcpyDtoHAsync(ctypes.addressof(count), total, COUNT_BYTES, stream)
        driver.cuStreamSynchronize(stream)
        check_nnz(self._nnz, count.value)
        self._launch(compression.filling_launch(args[0], base, *args[1:]))

    def _launch(self, launched: KernelLaunch) -> None:
        arguments = (ctypes.c_void_p * len(launched.arguments))(*map(ctypes.addressof, launched.arguments))
        launch: Callable[..., int] = driver.cuLaunchKernel.unchecked
        function = ctypes.c_void_p(self._functions[launched.name])
        status = launch(function, launched.blocks, 1, 1, THREADS, 1, 1, 0, self._executor.target, arguments, None)
        if status:
            self._executor.stream.done()  # raises DeviceFault if the device is lost
            raise driver.error("cuLaunchKernel", status)


def check_nnz(nnz: int, found: int) -> None:
    """BadRequest unless the number of elements is the expected one."""
    if nnz != found:
        raise BadRequest("nnz", str(nnz), f"{found}, the number that dense_nnz counts")
