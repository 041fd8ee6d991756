"""Pooling over one, two or three axes of space, and its gradient: `pooling` and `pooling_bwd`.

Carried out by `cudnnPoolingForward` and `cudnnPoolingBackward`, or by NumPy. cuDNN pools over two axes of space or
three; one axis becomes two, of which the first has one element. Follows
https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-ops-library.html#cudnnpoolingforward.
"""

from __future__ import annotations

import ctypes
from dataclasses import KW_ONLY, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from cudabind._cached import cached_property
from cudabind.sys import cudnn
from dispatch.checks import check_int
from dispatch.core.axes import describable, gaps_left_open, strides_apart
from dispatch.core.host_plan import Results, exactly, largest, numpy_call, values
from dispatch.core.operand_checks import check_image, check_tensor
from dispatch.core.operands import OperandRequest, Output, like, same_as
from dispatch.core.request import IdlePlan
from dispatch.core.request_function import request_function
from dispatch.errors import BadRequest
from dispatch.keys import Choice, member
from dispatch.libraries.cudnn.calls import CallPlan, Operand, number
from dispatch.libraries.cudnn.tensors import Descriptor, tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.layout import Array, Layout
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = [
    "PoolingBwdRequest",
    "PoolingMode",
    "PoolingRequest",
    "pooling",
    "pooling_bwd",
]


Steps = int | tuple[int, ...]


class PoolingMode(Choice):
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
        check_image("x", x, 1, 3)
        axes = x.ndim - 2
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
        return tuple(check_int(name, one, low) for one in value)
    return (check_int(name, value, low),) * axes


@dataclass(frozen=True, eq=False)
class WindowedRequest(OperandRequest["Tensor"]):
    """What pooling and its gradient have in common.

    Attributes:
        x: (images, channels, space…), 1 to 3 axes of space; the strides say whether the channels come last. There may
            be no image, but there is a channel and an element of every axis of space.
        mode: MAX, AVERAGE_COUNT_INCLUDE_PADDING, AVERAGE_COUNT_EXCLUDE_PADDING or MAX_DETERMINISTIC.
        stride: from window to window; None takes the window's size.
        padding: on both sides of every axis, less than the window; what is there is never the largest.
    """

    x: Tensor
    _: KW_ONLY
    mode: PoolingMode | str = PoolingMode.MAX
    stride: Steps | None = None
    padding: Steps = 0
    out: Tensor | None = None

    @cached_property
    def windows(self) -> Windows:
        window: Any = getattr(self, "window")  # noqa: B009  # behind x for one, behind dy for the other
        return Windows.of(self.x, window, self.stride, self.padding)

    def check_fields(self) -> None:
        if 0 in self.x.shape[1:]:
            raise BadRequest("x", str(self.x.layout), "at least one channel and one element of every axis of space")
        self.windows.shape(self.x.shape)

    def attributes(self) -> tuple[Any, ...]:
        return self.windows, self.mode


@dataclass(frozen=True, eq=False)
class PoolingRequest(WindowedRequest):
    """y[…, i] = the largest, or the average, of x[…, i · stride - padding + (0 … window - 1)].

    Attributes:
        window: the size of a window, one number or one for each axis.
        out: y, (images, channels, (space + 2 · padding - window) // stride + 1). Left open, it lies as x does.
    """

    op: ClassVar[str] = "pooling"
    reads: ClassVar[tuple[str, ...]] = ("x",)
    window: Steps

    def outputs(self) -> dict[str, Output]:
        return {"out": like(self.x.layout, self.windows.shape(self.x.shape))}


