"""The requests of convolution: `conv_fwd` with what is fused to it, and `conv_bwd_data`, `conv_bwd_filter`.

Tensors are (N, C, spatial…) with one to three spatial axes, filters (K, C / groups, spatial…); strides say how they lie
(NCHW, NHWC or neither). It is cross-correlation, as everywhere in cuDNN. This file calls nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from dispatch.cudnn.convolve import Steps, output_shape
from dispatch.cudnn.operands import Made, OperandRequest, chosen, whole
from dispatch.errors import BadRequest
from dispatch.keys import Compute, Dtype
from dispatch.request import Signature

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.tensor import Layout, Tensor

__all__ = [
    "Activation",
    "ConvBwdDataRequest",
    "ConvBwdFilterRequest",
    "ConvFwdRequest",
    "ConvRequest",
    "Padding",
    "lies_dense",
]

Shape = tuple[int, ...]
Padding = int | tuple[int, ...] | tuple[tuple[int, int], ...]  # the same everywhere; of each axis; before and behind
MOST_AXES = 3


class Activation(IntEnum):
    """`cudnnPointwiseMode_t`: what is applied to the result of a forward convolution."""

    IDENTITY = 21
    RELU_FWD = 100
    TANH_FWD = 101
    SIGMOID_FWD = 102
    ELU_FWD = 103
    GELU_FWD = 104
    SOFTPLUS_FWD = 105
    SWISH_FWD = 106
    GELU_APPROX_TANH_FWD = 107


class ConvRequest(OperandRequest):
    """What the three have in common: steps, groups, and the numbers that results are scaled with."""

    pad: Padding
    stride: int | tuple[int, ...]
    dilation: int | tuple[int, ...]
    alpha: float
    beta: float
    compute: Compute | None
    out_dtype: Any
    deterministic: bool
    workspace: int | None
    autotune: bool
    out: Tensor | None

    @property
    @abstractmethod
    def x_shape(self) -> Shape:
        """The shape of what the filter steps over: X, or its gradient."""

    @property
    @abstractmethod
    def w_shape(self) -> Shape:
        """The shape of the filter, or of its gradient."""

    @cached_property
    def steps(self) -> Steps:
        """Padding, stride and dilation of each spatial axis."""
        rank = self._rank
        pairs = _pairs(self.pad, rank)
        stride, dilation = (_each(n, getattr(self, n), rank, 1) for n in ("stride", "dilation"))
        return Steps(tuple(p for p, _ in pairs), tuple(p for _, p in pairs), stride, dilation)

    @property
    def _rank(self) -> int:
        first: Tensor = getattr(self, self.reads[0])
        return first.ndim - 2

    @cached_property
    def y_shape(self) -> Shape:
        """The shape of the forward's result."""
        return output_shape(self.x_shape, self.w_shape, self.steps)

    @property
    def groups(self) -> int:
        return self.x_shape[1] // self.w_shape[1]

    @cached_property
    def result_dtype(self) -> Dtype:
        """The dtype of the result: that of `out`, `out_dtype`, or that of the first operand."""
        if self.out is not None:
            return self.out.dtype
        first: Tensor = getattr(self, self.reads[0])
        return first.dtype if self.out_dtype is None else Dtype.of(self.out_dtype)

    @cached_property
    def channels_last(self) -> bool:
        """Whether the operands lie with their channels innermost; where one alone does not tell, the next does."""
        for name in (*self.reads[:2], "out"):
            tensor: Tensor | None = getattr(self, name)
            if tensor is not None:
                fits_last, fits_first = (lies_dense(tensor.layout, last=last) for last in (True, False))
                if fits_last != fits_first:
                    return fits_last
        return False

    @property
    def repeatable(self) -> bool:
        return not self._accumulates and super().repeatable

    @property
    def _accumulates(self) -> bool:
        return self.beta != 0 and "z" not in self.reads

    def strides_of(self, name: str) -> Shape:
        """The strides of an operand, with those of axes of extent 1, which mean nothing, as in a dense tensor."""
        layout = self.layout_of(name)
        shape, strides = layout.shape, layout.strides
        for last in (self.channels_last, not self.channels_last):
            wanted = _dense(shape, last=last)
            if all(e == 1 or s == t for e, s, t in zip(shape, strides, wanted, strict=True)):
                return wanted
        return strides

    def signature(self) -> Signature:
        return Signature(self.dtypes, self.compute)

    def choices(self) -> tuple[Any, ...]:
        numbers = (self.alpha, self.beta, self.compute, self.result_dtype.cuda)
        return (*self.steps, *numbers, self.deterministic, self.workspace, self.autotune)

    # -- checks ---------------------------------------------------------------------------------------------------
    def _check_choices(self) -> None:
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise BadRequest(name, repr(value), "a number")
        if self.compute is not None:
            chosen("compute", self.compute, Compute)
        for name in ("deterministic", "autotune"):
            if not isinstance(getattr(self, name), bool):
                raise BadRequest(name, repr(getattr(self, name)), "True or False")
        if self.workspace is not None:
            whole("workspace", self.workspace, 0, 1 << 40)
        if self.out_dtype is not None:
            try:
                wanted = Dtype.of(self.out_dtype)
            except TypeError as error:
                raise BadRequest("out_dtype", repr(self.out_dtype), "a dtype", str(error)) from None
            if self.out is not None and self.out.dtype is not wanted:
                raise BadRequest("out_dtype", str(wanted), f"{self.out.dtype}, the dtype of out, or None")
        if self._accumulates and self.out is None:
            raise BadRequest("beta", repr(self.beta), "0, for there is no out to be scaled", "pass out=…")

    def _check_ranks(self) -> None:
        first: Tensor = getattr(self, self.reads[0])
        if not 3 <= first.ndim <= 2 + MOST_AXES:
            hint = "x[..., None] adds an axis"
            raise BadRequest(self.reads[0], str(first.layout), "(N, C, spatial…) with 1 to 3 spatial axes", hint)
        for name in (*self.reads[:2], *(("out",) if self.out is not None else ())):
            tensor: Tensor = getattr(self, name)
            if tensor.ndim != first.ndim:
                raise BadRequest(name, str(tensor.layout), f"{first.ndim} axes, as {self.reads[0]} has")
            if tensor.size == 0:
                raise BadRequest(name, str(tensor.layout), "extents of 1 or more", "leave an empty batch out")
            if any(s < 1 and e > 1 for s, e in zip(tensor.layout.strides, tensor.shape, strict=True)):
                raise BadRequest(name, str(tensor.layout), "steps forward", "copy it: dev.array(x.numpy())")

    def _check_filter(self) -> None:
        """X and W fit: whole groups, and a filter that fits into the padded input."""
        x, w = self.x_shape, self.w_shape
        if x[1] % w[1]:
            raise BadRequest("w", f"filters over {w[1]} channels", f"a divisor of the {x[1]} channels of x {x}")
        if w[0] % self.groups:
            raise BadRequest("w", f"{w[0]} filters", f"a multiple of the {self.groups} groups of x {x} over w {w}")
        if min(self.y_shape) < 1:
            hint = "more padding, or a smaller filter or dilation"
            raise BadRequest(
                "w", f"a filter {w[2:]} by dilation {self.steps.dilation}", f"one that fits into x {x}", hint
            )


