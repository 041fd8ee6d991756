"""The plan of a matmul request with one `cublasGemmBatchedEx`, for a batch that no single stride describes.

Batches that are broadcast over several axes, or whose axes do not merge to one, would otherwise take one call of
`cublasGemmStridedBatchedEx` for each outer index. The arrays of pointers are computed on the device from the operands'
addresses, so that the plan works at any addresses. Follows https://docs.nvidia.com/cuda/cublas/#cublasgemmbatchedex.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any

from cudabind.sys import cublas
from cudabind.sys import cublas_types as cb
from dispatch.keys import Compute
from dispatch.libraries.cublas.pointers import PointerArray
from dispatch.ops.matmul.arguments import OUT, A, B
from dispatch.ops.matmul.cublas import ANY_ALGORITHM, MAX_INT, NOT_TRANSPOSED, TRANSPOSED, GemmPlan

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype
    from dispatch.ops.matmul.lower import Lowered

__all__ = ["PointerGemmPlan", "is_suitable"]

MIN_CALLS = 5  # fewer strided calls are faster: three kernels fill the arrays of pointers
MAX_PRODUCTS = 1 << 16  # in a batch: a plan keeps an offset for each
WIDE = 4  # bytes; the library reads elements of this size and larger one by one
ALIGNED = 16  # bytes; the alignment of pointers that NVIDIA requires where tensor cores are used
PLAIN = (Compute.COMPUTE_32F, Compute.COMPUTE_64F)
FAST = (Compute.COMPUTE_32F_FAST_TF32, Compute.COMPUTE_32F_FAST_16BF, Compute.COMPUTE_32F_FAST_16F)


def is_suitable(lowered: Lowered, compute: Compute, sizes: tuple[int, int, int]) -> bool:
    """Whether to use one call with pointers: enough calls to save, few enough products, and aligned matrices.

    `sizes` are the bytes of an element of A, B and D.
    """
    problem, calls = lowered.problem, len(lowered.offsets)
    if lowered.empty_k or calls < MIN_CALLS or calls * problem.batch > MAX_PRODUCTS:
        return False
    if compute in PLAIN and min(sizes) >= WIDE:
        return True
    matrices = (problem.a, problem.b, problem.d)
    steps = (gcd(one.alignment, one.batch_stride * size) for one, size in zip(matrices, sizes, strict=True))
    return compute in (*PLAIN, *FAST) and all(step % ALIGNED == 0 for step in steps)


class PointerGemmPlan(GemmPlan):
    """One call with arrays of pointers for all products of a batch."""

    __slots__ = ("_pointer_arrays", "_sizes")

    def __init__(
        self, executor: CudaExecutor, row: Row, lowered: Lowered, scale: Dtype, sizes: tuple[int, int, int]
    ) -> None:
        self._sizes = sizes
        super().__init__(executor, row, lowered, scale)

    def _call(self) -> tuple[Any, tuple[Any, ...]]:
        problem = self._lowered.problem
        matrices = (problem.a, problem.b, problem.d)
        places = (B, A, OUT) if self._lowered.exchanged else (A, B, OUT)
        self._pointer_arrays = [
            PointerArray(self._executor, place, self._offsets(place, matrix.batch_stride * size))
            for place, matrix, size in zip(places, matrices, self._sizes, strict=True)
        ]
        operands = [
            (one.address, cublas.cudaDataType_t(matrix.dtype), matrix.ld)
            for one, matrix in zip(self._pointer_arrays, matrices, strict=True)
        ]
        m, n = problem.d.rows, problem.d.cols
        k = problem.a.rows if problem.op_a else problem.a.cols
        wide = max(m, n, k, *(matrix.ld for matrix in matrices)) > MAX_INT
        operations = (TRANSPOSED if is_transposed else NOT_TRANSPOSED for is_transposed in (problem.op_a, problem.op_b))
        alpha, beta = self._scalars
        first, second, third = operands
        count = len(self._lowered.offsets) * problem.batch
        return getattr(cublas, f"cublasGemmBatchedEx{'_64' if wide else ''}"), (
            *(*operations, m, n, k, alpha, *first, *second, beta, *third),
            *(count, cb.cublasComputeType_t(problem.compute), ANY_ALGORITHM),
        )

    def _offsets(self, place: int, step: int) -> list[int]:
        """The byte offset of each product's matrix from an operand's address."""
        inner = range(self._lowered.problem.batch)
        return [offsets[place] + number * step for offsets in self._lowered.offsets for number in inner]

    def _multiply(self, operands: Any) -> int:
        for one in self._pointer_arrays:
            one.enqueue(operands)
        return self._enqueue_call((operands[A], operands[B], operands[OUT]))  # this call reads the arrays instead
