"""The requests of convolution by CUTLASS: forward, and the gradients of the data and of the filters.

Tensors are (N, C, spatial…) with one to three spatial axes, filters (K, C / groups, spatial…), as for cuDNN's requests;
kernels take them dense with channels last in memory. It is cross-correlation. This file calls nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dispatch.ops.conv.request import ConvBwdDataRequest, ConvBwdFilterRequest, Padding
from dispatch.ops.cutlass_conv.base import TreedConvRequest

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Compute
    from dispatch.libraries.cutlass.config import Config
    from dispatch.libraries.cutlass.evt import Node

__all__ = ["CutlassConvBwdDataRequest", "CutlassConvBwdFilterRequest", "CutlassConvFwdRequest"]

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class CutlassConvFwdRequest(TreedConvRequest):
    """Y = tree(conv(X, W), C, operands).

    Attributes:
        x: (N, C, spatial…).
        w: (K, C / groups, spatial…); the groups follow from the channels of both.
        c: of Y's shape, which the tree reads as `evt.source()`; it may be `out` itself.
        out: Y, (N, K, spatial…); channels last where it is left out.
        epilogue: a tree of `dispatch.evt`; None for alpha · conv + beta · C. Its rows are (K,), its cols
            (N, spatial…), what it loads and stores is of Y's shape.
        operands: what the tree names: tensors, or numbers for its scalars. A pair of each, or a mapping.
        pad: zeros around x: a number, one for each spatial axis, or a pair (before, behind) for each.
        stride, dilation: numbers, or one for each spatial axis.
        alpha, beta: the scalars of those names.
        compute: COMPUTE_32F_FAST_TF32 for f32 operands, which only run in TF32; else None.
        config: tile, cluster and schedule; None for what suits the extents.
    """

    op: ClassVar[str] = "cutlass_conv_fwd"
    mode: ClassVar[str] = "fwd"
    reads: ClassVar[tuple[str, ...]] = ("x", "w", "c")
    x: Tensor
    w: Tensor
    c: Tensor | None = None
    out: Tensor | None = None
    epilogue: Node | None = None
    operands: Any = ()
    pad: Padding = 0
    stride: int | tuple[int, ...] = 1
    dilation: int | tuple[int, ...] = 1
    alpha: float = 1.0
    beta: float | None = None  # type: ignore[assignment]  # a number from __post_init__ on
    compute: Compute | None = None
    out_dtype: Any = None
    config: Config | None = None

    @property
    def x_shape(self) -> Shape:
        return self.x.shape

    @property
    def w_shape(self) -> Shape:
        return self.w.shape

    @property
    def result_shape(self) -> Shape:
        return self.y_shape

    def check_fields(self) -> None:
        self._check_choices()
        self._check_ranks()
        self._check_filter()
        self._check_source()
        self._check_tree()


@dataclass(frozen=True, eq=False)
class CutlassConvBwdDataRequest(TreedConvRequest, ConvBwdDataRequest):
    """DX = tree((the gradient of conv by X)(DY, W), C, operands): also the transposed convolution of DY.

    Attributes:
        c: of DX's shape; it may be `out` itself.
        epilogue, operands, config: as in `CutlassConvFwdRequest`; to the tree, channels are those of DX.

    The others are those of `ConvBwdDataRequest`; beta scales C, and there is no choice of workspace or of algorithms.
    """

    op: ClassVar[str] = "cutlass_conv_bwd_data"
    mode: ClassVar[str] = "bwd_data"
    reads: ClassVar[tuple[str, ...]] = ("dy", "w", "c")
    beta: float | None = None  # type: ignore[assignment]
    c: Tensor | None = None
    epilogue: Node | None = None
    operands: Any = ()
    config: Config | None = None

    @property
    def result_shape(self) -> Shape:
        return self.x_shape

    def check_fields(self) -> None:
        ConvBwdDataRequest.check_fields(self)
        self._check_source()
        self._check_tree()


@dataclass(frozen=True, eq=False)
class CutlassConvBwdFilterRequest(TreedConvRequest, ConvBwdFilterRequest):
    """DW = alpha · (the gradient of conv by W)(DY, X) + beta · C.

    Attributes:
        c: of DW's shape; it may be `out` itself.
        epilogue, operands: a tree of numbers and C alone.
        config: as in `CutlassConvFwdRequest`.

    The others are those of `ConvBwdFilterRequest`; beta scales C, and there is no choice of workspace or of algorithms.
    """

    op: ClassVar[str] = "cutlass_conv_bwd_filter"
    mode: ClassVar[str] = "bwd_filter"
    reads: ClassVar[tuple[str, ...]] = ("dy", "x", "c")
    beta: float | None = None  # type: ignore[assignment]
    c: Tensor | None = None
    epilogue: Node | None = None
    operands: Any = ()
    config: Config | None = None

    @property
    def result_shape(self) -> Shape:
        return self.w_shape

    def check_fields(self) -> None:
        ConvBwdFilterRequest.check_fields(self)
        self._check_source()
        self._check_tree()
