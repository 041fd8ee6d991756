"""Operands in cuFFT's advanced data layout: embedded extents, a stride, a distance from one batch to the next.

What one plan cannot describe is done by several calls at other addresses, or by several plans in sequence. Otherwise
the result is None, and the operand is copied. Only arithmetic over views; nothing here calls a library. Follows
https://docs.nvidia.com/cuda/cufft/#advanced-data-layout.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dispatch.core.operands import dense
from dispatch.keys import BF16, C64, C128, F16, F32, F64, Dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.device.layout import Layout

__all__ = [
    "C32",
    "CB32",
    "COMPLEX",
    "MAX_CALLS",
    "BatchAxis",
    "Problem",
    "TransformSpec",
    "View",
    "complex_view_of",
    "dense_view",
    "merged_axes",
    "transform_chain",
    "transform_spec",
    "view_of",
]

RANKS = (3, 2, 1)  # axes of a plan, the largest number first
MAX_CALLS = 16  # of one plan, over a batch that the plan cannot describe; a copy is faster than more calls


class PairDtype(Dtype):
    """Complex numbers of 16 bits a part. No tensor has this dtype: views of pairs of real numbers have it."""

    __slots__ = ()

    def __init__(self, name: str, part: Dtype, cuda: int) -> None:  # not among the dtypes that users may name
        self.name, self.cuda, self.bits = name, cuda, 2 * part.bits
        self.numpy = np.dtype([("real", part.numpy), ("imag", part.numpy)])
        self.is_complex, self.is_fp8 = True, False


C32, CB32 = PairDtype("c32", F16, 6), PairDtype("cb32", BF16, 15)
# The dtype of the spectrum for each dtype of the input.
COMPLEX = {F32: C64, F64: C128, C64: C64, C128: C128, F16: C32, BF16: CB32, C32: C32, CB32: CB32}

Shape = tuple[int, ...]


class View(NamedTuple):
    """A tensor in a plan's operand, `offset` bytes after its address, with this alignment; strides in elements."""

    operand: int
    offset: int
    dtype: Dtype
    shape: Shape
    strides: Shape
    alignment: int

    def cropped(self, shape: Shape) -> View:
        """The first elements along each axis."""
        return self._replace(shape=tuple(map(min, self.shape, shape)))


def view_of(layout: Layout, operand: int) -> View:
    """The view of a whole operand."""
    return View(operand, 0, layout.dtype, layout.shape, layout.strides, layout.alignment)


