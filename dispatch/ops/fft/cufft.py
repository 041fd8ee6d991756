"""Discrete Fourier transforms by cuFFT: plans of `cudabind.sys.cufft` calls, and as few passes as possible.

cuFFT reads and writes strided operands directly if its advanced layout describes them. A pass before a transform
converts real numbers to complex ones, pads with zeros, and makes half a spectrum Hermitian. It writes to scratch
memory, because C2R overwrites its input. Such a pass also multiplies by the factor and by the elements of `factors`;
without it, the factor is a pass after the transform. More than three axes, and axes whose strides are not multiples
of each other, take several transforms in sequence. Follows
https://docs.nvidia.com/cuda/cufft/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.errors import WorkerFailed
from dispatch.libraries.cufft.layouts import COMPLEX, TransformSpec, View, transform_chain, transform_spec, view_of
from dispatch.libraries.cufft.moves import Hermitian
from dispatch.libraries.cufft.steps import Steps
from dispatch.ops.fft.request import DftKind, DftRequest, TransformRequest

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.layout import Layout
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype

__all__ = ["DftSteps", "chain_with_last", "checked_chain", "plan"]

RANK = 3
ANY = 2**62  # calls: for scratch memory no copy would reduce the number of calls


def plan(request: DftRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; without elements it has no steps."""
    steps = DftSteps(request, executor, row)
    if request.layout_of("out").size:
        kind: Any = request.kind
        {DftKind.C2C: steps.c2c, DftKind.R2C: steps.r2c, DftKind.C2R: steps.c2r}[kind]()
    return steps.plan()


class DftSteps(Steps):
    """The steps of a request, whose operands are views."""

    request: TransformRequest[Any]

    def __init__(self, request: DftRequest, executor: CudaExecutor, row: Row) -> None:
        super().__init__(executor, row, len(request.reads) + len(request.writes))
        self.request, self.forward = request, not request.inverse
        self.axes, self.factor = request.transformed, request.factor
        self.nontrivial_axes = tuple(
            axis for axis, n in zip(self.axes, request.points, strict=True) if n > 1
        )  # the transform of one point is that point
        self.output = view_of(request.layout_of("out"), request.place_of("out"))
        self.input = view_of(request.layout_of("a"), request.place_of("a")).cropped(request.read)
        self.factors = None if request.factors is None else broadcast_strides(request.layout_of("factors"), request)
        # Whether cuFFT may read the operand directly: no padding, no factors.
        self.is_direct = self.input.shape == request.read and self.factors is None

    def dense(self, dtype: Dtype, shape: tuple[int, ...]) -> View:
        """Scratch memory that every plan supports."""
        return self.scratch(dtype, shape, self.axes)

    def read(self, target: View, **choices: Any) -> None:
        """Copy the operand, multiplied by its factors."""
        self.move(self.input, target, factors=self.factors, **choices)

    def c2c(self) -> None:
        """Transform directly from the operand to the result; else copy to the result first, or use scratch memory."""
        out = self.output
        if not self.nontrivial_axes:
            self.read(out, factor=self.factor)
            return
        # In place, operand and result have the same layout: either both are copied or neither.
        chain = None
        if self.is_direct and self.input.dtype is out.dtype:
            chain = transform_chain(self.nontrivial_axes, self.input, out)
        if chain is not None:
            self.transform(chain, forward=self.forward)
            self.scale(out)
            return
        chain, target = transform_chain(self.nontrivial_axes, out, out), out
        if chain is None:
            target = self.dense(out.dtype, out.shape)
            chain = transform_chain(self.nontrivial_axes, target, target, most=ANY)
        self.read(target, factor=self.factor)
        self.transform(checked_chain(chain), forward=self.forward)
        if target is not out:
            self.move(target, out)

    def r2c(self) -> None:
        """Transform the last axis first, which halves it; the others are complex from then on."""
        out, last = self.output, self.axes[-1]
        others = tuple(axis for axis in self.nontrivial_axes if axis != last)
        if last not in self.nontrivial_axes:  # the spectrum of one real number is that number
            target, chain = out, transform_chain(others, out, out)
            if chain is None:
                target = self.dense(out.dtype, out.shape)
                chain = transform_chain(others, target, target, most=ANY)
            self.read(target, factor=self.factor)
            self.transform(checked_chain(chain), forward=self.forward)
            if target is not out:
                self.move(target, out)
            return
        source, factor = self.input, self.factor
        real = next(real for real, spectrum in COMPLEX.items() if spectrum is out.dtype)
        target, chain = out, None
        if self.is_direct and source.dtype is real:
            chain = transform_chain(others, source, out, last)
        if chain is None:
            copy = self.dense(real, self.request.read)
            self.read(copy, factor=factor)
            source, factor = copy, 1.0
            chain = transform_chain(others, source, out, last)
        if chain is None:
            target = self.dense(out.dtype, out.shape)
            chain = transform_chain(others, source, target, last, most=ANY)
        self.transform(checked_chain(chain), forward=True)
        if target is not out or factor != 1 or self.request.inverse:
            self.move(target, out, factor=factor, conj=self.request.inverse)

    def c2r(self) -> None:
        """Transform the last axis at the end, to its full size; the input is a copy, multiplied by the factor."""
        out, last = self.output, self.axes[-1]
        others = tuple(axis for axis in self.nontrivial_axes if axis != last)
        copy = self.dense(COMPLEX[out.dtype], self.request.read)
        hermitian = Hermitian(last, self.request.points[-1], others)
        # The other sign of the exponent gives the conjugate: cuFFT's one direction serves both.
        self.read(copy, factor=self.factor, conj=not self.request.inverse, hermitian=hermitian)
        if last not in self.nontrivial_axes:
            if others:
                self.transform(checked_chain(transform_chain(others, copy, copy, most=ANY)), forward=False)
            self.move(copy, out)
            return
        target = out
        chain = None if has_room_between_lines(out, last) else chain_with_last(others, last, copy, out)
        if chain is None:
            target = self.dense(out.dtype, out.shape)
            chain = chain_with_last(others, last, copy, target)
        self.transform(checked_chain(chain), forward=False)
        if target is not out:
            self.move(target, out)

    def scale(self, view: View) -> None:
        """Multiply by the factor, if no earlier pass did."""
        if self.factor != 1:
            self.move(view, view, factor=self.factor)


