"""Convolutions by Fourier transforms.

Operands may be of torch, CuPy or JAX, as everywhere. The product of the spectra is part of the pass that the inverse
transform makes over what it reads: three transforms, and nothing beside them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dispatch.checks import check_enum, check_int
from dispatch.core.operand_checks import check_array
from dispatch.errors import BadRequest
from dispatch.keys import Choice, Dtype
from dispatch.ops.fft import DftKind, dft
from dispatch.ops.fft.request import result_dtype
from dispatch.signal.framework_operands import copy_view, framework_operands

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.device.tensor import Tensor

__all__ = ["ConvolutionMode", "fftconvolve", "next_fast_len", "oaconvolve"]

RADICES = (2, 3, 5, 7)  # cuFFT's own kernels are for sizes of these
Shape = tuple[int, ...]


class ConvolutionMode(Choice):
    """How much of a convolution is given: FULL all of it, SAME the middle, as in1 is, VALID what needs no zeros."""

    FULL = 0
    SAME = 1
    VALID = 2


def fftconvolve(
    in1: Any, in2: Any, mode: ConvolutionMode | str = "full", axes: int | Sequence[int] | None = None
) -> Any:
    """The convolution of two arrays of as many axes, Σ in1[t]·in2[k - t] along some of them, or along all.

    Along the other axes extents are equal, or 1 of the same operand. f32 and c64, or f64, c128 and whole numbers, which
    give f64: both operands in one precision. "same" and
    "valid" are views into the full result. Raises BadRequest for shapes, modes and axes that do not fit, as `valid`
    does not where neither operand is the larger one along all axes. Follows
    https://docs.scipy.org/doc/scipy/reference/generated/scipy.signal.fftconvolve.html.
    """
    first, second, chosen, wanted, is_complex = _checked(in1, in2, mode, axes)
    if wanted is ConvolutionMode.VALID and _is_swapped(first, second, chosen):
        in1, in2, first, second = in2, in1, second, first
    full = tuple(first[axis] + second[axis] - 1 for axis in chosen)
    sizes = tuple(map(next_fast_len, full))
    there, back = _kinds(is_complex)
    one, other = (dft(each, there, sizes, chosen) for each in (in1, in2))
    if any(m > n for m, n in zip(other.shape, one.shape, strict=True)):
        one, other = other, one
    made = dft(one, back, sizes, chosen, inverse=True, factors=other)
    return made[_window(wanted, tuple(made.shape), first, second, dict(zip(chosen, full, strict=True)))]


def oaconvolve(
    in1: Any, in2: Any, mode: ConvolutionMode | str = "full", axes: int | Sequence[int] | None = None
) -> Any:
    """`fftconvolve` for operands of which one is much longer: it is transformed in pieces of the other one's order.

    The pieces overlap by one element less than the shorter operand has (overlap and save), so that none are added up:
    what of a piece's transform is right goes to its place. Takes and refuses what `fftconvolve` does. Follows
    https://docs.scipy.org/doc/scipy/reference/generated/scipy.signal.oaconvolve.html.
    """
    first, second, chosen, wanted, is_complex = _checked(in1, in2, mode, axes)
    if wanted is ConvolutionMode.VALID and _is_swapped(first, second, chosen):
        in1, in2, first, second = in2, in1, second, first
    long, short = (in1, in2), (first, second)
    if math.prod(first[axis] for axis in chosen) < math.prod(second[axis] for axis in chosen):
        long, short = long[::-1], short[::-1]
    cuts = {axis: _Segments(short[0][axis], short[1][axis]) for axis in chosen}
    if all(cut.pieces == 1 for cut in cuts.values()):
        return fftconvolve(in1, in2, wanted, chosen)
    full = {axis: first[axis] + second[axis] - 1 for axis in chosen}
    with framework_operands(long=long[0], short=long[1]) as operands:
        made = _by_segments(operands.tensors[0], operands.tensors[1], cuts, is_complex)
        inside = tuple(slice(full.get(axis)) for axis in range(made.ndim))
        return operands.to_framework(made[inside][_window(wanted, made[inside].shape, first, second, full)])


class _Segments:
    """How an axis of n elements is cut for a convolution with m: `pieces` of `size` that begin each `step`.

    `kept` is the first point of a piece's cyclic convolution that is right, and as many zeros are before the signal.
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
    """The full convolution, and what of its last pieces is beyond it; of tensors, along the axes that are cut."""
    rank, axes = long.ndim, tuple(cuts)
    lengths = [cuts[axis].length if axis in cuts else n for axis, n in enumerate(long.shape)]
    padded = long.device.zeros(tuple(lengths), long.dtype)
    starts = [cuts[axis].kept if axis in cuts else 0 for axis in range(rank)]
    copy_view(long, padded[tuple(slice(start, start + n) for start, n in zip(starts, long.shape, strict=True))])
    steps = padded.element_strides
    extents = [cuts[axis].size if axis in cuts else n for axis, n in enumerate(long.shape)]
    numbers = [cut.pieces for cut in cuts.values()]
    between = [steps[axis] * cut.step for axis, cut in cuts.items()]
    pieces = padded.strided((*numbers, *extents), (*between, *steps))
    sizes = tuple(cut.size for cut in cuts.values())
    there, back = _kinds(is_complex)
    behind = tuple(len(cuts) + axis for axis in axes)
    spectra = dft(pieces, there, sizes, behind)
    factors = dft(copy_view(short), there, sizes, axes)
    wide = [max(m, n) for m, n in zip(spectra.shape[len(cuts) :], factors.shape, strict=True)]
    shape = (*spectra.shape[: len(cuts)], *wide)
    if shape != spectra.shape:  # what has one element along an axis is repeated there
        repeated = [s if m == n else 0 for m, n, s in zip(spectra.shape, shape, spectra.element_strides, strict=True)]
        spectra = spectra.strided(shape, tuple(repeated))
    made = dft(spectra, back, sizes, behind, inverse=True, factors=factors)
    right = (slice(None),) * len(cuts) + tuple(slice(start, None) for start in starts)
    made = made[right]
    order: list[int] = []  # each axis behind the number of its piece
    for axis in range(rank):
        order += [axes.index(axis), len(cuts) + axis] if axis in cuts else [len(cuts) + axis]
    joined = tuple(cuts[axis].pieces * cuts[axis].step if axis in cuts else n for axis, n in enumerate(wide))
    return copy_view(made.transpose(*order)).reshape(joined)


