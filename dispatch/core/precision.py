"""The precision in which a NumPy formula computes: exactly, or with the rounding of a library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.keys import F8E4M3, F8E5M2, I8, Dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.device.layout import Array


__all__ = ["EXACT", "FP8_MAX", "Precision", "as_is", "to_tf32"]

FP8_MAX = {F8E4M3: 448.0, F8E5M2: 57344.0}


def as_is(values: Array) -> Array:
    """No rounding."""
    return values


@dataclass(frozen=True)
class Precision:
    """The precision of an evaluation.

    Attributes:
        real: NumPy's dtype of the sums and the epilogue; complex products use the complex dtype of that precision.
        operand: rounds A and B, already of dtype `real`, to the values that are multiplied.
        sums: rounds the sums of products.
    """

    real: type[np.floating[Any]] = np.float64
    operand: Callable[[Array], Array] = as_is
    sums: Callable[[Array], Array] = as_is

    def work(self, operands: Dtype) -> np.dtype[Any]:
        """The dtype of the sums and the epilogue of a product of operands of this dtype; integers stay exact."""
        if operands is I8:
            return np.dtype(np.int64)
        return np.result_type(self.real, np.complex64) if operands.is_complex else np.dtype(self.real)

    def product(self, a: Array, b: Array, work: np.dtype[Any]) -> Array:
        """A · B over the last two axes; batch axes broadcast."""
        if work.kind == "i":  # f64 is exact for sums of up to 2³¹ products of 8-bit integers, and has a BLAS
            in_f64: Array = np.matmul(a.astype(np.float64), b.astype(np.float64))
            return in_f64.astype(work)
        return self.sums(np.matmul(self.operand(a), self.operand(b)))


EXACT = Precision()


def to_tf32(values: Array) -> Array:
    """To the nearest TF32, which keeps 10 bits of an f32's fraction; ties to even."""
    if values.dtype.kind == "c":
        return _by_parts(values, to_tf32)
    word = values.view(np.uint32)
    up = np.uint32(0xFFF) + ((word >> np.uint32(13)) & np.uint32(1))
    rounded = (word + up) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(values), rounded, word).view(np.float32)


def _by_parts(values: Array, rounding: Callable[[Array], Array]) -> Array:
    """Round the real and the imaginary part."""
    rounded = np.empty_like(values)
    rounded.real = rounding(np.ascontiguousarray(values.real))
    rounded.imag = rounding(np.ascontiguousarray(values.imag))
    return rounded
