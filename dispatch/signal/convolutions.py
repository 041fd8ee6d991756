"""Convolutions by Fourier transforms.

Operands may be arrays of torch, CuPy or JAX, as in all of this library. The inverse transform multiplies the spectra
while it reads them, so a convolution is three transforms and no other pass over the data.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dispatch.checks import as_python_ints, check_dtype, check_enum, check_int
from dispatch.core.operand_checks import check_array
from dispatch.errors import BadRequest
from dispatch.keys import Choice
from dispatch.ops.fft import DftKind, dft
from dispatch.ops.fft.request import result_dtype
from dispatch.signal.framework_operands import copy_view, framework_operands

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.device.tensor import Tensor

__all__ = ["ConvolutionMode", "fftconvolve", "next_fast_len", "oaconvolve"]

RADICES = (2, 3, 5, 7)  # the prime factors of sizes for which cuFFT has its fast kernels
Shape = tuple[int, ...]


class ConvolutionMode(Choice):
    """The part of a convolution to return: FULL: all; SAME: the middle, with in1's extents; VALID: without padding."""

    FULL = 0
    SAME = 1
    VALID = 2


def fftconvolve(
    in1: Any, in2: Any, mode: ConvolutionMode | str = "full", axes: int | Sequence[int] | None = None
) -> Any:
    """The convolution of two arrays with the same number of axes, Σ in1[t]·in2[k - t], along `axes` or along all axes.

    Along the other axes the extents are equal, or one and the same operand has extent 1 wherever they differ. Both
    operands have the same precision: f32 or c64; or f64, c128 or integers, which give f64. The results of "same" and
    "valid" are views into the full result. Raises BadRequest for shapes, modes and axes that do not fit, and for
    "valid" if neither operand is the larger one along all axes. Follows
    https://docs.scipy.org/doc/scipy/reference/generated/scipy.signal.fftconvolve.html.
    """
    first, second, checked_axes, checked_mode, is_complex = _checked(in1, in2, mode, axes)
    if checked_mode is ConvolutionMode.VALID and _is_swapped(first, second, checked_axes):
        in1, in2, first, second = in2, in1, second, first
    full = tuple(first[axis] + second[axis] - 1 for axis in checked_axes)
    sizes = tuple(map(next_fast_len, full))
    forward, inverse_kind = _kinds(is_complex)
    one, other = (dft(each, forward, sizes, checked_axes) for each in (in1, in2))
    if any(m > n for m, n in zip(other.shape, one.shape, strict=True)):
        one, other = other, one
    full_result = dft(one, inverse_kind, sizes, checked_axes, inverse=True, factors=other)
    return full_result[
        _window(checked_mode, tuple(full_result.shape), first, second, dict(zip(checked_axes, full, strict=True)))
    ]


def oaconvolve(
    in1: Any, in2: Any, mode: ConvolutionMode | str = "full", axes: int | Sequence[int] | None = None
) -> Any:
    """`fftconvolve` for a long and a short operand: the long one is transformed in pieces of about the short size.

    The method is overlap-save: the pieces overlap by one element less than the shorter operand has, and the valid part
    of each transformed piece is copied into the result. Supports the same operands, and raises the same errors, as
    `fftconvolve`. Follows
    https://docs.scipy.org/doc/scipy/reference/generated/scipy.signal.oaconvolve.html.
    """
    first, second, checked_axes, checked_mode, is_complex = _checked(in1, in2, mode, axes)
    if checked_mode is ConvolutionMode.VALID and _is_swapped(first, second, checked_axes):
        in1, in2, first, second = in2, in1, second, first
    long, short = (in1, in2), (first, second)
    if math.prod(first[axis] for axis in checked_axes) < math.prod(second[axis] for axis in checked_axes):
        long, short = long[::-1], short[::-1]
    cuts = {axis: _Segments(short[0][axis], short[1][axis]) for axis in checked_axes}
    if all(cut.pieces == 1 for cut in cuts.values()):
        return fftconvolve(in1, in2, checked_mode, checked_axes)
    full = {axis: first[axis] + second[axis] - 1 for axis in checked_axes}
    with framework_operands(long=long[0], short=long[1]) as operands:
        full_result = _by_segments(operands.tensors[0], operands.tensors[1], cuts, is_complex)
        inside = tuple(slice(full.get(axis)) for axis in range(full_result.ndim))
        return operands.to_framework(
            full_result[inside][_window(checked_mode, full_result[inside].shape, first, second, full)]
        )


