"""The two kernels around the Fourier transform that computes a cosine or sine transform.

`fold` computes the input of the Fourier transform from each line of real numbers; `unfold` computes the line of the
result from its output. Type 1 is the real transform of the line with its mirror image. Types 2 and 3 are one of n
points, reordered and multiplied by roots of unity (Makhoul, https://doi.org/10.1109/TASSP.1980.1163351). Type 4 is a
complex one of n / 2 points, or of 2·n for odd n. Sine transforms are cosine transforms with signs, in reverse order.
This file does not depend on requests.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, NamedTuple

from dispatch.errors import Refused
from dispatch.libraries.cufft.moves import MAX_AXES, NAMES, SMALL, THREADS, WHOLE, WIDE
from dispatch.libraries.nvrtc.launching import KernelStep
from dispatch.libraries.nvrtc.number_types import NUMBERS
from dispatch.refusal import Kind

if TYPE_CHECKING:
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype
    from dispatch.libraries.cufft.layouts import BatchAxis, View

__all__ = ["SOURCE", "Fold", "Lines", "options", "points_of"]

SOURCE = (
    NUMBERS
    + r"""
typedef long long Int;
typedef INDEX Index;
typedef NUMBER Number;
struct alignas(2 * sizeof(REAL)) Complex { REAL re, im; };
struct Axis { Int extent, step; };
struct Work { Int count, points, n, have, step; double factor; int axes, orthogonal; Axis axis[12]; };

