"""The plan of a matmul request with `cublasGemmEx`, or with `cublasGemmStridedBatchedEx` for a batch.

A batch that no single stride describes takes one call for each outer index, or one call with arrays of pointers
(cublas_pointers.py).

`lower.py` translates a request to cuBLASLt's column-major terms. cuBLAS uses the same terms, except that C and D are
one matrix: a separate C is copied to D first. Follows https://docs.nvidia.com/cuda/cublas/#cublasgemmex.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from cudabind.sys import cublas
from cudabind.sys import cublas_types as cb
from dispatch.core.request import Argument, Plan
from dispatch.errors import Refused
from dispatch.libraries.cublas.handle import MATH, handle_of
from dispatch.libraries.cublas.scalars import HostNumber
from dispatch.libraries.cublaslt.kernel_recording import kernels, must_not_accumulate
from dispatch.libraries.cusolver.copies import Copy, CopyMode
from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer
from dispatch.ops.matmul.arguments import ALPHA, FIRST_FACTOR, OUT, A, B, C

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype
    from dispatch.libraries.cublaslt.problem import Matrix as LtMatrix
    from dispatch.ops.matmul.lower import Lowered

__all__ = ["GemmPlan"]

MAX_INT = 2**31 - 1
PLACEHOLDER_ADDRESS = 1 << 32  # a placeholder address, for calls that are captured and never run
MAX_ITEMSIZE = 16  # bytes of the widest element
DEFAULT_MATH = cublas.cublasMath_t.CUBLAS_DEFAULT_MATH
ANY_ALGORITHM = cublas.cublasGemmAlgo_t.CUBLAS_GEMM_DEFAULT
TRANSPOSED, NOT_TRANSPOSED = cb.cublasOperation_t.CUBLAS_OP_T, cb.cublasOperation_t.CUBLAS_OP_N


class GemmPlan(Plan):
    """One `cublasGemmEx`, or its strided form, with all arguments prepared but the addresses and the numbers."""

    __slots__ = (
        *("_copies", "_executor", "_function", "_handle", "_numbers_on_device", "_lowered", "_math", "_numbers"),
        *("_operands", "_arguments", "_scalars", "_scale", "_current_numbers", "_hides_beta"),
    )

    def __init__(self, executor: CudaExecutor, row: Row, lowered: Lowered, scale: Dtype) -> None:
        super().__init__(row, capture_safe=True)
        self._executor, self._lowered, self._scale = executor, lowered, scale
        self._handle = handle_of(executor)
        self._handle.follow(executor)  # sets the workspace before anything is captured
        problem = lowered.problem
        self._math = DEFAULT_MATH if problem.reduced_precision else MATH
        # Where the library sees a beta of 1, it may round the product to D's dtype before it adds it to D.
        self._hides_beta = problem.adds_c and must_not_accumulate(problem)
        self._operands = tuple(ctypes.c_void_p() for _ in range(3))  # cuBLAS's A, B and C
        self._numbers = (HostNumber(scale), HostNumber(scale))
        self._current_numbers: tuple[Argument, ...] = ()  # the numbers that are set
        self._scalars = (ctypes.c_void_p(), ctypes.c_void_p())
        self._numbers_on_device = False  # whether the numbers are read on the device
        self._copies: list[Copy] = []
        self._function, self._arguments = self._call()

    def _call(self) -> tuple[Any, tuple[Any, ...]]:
        """The library's function, and its arguments after the handle."""
        problem = self._lowered.problem
        a, b, d = problem.a, problem.b, problem.d
        m, n = d.rows, d.cols
        k = a.rows if problem.op_a else a.cols
        batch = (problem.batch,) if problem.batch > 1 else ()
        operands = []
        for slot, matrix in zip(self._operands, (a, b, d), strict=True):
            step = (matrix.batch_stride,) if batch else ()
            operands.append((slot, cublas.cudaDataType_t(matrix.dtype), matrix.ld, *step))
        wide = max(m, n, k, a.ld, b.ld, d.ld) > MAX_INT
        name = f"cublasGemm{'StridedBatched' if batch else ''}Ex{'_64' if wide else ''}"
        operations = (TRANSPOSED if is_transposed else NOT_TRANSPOSED for is_transposed in (problem.op_a, problem.op_b))
        alpha, beta = self._scalars
        compute = cb.cublasComputeType_t(problem.compute)
        first, second, third = operands
        return getattr(cublas, name), (
            *(*operations, m, n, k, alpha, *first, *second, beta, *third),
            *(*batch, compute, ANY_ALGORITHM),
        )

    def add_c(self, dtype: Dtype) -> None:
        """Copy C to D before each call."""
        problem = self._lowered.problem
        for offsets in self._lowered.offsets:
            source, target = (
                _matrix(matrix, OperandPointer(place, offsets[place]), dtype)
                for matrix, place in ((problem.c, C), (problem.d, OUT))
            )
            self._copies.append(Copy(self._executor, source, target, problem.batch, CopyMode.ALL, conj=False))

    def check_supported(self) -> None:
        """Raise Refused where the library has no kernel for the call, which it only says when called: in a capture."""
        statuses: list[int] = []

        def call() -> int:
            statuses.append(self._enqueue_call((PLACEHOLDER_ADDRESS, PLACEHOLDER_ADDRESS, PLACEHOLDER_ADDRESS)))
            return statuses[-1]

        self._set_numbers((1, int(self._lowered.problem.adds_c)))
        kernels(self._executor, call)
        self._current_numbers = ()
        if statuses and statuses[-1]:
            raise Refused(f"{self._function.__name__} returned {self._function.error(statuses[-1])}")

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        """Copy C to D where they differ, and call cuBLAS for each outer index of the batch."""
        operands: Any = arguments[:ALPHA]  # addresses are ints
        if operands[C] != operands[OUT]:
            for copy in self._copies:
                copy.enqueue(operands)
        self._set_numbers(arguments[ALPHA:FIRST_FACTOR])
        if status := self._multiply(operands):
            self._executor.stream.done()  # raises DeviceFault if the device is lost
            raise self._function.error(status)

    def _multiply(self, operands: Any) -> int:
        """Call the library for each outer index of the batch; returns the first status that is not 0."""
        a, b = (B, A) if self._lowered.exchanged else (A, B)
        zeros = self._executor.zeros(self._zero_bytes()) if self._lowered.empty_k else 0
        for offsets in self._lowered.offsets:
            status = self._enqueue_call(
                (zeros or operands[a] + offsets[a], zeros or operands[b] + offsets[b], operands[OUT] + offsets[OUT])
            )
            if status:
                return status
        return 0

    def _set_numbers(self, numbers: tuple[Argument, ...]) -> None:
        """Set alpha and beta where the call reads them."""
        _, beta = numbers
        if self._lowered.problem.device_scalars or (self._hides_beta and beta == 1):
            # Set again in each call: the memory of the numbers may have changed.
            self._numbers_on_device, self._current_numbers = True, ()
            for slot, number in zip(self._scalars, numbers, strict=True):
                slot.value = (
                    number
                    if type(number) is int and self._lowered.problem.device_scalars
                    else self._device_address(number)
                )
        elif numbers != self._current_numbers:
            self._numbers_on_device, self._current_numbers = (
                False,
                (),
            )  # unknown until both are set: an interrupt may come in between
            for slot, scalar, number in zip(self._scalars, self._numbers, numbers, strict=True):
                scalar.set(number)
                slot.value = scalar.address.value
            self._current_numbers = numbers

    def _device_address(self, number: Argument) -> int:
        return self._executor.scalar(number if self._scale.is_complex else float(number.real), self._scale)

    def _enqueue_call(self, addresses: Sequence[int]) -> int:
        """Call the library for the operands at these addresses."""
        for slot, address in zip(self._operands, addresses, strict=True):
            slot.value = address
        handle = self._handle.follow(self._executor, on_device=self._numbers_on_device)
        if self._math == MATH:
            return int(self._function.unchecked(handle, *self._arguments))
        cublas.cublasSetMathMode(handle, self._math)
        try:
            return int(self._function.unchecked(handle, *self._arguments))
        finally:
            cublas.cublasSetMathMode(handle, MATH)

    def _zero_bytes(self) -> int:
        """The size of the zeros that replace A and B where k is 0."""
        problem = self._lowered.problem
        return max(matrix.rows * matrix.cols for matrix in (problem.a, problem.b)) * MAX_ITEMSIZE


def _matrix(matrix: LtMatrix, place: OperandPointer, dtype: Dtype) -> Matrix:
    """A matrix in the form that Copy takes."""
    place = place._replace(batch_stride=matrix.batch_stride * dtype.itemsize)
    return Matrix(place, dtype, matrix.rows, matrix.cols, 1, matrix.ld)