def complex_view_of(layout: Layout, operand: int) -> View:
    """An operand whose last axis holds the real and the imaginary part of each number, next to each other."""
    strides = tuple(step // 2 for step in layout.strides[:-1])
    return View(operand, 0, COMPLEX[layout.dtype], layout.shape[:-1], strides, layout.alignment)


class Problem(NamedTuple):
    """The parameters of a cuFFT plan, as `cufftXtMakePlanMany` takes them; dtypes as cudaDataType numbers."""

    sizes: Shape
    in_embed: Shape
    in_stride: int
    in_dist: int
    in_type: int
    out_embed: Shape
    out_stride: int
    out_dist: int
    out_type: int
    batch: int
    execution: int


class TransformSpec(NamedTuple):
    """A problem, its operands, and for each call the offsets in bytes into source and target."""

    problem: Problem
    source: View
    target: View
    offsets: tuple[tuple[int, int], ...]


class BatchAxis(NamedTuple):
    """A batch axis, or several merged: its extent, and its strides in both operands."""

    extent: int
    source: int
    target: int


def transform_spec(group: Sequence[int], source: View, target: View, most: int = MAX_CALLS) -> TransformSpec | None:
    """One plan over up to three axes, the outermost first; for a real operand the last axis is the halved one.

    None if no plan can describe it: strides that are not multiples of each other, or not above 0, a batch of more than
    one axis that takes more calls than `most`, or real numbers whose layout does not match that of the complex ones.
    """
    complex_dtype = COMPLEX[source.dtype]
    for view in (source, target):
        if view.alignment < complex_dtype.itemsize:
            return None
    first, second = _embedding(group, source), _embedding(group, target)
    if first is None or second is None:
        return None
    batch_axes = merged_axes(group, source, target)
    inner = max((part for part in batch_axes if part.source > 0 and part.target > 0), default=BatchAxis(1, 1, 1))
    outer = [part for part in batch_axes if part is not inner]
    if math.prod(part.extent for part in outer) > most:
        return None
    steps = [(part.source * source.dtype.itemsize, part.target * target.dtype.itemsize) for part in outer]
    if any(step % complex_dtype.itemsize for pair in steps for step in pair):
        return None
    sizes = tuple(max(source.shape[axis], target.shape[axis]) for axis in group)
    problem = Problem(
        sizes,
        *(*first, inner.source, source.dtype.cuda),
        *(*second, inner.target, target.dtype.cuda),
        inner.extent,
        complex_dtype.cuda,
    )
    offsets = tuple(
        (
            sum(at * step for at, (step, _) in zip(place, steps, strict=True)),
            sum(at * step for at, (_, step) in zip(place, steps, strict=True)),
        )
        for place in itertools.product(*(range(part.extent) for part in outer))
    )
    return TransformSpec(problem, source, target, offsets)


def _embedding(group: Sequence[int], view: View) -> tuple[Shape, int] | None:
    """The extents that the axes are embedded in, and the stride of the innermost one."""
    steps = [view.strides[axis] for axis in group]
    embed = [view.shape[group[0]]]
    for outer, inner, axis in zip(steps, steps[1:], group[1:], strict=False):
        if inner <= 0 or outer % inner or outer // inner < view.shape[axis]:
            return None
        embed.append(outer // inner)
    return (tuple(embed), steps[-1]) if min(steps) > 0 else None


def merged_axes(group: Sequence[int], source: View, target: View) -> list[BatchAxis]:
    """All other axes; axes are merged if both operands have a constant stride over them."""
    rest = [axis for axis, extent in enumerate(source.shape) if axis not in group and extent > 1]
    rest.sort(key=lambda axis: -abs(target.strides[axis]))
    batch_axes: list[BatchAxis] = []
    for axis in rest:
        part = BatchAxis(source.shape[axis], source.strides[axis], target.strides[axis])
        if batch_axes:
            before = batch_axes[-1]
            if before.source == part.source * part.extent and before.target == part.target * part.extent:
                batch_axes[-1] = part._replace(extent=before.extent * part.extent)
                continue
        batch_axes.append(part)
    return batch_axes


def transform_chain(
    axes: Sequence[int], source: View, target: View, last: int | None = None, *, most: int = MAX_CALLS
) -> list[TransformSpec] | None:
    """Plans in sequence over all these axes: the first from source to target, the others in place in the target.

    `last` is the axis along which real numbers are halved; it belongs to the first plan. None if a plan cannot
    describe one of them.
    """
    remaining = sorted(axes, key=lambda axis: -abs(target.strides[axis]))
    current, done = source, []
    while remaining or last is not None:
        halved = () if last is None else (last,)
        for rank in RANKS:
            count = rank - len(halved)
            if count > len(remaining):
                continue
            spec = transform_spec((*remaining[len(remaining) - count :], *halved), current, target, most)
            if spec is not None:
                break
        else:
            return None
        remaining, last, current = remaining[: len(remaining) - count], None, target
        done.append(spec)
    return done


def dense_view(operand: int, offset: int, dtype: Dtype, shape: Shape, axes: Sequence[int], alignment: int) -> View:
    """Dense memory in which these axes are the innermost ones, in this order: any plan can describe it."""
    order = (*(axis for axis in range(len(shape)) if axis not in axes), *axes)
    steps = dense(tuple(shape[axis] for axis in order), dtype).strides
    strides = [0] * len(shape)
    for axis, step in zip(order, steps, strict=True):
        strides[axis] = step
    return View(operand, offset, dtype, shape, tuple(strides), alignment)
