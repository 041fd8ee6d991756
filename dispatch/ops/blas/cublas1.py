"""BLAS level 1 by cuBLAS: the routines for a request, and whether cuBLAS supports it.

The numbers that a routine computes, and those of a rotation, are on the device (pointer mode device), so no call waits.
Vectors of f16 and bf16 use the routines with dtype arguments, with a compute type of f32; none of these copies such
vectors, so a kernel does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.keys import F32, HALF
from dispatch.libraries.cublas.calls import MatrixCopy, Operand, Routine, Task, Zero, plan_of
from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer
from dispatch.ops.blas.arrangements import UnsupportedLayout, misalignment
from dispatch.ops.blas.cublas2 import Vectors

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["cublas_level1", "lower", "steps_fit"]


def steps_fit(request: Any) -> str:
    """Rule: vectors with layouts that cuBLAS supports."""
    try:
        lower(request)
    except UnsupportedLayout as misfit:
        return str(misfit)
    return ""


def cublas_level1(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request of level 1."""
    return plan_of(executor, row, lower(request))


def lower(request: Any) -> list[Task]:
    """The cuBLAS calls for a request, in order; UnsupportedLayout if cuBLAS does not support the operands."""
    lowering = Lowering(request)
    if request.op in ("rotg", "rotmg"):
        return lowering.make_rotation()
    if request.op in ("swap", "rot", "rotm"):
        return lowering.pair() if request.x.size else []
    if request.op in ("axpy", "scal", "copy"):
        return lowering.elementwise() if request.x.size else []
    return lowering.reduction()


class Lowering(Vectors):
    """Derives the routines' arguments from a request."""

    @property
    def is_half(self) -> bool:
        """Whether the routines with dtype arguments are used."""
        return self.dtype in HALF

    def operand(self, name: str) -> Operand:
        """A number, or a dense operand."""
        self.layout(name)
        return Operand(self.request.place_of(name))

    def typed(self, name: str) -> tuple[Any, ...]:
        """A vector as the arguments of routines with dtype arguments."""
        at, step = self.vector(name)
        return at, self.dtype.cuda, step

    def copy_to(self, name: str, target: str) -> Task:
        """A copy of a vector to the target that a routine overwrites, unless it is there."""
        place = self.request.place_of
        if not self.is_half:
            arguments = (self.request.x.size, *self.vector(name), *self.vector(target))
            return Routine("copy", self.dtype, arguments, (place(name), place(target)))
        matrices = []
        for one in (name, target):
            _, step = self.vector(one)
            matrices.append(Matrix(OperandPointer(place(one)), self.dtype, self.request.x.size, 1, step, 1))
        source, moved = matrices
        return MatrixCopy(source, moved)

    # -- by kind of routine ---------------------------------------------------------------------------------------
    def elementwise(self) -> list[Task]:
        """A vector computed from one or two others."""
        request, n = self.request, self.request.x.size
        if request.op == "copy":
            return [self.copy_to("x", "out")]
        alpha = self.number("alpha")
        first = self.copy_to("y" if request.op == "axpy" else "x", "out")
        out_at, step = self.vector("out")
        if request.op == "scal":  # it supports no negative step, and the order does not matter
            if self.is_half:
                arguments = (n, alpha, F32.cuda, out_at, self.dtype.cuda, abs(step), F32.cuda)
                return [first, Routine("ScalEx", self.dtype, arguments)]
            return [first, Routine("scal", self.dtype, (n, alpha, out_at, abs(step)))]
        if self.is_half:
            arguments = (n, alpha, F32.cuda, *self.typed("x"), *self.typed("out"), F32.cuda)
            return [first, Routine("AxpyEx", self.dtype, arguments)]
        return [first, Routine("axpy", self.dtype, (n, alpha, *self.vector("x"), out_at, step))]

    def reduction(self) -> list[Task]:
        """A number computed from one or two vectors."""
        request, n, out = self.request, self.request.x.size, self.request.layout_of("out")
        if text := misalignment(out):
            raise UnsupportedLayout(f"out: {text}")
        place = request.place_of("out")
        if n == 0:
            return [Zero(place, out.dtype.itemsize)]
        x_at, step = self.vector("x")
        if request.op in ("iamax", "iamin") and step < 0:
            raise UnsupportedLayout(f"needs x with a stride above 0, has {request.x.layout}: copy it")
        result = Operand(place)
        if self.is_half:
            dtype = self.dtype.cuda
            if request.op == "nrm2":
                routine, vectors = "Nrm2Ex", (x_at, dtype, abs(step))
            else:
                routine, vectors = "DotEx", (*self.typed("x"), *self.typed("y"))
            return [Routine(routine, self.dtype, (n, *vectors, result, dtype, F32.cuda), on_device=True)]
        # For a single vector with a negative step BLAS reads no element; the sum is the same forwards.
        both = (x_at, step, *self.vector("y")) if "y" in request.reads else (x_at, abs(step))
        return [Routine(request.op, self.dtype, (n, *both, result), on_device=True)]

    def pair(self) -> list[Task]:
        """Two vectors computed from two others, in their memory or in copies that are made first."""
        request, n = self.request, self.request.x.size
        first = [self.copy_to("x", "out_x"), self.copy_to("y", "out_y")]
        vectors = (*self.vector("out_x"), *self.vector("out_y"))
        if request.op == "swap":
            return [*first, Routine("swap", self.dtype, (n, *vectors))]
        if request.op == "rotm":
            return [*first, Routine("rotm", self.dtype, (n, *vectors, self.operand("param")), on_device=True)]
        numbers = (self.operand("c"), self.operand("s"))
        if self.is_half:
            vectors = (*self.typed("out_x"), *self.typed("out_y"))
            arguments = (n, *vectors, *numbers, self.dtype.cuda, F32.cuda)
            return [*first, Routine("RotEx", self.dtype, arguments, on_device=True)]
        routine = "rot"
        if self.dtype.is_complex and not request.s.dtype.is_complex:
            routine = "srot" if self.real is F32 else "drot"
        return [*first, Routine(routine, self.dtype, (n, *vectors, *numbers), on_device=True)]

    def make_rotation(self) -> list[Task]:
        """The numbers of a rotation."""
        request, size = self.request, self.dtype.itemsize
        targets = {"a": "r", "b": "z"} if request.op == "rotg" else {"d1": "out_d1", "d2": "out_d2", "x1": "out_x1"}
        pairs = (
            [Matrix(OperandPointer(request.place_of(one)), self.dtype, 1, 1, 1, 1) for one in pair]
            for pair in targets.items()
        )
        copied = [MatrixCopy(source, target) for source, target in pairs]
        changed = [self.operand(name) for name in targets.values()]
        if request.op == "rotmg":
            arguments = (*changed, self.operand("y1"), self.operand("param"))
            zeroed = Zero(request.place_of("param"), 5 * size)  # the flag says which elements are written
            return [*copied, zeroed, Routine("rotmg", self.dtype, arguments, on_device=True)]
        arguments = (*changed, self.operand("c"), self.operand("s"))
        # The result for a complex b is unspecified.
        behind = copied[1:] if self.dtype.is_complex else []
        return [*copied, Routine("rotg", self.dtype, arguments, on_device=True), *behind]