// e^(-πi · numerator / denominator)
__device__ Complex turn(Int numerator, Int denominator)
{
    Complex z;
    TURN(REAL(double(numerator) / double(denominator)), &z.im, &z.re);
    z.im = -z.im;
    return z;
}
__device__ Complex times(Complex a, Complex b)
{
    Complex z = {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
    return z;
}

__device__ Int start(Index line, const Work& w)
{
    Int at = 0;
    for (int number = w.axes - 1; number >= 0; --number) {
        at += Int(line % Index(w.axis[number].extent)) * w.axis[number].step;
        line /= Index(w.axis[number].extent);
    }
    return at;
}

__device__ REAL given(const Number* x, Int i, const Work& w)
{
    if (i < 0 || i >= w.have) return 0;
    const REAL value = REAL(READ(x[i * w.step]));
    const bool at_end = TYPE == 1 ? !SINE && (i == 0 || i == w.n - 1) : TYPE == 3 && i == (SINE ? w.n - 1 : 0);
    return w.orthogonal && at_end ? value * REAL(1.4142135623730951) : value;
}
// As the cosine transform of the same type is to be given it.
__device__ REAL cosines(const Number* x, Int i, const Work& w)
{
    if (!SINE) return given(x, i, w);
    if (TYPE == 2) return i % 2 ? -given(x, i, w) : given(x, i, w);
    return given(x, w.n - 1 - i, w);
}

#if TYPE == 1 || TYPE == 2
typedef REAL Folded;
#else
typedef Complex Folded;
#endif
#if TYPE == 3
typedef REAL Found;
#else
typedef Complex Found;
#endif

extern "C" __global__ void fold(const Number* x, Folded* folded, Work w)
{
    const Index i = blockIdx.x * (Index)blockDim.x + threadIdx.x;
    if (i >= Index(w.count)) return;
    const Int m = Int(i % Index(w.points)), n = w.n;
    x += start(i / Index(w.points), w);
    Folded made;
#if TYPE == 1 && SINE
    made = m == 0 || m == n + 1 ? REAL(0) : m <= n ? given(x, m - 1, w) : -given(x, w.points - m - 1, w);
#elif TYPE == 1
    made = given(x, m < n ? m : w.points - m, w);
#elif TYPE == 2
    made = cosines(x, 2 * m < n ? 2 * m : 2 * (n - 1 - m) + 1, w);
#elif TYPE == 3
    Complex pair = {cosines(x, m, w), m ? -cosines(x, n - m, w) : REAL(0)}, back = turn(m, 2 * n);
    back.im = -back.im;
    made = times(pair, back);
#elif EVEN
    Complex pair = {cosines(x, 2 * m, w), cosines(x, n - 1 - 2 * m, w)};
    made = times(pair, turn(4 * m + 1, 4 * n));
#else
    Complex one = {m < n ? cosines(x, m, w) : REAL(0), 0};
    made = times(one, turn(m, 2 * n));
#endif
    folded[i] = made;
}

extern "C" __global__ void unfold(const Found* found, REAL* out, Work w)
{
    const Index i = blockIdx.x * (Index)blockDim.x + threadIdx.x;
    if (i >= Index(w.count)) return;
    const Int n = w.n, at = Int(i % Index(n)), k = SINE && TYPE == 2 ? n - 1 - at : at;
    const Index line = i / Index(n);
    found += Int(line) * w.points;
    REAL y;
#if TYPE == 1 && SINE
    y = -found[k + 1].im;
#elif TYPE == 1
    y = found[k].re;
#elif TYPE == 2
    Complex z = found[2 * k <= n ? k : n - k];
    if (2 * k > n) z.im = -z.im;
    y = 2 * times(z, turn(k, 2 * n)).re;
#elif TYPE == 3
    y = found[k % 2 ? n - 1 - k / 2 : k / 2];
#elif EVEN
    const Int m = k % 2 ? (n - 1 - k) / 2 : k / 2;
    const Complex z = times(found[m], turn(m, n));
    y = k % 2 ? -2 * z.im : 2 * z.re;
#else
    y = 2 * times(found[k], turn(2 * k + 1, 4 * n)).re;
#endif
    if (SINE && TYPE > 2 && at % 2) y = -y;
    const bool at_end = TYPE == 1 ? !SINE && (at == 0 || at == n - 1) : TYPE == 2 && k == 0;
    const double factor = w.orthogonal && at_end ? w.factor * 0.70710678118654752 : w.factor;
    out[start(line, w) + at * w.step] = y * REAL(factor);
}
"""
)


class Lines(NamedTuple):
    """The lines to transform: n real numbers each, how many of them the operand has, and the choices of the transform.

    `axis` is the axis of a line; `batch_axes` are the other axes, merged.
    """

    type: int
    sine: bool
    n: int
    axis: int
    batch_axes: tuple[BatchAxis, ...]
    orthogonal: bool
    factor: float

    @property
    def line_count(self) -> int:
        """The number of lines."""
        return math.prod(part.extent for part in self.batch_axes)


def points_of(lines: Lines) -> int:
    """The number of points of a line's Fourier transform."""
    n = lines.n
    if lines.type == 1:
        return 2 * (n + 1) if lines.sine else 2 * (n - 1)
    return n if lines.type < FOUR else n // 2 if n % 2 == 0 else 2 * n


class Axis(ctypes.Structure):
    """The kernel's struct of the same name."""

    _fields_ = (("extent", ctypes.c_int64), ("step", ctypes.c_int64))


class Work(ctypes.Structure):
    """The kernel's struct of the same name."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("count", "points", "n", "have", "step")),
        ("factor", ctypes.c_double),
        ("axes", ctypes.c_int),
        ("orthogonal", ctypes.c_int),
        ("axis", Axis * MAX_AXES),
    )


def options(lines: Lines, number: Dtype, real: Dtype, *, wide: bool) -> tuple[str, ...]:
    """NVRTC's options: the dtype of the line that is read, and the dtype of the computation."""
    macros = {
        "NUMBER": NAMES[number],
        "REAL": NAMES[real],
        "READ": "" if number in WHOLE or number in WIDE else "read",
        "TURN": "sincospi" if real.itemsize == DOUBLE_BYTES else "sincospif",
        "INDEX": "unsigned long long" if wide else "unsigned",
        "TYPE": lines.type,
        "SINE": int(lines.sine),
        "EVEN": int(lines.type == FOUR and lines.n % 2 == 0),
    }
    return "-std=c++17", *(f"-D{name}={value}" for name, value in macros.items())


DOUBLE_BYTES = 8  # bytes of a double
FOUR = 4


class Fold(KernelStep):
    """Either kernel as a step of a plan: `fold` reads lines into dense memory, `unfold` computes lines from it."""

    __slots__ = ()

    def __init__(
        self, executor: CudaExecutor, name: str, lines: Lines, source: View, target: View, real: Dtype
    ) -> None:
        folds = name == "fold"
        line_view, dense = (source, target) if folds else (target, source)
        each = dense.shape[-1] if folds else lines.n  # threads for each line
        work = Work(
            lines.line_count * each,
            dense.shape[-1],
            lines.n,
            line_view.shape[lines.axis],
            line_view.strides[lines.axis],
        )
        work.factor, work.orthogonal = lines.factor, lines.orthogonal
        if len(lines.batch_axes) > MAX_AXES:
            wanted = f"needs at most {MAX_AXES} axes other than the transformed one that cannot be merged"
            raise Refused(f"{wanted}, has {len(lines.batch_axes)}", Kind.RULE)
        for part in lines.batch_axes:
            work.axis[work.axes] = Axis(part.extent, part.source if folds else part.target)
            work.axes += 1
        nvrtc_options = options(lines, source.dtype if folds else real, real, wide=work.count >= SMALL - THREADS)
        grid = (-(-work.count // THREADS),)
        super().__init__(executor, (SOURCE, name, nvrtc_options), grid, (THREADS,), (source, target, work))
