"""Gated activations, act(gate) · up, as in gated MLPs, and their gradients: `gated_activation`, `gated_activation_bwd`.

They run on kernels of this library, compiled by NVRTC for the GPU, or on NumPy. Applied to two products, they are the
SwiGLU, GEGLU, ReGLU and GLU of https://arxiv.org/abs/2002.05202.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import KW_ONLY, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dispatch.core.axes import Axis, merge
from dispatch.core.host_plan import Results, exactly, numpy_call, sigmoid, values
from dispatch.core.layouts import aligned
from dispatch.core.operands import OperandRequest, Output, like, same_as_first
from dispatch.core.request_function import request_function
from dispatch.keys import F64, Choice, member
from dispatch.libraries.nvrtc.kernel import Kernel, Launch
from dispatch.libraries.nvrtc.number_types import NAMES, NUMBERS, VECTORS, WIDEST

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype

__all__ = [
    "GatedActivationBwdRequest",
    "GatedActivationRequest",
    "GatedMode",
    "gated_activation",
    "gated_activation_bwd",
]


class GatedMode(Choice):
    """The activation of a gate.

    SILU x · sigmoid(x), GELU x · Φ(x) with the error function, GELU_TANH its tanh approximation, RELU max(x, 0),
    SIGMOID 1 / (1 + e^-x).
    """

    SILU = 0
    GELU = 1
    GELU_TANH = 2
    RELU = 3
    SIGMOID = 4

    @staticmethod
    def other_names() -> dict[str, str]:
        return {"SWISH": "SILU", "SWIGLU": "SILU", "GEGLU": "GELU", "REGLU": "RELU"}


@dataclass(frozen=True, eq=False)
class GatedActivationRequest(OperandRequest["Tensor"]):
    """act(gate) · up, element by element: computed in f32, f64 for f64, and rounded once.

    Attributes:
        gate: the operand of the activation; any shape and strides, such as one half of a product's columns.
        up: the factor, of gate's shape and dtype.
        mode: the activation.
        out: of gate's shape and dtype; it may be gate or up itself. None allocates a dense one with the order of gate's
            axes in memory.
    """

    op: ClassVar[str] = "gated_activation"
    reads: ClassVar[tuple[str, ...]] = ("gate", "up")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "gate"), ("out", "up")})
    gate: Tensor
    up: Tensor
    mode: GatedMode | str = GatedMode.SILU
    _: KW_ONLY
    out: Tensor | None = None

    def check_fields(self) -> None:
        """Check that all operands have one shape and one dtype."""
        same_as_first(self)


@dataclass(frozen=True, eq=False)
class GatedActivationBwdRequest(OperandRequest["tuple[Tensor, Tensor]"]):
    """dgate = dy · up · act'(gate) and dup = dy · act(gate): the gradients of `GatedActivationRequest`.

    Attributes:
        gate, up: the operands of the forward pass.
        dy: the gradient of its result. All three have one shape and dtype.
        mode: that of the forward pass.
        dgate, dup: of gate's shape and dtype; each may be one of the operands itself. None allocates dense ones with
            the order of gate's and up's axes in memory.
    """

    op: ClassVar[str] = "gated_activation_bwd"
    reads: ClassVar[tuple[str, ...]] = ("gate", "up", "dy")
    writes: ClassVar[tuple[str, ...]] = ("dgate", "dup")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset(
        (out, operand) for out in ("dgate", "dup") for operand in ("gate", "up", "dy")
    )
    gate: Tensor
    up: Tensor
    dy: Tensor
    mode: GatedMode | str = GatedMode.SILU
    _: KW_ONLY
    dgate: Tensor | None = None
    dup: Tensor | None = None

    def outputs(self) -> dict[str, Output]:
        return {"dgate": like(self.gate.layout), "dup": like(self.up.layout)}

    def check_fields(self) -> None:
        """Check that all operands have one shape and one dtype."""
        same_as_first(self)


# -- in NumPy: for the host's rows in their own precision, and as the reference in f64 --------------------------------
INNER, CUBIC = math.sqrt(2 / math.pi), 0.044715  # of GELU's tanh approximation
FAR = 30  # tanh(INNER · (x + CUBIC · x³)) is 1 there, and x³ is finite
error_function: Any = np.frompyfunc(math.erfc, 1, 1)


def evaluate(request: Any, work: np.dtype[Any]) -> Results:
    """The outputs of either request by name, computed in a working dtype."""
    gate, up, mode = values(request.gate, work), values(request.up, work), member(request.mode)
    active, slope = activated(mode, gate)
    if isinstance(request, GatedActivationRequest):
        return {"out": active * up}
    dy = values(request.dy, work)
    if mode is GatedMode.RELU:  # no product: a dropped factor may be infinite
        return {"dgate": np.where(gate > 0, dy * up, np.where(gate <= 0, 0, gate)), "dup": dy * active}
    return {"dgate": dy * up * slope, "dup": dy * active}


def activated(mode: GatedMode, x: Array) -> tuple[Array, Array]:
    """act(x) and act'(x)."""
    if mode is GatedMode.RELU:
        return np.asarray(np.maximum(x, 0)), np.asarray((x > 0).astype(x.dtype))
    if mode is GatedMode.GELU:
        share = (np.asarray(error_function(-math.sqrt(0.5) * x.astype(np.float64)), np.float64) / 2).astype(x.dtype)
        density = np.exp(-x * x / 2) / x.dtype.type(math.sqrt(2 * math.pi))
        return np.asarray(x * share), np.asarray(share + x * density)
    if mode is GatedMode.GELU_TANH:
        near = np.clip(x, -FAR, FAR)
        inner = 2 * x.dtype.type(INNER) * (near + x.dtype.type(CUBIC) * near**3)
        share, complement = sigmoid(inner), sigmoid(-inner)
        steep = 2 * x.dtype.type(INNER) * (1 + 3 * x.dtype.type(CUBIC) * near * near)
        return np.asarray(x * share), np.asarray(share + x * share * complement * steep)
    share, complement = sigmoid(x), sigmoid(-x)
    if mode is GatedMode.SIGMOID:
        return share, np.asarray(share * complement)
    return np.asarray(x * share), np.asarray(share * (1 + x * complement))


