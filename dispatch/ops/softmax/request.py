"""SoftmaxRequest and SoftmaxBwdRequest: softmax and log-softmax along one axis, and their gradient.

Making a request validates it, so that a bad one never comes near a library. This file calls nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from dispatch.core.operands import Made, OperandRequest, chosen, like, same_as, whole
from dispatch.errors import BadRequest

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["SoftmaxAlgorithm", "SoftmaxBwdRequest", "SoftmaxRequest"]


class SoftmaxAlgorithm(IntEnum):
    """`cudnnSoftmaxAlgorithm_t`: FAST subtracts no largest first and so overflows early; LOG is log-softmax."""

    FAST = 0
    ACCURATE = 1
    LOG = 2


def check_axis(axis: object, tensor: Tensor, name: str) -> None:
    """BadRequest unless a tensor has an axis of this number."""
    if tensor.ndim == 0:
        raise BadRequest(name, str(tensor.layout), "one axis or more", "x[None] adds one")
    whole("axis", axis, -tensor.ndim, tensor.ndim - 1)


@dataclass(frozen=True, eq=False)
class SoftmaxRequest(OperandRequest):
    """y = softmax(x) or log(softmax(x)) along one axis.

    Attributes:
        x: any shape of one axis or more, any strides above 0; without elements it gives a y without elements.
        axis: the axis that sums to 1.
        algorithm: ACCURATE, FAST or LOG.
        out: y, of x's shape and dtype; it may be x itself. Left open, it lies in memory as x does, densely.
    """

    op: ClassVar[str] = "softmax_fwd"
    reads: ClassVar[tuple[str, ...]] = ("x",)
    writes: ClassVar[tuple[str, ...]] = ("out",)
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "x")})

    x: Tensor
    axis: int = -1
    algorithm: SoftmaxAlgorithm = SoftmaxAlgorithm.ACCURATE
    out: Tensor | None = None

    def check_fields(self) -> None:
        check_axis(self.axis, self.x, "x")
        chosen("algorithm", self.algorithm, SoftmaxAlgorithm)

    def made(self) -> dict[str, Made]:
        return {"out": like(self.x.layout)}

    def choices(self) -> tuple[Any, ...]:
        return self.axis % self.x.ndim, self.algorithm


@dataclass(frozen=True, eq=False)
class SoftmaxBwdRequest(OperandRequest):
    """dx from y = softmax(x) (or its logarithm) and dy: the gradient of `SoftmaxRequest`.

    Attributes:
        y: what the forward pass gave.
        dy: the gradient of y, of y's shape and dtype.
        axis, algorithm: those of the forward pass.
        out: dx, of y's shape and dtype; it may be dy itself. Left open, it lies in memory as y does, densely.
    """

    op: ClassVar[str] = "softmax_bwd"
    reads: ClassVar[tuple[str, ...]] = ("y", "dy")
    writes: ClassVar[tuple[str, ...]] = ("out",)
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "dy")})

    y: Tensor
    dy: Tensor
    axis: int = -1
    algorithm: SoftmaxAlgorithm = SoftmaxAlgorithm.ACCURATE
    out: Tensor | None = None

    def check_fields(self) -> None:
        check_axis(self.axis, self.y, "y")
        same_as("dy", self.dy, "y", self.y)
        chosen("algorithm", self.algorithm, SoftmaxAlgorithm)

    def made(self) -> dict[str, Made]:
        return {"out": like(self.y.layout)}

    def choices(self) -> tuple[Any, ...]:
        return self.axis % self.y.ndim, self.algorithm