@dataclass(frozen=True, eq=False)
class PoolingBwdRequest(WindowedRequest):
    """dx from dy: the gradient of `pooling`, added up where windows overlap.

    Attributes:
        x: what the forward pass read.
        y: what it gave.
        dy: the gradient of y, of y's shape, dtype and strides.
        window: that of the forward pass, as are mode, stride and padding.
        out: dx, of x's shape, dtype and strides. Left open, it lies in memory as x does, which then has no gaps.

    Where several elements of a window are the largest, the gradient goes to the first of them.
    """

    op: ClassVar[str] = "pooling_bwd"
    reads: ClassVar[tuple[str, ...]] = ("x", "y", "dy")
    y: Tensor
    dy: Tensor
    window: Steps

    def check_fields(self) -> None:
        super().check_fields()
        wanted = self.windows.shape(self.x.shape)
        check_tensor("y", self.y, self.x.dtype, wanted, ", what the forward pass gave")
        same_as("dy", self.dy, "y", self.y)


# -- rules of the rows: "needs …, has …", or "" where a request is fine -----------------------------------------------
def whole_max(request: PoolingRequest) -> str:
    """The averages of i8 are whole numbers, and no document says how they are rounded."""
    return (
        ""
        if member(request.mode).is_max
        else f"needs a mode of MAX or MAX_DETERMINISTIC for i8, has {member(request.mode).name}"
    )


def images(request: WindowedRequest) -> str:
    """Strides above 0."""
    return describable(*(request.layout_of(name) for name in (*request.reads, *request.writes)))


def pairs(request: PoolingBwdRequest) -> str:
    """The gradient of x laid out as x is, and that of y as y is."""
    return strides_apart(request, "y", "dy") or gaps_left_open(request, "x") or strides_apart(request, "x", "out")


# -- what is right, in NumPy: for rows of the host in their own precision, in f64 as the reference --------------------
def evaluate(request: WindowedRequest, work: np.dtype[Any]) -> Results:
    """The output of a request by name, computed in a working dtype."""
    if request.x.size == 0:
        return {"out": np.zeros(request.layout_of("out").shape, work)}
    if isinstance(request, PoolingBwdRequest):
        return {"out": backward(request, values(request.dy, work))}
    return {"out": forward(request, work)}


def _cut(x: Array, windows: Windows, fill: float) -> Array:
    """The windows of an image padded with a number: (images, channels, places…, window…)."""
    around = [(0, 0), (0, 0), *((pad, pad) for pad in windows.padding)]
    axes = tuple(range(2, x.ndim))
    cut = sliding_window_view(np.pad(x, around, constant_values=fill), windows.window, axis=axes)
    steps: Any = (..., *(slice(None, None, step) for step in windows.stride), *(slice(None),) * len(axes))
    return np.asarray(cut[steps])


def _counts(request: WindowedRequest, work: np.dtype[Any]) -> Array:
    """What the averages divide by, for every place: the window's size, or its elements that are in the image."""
    windows = request.windows
    if request.mode is PoolingMode.AVERAGE_COUNT_INCLUDE_PADDING:
        return np.asarray(np.prod(windows.window), work)
    inside = np.ones((1, 1, *request.x.shape[2:]), work)
    space = tuple(range(-len(windows.window), 0))
    return np.asarray(_cut(inside, windows, 0.0).sum(axis=space))


def forward(request: WindowedRequest, work: np.dtype[Any]) -> Array:
    """y."""
    x = values(request.x, work)
    space = tuple(range(-len(request.windows.window), 0))
    if member(request.mode).is_max:
        found = _cut(x, request.windows, -np.inf).max(axis=space)
        if request.x.dtype.numpy.kind == "i":
            return np.asarray(found)
        return np.asarray(np.maximum(found, work.type(-largest(request.x.dtype))))  # which cuDNN starts from; NaN stays
    return np.asarray(_cut(x, request.windows, 0.0).sum(axis=space) / _counts(request, work))


