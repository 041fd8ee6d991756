"""One pass over an operand before or after a transform: other strides, dtypes, extents, factors, the conjugate.

A kernel of this library, compiled by NVRTC for the current GPU, reads a view and writes another one with the same axes.
Where the source has fewer elements along an axis, the result is padded with zeros. A half spectrum is made Hermitian:
cuFFT requires that, while NumPy's transforms accept any half spectrum. This file does not depend on requests.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from dispatch.errors import Refused
from dispatch.keys import BF16, BOOL, C64, C128, F16, F32, F64, I8, I32, I64, U8, U32, U64
from dispatch.libraries.cufft.layouts import C32, CB32
from dispatch.libraries.nvrtc.launching import KernelStep
from dispatch.libraries.nvrtc.number_types import NUMBERS
from dispatch.refusal import Kind

if TYPE_CHECKING:
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype
    from dispatch.libraries.cufft.layouts import View

__all__ = ["MAX_AXES", "SOURCE", "Hermitian", "Move", "options", "work_of"]

MAX_AXES = 12
FEW_AXES = 4  # up to this number of axes there are specialized kernels
THREADS, EACH = 256, 4  # elements of a thread; all are loaded before the first is written
SMALL = 1 << 31  # element counts below it fit in 32 bits
WHOLE = {I8: "signed char", U8: "unsigned char", BOOL: "unsigned char", I32: "int", U32: "unsigned"}
WIDE = {I64: "long long", U64: "unsigned long long"}
NAMES = {F64: "double", F32: "float", F16: "Half", BF16: "Brain", C64: "float", C128: "double", C32: "Half",
         CB32: "Brain", **WHOLE, **WIDE}  # fmt: skip
PLAIN, MIRRORED, HALVED = 0, 1, 2  # roles of an axis

# At 0 and at half of the halved axis, a spectrum is its own mirror image: only its Hermitian part contributes to real
# numbers there. Without other axes that is the real part.
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
struct Axis { Int extent, limit, from, to, by, role, magic, shift; };
struct Work { Int count, size; double factor; int axes, conj, alone, padding; Axis axis[12]; };
typedef OFFSET Offset;

// left / extent: of 31 bits by a product, which the host has found for it; of 64 as it is.
__device__ Index quotient(Index left, const Axis& axis)
{
    if (sizeof(Index) > 4) return left / Index(axis.extent);
    return Index((unsigned long long)left * (unsigned)axis.magic >> axis.shift);
}

__device__ REAL real(Number x) { return REAL(READ(x)); }

// One element, with its factor where there are some.
__device__ void take(const Given* source, const Factor* factors, Offset from, Offset by, REAL& re, REAL& im)
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

// What element i of the target becomes, and where it is.
__device__ Offset moved(const Given* source, const Factor* factors, const Work& w, Index i, Made& made)
{
    Index left = i;
    Offset from = 0, to = 0, other = 0, by = 0, other_by = 0;
    bool inside = true, also_inside = true, mirrored = false;
#pragma unroll
    for (int number = AXES - 1; number >= 0; number--) {
        if (number >= w.axes) continue;
        const Axis& axis = w.axis[number];
        Index at = left;
        if (number) {
            left = quotient(at, axis);
            at -= left * Index(axis.extent);
        }
        from += Offset(at) * Offset(axis.from);
        to += Offset(at) * Offset(axis.to);
        by += Offset(at) * Offset(axis.by);
        inside = inside && at < Index(axis.limit);
        if (HERMITIAN) {
            const Index opposite = axis.role == 1 && at ? Index(axis.extent) - at : at;
            other += Offset(opposite) * Offset(axis.from);
            other_by += Offset(opposite) * Offset(axis.by);
            also_inside = also_inside && opposite < Index(axis.limit);
            if (axis.role == 2) mirrored = at == 0 || 2 * (Int)at == w.size;
        }
    }
    REAL re = 0, im = 0;
    if (inside) take(source, factors, from, by, re, im);
    if (HERMITIAN && mirrored) {
        if (w.alone) im = 0;
        else {
            REAL beside = 0, above = 0;
            if (also_inside) take(source, factors, other, other_by, beside, above);
            re = re / 2 + beside / 2;
            im = im / 2 - above / 2;
        }
    }
    write(made.part[0], re * REAL(w.factor));
    if (RESULTS == 2) write(made.part[RESULTS - 1], (w.conj ? -im : im) * REAL(w.factor));
    return to;
}

extern "C" __global__ void move(const Given* source, Made* target, const Factor* factors, Work w)
{
    const Index first = blockIdx.x * (Index)(EACH * blockDim.x) + threadIdx.x;
    Made made[EACH];
    Offset to[EACH];
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const Index i = first + k * (Index)blockDim.x;
        if (i < Index(w.count)) to[k] = moved(source, factors, w, i, made[k]);
    }
#pragma unroll
    for (int k = 0; k < EACH; k++)
        if (first + k * (Index)blockDim.x < Index(w.count)) target[to[k]] = made[k];
}
"""
)


class Axis(ctypes.Structure):
    """The kernel's struct of the same name: `limit` is the number of elements that the source has."""

    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("extent", "limit", "source", "target", "by", "role", "magic", "shift")
    )


