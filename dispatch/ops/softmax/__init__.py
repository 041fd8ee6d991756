"""Softmax and log-softmax along one axis, and their gradients: `softmax` and `softmax_bwd`.

They run on `cudnnSoftmaxForward` and `cudnnSoftmaxBackward`, or on NumPy. For cuDNN the axis becomes the channels of a
tensor of four or five axes; the other axes are merged where their strides allow it. Follows
https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-ops-library.html#cudnnsoftmaxforward.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from cudabind.sys import cudnn
from dispatch.checks import check_int
from dispatch.core.axes import Axis, describable, gapless, merge, strides_apart
from dispatch.core.host_plan import Results, exactly, numpy_call, values
from dispatch.core.operands import OperandRequest, same_as_first
from dispatch.core.request import IdlePlan
from dispatch.core.request_function import request_function
from dispatch.errors import BadRequest
from dispatch.keys import Choice
from dispatch.libraries.cudnn.calls import CallPlan, Operand, number
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


class SoftmaxAlgorithm(Choice):
    """`cudnnSoftmaxAlgorithm_t`: FAST does not subtract the maximum, so it overflows early; LOG is log-softmax."""

    FAST = 0
    ACCURATE = 1
    LOG = 2


@dataclass(frozen=True, eq=False)
class AlongAxisRequest(OperandRequest["Tensor"]):
    """The fields and checks that softmax and its gradient share.

    Attributes:
        axis: the axis that sums to 1.
        algorithm: ACCURATE, FAST or LOG.
    """

    _: KW_ONLY
    axis: int = -1
    algorithm: SoftmaxAlgorithm | str = SoftmaxAlgorithm.ACCURATE
    out: Tensor | None = None

    @property
    def first(self) -> Tensor:
        """The first operand; `axis` is an axis of it."""
        operand: Tensor = getattr(self, self.reads[0])
        return operand

    def check_fields(self) -> None:
        first, rank = self.first, self.first.ndim
        if rank == 0:
            raise BadRequest(self.reads[0], str(first.layout), "one axis or more", "x[None] adds an axis")
        check_int("axis", self.axis, -rank, rank - 1)
        same_as_first(self)

    def attributes(self) -> tuple[Any, ...]:
        return self.axis % self.first.ndim, self.algorithm


@dataclass(frozen=True, eq=False)
class SoftmaxRequest(AlongAxisRequest):
    """y = softmax(x) or log(softmax(x)) along one axis.

    Attributes:
        x: any shape of one axis or more, its axes in any order in memory, but without gaps, which cuDNN's softmax gets
            wrong: x[:, :3].copy(), not x[:, :3]. An x without elements gives a y without elements.
        out: y, of x's shape, dtype and strides; it may be x itself. None allocates one.
    """

    op: ClassVar[str] = "softmax"
    reads: ClassVar[tuple[str, ...]] = ("x",)
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "x")})
    x: Tensor


@dataclass(frozen=True, eq=False)
class SoftmaxBwdRequest(AlongAxisRequest):
    """dx from y = softmax(x) (or its logarithm) and dy: the gradient of `SoftmaxRequest`.

    Attributes:
        y: the result of the forward pass, without gaps in memory.
        dy: the gradient of y, of y's shape, dtype and strides.
        axis, algorithm: those of the forward pass.
        out: dx, of y's shape, dtype and strides; it may be dy itself. None allocates one.
    """

    op: ClassVar[str] = "softmax_bwd"
    reads: ClassVar[tuple[str, ...]] = ("y", "dy")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "dy")})
    y: Tensor
    dy: Tensor


# -- rules of the rows: "needs …, has …", or "" where a rule is met ---------------------------------------------------
MAX_OTHERS = 4  # images, and three spatial axes


def axes_of(layouts: Sequence[Layout], axis: int) -> tuple[Axis, list[Axis]]:
    """The axis that sums to 1, and the other axes, merged."""
    rank = len(layouts[0].shape)
    axes = merge(layouts, [position == axis % rank for position in range(rank)])
    summed = next((merged for merged in axes if merged.group), Axis(1, (1,) * len(layouts), True))
    return summed, [merged for merged in axes if not merged.group]


def four_axes(request: AlongAxisRequest) -> str:
    """Strides are positive, and at most four axes remain after merging, not counting the one that sums to 1."""
    layouts = [request.layout_of(name) for name in (*request.reads, *request.writes)]
    if reason := describable(*layouts):
        return reason
    _, others = axes_of(layouts, request.axis)
    if len(others) > MAX_OTHERS:
        return f"needs at most {MAX_OTHERS} axes other than axis {request.axis} that do not merge, has {len(others)}"
    return ""


def one_dense_layout(request: AlongAxisRequest) -> str:
    """All operands have the same strides without gaps, with their axes in any order.

    cuDNN accepts others, but uses the strides of one operand, or of none (seen on an H200, 9.19: wrong numbers).
    """
    first, layout = request.reads[0], request.layout_of(request.reads[0])
    if not gapless(layout):
        return f"needs {first} without gaps, has {layout}: copy it with {first}.copy()"
    return strides_apart(request, *request.reads, *request.writes)


# -- in NumPy: for the host's rows in their own precision, and as the reference in f64 --------------------------------
def evaluate(request: AlongAxisRequest, work: np.dtype[Any]) -> Results:
    """The output of a request by name, computed in a working dtype.

    y is computed after subtracting the maximum along the axis, unless the algorithm is FAST. dx = y · (dy - Σ y · dy),
    or dy - exp(y) · Σ dy for LOG.
    """
    x, axis, log = values(request.first, work), request.axis, request.algorithm is SoftmaxAlgorithm.LOG
    if isinstance(request, SoftmaxBwdRequest):
        y, dy = x, values(request.dy, work)
        total = (dy if log else y * dy).sum(axis=axis, keepdims=True)
        return {"out": dy - np.exp(y) * total if log else y * (dy - total)}
    if x.size == 0:
        return {"out": x}
    if request.algorithm is not SoftmaxAlgorithm.FAST:
        x = x - x.max(axis=axis, keepdims=True)
    powers = np.exp(x)
    total = powers.sum(axis=axis, keepdims=True)
    return {"out": x - np.log(total) if log else powers / total}


# -- with cuDNN -------------------------------------------------------------------------------------------------------
INSTANCE = cudnn.cudnnSoftmaxMode_t.CUDNN_SOFTMAX_MODE_INSTANCE

CHANNEL = cudnn.cudnnSoftmaxMode_t.CUDNN_SOFTMAX_MODE_CHANNEL


def cudnn_softmax(request: AlongAxisRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of either request; without elements it launches nothing."""
    layouts = [request.layout_of(name) for name in (*request.reads, *request.writes)]
    if layouts[0].size == 0:
        return IdlePlan(row)
    mode, (*inputs, output) = _describe(layouts, request.axis)
    dtype = request.first.dtype
    operands = [part for index, descriptor in enumerate(inputs) for part in (descriptor, Operand(index))]
    backward = isinstance(request, SoftmaxBwdRequest)
    arguments = (
        *(int(request.algorithm), mode, number(1, dtype), *operands),
        *(number(0, dtype), output, Operand(len(inputs))),
    )
    function = cudnn.cudnnSoftmaxBackward if backward else cudnn.cudnnSoftmaxForward
    return CallPlan(executor, row, function, arguments)


def _describe(layouts: Sequence[Layout], axis: int) -> tuple[int, list[Descriptor]]:
    """The mode, and a descriptor for each tensor."""
    summed, others = axes_of(layouts, axis)
    images, *space = others or [Axis(1, (1,) * len(layouts), False)]
    ordered = (images, summed, *space)
    descriptors = [
        tensor(layout.dtype, [axis.extent for axis in ordered], [axis.strides[number] for axis in ordered])
        for number, layout in enumerate(layouts)
    ]
    # CHANNEL sums over the channels, INSTANCE over a whole image. Without spatial axes both are the same, and INSTANCE
    # is faster.
    return (CHANNEL if space else INSTANCE), descriptors


# -- the public functions, and the calls of the rows ------------------------------------------------------------------
reference = exactly(evaluate)
numpy_softmax = numpy_call(evaluate)
softmax = request_function(SoftmaxRequest, "softmax")
softmax_bwd = request_function(SoftmaxBwdRequest, "softmax_bwd")
