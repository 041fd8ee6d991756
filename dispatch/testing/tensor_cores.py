"""How far sums of products spread where each product is off by chance, and what fp8 tensor cores cut off of them.

Precisions whose products are these sizes instead; bounds of products are made of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.precision import Precision

if TYPE_CHECKING:
    from dispatch.device.layout import Array

__all__ = ["CUT_OFF", "SCALED_CUT_OFF", "SPREAD", "STRUCTURED_CUT_OFF"]

# Products that tensor cores add at once, the bits of fraction that each keeps, and those that it has.
FP8_GROUP, FP8_BITS, FP8_PRODUCT_BITS = 32, 13, 7
FP8_PROMOTED = 128  # products after which a sum is added to others in f32, unless accumulation is to be fast
AT_ONCE = 1 << 14  # elements, so that what is worked on stays near the processor
SIGMAS = 6  # of what is off by chance, for a case has up to 100,000 elements


class _Spread(Precision):
    """The root of the sum of the squares of all products: how far their sum is off where each is off by 1 of itself."""

    def product(self, a: Array, b: Array, work: np.dtype[Any]) -> Array:
        return np.asarray(np.sqrt(np.matmul(np.abs(a) ** 2, np.abs(b) ** 2))).astype(work)


class _CutOff(Precision):
    """What fp8 tensor cores lose of each sum of products.

    They align `FP8_GROUP` products and the sum so far to the largest of them and cut off what lies 13 bits behind its
    first: with products in this order that gives the very bits of an H200's 1.529052734375 for 1.530120849609375. Their
    sum is cut off 13 bits behind its own first, too: 5.2117919921875 became 5.21142578125, 10673 times 2^-11. A product
    has 7 bits itself, so that only small ones lose any. Without CUBLASLT_MATMUL_DESC_FAST_ACCUM, and in CUTLASS without
    FP8FastAccum, sums are "periodically promoted": those of each 128 products begin at 0 and are added in f32, which
    gives the very bits of an H200's 0.15704345703125 for 0.15642118453979492, of 384 products; in one sum it would be
    0.1564178466796875. Both ways are followed here, and what loses more counts; beside it chance is allowed for, for
    sums in another order. `skipped` is how many elements along k stand for one product: of 2:4 matrices two, for the
    zeros of A are not multiplied.
    """

    def __init__(self, skipped: int = 1) -> None:
        self.group, self.promoted = skipped * FP8_GROUP, skipped * FP8_PROMOTED

    def product(self, a: Array, b: Array, work: np.dtype[Any]) -> Array:
        a, b = (np.ascontiguousarray(x, np.float32) for x in (a, b))
        batch = int(np.prod(np.broadcast_shapes(a.shape[:-2], b.shape[:-2])))
        rows = max(AT_ONCE // max(batch * b.shape[-1], 1), 1)
        ways = {self.promoted, max(a.shape[-1], self.promoted)}  # one and the same for few products
        parts = [
            np.max([self._rows(a[..., start : start + rows, :], b, way) for way in ways], axis=0)
            for start in range(0, max(a.shape[-2], 1), rows)
        ]
        return np.concatenate(parts, axis=-2).astype(work)

    def _rows(self, a: Array, b: Array, promoted: int) -> Array:
        """What is lost of these rows where a sum is of as many products as are to be promoted together."""
        shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
        total, of_terms, of_totals, squares = (np.zeros(shape, np.float32) for _ in range(4))
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
            of_totals += lost
            squares += self.square(np.abs(total), unit)
            total -= lost
            small = unit * np.float32(2**FP8_PRODUCT_BITS)
            for k in group:
                np.multiply(a[..., k, None], b[..., k, None, :], out=term)
                np.abs(term, out=size)
                lost = self.lost(term, unit)
                of_terms += lost
                squares += self.square(size, unit) * (size < small)  # a third of the time of np.where
                total += np.subtract(term, lost, out=term)
            behind = np.maximum(self.unit(np.abs(total)), unit)  # it has no more bits than its terms
            lost = self.lost(total, behind)
            of_totals += lost
            squares += self.square(np.abs(total), behind) * (behind > unit)
            total -= lost
        return np.asarray(np.abs(of_terms) + np.abs(of_totals) + SIGMAS * np.sqrt(squares / 12))

    def unit(self, largest: Array) -> Array:
        """What lies 13 bits behind the first bit of these numbers."""
        _, exponent = np.frexp(largest)  # of a mantissa below 1
        return np.asarray(np.ldexp(np.float32(1), exponent - 1 - FP8_BITS))

    def lost(self, values: Array, unit: Array) -> Array:
        """What is cut off, in the sign of each number."""
        kept = np.divide(values, unit)
        np.multiply(np.trunc(kept, out=kept), unit, out=kept)
        return np.asarray(np.subtract(values, kept, out=kept))

    def square(self, sizes: Array, unit: Array) -> Array:
        """The square of the most that is cut off of numbers of these sizes."""
        most = np.minimum(sizes, unit)
        return np.asarray(np.multiply(most, most, out=most))


class _ScaledCutOff(_CutOff):
    """The same of products with factors of blocks: these shift the first bits, so that a unit may be twice as large.

    What is cut off is then not known, but for its sign and its most.
    """

    def unit(self, largest: Array) -> Array:
        return 2 * super().unit(largest)

    def lost(self, values: Array, unit: Array) -> Array:
        return np.asarray(np.copysign(np.minimum(np.abs(values), unit), values))


SPREAD, CUT_OFF, STRUCTURED_CUT_OFF, SCALED_CUT_OFF = _Spread(), _CutOff(), _CutOff(2), _ScaledCutOff()