def backward(request: PoolingBwdRequest, dy: Array) -> Array:
    """dx: every place of y gives its share to each element of its window, or all of it to the first of the largest.

    NaN is larger than any number, and what pads the image is none of its elements.
    """
    windows, work = request.windows, dy.dtype
    axes = len(windows.window)
    if member(request.mode).is_max:
        x = values(request.x, work)
        cut, real = (_lines(_cut(one, windows, pad), axes) for one, pad in ((x, -np.inf), (np.ones_like(x), 0)))
        best = cut.max(axis=-1, keepdims=True)
        first = (((cut == best) | np.isnan(cut)) & (real > 0)).argmax(axis=-1)
    else:
        dy = dy / _counts(request, work)
    padded = [extent + 2 * pad for extent, pad in zip(request.x.shape[2:], windows.padding, strict=True)]
    dx = np.zeros((*request.x.shape[:2], *padded), work)
    for place, places in enumerate(_places(windows, dy.shape[2:])):
        dx[places] += np.where(first == place, dy, 0) if member(request.mode).is_max else dy
    inside = zip(request.x.shape[2:], windows.padding, strict=True)
    image: Any = (..., *(slice(pad, pad + extent) for extent, pad in inside))
    return np.asarray(dx[image])


def _lines(cut: Array, axes: int) -> Array:
    """Windows with all their elements along one axis."""
    return cut.reshape(*cut.shape[:-axes], int(np.prod(cut.shape[-axes:])))


def _places(windows: Windows, shape: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    """For each element of a window, where in the padded image it is for all places of y."""
    for offsets in product(*map(range, windows.window)):
        steps = zip(offsets, windows.stride, shape, strict=True)
        yield (..., *(slice(first, first + (count - 1) * step + 1, step) for first, step, count in steps))


# -- by cuDNN ---------------------------------------------------------------------------------------------------------
PROPAGATE = cudnn.cudnnNanPropagation_t.CUDNN_PROPAGATE_NAN


def cudnn_pooling(request: WindowedRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of either request; nothing is launched where there is no image."""
    if request.x.size == 0:
        return IdlePlan(row)
    dtype = request.x.dtype
    pool = _pooling(request.windows, member(request.mode))
    one, zero = number(1, dtype), number(0, dtype)
    if isinstance(request, PoolingBwdRequest):
        # One descriptor for a tensor and its gradient: cuDNN compares strides also where an axis has one element.
        x, y = (_image(request.layout_of(name)) for name in ("x", "y"))
        operands = (y, Operand(1), y, Operand(2), x, Operand(0), zero, x, Operand(3))
        return CallPlan(executor, row, cudnn.cudnnPoolingBackward, (pool, one, *operands))
    x, y = (_image(request.layout_of(name)) for name in ("x", "out"))
    return CallPlan(executor, row, cudnn.cudnnPoolingForward, (pool, one, x, Operand(0), zero, y, Operand(1)))


def _pooling(windows: Windows, mode: PoolingMode) -> Descriptor:
    more = len(windows.window) == 1
    ones, zeros = (1,) * more, (0,) * more
    axes = len(windows.window) + more
    kind = ctypes.c_int32 * axes
    made = Descriptor("Pooling")
    cudnn.cudnnSetPoolingNdDescriptor(
        *(made.handle, cudnn.cudnnPoolingMode_t(mode), PROPAGATE, axes),
        *(kind(*ones, *windows.window), kind(*zeros, *windows.padding), kind(*ones, *windows.stride)),
    )
    return made


def _image(layout: Layout) -> Descriptor:
    """The descriptor of an image, whose strides are at least 1."""
    shape, steps = list(layout.shape), list(layout.strides)
    if len(shape) == 3:  # one axis of space becomes two
        steps.insert(2, shape[2] * steps[2])
        shape.insert(2, 1)
    return tensor(layout.dtype, shape, [max(step, 1) for step in steps])


# -- what users call, and the rows ------------------------------------------------------------------------------------
reference = exactly(evaluate)
numpy_pooling = numpy_call(evaluate)
pooling = request_function(PoolingRequest, "pooling")
pooling_bwd = request_function(PoolingBwdRequest, "pooling_bwd")
