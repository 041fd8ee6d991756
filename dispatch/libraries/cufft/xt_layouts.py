"""The arrays that are transformed over several GPUs, and the part of each GPU, before and after; no library is called.

An array in natural order, in the axes of `Layout.frame`, is cut along one of them. A part may have these axes in
another order in memory, and padding after the last one. Follows
https://docs.nvidia.com/cuda/cufft/#multiple-gpu-data-organization.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

from dispatch.device.layout import c_strides

if TYPE_CHECKING:
    from dispatch.device.layout import Array
    from dispatch.keys import Dtype

__all__ = [
    "Factors",
    "GpuPart",
    "Layout",
    "Problem",
    "along_first",
    "along_second",
    "in_strings",
    "layouts_of",
    "split_extent",
]

Shape = tuple[int, ...]


class Problem(NamedTuple):
    """A batch of transforms, with sizes along one to three axes; `signal` equals `spectrum` for complex transforms."""

    sizes: Shape
    batch: int
    signal: Dtype
    spectrum: Dtype

    @property
    def is_real(self) -> bool:
        """Whether the transforms are R2C and C2R."""
        return self.signal is not self.spectrum

    @property
    def in_strings(self) -> bool:
        """Whether it is one transform along one axis: its result is in strings, and its input is not."""
        return self.batch == 1 and len(self.sizes) == 1


class Factors(NamedTuple):
    """The layout of the result of one transform along one axis: `strings` strings of `factor2` substrings each.

    A substring is `length` adjacent points; the next substring of the same string starts strings · length points later.
    """

    factor2: int
    strings: int
    length: int


class GpuPart(NamedTuple):
    """The part of one GPU.

    Attributes:
        shape, strides: of its tensor; strides in elements.
        place: the piece of the array in natural order, in the axes of the frame.
        extents, steps: that piece's shape, and its strides in the part's memory.
    """

    shape: Shape
    strides: Shape
    place: tuple[slice, ...]
    extents: Shape
    steps: Shape

    def nbytes(self, dtype: Dtype) -> int:
        """From the first element to the end of the last row, its padding included."""
        return self.shape[0] * self.strides[0] * dtype.itemsize


class Layout(NamedTuple):
    """An array of a shape and dtype in parts, one for each GPU.

    Attributes:
        frame: the array's shape with some axes merged or split, so that a part is one slice of it.
        order: the axes of the frame as a part has them in memory.
    """

    dtype: Dtype
    shape: Shape
    frame: Shape
    order: Shape
    parts: tuple[GpuPart, ...]

    def pieces(self, array: Array) -> list[Array]:
        """Views of an array in natural order, in the axes of the frame: what each part has."""
        framed = array.reshape(self.frame)
        return [framed[part.place] for part in self.parts]

    def split(self, array: Array) -> list[Array]:
        """The same, each of the shape of its part."""
        pairs = zip(self.pieces(array), self.parts, strict=True)
        return [piece.transpose(self.order).reshape(part.shape) for piece, part in pairs]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def split_extent(extent: int, count: int) -> list[tuple[int, int]]:
    """From where to where each of so many parts of an axis goes: the first extent % count have one more."""
    each, more = divmod(extent, count)
    starts = [number * each + min(number, more) for number in range(count + 1)]
    return list(itertools.pairwise(starts))


def along_first(dtype: Dtype, shape: Shape, count: int, width: int | None = None) -> Layout:
    """Cut along the first axis, in natural order; `width` is from one row with padding to the next, None without."""
    row = shape[-1] if width is None or len(shape) == 1 else width
    padded = (*shape[1:-1], row) if len(shape) > 1 else ()
    strides = (math.prod(padded), *c_strides(padded))
    if row == shape[-1]:
        frame, rows, step = (shape[0], math.prod(shape[1:])), 1, math.prod(shape[1:])
    else:
        rows, step = math.prod(shape[1:-1]), row
        frame = (shape[0] * rows, shape[-1])
    parts = [
        GpuPart(
            (end - start, *shape[1:]),
            strides,
            (slice(start * rows, end * rows), slice(None)),
            ((end - start) * rows, frame[1]),
            (step, 1),
        )
        for start, end in split_extent(shape[0], count)
    ]
    return Layout(dtype, shape, frame, (0, 1), tuple(parts))


def along_second(dtype: Dtype, shape: Shape, count: int) -> Layout:
    """Cut along the second axis of two or more; each part is dense."""
    frame = (shape[0], shape[1], math.prod(shape[2:]))
    parts = []
    for start, end in split_extent(shape[1], count):
        part_shape, extents = (shape[0], end - start, *shape[2:]), (shape[0], end - start, frame[2])
        index = (slice(None), slice(start, end), slice(None))
        parts.append(GpuPart(part_shape, c_strides(part_shape), index, extents, c_strides(extents)))
    return Layout(dtype, shape, frame, (0, 1, 2), tuple(parts))


def in_strings(dtype: Dtype, factors: Factors, count: int) -> Layout:
    """The result of one transform along one axis, as many strings on each GPU: a part is [strings, factor2, length]."""
    factor2, strings, length = factors
    parts = []
    for start, end in split_extent(strings, count):
        part_shape, extents = (end - start, factor2, length), (factor2, end - start, length)
        index = (slice(None), slice(start, end), slice(None))
        parts.append(GpuPart(part_shape, c_strides(part_shape), index, extents, (length, factor2 * length, 1)))
    return Layout(dtype, (math.prod(factors),), (factor2, strings, length), (1, 0, 2), tuple(parts))


def layouts_of(problem: Problem, factors: Factors | None, count: int) -> tuple[list[Layout], list[Layout]]:
    """Those of signals and of spectra over so many GPUs: as they are written, and as a transform may leave them."""
    sizes, batch, dtype, spectrum_dtype = problem
    half = sizes[-1] // 2 + 1
    if factors is not None:
        both = [along_first(dtype, sizes, count), in_strings(dtype, factors, count)]
        return both, both
    shape = (batch, *sizes) if batch > 1 else sizes
    if not problem.is_real:
        both = [along_first(dtype, shape, count)] * 2 if batch > 1 else _both_cuts(dtype, shape, count)
        return both, both
    signal, end = along_first(dtype, shape, count, 2 * half), (*shape[:-1], half)
    spectrum = along_first(spectrum_dtype, end, count) if batch > 1 else along_second(spectrum_dtype, end, count)
    return [signal] * 2, [spectrum] * 2


def _both_cuts(dtype: Dtype, shape: Shape, count: int) -> list[Layout]:
    return [along_first(dtype, shape, count), along_second(dtype, shape, count)]
