"""ActivationRequest and ActivationBwdRequest: a function of every element, and its gradient.

Making a request validates it, so that a bad one never comes near a library. This file calls nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from dispatch.core.operands import Made, OperandRequest, chosen, like, same_as
from dispatch.errors import BadRequest

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["ActivationBwdRequest", "ActivationMode", "ActivationRequest"]


class ActivationMode(IntEnum):
    """`cudnnActivationMode_t`, but IDENTITY, which only a convolution takes.

    SIGMOID 1 / (1 + e^-x), RELU max(x, 0), TANH, CLIPPED_RELU min(max(x, 0), coef), ELU x or coef · (e^x - 1) below 0,
    SWISH x · sigmoid(coef · x), which is SiLU for coef 1.
    """

    SIGMOID = 0
    RELU = 1
    TANH = 2
    CLIPPED_RELU = 3
    ELU = 4
    SWISH = 6


WITH_COEF = (ActivationMode.CLIPPED_RELU, ActivationMode.ELU, ActivationMode.SWISH)


def check_mode(mode: object, coef: object) -> None:
    """BadRequest for what is no mode, or a coefficient that it has no use for."""
    chosen("mode", mode, ActivationMode)
    if isinstance(coef, bool) or not isinstance(coef, (int, float)) or not math.isfinite(coef):
        raise BadRequest("coef", repr(coef), "a finite number")
    if coef != 1 and mode not in WITH_COEF:
        takers = ", ".join(taker.name for taker in WITH_COEF)
        raise BadRequest("coef", repr(coef), f"1, for {getattr(mode, 'name', mode)} has none", f"{takers} have one")
    if coef < 0:
        raise BadRequest("coef", repr(coef), "0 or more")


@dataclass(frozen=True, eq=False)
class ActivationRequest(OperandRequest):
    """y = f(x), element by element.

    Attributes:
        x: any shape, any strides above 0; without elements it gives a y without elements.
        mode: the function.
        coef: the ceiling of CLIPPED_RELU, the alpha of ELU, the beta of SWISH.
        out: y, of x's shape and dtype; it may be x itself. Left open, it lies in memory as x does, densely.
    """

    op: ClassVar[str] = "activation_fwd"
    reads: ClassVar[tuple[str, ...]] = ("x",)
    writes: ClassVar[tuple[str, ...]] = ("out",)
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "x")})

    x: Tensor
    mode: ActivationMode = ActivationMode.RELU
    coef: float = 1.0
    out: Tensor | None = None

    def check_fields(self) -> None:
        check_mode(self.mode, self.coef)

    def made(self) -> dict[str, Made]:
        return {"out": like(self.x.layout)}

    def choices(self) -> tuple[Any, ...]:
        return self.mode, float(self.coef)


@dataclass(frozen=True, eq=False)
class ActivationBwdRequest(OperandRequest):
    """dx = dy · f'(x), element by element: the gradient of `ActivationRequest`.

    Attributes:
        x: what the forward pass read.
        y: what it gave; which of the two is looked at depends on the mode.
        dy: the gradient of y. All three have one shape and dtype.
        mode, coef: those of the forward pass.
        out: dx, of x's shape and dtype; it may be dy itself. Left open, it lies in memory as x does, densely.
    """

    op: ClassVar[str] = "activation_bwd"
    reads: ClassVar[tuple[str, ...]] = ("x", "y", "dy")
    writes: ClassVar[tuple[str, ...]] = ("out",)
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "dy")})

    x: Tensor
    y: Tensor
    dy: Tensor
    mode: ActivationMode = ActivationMode.RELU
    coef: float = 1.0
    out: Tensor | None = None

    def check_fields(self) -> None:
        check_mode(self.mode, self.coef)
        same_as("y", self.y, "x", self.x)
        same_as("dy", self.dy, "x", self.x)

    def made(self) -> dict[str, Made]:
        return {"out": like(self.x.layout)}

    def choices(self) -> tuple[Any, ...]:
        return self.mode, float(self.coef)
