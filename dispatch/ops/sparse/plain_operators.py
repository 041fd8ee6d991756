"""The operators of the kernel of semiring_kernels.py for alpha · op(A) · B + beta · C.

Terms are added by fused multiply-add, into sums that begin with 0. Factors are arguments of each launch. In a batch
each matrix has its own tiles, and its operands are located by strides.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from dispatch.libraries.cusparse.operator_source import Operators

if TYPE_CHECKING:
    from dispatch.keys import Dtype

__all__ = ["BatchStrides", "plain_operators", "words"]

PLAIN = r"""
namespace operators {
struct BatchStrides { long long values, offsets, places, b, c, out; };

static __device__ void add_product(Number& sum, Number a, Number b)
{
    Real* const s = (Real*)&sum;
    const Real *const x = (const Real*)&a, *const y = (const Real*)&b;
    s[0] = fma(x[0], y[0], s[0]);
    if (sizeof(Number) > sizeof(Real)) {
        const int i = sizeof(Number) / sizeof(Real) - 1;
        s[0] = fma(-x[i], y[i], s[0]);
        s[i] = fma(x[0], y[i], fma(x[i], y[0], s[i]));
    }
}

static __device__ Number finished(Number sum, Number c, Number alpha, Number beta) { return alpha * sum + beta * c; }
}
"""
OF_BATCH = """const Int matrix = (unsigned)tile / (unsigned)tiles, tile_of_columns = tile - matrix * tiles;
    values += matrix * strides.values, offsets += matrix * strides.offsets, places += matrix * strides.places;
    b += matrix * strides.b, out += matrix * strides.out;
    if (c) c += matrix * strides.c;"""


class BatchStrides(ctypes.Structure):
    """The strides in elements from one matrix of a batch to the next, as the kernel takes them."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("values", "offsets", "places", "b", "c", "out"))


def plain_operators(compute: Dtype) -> str:
    """The namespace of the kernel's operators, for sums of a dtype."""
    return Operators(compute, "return a * b;", "return a + b;", None, 0.0, adds_c=False).as_namespace() + PLAIN


def words(*, conj: bool, batched: bool) -> dict[str, str]:
    """The parts of the kernel's template for products, with or without conjugating A, for a batch or one product."""
    parts = {
        "TERM": "operators::add_product(sum[v], left, right);",
        "FACTORS": "Sum alpha, Sum beta, ",
        "BESIDE": ", alpha, beta",
    }
    if conj:
        parts["LEFT"] = "conj(number(value[one]))"
    if batched:
        parts |= {"BATCH_STRIDES": ", int tiles, operators::BatchStrides strides", "OF_BATCH": OF_BATCH}
    return parts
