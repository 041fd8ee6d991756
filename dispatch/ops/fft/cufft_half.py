"""Fourier transforms of numbers of 16 bits by cuFFT: with its 16-bit transforms where it has them, else in f32.

The result in f32 is rounded once. cuFFT's 16-bit transforms are for powers of 2, and real numbers must be contiguous.
Those of bf16 are not used: they round to 8 bits after each step, and a few such steps make an error of a percent.
Follows https://docs.nvidia.com/cuda/cufft/#half-precision-cufft-transforms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.errors import Refused
from dispatch.keys import BF16, C64, F32
from dispatch.libraries.cufft.layouts import CB32, COMPLEX, complex_view_of, dense_view, transform_chain, view_of
from dispatch.libraries.cufft.moves import Hermitian
from dispatch.libraries.cufft.steps import ALIGNMENT, Steps
from dispatch.logs import log
from dispatch.ops.fft.cufft import DftSteps, chain_with_last
from dispatch.ops.fft.request import DftKind

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.fft.half import HalfDftRequest

__all__ = ["plan"]


def plan(request: HalfDftRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; without elements it has no steps."""
    if not request.layout_of("out").size:
        return Steps(executor, row, 0).plan()
    try:
        steps = HalfSteps(request, executor, row)
        if steps.in_16_bits():
            return steps.plan()
    except Refused as refused:
        log("not in 16 bits", {"row": row.name, "cause": str(refused)})
    steps = HalfSteps(request, executor, row)
    steps.in_32_bits()
    return steps.plan()


class HalfSteps(DftSteps):
    """The steps of a request, whose operands are views; complex operands are views of pairs."""

    def __init__(self, request: HalfDftRequest, executor: CudaExecutor, row: Row) -> None:
        Steps.__init__(self, executor, row, 2)
        self.request, self.forward = request, not request.inverse
        self.axes, self.factor = request.transformed, request.factor
        self.nontrivial_axes = tuple(axis for axis, n in zip(self.axes, request.points, strict=True) if n > 1)
        first, second = request.layout_of("a"), request.layout_of("out")
        operand = view_of(first, 0) if request.kind == DftKind.R2C else complex_view_of(first, 0)
        self.out = view_of(second, 1) if request.kind == DftKind.C2R else complex_view_of(second, 1)
        self.input, self.output, self.factors = operand.cropped(request.read), self.out, None
        self.is_direct = self.input.shape == request.read

    def in_16_bits(self) -> bool:
        """Add the 16-bit transforms of cuFFT; False if it has none for the request."""
        request, last = self.request, self.axes[-1] if self.axes else -1
        if self.out.dtype in (BF16, CB32) or self.factor != 1 or not self.nontrivial_axes:
            return False
        if any(n & (n - 1) for n in request.points):
            return False
        others = tuple(axis for axis in self.nontrivial_axes if axis != last)
        if request.kind == DftKind.C2C:
            chain = transform_chain(self.nontrivial_axes, self.input, self.out) if self.is_direct else None
        elif last not in self.nontrivial_axes:
            return False
        elif request.kind == DftKind.R2C:
            dense = self.is_direct and self.input.strides[last] == 1
            chain = transform_chain(others, self.input, self.out, last) if dense and not request.inverse else None
        else:
            copy = dense_view(2, 0, COMPLEX[self.out.dtype], request.read, self.axes, ALIGNMENT)
            chain = chain_with_last(others, last, copy, self.out) if self.out.strides[last] == 1 else None
            if chain is not None:
                copy = self.dense(copy.dtype, request.read)
                hermitian = Hermitian(last, request.points[-1], others)
                self.read(copy, conj=not request.inverse, hermitian=hermitian)
                self.transform(chain, forward=False)
                return True
        if chain is None:
            return False
        self.transform(chain, forward=self.forward)
        return True

    def in_32_bits(self) -> None:
        """The steps of `dft` in f32 and c64, and one pass that rounds."""
        kind: Any = self.request.kind
        self.output = self.dense(F32 if kind == DftKind.C2R else C64, self.request.result_shape)
        {DftKind.C2C: self.c2c, DftKind.R2C: self.r2c, DftKind.C2R: self.c2r}[kind]()
        self.move(self.output, self.out)
