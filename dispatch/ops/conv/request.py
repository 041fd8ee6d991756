"""The requests of convolution: `conv_fwd` with its fused operations, and `conv_bwd_data`, `conv_bwd_filter`.

Tensors are (N, C, spatial…) with one to three spatial axes, filters (K, C / groups, spatial…), with any strides (NCHW,
NHWC or others). The operation is cross-correlation, as everywhere in cuDNN. This file calls no library.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cudabind._cached import cached_property
from dispatch.checks import check_int, check_type
from dispatch.core.operand_checks import each
from dispatch.core.request import R_co
from dispatch.errors import BadRequest
from dispatch.ops.conv.base import Activation, ConvRequest, Padding

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = ["Activation", "ConvBwdDataRequest", "ConvBwdFilterRequest", "ConvFwdRequest", "ConvRequest", "Padding"]

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ConvFwdRequest(ConvRequest[R_co]):
    """Y = activation(alpha · conv(X, W) + beta · Z + bias).

    Attributes:
        x: (N, C, spatial…).
        w: (K, C / groups, spatial…); the groups follow from the channels of both.
        bias: (K,), dense; f32 with an i8 convolution.
        z: of Y's shape, added as beta · Z; `beta` is 1 if z is given and else 0. With a beta of 0 it must be
            finite: CUTLASS multiplies it by 0, others do not read it. For CUTLASS it may be `out` itself.
        beta: what z is multiplied with; without a z it is 0, because the content of `out` is not read.
        out: Y, (N, K, spatial…); if left out, it has the layout of x. If x has one channel or one pixel, w and z decide
            whether that is channels first or last, and if they fit both, too, the strides.
        activation: a mode of `cudnnPointwiseMode_t`.
        alpha: the factor of the convolution. i8 is summed exactly; scaling and fused operations are f32, rounded at the
            end if the result is i8.

    What cuDNN fuses depends on the dtype and on the layout of x, w, z and Y; other requests raise NoRow:

    - Nothing (alpha may be any): any layout; of i8 to f32 and of fp8 all dense with channels last.
    - f64, f32, TF32, f16 and bf16 in any layout: a bias with IDENTITY, RELU_FWD or SIGMOID_FWD, or a bias and z with
      RELU_FWD and a beta of 0 or 1; alpha is 1.
    - f32, TF32, f16 and bf16 with channels last: any of bias, z, alpha and beta with any activation; TANH_FWD not in
      f32 without TF32. f64 has no TANH_FWD, and nothing more than in other layouts.
    - i8, with a bias of f32 and a z of i8 or f32, and fp8, whose bias and z have the dtype of Y: any of these with any
      activation, all dense with channels last; fp8 with two or three spatial axes.
    """

    op: ClassVar[str] = "conv_fwd"
    mode: ClassVar[str] = "fwd"
    operand_names: ClassVar[tuple[str, ...]] = ("x", "w")
    x: Tensor
    w: Tensor
    _: KW_ONLY
    bias: Tensor | None = None
    activation: Activation | str = Activation.IDENTITY

    @classmethod
    def plain_reads(cls) -> tuple[str, ...]:
        return ("x", "w", "bias", "z")

    @cached_property
    def reads(self) -> tuple[str, ...]:
        return ("x", "w", "z") if self.has_tree else self.plain_reads()

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
    def fused_fields(self) -> tuple[str, ...]:
        """The fused operations in fields that must not be given with a tree, which contains them itself."""
        names = ("bias",) if self.bias is not None else ()
        return names if self.activation is Activation.IDENTITY else (*names, "activation")

    @property
    def fused(self) -> bool:
        """Whether the request has a bias, a z or an activation."""
        return self.bias is not None or self.z is not None or self.activation is not Activation.IDENTITY

    @property
    def result_shape(self) -> Shape:
        return self.y_shape

    @property
    def extra_choice(self) -> Any:
        return self.activation

    def check_fields(self) -> None:
        self._check_choices()
        self._check_ranks()
        self._check_filter()
        if self.has_tree and self.fused_fields:
            fields = " and ".join(self.fused_fields)
            hint = "in the tree, evt.row('bias') adds a bias and evt.relu(x) is an activation"
            raise BadRequest(self.fused_fields[0], fields, "None with an epilogue tree or a CUTLASS kernel", hint)
        if self.bias is not None and (self.bias.shape != (self.w.shape[0],) or not self.bias.layout.is_contiguous):
            raise BadRequest("bias", str(self.bias.layout), f"shape ({self.w.shape[0]},), one for each filter, dense")
        self.check_source()
        self._check_steps("z", self.z)
        self.check_operands()


@dataclass(frozen=True, eq=False)
class ConvGradientRequest(ConvRequest[R_co]):
    """The fields that the two gradients share.

    Attributes:
        dy: (N, K, spatial…).
        z: of the result's shape, added as beta · Z, only by CUTLASS; it may be `out` itself. `beta` is 1 if z is given
            and else 0.
    """

    dy: Tensor
    _: KW_ONLY
    group_count: int | None = None

    @property
    def dtypes(self) -> tuple[Dtype | None, ...]:
        first, second = (getattr(self, name).dtype for name in self.operand_names)
        return (first, second, self.result_dtype, *self.source_dtype)

    def check_fields(self) -> None:
        self._check_choices()
        self._check_ranks()
        if self.group_count is not None:
            check_int("group_count", self.group_count, 1)
        self._check_result()
        self._check_filter()
        if self.group_count not in (None, self.groups):
            name = "w" if self.mode == "bwd_data" else "x"
            of_operands = f"that of out {self.result_shape} and {name} {getattr(self, name).shape}, or None"
            raise BadRequest("group_count", str(self.group_count), f"{self.groups}, {of_operands}")
        if self.y_shape != self.dy.shape:
            hint = "x_extents=… chooses among the extents that the stride allows" if self.mode == "bwd_data" else ""
            wanted = f"shape {self.y_shape}, that of conv({self.x_name} {self.x_shape})"
            raise BadRequest("dy", str(self.dy.layout), wanted, hint)
        self.check_source()
        self.check_operands()

    @abstractmethod
    def _check_result(self) -> None:
        """Check the fields that determine the shape of the result."""

    def _check_extents(self, name: str) -> None:
        """Check the spatial extents, if given."""
        if getattr(self, name) is not None:
            each(name, check_type(name, getattr(self, name), tuple), self._rank, 1)


@dataclass(frozen=True, eq=False)
class ConvBwdDataRequest(ConvGradientRequest[R_co]):
    """DX = alpha · (the gradient of conv by X)(DY, W) + beta · DX: also the transposed convolution of DY.

    Attributes:
        w: (K, C / groups, spatial…).
        out: DX, (N, C, spatial…); with beta, and without z, it is read as well.
        x_extents: the spatial extents of DX if `out` is left out; None takes the smallest that is possible for DY.
        group_count: the number of groups, which does not follow from DY and W. None takes the one of `out`, 1 if it is
            left out.
    """

    op: ClassVar[str] = "conv_bwd_data"
    mode: ClassVar[str] = "bwd_data"
    operand_names: ClassVar[tuple[str, ...]] = ("dy", "w")
    w: Tensor
    _: KW_ONLY
    x_extents: tuple[int, ...] | None = None

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
        return (self.dy.shape[0], self.w.shape[1] * (self.group_count or 1), *extents)

    @property
    def x_name(self) -> str:
        return "out"

    @property
    def w_shape(self) -> Shape:
        return self.w.shape

    @property
    def result_shape(self) -> Shape:
        return self.x_shape

    def _check_result(self) -> None:
        self._check_extents("x_extents")
        if min(self.x_shape) < 1:
            raise BadRequest("pad", repr(self.pad), f"less: the result would be {self.x_shape}")


@dataclass(frozen=True, eq=False)
class ConvBwdFilterRequest(ConvGradientRequest[R_co]):
    """DW = alpha · (the gradient of conv by W)(DY, X) + beta · DW.

    Attributes:
        x: (N, C, spatial…).
        out: DW, (K, C / groups, spatial…); with beta, and without z, it is read as well.
        w_extents: the spatial extents of DW if `out` is left out.
        group_count: the number of groups; None takes the one of `out`, 1 if it is left out.
    """

    op: ClassVar[str] = "conv_bwd_filter"
    mode: ClassVar[str] = "bwd_filter"
    operand_names: ClassVar[tuple[str, ...]] = ("dy", "x")
    x: Tensor
    _: KW_ONLY
    w_extents: tuple[int, ...] | None = None

    @property
    def x_shape(self) -> Shape:
        return self.x.shape

    @cached_property
    def w_shape(self) -> Shape:
        if self.out is not None:
            return self.out.shape
        return (self.dy.shape[1], self.x.shape[1] // (self.group_count or 1), *(self.w_extents or ()))

    @property
    def w_name(self) -> str:
        return "w_extents" if self.out is None else "out"

    @property
    def result_shape(self) -> Shape:
        return self.w_shape

    def _check_result(self) -> None:
        if self.out is None and self.w_extents is None:
            raise BadRequest("w_extents", "None", "the spatial extents of the filter", "or pass out=…")
        self._check_extents("w_extents")
        if self.out is None and self.x.shape[1] % (self.group_count or 1):
            raise BadRequest("group_count", str(self.group_count), f"a divisor of the {self.x.shape[1]} channels of x")
