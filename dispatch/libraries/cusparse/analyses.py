"""Triangular solves: an analysis of the matrix, which is kept if its pattern is fixed, and the solve.

`cusparseSpSV` and `cusparseSpSM` differ only in their names. An analysis stores its results in a descriptor and in its
own memory. It may store the values, too, so they are passed again in each call. If the indices are at other addresses
than those of the analysis, it is repeated.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from cudabind.sys import cusparse
from dispatch.libraries.cusparse.calls import Call
from dispatch.libraries.cusparse.handle import handle_of
from dispatch.libraries.finalizer import Held

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.device.storage import Storage
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cusparse.descriptors import SparseMatrix

__all__ = ["Solve"]


class Analysis(Held):
    """A `cusparseSpSVDescr_t` or `cusparseSpSMDescr_t`, and its memory."""

    __slots__ = ("indices_at", "memory")

    def __init__(self, name: str) -> None:
        super().__init__(getattr(cusparse, f"{name}Descr_t")(), getattr(cusparse, f"{name}_destroyDescr"))
        self.indices_at: Any = None  # the addresses of the indices that were analysed
        self.memory: Storage | None = None
        getattr(cusparse, f"{name}_createDescr")(self.c)


class Solve:
    """A step that solves; `keeps` is whether the pattern is fixed, so that the analysis is kept."""

    __slots__ = ("_call", "_executor", "_keeps", "_kept", "_matrix", "_name", "_values")

    def __init__(
        self,
        executor: CudaExecutor,
        name: str,
        matrix: SparseMatrix,
        arguments: Sequence[Any],
        values: int,
        *,
        keeps: bool,
    ) -> None:
        """`name` is cusparseSpSV or cusparseSpSM, `values` the index of the matrix's elements among the addresses."""
        self._executor, self._name, self._matrix, self._values = executor, name, matrix, values
        self._call = Call(executor, name, arguments)
        self._keeps = keeps
        self._kept: Analysis | None = None

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Analyse, unless an analysis is kept, and solve."""
        self.prepare(addresses)
        self.solve()
        if not self._keeps:
            self._kept = None

    def prepare(self, addresses: Sequence[Any]) -> None:
        """Analyse, or pass the values to the analysis of these indices if there is one."""
        self._call.set_arguments(addresses)
        if self._kept is None or self._kept.indices_at != self._matrix.indices_at:
            self._kept = self._analyse()
        else:
            self._update(self._kept, addresses)

    def solve(self) -> None:
        """Solve at the addresses for which `prepare` was called."""
        if self._kept is None:
            raise RuntimeError("no analysis exists yet")
        self._call.invoke(f"{self._name}_solve", self._kept.c)

    def _analyse(self) -> Analysis:
        self._kept = None
        analysis, size = Analysis(self._name), ctypes.c_size_t()
        self._call.invoke(f"{self._name}_bufferSize", analysis.c, ctypes.byref(size))
        analysis.memory = self._executor.device.allocate(max(1, size.value), self._executor.stream)
        self._call.invoke(f"{self._name}_analysis", analysis.c, ctypes.c_void_p(analysis.memory.base))
        analysis.indices_at = self._matrix.indices_at
        return analysis

    def _update(self, found: Analysis, addresses: Sequence[Any]) -> None:
        """Pass the values, which may have changed since the last call."""
        kind: Any = getattr(cusparse, f"{self._name}Update_t")
        general = getattr(kind, f"CUSPARSE_{self._name.removeprefix('cusparse').upper()}_UPDATE_GENERAL")
        function: Any = getattr(cusparse, f"{self._name}_updateMatrix")
        values = ctypes.c_void_p(addresses[self._values])
        status = function.unchecked(handle_of(self._executor).follow(), found.c, values, general)
        if status:
            self._executor.stream.done()  # raises DeviceFault if the device is lost
            raise function.error(status)
