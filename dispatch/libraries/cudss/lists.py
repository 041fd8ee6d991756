"""The factors of matrices of several patterns and extents: a non-uniform batch of cuDSS, with one call for each phase.

cuDSS reads the numbers of rows, columns and elements of each matrix on the host, and the addresses of its operands on
the device, in lists that a kernel of this library writes before a run. Follows
https://docs.nvidia.com/cuda/cudss/functions.html (cudssMatrixCreateBatchCsr, cudssMatrixCreateBatchDn).
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from cudabind.sys import cudss
from dispatch.libraries.cublas.pointers import PointerArrays
from dispatch.libraries.cudss.factors import INDEX_TYPES, Factors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cudss.factors import SolverSettings, SystemSpec

__all__ = ["ListFactors"]

ADDRESS_LISTS = 5  # the lists of addresses: rows, columns, values, b and x


class ListFactors(Factors):
    """`cudssData_t` of several matrices; each address of a run is a tuple with one address for each system, in order.

    As for other batches cuDSS reports one status for all systems.
    """

    __slots__ = ("_extents", "_given", "_lists_changed", "_pointers")

    def __init__(
        self, executor: CudaExecutor, specs: Sequence[SystemSpec], placeholder: int, settings: SolverSettings
    ) -> None:
        """`specs` describe the systems, of one dtype, kind, view and base, with offsets and indices of one width."""
        self._pointers = PointerArrays(executor, len(specs), ADDRESS_LISTS)
        self._given: Any = None
        self._lists_changed = False
        super().__init__(executor, specs, placeholder, settings)

    @property
    def b_and_x(self) -> tuple[Any, ...]:
        """The device's lists of the addresses of right-hand sides, and of solutions."""
        return self._pointers.addresses[3:]

    def _describe(self, specs: Any, placeholder: int) -> None:
        del placeholder
        first, count = specs[0], len(specs)
        self._index_bytes = first.index_bytes

        def listed(numbers: Any) -> Any:
            return (ctypes.c_int32 * count)(*numbers)

        rows, elements = listed(one.n for one in specs), listed(one.nnz for one in specs)
        nrhs, *leading = (listed(numbers) for numbers in zip(*((one.nrhs, *one.ld) for one in specs), strict=True))
        self._extents = rows, elements, nrhs, leading  # the library reads these when it is called
        at_rows, at_columns, at_values, *at = self._pointers.addresses
        m, nnz = ctypes.addressof(rows), ctypes.addressof(elements)
        index, value = INDEX_TYPES[first.index_bytes], cudss.cudaDataType_t(first.value_type)
        kind, view = cudss.cudssMatrixType_t(first.kind), cudss.cudssMatrixViewType_t(first.view)
        base, layout = cudss.cudssIndexBase_t(first.base), cudss.cudssLayout_t.CUDSS_LAYOUT_COL_MAJOR
        pattern = (at_rows, None, at_columns, at_values)
        cudss.cudssMatrixCreateBatchCsr(self._a, count, m, m, nnz, *pattern, index, index, value, kind, view, base)
        for matrix, ld, values in zip((self._b, self._x), leading, at, strict=True):
            k, step = ctypes.addressof(nrhs), ctypes.addressof(ld)
            cudss.cudssMatrixCreateBatchDn(matrix, count, m, k, step, values, index, value, layout)

    def _set_addresses(self, pattern: tuple[Any, Any], values: Any, b: Any, x: Any) -> None:
        addresses = (*pattern, values, b, x)
        if addresses != self._given:
            self._pointers.enqueue(list(zip(*addresses, strict=True)))
            self._given, self._lists_changed = addresses, True

    def _execute(self, phase: Any) -> None:
        """Run a phase; a phase that waits for the GPU anyway first waits until changed lists are written."""
        if self._lists_changed and phase != cudss.cudssPhase_t.CUDSS_PHASE_SOLVE:
            self._executor.stream.synchronize()
            self._lists_changed = False
        super()._execute(phase)
