"""PoolingRequest and PoolingBwdRequest: the largest or the average of windows, and their gradient; 1D, 2D, 3D.

Making a request validates it, so that a bad one never comes near a library. This file calls nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from cudabind._cached import cached_property
from dispatch.core.operands import Made, OperandRequest, chosen, like, same_as, whole
from dispatch.errors import BadRequest

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["PoolingBwdRequest", "PoolingMode", "PoolingRequest", "Steps", "Windows"]

Steps = int | tuple[int, ...]


class PoolingMode(IntEnum):
    """`cudnnPoolingMode_t`: what becomes of the elements of a window.

    The averages divide by the window's size, or by how many of its elements are in the image. MAX_DETERMINISTIC is MAX
    whose gradient is summed in the same order every time.
    """

    MAX = 0
    AVERAGE_COUNT_INCLUDE_PADDING = 1
    AVERAGE_COUNT_EXCLUDE_PADDING = 2
    MAX_DETERMINISTIC = 3

    @property
    def is_max(self) -> bool:
        return self in (PoolingMode.MAX, PoolingMode.MAX_DETERMINISTIC)


@dataclass(frozen=True)
class Windows:
    """Window, stride and padding with one number for each axis of space."""

    window: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor, window: Steps, stride: Steps | None, padding: Steps) -> Windows:
        """The windows over an image, or BadRequest where they do not fit it."""
        axes = x.ndim - 2
        if not 1 <= axes <= 3:
            raise BadRequest("x", str(x.layout), "(images, channels, 1 to 3 axes of space)", "x[None] adds an axis")
        windows = _spread("window", window, axes, 1)
        strides = windows if stride is None else _spread("stride", stride, axes, 1)
        pads = _spread("padding", padding, axes, 0)
        for extent, size, pad in zip(x.shape[2:], windows, pads, strict=True):
            if pad >= size:
                raise BadRequest("padding", str(pads), f"less than the window {windows}, or some would hold no element")
            if extent + 2 * pad < size:
                raise BadRequest("window", str(windows), f"no larger than the padded image {x.layout}, padding {pads}")
        return cls(windows, strides, pads)

    def shape(self, x: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of y: windows that lie in the padded image, counted from its start."""
        steps = zip(x[2:], self.window, self.stride, self.padding, strict=True)
        return (*x[:2], *((extent + 2 * pad - size) // stride + 1 for extent, size, stride, pad in steps))


def _spread(name: str, value: object, axes: int, low: int) -> tuple[int, ...]:
    if isinstance(value, tuple):
        if len(value) != axes:
            raise BadRequest(name, str(value), f"a number, or one for each of {axes} axes of space")
        return tuple(whole(name, number, low) for number in value)
    return (whole(name, value, low),) * axes


@dataclass(frozen=True, eq=False)
class PoolingRequest(OperandRequest):
    """y[…, i] = the largest, or the average, of x[…, i · stride - padding + (0 … window - 1)].

    Attributes:
        x: (images, channels, space…), 1 to 3 axes of space; the strides say whether the channels come last. There may
            be no image, but there is a channel and an element of every axis of space.
        window: the size of a window, one number or one for each axis.
        mode: MAX, AVERAGE_COUNT_INCLUDE_PADDING, AVERAGE_COUNT_EXCLUDE_PADDING or MAX_DETERMINISTIC.
        stride: from window to window; None takes the window's size.
        padding: on both sides of every axis, less than the window; what is there is never the largest.
        out: y, (images, channels, (space + 2 · padding - window) // stride + 1). Left open, it lies as x does.
    """

    op: ClassVar[str] = "pooling_fwd"
    reads: ClassVar[tuple[str, ...]] = ("x",)
    writes: ClassVar[tuple[str, ...]] = ("out",)

    x: Tensor
    window: Steps
    mode: PoolingMode = PoolingMode.MAX
    stride: Steps | None = None
    padding: Steps = 0
    out: Tensor | None = None

    @cached_property
    def windows(self) -> Windows:
        return Windows.of(self.x, self.window, self.stride, self.padding)

    def check_fields(self) -> None:
        chosen("mode", self.mode, PoolingMode)
        if 0 in self.x.shape[1:]:
            raise BadRequest("x", str(self.x.layout), "at least one channel and one element of every axis of space")
        self.windows.shape(self.x.shape)

    def made(self) -> dict[str, Made]:
        return {"out": like(self.x.layout, self.windows.shape(self.x.shape))}

    def choices(self) -> tuple[Any, ...]:
        return self.windows, self.mode


@dataclass(frozen=True, eq=False)
class PoolingBwdRequest(OperandRequest):
    """dx from dy: the gradient of `PoolingRequest`, added up where windows overlap.

    Attributes:
        x: what the forward pass read.
        y: what it gave.
        dy: the gradient of y, of y's shape and dtype.
        window, mode, stride, padding: those of the forward pass.
        out: dx, of x's shape and dtype. Left open, it lies in memory as x does.

    Where several elements of a window are the largest, the gradient goes to the first of them.
    """

    op: ClassVar[str] = "pooling_bwd"
    reads: ClassVar[tuple[str, ...]] = ("x", "y", "dy")
    writes: ClassVar[tuple[str, ...]] = ("out",)

    x: Tensor
    y: Tensor
    dy: Tensor
    window: Steps
    mode: PoolingMode = PoolingMode.MAX
    stride: Steps | None = None
    padding: Steps = 0
    out: Tensor | None = None

    @cached_property
    def windows(self) -> Windows:
        return Windows.of(self.x, self.window, self.stride, self.padding)

    def check_fields(self) -> None:
        chosen("mode", self.mode, PoolingMode)
        if 0 in self.x.shape[1:]:
            raise BadRequest("x", str(self.x.layout), "at least one channel and one element of every axis of space")
        wanted = self.windows.shape(self.x.shape)
        if (self.y.shape, self.y.dtype) != (wanted, self.x.dtype):
            raise BadRequest("y", str(self.y.layout), f"{self.x.dtype}{list(wanted)}, what the forward pass gave")
        same_as("dy", self.dy, "y", self.y)

    def made(self) -> dict[str, Made]:
        return {"out": like(self.x.layout)}

    def choices(self) -> tuple[Any, ...]:
        return self.windows, self.mode
