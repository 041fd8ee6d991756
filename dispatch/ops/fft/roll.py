"""Elements moved along axes; those that pass the end reappear at the start: `roll`, by a kernel or by NumPy.

`dispatch.fft.fftshift` and `ifftshift` are rolls by half of each axis.
"""

from __future__ import annotations

import ctypes
from dataclasses import KW_ONLY, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from cudabind._cached import cached_property
from dispatch.checks import check_int
from dispatch.core.host_plan import NumpyPlan, Results
from dispatch.core.operands import OperandRequest, Output, dense
from dispatch.core.request_function import request_function
from dispatch.errors import BadRequest
from dispatch.keys import F4E2M1
from dispatch.libraries.nvrtc.kernel import Kernel, Launch

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["MAX_AXES", "RollRequest", "evaluate", "kernel_of", "numpy_roll", "nvrtc_roll", "roll"]

MAX_AXES = 12
MAX_SHIFT = 2**62
THREADS = 256
SMALL = 1 << 31  # element counts below it fit in 32 bits


@dataclass(frozen=True, eq=False)
class RollRequest(OperandRequest["Tensor"]):
    """out[…, (i + shift) % n, …] = x[…, i, …] along some axes, as in `numpy.roll`.

    Attributes:
        x: any shape, strides and dtype but f4e2m1.
        shift: the number of places, of either sign; one for each of the axes, or one for all of them.
        axis: the axes, each once; None rolls the elements in row-major order.
        out: of x's shape and dtype; not `x` itself.

    Follows https://numpy.org/doc/stable/reference/generated/numpy.roll.html.
    """

    op: ClassVar[str] = "roll"
    reads: ClassVar[tuple[str, ...]] = ("x",)
    x: Tensor
    shift: int | tuple[int, ...]
    axis: int | tuple[int, ...] | None = None
    _: KW_ONLY
    out: Tensor | None = None

    def check_fields(self) -> None:
        if self.x.dtype is F4E2M1:
            raise BadRequest("x", str(self.x.layout), "elements of whole bytes")
        shifts = self.shift if isinstance(self.shift, tuple) else (self.shift,)
        for shift in shifts:
            check_int("shift", shift, -MAX_SHIFT, MAX_SHIFT)
        rank, axes = self.x.ndim, self.axis if isinstance(self.axis, tuple) else (self.axis,)
        if self.axis is None:
            if isinstance(self.shift, tuple):
                raise BadRequest("shift", repr(self.shift), "one number, because axis is None")
            return
        for axis in axes:
            if rank == 0:
                raise BadRequest("axis", repr(self.axis), "none, because x has no axes")
            check_int("axis", axis, -rank, rank - 1)
        if len({axis % rank for axis in axes if axis is not None}) < len(axes):
            raise BadRequest("axis", repr(self.axis), "each axis once")
        if isinstance(self.shift, tuple) and len(shifts) != len(axes):
            raise BadRequest("shift", repr(self.shift), f"a number, or one for each of the axes {axes}")

    def outputs(self) -> dict[str, Output]:
        return {"out": dense(self.x.shape, self.x.dtype)}

    @cached_property
    def turns(self) -> tuple[int, ...]:
        """The number of places along each axis, 0 or more; a single number for elements in row-major order."""
        shape = self.x.shape
        shifts = self.shift if isinstance(self.shift, tuple) else (self.shift,)
        if self.axis is None:
            return (shifts[0] % max(self.x.size, 1),)
        axes = self.axis if isinstance(self.axis, tuple) else (self.axis,)
        turns = [0] * len(shape)
        for axis, shift in zip(axes, shifts * (len(axes) if len(shifts) == 1 else 1), strict=True):
            turns[axis] = shift % max(shape[axis], 1)
        return tuple(turns)

    def attributes(self) -> tuple[Any, ...]:
        return self.turns, self.axis is None


# -- NumPy ------------------------------------------------------------------------------------------------------------
def evaluate(request: RollRequest, work: np.dtype[Any]) -> Results:
    """The output by name; nothing is computed, so the working dtype is not used."""
    del work
    turns = request.turns
    return {"out": np.roll(np.asarray(request.x), *((turns[0],) if request.axis is None else (turns, _all(turns))))}


def _all(turns: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(range(len(turns)))


def numpy_roll(request: RollRequest, executor: object, row: Row) -> NumpyPlan:
    """A plan that moves elements with NumPy."""
    del request, executor
    return NumpyPlan(row, evaluate, row.dtypes[0].numpy)


# -- the kernel -------------------------------------------------------------------------------------------------------
SOURCE = r"""
typedef long long Int;
typedef INDEX Index;
struct alignas(BYTES) Element { WORD word[BYTES / sizeof(WORD)]; };
struct Axis { Int extent, turn, from, to; };
struct Work { Int count, turn; Axis axis[12]; int axes; };

extern "C" __global__ void roll(const Element* x, Element* out, Work w)
{
    const Index i = blockIdx.x * (Index)blockDim.x + threadIdx.x;
    if (i >= Index(w.count)) return;
    Index left = i, behind = i >= Index(w.turn) ? i - Index(w.turn) : i + Index(w.count - w.turn);
    Int from = 0, to = 0;
    for (int number = w.axes - 1; number >= 0; --number) {
        const Axis axis = w.axis[number];
        const Int at = Int(left % Index(axis.extent)), other = Int(behind % Index(axis.extent));
        left /= Index(axis.extent);
        behind /= Index(axis.extent);
        to += at * axis.to;
        from += (other >= axis.turn ? other - axis.turn : other - axis.turn + axis.extent) * axis.from;
    }
    out[to] = x[from];
}
"""
WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long", 16: "unsigned long long"}


class Axis(ctypes.Structure):
    """The kernel's struct of the same name."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("extent", "turn", "x", "out"))


class Work(ctypes.Structure):
    """The kernel's struct of the same name."""

    _fields_ = (
        ("count", ctypes.c_int64),
        ("turn", ctypes.c_int64),
        ("axis", Axis * MAX_AXES),
        ("axes", ctypes.c_int),
    )


def nvrtc_roll(request: RollRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request: one launch."""
    return kernel_of(request)(request, executor, row)


def kernel_of(request: RollRequest) -> Kernel:
    """The kernel for the size of a request's elements."""
    return _kernel(request.x.dtype.itemsize, request.x.size >= SMALL - THREADS)


@cache
def _kernel(nbytes: int, wide: bool) -> Kernel:
    macros = {"BYTES": nbytes, "WORD": WORDS[nbytes], "INDEX": "unsigned long long" if wide else "unsigned"}
    return Kernel(SOURCE, "roll", launch, ("-std=c++17", *(f"-D{name}={value}" for name, value in macros.items())))


def launch(request: RollRequest) -> Launch:
    """A thread for each element."""
    x, out, turns = request.x.layout, request.layout_of("out"), request.turns
    flat = request.axis is None
    work = Work(x.size, turns[0] if flat else 0)
    for extent, turn, *steps in zip(
        x.shape, (0,) * len(x.shape) if flat else turns, x.strides, out.strides, strict=True
    ):
        if extent > 1:
            work.axis[work.axes] = Axis(extent, turn, *steps)
            work.axes += 1
    return Launch((-(-x.size // THREADS),), (THREADS,), (work,))


# -- rules ------------------------------------------------------------------------------------------------------------
def twelve_axes(request: RollRequest) -> str:
    """At most twelve axes of more than one element."""
    count = sum(extent > 1 for extent in request.x.shape)
    return "" if count <= MAX_AXES else f"needs at most {MAX_AXES} axes of more than one element, has {count}"


roll = request_function(RollRequest, "roll")
