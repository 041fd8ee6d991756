"""Discrete Fourier transforms by cuFFT: plans of `cudabind.sys.cufft` calls, with as few passes around them as can be.

Strided operands go to cuFFT as they lie, wherever its advanced layout states them. A pass before a transform turns real
numbers into complex ones, fills up with zeros, and makes half a spectrum one of real numbers, in memory of its own:
C2R overwrites what it reads. Such a pass has the factor and those of
the elements, too; without one the factor is a pass behind. More than three axes,
and axes whose strides are no multiples of each other, are several transforms one after another. Follows
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
ANY = 2**62  # calls: in memory of our own no copy would take fewer


def plan(request: DftRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; none of its steps reads or writes anything where there is no element."""
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
        )  # of one is itself
        self.wanted = view_of(request.layout_of("out"), request.place_of("out"))
        self.given = view_of(request.layout_of("a"), request.place_of("a")).cropped(request.read)
        self.factors = None if request.factors is None else broadcast_strides(request.layout_of("factors"), request)
        # Whether cuFFT may read what is given: nothing is to be filled up or multiplied.
        self.is_direct = self.given.shape == request.read and self.factors is None

    def dense(self, dtype: Dtype, shape: tuple[int, ...]) -> View:
        """Scratch memory that any plan takes."""
        return self.scratch(dtype, shape, self.axes)

    def read(self, target: View, **choices: Any) -> None:
        """Copy what is given, with its factors."""
        self.move(self.given, target, factors=self.factors, **choices)

    def c2c(self) -> None:
        """From where it lies to where it is wanted; else it is copied there first, or both are copies."""
        wanted = self.wanted
        if not self.nontrivial_axes:
            self.read(wanted, factor=self.factor)
            return
        # Where the two are one, both are copied or none is: they lie alike.
        chain = None
        if self.is_direct and self.given.dtype is wanted.dtype:
            chain = transform_chain(self.nontrivial_axes, self.given, wanted)
        if chain is not None:
            self.transform(chain, forward=self.forward)
            self.scale(wanted)
            return
        chain, made = transform_chain(self.nontrivial_axes, wanted, wanted), wanted
        if chain is None:
            made = self.dense(wanted.dtype, wanted.shape)
            chain = transform_chain(self.nontrivial_axes, made, made, most=ANY)
        self.read(made, factor=self.factor)
        self.transform(checked_chain(chain), forward=self.forward)
        if made is not wanted:
            self.move(made, wanted)

    def r2c(self) -> None:
        """Halve the last axis first; the others are complex from then on."""
        wanted, last = self.wanted, self.axes[-1]
        others = tuple(axis for axis in self.nontrivial_axes if axis != last)
        if last not in self.nontrivial_axes:  # the spectrum of one real number is that number
            made, chain = wanted, transform_chain(others, wanted, wanted)
            if chain is None:
                made = self.dense(wanted.dtype, wanted.shape)
                chain = transform_chain(others, made, made, most=ANY)
            self.read(made, factor=self.factor)
            self.transform(checked_chain(chain), forward=self.forward)
            if made is not wanted:
                self.move(made, wanted)
            return
        given, factor = self.given, self.factor
        real = next(real for real, spectrum in COMPLEX.items() if spectrum is wanted.dtype)
        made, chain = wanted, None
        if self.is_direct and given.dtype is real:
            chain = transform_chain(others, given, wanted, last)
        if chain is None:
            copy = self.dense(real, self.request.read)
            self.read(copy, factor=factor)
            given, factor = copy, 1.0
            chain = transform_chain(others, given, wanted, last)
        if chain is None:
            made = self.dense(wanted.dtype, wanted.shape)
            chain = transform_chain(others, given, made, last, most=ANY)
        self.transform(checked_chain(chain), forward=True)
        if made is not wanted or factor != 1 or self.request.inverse:
            self.move(made, wanted, factor=factor, conj=self.request.inverse)

    def c2r(self) -> None:
        """Halves are made whole along the last axis at the end; what is read is a copy, with the factor."""
        wanted, last = self.wanted, self.axes[-1]
        others = tuple(axis for axis in self.nontrivial_axes if axis != last)
        copy = self.dense(COMPLEX[wanted.dtype], self.request.read)
        hermitian = Hermitian(last, self.request.points[-1], others)
        # With the other sign the result is that of the conjugate: one transform of cuFFT's is both.
        self.read(copy, factor=self.factor, conj=not self.request.inverse, hermitian=hermitian)
        if last not in self.nontrivial_axes:
            if others:
                self.transform(checked_chain(transform_chain(others, copy, copy, most=ANY)), forward=False)
            self.move(copy, wanted)
            return
        made = wanted
        chain = chain_with_last(others, last, copy, wanted)
        if chain is None:
            made = self.dense(wanted.dtype, wanted.shape)
            chain = chain_with_last(others, last, copy, made)
        self.transform(checked_chain(chain), forward=False)
        if made is not wanted:
            self.move(made, wanted)

    def scale(self, view: View) -> None:
        """The factor, where no pass before had it."""
        if self.factor != 1:
            self.move(view, view, factor=self.factor)


def broadcast_strides(layout: Layout, request: DftRequest) -> View:
    """Factors with the axes of the operand, a stride of 0 along those that they have not."""
    rank = request.a.ndim
    missing = rank - len(layout.shape)
    steps = (0 if extent == 1 else step for extent, step in zip(layout.shape, layout.strides, strict=True))
    view = view_of(layout, request.place_of("factors"))
    return view._replace(shape=request.a.shape, strides=(*(0,) * missing, *steps))


def chain_with_last(others: tuple[int, ...], last: int, copy: View, target: View) -> list[TransformSpec] | None:
    """Plans over all axes: within the copy along those that the last one, into the target, does not have."""
    for count in range(min(RANK - 1, len(others)), -1, -1):
        before, within = others[: len(others) - count], others[len(others) - count :]
        found = transform_spec((*within, last), copy, target)
        chain = transform_chain(before, copy, copy, most=ANY)
        if found is not None and chain is not None:
            return [*chain, found]
    return None


def checked_chain(chain: list[TransformSpec] | None) -> list[TransformSpec]:
    """Plans that are there: dense memory of our own is spec so that any plan takes it."""
    if chain is None:
        raise WorkerFailed("cuFFT's plans do not take dense memory")
    return chain
