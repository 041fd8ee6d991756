"""The factors of a sparse matrix: analysis, factorization and solve by cuDSS, each when it is needed.

An analysis depends on the pattern, a factorization on the values. Descriptors are in host memory, and are updated with
the addresses of each run. Follows https://docs.nvidia.com/cuda/cudss/functions.html.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind.errors import CudaError
from cudabind.sys import cudss
from dispatch.device.disposal import dispose
from dispatch.device.stream import relaxed
from dispatch.errors import BadRequest
from dispatch.libraries.cudss.handle import handle_of

if TYPE_CHECKING:
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["Factors", "SolverSettings", "SystemSpec"]

NO_LIMIT = -1
COUNTS = {4: ctypes.c_int32, 8: ctypes.c_int64}
INDEX_TYPES = {4: cudss.cudaDataType_t.CUDA_R_32I, 8: cudss.cudaDataType_t.CUDA_R_64I}


class SystemSpec(NamedTuple):
    """A system without its addresses: `kind` and `view` are a cudssMatrixType_t and a cudssMatrixViewType_t.

    `ld` are the leading dimensions of the right-hand sides and of the solution, which are column-major.
    """

    n: int
    nnz: int
    nrhs: int
    ld: tuple[int, int]
    offset_bytes: int
    index_bytes: int
    value_type: int
    kind: int
    view: int
    base: int


class SolverSettings(NamedTuple):
    """How systems are solved.

    `batch` is the number of matrices of one pattern, whose values, right-hand sides and solutions are contiguous. With
    `is_hybrid` the factors are in host memory, and at most `device_memory` bytes of device memory are used.
    """

    batch: int = 1
    is_hybrid: bool = False
    device_memory: int | None = None
    refinements: int = 0


class Factors:
    """`cudssData_t` of one system, or of a batch, destroyed with its executor or with this object.

    cuDSS reports one status for a batch: `info` is not 0 if any of its matrices fails. After a failure, the
    same `cudssData_t` reports this status for all later factorizations (1.0.0), so it is replaced by a new one.
    """

    __slots__ = (
        "__weakref__",
        "_a",
        "_analysed_pattern",
        "_b",
        "_config",
        "_data",
        "_executor",
        "_handle",
        "_has_failed",
        "_index_bytes",
        "_is_factored",
        "_settings",
        "_stamp",
        "_x",
        "info",
    )

    def __init__(self, executor: CudaExecutor, spec: Any, placeholder: int, settings: SolverSettings) -> None:
        """`spec` is a `SystemSpec`, or for a derived class the argument of its `_describe`."""
        self._executor, self._handle, self._settings = executor, handle_of(executor).follow(), settings
        self._config, self._data = cudss.cudssConfig_t(), cudss.cudssData_t()
        self._a, self._b, self._x = (cudss.cudssMatrix_t() for _ in range(3))
        self._analysed_pattern: Any = None  # the addresses of the pattern that was analysed
        self._stamp: Any = None  # the stamp and address of the factorized values
        self._is_factored = self._has_failed = False
        self.info = 0
        executor.at_close.append(partial(_close, weakref.ref(self)))
        cudss.cudssConfigCreate(self._config)
        configure(self._config, settings)
        cudss.cudssDataCreate(self._handle, self._data)
        self._describe(spec, placeholder)

    def _describe(self, spec: Any, placeholder: int) -> None:
        """Make the descriptors of the matrices, whose addresses are set for each run."""
        self._index_bytes = spec.index_bytes
        value, kind = cudss.cudaDataType_t(spec.value_type), cudss.cudssMatrixType_t(spec.kind)
        indices = INDEX_TYPES[spec.offset_bytes], INDEX_TYPES[spec.index_bytes]
        view, base = cudss.cudssMatrixViewType_t(spec.view), cudss.cudssIndexBase_t(spec.base)
        pattern = (placeholder, None, placeholder, placeholder)
        cudss.cudssMatrixCreateCsr(self._a, spec.n, spec.n, spec.nnz, *pattern, *indices, value, kind, view, base)
        layout = cudss.cudssLayout_t.CUDSS_LAYOUT_COL_MAJOR
        for matrix, ld in zip((self._b, self._x), spec.ld, strict=True):
            cudss.cudssMatrixCreateDn(matrix, spec.n, spec.nrhs, ld, placeholder, value, layout)

    def solve(self, pattern: tuple[Any, Any], values: Any, b: Any, x: Any, stamp: Any, *, keeps: bool) -> None:
        """Factorize the matrix if needed, and solve, at these addresses."""
        self.factorize(pattern, values, b, x, stamp, keeps=keeps)
        self.substitute()

    def factorize(self, pattern: tuple[Any, Any], values: Any, b: Any, x: Any, stamp: Any, *, keeps: bool) -> bool:
        """Set these addresses, and analyse and factorize unless the analysis and the factors are still valid.

        `keeps` is whether the pattern is fixed; `stamp`, if there is one, differs for other values. If it factorizes it
        waits for the status, and returns True.
        """
        self._set_addresses(pattern, values, b, x)
        values_key = None if stamp is None else (stamp, values)
        if not keeps or self._analysed_pattern != pattern:
            self._analysed_pattern = None
        elif values_key is not None and self._stamp == values_key:
            return False
        if self._has_failed:
            self._renew()
        if self._analysed_pattern is None:
            self._stamp, self._is_factored = None, False
            self._analyse()
            self._analysed_pattern = pattern
        phases = cudss.cudssPhase_t
        again = self._is_factored
        self._stamp, self._is_factored = None, False
        self._execute(phases.CUDSS_PHASE_REFACTORIZATION if again else phases.CUDSS_PHASE_FACTORIZATION)
        self.info = self._status()
        # Scales and order of a factorization that replaced pivots must not be used for another matrix.
        self._stamp, self._is_factored, self._has_failed = values_key, not self.info, self.info != 0
        return True

    def _set_addresses(self, pattern: tuple[Any, Any], values: Any, b: Any, x: Any) -> None:
        """Set the addresses of a run's operands in the descriptors."""
        offsets, indices = pattern
        cudss.cudssMatrixSetCsrPointers(self._a, offsets, None, indices, values)
        cudss.cudssMatrixSetValues(self._b, b)
        cudss.cudssMatrixSetValues(self._x, x)

    def mark_failed(self, status: int) -> None:
        """Record that the solution was wrong, with `status` as `info`: the next factorization begins with new data."""
        self.info, self._has_failed = status, True

    def _renew(self) -> None:
        """Replace the `cudssData_t` by a new one, without an analysis."""
        cudss.cudssDataDestroy(self._handle, self._data)
        self._data = cudss.cudssData_t()
        cudss.cudssDataCreate(self._handle, self._data)
        self._analysed_pattern, self._stamp, self._is_factored, self._has_failed = None, None, False, False

    def substitute(self) -> None:
        """Solve with the present factors, at the addresses that were set."""
        self._execute(cudss.cudssPhase_t.CUDSS_PHASE_SOLVE)

    def _analyse(self) -> None:
        """Analyse; BadRequest if the limit of device memory is less than the matrix needs."""
        phase, limit = cudss.cudssPhase_t.CUDSS_PHASE_ANALYSIS, self._settings.device_memory
        try:
            self._execute(phase)
        except CudaError:
            if limit is None:
                raise
            # Only an analysis without a limit reports the required memory.
            self._limit(NO_LIMIT)
            try:
                self._execute(phase)
                self._check_memory(limit)
            finally:
                self._limit(limit)
            raise
        if limit is not None:
            self._check_memory(limit)

    def _limit(self, nbytes: int) -> None:
        param, value = cudss.cudssConfigParam_t.CUDSS_CONFIG_HYBRID_DEVICE_MEMORY_LIMIT, ctypes.c_int64(nbytes)
        cudss.cudssConfigSet(self._config, param, ctypes.byref(value), ctypes.sizeof(value))

    def _check_memory(self, limit: int) -> None:
        """BadRequest if the limit is less than the hybrid mode needs, which the analysis reports."""
        least = self._get_data(cudss.cudssDataParam_t.CUDSS_DATA_HYBRID_DEVICE_MEMORY_MIN, ctypes.c_int64())
        if limit < least:
            hint = f"device_memory={least}, or None for the memory that cuDSS finds free"
            raise BadRequest("device_memory", f"{limit}", f"{least} bytes or more for this matrix", hint)

    def _execute(self, phase: Any) -> None:
        handle = handle_of(self._executor).follow()
        arguments = handle, int(phase), self._config, self._data, self._a, self._x, self._b
        status = cudss.cudssExecute.unchecked(*arguments)
        if status:
            self._executor.stream.done()  # raises DeviceFault if the device is lost
            raise cudss.cudssExecute.error(status)

    def _status(self) -> int:
        """0, the positive number by which cuDSS reports a failure, or minus the number of pivots that were replaced."""
        params = cudss.cudssDataParam_t
        info = self._get_data(params.CUDSS_DATA_INFO, ctypes.c_int())
        # A count has the width of indices.
        return info or -self._get_data(params.CUDSS_DATA_NPIVOTS, COUNTS[self._index_bytes]())

    def _get_data(self, what: Any, found: Any) -> int:
        written = ctypes.c_size_t()
        size = ctypes.sizeof(found)
        cudss.cudssDataGet(self._handle, self._data, what, ctypes.byref(found), size, ctypes.byref(written))
        number: int = found.value
        return number

    def close(self) -> None:
        """Destroy everything; a second call does nothing."""
        if not hasattr(self, "_data"):
            return
        with relaxed():  # a finalizer may run during a capture, which freeing the library's memory would invalidate
            for matrix in (self._a, self._b, self._x):
                if matrix.value:
                    cudss.cudssMatrixDestroy.unchecked(matrix)
            cudss.cudssDataDestroy.unchecked(self._handle, self._data)
            cudss.cudssConfigDestroy.unchecked(self._config)
        del self._data

    def __del__(self) -> None:
        if hasattr(self, "_data") and not sys.is_finalizing() and self._executor.device.alive:  # created and open
            dispose(Factors.close, self)


def configure(config: Any, settings: SolverSettings) -> None:
    """Set all choices that differ from cuDSS's defaults; before the analysis, which may depend on them."""
    params = cudss.cudssConfigParam_t
    wanted: list[tuple[Any, Any]] = []
    if settings.batch > 1:
        wanted.append((params.CUDSS_CONFIG_UBATCH_SIZE, ctypes.c_int32(settings.batch)))
    if settings.is_hybrid:
        wanted.append((params.CUDSS_CONFIG_HYBRID_MEMORY_MODE, ctypes.c_int32(1)))
    if settings.device_memory is not None:
        wanted.append((params.CUDSS_CONFIG_HYBRID_DEVICE_MEMORY_LIMIT, ctypes.c_int64(settings.device_memory)))
    if settings.refinements:
        wanted.append((params.CUDSS_CONFIG_IR_N_STEPS, ctypes.c_int32(settings.refinements)))
    for param, value in wanted:
        cudss.cudssConfigSet(config, param, ctypes.byref(value), ctypes.sizeof(value))


def _close(of: Any) -> None:
    factors = of()
    if factors is not None:
        factors.close()
