"""Shared parts of the lowering to cuBLAS for all levels: factors, and the operations on operands."""

from __future__ import annotations

from typing import Any

from dispatch.keys import C128, F32, F64, Dtype
from dispatch.libraries.cublas.calls import Scalar
from dispatch.ops.blas.choices import Operation

__all__ = ["BaseLowering"]

N, T, C = Operation.N, Operation.T, Operation.C


class BaseLowering:
    """Base class that derives cuBLAS arguments from a request."""

    def __init__(self, request: Any) -> None:
        self.request = request
        self.dtype: Dtype = getattr(request, request.reads[0]).dtype

    def number(self, name: str) -> Scalar:
        """A factor."""
        is_real = name in self.request.real or not self.dtype.is_complex
        return Scalar(self.number_index(name), self.real if is_real else self.dtype)

    def number_index(self, name: str) -> int:
        """The index of a factor in the arguments of a run."""
        request = self.request
        place: int = len(request.reads) + len(request.writes) + request.numbers.index(name)
        return place

    @property
    def real(self) -> Dtype:
        """The dtype of real factors: f32 for half precision, which is computed in f32."""
        return F64 if self.dtype in (F64, C128) else F32

    def operation(self, trans: Operation, *, turn: bool, turned: Operation = T) -> int:
        """The operation on an operand: `trans`, or with `turn` the one for the opposite memory order."""
        trans = T if trans is C and not self.dtype.is_complex else trans
        if not turn:
            return int(trans)
        return int(turned if trans is N else N)
