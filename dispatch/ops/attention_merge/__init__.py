"""Merges the attention over two sets of keys to the attention over both: `attention_merge`.

The operands are two results of `sdpa_fwd` for different keys, with their statistics. Each row is weighted by its share
of the sum of exponentials. Ring attention merges its blocks in this way, https://arxiv.org/abs/2310.01889. It runs on a
kernel of this library, or on NumPy.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import KW_ONLY, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dispatch.core.host_plan import Results, exactly, numpy_call, values
from dispatch.core.operand_checks import check_tensor
from dispatch.core.operands import OperandRequest, Output, dense, like
from dispatch.core.request_function import request_function
from dispatch.errors import BadRequest
from dispatch.keys import F32, Dtype
from dispatch.libraries.nvrtc.kernel import Kernel, Launch
from dispatch.libraries.nvrtc.number_types import NAMES, NUMBERS, VECTORS, fits_vectors

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["AttentionMergeRequest", "attention_merge"]

AXES = 4  # batch, heads, rows, width


@dataclass(frozen=True, eq=False)
class AttentionMergeRequest(OperandRequest["tuple[Tensor, Tensor]"]):
    """O = exp(a_stats - s) · a + exp(b_stats - s) · b, row by row, where s = log(exp(a_stats) + exp(b_stats)).

    It is computed in f32 and rounded once. Returns O and s. A side whose statistic is -inf has no keys: its weight is
    0, and it is not read; if neither side has keys, O is 0.

    Attributes:
        a, b: (batch, heads, rows, width), the results of `sdpa_fwd` for different keys; with any strides. One may be
            f32, a merged result, and the other f16 or bf16.
        a_stats, b_stats: f32 (batch, heads, rows, 1), dense, the statistics of `sdpa_fwd(…, stats=True)`.
        out_dtype: the dtype of O if `out` is left out; None for f32, for further merges.
        out: O, of a's shape; it may be a itself. None allocates a dense one with the order of a's axes in memory.
        stats_out: s, f32 (batch, heads, rows, 1).
    """

    op: ClassVar[str] = "attention_merge"
    reads: ClassVar[tuple[str, ...]] = ("a", "a_stats", "b", "b_stats")
    writes: ClassVar[tuple[str, ...]] = ("out", "stats_out")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "a")})
    a: Tensor
    a_stats: Tensor
    b: Tensor
    b_stats: Tensor
    _: KW_ONLY
    out_dtype: Any = None
    out: Tensor | None = None
    stats_out: Tensor | None = None

    @property
    def dtypes(self) -> tuple[Dtype | None, ...]:
        return self.a.dtype, self.b.dtype, self._outputs["out"].dtype

    def outputs(self) -> dict[str, Output]:
        shape, strides, _ = like(self.a.layout)
        open_one = F32 if self.out is None else self.out.dtype
        dtype = open_one if self.out_dtype is None else Dtype.of(self.out_dtype)
        return {"out": Output(shape, strides, dtype), "stats_out": dense((*self.a.shape[:-1], 1), F32)}

    def check_fields(self) -> None:
        """Check that a and b have one shape, and the statistics fit it."""
        if self.a.ndim != AXES:
            raise BadRequest("a", str(self.a.layout), "four axes: batch, heads, rows, width")
        if self.b.shape != self.a.shape:
            raise BadRequest("b", str(self.b.layout), f"{list(self.a.shape)}, the shape of a")
        hint = "pass the statistics that sdpa_fwd(…, stats=True) returned"
        for name in ("a_stats", "b_stats", "stats_out"):
            tensor: Tensor | None = getattr(self, name)
            if tensor is not None:
                check_tensor(name, tensor, F32, (*self.a.shape[:-1], 1), hint=hint, dense=True)


# -- in NumPy: for the host's rows in their own precision, and as the reference in f64 --------------------------------
def weights(request: AttentionMergeRequest, work: np.dtype[Any]) -> tuple[Array, Array, Array]:
    """The weights of the rows of a and of b, and the merged statistic, in a working dtype."""
    a, b = values(request.a_stats, work), values(request.b_stats, work)
    top = np.maximum(a, b)
    base = np.where(top == -np.inf, 0, top)  # -inf - -inf is NaN
    with np.errstate(divide="ignore"):
        one, other = np.exp(a - base), np.exp(b - base)
        total = one + other
        return one / np.where(total == 0, 1, total), other / np.where(total == 0, 1, total), base + np.log(total)


def evaluate(request: AttentionMergeRequest, work: np.dtype[Any]) -> Results:
    """The outputs by name, computed in a working dtype."""
    one, other, stats = weights(request, work)
    a, b = values(request.a, work), values(request.b, work)
    parts = [weight * np.where(weight == 0, 0, x) for weight, x in ((one, a), (other, b))]
    return {"out": parts[0] + parts[1], "stats_out": stats}


# -- the kernel -------------------------------------------------------------------------------------------------------
KERNEL = r"""
extern "C" __global__ void attention_merge(
    const A* a, const float* a_stats, const B* b, const float* b_stats, Out* out, float* stats_out, Work w)
{
    Index i = blockIdx.x * (Index)blockDim.x + threadIdx.x;
    const Index units = w.width / VECTOR, unit = i % units, row = i / units;
    const Index line = row % Index(w.rows), head = row / Index(w.rows) % Index(w.heads);
    const Index batch = row / Index(w.rows) / Index(w.heads);
    if (batch >= Index(w.batch)) return;
    const float p = a_stats[row], q = b_stats[row];
    const float top = p > q || p != p ? p : q, base = top < LOWEST ? 0.0f : top;
    const float one = exp(p - base), other = exp(q - base), both = one + other;
    const float share = both == 0.0f ? 1.0f : 1.0f / both;
    T x[VECTOR], y[VECTOR];
    load(a + batch * w.a.batch + head * w.a.head + line * w.a.row + unit * VECTOR * w.a.width, x);
    load(b + batch * w.b.batch + head * w.b.head + line * w.b.row + unit * VECTOR * w.b.width, y);
    for (int j = 0; j < VECTOR; ++j)
        x[j] = (one == 0.0f ? 0.0f : one * share * x[j]) + (other == 0.0f ? 0.0f : other * share * y[j]);
    store(out + batch * w.out.batch + head * w.out.head + line * w.out.row + unit * VECTOR * w.out.width, x);
    if (unit == 0) stats_out[row] = base + log(both);
}
"""
TYPES = r"""
typedef A_NUMBER A;
typedef B_NUMBER B;
typedef OUT_NUMBER Out;
typedef float T;
typedef INDEX Index;
#define LOWEST -3.402823466e38f
struct Steps { long long batch, head, row, width; };
struct Work { long long batch, heads, rows, width; Steps a, b, out; };
"""
SOURCE = NUMBERS + TYPES + VECTORS + KERNEL
THREADS = 256
SMALL = 1 << 30  # the most threads for 32-bit indices, including idle threads of the last block
VECTOR = 4
WIDE = ("a", "b", "out")


class Work(ctypes.Structure):
    """The kernel's struct of the same name."""

    _fields_ = (("extents", ctypes.c_int64 * AXES), ("steps", ctypes.c_int64 * (AXES * len(WIDE))))