class Work(ctypes.Structure):
    """The kernel's struct of the same name."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("count", "size")),
        ("factor", ctypes.c_double),
        *((name, ctypes.c_int) for name in ("axes", "conj", "alone", "padding")),
        ("axis", Axis * MAX_AXES),
    )


class Hermitian(NamedTuple):
    """The axes along which a half spectrum is made Hermitian: the halved one, its size, and the others."""

    axis: int
    size: int
    others: tuple[int, ...]


class _MovedAxis(NamedTuple):
    extent: int
    limit: int
    source: int
    target: int
    by: int
    role: int


def options(
    source: Dtype,
    target: Dtype,
    factors: Dtype | None = None,
    *,
    wide: bool,
    far: bool = True,
    axes: int = MAX_AXES,
    hermitian: bool = True,
) -> tuple[str, ...]:
    """NVRTC's options for two dtypes and that of factors; `wide`, `far`: element counts, offsets above 31 bits."""
    macros = {
        "NUMBER": NAMES[source],
        "PARTS": 2 if source.is_complex else 1,
        "REAL": "double" if NAMES[target] == "double" else "float",
        "STORED": NAMES[target],
        "RESULTS": 2 if target.is_complex else 1,
        "FACTOR": "float" if factors is None else NAMES[factors],
        "FACTOR_PARTS": 0 if factors is None else 2 if factors.is_complex else 1,
        "READ": "" if source in WHOLE or source in WIDE else "read",
        "INDEX": "unsigned long long" if wide else "unsigned",
        "OFFSET": "long long" if far else "int",
        "AXES": axes if axes <= FEW_AXES else MAX_AXES,
        "HERMITIAN": int(hermitian),
        "EACH": EACH,
    }
    return "-std=c++17", *(f"-D{name}={value}" for name, value in macros.items())


def work_of(
    source: View,
    target: View,
    *,
    factor: float = 1.0,
    conj: bool = False,
    hermitian: Hermitian | None = None,
    factors: View | None = None,
) -> Work:
    """The kernel's argument; Refused if too many axes are left that cannot be merged.

    `factors` has the axes of the source, with a stride of 0 along axes that it broadcasts to.
    """
    lines: list[_MovedAxis] = []
    order = sorted(range(len(target.shape)), key=lambda axis: -abs(target.strides[axis]))
    for axis in order:
        extent, role = target.shape[axis], PLAIN
        if hermitian is not None:
            role = HALVED if axis == hermitian.axis else MIRRORED if axis in hermitian.others else PLAIN
        by = 0 if factors is None else factors.strides[axis]
        line = _MovedAxis(extent, source.shape[axis], source.strides[axis], target.strides[axis], by, role)
        if extent == line.limit == 1 and role == PLAIN:
            continue
        if lines and (merged_axes := _merged(lines[-1], line)) is not None:
            lines[-1] = merged_axes
        else:
            lines.append(line)
    if len(lines) > MAX_AXES:
        wanted = f"needs at most {MAX_AXES} axes that cannot be merged for a copy"
        raise Refused(f"{wanted}, has {len(lines)}", Kind.RULE)
    work = Work(math.prod(target.shape), 0, factor, len(lines), conj)
    if hermitian is not None:
        work.size, work.alone = hermitian.size, not hermitian.others
    for number, line in enumerate(lines):
        work.axis[number] = Axis(*line, *divider(line.extent))
    return work


def divider(extent: int) -> tuple[int, int]:
    """A multiplier and a shift for dividing numbers of 31 bits: n · factor >> shift is n // extent.

    Follows Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994, theorem 4.2.
    """
    bits = max(extent - 1, 0).bit_length()
    return (-(-(1 << 31 + bits) // extent), 31 + bits) if 0 < extent < SMALL else (0, 0)


def reach(view: View) -> int:
    """The largest distance of an element from the first one, in elements."""
    return sum(abs(step) * extent for extent, step in zip(view.shape, view.strides, strict=True))


def _merged(outer: _MovedAxis, inner: _MovedAxis) -> _MovedAxis | None:
    plain = all(line.role == PLAIN and line.extent == line.limit for line in (outer, inner))
    nested = outer.source == inner.source * inner.extent and outer.target == inner.target * inner.extent
    nested = nested and outer.by == inner.by * inner.extent
    if not plain or not nested:
        return None
    extent = outer.extent * inner.extent
    return inner._replace(extent=extent, limit=extent)


class Move(KernelStep):
    """The kernel over two views, as a step of a plan; both may be the same view."""

    __slots__ = ()

    def __init__(
        self, executor: CudaExecutor, source: View, target: View, *, factors: View | None = None, **choices: Any
    ) -> None:
        views = (source, target) if factors is None else (source, target, factors)
        work = work_of(source, target, factors=factors, **choices)
        by = None if factors is None else factors.dtype
        nvrtc_options = options(
            source.dtype,
            target.dtype,
            by,
            wide=work.count >= SMALL - EACH * THREADS,
            far=max(map(reach, views)) >= SMALL,
            axes=work.axes,
            hermitian=choices.get("hermitian") is not None,
        )
        grid = (-(-work.count // (EACH * THREADS)),)
        super().__init__(executor, (SOURCE, "move", nvrtc_options), grid, (THREADS,), (source, target, factors, work))
