"""The requests of normalization: `norm_fwd` and its gradient `norm_bwd`, in the modes of cuDNN's backend.

LAYER_NORM and RMS_NORM average over the last axes of x, those that `scale` has. BATCH_NORM and INSTANCE_NORM average
over the spatial axes of (N, C, spatial…), over the whole batch or for each sample; GROUP_NORM also over the channels of
a group. This file calls no library.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.checks import check_int, check_number
from dispatch.core.operand_checks import check_tensor
from dispatch.core.operands import OperandRequest, Output, dense, like, same_as
from dispatch.core.request import R_co
from dispatch.errors import BadRequest
from dispatch.keys import F32, Choice, member

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = ["NormBwdRequest", "NormFwdRequest", "NormMode", "NormRequest"]

Shape = tuple[int, ...]


class NormMode(Choice):
    """`cudnnBackendNormMode_t` without CUDNN_ADA_LAYER_NORM; GROUP_NORM runs as several graphs."""

    LAYER_NORM = 0
    INSTANCE_NORM = 1
    BATCH_NORM = 2
    GROUP_NORM = 3
    RMS_NORM = 4


class _ScaleFields(OperandRequest[R_co]):
    x: Tensor  # the field that follows dy in the gradient
    scale: Tensor


@dataclass(frozen=True, eq=False)
class NormRequest(_ScaleFields[R_co]):
    """The fields that forward and backward share.

    Attributes:
        mode: the axes of x that are averaged: LAYER_NORM and RMS_NORM average over the last axes, those that scale has;
            BATCH_NORM and INSTANCE_NORM over the spatial axes, the former over all images; GROUP_NORM also over the
            channels of a group.
        epsilon: added to the variance, above 0.
        groups: GROUP_NORM only: the number of groups of neighbouring channels; it is not autotuned.
        workspace: the most bytes an engine may use; None allows any size up to 1 GiB.
        autotune: time cuDNN's candidates once, keep the fastest, and remember it on disk.
    """

    advice: ClassVar[str] = "x dense at 16 bytes, scale and bias in f32, and no limit of workspace"
    _: KW_ONLY
    mode: NormMode | str = NormMode.LAYER_NORM
    epsilon: float = 1e-5
    workspace: int | None = None
    autotune: bool = False
    groups: int = 1

    @property
    def by_channel(self) -> bool:
        """Whether x is (N, C, spatial…) and scale has one number for each channel."""
        return self.mode in (NormMode.BATCH_NORM, NormMode.INSTANCE_NORM, NormMode.GROUP_NORM)

    @property
    def by_group(self) -> bool:
        return self.mode is NormMode.GROUP_NORM

    @property
    def axes(self) -> Shape:
        """The axes of x that are averaged over; GROUP_NORM also averages over the channels of a group."""
        if self.mode is NormMode.BATCH_NORM:
            return (0, *range(2, self.x.ndim))
        if self.mode in (NormMode.INSTANCE_NORM, NormMode.GROUP_NORM):
            return tuple(range(2, self.x.ndim))
        return tuple(range(self.x.ndim - self.scale.ndim, self.x.ndim))

    @property
    def parameter_shape(self) -> Shape:
        """The shape of scale that broadcasts with x."""
        return (1, *self.scale.shape, *(1,) * (self.x.ndim - 2)) if self.by_channel else self.scale.shape

    @property
    def statistics_shape(self) -> Shape:
        """The shape of mean and inverse variance.

        (C,) for BATCH_NORM, (N, groups) for GROUP_NORM, else that of x with extent 1 for averaged axes.
        """
        if self.mode is NormMode.BATCH_NORM:
            return (self.x.shape[1],)
        if self.by_group:
            return (self.x.shape[0], self.groups)
        return tuple(1 if axis in self.axes else extent for axis, extent in enumerate(self.x.shape))

    @property
    def has_mean(self) -> bool:
        return self.mode is not NormMode.RMS_NORM

    @property
    def dtypes(self) -> tuple[Dtype | None, ...]:
        return (self.x.dtype, self.x.dtype, self.scale.dtype)

    # -- checks ---------------------------------------------------------------------------------------------------
    def _check_parameters(self, *names: str) -> None:
        x, scale = self.x, self.scale
        if x.size == 0:
            raise BadRequest("x", str(x.layout), "extents of 1 or more", "skip the call for an empty batch")
        if self.by_channel:
            if not 2 <= x.ndim <= 5:
                raise BadRequest("x", str(x.layout), "(N, C, spatial…) with up to 3 spatial axes")
            wanted: Shape = (x.shape[1],)
        else:
            wanted = x.shape[x.ndim - scale.ndim :] if 1 <= scale.ndim <= x.ndim else x.shape[-1:]
        for name in ("scale", *names):
            tensor: Tensor | None = getattr(self, name)
            if tensor is None:
                continue
            if tensor.shape != wanted or not tensor.layout.is_contiguous:
                raise BadRequest(
                    name, str(tensor.layout), f"shape {wanted} for {member(self.mode).name} of x {x.layout}, dense"
                )
            if tensor.dtype is not scale.dtype:
                raise BadRequest(name, str(tensor.layout), f"dtype {scale.dtype}, that of scale")
        check_int("groups", self.groups, 1)
        if self.by_group and x.shape[1] % self.groups:
            raise BadRequest("groups", str(self.groups), f"a divisor of the {x.shape[1]} channels of x {x.layout}")
        if not self.by_group and self.groups != 1:
            raise BadRequest("groups", str(self.groups), f"1, because {member(self.mode).name} has no groups")
        if not self.epsilon > 0:
            raise BadRequest("epsilon", repr(self.epsilon), "a number above 0")

    def _check_statistics(self, *names: str) -> None:
        for name in names:
            check_tensor(name, getattr(self, name), F32, self.statistics_shape, dense=True)


@dataclass(frozen=True, eq=False)
class NormFwdRequest(NormRequest[R_co]):
    """Y = scale · (x - mean) / √(variance + epsilon) + bias; RMS_NORM has no mean, only that of x².

    Attributes:
        x: the operand; (N, C, spatial…) for BATCH_NORM, INSTANCE_NORM and GROUP_NORM.
        scale, bias: of the last axes of x, or (C,); f32 or of x's dtype.
        running_mean, running_var: f32 (C,), BATCH_NORM only. In training, `momentum` mixes them with the batch's
            statistics: new = (1 - momentum) · old + momentum · batch, with the unbiased variance. Without training, x
            is normalized with them.
        out: Y; if left out, it has the layout of x.
        mean_out, inv_variance_out: the statistics for the backward, f32, returned in training (RMS_NORM has no mean).
            For LAYER_NORM and RMS_NORM they have x's shape with 1 for each axis that is averaged over: (N, 1) for an x
            (N, C) with a scale (C,); for INSTANCE_NORM (N, C, 1…), for BATCH_NORM (C,), for GROUP_NORM (N, groups).
        running_mean_out, running_var_out: the new running statistics, returned if old ones are given.
        training: whether to return statistics, and for BATCH_NORM whether to use those of the batch.
        momentum: the weight of the batch's statistics in the running ones, from 0 to 1.

    Returns Y, or in training (Y, mean, inverse variance, and the new running statistics if old ones are given).
    Follows cuDNN's norm forward operation.

    What cuDNN supports in each mode; other requests raise NoRow:

    - x and out are dense, in C order or, for (N, C, spatial…), with channels last; for GROUP_NORM in C order; for
      BATCH_NORM without training with channels last, if there are spatial axes.
    - BATCH_NORM in training needs a multiple of 4 channels in f32, and of 8 in f16 and bf16.
    - BATCH_NORM in training and INSTANCE_NORM need a bias, which may be zeros.
    - scale and bias of GROUP_NORM are f32.
    """

    op: ClassVar[str] = "norm_fwd"
    reads: ClassVar[tuple[str, ...]] = ("x", "scale", "bias", "running_mean", "running_var")
    writes: ClassVar[tuple[str, ...]] = ("out", "mean_out", "inv_variance_out", "running_mean_out", "running_var_out")
    x: Tensor
    scale: Tensor
    bias: Tensor | None = None
    _: KW_ONLY
    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    out: Tensor | None = None
    mean_out: Tensor | None = None
    inv_variance_out: Tensor | None = None
    running_mean_out: Tensor | None = None
    running_var_out: Tensor | None = None
    momentum: float = 0.1
    training: bool = False

    @property
    def by_running(self) -> bool:
        """Whether x is normalized with given statistics."""
        return self.mode is NormMode.BATCH_NORM and not self.training

    def outputs(self) -> dict[str, Output]:
        outputs = {"out": like(self.x.layout)}
        if self.training:
            statistics = dense(self.statistics_shape, F32)
            if self.has_mean:
                outputs["mean_out"] = statistics
            outputs["inv_variance_out"] = statistics
            if self.running_mean is not None:
                outputs["running_mean_out"] = outputs["running_var_out"] = statistics
        return outputs

    def check_fields(self) -> None:
        self._check_parameters("bias")
        check_number("momentum", self.momentum, low=0, high=1)
        if (self.running_mean is None) != (self.running_var is None):
            missing = "running_mean" if self.running_mean is None else "running_var"
            raise BadRequest(missing, "nothing", "both running statistics, or neither")
        if self.running_mean is not None and self.mode is not NormMode.BATCH_NORM:
            raise BadRequest(
                "running_mean", "a tensor", f"None, because {member(self.mode).name} has no running statistics"
            )
        if self.by_running and self.running_mean is None:
            raise BadRequest("running_mean", "nothing", "running statistics for BATCH_NORM without training")
        self._check_statistics("running_mean", "running_var", "mean_out", "inv_variance_out")


@dataclass(frozen=True, eq=False)
class NormBwdRequest(NormRequest["tuple[Tensor, ...]"]):
    """dX, dscale and dbias of `norm_fwd`, from dY, x, scale and the statistics that the forward returned.

    Attributes:
        dy, x: of one shape and dtype.
        scale: as in the forward.
        inv_variance, mean: the results of `norm_fwd(…, training=True)`, in the shapes that `NormFwdRequest` documents
            for inv_variance_out and mean_out; RMS_NORM has no mean.
        dx, dscale, dbias: the gradients.
        bias: False leaves dbias out (RMS_NORM only).

    What cuDNN supports in each mode; other requests raise NoRow:

    - x, dy and dx are dense, in C order or, for BATCH_NORM, also all with channels last; for INSTANCE_NORM and
      GROUP_NORM they are in C order.
    - BATCH_NORM needs a multiple of 4 channels in f32, and of 8 in f16 and bf16.
    - The scale of GROUP_NORM is f32.
    """

    op: ClassVar[str] = "norm_bwd"
    reads: ClassVar[tuple[str, ...]] = ("dy", "x", "scale", "inv_variance", "mean")
    writes: ClassVar[tuple[str, ...]] = ("dx", "dscale", "dbias")
    dy: Tensor
    x: Tensor
    scale: Tensor
    inv_variance: Tensor
    mean: Tensor | None = None
    _: KW_ONLY
    dx: Tensor | None = None
    dscale: Tensor | None = None
    dbias: Tensor | None = None
    bias: bool = True

    def outputs(self) -> dict[str, Output]:
        outputs = {"dx": like(self.x.layout), "dscale": dense(self.scale.shape, self.scale.dtype)}
        if self.bias:
            outputs["dbias"] = outputs["dscale"]
        return outputs

    def check_fields(self) -> None:
        self._check_parameters()
        same_as("dy", self.dy, "x", self.x)
        if not self.bias and self.mode is not NormMode.RMS_NORM:
            raise BadRequest("bias", "False", f"True, because {member(self.mode).name} has a bias")
        if self.has_mean != (self.mean is not None):
            wanted = "the mean that norm_fwd returned" if self.has_mean else "None, because RMS_NORM has no mean"
            raise BadRequest("mean", "nothing" if self.mean is None else "a tensor", wanted)
        self._check_statistics("inv_variance", "mean")
