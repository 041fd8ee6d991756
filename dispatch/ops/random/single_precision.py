"""Decides which numbers are drawn by rejection in f32, and computes their kernels' arguments (single_kernels.py)."""

from __future__ import annotations

import ctypes
import math
from typing import Any, ClassVar, NamedTuple

import numpy as np

from dispatch.keys import F64

__all__ = ["constants", "is_by_quads", "is_single", "shapes_of", "single_values", "truncation_method"]

MIN_SHAPE = 0.05  # for smaller shapes, logarithms in f32 are too imprecise
MAX_SHAPE = 1e30
EXTREME = 1e30  # above it, or below its inverse, f32 cannot hold intermediate results
FARTHEST = 1e15  # standard deviations
AROUND = 2.5066282746310002  # sqrt(2 pi): from this width on, normal candidates are accepted more often
NEAR = 3e-5  # the margin for a normal number in f32, whose error is at most 6e-6


class GammaShape(ctypes.Structure):
    """The struct GammaShape of the kernel."""

    _fields_: ClassVar[Any] = [
        *((name, ctypes.c_double) for name in ("w", "c")),
        *((name, ctypes.c_float) for name in ("w_single", "c_single", "boost", "unused")),
    ]


class GammaShapes(ctypes.Structure):
    """The struct GammaShapes of the kernel."""

    _fields_: ClassVar[Any] = [
        *(("one", GammaShape), ("other", GammaShape), ("scale", ctypes.c_float), ("is_small", ctypes.c_int)),
    ]


class TruncationBounds(ctypes.Structure):
    """The struct TruncationBounds of the kernel; each Tail is an array of its four numbers."""

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
        kind: 0 for normal candidates, 1 for uniform candidates if the bounds enclose 0, 2 for exponential candidates in
            a tail, 3 for uniform candidates in a tail.
        low, high: the bounds in standard deviations; for the lower tail those of its mirror image.
        sign: -1 for the mirror image.
        rate: the rate of exponential candidates.
    """

    kind: int
    low: float
    high: float
    sign: int
    rate: float

    @property
    def width(self) -> float:
        """The distance between the bounds."""
        return self.high - self.low

    @property
    def unit(self) -> float:
        """The unit of a candidate's distance from the bound; the factor is an exponential or a uniform number."""
        return 1 / self.rate if self.kind == 2 else self.width


def truncation_method(request: Any) -> TruncationMethod:
    """The method for a request, by its bounds."""
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
    """Whether numbers are drawn in f32: all dtypes except f64, unless the parameters exceed the range of f32."""
    if request.kind is F64:
        return False
    if request.op == "random_gamma":
        shape = float(request.shape_parameter)
        size = float(request.scale) * max(shape, 1.0)
        return MIN_SHAPE <= shape <= MAX_SHAPE and 1 / EXTREME <= size <= EXTREME
    if request.op == "random_beta":
        return all(MIN_SHAPE <= float(shape) <= MAX_SHAPE for shape in (request.a, request.b))
    if request.op != "random_truncated_normal":
        return False
    near = min(map(abs, request.standard))
    moderate = abs(request.mean) <= EXTREME and 1 / EXTREME <= request.std <= EXTREME
    around = request.standard[0] <= 0 <= request.standard[1]
    return bool(moderate and (around or (near <= FARTHEST and near * request.std <= EXTREME)))


def is_by_quads(request: Any) -> bool:
    """Whether first candidates come from shared blocks: only for normal candidates, which are usually accepted."""
    if request.op == "random_truncated_normal":
        return truncation_method(request).kind == 0
    return bool(request.op == "random_gamma" and request.shape_parameter >= 1)


def shapes_of(request: Any) -> tuple[tuple[float, ...], bool]:
    """The shapes of the gamma numbers that a request needs, and whether one of them is below 1."""
    names = ("a", "b") if request.op == "random_beta" else ("shape_parameter",)
    shapes = tuple(float(getattr(request, name)) for name in names)
    return shapes, min(shapes) < 1


def constants(shape: float) -> tuple[float, float]:
    """w and c of Marsaglia and Tsang's method for a shape; for a shape below 1, those of shape + 1."""
    w = (shape if shape >= 1 else shape + 1) - 1 / 3
    return w, 1 / math.sqrt(9 * w)


def single_values(request: Any) -> tuple[Any, ...]:
    """The kernel's arguments after the offset."""
    parameters = bounds_values(request) if request.op == "random_truncated_normal" else shapes_values(request)
    return ctypes.c_uint64(request.count), parameters


def shapes_values(request: Any) -> GammaShapes:
    shapes, is_small = shapes_of(request)
    structs = []
    for shape in shapes:
        w, c = constants(shape)
        structs.append(GammaShape(w, c, w, c, 1 / shape if shape < 1 else 0.0))
    scale = request.scale * structs[0].w if request.op == "random_gamma" else 1.0
    return GammaShapes(structs[0], structs[-1], scale, is_small)


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
    """A number rounded to f32, infinite if it is too large."""
    with np.errstate(over="ignore"):
        return float(np.float32(number))
