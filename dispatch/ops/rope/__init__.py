"""Rotary position embedding of queries and keys in one kernel: `rope`.

It runs on a kernel of this library, compiled by NVRTC for the GPU, or on NumPy. The rotation is that of
https://arxiv.org/abs/2104.09864. A pair consists of elements of both halves of a head as in Llama, or of neighbours as
in GPT-J.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from dispatch.core.host_plan import Results, exactly, numpy_call, values
from dispatch.core.operands import OperandRequest, Output, like, same_as
from dispatch.core.request_function import request_function
from dispatch.errors import BadRequest
from dispatch.keys import F32, F64
from dispatch.libraries.nvrtc.kernel import Kernel, Launch
from dispatch.libraries.nvrtc.number_types import NAMES, NUMBERS, VECTORS, fits_vectors

if TYPE_CHECKING:
    import numpy as np

    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.layout import Array, Layout
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype

__all__ = ["RopeRequest", "rope"]

AXES = 4  # batch, heads, tokens, width
ONE_STEP, EVEN = 3, 2


@dataclass(frozen=True, eq=False)
class RopeRequest(OperandRequest["tuple[Tensor, Tensor]"]):
    """The rotary embedding of q and k: x · cos + (-x₂, x₁) · sin, where x₁ and x₂ are the halves of a head.

    It is computed in f32, f64 for f64, and rounded once. Returns q_out and k_out.

    Attributes:
        q: (batch, heads, tokens, width), of any strides: a transposed view of (batch, tokens, heads, width) as well as
            a slice of a fused projection. Extents may be 0.
        k: as q, with its own number of heads.
        cos, sin: (batch or 1, tokens, turned), in q's dtype or f32. `turned` is even and at most width: the elements of
            a head after it are not changed.
        interleaved: x₁ and x₂ are the even and the odd elements, not the halves.
        adjoint: multiply by the transpose of the rotation instead, which computes the gradients of q and k from those
            of the outputs.
        q_out, k_out: of the shapes and the dtype of q and k; they may be q and k themselves. None allocates dense ones
            with the order of their axes in memory.
    """

    op: ClassVar[str] = "rope"
    reads: ClassVar[tuple[str, ...]] = ("q", "k", "cos", "sin")
    writes: ClassVar[tuple[str, ...]] = ("q_out", "k_out")
    mixed: ClassVar[tuple[str, ...]] = ("cos", "sin")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("q_out", "q"), ("k_out", "k")})
    q: Tensor
    k: Tensor
    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    adjoint: bool = False
    q_out: Tensor | None = None
    k_out: Tensor | None = None

    def outputs(self) -> dict[str, Output]:
        return {"q_out": like(self.q.layout), "k_out": like(self.k.layout)}

    def check_fields(self) -> None:
        """Check that shapes and dtypes fit each other."""
        q, k, cos = self.q, self.k, self.cos
        if q.ndim != AXES:
            raise BadRequest("q", str(q.layout), "four axes: batch, heads, tokens, width")
        batch, _, tokens, width = q.shape
        if k.ndim != AXES or (k.shape[0], *k.shape[2:]) != (batch, tokens, width) or k.dtype != q.dtype:
            raise BadRequest("k", str(k.layout), f"{q.dtype}[{batch}, heads, {tokens}, {width}], like q")
        if cos.ndim != ONE_STEP or cos.shape[0] not in (1, batch) or cos.shape[1] != tokens:
            rows = f"{batch} or 1" if batch != 1 else "1"
            raise BadRequest("cos", str(cos.layout), f"[{rows}, {tokens}, {width} or fewer], for the tokens of q")
        turned = cos.shape[ONE_STEP - 1]
        if turned % EVEN or turned > width:
            raise BadRequest("cos", str(cos.layout), f"an even number of elements of each head, at most {width}")
        if cos.dtype not in (q.dtype, F32):
            raise BadRequest("cos", str(cos.layout), f"{q.dtype}, the dtype of q, or f32" if q.dtype != F32 else "f32")
        same_as("sin", self.sin, "cos", cos)


# -- in NumPy: for the host's rows in their own precision, and as the reference in f64 --------------------------------
def evaluate(request: RopeRequest, work: np.dtype[Any]) -> Results:
    """The outputs by name, computed in a working dtype."""
    cos, sin = (values(tensor, work)[:, None] for tensor in (request.cos, request.sin))
    one, other = pairs(cos.shape[-1], request.interleaved)

    def turned(x: Array) -> Array:
        y: Array = x.copy()
        low, high = x[..., one], x[..., other]
        if request.adjoint:
            y[..., one] = low * cos[..., one] + high * sin[..., other]
            y[..., other] = high * cos[..., other] - low * sin[..., one]
        else:
            y[..., one] = low * cos[..., one] - high * sin[..., one]
            y[..., other] = high * cos[..., other] + low * sin[..., other]
        return y

    return {"q_out": turned(values(request.q, work)), "k_out": turned(values(request.k, work))}


def pairs(turned: int, interleaved: bool) -> tuple[slice, slice]:
    """The slices of the first and of the second elements of all pairs."""
    if interleaved:
        return slice(0, turned, 2), slice(1, turned, 2)
    return slice(0, turned // 2), slice(turned // 2, turned)


# -- the kernel -------------------------------------------------------------------------------------------------------
# A thread has VECTOR pairs of one head, or VECTOR of the elements that are not rotated. Consecutive threads have the
# pairs of a head, then those of the next head of the same token, which read the same cos and sin.
KERNEL = r"""
extern "C" __global__ void rope(
    const Number* q, const Number* k, const Factor* cos, const Factor* sin, Number* q_out, Number* k_out, Work w)
{
    Index i = blockIdx.x * (Index)blockDim.x + threadIdx.x;
    const Index half = w.turned / 2, turning = half / VECTOR, units = turning + (w.width - w.turned) / VECTOR;
    const Index unit = i % units;
    i /= units;
    Index head = i % Index(w.q_heads + w.k_heads);
    i /= Index(w.q_heads + w.k_heads);
    const Index token = i % Index(w.tokens), batch = i / Index(w.tokens);
    if (batch >= Index(w.batch)) return;
    const bool of_q = head < Index(w.q_heads);
    if (!of_q) head -= w.q_heads;
    const Steps from = of_q ? w.q : w.k, to = of_q ? w.q_out : w.k_out;
    const Number* x = (of_q ? q : k) + batch * from.batch + head * from.head + token * from.token;
    Number* y = (of_q ? q_out : k_out) + batch * to.batch + head * to.head + token * to.token;
    if (unit >= turning) {
        const Index at = w.turned + (unit - turning) * VECTOR;
        if (x != y) *(Vector<Number>*)(y + at * to.width) = *(const Vector<Number>*)(x + at * from.width);
        return;
    }
    const Index first = unit * VECTOR * (INTERLEAVED ? 2 : 1), second = first + (INTERLEAVED ? VECTOR : half);
    cos += batch * w.cos.batch + token * w.cos.token;
    sin += batch * w.sin.batch + token * w.sin.token;
    T a[2 * VECTOR], c[2 * VECTOR], s[2 * VECTOR];
    load(x + first * from.width, a);
    load(x + second * from.width, a + VECTOR);
    load(cos + first * w.cos.width, c);
    load(cos + second * w.cos.width, c + VECTOR);
    load(sin + first * w.sin.width, s);
    load(sin + second * w.sin.width, s + VECTOR);
    for (int j = 0; j < VECTOR; ++j) {
        const int one = INTERLEAVED ? 2 * j : j, other = INTERLEAVED ? 2 * j + 1 : j + VECTOR;
        const T low = a[one], high = a[other];
        a[one] = ADJOINT ? low * c[one] + high * s[other] : low * c[one] - high * s[one];
        a[other] = ADJOINT ? high * c[other] - low * s[one] : high * c[other] + low * s[other];
    }
    store(y + first * to.width, a);
    store(y + second * to.width, a + VECTOR);
}
"""
TYPES = r"""
typedef NUMBER Number;
typedef FACTOR Factor;
typedef SUM T;
typedef INDEX Index;
struct Steps { long long batch, head, token, width; };
struct Work {
    long long batch, q_heads, k_heads, tokens, width, turned;
    Steps q, k, cos, sin, q_out, k_out;
};
"""
SOURCE = NUMBERS + TYPES + VECTORS + KERNEL
THREADS = 256
SMALL = 1 << 30  # the most threads for 32-bit indices, including idle threads of the last block
OPERANDS = ("q", "k", "cos", "sin", "q_out", "k_out")


class Work(ctypes.Structure):
    """The kernel's struct of the same name; the strides of its operands in order, four for each."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "q_heads", "k_heads", "tokens", "width", "turned")),
        ("steps", ctypes.c_int64 * (AXES * len(OPERANDS))),
    )


