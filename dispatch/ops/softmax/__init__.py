"""Softmax and log-softmax along one axis, and their gradients: `softmax` and `softmax_bwd`.

Carried out by `cudnnSoftmaxForward` and `cudnnSoftmaxBackward`, or by NumPy. For cuDNN the axis becomes the channels of
a tensor of four or five axes, and the others, merged where memory allows it, the rest. Follows
https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-ops-library.html#cudnnsoftmaxforward.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from cudabind.sys import cudnn
from dispatch.checks import check_enum, check_int
from dispatch.core.axes import Axis, describable, gapless, merge, strides_apart
from dispatch.core.host_plan import EXACT, Results, numpy_call, values
from dispatch.core.operands import OperandRequest, Output, like, same_as
from dispatch.core.request_function import request_function
from dispatch.errors import BadRequest
from dispatch.libraries.cudnn.calls import CallPlan, NoOpPlan, Operand, number
from dispatch.libraries.cudnn.tensors import tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.layout import Layout
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cudnn.tensors import Descriptor

__all__ = [
    "SoftmaxAlgorithm",
    "SoftmaxBwdRequest",
    "SoftmaxRequest",
    "softmax",
    "softmax_bwd",
]


class SoftmaxAlgorithm(IntEnum):
    """`cudnnSoftmaxAlgorithm_t`: FAST subtracts no largest first and so overflows early; LOG is log-softmax."""

    FAST = 0
    ACCURATE = 1
    LOG = 2


def check_axis(axis: object, tensor: Tensor, name: str) -> None:
    """BadRequest unless a tensor has an axis of this number."""
    if tensor.ndim == 0:
        raise BadRequest(name, str(tensor.layout), "one axis or more", "x[None] adds one")
    check_int("axis", axis, -tensor.ndim, tensor.ndim - 1)


@dataclass(frozen=True, eq=False)
class SoftmaxRequest(OperandRequest["Tensor"]):
    """y = softmax(x) or log(softmax(x)) along one axis.

    Attributes:
        x: any shape of one axis or more, any strides above 0; without elements it gives a y without elements.
        axis: the axis that sums to 1.
        algorithm: ACCURATE, FAST or LOG.
        out: y, of x's shape and dtype; it may be x itself. Left open, it lies in memory as x does, densely.
    """

    op: ClassVar[str] = "softmax"
    reads: ClassVar[tuple[str, ...]] = ("x",)
    writes: ClassVar[tuple[str, ...]] = ("out",)
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "x")})

    x: Tensor
    _: KW_ONLY
    axis: int = -1
    algorithm: SoftmaxAlgorithm = SoftmaxAlgorithm.ACCURATE
    out: Tensor | None = None

    def check_fields(self) -> None:
        check_axis(self.axis, self.x, "x")
        check_enum("algorithm", self.algorithm, SoftmaxAlgorithm)

    def outputs(self) -> dict[str, Output]:
        return {"out": like(self.x.layout)}

    def attributes(self) -> tuple[Any, ...]:
        return self.axis % self.x.ndim, self.algorithm


@dataclass(frozen=True, eq=False)
class SoftmaxBwdRequest(OperandRequest["Tensor"]):
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
    _: KW_ONLY
    axis: int = -1
    algorithm: SoftmaxAlgorithm = SoftmaxAlgorithm.ACCURATE
    out: Tensor | None = None

    def check_fields(self) -> None:
        check_axis(self.axis, self.y, "y")
        same_as("dy", self.dy, "y", self.y)
        check_enum("algorithm", self.algorithm, SoftmaxAlgorithm)

    def outputs(self) -> dict[str, Output]:
        return {"out": like(self.y.layout)}

    def attributes(self) -> tuple[Any, ...]:
        return self.axis % self.y.ndim, self.algorithm


# -- rules of the rows: "needs …, has …", or "" where a request is fine -----------------------------------------------
MAX_OTHERS = 4  # images and three axes of space


def axes_of(layouts: Sequence[Layout], axis: int) -> tuple[Axis, list[Axis]]:
    """The axis that sums to 1, and the others, merged."""
    rank = len(layouts[0].shape)
    axes = merge(layouts, [place == axis % rank for place in range(rank)])
    summed = next((found for found in axes if found.group), Axis(1, (1,) * len(layouts), True))
    return summed, [found for found in axes if not found.group]


def four_axes(request: SoftmaxRequest | SoftmaxBwdRequest) -> str:
    """Strides above 0, and no more than four axes beside the one that sums to 1, once merged."""
    layouts = [request.layout_of(name) for name in (*request.reads, *request.writes)]
    if reason := describable(*layouts):
        return reason
    _, others = axes_of(layouts, request.axis)
    if len(others) > MAX_OTHERS:
        return f"needs at most {MAX_OTHERS} axes beside axis {request.axis} that do not merge, has {len(others)}"
    return ""


def one_dense_layout(request: SoftmaxRequest | SoftmaxBwdRequest) -> str:
    """All operands without gaps and laid out alike, their axes in any order.

    cuDNN takes others and goes by the strides of one of them, or by none (seen on an H200, 9.19: wrong numbers).
    """
    first, layout = request.reads[0], request.layout_of(request.reads[0])
    if reason := strides_apart(request, *request.reads, *request.writes):
        return reason
    return "" if gapless(layout) else f"needs {first} without gaps, has {layout}: copy it with dev.array(x.numpy())"


# -- what is right, in NumPy: for rows of the host in their own precision, in f64 as the reference --------------------
def evaluate(request: SoftmaxRequest | SoftmaxBwdRequest, work: np.dtype[Any]) -> Results:
    """The output of a request by name, computed in a working dtype."""
    return backward(request, work) if isinstance(request, SoftmaxBwdRequest) else forward(request, work)


def forward(request: SoftmaxRequest, work: np.dtype[Any]) -> Results:
    """y along the axis; the largest is subtracted first unless the algorithm is FAST."""
    x, axis = values(request.x, work), request.axis
    if request.x.size == 0:
        return {"out": x}
    if request.algorithm is not SoftmaxAlgorithm.FAST:
        x = x - x.max(axis=axis, keepdims=True)
    powers = np.exp(x)
    total = powers.sum(axis=axis, keepdims=True)
    if request.algorithm is SoftmaxAlgorithm.LOG:
        return {"out": x - np.log(total)}
    return {"out": powers / total}


def backward(request: SoftmaxBwdRequest, work: np.dtype[Any]) -> Results:
    """dx = y · (dy - Σ y · dy), or dy - exp(y) · Σ dy for the logarithm."""
    y, dy, axis = values(request.y, work), values(request.dy, work), request.axis
    if request.algorithm is SoftmaxAlgorithm.LOG:
        return {"out": dy - np.exp(y) * dy.sum(axis=axis, keepdims=True)}
    return {"out": y * (dy - (y * dy).sum(axis=axis, keepdims=True))}


def reference(request: SoftmaxRequest | SoftmaxBwdRequest) -> Results:
    """The output of a request in float64, by name."""
    return evaluate(request, EXACT)


# -- by cuDNN ---------------------------------------------------------------------------------------------------------
INSTANCE = cudnn.cudnnSoftmaxMode_t.CUDNN_SOFTMAX_MODE_INSTANCE

CHANNEL = cudnn.cudnnSoftmaxMode_t.CUDNN_SOFTMAX_MODE_CHANNEL


def cudnn_softmax(request: SoftmaxRequest | SoftmaxBwdRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of either request; nothing is launched where there is no element."""
    if request.layout_of("out").size == 0:
        return NoOpPlan(row)
    if isinstance(request, SoftmaxBwdRequest):
        return _backward(request, executor, row)
    return _forward(request, executor, row)


