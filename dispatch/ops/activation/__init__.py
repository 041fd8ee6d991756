"""Elementwise activations and their gradients: `activation` and `activation_bwd`.

They run on `cudnnActivationForward` and `cudnnActivationBackward`, or on NumPy. For cuDNN the axes are merged as far as
the strides allow, so nearly every tensor has one axis. Follows
https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-ops-library.html#cudnnactivationforward.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from cudabind.sys import cudnn
from dispatch.core.axes import Axis, describable, gaps_left_open, merge, strides_apart
from dispatch.core.host_plan import Results, exactly, numpy_call, sigmoid, values
from dispatch.core.operands import OperandRequest, same_as_first
from dispatch.core.request import IdlePlan
from dispatch.core.request_function import request_function
from dispatch.errors import BadRequest
from dispatch.keys import Choice, member
from dispatch.libraries.cudnn.calls import CallPlan, Operand, number
from dispatch.libraries.cudnn.tensors import Descriptor, tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.layout import Array, Layout
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = [
    "ActivationBwdRequest",
    "ActivationMode",
    "ActivationRequest",
    "activation",
    "activation_bwd",
]


class ActivationMode(Choice):
    """`cudnnActivationMode_t` except IDENTITY, which only a convolution supports.

    SIGMOID 1 / (1 + e^-x), RELU max(x, 0), TANH, CLIPPED_RELU min(max(x, 0), coef), ELU x or coef · (e^x - 1) below 0,
    SWISH x · sigmoid(coef · x), which is SiLU for coef 1.
    """

    SIGMOID = 0
    RELU = 1
    TANH = 2
    CLIPPED_RELU = 3
    ELU = 4
    SWISH = 6

    @staticmethod
    def other_names() -> dict[str, str]:
        return {"SILU": "SWISH"}

    @staticmethod
    def replacements() -> dict[str, str]:
        graph = "dispatch.cudnn.Graph has pointwise({!r}, x)"
        gelu = f"Fused with a product, dispatch.matmul(a, b, epilogue='gelu'); alone, {graph}"
        return {
            "GELU": gelu.format("GELU_FWD"),
            "GELUTANH": gelu.format("GELU_APPROX_TANH_FWD"),
            "SOFTPLUS": graph.format("SOFTPLUS_FWD"),
            "LEAKYRELU": "dispatch.cudnn.Graph has pointwise('RELU_FWD', x, RELU_LOWER_CLIP_SLOPE=0.01)",
            "RELU6": "It is mode='clipped_relu' with coef=6.0",
            "SOFTMAX": "dispatch.softmax(x)",
            "IDENTITY": "x.copy() is the identity",
        }


WITH_COEF = (ActivationMode.CLIPPED_RELU, ActivationMode.ELU, ActivationMode.SWISH)


@dataclass(frozen=True, eq=False)
class ElementwiseRequest(OperandRequest["Tensor"]):
    """The fields and checks that activations and their gradients share.

    Attributes:
        mode: the function.
        coef: the ceiling of CLIPPED_RELU, the alpha of ELU, the beta of SWISH.
    """

    x: Tensor
    _: KW_ONLY
    mode: ActivationMode | str = ActivationMode.RELU
    coef: float = 1.0
    out: Tensor | None = None

    def check_fields(self) -> None:
        if not math.isfinite(self.coef):
            raise BadRequest("coef", repr(self.coef), "a finite number")
        if self.coef != 1 and self.mode not in WITH_COEF:
            takers = ", ".join(taker.name for taker in WITH_COEF)
            raise BadRequest(
                "coef",
                repr(self.coef),
                f"1, because {member(self.mode).name} has no coef",
                f"the modes with a coef are {takers}",
            )
        if self.coef < 0:
            raise BadRequest("coef", repr(self.coef), "0 or more")
        same_as_first(self)


@dataclass(frozen=True, eq=False)
class ActivationRequest(ElementwiseRequest):
    """y = f(x), element by element.

    Attributes:
        x: any shape, any positive strides; without elements it gives a y without elements.
        out: y, of x's shape and dtype; it may be x itself. None allocates a dense one with the order of x's axes in
            memory.
    """

    op: ClassVar[str] = "activation"
    reads: ClassVar[tuple[str, ...]] = ("x",)
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "x")})


@dataclass(frozen=True, eq=False)
class ActivationBwdRequest(ElementwiseRequest):
    """dx = dy · f'(x), element by element: the gradient of `ActivationRequest`.

    Attributes:
        x: the operand of the forward pass.
        y: its result; the mode determines which of the two is used.
        dy: the gradient of y. All three have the same shape, dtype and strides, which are positive.
        mode, coef: those of the forward pass.
        out: dx, of x's shape, dtype and strides; it may be dy itself. None allocates one with the layout of x, which
            must have no gaps then: for a view like x[:, :3], give an out with its strides, or use x[:, :3].copy().
    """

    op: ClassVar[str] = "activation_bwd"
    reads: ClassVar[tuple[str, ...]] = ("x", "y", "dy")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "dy")})
    y: Tensor
    dy: Tensor


# -- rules of the rows: "needs …, has …", or "" if a rule is met ------------------------------------------------------
MAX_AXES = 5


def axes_of(layouts: Sequence[Layout]) -> list[Axis]:
    """The axes of tensors that are processed element by element, merged."""
    return merge(layouts, [0] * len(layouts[0].shape))


def five_axes(request: ElementwiseRequest) -> str:
    """Strides are positive, and at most five axes remain after merging."""
    layouts = [request.layout_of(name) for name in (*request.reads, *request.writes)]
    if reason := describable(*layouts):
        return reason
    count = len(axes_of(layouts))
    return f"needs at most {MAX_AXES} axes that do not merge, has {count}" if count > MAX_AXES else ""


def elu_above_0(request: ActivationBwdRequest) -> str:
    """The gradient of ELU needs a coef above 0: cuDNN uses the sign of y, which is 0 with a coef of 0."""
    if request.mode is not ActivationMode.ELU or request.coef > 0:
        return ""
    return "needs a coef above 0 for the gradient of ELU, has 0: use RELU, which is the same function"


def one_layout(request: ActivationBwdRequest) -> str:
    """The gradient needs the same layout for all tensors."""
    return gaps_left_open(request, "x") or strides_apart(request, "x", "y", "dy", "out")


# -- in NumPy: for the host's rows in their own precision, and as the reference in f64 --------------------------------
def evaluate(request: ElementwiseRequest, work: np.dtype[Any]) -> Results:
    """The output of a request by name, computed in a working dtype."""
    x, coef = values(request.x, work), work.type(request.coef)
    if isinstance(request, ActivationBwdRequest):
        dy = values(request.dy, work)
        if request.mode in (ActivationMode.RELU, ActivationMode.CLIPPED_RELU):  # no product: dropped factors may be NaN
            return {"out": np.where(passes(request.mode, x, coef), dy, work.type(0))}
        return {"out": dy * slope(member(request.mode), x, values(request.y, work), coef)}
    return {"out": forward(member(request.mode), x, coef)}


def forward(mode: ActivationMode, x: Array, coef: Any) -> Array:
    """f(x)."""
    if mode is ActivationMode.SIGMOID:
        return sigmoid(x)
    if mode is ActivationMode.RELU:
        return np.asarray(np.maximum(x, 0))
    if mode is ActivationMode.TANH:
        return np.asarray(np.tanh(x))
    if mode is ActivationMode.CLIPPED_RELU:
        return np.asarray(np.minimum(np.maximum(x, 0), coef))
    if mode is ActivationMode.ELU:
        return np.asarray(np.where(x > 0, x, coef * np.expm1(np.minimum(x, 0))))
    return np.asarray(x * sigmoid(coef * x))


def passes(mode: ActivationMode, x: Array, coef: Any) -> Array:
    """Where RELU and CLIPPED_RELU propagate a gradient: not at their corners."""
    return np.asarray((x > 0) & (x < coef) if mode is ActivationMode.CLIPPED_RELU else x > 0)


def slope(mode: ActivationMode, x: Array, y: Array, coef: Any) -> Array:
    """f'(x), computed from y for modes that allow it."""
    if mode is ActivationMode.SIGMOID:
        return np.asarray(y * (1 - y))
    if mode is ActivationMode.TANH:
        return np.asarray(1 - y * y)
    if mode in (ActivationMode.RELU, ActivationMode.CLIPPED_RELU):
        return passes(mode, x, coef).astype(x.dtype)
    if mode is ActivationMode.ELU:
        return np.asarray(np.where(y >= 0, x.dtype.type(1), y + coef))  # cuDNN uses y
    gate = sigmoid(coef * x)
    return np.asarray(gate * (1 + coef * x * (1 - gate)))


