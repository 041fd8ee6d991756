"""Direct solves by factors of f32 and refinement with residuals of f64: cuDSS, and kernels of this library.

Each step solves for the residual and adds the correction. Refinement ends when the largest residual is at the level of
rounding, relative to the largest sum |b| + |A|·|x| of a row, as in LAPACK's dsgesv. If the steps do not reach that, or
a pivot was too small for f32, the matrix is factorized in its own precision, and the status is that of this
factorization.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from cudabind import driver
from dispatch.keys import C64, F32
from dispatch.libraries.nvrtc.kernel import loaded
from dispatch.ops.sparse.cudss_single import CudssPlan, Run
from dispatch.ops.sparse.direct import SparseKind
from dispatch.ops.sparse.refinement_kernels import SOURCE, THREADS, options

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cudss.factors import Factors
    from dispatch.ops.sparse.direct import SpsolveRequest

__all__ = ["RefinedPlan"]

KERNELS = ("narrow_values", "begin_residual", "take_off_product", "narrow_residual", "add_correction")
MAX_STEPS = 10
ROUNDOFF, MIN_ROUNDOFFS = 2.0**-52, 16
ALIGNMENT = 256  # bytes at which each part of memory begins
DOUBLE_BYTES = 8


class RefinedPlan(CudssPlan):
    """Factors of f32, and those of the matrix's own precision once they are needed."""

    __slots__ = ("_full_factors", "_functions", "_maxima", "_places", "_rejected", "_steps", "_tolerance", "_work")

    def __init__(self, request: SpsolveRequest, executor: CudaExecutor, row: Row) -> None:
        super().__init__(request, executor, row)
        self._full_factors: Factors | None = None
        self._rejected: Any = None  # the stamp and the values for which factors of f32 did not suffice
        self._steps = MAX_STEPS if request.refinements is None else request.refinements
        spec, is_complex = self._spec, request.values.dtype.is_complex
        self._tolerance = max(MIN_ROUNDOFFS, math.sqrt(spec.n)) * ROUNDOFF
        conj = is_complex and request.assume_a in (SparseKind.HER, SparseKind.POS)
        chosen = options(request, spec.view, conj=conj)
        self._functions = {name: loaded(SOURCE, name, chosen, executor.device) for name in KERNELS}
        parts, count = 1 + is_complex, spec.n * spec.nrhs
        half = DOUBLE_BYTES // 2 * parts
        sizes = spec.nnz * half, count * half, count * half, count * 2 * half, count * DOUBLE_BYTES
        self._places, end = [], 0
        for nbytes in (*sizes, 2 * spec.nrhs * DOUBLE_BYTES):
            self._places.append(end)
            end += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self._work = executor.device.allocate(end, executor.stream)
        self._maxima = np.zeros((spec.nrhs, 2))

    def first_factors(self, request: SpsolveRequest) -> Factors:
        """The factors of f32."""
        spec, narrow = self._spec, C64 if request.values.dtype.is_complex else F32
        half = spec._replace(ld=(spec.n, spec.n), value_type=narrow.cuda)
        return self.factors(half, self._settings._replace(refinements=0))

    def solve(self, run: Run, info: Any) -> None:
        values_key = None if run.stamp is None else (run.stamp, run.values)
        if values_key is None or values_key != self._rejected:
            self._rejected = None
            if self._refine(run, values_key):
                self.write_status(info, 0)
                return
            self._rejected = values_key
        if self._full_factors is None:
            self._full_factors = self.factors(self._spec, self._settings._replace(refinements=0))
        self._full_factors.solve(*run, keeps=self._keeps)
        self.write_status(info, self._full_factors.info)

    def _refine(self, run: Run, known: Any) -> bool:
        """Solve and refine; returns whether that reached the accuracy of full precision. Waits for each step."""
        values, rhs, correction, r, sizes, maxima = (self._work.base + place for place in self._places)
        (ld_b, ld_x), n = self._spec.ld, self._spec.n
        # In each run, because the factors may have to be computed again; it is one pass over the elements.
        self._launch("narrow_values", run.values, values, _Int64(self._spec.nnz), over=self._spec.nnz)
        factors = self._factors
        factors.factorize(run.pattern, values, rhs, correction, known, keeps=self._keeps)
        if factors.info:
            return False
        before = math.inf
        for step in range(self._steps + 2):  # the first solve is no refinement; the last residual is only checked
            self._launch("begin_residual", run.b, _Int64(ld_b), r, sizes, _Int64(n))
            if step:
                matrix = run.values, *run.pattern
                self._launch("take_off_product", *matrix, run.x, _Int64(ld_x), r, sizes, _Int64(n))
            self._maxima[...] = 0
            self._clear(maxima)
            self._launch("narrow_residual", r, sizes, rhs, maxima, _Int64(n))
            if step:
                residual = self._largest_residual(maxima)
                if residual <= self._tolerance:
                    return True
                if step > self._steps or not residual < before / 2:
                    return False
                before = residual
            factors.substitute()
            self._launch("add_correction", correction, run.x, _Int64(ld_x), _Int64(not step), _Int64(n))
        return False

    def _clear(self, maxima: int) -> None:
        driver.cuMemsetD8Async(maxima, 0, self._maxima.nbytes, self._executor.target.value)

    def _largest_residual(self, maxima: int) -> float:
        """The largest residual of a right-hand side relative to the size of its terms; infinite if anything is NaN."""
        stream = self._executor.target.value
        driver.cuMemcpyDtoHAsync(self._maxima.ctypes.data, maxima, self._maxima.nbytes, stream)
        driver.cuStreamSynchronize(stream)
        left, size = self._maxima.T
        with np.errstate(all="ignore"):
            largest = float(np.where(left == 0, 0, left / size).max())
        return largest if math.isfinite(largest) else math.inf

    def _launch(self, name: str, *given: Any, over: int | None = None) -> None:
        """Launch a kernel over the rows of all right-hand sides, or over so many elements."""
        blocks = -(-self._spec.n // THREADS) * self._spec.nrhs if over is None else -(-over // THREADS)
        arguments = [ctypes.c_int64(one) if isinstance(one, _Int64) else ctypes.c_void_p(one) for one in given]
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        launch: Callable[..., int] = driver.cuLaunchKernel.unchecked
        function = ctypes.c_void_p(self._functions[name])
        status = launch(function, blocks, 1, 1, THREADS, 1, 1, 0, self._executor.target, addresses, None)
        if status:
            self._executor.stream.done()  # raises DeviceFault if the device is lost
            raise driver.error("cuLaunchKernel", status)


class _Int64(int):
    """A kernel argument that is a number; others are addresses."""