def broadcast_strides(layout: Layout, request: DftRequest) -> View:
    """The factors in the axes of the operand, with a stride of 0 along axes that they do not have."""
    rank = request.a.ndim
    missing = rank - len(layout.shape)
    steps = (0 if extent == 1 else step for extent, step in zip(layout.shape, layout.strides, strict=True))
    view = view_of(layout, request.place_of("factors"))
    return view._replace(shape=request.a.shape, strides=(*(0,) * missing, *steps))


def chain_with_last(others: tuple[int, ...], last: int, copy: View, target: View) -> list[TransformSpec] | None:
    """Plans over all axes: in place in the copy, except the last plan, which writes to the target."""
    for count in range(min(RANK - 1, len(others)), -1, -1):
        before, within = others[: len(others) - count], others[len(others) - count :]
        spec = transform_spec((*within, last), copy, target)
        chain = transform_chain(before, copy, copy, most=ANY)
        if spec is not None and chain is not None:
            return [*chain, spec]
    return None


def has_room_between_lines(target: View, last: int) -> bool:
    """Whether lines of a real result begin so far apart that half a spectrum of complex numbers fits into each.

    C2R of cuFFT 12.0 uses lines as scratch memory where half a spectrum exactly fits (seen on an H200, over one axis
    and several): it overwrites what is between them and after the last one.
    """
    step, points = target.strides[last], target.shape[last]
    others = [axis for axis in range(len(target.shape)) if axis != last and target.shape[axis] > 1]
    pitches = [target.strides[axis] for axis in others if target.strides[axis] >= points * step]
    return bool(pitches) and min(pitches) >= 2 * (points // 2 + 1) * step


def checked_chain(chain: list[TransformSpec] | None) -> list[TransformSpec]:
    """The plans, which must exist: scratch memory is laid out so that every plan supports it."""
    if chain is None:
        raise WorkerFailed("cuFFT's plan refuses dense memory")
    return chain
