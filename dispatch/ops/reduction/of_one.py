"""Reductions over axes of one element each, such as a batch of one: copies of the elements, or their magnitudes.

cuDNN refuses a result of its operand's own shape, so a kernel of this library runs them, compiled by NVRTC.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import TYPE_CHECKING, Any

from dispatch.core.layouts import aligned
from dispatch.keys import F64, I8, member
from dispatch.libraries.nvrtc.kernel import Kernel, Launch
from dispatch.libraries.nvrtc.number_types import NAMES, NUMBERS
from dispatch.ops.reduction import axes_of, is_of_one
from dispatch.ops.reduction.request import ReduceOp

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype
    from dispatch.ops.reduction.results import ReduceRequest

__all__ = ["nvrtc_of_one", "of_one"]

MAX_AXES = 8
THREADS = 256
MAGNITUDES = (ReduceOp.AMAX, ReduceOp.NORM1, ReduceOp.NORM2)
KERNEL = r"""
__device__ float read(signed char x) { return x; }
typedef NUMBER Number;
typedef RESULT Result;
typedef SUM T;
struct Work { long long size, extents[MAX_AXES], from[MAX_AXES], to[MAX_AXES]; };

extern "C" __global__ void reduce_of_one(const Number* x, Result* out, unsigned* index, Work w)
{
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x, from = 0, to = 0;
    if (i >= w.size) return;
    if (index) index[i] = 0;
    for (int axis = MAX_AXES - 1; axis >= 0; --axis) {
        const long long here = i % w.extents[axis];
        i /= w.extents[axis];
        from += here * w.from[axis];
        to += here * w.to[axis];
    }
    T value = read(x[from]);
    if (MAGNITUDE) value = value < 0 ? -value : value == 0 ? T(0) : value;  // of -0 the magnitude is 0
    if (ZERO_IS_ONE && value == 0) value = 1;
    write(out[to], value);
}
"""


class Work(ctypes.Structure):
    """The kernel's struct of the same name."""

    _fields_ = (
        ("size", ctypes.c_int64),
        *((name, ctypes.c_int64 * MAX_AXES) for name in ("extents", "steps_from", "steps_to")),
    )


def of_one(request: ReduceRequest) -> str:
    """All reduced axes have one element; indices are supported only in dense tensors."""
    if not is_of_one(request):
        return f"needs one element along each reduced axis, has x {request.x.layout}, axes {request.reduced}"
    if reason := aligned(request):
        return reason
    if len(axes_of(request)) > MAX_AXES:
        return f"needs at most {MAX_AXES} axes that do not merge, has {len(axes_of(request))}"
    if request.indices and not request.layout_of("index").is_contiguous:
        return "needs index dense in row-major order, has other strides"
    return ""


def nvrtc_of_one(request: ReduceRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request: one launch."""
    return kernel_of(request)(request, executor, row)


def kernel_of(request: ReduceRequest) -> Kernel:
    """The kernel for a request's dtypes and reduction."""
    return _kernel(request.x.dtype, request.layout_of("out").dtype, member(request.reduce))


@cache
def _kernel(dtype: Dtype, result: Dtype, reduce: ReduceOp) -> Kernel:
    chosen = {
        "NUMBER": "signed char" if dtype is I8 else NAMES[dtype],
        "RESULT": NAMES[result],
        "SUM": "double" if dtype is F64 else "float",
        "MAX_AXES": MAX_AXES,
        "MAGNITUDE": int(reduce in MAGNITUDES),
        "ZERO_IS_ONE": int(reduce is ReduceOp.MUL_NO_ZEROS),
    }
    options = ("-std=c++17", *(f"-D{name}={value}" for name, value in chosen.items()))
    return Kernel(NUMBERS + KERNEL, "reduce_of_one", launch, options)


def launch(request: Any) -> Launch:
    """One thread for each element."""
    axes = axes_of(request)
    size = math.prod(axis.extent for axis in axes) if request.x.size else 0
    before = MAX_AXES - len(axes)
    lines = [[1] * before + [axis.extent for axis in axes]]
    lines += [[0] * before + [axis.strides[place] for axis in axes] for place in range(2)]
    work = Work(size, *((ctypes.c_int64 * MAX_AXES)(*line) for line in lines))
    return Launch((-(-size // THREADS),), (THREADS,), (work,))