def nvrtc_attention_merge(request: AttentionMergeRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request: one launch."""
    return kernel_of(request)(request, executor, row)


def kernel_of(request: AttentionMergeRequest) -> Kernel:
    """The kernel for a request's dtypes and alignment."""
    dtypes: Any = request.dtypes
    return _kernel(dtypes, vector_of(request), threads_of(request) >= SMALL)


@cache
def _kernel(dtypes: tuple[Dtype, Dtype, Dtype], vector: int, wide: bool) -> Kernel:
    a, b, out = (NAMES[dtype] for dtype in dtypes)
    index = "unsigned long long" if wide else "unsigned"
    chosen = {"A_NUMBER": a, "B_NUMBER": b, "OUT_NUMBER": out, "INDEX": index, "VECTOR": vector}
    options = ("-std=c++17", *(f"-D{name}={value}" for name, value in chosen.items()))
    return Kernel(SOURCE, "attention_merge", launch, options)


def launch(request: AttentionMergeRequest) -> Launch:
    """One thread for each vector of a row."""
    strides = [step for name in WIDE for step in request.layout_of(name).strides]
    work = Work((ctypes.c_int64 * AXES)(*request.a.shape), (ctypes.c_int64 * len(strides))(*strides))
    return Launch((-(-threads_of(request) // THREADS),), (THREADS,), (work,))


def threads_of(request: AttentionMergeRequest) -> int:
    """The number of threads with work."""
    return math.prod(request.a.shape) // vector_of(request)


def vector_of(request: AttentionMergeRequest) -> int:
    """The number of elements per load."""
    even = request.a.shape[-1] % VECTOR == 0
    return VECTOR if even and all(fits_vectors(request.layout_of(name), VECTOR) for name in WIDE) else 1


# -- the public function ----------------------------------------------------------------------------------------------
reference = exactly(evaluate)
numpy_attention_merge = numpy_call(evaluate)
attention_merge = request_function(AttentionMergeRequest, "attention_merge")