def _dense(shape: Shape, *, last: bool) -> Shape:
    """The strides of a dense tensor, channels last or first."""
    order = (0, *range(2, len(shape)), 1) if last else range(len(shape))
    strides = [0] * len(shape)
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def lies_dense(layout: Layout, *, last: bool) -> bool:
    """Whether a tensor is dense, with its channels last or first; axes of extent 1 lie either way."""
    wanted = _dense(layout.shape, last=last)
    return all(e == 1 or s == t for e, s, t in zip(layout.shape, layout.strides, wanted, strict=True))


def _each(name: str, value: Any, rank: int, low: int) -> Shape:
    """A number for each spatial axis."""
    values = value if isinstance(value, tuple) else (value,) * rank
    if len(values) != rank:
        raise BadRequest(name, repr(value), f"a number, or one for each of the {rank} spatial axes")
    return tuple(whole(name, one, low) for one in values)


def _pairs(value: Any, rank: int) -> list[tuple[int, int]]:
    values: Sequence[Any] = value if isinstance(value, tuple) else (value,) * rank
    if len(values) != rank:
        raise BadRequest("pad", repr(value), f"a number, or a number or a pair for each of the {rank} spatial axes")
    found = []
    for one in values:
        before, behind = one if isinstance(one, tuple) and len(one) == 2 else (one, one)
        found.append((whole("pad", before, 0), whole("pad", behind, 0)))
    return found


