"""Pooling over one, two or three spatial axes, and its gradient: `pooling` and `pooling_bwd`.

They run on `cudnnPoolingForward` and `cudnnPoolingBackward`, or on NumPy. cuDNN pools over two or three spatial axes; a
single axis becomes two, the first of which has extent 1. Follows
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
    """`cudnnPoolingMode_t`: how the elements of a window are reduced.

    The averages divide by the window's size, or by the number of its elements that are in the image. MAX_DETERMINISTIC
    is MAX with a gradient that is summed in the same order every time.
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
    """Window, stride and padding with one number for each spatial axis."""

    window: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor, window: Steps, stride: Steps | None, padding: Steps) -> Windows:
        """The windows over an image; BadRequest if they do not fit it."""
        check_image("x", x, 1, 3)
        axes = x.ndim - 2
        windows = _spread("window", window, axes, 1)
        strides = windows if stride is None else _spread("stride", stride, axes, 1)
        pads = _spread("padding", padding, axes, 0)
        for extent, size, pad in zip(x.shape[2:], windows, pads, strict=True):
            if pad >= size:
                raise BadRequest(
                    "padding", str(pads), f"less than the window {windows}, or some windows would contain no element"
                )
            if extent + 2 * pad < size:
                raise BadRequest("window", str(windows), f"at most the padded image {x.layout}, padding {pads}")
        return cls(windows, strides, pads)

    def shape(self, x: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of y: the number of windows in the padded image, counted from its start."""
        axes = zip(x[2:], self.window, self.stride, self.padding, strict=True)
        return (*x[:2], *((extent + 2 * pad - size) // stride + 1 for extent, size, stride, pad in axes))


def _spread(name: str, value: object, axes: int, low: int) -> tuple[int, ...]:
    if isinstance(value, tuple):
        if len(value) != axes:
            raise BadRequest(name, str(value), f"a number, or one for each of {axes} spatial axes")
        return tuple(check_int(name, one, low) for one in value)
    return (check_int(name, value, low),) * axes


@dataclass(frozen=True, eq=False)
class WindowedRequest(OperandRequest["Tensor"]):
    """The fields and checks that pooling and its gradient share.

    Attributes:
        x: (images, channels, space…), 1 to 3 spatial axes, with channels first or last in memory, according to its
            strides. There may be no image, but at least one channel and one element along every spatial axis.
        mode: MAX, AVERAGE_COUNT_INCLUDE_PADDING, AVERAGE_COUNT_EXCLUDE_PADDING or MAX_DETERMINISTIC.
        stride: the distance between windows; None takes the window's size.
        padding: on both sides of every axis, less than the window; padding is never the largest element.
    """

    x: Tensor
    _: KW_ONLY
    mode: PoolingMode | str = PoolingMode.MAX
    stride: Steps | None = None
    padding: Steps = 0
    out: Tensor | None = None

    @cached_property
    def windows(self) -> Windows:
        window: Any = getattr(self, "window")  # noqa: B009  # after x in one request, after dy in the other
        return Windows.of(self.x, window, self.stride, self.padding)

    def check_fields(self) -> None:
        if 0 in self.x.shape[1:]:
            raise BadRequest(
                "x", str(self.x.layout), "at least one channel, and at least one element along each spatial axis"
            )
        self.windows.shape(self.x.shape)

    def attributes(self) -> tuple[Any, ...]:
        return self.windows, self.mode


@dataclass(frozen=True, eq=False)
class PoolingRequest(WindowedRequest):
    """y[…, i] = the largest, or the average, of x[…, i · stride - padding + (0 … window - 1)].

    Attributes:
        window: the size of a window, one number or one for each axis.
        out: y, (images, channels, (space + 2 · padding - window) // stride + 1). None allocates one like x.
    """

    op: ClassVar[str] = "pooling"
    reads: ClassVar[tuple[str, ...]] = ("x",)
    window: Steps

    def outputs(self) -> dict[str, Output]:
        return {"out": like(self.x.layout, self.windows.shape(self.x.shape))}


@dataclass(frozen=True, eq=False)
class PoolingBwdRequest(WindowedRequest):
    """dx from dy: the gradient of `pooling`, summed where windows overlap.

    Attributes:
        x: the operand of the forward pass.
        y: its result.
        dy: the gradient of y, of y's shape, dtype and strides.
        window: that of the forward pass, as are mode, stride and padding.
        out: dx, of x's shape, dtype and strides. None allocates one with the layout of x, which must have no gaps then.

    If several elements of a window are the largest, the gradient goes to the first of them.
    """

    op: ClassVar[str] = "pooling_bwd"
    reads: ClassVar[tuple[str, ...]] = ("x", "y", "dy")
    y: Tensor
    dy: Tensor
    window: Steps

    def check_fields(self) -> None:
        super().check_fields()
        wanted = self.windows.shape(self.x.shape)
        check_tensor("y", self.y, self.x.dtype, wanted, ", like the output of the forward pass")
        same_as("dy", self.dy, "y", self.y)


# -- rules of the rows: "needs …, has …", or "" if a rule is met ------------------------------------------------------
def whole_max(request: PoolingRequest) -> str:
    """MAX modes only: the averages of i8 are whole numbers, and no document says how they are rounded."""
    return (
        ""
        if member(request.mode).is_max
        else f"needs a mode of MAX or MAX_DETERMINISTIC for i8, has {member(request.mode).name}"
    )


def images(request: WindowedRequest) -> str:
    """Strides are positive."""
    return describable(*(request.layout_of(name) for name in (*request.reads, *request.writes)))


def pairs(request: PoolingBwdRequest) -> str:
    """The gradients have the layouts of x and of y."""
    return strides_apart(request, "y", "dy") or gaps_left_open(request, "x") or strides_apart(request, "x", "out")


# -- in NumPy: for the host's rows in their own precision, and as the reference in f64 --------------------------------
def evaluate(request: WindowedRequest, work: np.dtype[Any]) -> Results:
    """The output of a request by name, computed in a working dtype."""
    if request.x.size == 0:
        return {"out": np.zeros(request.layout_of("out").shape, work)}
    if isinstance(request, PoolingBwdRequest):
        return {"out": backward(request, values(request.dy, work))}
    return {"out": forward(request, work)}


def _cut(x: Array, windows: Windows, fill: float) -> Array:
    """The windows of an image padded with a number: (images, channels, positions…, window…)."""
    around = [(0, 0), (0, 0), *((pad, pad) for pad in windows.padding)]
    axes = tuple(range(2, x.ndim))
    cut = sliding_window_view(np.pad(x, around, constant_values=fill), windows.window, axis=axes)
    slices: Any = (..., *(slice(None, None, step) for step in windows.stride), *(slice(None),) * len(axes))
    return np.asarray(cut[slices])


def _counts(request: WindowedRequest, work: np.dtype[Any]) -> Array:
    """The divisor of the average at every position: the window's size, or the number of its elements in the image."""
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
        maximum = _cut(x, request.windows, -np.inf).max(axis=space)
        if request.x.dtype.numpy.kind == "i":
            return np.asarray(maximum)
        return np.asarray(np.maximum(maximum, work.type(-largest(request.x.dtype))))  # cuDNN's initial value; NaN stays
    return np.asarray(_cut(x, request.windows, 0.0).sum(axis=space) / _counts(request, work))


def backward(request: PoolingBwdRequest, dy: Array) -> Array:
    """dx: every position of y adds its share to each element of its window, or all of it to the first largest one.

    NaN is larger than any number, and padding does not count as an element.
    """
    windows, work = request.windows, dy.dtype
    axes = len(windows.window)
    if member(request.mode).is_max:
        x = values(request.x, work)
        cut, real = (_lines(_cut(array, windows, pad), axes) for array, pad in ((x, -np.inf), (np.ones_like(x), 0)))
        best = cut.max(axis=-1, keepdims=True)
        first = (((cut == best) | np.isnan(cut)) & (real > 0)).argmax(axis=-1)
    else:
        dy = dy / _counts(request, work)
    padded = [extent + 2 * pad for extent, pad in zip(request.x.shape[2:], windows.padding, strict=True)]
    dx = np.zeros((*request.x.shape[:2], *padded), work)
    for element, places in enumerate(_places(windows, dy.shape[2:])):
        dx[places] += np.where(first == element, dy, 0) if member(request.mode).is_max else dy
    inside = zip(request.x.shape[2:], windows.padding, strict=True)
    image: Any = (..., *(slice(pad, pad + extent) for extent, pad in inside))
    return np.asarray(dx[image])


def _lines(cut: Array, axes: int) -> Array:
    """Windows with all their elements along one axis."""
    return cut.reshape(*cut.shape[:-axes], int(np.prod(cut.shape[-axes:])))


def _places(windows: Windows, shape: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    """For each element of a window, its index in the padded image for all positions of y."""
    for offsets in product(*map(range, windows.window)):
        axes = zip(offsets, windows.stride, shape, strict=True)
        yield (..., *(slice(first, first + (count - 1) * step + 1, step) for first, step, count in axes))


# -- with cuDNN -------------------------------------------------------------------------------------------------------
PROPAGATE = cudnn.cudnnNanPropagation_t.CUDNN_PROPAGATE_NAN


def cudnn_pooling(request: WindowedRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of either request; without images it launches nothing."""
    if request.x.size == 0:
        return IdlePlan(row)
    dtype = request.x.dtype
    pool = _pooling(request.windows, member(request.mode))
    one, zero = number(1, dtype), number(0, dtype)
    if isinstance(request, PoolingBwdRequest):
        # A tensor and its gradient share a descriptor: cuDNN compares strides even of axes with one element.
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
    descriptor = Descriptor("Pooling")
    cudnn.cudnnSetPoolingNdDescriptor(
        *(descriptor.handle, cudnn.cudnnPoolingMode_t(mode), PROPAGATE, axes),
        *(kind(*ones, *windows.window), kind(*zeros, *windows.padding), kind(*ones, *windows.stride)),
    )
    return descriptor


def _image(layout: Layout) -> Descriptor:
    """The descriptor of an image, with strides of at least 1."""
    shape, strides = list(layout.shape), list(layout.strides)
    if len(shape) == 3:  # one spatial axis becomes two
        strides.insert(2, shape[2] * strides[2])
        shape.insert(2, 1)
    return tensor(layout.dtype, shape, [max(step, 1) for step in strides])


# -- the public functions, and the calls of the rows ------------------------------------------------------------------
reference = exactly(evaluate)
numpy_pooling = numpy_call(evaluate)
pooling = request_function(PoolingRequest, "pooling")
pooling_bwd = request_function(PoolingBwdRequest, "pooling_bwd")
