"""cuBLAS's batched factorizations as steps of a linear algebra plan, and the kernels between them.

cuBLAS has 32-bit pivots where cuSOLVER's 64-bit interface has 64-bit ones, and does not form Q: kernels of this library
convert the pivots and multiply the reflections; NVRTC compiles them. This module does not depend on requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cudabind.sys import cublas
from dispatch.libraries.cublas.handle import handle_of
from dispatch.libraries.cusolver.calls import Call
from dispatch.libraries.cusolver.copies import MAX_BLOCKS, kernel_of
from dispatch.libraries.nvrtc.launching import KernelStep, Strides

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer

__all__ = ["ConvertPivots", "FormQ", "batched_call", "call_each"]

THREADS = 256
WARP = 32
PIVOT_SOURCE = r"""
extern "C" __global__ void widen(const int* from, long long* to, long long count)
{
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < count) to[i] = from[i];
}

extern "C" __global__ void narrow(const long long* from, int* to, long long count)
{
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < count) to[i] = (int)from[i];
}
"""
# A warp computes a column of Q: it applies the reflections, from the last to the first, to a column of the identity.
# Reflections with an index above the column's own leave it unchanged.
FORM_Q_SOURCE = r"""
typedef long long Int;
struct __align__(sizeof(REAL) * PARTS) Element { REAL part[PARTS]; };
struct Strides { Int row, col, batch; };

__device__ Element product(Element x, Element y, bool conj)
{
    Element z;
    if (PARTS == 1) z.part[0] = x.part[0] * y.part[0];
    else {
        const REAL imag = conj ? -x.part[PARTS - 1] : x.part[PARTS - 1];
        z.part[0] = x.part[0] * y.part[0] - imag * y.part[PARTS - 1];
        z.part[PARTS - 1] = x.part[0] * y.part[PARTS - 1] + imag * y.part[0];
    }
    return z;
}

extern "C" __global__ void form_q(
    const Element* factors, const Element* taus, Element* target,
    Int rows, Int cols, Int reflections, Int batch, Strides from, Strides to)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (Int number = blockIdx.x; number < batch; number += gridDim.x) {
        const Element* h = factors + number * from.batch;
        const Element* tau = taus + number * reflections;
        for (Int j = warp; j < cols; j += warps) {
            Element* q = target + number * to.batch + j * to.col;
            for (Int i = lane; i < rows; i += 32) {
                Element one = {};
                one.part[0] = i == j;
                q[i * to.row] = one;
            }
            for (Int k = min(j, reflections - 1); k >= 0; k--) {
                const Element* v = h + k * from.col;  // its element k is 1, and those before are 0
                Element dot = {};
                for (Int i = k + lane - k % 32; i < rows; i += 32) {
                    if (i < k) continue;
                    const Element x = q[i * to.row];
                    const Element term = i == k ? x : product(v[i * from.row], x, true);
                    for (int part = 0; part < PARTS; part++) dot.part[part] += term.part[part];
                }
                for (int part = 0; part < PARTS; part++)
                    for (int step = 16; step; step /= 2)
                        dot.part[part] += __shfl_xor_sync(0xffffffff, dot.part[part], step);
                const Element factor = product(tau[k], dot, false);
                for (Int i = k + lane - k % 32; i < rows; i += 32) {
                    if (i < k) continue;
                    const Element change = i == k ? factor : product(v[i * from.row], factor, false);
                    for (int part = 0; part < PARTS; part++) q[i * to.row].part[part] -= change.part[part];
                }
            }
        }
    }
}
"""


class CallHandle:
    """The executor's cuBLAS handle for a step: on the stream that plans currently enqueue on."""

    __slots__ = ("_executor", "_handle")

    def __init__(self, executor: CudaExecutor) -> None:
        self._executor, self._handle = executor, handle_of(executor)
        self.follow()  # allocates the workspace before a capture begins

    def follow(self) -> cublas.cublasHandle_t:
        """The handle; it reads scalars from host memory."""
        return self._handle.follow(self._executor)


def batched_call(executor: CudaExecutor, name: str, arguments: Sequence[Any]) -> Call:
    """One call of cuBLAS for all matrices of a batch; pointers among its arguments become addresses."""
    return Call(executor, CallHandle(executor), name, arguments, 1, library=cublas)


def call_each(executor: CudaExecutor, name: str, arguments: Sequence[Any], count: int) -> Call:
    """A call of cuBLAS for each of `count` matrices; pointers among its arguments become addresses."""
    return Call(executor, CallHandle(executor), name, arguments, count, library=cublas)


class ConvertPivots(KernelStep):
    """Convert `count` dense pivots between 32 and 64 bits."""

    __slots__ = ()

    def __init__(
        self, executor: CudaExecutor, source: OperandPointer, target: OperandPointer, count: int, *, widen: bool
    ) -> None:
        kernel = (PIVOT_SOURCE, "widen" if widen else "narrow", ("-std=c++17",))
        super().__init__(executor, kernel, (-(-count // THREADS),), (THREADS,), (source, target, count))


class FormQ(KernelStep):
    """Q of each matrix of a batch, or its first columns, from the factors of `geqrfBatched`; `tau` is dense."""

    __slots__ = ()

    def __init__(self, executor: CudaExecutor, factors: Matrix, tau: OperandPointer, q: Matrix, batch: int) -> None:
        reflections = tau.batch_stride // q.dtype.itemsize
        extents, strides = (q.rows, q.cols, reflections, batch), (Strides.of(factors), Strides.of(q))
        arguments = (factors.pointer, tau, q.pointer, *extents, *strides)
        grid, block = (min(batch, MAX_BLOCKS),), (min(THREADS, WARP * q.cols),)
        super().__init__(executor, kernel_of("form_q", q.dtype, FORM_Q_SOURCE), grid, block, arguments)