@dataclass(frozen=True, eq=False)
class ConvFwdRequest(ConvRequest):
    """Y = activation(alpha · conv(X, W) + beta · Z + bias).

    Attributes:
        x: (N, C, spatial…).
        w: (K, C / groups, spatial…); the groups follow from the channels of both.
        bias: (K,), dense.
        z: of Y's shape, added as beta · Z; `beta` is 1 where z is given and else 0.
        out: Y, (N, K, spatial…); lies as x does where it is left out.
        pad: zeros around x: a number, one for each spatial axis, or a pair (before, behind) for each.
        stride, dilation: numbers, or one for each spatial axis.
        activation: a mode of `cudnnPointwiseMode_t`.
        compute: None takes the row's own; f32 becomes TF32 only where COMPUTE_32F_FAST_TF32 is asked for here.
        deterministic: bit for bit the same result at every run.
        workspace: the most bytes an engine may use; None leaves it to the library, up to 1 GiB.
        autotune: time cuDNN's candidates once, keep the fastest, and remember it on disk.
    """

    op: ClassVar[str] = "conv_fwd"
    reads: ClassVar[tuple[str, ...]] = ("x", "w", "bias", "z")
    writes: ClassVar[tuple[str, ...]] = ("out",)
    x: Tensor
    w: Tensor
    bias: Tensor | None = None
    z: Tensor | None = None
    out: Tensor | None = None
    pad: Padding = 0
    stride: int | tuple[int, ...] = 1
    dilation: int | tuple[int, ...] = 1
    activation: Activation = Activation.IDENTITY
    alpha: float = 1.0
    beta: float | None = None  # type: ignore[assignment]  # a number from __post_init__ on
    compute: Compute | None = None
    out_dtype: Any = None
    deterministic: bool = False
    workspace: int | None = None
    autotune: bool = False

    def __post_init__(self) -> None:
        if self.beta is None:
            object.__setattr__(self, "beta", 0.0 if self.z is None else 1.0)
        super().__post_init__()

    @property
    def required(self) -> tuple[str, ...]:
        return ("x", "w")

    @property
    def x_shape(self) -> Shape:
        return self.x.shape

    @property
    def w_shape(self) -> Shape:
        return self.w.shape

    @property
    def dtypes(self) -> tuple[Dtype | None, ...]:
        extra = tuple(None if t is None else t.dtype for t in (self.bias, self.z))
        return (self.x.dtype, self.w.dtype, self.result_dtype, *extra)

    @property
    def fused(self) -> bool:
        """Whether anything but the convolution itself is asked for."""
        return self.bias is not None or self.z is not None or self.activation is not Activation.IDENTITY

    def made(self) -> dict[str, Made]:
        return {"out": Made(self.y_shape, _dense(self.y_shape, last=self.channels_last), self.result_dtype)}

    def choices(self) -> tuple[Any, ...]:
        return (*super().choices(), self.activation)

    def check_fields(self) -> None:
        self._check_choices()
        chosen("activation", self.activation, Activation)
        self._check_ranks()
        self._check_filter()
        if self.bias is not None and (self.bias.shape != (self.w.shape[0],) or not self.bias.layout.is_contiguous):
            raise BadRequest("bias", str(self.bias.layout), f"shape ({self.w.shape[0]},), one for each filter, dense")
        if self.z is not None and self.z.shape != self.y_shape:
            raise BadRequest("z", str(self.z.layout), f"shape {self.y_shape}, that of the result")
        if self.z is None and self.beta != 0:
            raise BadRequest("beta", repr(self.beta), "0, for there is no z to be scaled", "pass z=…")


