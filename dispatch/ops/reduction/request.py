"""ReduceRequest: axes, reduction, with or without indices. It is validated when made; this file calls no library."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cudabind._cached import cached_property
from dispatch.checks import check_int
from dispatch.core.operands import OperandRequest, Output, dense
from dispatch.core.request import R_co
from dispatch.errors import BadRequest
from dispatch.keys import U32, Choice, Dtype, member

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["WITH_INDICES", "ReduceOp", "ReduceRequest"]


class ReduceOp(Choice):
    """`cudnnReduceTensorOp_t`: the kinds of reductions.

    ADD Σ x, MUL Π x, MIN, MAX, AMAX max |x|, AVG the mean, NORM1 Σ |x|, NORM2 √Σ x², MUL_NO_ZEROS Π x without zeros.
    """

    ADD = 0
    MUL = 1
    MIN = 2
    MAX = 3
    AMAX = 4
    AVG = 5
    NORM1 = 6
    NORM2 = 7
    MUL_NO_ZEROS = 8

    @staticmethod
    def other_names() -> dict[str, str]:
        return {"SUM": "ADD", "PROD": "MUL", "MEAN": "AVG", "AVERAGE": "AVG", "L1": "NORM1", "L2": "NORM2"}


WITH_INDICES = (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AMAX)


@dataclass(frozen=True, eq=False)
class ReduceRequest(OperandRequest[R_co]):
    """out = x reduced over some of its axes.

    On a GPU the last bits of AVG and NORM1 into f32 may differ from run to run: cuDNN (9.19, H200) adds up partial sums
    in the order in which they are completed.

    Attributes:
        x: any shape, any positive strides; no reduced axis is empty.
        axes: the axes that are reduced, as numbers; None for all, () for none.
        reduce: the reduction.
        keepdims: whether the reduced axes stay, with one element.
        indices: MIN, MAX and AMAX only: return the index of the element, too, in row-major order over the reduced axes;
            the first of equal elements.
        out_dtype: None for the dtype of x, which is possible for f64, f32 and f16; f32 for f16 whose sums are not to be
            rounded to f16, and always for i8 and bf16. bf16 supports ADD, AVG and NORM1, over the rows or the columns
            of memory that is a dense matrix; any reduction over axes of one element.
        out: of x's shape without the reduced axes; with `indices`, out and index are dense in C order.
        index: u32, of the shape of `out`.

    Returns `out`, with `indices` (out, index).
    """

    op: ClassVar[str] = "reduce"
    reads: ClassVar[tuple[str, ...]] = ("x",)
    writes: ClassVar[tuple[str, ...]] = ("out", "index")

    x: Tensor
    axes: int | tuple[int, ...] | None = None
    _: KW_ONLY
    reduce: ReduceOp | str = ReduceOp.ADD
    keepdims: bool = False
    indices: bool = False
    out_dtype: Any = None
    out: Tensor | None = None
    index: Tensor | None = None

    def check_fields(self) -> None:
        if self.indices and self.reduce not in WITH_INDICES:
            takers = ", ".join(taker.name for taker in WITH_INDICES)
            raise BadRequest(
                "indices",
                "True",
                f"False, because the result of {member(self.reduce).name} is not an element of x",
                f"use {takers}",
            )
        self._check_axes()
        if any(self.x.shape[axis] == 0 for axis in self.reduced):
            raise BadRequest("x", str(self.x.layout), "at least one element along every axis that is reduced")

    def _check_axes(self) -> None:
        if self.axes is None:
            return
        axes = self.axes if isinstance(self.axes, tuple) else (self.axes,)
        rank = self.x.ndim
        for axis in axes:
            if rank == 0:
                raise BadRequest("axes", repr(self.axes), "none, because x has no axes", "use axes=None")
            check_int("axes", axis, -rank, rank - 1)
        if len({axis % rank for axis in axes}) < len(axes):
            raise BadRequest("axes", repr(self.axes), "each axis once")

    @cached_property
    def reduced(self) -> tuple[int, ...]:
        """The reduced axes, in order."""
        rank = self.x.ndim
        if self.axes is None:
            return tuple(range(rank))
        axes = self.axes if isinstance(self.axes, tuple) else (self.axes,)
        return tuple(sorted(axis % rank for axis in axes))

    def outputs(self) -> dict[str, Output]:
        extents = [1 if axis in self.reduced else extent for axis, extent in enumerate(self.x.shape)]
        shape = tuple(extent for axis, extent in enumerate(extents) if self.keepdims or axis not in self.reduced)
        dtype = self.x.dtype if self.out_dtype is None else Dtype.of(self.out_dtype)
        if self.out_dtype is None and self.out is not None:
            dtype = self.out.dtype
        outputs = {"out": dense(shape, dtype)}
        if self.indices:
            outputs["index"] = dense(shape, U32)
        return outputs

    def attributes(self) -> tuple[Any, ...]:
        return self.reduced, self.reduce, self.keepdims, self.indices, self._outputs["out"].dtype.name