# -- the kernels ------------------------------------------------------------------------------------------------------
TYPES = r"""
typedef NUMBER Number;
typedef SUM T;
typedef INDEX Index;
struct Work { long long threads, extents[RANK], steps[5][RANK]; };
"""
KERNELS = r"""
// 1 / (1 + exp(-x)) and 1 minus that, of which neither cancels.
__device__ void share_of(T x, T& share, T& rest)
{
    T e = exp(x < 0 ? x : -x), large = 1 / (1 + e);
    share = x < 0 ? e * large : large;
    rest = x < 0 ? large : e * large;
}

__device__ void activate(T x, T& active, T& slope)
{
    T share, rest;
    if (MODE == 3) {
        active = x < 0 ? T(0) : x;  // of NaN, NaN
        slope = x > 0 ? T(1) : T(0);
    } else if (MODE == 1) {
        share = erfc(-T(0.70710678118654752440) * x) / 2;
        active = x * share;
        slope = share + x * exp(-x * x / 2) * T(0.39894228040143267794);
    } else if (MODE == 2) {
        T near = x > FAR ? T(FAR) : x < -FAR ? T(-FAR) : x;
        share_of(2 * T(INNER) * (near + T(CUBIC) * near * near * near), share, rest);
        active = x * share;
        slope = share + x * share * rest * (2 * T(INNER) * (1 + 3 * T(CUBIC) * near * near));
    } else {
        share_of(x, share, rest);
        active = MODE == 4 ? share : x * share;
        slope = MODE == 4 ? share * rest : share * (1 + x * rest);
    }
}

// Where the operands of a thread are, axis by axis from the last one.
template <int COUNT> __device__ bool find(const Work& w, long long* at)
{
    Index i = blockIdx.x * (Index)blockDim.x + threadIdx.x;
    if (i >= Index(w.threads)) return false;
    for (int n = 0; n < COUNT; ++n) at[n] = 0;
    for (int axis = RANK - 1; axis >= 0; --axis) {
        Index extent = w.extents[axis], here = axis ? i % extent : i;
        i = axis ? i / extent : 0;
        for (int n = 0; n < COUNT; ++n) at[n] += here * w.steps[n][axis];
    }
    return true;
}

extern "C" __global__ void gated_activation(const Number* gate, const Number* up, Number* out, Work w)
{
    long long at[3];
    T x[VECTOR], y[VECTOR], active, slope;
    if (!find<3>(w, at)) return;
    load(gate + at[0], x);
    load(up + at[1], y);
    for (int j = 0; j < VECTOR; ++j) {
        activate(x[j], active, slope);
        y[j] *= active;
    }
    store(out + at[2], y);
}

extern "C" __global__ void gated_activation_bwd(
    const Number* gate, const Number* up, const Number* dy, Number* dgate, Number* dup, Work w)
{
    long long at[5];
    T x[VECTOR], y[VECTOR], d[VECTOR], active, slope;
    if (!find<5>(w, at)) return;
    load(gate + at[0], x);
    load(up + at[1], y);
    load(dy + at[2], d);
    for (int j = 0; j < VECTOR; ++j) {
        activate(x[j], active, slope);
        T passed = d[j] * y[j];
        if (MODE == 3) x[j] = x[j] > 0 ? passed : x[j] <= 0 ? T(0) : x[j];  // what is dropped may be infinite
        else x[j] = passed * slope;
        y[j] = d[j] * active;
    }
    store(dgate + at[3], x);
    store(dup + at[4], y);
}
"""
SOURCE = NUMBERS + TYPES + VECTORS + KERNELS
THREADS = 256
SMALL = 1 << 30  # the most threads for 32-bit indices, including idle threads of the last block
MAX_AXES = 6


