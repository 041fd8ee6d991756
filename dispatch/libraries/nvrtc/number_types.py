"""How this library's kernels read and store numbers: 16-bit dtypes without CUDA's headers, and vectors of elements."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.keys import BF16, F16, F32, F64

if TYPE_CHECKING:
    from dispatch.device.layout import Layout

__all__ = ["NAMES", "NUMBERS", "VECTORS", "fits_vectors"]

# `read` returns a float or double, `write` rounds one to nearest.
NUMBERS = r"""
struct Half { unsigned short bits; };
struct Brain { unsigned short bits; };
__device__ double read(double x) { return x; }
__device__ void write(double& at, double x) { at = x; }
__device__ float read(float x) { return x; }
__device__ void write(float& at, float x) { at = x; }
__device__ float read(Half x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
__device__ void write(Half& at, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(at.bits) : "f"(x)); }
__device__ float read(Brain x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ void write(Brain& at, float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(at.bits) : "f"(x)); }
"""
# VECTOR neighbours as T, in loads and stores of up to 16 bytes.
VECTORS = r"""
template <class E> struct alignas(sizeof(E) * VECTOR < 16 ? sizeof(E) * VECTOR : 16) Vector { E at[VECTOR]; };

template <class E> __device__ void load(const E* from, T* x)
{
    Vector<E> read_at_once = *(const Vector<E>*)from;
    for (int i = 0; i < VECTOR; ++i) x[i] = read(read_at_once.at[i]);
}

template <class E> __device__ void store(E* to, const T* x)
{
    Vector<E> stored_at_once;
    for (int i = 0; i < VECTOR; ++i) write(stored_at_once.at[i], x[i]);
    *(Vector<E>*)to = stored_at_once;
}
"""
NAMES = {F64: "double", F32: "float", F16: "Half", BF16: "Brain"}
WIDEST = 16  # bytes of one load


def fits_vectors(layout: Layout, count: int) -> bool:
    """Whether lines along a tensor's last axis can be read in vectors of `count` elements."""
    if layout.strides[-1] != 1 or layout.alignment < min(WIDEST, count * layout.dtype.itemsize):
        return False
    outer_axes = zip(layout.shape[:-1], layout.strides[:-1], strict=True)
    return all(step % count == 0 for extent, step in outer_axes if extent > 1)
