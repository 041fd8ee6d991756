"""Local normalization: `lrn` over channels, `divisive_norm` over space, and their gradients.

y = x · s^-beta, s_i = k + alpha / window^d · Σ (x_j - means_i)² over the j in a window around i along d axes; an even
window has one more element after i than before. For `lrn` d is 1 and the means are 0. cuDNN or NumPy; follows
https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-ops-library.html#cudnnlrncrosschannelforward.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from cudabind.sys import cudnn
from dispatch.checks import check_int, check_number
from dispatch.core.axes import describable, strides_apart
from dispatch.core.host_plan import Results, numpy_call, values
from dispatch.core.layouts import dense_image, dense_strides, lies_dense
from dispatch.core.operand_checks import check_image
from dispatch.core.operands import OperandRequest, same_as_first
from dispatch.core.request import IdlePlan
from dispatch.core.request_function import request_function
from dispatch.libraries.cudnn.calls import CallPlan, Operand, number
from dispatch.libraries.cudnn.handle import handle_of
from dispatch.libraries.cudnn.tensors import Descriptor, tensor

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["DivisiveNormBwdRequest", "DivisiveNormRequest", "LrnBwdRequest", "LrnRequest"]
__all__ += ["divisive_norm", "divisive_norm_bwd", "lrn", "lrn_bwd"]


@dataclass(frozen=True, eq=False)
class LocalNormRequest(OperandRequest["Tensor"]):
    """The fields and checks that the four requests share.

    Attributes:
        x: (images, channels, space…), dense, with channels first or last in memory.
        window: the number of elements in the window along an axis, from 1 to 16. An even window has one more element
            after the one that is normalized than before it.
        alpha: the weight of the sum, 0 or more.
        beta: the exponent, 0.01 or more.
        k: the constant added to the sum, 1e-5 or more.
        out: y or dx, of x's shape, dtype and strides. None allocates one.
    """

    over_space: ClassVar[bool] = False
    x: Tensor
    _: KW_ONLY
    window: int = 5
    alpha: float = 1e-4
    beta: float = 0.75
    k: float = 2.0
    out: Tensor | None = None

    def check_fields(self) -> None:
        check_int("window", self.window, 1, 16)
        for name, low in (("alpha", 0.0), ("beta", 0.01), ("k", 1e-5)):
            check_number(name, getattr(self, name), low=low, high=1e30)
        check_image("x", self.x, 2 if self.over_space else 0, 3)
        same_as_first(self)


@dataclass(frozen=True, eq=False)
class LrnRequest(LocalNormRequest):
    """Local response normalization: y = x · (k + alpha / window · Σ x²)^-beta, the sum over a window of channels."""

    op: ClassVar[str] = "lrn"
    reads: ClassVar[tuple[str, ...]] = ("x",)


@dataclass(frozen=True, eq=False)
class LrnBwdRequest(LocalNormRequest):
    """dx of `lrn` from x, its result y and the gradient dy.

    Attributes:
        y, dy: of x's shape, dtype and strides.
    """

    op: ClassVar[str] = "lrn_bwd"
    reads: ClassVar[tuple[str, ...]] = ("x", "y", "dy")
    y: Tensor
    dy: Tensor


@dataclass(frozen=True, eq=False)
class DivisiveNormRequest(LocalNormRequest):
    """y = x · (k + alpha / window^d · Σ (x_j - means_i)²)^-beta, over a window along all d spatial axes, 2 or 3.

    Attributes:
        means: of x's shape, dtype and strides, for example an average pooling of x; None for 0.
    """

    op: ClassVar[str] = "divisive_norm"
    reads: ClassVar[tuple[str, ...]] = ("x", "means")
    over_space: ClassVar[bool] = True
    means: Tensor | None = None


@dataclass(frozen=True, eq=False)
class DivisiveNormBwdRequest(LocalNormRequest):
    """dx of `divisive_norm` from x, the gradient dy and the means, which are treated as constants.

    Attributes:
        dy, means: of x's shape, dtype and strides; means None for 0. cuDNN supports only odd windows here.
    """

    op: ClassVar[str] = "divisive_norm_bwd"
    reads: ClassVar[tuple[str, ...]] = ("x", "dy", "means")
    over_space: ClassVar[bool] = True
    dy: Tensor
    means: Tensor | None = None


def window_sum(array: Array, n: int, axes: range, *, turned: bool = False) -> Array:
    """The sums over windows along some axes; `turned` sums over the elements whose windows contain this one."""
    for axis in axes:
        pads = [(0, 0)] * array.ndim
        pads[axis] = (n // 2, (n - 1) // 2) if turned else ((n - 1) // 2, n // 2)
        padded = np.pad(array, pads)
        array = sum((padded.take(range(i, i + array.shape[axis]), axis) for i in range(n)), np.zeros_like(array))
    return array


def evaluate(request: Any, work: np.dtype[Any]) -> Results:
    """The output of a request by name, in a working dtype. Without means their terms are left out: 0 · ∞ is NaN."""
    x, n = values(request.x, work), request.window
    axes = range(2, x.ndim) if request.over_space else range(1, 2)
    means = values(request.means, work) if getattr(request, "means", None) is not None else None
    share, beta = work.type(request.alpha / n ** len(axes)), work.type(request.beta)
    off = 0 if means is None else means**2 * window_sum(np.ones_like(x), n, axes) - 2 * means * window_sum(x, n, axes)
    s = work.type(request.k) + share * (window_sum(x * x, n, axes) + off)
    if "dy" not in request.reads:
        return {"out": x * s**-beta}
    dy = values(request.dy, work)
    term = dy * (values(request.y, work) if "y" in request.reads else x * s**-beta) / s
    pull = 0 if means is None else window_sum(term * means, n, axes, turned=True)
    return {"out": dy * s**-beta - 2 * beta * share * (x * window_sum(term, n, axes, turned=True) - pull)}


def dense_alike(request: LocalNormRequest) -> str:
    """Rule: all operands have one dense layout, with channels first or last."""
    x, names = request.x.layout, [name for name, _, _ in request.tensors()]
    return describable(x) or dense_image("x", x) or strides_apart(request, "x", *names, "out")


def odd_window(request: LocalNormRequest) -> str:
    """Rule: the window is odd. For an even one cuDNN's gradient (9.19) adds up the wrong neighbours."""
    return "" if request.window % 2 else f"needs an odd window, has {request.window}"