@dataclass(frozen=True, eq=False)
class ConvBwdDataRequest(ConvRequest):
    """DX = alpha · (the gradient of conv by X)(DY, W) + beta · DX: also the transposed convolution of DY.

    Attributes:
        dy: (N, K, spatial…).
        w: (K, C / groups, spatial…).
        out: DX, (N, C, spatial…); with beta it is read as well.
        x_extents: the spatial extents of DX where `out` is left out; None takes the smallest that DY can come from.
        group_count: the number of groups, which DY and W do not tell.

    The others are those of `ConvFwdRequest`.
    """

    op: ClassVar[str] = "conv_bwd_data"
    reads: ClassVar[tuple[str, ...]] = ("dy", "w")
    writes: ClassVar[tuple[str, ...]] = ("out",)
    dy: Tensor
    w: Tensor
    out: Tensor | None = None
    x_extents: tuple[int, ...] | None = None
    group_count: int = 1
    pad: Padding = 0
    stride: int | tuple[int, ...] = 1
    dilation: int | tuple[int, ...] = 1
    alpha: float = 1.0
    beta: float = 0.0
    compute: Compute | None = None
    out_dtype: Any = None
    deterministic: bool = False
    workspace: int | None = None
    autotune: bool = False

    @cached_property
    def x_shape(self) -> Shape:
        if self.out is not None:
            return self.out.shape
        extents = self.x_extents
        if extents is None:
            extents = tuple(
                (y - 1) * stride + (size - 1) * dilation + 1 - before - behind
                for y, size, before, behind, stride, dilation in zip(
                    self.dy.shape[2:], self.w.shape[2:], *self.steps, strict=True
                )
            )
        return (self.dy.shape[0], self.w.shape[1] * self.group_count, *extents)

    @property
    def w_shape(self) -> Shape:
        return self.w.shape

    @property
    def dtypes(self) -> tuple[Dtype | None, ...]:
        return (self.dy.dtype, self.w.dtype, self.result_dtype)

    def made(self) -> dict[str, Made]:
        return {"out": Made(self.x_shape, _dense(self.x_shape, last=self.channels_last), self.result_dtype)}

    def choices(self) -> tuple[Any, ...]:
        return (*super().choices(), self.x_shape)

    def check_fields(self) -> None:
        self._check_choices()
        self._check_ranks()
        whole("group_count", self.group_count, 1)
        if self.x_extents is not None:
            _each("x_extents", self.x_extents, self._rank, 1)
        if min(self.x_shape) < 1:
            raise BadRequest("pad", repr(self.pad), f"less: the result would be {self.x_shape}")
        self._check_filter()
        if self.y_shape != self.dy.shape:
            hint = "x_extents=… chooses among the extents that a stride leaves open"
            raise BadRequest("dy", str(self.dy.layout), f"shape {self.y_shape}, that of conv(x {self.x_shape})", hint)


@dataclass(frozen=True, eq=False)
class ConvBwdFilterRequest(ConvRequest):
    """DW = alpha · (the gradient of conv by W)(DY, X) + beta · DW.

    Attributes:
        dy: (N, K, spatial…).
        x: (N, C, spatial…).
        out: DW, (K, C / groups, spatial…); with beta it is read as well.
        w_extents: the spatial extents of DW where `out` is left out.
        group_count: the number of groups where `out` is left out.

    The others are those of `ConvFwdRequest`.
    """

    op: ClassVar[str] = "conv_bwd_filter"
    reads: ClassVar[tuple[str, ...]] = ("dy", "x")
    writes: ClassVar[tuple[str, ...]] = ("out",)
    dy: Tensor
    x: Tensor
    out: Tensor | None = None
    w_extents: tuple[int, ...] | None = None
    group_count: int = 1
    pad: Padding = 0
    stride: int | tuple[int, ...] = 1
    dilation: int | tuple[int, ...] = 1
    alpha: float = 1.0
    beta: float = 0.0
    compute: Compute | None = None
    out_dtype: Any = None
    deterministic: bool = False
    workspace: int | None = None
    autotune: bool = False

    @property
    def x_shape(self) -> Shape:
        return self.x.shape

    @cached_property
    def w_shape(self) -> Shape:
        if self.out is not None:
            return self.out.shape
        return (self.dy.shape[1], self.x.shape[1] // self.group_count, *(self.w_extents or ()))

    @property
    def dtypes(self) -> tuple[Dtype | None, ...]:
        return (self.dy.dtype, self.x.dtype, self.result_dtype)

    def made(self) -> dict[str, Made]:
        return {"out": Made(self.w_shape, _dense(self.w_shape, last=self.channels_last), self.result_dtype)}

    def choices(self) -> tuple[Any, ...]:
        return (*super().choices(), self.w_shape)

    def check_fields(self) -> None:
        self._check_choices()
        self._check_ranks()
        whole("group_count", self.group_count, 1)
        if self.out is None and self.w_extents is None:
            raise BadRequest("w_extents", "None", "the spatial extents of the filter", "or pass out=…")
        if self.w_extents is not None:
            _each("w_extents", self.w_extents, self._rank, 1)
        if self.x.shape[1] % self.group_count:
            raise BadRequest("group_count", str(self.group_count), f"a divisor of the {self.x.shape[1]} channels of x")
        self._check_filter()
        if self.y_shape != self.dy.shape:
            raise BadRequest("dy", str(self.dy.layout), f"shape {self.y_shape}, that of conv(x {self.x_shape})")
