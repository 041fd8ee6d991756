"""The reference of single_kernels.py in NumPy: uniform numbers are rounded to f32, all further steps are in f64.

Candidates are numbered as in the kernels, so that an element takes the same words of its stream.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.libraries.nvrtc.philox import HALF, LOW, QUAD, philox
from dispatch.ops.random.single_precision import constants, is_by_quads, shapes_of, truncation_method
from dispatch.ops.random.streams import LAST_BLOCK, TAG

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.device.layout import Array

__all__ = ["numbers_of_single"]


def numbers_of_single(request: Any) -> Array:
    """The numbers of a request for which `is_single` is true, in f64."""
    index = request.offset + np.arange(request.count, dtype=np.uint64)
    if request.op == "random_truncated_normal":
        return truncated(request, index)
    (v, last), (shapes, _) = gammas(request, index), shapes_of(request)
    products = [row * constants(shape)[0] for row, shape in zip(v, shapes, strict=True)]
    if request.op == "random_gamma":
        (shape,) = shapes
        return products[0] * request.scale * (units(last[0]) ** (1 / shape) if shape < 1 else 1.0)  # type: ignore[no-any-return]
    x, y = (
        np.log(one) + (np.log(units(w)) / s if s < 1 else 0.0) for one, w, s in zip(products, last, shapes, strict=True)
    )
    return np.asarray(1 / (1 + np.exp(y - x)))


def blocks(seed: int, index: Array, number: int) -> Array:
    """A block of each element's stream, as u32[elements, 4]."""
    first, last = np.full(len(index), number, np.uint64), np.full(len(index), TAG, np.uint64)
    return philox((first, index & LOW, index >> HALF, last), seed)


def units(words: Array) -> Array:
    """Uniform numbers in (0, 1], rounded to f32."""
    rounded = words.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    return np.asarray(rounded.astype(np.float64))


def normal(words: Array, angles: Array, second: bool) -> Array:
    """The first or the second of two normal numbers."""
    turns = angles.view(np.int32).astype(np.float32).astype(np.float64) * 2.0**-31
    return np.asarray(np.sqrt(-2 * np.log(units(words))) * (np.sin if second else np.cos)(math.pi * turns))


def normals_of_quads(seed: int, index: Array) -> Array:
    """A normal number for each element, from pairs that two neighbours share."""
    drawn = blocks(seed, index // np.uint64(QUAD), LAST_BLOCK - 3)
    rows, first = np.arange(len(index)), (index % np.uint64(QUAD)).astype(np.intp) // 2 * 2
    words, angles = drawn[rows, first], drawn[rows, first + 1]
    return np.where(index % np.uint64(2), normal(words, angles, True), normal(words, angles, False))


def gammas(request: Any, index: Array) -> tuple[list[Array], list[Array]]:
    """For each shape: v, which is to be multiplied by w, and the words for the remaining step of small shapes."""
    shapes, is_small = shapes_of(request)
    v, last = np.empty((len(shapes), len(index))), np.empty((len(shapes), len(index)), np.uint32)
    accepted_count, left, candidate = np.zeros(len(index), np.intp), np.arange(len(index)), 0
    w, c = np.array([constants(shape) for shape in shapes]).T

    def tested(x: Array, u: Array, number: Array) -> tuple[Array, Array]:
        root = 1 + c[number] * x
        cube = np.where(root > 0, root, 1.0) ** 3
        return cube, (root > 0) & (np.log(u) < 0.5 * x * x + w[number] * (1 - cube + np.log(cube)))

    if is_by_quads(request):
        chances = blocks(request.seed, index // np.uint64(QUAD), LAST_BLOCK)
        u = units(chances[left, (index % np.uint64(QUAD)).astype(np.intp)])
        v[0], accepted = tested(normals_of_quads(request.seed, index), u, accepted_count)
        left = left[~accepted]
    while len(left):
        second = not is_small and candidate % 2 == 1
        drawn = blocks(request.seed, index[left], candidate if is_small else candidate // 2)
        number = accepted_count[left]
        x, u = normal(drawn[:, 0], drawn[:, 1], second), units(drawn[:, 3 if second else 2])
        cube, accepted = tested(x, u, number)
        v[number[accepted], left[accepted]] = cube[accepted]
        last[number[accepted], left[accepted]] = drawn[accepted, 3]
        accepted_count[left[accepted]] += 1
        left, candidate = left[accepted_count[left] < len(shapes)], candidate + 1
    return list(v), list(last)


def truncated(request: Any, index: Array) -> Array:
    """Normal numbers between two bounds."""
    method = truncation_method(request)
    per_block = 2 if method.kind else 4

    def candidates(drawn: Array, number: int) -> tuple[Array, Array]:
        part = 2 * (number % per_block // (1 if method.kind else 2))
        first, other = drawn[:, part], drawn[:, part + 1]
        if method.kind == 0:
            x = normal(first, other, number % 2 == 1)
            return x, (x >= method.low) & (x <= method.high)
        d = (-np.log(units(first)) if method.kind == 2 else units(first)) * method.unit
        return d, (units(other) <= np.exp(HEIGHTS[method.kind](method, d))) & ((method.kind != 2) | (d <= method.width))

    x, left, number = np.empty(len(index)), np.arange(len(index)), 0
    if is_by_quads(request):
        x = normals_of_quads(request.seed, index)
        left = np.flatnonzero(~((x >= method.low) & (x <= method.high)))
    while len(left):
        candidate, accepted = candidates(blocks(request.seed, index[left], number // per_block), number)
        x[left[accepted]] = candidate[accepted]
        left, number = left[~accepted], number + 1
    if method.kind == 0:
        return np.asarray(request.mean + request.std * x)
    return np.asarray((request.low if method.sign > 0 else request.high) + method.sign * request.std * x)


HEIGHTS: dict[int, Callable[[Any, Array], Any]] = {
    1: lambda method, d: (method.low + d) ** 2 * -0.5,
    2: lambda method, d: (d - (method.rate - method.low)) ** 2 * -0.5,
    3: lambda method, d: -d * (method.low + d * 0.5),
}
