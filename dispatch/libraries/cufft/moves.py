"""What is done to operands around a transform, in one pass: other strides, dtypes, extents, factors, the conjugate.

A kernel of this library, compiled by NVRTC for the GPU at hand, reads a view and writes another of the same axes. What
the source has fewer of along an axis is 0. Of a half spectrum it makes that of real numbers: cuFFT is to be given no
other one, and NumPy's transforms take any. This file knows no request.
"""

from __future__ import annotations

import ctypes
import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind import driver
from dispatch.errors import Refused
from dispatch.keys import BF16, BOOL, C64, C128, F16, F32, F64, I8, I32, I64, U8, U32, U64
from dispatch.libraries.cufft.layouts import C32, CB32
from dispatch.libraries.nvrtc.kernel import loaded
from dispatch.libraries.nvrtc.number_types import NUMBERS
from dispatch.refusal import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype
    from dispatch.libraries.cufft.layouts import View

__all__ = ["MOST_AXES", "SOURCE", "Hermitian", "Move", "options", "work_of"]

MOST_AXES = 12
THREADS = 256
SMALL = 1 << 31  # elements that 32 bits count
WHOLE = {I8: "signed char", U8: "unsigned char", BOOL: "unsigned char", I32: "int", U32: "unsigned"}
WIDE = {I64: "long long", U64: "unsigned long long"}
NAMES = {F64: "double", F32: "float", F16: "Half", BF16: "Brain", C64: "float", C128: "double", C32: "Half",
         CB32: "Brain", **WHOLE, **WIDE}  # fmt: skip
PLAIN, MIRRORED, HALVED = 0, 1, 2  # roles of an axis

# Where a spectrum is that of its own mirror image, at 0 and at half of the axis that is halved, only the part of it
# that is Hermitian makes real numbers; without other axes that is the real part.
SOURCE = (
    NUMBERS
    + r"""
typedef long long Int;
typedef NUMBER Number;
typedef INDEX Index;
struct alignas(sizeof(NUMBER) * PARTS) Given { Number part[PARTS]; };
struct alignas(sizeof(STORED) * RESULTS) Made { STORED part[RESULTS]; };
#if FACTOR_PARTS
struct alignas(sizeof(FACTOR) * FACTOR_PARTS) Factor { FACTOR part[FACTOR_PARTS]; };
#else
struct Factor;
#endif
struct Axis { Int extent, limit, from, to, by, role; };
struct Work { Int count, size; double factor; int axes, conj, hermitian, alone; Axis axis[12]; };

__device__ REAL real(Number x) { return REAL(READ(x)); }

// One element, with its factor where there are some.
__device__ void take(const Given* source, const Factor* factors, Int from, Int by, REAL& re, REAL& im)
{
    const Given x = source[from];
    re = real(x.part[0]);
    im = PARTS == 2 ? real(x.part[PARTS - 1]) : REAL(0);
#if FACTOR_PARTS
    const Factor f = factors[by];
    const REAL u = REAL(f.part[0]), v = FACTOR_PARTS == 2 ? REAL(f.part[FACTOR_PARTS - 1]) : REAL(0), before = re;
    re = re * u - (FACTOR_PARTS == 2 ? im * v : REAL(0));
    im = im * u + (FACTOR_PARTS == 2 ? before * v : REAL(0));
#endif
}

extern "C" __global__ void move(const Given* source, Made* target, const Factor* factors, Work w)
{
    const Index i = blockIdx.x * (Index)blockDim.x + threadIdx.x;
    if (i >= Index(w.count)) return;
    Index left = i;
    Int from = 0, to = 0, other = 0, by = 0, other_by = 0;
    bool inside = true, also_inside = true, mirrored = false;
    for (int number = w.axes - 1; number >= 0; number--) {
        const Axis axis = w.axis[number];
        const Int at = number ? Int(left % Index(axis.extent)) : Int(left);
        if (number) left /= Index(axis.extent);
        const Int opposite = axis.role == 1 && at ? axis.extent - at : at;
        from += at * axis.from;
        to += at * axis.to;
        other += opposite * axis.from;
        by += at * axis.by;
        other_by += opposite * axis.by;
        inside = inside && at < axis.limit;
        also_inside = also_inside && opposite < axis.limit;
        if (axis.role == 2) mirrored = at == 0 || 2 * at == w.size;
    }
    REAL re = 0, im = 0;
    if (inside) take(source, factors, from, by, re, im);
    if (w.hermitian && mirrored) {
        if (w.alone) im = 0;
        else {
            REAL beside = 0, above = 0;
            if (also_inside) take(source, factors, other, other_by, beside, above);
            re = re / 2 + beside / 2;
            im = im / 2 - above / 2;
        }
    }
    Made made;
    write(made.part[0], re * REAL(w.factor));
    if (RESULTS == 2) write(made.part[RESULTS - 1], (w.conj ? -im : im) * REAL(w.factor));
    target[to] = made;
}
"""
)