@cache
def _work(rank: int) -> Any:
    """The kernels' struct: an array of 64-bit numbers, whose length depends on the rank."""
    return type("Work", (ctypes.Structure,), {"_fields_": [("numbers", ctypes.c_int64 * (1 + 6 * rank))]})


def nvrtc_gated(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of either request: one launch."""
    return kernel_of(request)(request, executor, row)


def kernel_of(request: Any) -> Kernel:
    """The kernel for a request's dtype, mode, axes and alignment."""
    vector, axes = lines_of(request)
    wide = _count(axes) >= SMALL
    return _kernel(request.op, request.gate.dtype, member(request.mode), vector, len(axes), wide)


@cache
def _kernel(op: str, dtype: Dtype, mode: GatedMode, vector: int, rank: int, wide: bool) -> Kernel:
    chosen = {
        "NUMBER": NAMES[dtype],
        "SUM": "double" if dtype is F64 else "float",
        "INDEX": "unsigned long long" if wide else "unsigned",
        "VECTOR": vector,
        "RANK": rank,
        "MODE": int(mode),
        "INNER": repr(INNER),
        "CUBIC": repr(CUBIC),
        "FAR": FAR,
    }
    options = ("-std=c++17", *(f"-D{name}={value}" for name, value in chosen.items()))
    return Kernel(SOURCE, op, launch, options)


def launch(request: Any) -> Launch:
    """One thread for each vector."""
    _vector, axes = lines_of(request)
    count, operands = _count(axes), len(request.reads) + len(request.writes)
    strides = [[axis.strides[number] if number < operands else 0 for axis in axes] for number in range(5)]
    numbers = (count, *(axis.extent for axis in axes), *(step for line in strides for step in line))
    work = _work(len(axes))((ctypes.c_int64 * len(numbers))(*numbers))
    return Launch((-(-count // THREADS),), (THREADS,), (work,))


def _count(axes: list[Axis]) -> int:
    return math.prod(axis.extent for axis in axes)


def lines_of(request: Any) -> tuple[int, list[Axis]]:
    """The elements per load (16 bytes if all layouts allow it, else one), and the axes, the last one in vectors."""
    layouts = [request.layout_of(name) for name in (*request.reads, *request.writes)]
    ones = (1,) * len(layouts)
    if not request.gate.size:
        return 1, [Axis(0, ones, 0)]
    axes = merge(layouts, [0] * len(layouts[0].shape)) or [Axis(1, ones, 0)]
    count, (*outer, inner) = WIDEST // request.gate.dtype.itemsize, axes
    outer_strides = [step for axis in outer for step in axis.strides]
    starts = all(layout.alignment >= WIDEST for layout in layouts)
    if not (starts and inner.strides == ones and all(step % count == 0 for step in (inner.extent, *outer_strides))):
        return 1, axes
    return count, [*outer, Axis(inner.extent // count, (count,) * len(layouts), 0)]


# -- rules of the rows ------------------------------------------------------------------------------------------------
def six_axes(request: Any) -> str:
    """At most six axes remain after merging, and every operand starts at a multiple of its element size."""
    if reason := aligned(request):
        return reason
    layouts = [request.layout_of(name) for name in (*request.reads, *request.writes)]
    count = len(merge(layouts, [0] * request.gate.ndim))
    return f"needs at most {MAX_AXES} axes that do not merge, has {count}" if count > MAX_AXES else ""


# -- the public functions ---------------------------------------------------------------------------------------------
reference = exactly(evaluate)
numpy_gated = numpy_call(evaluate)
gated_activation = request_function(GatedActivationRequest, "gated_activation")
gated_activation_bwd = request_function(GatedActivationBwdRequest, "gated_activation_bwd")
