"""The fields and checks that the requests of convolution share: padding, stride, dilation, groups, layouts, factors.

`request.py` derives the three requests from ConvRequest; trees.py has the fields for CUTLASS. A request is validated
when it is made. This file calls no library.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cudabind._cached import cached_property
from dispatch.checks import check_int, shown
from dispatch.core.layouts import dense_strides, lies_dense
from dispatch.core.operand_checks import each
from dispatch.core.request import R_co
from dispatch.device.layout import c_strides
from dispatch.errors import BadRequest
from dispatch.keys import Choice, Dtype
from dispatch.libraries.cudnn.convolve import Steps, output_shape
from dispatch.ops.conv.trees import TreeConvRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.core.operands import Output
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Compute
    from dispatch.libraries.cutlass.config import Config
    from dispatch.libraries.cutlass.evt import Node

__all__ = ["Activation", "ConvRequest", "Padding"]

Shape = tuple[int, ...]
Padding = int | tuple[int, ...] | tuple[tuple[int, int], ...]  # for all axes; for each; (before, after) for each
MAX_AXES = 3


class Activation(Choice):
    """`cudnnPointwiseMode_t`: the activation of a forward convolution."""

    IDENTITY = 21
    RELU_FWD = 100
    TANH_FWD = 101
    SIGMOID_FWD = 102
    ELU_FWD = 103
    GELU_FWD = 104
    SOFTPLUS_FWD = 105
    SWISH_FWD = 106
    GELU_APPROX_TANH_FWD = 107

    @staticmethod
    def other_names() -> dict[str, str]:
        return {"GELU": "GELU_FWD"}


@dataclass(frozen=True, eq=False)
class ConvRequest(TreeConvRequest[R_co]):
    """The fields that the three requests share: padding, stride, dilation, groups, and the factors of results.

    No extent is 0. For cuDNN every operand begins at a multiple of 16 bytes, except one of a single element, and a
    filter, or its gradient, has no gaps, and its channels first or last: copy views like x[1:] and w[..., :3]. If an
    image has gaps, all operands have their channels first, or all last.

    Attributes:
        pad: zeros around x: a number, one for each spatial axis, or a pair (before, behind) for each.
        stride, dilation: numbers, or one for each spatial axis.
        alpha: the factor of the convolution.
        beta: what z is multiplied with, or without a z, of gradients, what was in `out` before.
        compute: None takes the row's own; f32 is rounded to TF32 only if COMPUTE_32F_FAST_TF32 is given here.
        out_dtype: the dtype of the result if `out` is left out; None for that of the operands.
        deterministic: return the same bits in every run.
        workspace: the most bytes an engine may use; None allows any size up to 1 GiB.
        autotune: time the candidates of all libraries once, keep the fastest, and remember it on disk.
    """

    advice: ClassVar[str] = "dense operands with channels last, multiples of 8 channels, and fewer limits on engines"
    _: KW_ONLY
    z: Tensor | None = None
    out: Tensor | None = None
    pad: Padding = 0
    stride: int | tuple[int, ...] = 1
    dilation: int | tuple[int, ...] = 1
    alpha: float = 1.0
    beta: float | None = None  # type: ignore[assignment]  # a number from __post_init__ on
    compute: Compute | str | None = None
    out_dtype: Any = None
    deterministic: bool = False
    workspace: int | None = None
    autotune: bool = False
    epilogue: Node | None = None
    operands: Any = ()
    config: Config | None = None
    library: str | None = None

    @property
    @abstractmethod
    def x_shape(self) -> Shape:
        """The shape of the tensor that the filter slides over: X, or its gradient."""

    @property
    @abstractmethod
    def w_shape(self) -> Shape:
        """The shape of the filter, or of its gradient."""

    @property
    def x_name(self) -> str:
        """The argument that has `x_shape`, for messages; `out` also if it is left out."""
        return "x"

    @property
    def w_name(self) -> str:
        """The argument that determines the extents of `w_shape`."""
        return "w"

    @cached_property
    def steps(self) -> Steps:
        """Padding, stride and dilation of each spatial axis."""
        rank = self._rank
        pairs = _pairs(self.pad, rank)
        stride, dilation = (each(n, getattr(self, n), rank, 1) for n in ("stride", "dilation"))
        return Steps(tuple(p for p, _ in pairs), tuple(p for _, p in pairs), stride, dilation)

    @property
    def _rank(self) -> int:
        first: Tensor = getattr(self, self.operand_names[0])
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
        first: Tensor = getattr(self, self.operand_names[0])
        return first.dtype if self.out_dtype is None else Dtype.of(self.out_dtype)

    @cached_property
    def channels_last(self) -> bool:
        """Whether the operands have channels last in memory.

        The first operand whose strides fit only one order decides. With one channel or one pixel they fit both; if that
        is so for all operands, it is whether one of them has exactly the strides of channels last.
        """
        given = [getattr(self, name) for name in (*self.operand_names[:2], "out", "z")]
        layouts = [tensor.layout for tensor in given if tensor is not None]
        for layout in layouts:
            fits_last, fits_first = (lies_dense(layout, last=last) for last in (True, False))
            if fits_last != fits_first:
                return fits_last
        return any(dense_strides(one.shape, last=True) == one.strides != c_strides(one.shape) for one in layouts)

    @property
    def repeatable(self) -> bool:
        return not self.accumulates and super().repeatable

    @property
    def extra_choice(self) -> Any:
        """The part of the key that only one of the operations has: the activation, or the shape of a gradient."""
        return self.result_shape

    def outputs(self) -> dict[str, Output]:
        out = self.image(self.result_dtype, last=self.has_tree or self.channels_last)
        return {"out": out, **(self.tree_outputs if self.has_tree else {})}

    def strides_of(self, name: str) -> Shape:
        """The strides of an operand; axes of extent 1, whose strides are arbitrary, get those of a dense tensor."""
        layout = self.layout_of(name)
        shape, strides = layout.shape, layout.strides
        for last in (self.channels_last, not self.channels_last):
            wanted = dense_strides(shape, last=last)
            if all(e == 1 or s == t for e, s, t in zip(shape, strides, wanted, strict=True)):
                return wanted
        return strides

    def attributes(self) -> tuple[Any, ...]:
        if self.has_tree:
            return (*self.steps, *self.tree_choices())
        numbers = (self.alpha, self.beta, self.compute, self.result_dtype.cuda)
        plain = (*self.steps, *numbers, self.deterministic, self.workspace, self.autotune, self.extra_choice)
        return plain if self.library is None else (*plain, self.library)

    # -- checks ---------------------------------------------------------------------------------------------------
    def _check_choices(self) -> None:
        if self.workspace is not None:
            check_int("workspace", self.workspace, 0, 1 << 40)
        if self.out_dtype is not None and self.out is not None:
            wanted = Dtype.of(self.out_dtype)
            if self.out.dtype is not wanted:
                raise BadRequest("out_dtype", str(wanted), f"{self.out.dtype}, the dtype of out, or None")
        if self.accumulates and self.out is None:
            raise BadRequest("beta", repr(self.beta), "0, because no out is passed that could be scaled", "pass out=…")

    def _check_ranks(self) -> None:
        first: Tensor = getattr(self, self.operand_names[0])
        if not 3 <= first.ndim <= 2 + MAX_AXES:
            hint = "x[..., None] adds an axis"
            raise BadRequest(
                self.operand_names[0], str(first.layout), "(N, C, spatial…) with 1 to 3 spatial axes", hint
            )
        for name in (*self.operand_names[:2], *(("out",) if self.out is not None else ())):
            tensor: Tensor = getattr(self, name)
            if tensor.ndim != first.ndim:
                raise BadRequest(name, str(tensor.layout), f"{first.ndim} axes, like {self.operand_names[0]}")
            if tensor.size == 0:
                raise BadRequest(name, str(tensor.layout), "extents of 1 or more", "skip the call for an empty batch")
            self._check_steps(name, tensor)

    @staticmethod
    def _check_steps(name: str, tensor: Tensor | None) -> None:
        """Check that strides are positive, as cuDNN's descriptors require."""
        if tensor is not None and any(
            step < 1 and extent > 1 for step, extent in zip(tensor.layout.strides, tensor.shape, strict=True)
        ):
            raise BadRequest(name, str(tensor.layout), "steps forward", "copy it: dev.array(x)")

    def _check_filter(self) -> None:
        """Check that X and W fit: whole groups, and a filter that fits into the padded input."""
        x, w = self.x_shape, self.w_shape
        image_text = f"{self.x_name} {x}"
        if x[1] % w[1]:
            raise BadRequest(
                self.w_name, f"filters over {w[1]} channels", f"a divisor of the {x[1]} channels of {image_text}"
            )
        if w[0] % self.groups:
            name = "dy" if self.mode == "bwd_filter" else self.w_name
            raise BadRequest(
                name, f"{w[0]} filters", f"a multiple of the {self.groups} groups of {image_text} over w {w}"
            )
        if min(self.y_shape) < 1:
            hint = "use more padding, or a smaller filter or dilation"
            raise BadRequest(
                self.w_name,
                f"a filter {w[2:]} by dilation {self.steps.dilation}",
                f"a filter that fits into {image_text}",
                hint,
            )


def _pairs(value: Any, rank: int) -> list[tuple[int, int]]:
    values: Sequence[Any] = value if isinstance(value, tuple) else (value,) * rank
    if len(values) != rank:
        raise BadRequest("pad", shown(value), f"a number, or a number or a pair for each of the {rank} spatial axes")
    pairs = []
    for item in values:
        before, after = item if isinstance(item, tuple) and len(item) == 2 else (item, item)
        pairs.append((check_int("pad", before, 0), check_int("pad", after, 0)))
    return pairs