def _forward(request: SoftmaxRequest, executor: CudaExecutor, row: Row) -> Plan:
    mode, (x, y) = _describe((request.x.layout, request.layout_of("out")), request.axis)
    dtype = request.x.dtype
    arguments = (int(request.algorithm), mode, number(1, dtype), x, Operand(0), number(0, dtype), y, Operand(1))
    return CallPlan(executor, row, cudnn.cudnnSoftmaxForward, arguments)


def _backward(request: SoftmaxBwdRequest, executor: CudaExecutor, row: Row) -> Plan:
    layouts = (request.y.layout, request.dy.layout, request.layout_of("out"))
    mode, (y, dy, dx) = _describe(layouts, request.axis)
    dtype = request.y.dtype
    arguments = (
        *(int(request.algorithm), mode, number(1, dtype), y, Operand(0), dy, Operand(1)),
        *(number(0, dtype), dx, Operand(2)),
    )
    return CallPlan(executor, row, cudnn.cudnnSoftmaxBackward, arguments)


def _describe(layouts: Sequence[Layout], axis: int) -> tuple[int, list[Descriptor]]:
    """The mode, and a descriptor for each tensor."""
    summed, others = axes_of(layouts, axis)
    images, *space = others or [Axis(1, (1,) * len(layouts), False)]
    ordered = (images, summed, *space)
    descriptors = [
        tensor(layout.dtype, [axis.extent for axis in ordered], [axis.strides[number] for axis in ordered])
        for number, layout in enumerate(layouts)
    ]
    # Over the channels alone, or over all of an image: the same without axes of space, and the latter is faster.
    return (CHANNEL if space else INSTANCE), descriptors


# -- what users call, and the rows ------------------------------------------------------------------------------------
numpy_softmax = numpy_call(evaluate)
softmax = request_function(SoftmaxRequest, "softmax")
softmax_bwd = request_function(SoftmaxBwdRequest, "softmax_bwd")
