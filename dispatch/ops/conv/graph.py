"""A convolution request as a graph of cuDNN operations, with the indices of its operands among the request's arguments.

`cudnn.py` binds the graph, `reference.py` evaluates the same one in NumPy. This file calls no library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.keys import BF16, F16, F32, F64, I8, I32, Compute, Dtype, member
from dispatch.libraries.cudnn.request_graph import LoweredGraph, RequestGraphBuilder
from dispatch.ops.conv.request import Activation, ConvBwdDataRequest, ConvBwdFilterRequest, ConvFwdRequest

if TYPE_CHECKING:
    from dispatch.libraries.cudnn.graph import Graph, Value, Wire
    from dispatch.ops.conv.request import ConvRequest

__all__ = ["graphs", "lower_to_graph", "precision"]


def precision(request: ConvRequest) -> Dtype:
    """The dtype of sums."""
    first = request.dtypes[0]
    if first is I8:
        return I32
    return F64 if first is F64 or request.compute is Compute.COMPUTE_64F else F32


def lower_to_graph(request: ConvRequest) -> LoweredGraph:
    """The graph of a request."""
    return _GraphBuilder(request).draw()


def graphs(request: ConvRequest) -> list[Graph]:
    """The list of the request's only graph."""
    return [lower_to_graph(request).graph]


class _GraphBuilder(RequestGraphBuilder["ConvRequest"]):
    def __init__(self, request: ConvRequest) -> None:
        super().__init__(request, precision(request))
        self._steps: dict[str, Value] = dict(zip(("PRE", "POST", "STRIDE", "DILATION"), request.steps, strict=True))

    def draw(self) -> LoweredGraph:
        request = self.request
        if isinstance(request, ConvBwdDataRequest):
            self._gradient("CONVOLUTION_BACKWARD_DATA", ("DY", "W"), "DX")
        elif isinstance(request, ConvBwdFilterRequest):
            self._gradient("CONVOLUTION_BACKWARD_FILTER", ("DY", "X"), "DW")
        elif isinstance(request, ConvFwdRequest) and (request.fused or (request.x.dtype.is_fp8 and request.alpha != 1)):
            self._fused(request)
        else:
            self._node(
                "CONVOLUTION_FORWARD", {"X": self._tensor("x"), "W": self._tensor("w")}, "Y", self._tensor("out")
            )
        return self.lowered()

    def _tensor(self, name: str) -> Wire:
        return self.operand(name, self.request.layout_of(name).shape, self.request.strides_of(name))

    def _node(self, kind: str, ins: dict[str, Wire], name: str, out: Wire, **scaling: Value) -> None:
        numbers: dict[str, Value] = {"ALPHA": float(self.request.alpha), "BETA": 0.0, **scaling}
        self.builder.convolution(kind, ins, {name: out}, **self._steps, **numbers)

    def _gradient(self, kind: str, names: tuple[str, str], result: str) -> None:
        ins = {name: self._tensor(field) for name, field in zip(names, self.request.reads, strict=True)}
        self._node(kind, ins, result, self._tensor("out"), BETA=float(self.request.beta or 0))

    def _fused(self, request: ConvFwdRequest) -> None:
        """Convolution, scaling, residual, bias, activation: the order for which cuDNN has its own kernels."""
        builder = self.builder
        x, w = self._tensor("x"), self._tensor("w")
        strides = request.strides_of("out")
        rank = len(request.y_shape)
        value = builder.virtual(request.y_shape, None, strides)
        self._node("CONVOLUTION_FORWARD", {"X": x, "W": w}, "Y", value, ALPHA=1.0)
        # The i8 convolution is scaled and activated in f32, and rounded at the end.
        dtype = F32 if request.x.dtype is I8 else builder.compute
        precise: dict[str, Value] = {"MATH_PREC": dtype.name} if dtype is not builder.compute else {}

        def then(mode: str, *others: Wire) -> Wire:
            out = builder.virtual(request.y_shape, dtype, strides)
            return builder.pointwise(mode, value, *others, out=out, **precise)

        alpha, beta = float(request.alpha), 1.0 if request.z is None else float(request.beta or 0)
        # beta · (alpha / beta · conv + z): cuDNN 9.19 gives wrong numbers for beta · z in f32, and in f16 with groups.
        is_split = beta not in (0, 1) and request.x.dtype in (F16, BF16, F32)
        factor = alpha / beta if is_split else alpha
        if factor != 1:
            value = then("MUL", builder.scalar(factor, rank))
        if request.z is not None and beta != 0:
            z = self._tensor("z")
            if beta != 1 and not is_split:
                scaled = builder.virtual(request.y_shape, dtype, strides)
                z = builder.pointwise("MUL", z, builder.scalar(beta, rank), out=scaled, **precise)
            value = then("ADD", z)
        if is_split:
            value = then("MUL", builder.scalar(beta, rank))
        if request.bias is not None:
            value = then("ADD", self._bias(request))
        if request.activation is not Activation.IDENTITY:
            value = then(member(request.activation).name)
        self.output("out", value, strides)

    def _bias(self, request: ConvFwdRequest) -> Wire:
        filters, rank = request.layout_of("bias").shape[0], len(request.y_shape)
        dims = (1, filters, *(1,) * (rank - 2))
        strides = (filters, 1, *(filters if request.channels_last else 1,) * (rank - 2))
        return self.operand("bias", dims, strides)