class _Segments:
    """How an axis of n elements is cut for a convolution with m elements: `pieces` of `size` elements, every `step`.

    `kept` is the index of the first valid point of a piece's cyclic convolution. As many zeros precede the signal.
    """

    def __init__(self, n: int, m: int) -> None:
        full = n + m - 1
        self.size, self.kept = next_fast_len(full), 0
        trial = 1 << (2 * m).bit_length()
        sizes = [trial << more for more in range(8) if m > 1 and trial << more < self.size]
        cost = {size: -(-full // (size - m + 1)) * size * math.log2(size) for size in sizes}
        best = min(cost, key=cost.__getitem__, default=self.size)
        if sizes and cost[best] < self.size * math.log2(self.size):
            self.size, self.kept = best, m - 1
        self.step = self.size - self.kept
        self.pieces = -(-full // self.step)
        self.length = self.pieces * self.step + self.kept


def _by_segments(long: Tensor, short: Tensor, cuts: dict[int, _Segments], is_complex: bool) -> Tensor:
    """The full convolution of two tensors along the cut axes, including the part of the last pieces beyond its end."""
    rank, axes = long.ndim, tuple(cuts)
    lengths = [cuts[axis].length if axis in cuts else n for axis, n in enumerate(long.shape)]
    padded = long.device.zeros(tuple(lengths), long.dtype)
    starts = [cuts[axis].kept if axis in cuts else 0 for axis in range(rank)]
    copy_view(long, padded[tuple(slice(start, start + n) for start, n in zip(starts, long.shape, strict=True))])
    strides = padded.element_strides
    extents = [cuts[axis].size if axis in cuts else n for axis, n in enumerate(long.shape)]
    piece_counts = [cut.pieces for cut in cuts.values()]
    piece_strides = [strides[axis] * cut.step for axis, cut in cuts.items()]
    pieces = padded.strided((*piece_counts, *extents), (*piece_strides, *strides))
    sizes = tuple(cut.size for cut in cuts.values())
    forward, inverse_kind = _kinds(is_complex)
    segment_axes = tuple(len(cuts) + axis for axis in axes)
    spectra = dft(pieces, forward, sizes, segment_axes)
    factors = dft(copy_view(short), forward, sizes, axes)
    wide = [max(m, n) for m, n in zip(spectra.shape[len(cuts) :], factors.shape, strict=True)]
    shape = (*spectra.shape[: len(cuts)], *wide)
    if shape != spectra.shape:  # broadcast axes of one element
        repeated = [s if m == n else 0 for m, n, s in zip(spectra.shape, shape, spectra.element_strides, strict=True)]
        spectra = spectra.strided(shape, tuple(repeated))
    result = dft(spectra, inverse_kind, sizes, segment_axes, inverse=True, factors=factors)
    valid = (slice(None),) * len(cuts) + tuple(slice(start, None) for start in starts)
    result = result[valid]
    order: list[int] = []  # each axis after the axis of its piece numbers
    for axis in range(rank):
        order += [axes.index(axis), len(cuts) + axis] if axis in cuts else [len(cuts) + axis]
    joined = tuple(cuts[axis].pieces * cuts[axis].step if axis in cuts else n for axis, n in enumerate(wide))
    return copy_view(result.transpose(*order)).reshape(joined)


def next_fast_len(target: int) -> int:
    """The smallest number from `target` on whose prime factors are 2, 3, 5 and 7 only."""
    check_int("target", target, 1)
    n = target
    while _rest(n) != 1:
        n += 1
    return n


def _rest(n: int) -> int:
    for radix in RADICES:
        while n % radix == 0:
            n //= radix
    return n


def _checked(
    in1: Any, in2: Any, mode: ConvolutionMode | str, axes: Any
) -> tuple[Shape, Shape, Shape, ConvolutionMode, bool]:
    """Both shapes, the convolved axes, the mode, and whether an operand is complex; BadRequest for bad arguments."""
    check_array("in1", in1)
    check_array("in2", in2)
    first, second = tuple(in1.shape), tuple(in2.shape)
    checked_axes = _axes(first, second, axes)
    checked_mode = check_enum("mode", mode, ConvolutionMode)
    kinds = [check_dtype(name, one.dtype) for name, one in (("in1", in1), ("in2", in2))]
    spectra = {result_dtype(kind, DftKind.C2C) for kind in kinds}
    if len(spectra) != 1 or None in spectra:
        expected = f"numbers whose precision is that of in1, {kinds[0]}"
        raise BadRequest("in2", str(kinds[1]), expected, "convert one: in2.astype(in1.dtype)")
    return first, second, checked_axes, checked_mode, any(kind.is_complex for kind in kinds)


def _kinds(is_complex: bool) -> tuple[DftKind, DftKind]:
    """The kinds of the forward and the inverse transform."""
    return (DftKind.C2C, DftKind.C2C) if is_complex else (DftKind.R2C, DftKind.C2R)


def _axes(first: Shape, second: Shape, axes: Any) -> Shape:
    """The axes of the convolution; BadRequest unless the shapes of the operands match."""
    rank = len(first)
    if not rank:
        raise BadRequest("in1", "no axes", "one axis or more", "in1[None] adds an axis")
    if len(second) != rank:
        raise BadRequest("in2", f"{len(second)} axes", f"{rank}, the number of axes of in1", "in2[None] adds an axis")
    if axes is None:
        axes_used = tuple(range(rank))
    else:
        axes = as_python_ints("axes", axes)
        axes_used = axes if isinstance(axes, tuple) else (axes,)
        for axis in axes_used:
            check_int("axes", axis, -rank, rank - 1)
        axes_used = tuple(axis % rank for axis in axes_used)
    if len(set(axes_used)) < len(axes_used) or not axes_used:
        raise BadRequest("axes", repr(axes), "at least one axis, and each once")
    if 0 in first + second:
        raise BadRequest("in2", f"{list(second)}, and in1 {list(first)}", "one element or more along each of the axes")
    differing = [axis for axis in range(rank) if axis not in axes_used and first[axis] != second[axis]]
    wider = [first[axis] > second[axis] for axis in differing]
    if any(1 not in (first[axis], second[axis]) for axis in differing) or len(set(wider)) > 1:
        expected = f"in1's extents, {list(first)}, along the other axes, or 1 along all axes that differ"
        raise BadRequest("in2", str(list(second)), expected)
    return axes_used


def _is_swapped(first: Shape, second: Shape, axes: Shape) -> bool:
    """Whether in2 is the larger operand; BadRequest if it is smaller along one axis and larger along another.

    As in SciPy, axes along which one of the operands has one element are not compared.
    """
    axes = tuple(axis for axis in axes if 1 not in (first[axis], second[axis]))
    if all(first[axis] >= second[axis] for axis in axes):
        return False
    if all(first[axis] <= second[axis] for axis in axes):
        return True
    expected = f"extents that are all at most, or all above, in1's, {list(first)}, for VALID"
    raise BadRequest("in2", str(list(second)), expected)


def _window(mode: ConvolutionMode, made: Shape, first: Shape, second: Shape, full: dict[int, int]) -> Any:
    """The index of the result in the inverse transform, or in the full convolution."""
    inside = [slice(None)] * len(made)
    for axis, n in full.items():
        count = n
        if mode is ConvolutionMode.SAME:
            count = first[axis]
        elif mode is ConvolutionMode.VALID and 1 not in (first[axis], second[axis]):
            count = first[axis] - second[axis] + 1
        start = (n - count) // 2
        inside[axis] = slice(start, start + count)
    return tuple(inside)
