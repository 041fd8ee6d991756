"""Incomplete factorizations by cuSPARSE, in place: an analysis, which may be kept, the elimination, and its pivots.

The library reports pivots on the host, and waits for the device to do so. Follows
https://docs.nvidia.com/cuda/cusparse/#cusparse-t-csrilu02 and #cusparse-t-csric02.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from cudabind import driver
from cudabind.sys import cusparse
from dispatch.libraries.cusparse.handle import handle_of
from dispatch.libraries.cusparse.sorting import LegacyDescriptor
from dispatch.libraries.finalizer import Held

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.device.storage import Storage
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["Elimination"]

NAN_BYTE = 0xFF  # each byte of a NaN, for all floating-point types


class Analysis(Held):
    """A `csrilu02Info_t` or `csric02Info_t`, and its memory."""

    __slots__ = ("indices_at", "memory", "missing_pivot")

    def __init__(self, name: str) -> None:
        kind = f"{name.capitalize()}Info"
        super().__init__(getattr(cusparse, f"{name}Info_t")(), getattr(cusparse, f"cusparseDestroy{kind}"))
        self.indices_at: Any = None  # the addresses of the indices that were analysed
        self.missing_pivot = 0  # 1 + the first row whose diagonal element is not stored
        self.memory: Storage | None = None
        getattr(cusparse, f"cusparseCreate{kind}")(self.c)


class Elimination:
    """A step that factorizes a matrix in CSR in place, and writes a status of its pivots.

    `name` is csrilu02 or csric02, `letter` that of the dtype, and `places` are the indices of values, rows, columns and
    the status among the addresses. `keeps` is whether the pattern, whose places are `pattern`, is fixed.
    """

    __slots__ = (
        *("_bytes", "_descriptor", "_executor", "_keeps", "_kept", "_letter", "_name", "_pattern", "_places", "_sizes"),
    )

    def __init__(
        self,
        executor: CudaExecutor,
        name: str,
        letter: str,
        sizes: tuple[int, int],
        places: tuple[int, int, int, int],
        pattern: tuple[int, int],
        *,
        base: int,
        nbytes: int,
        keeps: bool,
    ) -> None:
        """`sizes` are the numbers of rows and elements, `nbytes` the size of all values."""
        self._executor, self._name, self._letter, self._sizes = executor, name, letter, sizes
        self._places, self._pattern, self._bytes, self._keeps = places, pattern, nbytes, keeps
        self._descriptor = LegacyDescriptor(base)
        self._kept: Analysis | None = None

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Analyse, unless an analysis is kept, and eliminate."""
        values, rows, columns, number = (addresses[place] for place in self._places)
        parts = tuple(ctypes.c_void_p(part) for part in (values, rows, columns))
        analysis, at = self._kept, tuple(addresses[place] for place in self._pattern)
        if analysis is None or analysis.indices_at != at:
            self._kept = None
            analysis = self._analyse(parts)
            analysis.indices_at = at
        info = analysis.missing_pivot
        if not info:
            self._call("", parts, analysis, *self._trailing_arguments(analysis))
            info = self._zero_pivot(analysis)
        if self._keeps:
            self._kept = analysis
        stream = self._executor.target.value
        if info:
            driver.cuMemsetD8Async(values, NAN_BYTE, self._bytes, stream)
        driver.cuMemsetD32Async(number, info, 1, stream)

    def _trailing_arguments(self, found: Analysis) -> tuple[Any, ...]:
        """The policy and the workspace; levels are computed if the analysis serves more than one run."""
        policies = cusparse.cusparseSolvePolicy_t
        policy = policies.CUSPARSE_SOLVE_POLICY_USE_LEVEL if self._keeps else policies.CUSPARSE_SOLVE_POLICY_NO_LEVEL
        return policy, ctypes.c_void_p(found.memory.base if found.memory else 0)

    def _call(self, ending: str, parts: tuple[Any, ...], found: Analysis, *more: Any) -> None:
        function: Any = getattr(cusparse, f"cusparse{self._letter}{self._name}{ending}")
        arguments = (*self._sizes, self._descriptor.c, *parts, found.c, *more)
        self._check(function, function.unchecked(handle_of(self._executor).follow(), *arguments))

    def _check(self, function: Any, status: int) -> None:
        if status:
            self._executor.stream.done()  # raises DeviceFault if the device is lost
            raise function.error(status)

    def _analyse(self, parts: tuple[Any, ...]) -> Analysis:
        analysis, size = Analysis(self._name), ctypes.c_int32()
        self._call("_bufferSize", parts, analysis, ctypes.byref(size))
        analysis.memory = self._executor.device.allocate(max(1, size.value), self._executor.stream)
        self._call("_analysis", parts, analysis, *self._trailing_arguments(analysis))
        analysis.missing_pivot = self._zero_pivot(analysis)
        return analysis

    def _zero_pivot(self, found: Analysis) -> int:
        """1 + the first row whose pivot is missing or 0, counted from 0; 0 if there is none. Waits for the device."""
        position, function = ctypes.c_int32(-1), getattr(cusparse, f"cusparseX{self._name}_zeroPivot")
        status = function.unchecked(handle_of(self._executor).follow(), found.c, ctypes.byref(position))
        if status != int(cusparse.cusparseStatus_t.CUSPARSE_STATUS_ZERO_PIVOT):
            self._check(function, status)
            return 0
        return 1 + position.value - self._descriptor.base