class Axis(ctypes.Structure):
    """The kernel's struct of the same name: `limit` is how many the source has."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("extent", "limit", "source", "target", "by", "role"))


class Work(ctypes.Structure):
    """The kernel's struct of the same name."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("count", "size")),
        ("factor", ctypes.c_double),
        *((name, ctypes.c_int) for name in ("axes", "conj", "hermitian", "alone")),
        ("axis", Axis * MOST_AXES),
    )


class Hermitian(NamedTuple):
    """Of which axes a half spectrum is made that of real numbers: the one that is halved, its size, and the others."""

    axis: int
    size: int
    others: tuple[int, ...]


class _Line(NamedTuple):
    extent: int
    limit: int
    source: int
    target: int
    by: int
    role: int


def options(source: Dtype, target: Dtype, factors: Dtype | None = None, *, wide: bool) -> tuple[str, ...]:
    """NVRTC's options for two dtypes, and that of factors."""
    chosen = {
        "NUMBER": NAMES[source],
        "PARTS": 2 if source.is_complex else 1,
        "REAL": "double" if NAMES[target] == "double" else "float",
        "STORED": NAMES[target],
        "RESULTS": 2 if target.is_complex else 1,
        "FACTOR": "float" if factors is None else NAMES[factors],
        "FACTOR_PARTS": 0 if factors is None else 2 if factors.is_complex else 1,
        "READ": "" if source in WHOLE or source in WIDE else "read",
        "INDEX": "unsigned long long" if wide else "unsigned",
    }
    return "-std=c++17", *(f"-D{name}={value}" for name, value in chosen.items())


def work_of(
    source: View,
    target: View,
    *,
    factor: float = 1.0,
    conj: bool = False,
    hermitian: Hermitian | None = None,
    factors: View | None = None,
) -> Work:
    """What the kernel is told; Refused where the axes are too many that do not lie as one.

    `factors` has the axes of the source, with a stride of 0 along those that it is the same for.
    """
    lines: list[_Line] = []
    order = sorted(range(len(target.shape)), key=lambda axis: -abs(target.strides[axis]))
    for axis in order:
        extent, role = target.shape[axis], PLAIN
        if hermitian is not None:
            role = HALVED if axis == hermitian.axis else MIRRORED if axis in hermitian.others else PLAIN
        by = 0 if factors is None else factors.strides[axis]
        line = _Line(extent, source.shape[axis], source.strides[axis], target.strides[axis], by, role)
        if extent == line.limit == 1 and role == PLAIN:
            continue
        if lines and (merged := _merged(lines[-1], line)) is not None:
            lines[-1] = merged
        else:
            lines.append(line)
    if len(lines) > MOST_AXES:
        wanted = f"needs at most {MOST_AXES} axes that do not lie in memory as one where it is copied"
        raise Refused(f"{wanted}, has {len(lines)}", Kind.RULE)
    work = Work(math.prod(target.shape), 0, factor, len(lines), conj, hermitian is not None)
    if hermitian is not None:
        work.size, work.alone = hermitian.size, not hermitian.others
    for number, line in enumerate(lines):
        work.axis[number] = Axis(*line)
    return work


def _merged(outer: _Line, inner: _Line) -> _Line | None:
    plain = all(line.role == PLAIN and line.extent == line.limit for line in (outer, inner))
    nested = outer.source == inner.source * inner.extent and outer.target == inner.target * inner.extent
    nested = nested and outer.by == inner.by * inner.extent
    if not plain or not nested:
        return None
    extent = outer.extent * inner.extent
    return inner._replace(extent=extent, limit=extent)


class Move:
    """The kernel over two views, as a step of a plan; they may be one and the same."""

    __slots__ = ("_executor", "_given", "_launch", "_views")

    def __init__(
        self, executor: CudaExecutor, source: View, target: View, *, factors: View | None = None, **choices: Any
    ) -> None:
        self._executor = executor
        self._views = (source, target) if factors is None else (source, target, factors)
        work = work_of(source, target, factors=factors, **choices)
        self._given: tuple[Any, ...] = (ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(), work)
        by = None if factors is None else factors.dtype
        chosen = options(source.dtype, target.dtype, by, wide=work.count >= SMALL - THREADS)
        function = loaded(SOURCE, "move", chosen, executor.device)
        pointers = (ctypes.c_void_p * len(self._given))(*map(ctypes.addressof, self._given))
        extents = (-(-work.count // THREADS), 1, 1, THREADS, 1, 1)
        fixed = (ctypes.c_void_p(function), *extents, 0, executor.target, pointers, None)
        self._launch = partial(driver.cuLaunchKernel.unchecked, *fixed)

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Launch it at some addresses."""
        for slot, view in zip(self._given, self._views, strict=False):
            slot.value = addresses[view.operand] + view.offset
        if status := self._launch():
            self._executor.stream.done()  # raises DeviceFault where it is the device that is lost
            raise driver.error("cuLaunchKernel", status)
