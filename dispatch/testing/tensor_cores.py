"""Error sizes of sums of products: the spread of random errors, and the truncation by fp8 tensor cores.

`Precision` classes whose `product` returns the size of these errors instead. Bounds of products are computed from them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.precision import Precision

if TYPE_CHECKING:
    from dispatch.device.layout import Array

__all__ = ["CUT_OFF", "SCALED_CUT_OFF", "SPREAD", "STRUCTURED_CUT_OFF"]

# Products that tensor cores add at once, the fraction bits that they keep of each, and the fraction bits of a product.
FP8_GROUP, FP8_BITS, FP8_PRODUCT_BITS = 32, 13, 7
FP8_PROMOTED = 128  # products after which a partial sum is added to the others in f32, without fast accumulation
AT_ONCE = 1 << 14  # elements, so that the working set stays in the CPU caches
SIGMAS = 6  # standard deviations of random errors, because a case has up to 100,000 elements


class _Spread(Precision):
    """The root of the sum of squares of all products: the spread of their sum for random relative errors of 1."""

    def product(self, a: Array, b: Array, work: np.dtype[Any]) -> Array:
        return np.asarray(np.sqrt(np.matmul(np.abs(a) ** 2, np.abs(b) ** 2))).astype(work)


class _CutOff(Precision):
    """The part of each sum of products that fp8 tensor cores truncate.

    They align `FP8_GROUP` products and the sum so far to the largest of them and truncate below 13 bits after its
    leading bit. With products in this order that gives an H200's result bit for bit: 1.529052734375 for
    1.530120849609375. The new sum is also truncated, below 13 bits after its own leading bit: 5.2117919921875 became
    5.21142578125, which is 10673 times 2^-11. A product has only 7 bits, so only small products lose any. Without
    CUBLASLT_MATMUL_DESC_FAST_ACCUM, and in CUTLASS without FP8FastAccum, sums are "periodically promoted": the sum of
    every 128 products begins at 0 and is added to the others in f32. That gives an H200's result for 384 products bit
    for bit: 0.15704345703125 for 0.15642118453979492; a single sum would give 0.1564178466796875. Both ways are
    computed here and the larger loss is taken; a random error is added to it, for sums in another order. `skipped` is
    the number of elements along k for one product: two for 2:4 matrices, because the zeros of A are not multiplied.
    """

    def __init__(self, skipped: int = 1) -> None:
        self.group, self.promoted = skipped * FP8_GROUP, skipped * FP8_PROMOTED

    def product(self, a: Array, b: Array, work: np.dtype[Any]) -> Array:
        a, b = (np.ascontiguousarray(x, np.float32) for x in (a, b))
        batch = int(np.prod(np.broadcast_shapes(a.shape[:-2], b.shape[:-2])))
        rows = max(AT_ONCE // max(batch * b.shape[-1], 1), 1)
        promotions = {self.promoted, max(a.shape[-1], self.promoted)}  # the two are equal for few products
        parts = [
            np.max([self._rows(a[..., start : start + rows, :], b, promoted) for promoted in promotions], axis=0)
            for start in range(0, max(a.shape[-2], 1), rows)
        ]
        return np.concatenate(parts, axis=-2).astype(work)

    def _rows(self, a: Array, b: Array, promoted: int) -> Array:
        """The loss in these rows of A if each sum of `promoted` elements along k begins at 0."""
        shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
        total, lost_of_terms, lost_of_totals, squares = (np.zeros(shape, np.float32) for _ in range(4))
        term, size = np.empty(shape, np.float32), np.empty(shape, np.float32)
        for start in range(0, a.shape[-1], self.group):
            group = range(start, min(start + self.group, a.shape[-1]))
            if start % promoted == 0:
                total[...] = 0
            largest = np.abs(total)
            for k in group:
                np.abs(np.multiply(a[..., k, None], b[..., k, None, :], out=term), out=term)
                np.maximum(largest, term, out=largest)
            unit = self.unit(largest)
            lost = self.lost(total, unit)
            lost_of_totals += lost
            squares += self.square(np.abs(total), unit)
            total -= lost
            small = unit * np.float32(2**FP8_PRODUCT_BITS)
            for k in group:
                np.multiply(a[..., k, None], b[..., k, None, :], out=term)
                np.abs(term, out=size)
                lost = self.lost(term, unit)
                lost_of_terms += lost
                squares += self.square(size, unit) * (size < small)  # a third of the time of np.where
                total += np.subtract(term, lost, out=term)
            total_unit = np.maximum(self.unit(np.abs(total)), unit)  # the sum has no bits below those of its terms
            lost = self.lost(total, total_unit)
            lost_of_totals += lost
            squares += self.square(np.abs(total), total_unit) * (total_unit > unit)
            total -= lost
        return np.asarray(np.abs(lost_of_terms) + np.abs(lost_of_totals) + SIGMAS * np.sqrt(squares / 12))

    def unit(self, largest: Array) -> Array:
        """The unit in the last place that is kept: 13 bits below the leading bit of these numbers."""
        _, exponent = np.frexp(largest)  # for a mantissa below 1
        return np.asarray(np.ldexp(np.float32(1), exponent - 1 - FP8_BITS))

    def lost(self, values: Array, unit: Array) -> Array:
        """The truncated part of each number, with its sign."""
        truncated = np.divide(values, unit)
        np.multiply(np.trunc(truncated, out=truncated), unit, out=truncated)
        return np.asarray(np.subtract(values, truncated, out=truncated))

    def square(self, sizes: Array, unit: Array) -> Array:
        """The square of the largest part that can be truncated from numbers of these sizes."""
        most = np.minimum(sizes, unit)
        return np.asarray(np.multiply(most, most, out=most))


class _ScaledCutOff(_CutOff):
    """The same for products with block scale factors, which shift the leading bits: a unit may be twice as large.

    Only the sign and the upper limit of the truncated part are then known.
    """

    def unit(self, largest: Array) -> Array:
        return 2 * super().unit(largest)

    def lost(self, values: Array, unit: Array) -> Array:
        return np.asarray(np.copysign(np.minimum(np.abs(values), unit), values))


SPREAD, CUT_OFF, STRUCTURED_CUT_OFF, SCALED_CUT_OFF = _Spread(), _CutOff(), _CutOff(2), _ScaledCutOff()