def cudnn_local_norm(request: LocalNormRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that calls `row.function`; without elements it launches nothing."""
    x, dtype = request.x.layout, request.x.dtype
    if x.size == 0:
        return IdlePlan(row)
    norm = Descriptor("LRN")
    cudnn.cudnnSetLRNDescriptor(norm.handle, request.window, request.alpha, request.beta, request.k)
    at = {name: Operand(request.place_of(name)) for name in (*request.reads, *request.writes)}
    first, zero, function = (norm, 0, number(1, dtype)), number(0, dtype), getattr(cudnn, row.function)
    n, c, *space = x.shape
    strides = dense_strides(x.shape, last=not lies_dense(x, last=False))
    if not request.over_space:  # spatial axes are merged: cuDNN does not support three of them with channels last
        image = tensor(dtype, (n, c, math.prod(space)), (*strides[:2], strides[-1]))
        order = ("x",) if request.op == "lrn" else ("y", "dy", "x")
        operands = [part for name in order for part in (image, at[name])]
        return CallPlan(executor, row, function, (*first, *operands, zero, image, at["out"]))
    image, size = tensor(dtype, x.shape, strides), -(-x.size * dtype.itemsize // 256) * 256
    scratch = handle_of(executor).scratch(executor, 2 * size)
    between = (scratch.c_ptr, ctypes.c_void_p((scratch.c_ptr.value or 0) + size))
    ends = (zero, image, at["out"]) if request.op == "divisive_norm" else (zero, image, at["out"], None)
    dy = (at["dy"],) if "dy" in at else ()
    return CallPlan(executor, row, function, (*first, image, at["x"], at["means"], *dy, *between, *ends), (scratch,))


numpy_local_norm = numpy_call(evaluate)
lrn, lrn_bwd = request_function(LrnRequest, "lrn"), request_function(LrnBwdRequest, "lrn_bwd")
divisive_norm = request_function(DivisiveNormRequest, "divisive_norm")
divisive_norm_bwd = request_function(DivisiveNormBwdRequest, "divisive_norm_bwd")
