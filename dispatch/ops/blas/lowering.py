"""What requests of all levels have in common in the terms of cuBLAS: factors, and what is done to an operand."""

from __future__ import annotations

from typing import Any

from dispatch.keys import C128, F32, F64, Dtype
from dispatch.libraries.cublas.calls import Scalar
from dispatch.ops.blas.choices import Operation

__all__ = ["BaseLowering"]

N, T, C = Operation.N, Operation.T, Operation.C


class BaseLowering:
    """A request whose routines' arguments are to be said."""

    def __init__(self, request: Any) -> None:
        self.request = request
        self.dtype: Dtype = getattr(request, request.reads[0]).dtype

    def number(self, name: str) -> Scalar:
        """A factor."""
        is_real = name in self.request.real or not self.dtype.is_complex
        return Scalar(self.number_index(name), self.real if is_real else self.dtype)

    def number_index(self, name: str) -> int:
        """Where a factor stands in the arguments of a run."""
        request = self.request
        place: int = len(request.reads) + len(request.writes) + request.numbers.index(name)
        return place

    @property
    def real(self) -> Dtype:
        """The dtype of real factors: of half precision f32, in which is computed."""
        return F64 if self.dtype in (F64, C128) else F32

    def operation(self, trans: Operation, *, turn: bool, turned: Operation = T) -> int:
        """What is to be done to an operand, that or the other where it lies otherwise than that asks for."""
        trans = T if trans is C and not self.dtype.is_complex else trans
        if not turn:
            return int(trans)
        return int(turned if trans is N else N)