def nvrtc_rope(request: RopeRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request: one launch for q and k."""
    return kernel_of(request)(request, executor, row)


def kernel_of(request: RopeRequest) -> Kernel:
    """The kernel for a request's dtypes, choices and alignment."""
    wide = threads_of(request) >= SMALL
    choices = (vector_of(request), request.interleaved, request.adjoint, wide)
    return _kernel(request.q.dtype, request.cos.dtype, *choices)


@cache
def _kernel(dtype: Dtype, factor: Dtype, vector: int, interleaved: bool, adjoint: bool, wide: bool) -> Kernel:
    chosen = {
        "NUMBER": NAMES[dtype],
        "FACTOR": NAMES[factor],
        "SUM": "double" if dtype is F64 else "float",
        "INDEX": "unsigned long long" if wide else "unsigned",
        "VECTOR": vector,
        "INTERLEAVED": int(interleaved),
        "ADJOINT": int(adjoint),
    }
    options = ("-std=c++17", *(f"-D{name}={value}" for name, value in chosen.items()))
    return Kernel(SOURCE, "rope", launch, options)


def launch(request: RopeRequest) -> Launch:
    """One thread for each vector of pairs, and of elements that are not rotated."""
    batch, heads, tokens, width = request.q.shape
    numbers = (batch, heads, request.k.shape[1], tokens, width, request.cos.shape[-1])
    strides = [step for name in OPERANDS for step in _steps(request.layout_of(name))]
    return Launch((-(-threads_of(request) // THREADS),), (THREADS,), (Work(*numbers, tuple(strides)),))


def _steps(layout: Layout) -> tuple[int, ...]:
    """Strides of batch, head, token and element; 0 for a batch axis that all batches share."""
    if len(layout.shape) == AXES:
        return tuple(layout.strides)
    batch, token, width = layout.strides
    return (0 if layout.shape[0] == 1 else batch), 0, token, width


def threads_of(request: RopeRequest) -> int:
    """The number of threads with work."""
    batch, heads, tokens, width = request.q.shape
    turned = request.cos.shape[-1]
    units = (turned // 2 + width - turned) // vector_of(request)
    return batch * tokens * (heads + request.k.shape[1]) * units


def vector_of(request: RopeRequest) -> int:
    """The number of elements per load: 16 bytes of q if all layouts allow it, else one."""
    count = 16 // request.q.dtype.itemsize
    turned, width = request.cos.shape[-1], request.q.shape[-1]
    even = turned // 2 % count == 0 and (width - turned) % count == 0
    return count if even and all(fits_vectors(request.layout_of(n), count) for n in OPERANDS) else 1


# -- the public function ----------------------------------------------------------------------------------------------
reference = exactly(evaluate)
numpy_rope = numpy_call(evaluate)
rope = request_function(RopeRequest, "rope")
