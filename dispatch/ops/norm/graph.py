"""A normalization request as a graph of cuDNN operations, with the indices of its operands among the arguments.

Usually the graph is one norm operation; batch norm with given statistics is a chain of pointwise operations. This file
calls no library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.core.layouts import dense_strides, lies_dense
from dispatch.keys import member
from dispatch.libraries.cudnn.request_graph import LoweredGraph, RequestGraphBuilder
from dispatch.ops.norm.group import group_norm_steps
from dispatch.ops.norm.request import NormBwdRequest, NormFwdRequest, NormMode

if TYPE_CHECKING:
    from dispatch.device.layout import Layout
    from dispatch.libraries.cudnn.graph import Graph, Wire
    from dispatch.ops.norm.request import NormRequest

__all__ = ["graphs", "lower_to_graph"]

MIN_AXES = 4  # the fewest axes that the engines take


def lower_to_graph(request: NormRequest) -> LoweredGraph:
    """The graph of a request."""
    graph_builder = _GraphBuilder(request)
    if isinstance(request, NormBwdRequest):
        graph_builder.backward(request)
    elif isinstance(request, NormFwdRequest) and request.by_running:
        graph_builder.by_running(request)
    elif isinstance(request, NormFwdRequest):
        graph_builder.forward(request)
    return graph_builder.lowered()


def graphs(request: NormRequest) -> list[Graph]:
    """The graphs of a request: several for GROUP_NORM."""
    return (
        [step.graph for step in group_norm_steps(request).steps]
        if request.by_group
        else [lower_to_graph(request).graph]
    )


class _GraphBuilder(RequestGraphBuilder["NormRequest"]):
    def __init__(self, request: NormRequest) -> None:
        super().__init__(request)
        self._rank = max(request.x.ndim, MIN_AXES) if request.by_channel else MIN_AXES
        strides = request.x.layout.strides
        # The other axes determine the layout if an axis has extent 1.
        self._last = request.by_channel and request.x.shape[1] > 1 and strides[1] == 1

    def data(self, name: str) -> Wire:
        """An operand of x's shape: as it is, or as (rows, averaged elements, 1, 1)."""
        request = self.request
        layout = request.layout_of(name)
        if request.by_channel:
            more = self._rank - len(layout.shape)
            channels = layout.shape[1] if self._last else 1
            return self.operand(name, (*layout.shape, *(1,) * more), (*self._strides(layout), *(channels,) * more))
        width = self._width()
        return self.operand(name, (layout.size // width, width, 1, 1), (width, 1, width, width))

    def _strides(self, layout: Layout) -> tuple[int, ...]:
        """The strides of a dense image: a view may have any strides for axes of one element, such as 0 in `x[None]`."""
        request = self.request
        last_first = isinstance(request, NormFwdRequest) and request.by_running  # this row requires channels last
        last_first |= self._last and len(layout.shape) < MIN_AXES  # the added axes have this order
        ways = {last: dense_strides(layout.shape, last=last) for last in (last_first, not last_first)}
        if not last_first and layout.strides in ways.values():
            return layout.strides
        return next((strides for last, strides in ways.items() if lies_dense(layout, last=last)), layout.strides)

    def _width(self) -> int:
        return self.request.scale.layout.size

    def parameter(self, name: str) -> Wire:
        """An operand with a number for each channel, or for each averaged element."""
        return self._vector(name, 1)

    def _vector(self, name: str, axis: int) -> Wire:
        size = self.request.layout_of(name).size
        dims = tuple(size if place == axis else 1 for place in range(self._rank))
        strides = tuple(1 if place >= axis and (place == axis or axis == 0) else size for place in range(self._rank))
        return self.operand(name, dims, strides)

    def statistic(self, name: str) -> Wire:
        """Mean or inverse variance: of each channel, of each channel of each sample, or of each row."""
        request = self.request
        if request.mode is NormMode.BATCH_NORM:
            return self.parameter(name)
        if request.mode is NormMode.INSTANCE_NORM:
            n, c = request.x.shape[:2]
            return self.operand(name, (n, c, *(1,) * (self._rank - 2)), (c, 1, *(c,) * (self._rank - 2)))
        return self._vector(name, 0)

    def forward(self, request: NormFwdRequest) -> None:
        builder = self.builder
        ins: dict[str, Wire | None] = {"XDESC": self.data("x"), "SCALE_DESC": self.parameter("scale")}
        ins["BIAS_DESC"] = None if request.bias is None else self.parameter("bias")
        ins["EPSILON_DESC"] = builder.scalar(float(request.epsilon), self._rank)
        outs: dict[str, Wire | None] = {"YDESC": self.data("out")}
        if request.training:
            outs["MEAN_DESC"] = self.statistic("mean_out") if request.has_mean else None
            outs["INV_VARIANCE_DESC"] = self.statistic("inv_variance_out")
        if request.training and request.running_mean is not None:
            ins["EXP_AVG_FACTOR_DESC"] = builder.scalar(float(request.momentum), self._rank)
            for name in ("mean", "var"):
                ins[f"INPUT_RUNNING_{name.upper()}_DESC"] = self.statistic(f"running_{name}")
                outs[f"OUTPUT_RUNNING_{name.upper()}_DESC"] = self.statistic(f"running_{name}_out")
        phase = "TRAINING" if request.training else "INFERENCE"
        builder.node("NORM_FORWARD", ins, outs, MODE=member(request.mode).name, PHASE=phase)

    def by_running(self, request: NormFwdRequest) -> None:
        """Pointwise, because no norm operation reads statistics: (x - mean) / √(variance + epsilon) · scale + bias."""
        builder = self.builder
        x = self.data("x")
        spread = builder.pointwise(
            "ADD", self.statistic("running_var"), builder.scalar(float(request.epsilon), self._rank)
        )
        inverse = builder.pointwise("RSQRT", spread)
        value = x
        operations = [("SUB", self.statistic("running_mean")), ("MUL", inverse), ("MUL", self.parameter("scale"))]
        if request.bias is not None:
            operations.append(("ADD", self.parameter("bias")))
        for mode, operand in operations:
            value = builder.pointwise(mode, value, operand, out=builder.virtual(x.dims, None, x.strides))
        self.output("out", value, x.strides)

    def backward(self, request: NormBwdRequest) -> None:
        ins: dict[str, Wire | None] = {
            "XDESC": self.data("x"),
            "DYDESC": self.data("dy"),
            "SCALE_DESC": self.parameter("scale"),
            "MEAN_DESC": self.statistic("mean") if request.has_mean else None,
            "INV_VARIANCE_DESC": self.statistic("inv_variance"),
        }
        outs = {
            "DXDESC": self.data("dx"),
            "DSCALE_DESC": self.parameter("dscale"),
            "DBIAS_DESC": self.parameter("dbias") if request.bias else None,
        }
        self.builder.node("NORM_BACKWARD", ins, outs, MODE=member(request.mode).name)
