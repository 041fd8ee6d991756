"""A kernel that checks the indices of a sparse matrix, compiled by NVRTC, and its launch.

It reads only within the tensors, whatever they hold: no offset is dereferenced. A thread checks one offset and one
element, and finds the element's line by bisection. If that line does not contain the element, the offsets are counted
as wrong in any case, and the order of the element is not checked.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any

from cudabind import driver
from dispatch.libraries.nvrtc.kernel import Kernel, KernelPlan, Launch, loaded
from dispatch.ops.sparse.conversions import FLAWS
from dispatch.ops.sparse.form import SparseFormat

if TYPE_CHECKING:
    from dispatch.core.request import Argument, Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["kernel_of", "nvrtc_check"]

THREADS = 256
TYPES = {4: "int", 8: "long long"}
COUNT_BYTES = 8

SOURCE = r"""
typedef long long Int;

__device__ Int line_of(const OFFSET* ends, Int lines, Int base, Int element)
{
    Int low = 0, high = lines;  // the first line that ends behind the element
    while (low < high) {
        const Int middle = (low + high) / 2;
        if ((Int)ends[middle + 1] - base <= element) low = middle + 1; else high = middle;
    }
    return low;
}

__device__ void found(unsigned long long* counts, int flaw, bool is_there)
{
    if (is_there) atomicAdd(counts + flaw, 1ull);
}

extern "C" __global__ void check_indices(
    const void* values, const ROW* rows, const COLUMN* columns, unsigned long long* counts,
    Int m, Int n, Int count, Int base, Int offsets, int format)
{
    const bool by_columns = format == 2, pairs = format == 3;
    const OFFSET* ends = (const OFFSET*)(by_columns ? (const void*)columns : (const void*)rows);
    const Int lines = by_columns ? n : m, across = by_columns ? m : n;
    const Int i = (Int)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < offsets) {
        const Int here = (Int)ends[i] - base;
        found(counts, 0, i == 0 && here != 0);
        found(counts, 0, i == lines && here != count);
        found(counts, 0, i > 0 && here < (Int)ends[i - 1] - base);
    }
    if (i >= count) return;
    const Int minor = (by_columns ? (Int)rows[i] : (Int)columns[i]) - base;
    const Int row = pairs ? (Int)rows[i] - base : 0;
    found(counts, 1, minor < 0 || minor >= across || (pairs && (row < 0 || row >= m)));
    if (i + 1 >= count) return;
    const Int beside = (by_columns ? (Int)rows[i + 1] : (Int)columns[i + 1]) - base - minor;
    Int later = pairs ? (Int)rows[i + 1] - base - row : 0;
    if (!pairs) {
        const Int line = line_of(ends, lines, base, i);
        if (line >= lines || (Int)ends[line] - base > i || i + 1 >= (Int)ends[line + 1] - base) return;
    }
    found(counts, 2, later < 0 || (later == 0 && beside < 0));
    found(counts, 3, later == 0 && beside == 0);
}
"""


class CheckPlan(KernelPlan):
    """One kernel, which adds to counts that are set to 0 first."""

    __slots__ = ()

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        counts: Any = arguments[-1]  # an address
        driver.cuMemsetD8Async(counts, 0, FLAWS * COUNT_BYTES, self._executor.target.value)
        super().enqueue(arguments)


def nvrtc_check(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request: zeros, and one launch."""
    kernel = kernel_of(request)
    function = loaded(kernel.source, kernel.function, kernel.options, executor.device)
    return CheckPlan(executor, row, function, launch(request), len(request.reads) + len(request.writes))


def kernel_of(request: Any) -> Kernel:
    """The kernel for the widths of a request's indices."""
    return _kernel(request.rows.dtype.itemsize, request.columns.dtype.itemsize, request.form.format == SparseFormat.CSC)


@cache
def _kernel(rows: int, columns: int, by_columns: bool) -> Kernel:
    words = {"ROW": TYPES[rows], "COLUMN": TYPES[columns], "OFFSET": TYPES[columns if by_columns else rows]}
    options = ("-std=c++17", *(f"-D{name}={word}" for name, word in words.items()))
    return Kernel(SOURCE, "check_indices", launch, options)


def launch(request: Any) -> Launch:
    """One thread for each offset and each element."""
    form = request.form
    kind = SparseFormat(form.format)
    (m, n), (high, wide) = form.shape, form.block
    m, n = m // high, n // wide
    count = request.values.shape[0]
    offsets = 0 if kind is SparseFormat.COO else (n if kind is SparseFormat.CSC else m) + 1
    numbers = (*map(ctypes.c_int64, (m, n, count, form.base, offsets)), ctypes.c_int(int(kind)))
    return Launch((max(1, -(-max(count, offsets) // THREADS)),), (THREADS,), numbers)
