"""Which numbers are drawn by rejection in f32, and what their kernels (single_kernels.py) take by value."""

from __future__ import annotations

import ctypes
import math
from typing import Any, ClassVar, NamedTuple

import numpy as np

from dispatch.keys import F64

__all__ = ["constants", "is_by_quads", "is_single", "shapes_of", "single_values", "truncation_method"]

LEAST_SHAPE = 0.05  # of smaller ones the logarithms of f32 are too coarse
LARGEST_SHAPE = 1e30
EXTREME = 1e30  # beyond it, or below its inverse, f32 does not hold what leads to the number
FARTHEST = 1e15  # standard deviations
AROUND = 2.5066282746310002  # sqrt(2 pi): from such a width on normal candidates are the better ones
NEAR = 3e-5  # of a normal number of f32: it is off by 6e-6 at most


class GammaShape(ctypes.Structure):
    """As in the kernel."""

    _fields_: ClassVar[Any] = [
        *((name, ctypes.c_double) for name in ("w", "c")),
        *((name, ctypes.c_float) for name in ("w_single", "c_single", "boost", "unused")),
    ]


class GammaShapes(ctypes.Structure):
    """As in the kernel."""

    _fields_: ClassVar[Any] = [
        *(("one", GammaShape), ("other", GammaShape), ("scale", ctypes.c_float), ("is_small", ctypes.c_int)),
    ]


class TruncationBounds(ctypes.Structure):
    """As in the kernel; of a Tail its numbers, one behind the other."""

    _fields_: ClassVar[Any] = [
        *(("low", ctypes.c_double), ("high", ctypes.c_double)),
        *(("exact", ctypes.c_double * 4), ("single", ctypes.c_float * 4)),
        *((name, ctypes.c_float) for name in ("inner_low", "inner_high", "outer_low", "outer_high")),
        *((name, ctypes.c_float) for name in ("origin", "scale", "least", "most")),
        *((name, ctypes.c_int) for name in ("method", "unused")),
    ]


class TruncationMethod(NamedTuple):
    """How a truncated normal number is drawn.

    Attributes:
        kind: 0 for normal candidates; for uniform ones 1 around 0 and 3 in a tail, for exponential ones in a tail 2.
        low, high: the bounds in standard deviations; of the lower tail those of its mirror image.
        sign: -1 for the mirror image.
        rate: of exponential candidates.
    """

    kind: int
    low: float
    high: float
    sign: int
    rate: float

    @property
    def width(self) -> float:
        """From one bound to the other."""
        return self.high - self.low

    @property
    def unit(self) -> float:
        """What a candidate's distance from the bound is this times: an exponential number, or a uniform one."""
        return 1 / self.rate if self.kind == 2 else self.width


def truncation_method(request: Any) -> TruncationMethod:
    """How the numbers of a request are drawn, which hangs on its bounds."""
    low, high = request.standard
    if low <= 0 <= high:
        return TruncationMethod(0 if high - low > AROUND else 1, low, high, 1, 1.0)
    sign = 1 if low > 0 else -1
    if sign < 0:
        low, high = -high, -low
    root = math.sqrt(low * low + 4)
    is_wide = high - low > 2 / (low + root) * math.exp(0.5 - low / (low + root))
    return TruncationMethod(2 if is_wide else 3, low, high, sign, (low + root) / 2)


def is_single(request: Any) -> bool:
    """Whether numbers are drawn in f32: those of other dtypes than f64, but for parameters that f32 does not carry."""
    if request.kind is F64:
        return False
    if request.op == "random_gamma":
        shape = float(request.shape_parameter)
        size = float(request.scale) * max(shape, 1.0)
        return LEAST_SHAPE <= shape <= LARGEST_SHAPE and 1 / EXTREME <= size <= EXTREME
    if request.op == "random_beta":
        return all(LEAST_SHAPE <= float(shape) <= LARGEST_SHAPE for shape in (request.a, request.b))
    if request.op != "random_truncated_normal":
        return False
    near = min(map(abs, request.standard))
    moderate = abs(request.mean) <= EXTREME and 1 / EXTREME <= request.std <= EXTREME
    around = request.standard[0] <= 0 <= request.standard[1]
    return bool(moderate and (around or (near <= FARTHEST and near * request.std <= EXTREME)))


def is_by_quads(request: Any) -> bool:
    """Whether first candidates come from blocks that neighbours share: normal ones that are often taken."""
    if request.op == "random_truncated_normal":
        return truncation_method(request).kind == 0
    return bool(request.op == "random_gamma" and request.shape_parameter >= 1)


def shapes_of(request: Any) -> tuple[tuple[float, ...], bool]:
    """The shapes that a request needs gamma numbers of, and whether one of them is below 1."""
    names = ("a", "b") if request.op == "random_beta" else ("shape_parameter",)
    shapes = tuple(float(getattr(request, name)) for name in names)
    return shapes, min(shapes) < 1


def constants(shape: float) -> tuple[float, float]:
    """w and c of Marsaglia and Tsang's method, of a shape or, of one below 1, of what is larger by 1."""
    w = (shape if shape >= 1 else shape + 1) - 1 / 3
    return w, 1 / math.sqrt(9 * w)


def single_values(request: Any) -> tuple[Any, ...]:
    """What the kernel takes behind the offset."""
    given = bounds_values(request) if request.op == "random_truncated_normal" else shapes_values(request)
    return ctypes.c_uint64(request.count), given


def shapes_values(request: Any) -> GammaShapes:
    shapes, is_small = shapes_of(request)
    made = []
    for shape in shapes:
        w, c = constants(shape)
        made.append(GammaShape(w, c, w, c, 1 / shape if shape < 1 else 0.0))
    scale = request.scale * made[0].w if request.op == "random_gamma" else 1.0
    return GammaShapes(made[0], made[-1], scale, is_small)


def bounds_values(request: Any) -> TruncationBounds:
    method = truncation_method(request)
    std = float(request.std)
    origin = request.mean if method.kind == 0 else request.low if method.sign > 0 else request.high
    ends = (method.low + NEAR, method.high - NEAR, method.low - NEAR, method.high + NEAR)
    places = (origin, method.sign * std, request.low, request.high)
    singles = (rounded(number) for number in (*ends, *places))
    tail = method.low, method.width, method.rate - method.low, method.unit
    exact, single = (ctypes.c_double * 4)(*tail), (ctypes.c_float * 4)(*map(rounded, tail))
    return TruncationBounds(method.low, method.high, exact, single, *singles, method.kind)


def rounded(number: float) -> float:
    """A number as f32 has it, infinite where it is too large."""
    with np.errstate(over="ignore"):
        return float(np.float32(number))