# -- with cuDNN -------------------------------------------------------------------------------------------------------
PROPAGATE = cudnn.cudnnNanPropagation_t.CUDNN_PROPAGATE_NAN


def cudnn_activation(request: ElementwiseRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of either request; without elements it launches nothing."""
    if request.x.size == 0:
        return IdlePlan(row)
    dtype = request.x.dtype
    layouts = [request.layout_of(name) for name in (*request.reads, *request.writes)]
    axes = axes_of(layouts)
    extents = [axis.extent for axis in axes]
    described = [tensor(dtype, extents, [axis.strides[i] for axis in axes]) for i in range(len(layouts))]
    one, zero, function = number(1, dtype), number(0, dtype), _function(member(request.mode), float(request.coef))
    if isinstance(request, ActivationBwdRequest):
        x, y, dy, dx = described
        operands = (y, Operand(1), dy, Operand(2), x, Operand(0), zero, dx, Operand(3))
        return CallPlan(executor, row, cudnn.cudnnActivationBackward, (function, one, *operands))
    x, y = described
    return CallPlan(executor, row, cudnn.cudnnActivationForward, (function, one, x, Operand(0), zero, y, Operand(1)))


def _function(mode: ActivationMode, coef: float) -> Descriptor:
    descriptor = Descriptor("Activation")
    cudnn.cudnnSetActivationDescriptor(descriptor.handle, cudnn.cudnnActivationMode_t(mode), PROPAGATE, coef)
    if mode is ActivationMode.SWISH:
        cudnn.cudnnSetActivationDescriptorSwishBeta(descriptor.handle, coef)
    return descriptor


# -- the public functions, and the calls of the rows ------------------------------------------------------------------
reference = exactly(evaluate)
numpy_activation = numpy_call(evaluate)
activation = request_function(ActivationRequest, "activation")
activation_bwd = request_function(ActivationBwdRequest, "activation_bwd")