def next_fast_len(target: int) -> int:
    """The smallest number from `target` on that has no prime factors but 2, 3, 5 and 7."""
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
    """Both shapes, the axes that are convolved, the mode, and whether numbers are complex; BadRequest for misfits."""
    check_array("in1", in1)
    check_array("in2", in2)
    first, second = tuple(in1.shape), tuple(in2.shape)
    chosen = _axes(first, second, axes)
    wanted = check_enum("mode", mode, ConvolutionMode)
    kinds = [Dtype.of(one.dtype) for one in (in1, in2)]
    spectra = {result_dtype(kind, DftKind.C2C) for kind in kinds}
    if len(spectra) != 1 or None in spectra:
        wide = f"numbers that are computed in the precision of in1, {kinds[0]}"
        raise BadRequest("in2", str(kinds[1]), wide, "convert one: in2.astype(in1.dtype)")
    return first, second, chosen, wanted, any(kind.is_complex for kind in kinds)


def _kinds(is_complex: bool) -> tuple[DftKind, DftKind]:
    """The transforms there and back."""
    return (DftKind.C2C, DftKind.C2C) if is_complex else (DftKind.R2C, DftKind.C2R)


def _axes(first: Shape, second: Shape, axes: Any) -> Shape:
    """The axes along which is convolved, where both operands have fitting shapes."""
    rank = len(first)
    if not rank:
        raise BadRequest("in1", "no axes", "one axis or more", "in1[None] adds one")
    if len(second) != rank:
        raise BadRequest("in2", f"{len(second)} axes", f"{rank}, as in1 has", "in2[None] adds one")
    if axes is None:
        given = tuple(range(rank))
    else:
        given = tuple(axes) if hasattr(axes, "__iter__") else (axes,)
        for axis in given:
            check_int("axes", axis, -rank, rank - 1)
        given = tuple(axis % rank for axis in given)
    if len(set(given)) < len(given) or not given:
        raise BadRequest("axes", repr(axes), "each axis once, and one at least")
    if 0 in first + second:
        raise BadRequest("in2", f"{list(second)}, and in1 {list(first)}", "one element or more along each of the axes")
    beside = [axis for axis in range(rank) if axis not in given and first[axis] != second[axis]]
    wider = [first[axis] > second[axis] for axis in beside]
    if any(1 not in (first[axis], second[axis]) for axis in beside) or len(set(wider)) > 1:
        wanted = f"in1's extents, {list(first)}, along the other axes, or 1 along all that differ"
        raise BadRequest("in2", str(list(second)), wanted)
    return given


def _is_swapped(first: Shape, second: Shape, axes: Shape) -> bool:
    """Whether in2 is the larger one; neither may be smaller along one axis and larger along another.

    As in SciPy, an axis along which one of them has one element is none of these.
    """
    axes = tuple(axis for axis in axes if 1 not in (first[axis], second[axis]))
    if all(first[axis] >= second[axis] for axis in axes):
        return False
    if all(first[axis] <= second[axis] for axis in axes):
        return True
    wanted = f"extents of which none, or all, are above in1's, {list(first)}, for VALID"
    raise BadRequest("in2", str(list(second)), wanted)


def _window(mode: ConvolutionMode, made: Shape, first: Shape, second: Shape, full: dict[int, int]) -> Any:
    """What of the inverse transform is the result."""
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
