"""Numbers in CUDA C++ for kernels that compute in double precision, whatever the dtype of their operands.

A kernel's source begins with `ARITHMETIC`, and its options include `number_options`. `Element` is the stored type and
`Wide` the type of the computation, both real or both complex, with the same operators and functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.keys import C64, F32

if TYPE_CHECKING:
    from dispatch.keys import Dtype

__all__ = ["ARITHMETIC", "WIDE_BYTES", "number_options"]

WIDE_BYTES = {False: 8, True: 16}  # bytes of a Wide: real, complex

ARITHMETIC = r"""
typedef long long Int;

#if PARTS == 2
struct Element { REAL x, y; };
struct Wide { double x, y; };
__device__ Wide wide(double x) { Wide made = {x, 0}; return made; }
__device__ Wide whole(double x) { Wide made = {x, x}; return made; }
__device__ Wide wide(Element a) { Wide made = {a.x, a.y}; return made; }
__device__ Element narrow(Wide a) { Element made = {REAL(a.x), REAL(a.y)}; return made; }
__device__ Wide operator+(Wide a, Wide b) { Wide made = {a.x + b.x, a.y + b.y}; return made; }
__device__ Wide operator-(Wide a, Wide b) { Wide made = {a.x - b.x, a.y - b.y}; return made; }
__device__ Wide operator*(Wide a, Wide b)
{
    Wide made = {a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x};
    return made;
}
__device__ Wide conj(Wide a) { Wide made = {a.x, -a.y}; return made; }
__device__ double real(Wide a) { return a.x; }
__device__ double size_of(Wide a)
{
    const double x = fabs(a.x), y = fabs(a.y), most = x > y ? x : y, least = x > y ? y : x;
    return most == 0 ? least : most * sqrt(1 + least / most * (least / most));
}
__device__ Wide scaled(Wide a, double by) { Wide made = {a.x * by, a.y * by}; return made; }
__device__ Wide operator/(Wide a, Wide b)
{
    const double by = 1 / size_of(b);
    return scaled(scaled(a, by) * conj(scaled(b, by)), 1);
}
__device__ Wide fetched(const Wide* at)
{
    Wide made = {__ldcg((const double*)at), __ldcg((const double*)at + 1)};
    return made;
}
#else
typedef REAL Element;
typedef double Wide;
__device__ Wide wide(double x) { return x; }
__device__ Wide whole(double x) { return x; }
__device__ Element narrow(Wide a) { return Element(a); }
__device__ Wide conj(Wide a) { return a; }
__device__ double real(Wide a) { return a; }
__device__ double size_of(Wide a) { return fabs(a); }
__device__ Wide scaled(Wide a, double by) { return a * by; }
__device__ Wide fetched(const Wide* at) { return __ldcg(at); }
#endif
__device__ double square(Wide a) { return real(conj(a) * a); }
__device__ bool is_zero(Wide a) { return size_of(a) == 0; }
__device__ bool is_finite(double x) { return x - x == 0; }
"""


def number_options(dtype: Dtype) -> dict[str, str]:
    """The macros of `ARITHMETIC`, for elements of a dtype."""
    single = dtype in (F32, C64)
    return {
        "REAL": "float" if single else "double",
        "PARTS": "2" if dtype.is_complex else "1",
        "EPSILON": "1.1920928955078125e-07" if single else "2.220446049250313e-16",
    }
