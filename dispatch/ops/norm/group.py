"""Group norm and its gradient as several graphs of cuDNN, which has the mode but no engine for it (9.19, sm_90).

Instance norm over (N, groups, rest) computes the statistics and the gradient of x. Parameters that differ by channel
are applied by pointwise graphs over matrices, for which cuDNN's engines support a number for each row, or for each
column. Forward: the statistics, at most four small graphs that compute the numbers of every channel of every sample,
and one over x. Gradient: three small graphs, dY · scale, and instance norm backward twice, by channel for dscale and
dbias and by group for dX. This file calls no library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.keys import F32
from dispatch.libraries.cudnn.graph_sequence import GraphSequence, GraphStep, Intermediate
from dispatch.libraries.cudnn.request_graph import GraphMemory, PlacedGraphBuilder, operand_memory
from dispatch.ops.norm.request import NormBwdRequest, NormFwdRequest

if TYPE_CHECKING:
    from dispatch.keys import Dtype
    from dispatch.libraries.cudnn.graph import Wire
    from dispatch.ops.norm.request import NormRequest

__all__ = ["group_norm_steps"]

RANK = 4


def group_norm_steps(request: NormRequest) -> GraphSequence:
    """The graphs of a request in the mode GROUP_NORM."""
    graph_builder = _GraphBuilder(request)
    if isinstance(request, NormBwdRequest):
        graph_builder.backward(request)
    elif isinstance(request, NormFwdRequest):
        graph_builder.forward(request)
    return GraphSequence(tuple(graph_builder.steps), tuple(graph_builder.intermediates))


class _GraphBuilder:
    def __init__(self, request: NormRequest) -> None:
        self.request = request
        self.steps: list[GraphStep] = []
        self.intermediates: list[Intermediate] = []
        self.samples, self.channels = request.x.shape[:2]
        self.groups = request.groups
        self.spatial = request.x.size // (self.samples * self.channels)
        self.ones = self.keep(self.samples * self.channels, fill=1.0)

    def operand(self, name: str) -> GraphMemory:
        return operand_memory(self.request, name)

    def keep(self, size: int, dtype: Dtype = F32, fill: float | None = None) -> GraphMemory:
        """Allocate memory between graphs."""
        self.intermediates.append(Intermediate(size, dtype, fill))
        return GraphMemory(len(self.request.reads) + len(self.request.writes) + len(self.intermediates) - 1, dtype)

    # -- the graphs -----------------------------------------------------------------------------------------------
    def forward(self, request: NormFwdRequest) -> None:
        count = self.samples * self.groups
        statistics = ("mean_out", "inv_variance_out")
        mean, inverse = (self.operand(n) if request.training else self.keep(count) for n in statistics)
        norm = _InstanceNormGraph(self.samples, self.groups, self.channels * self.spatial // self.groups)
        ins = {"XDESC": norm.data(self.operand("x")), "SCALE_DESC": norm.parameter(self.ones)}
        ins["BIAS_DESC"] = norm.parameter(self.keep(self.groups, fill=0.0))
        ins["EPSILON_DESC"] = norm.builder.scalar(float(request.epsilon), RANK)
        # Its Y is not needed: it goes to the memory that the last graph writes.
        outs = {"YDESC": norm.data(self.operand("out"))}
        outs |= {"MEAN_DESC": norm.statistic(mean), "INV_VARIANCE_DESC": norm.statistic(inverse)}
        self.steps.append(norm.step("NORM_FORWARD", ins, outs, PHASE="TRAINING"))

        rows = [("SUB", self._per_channel_of_group(mean)), ("MUL", self._per_channel_of_group(inverse))]
        rows.append(("MUL", self._per_channel_of_sample(self.operand("scale"))))
        if request.bias is not None:
            rows.append(("ADD", self._per_channel_of_sample(self.operand("bias"))))
        self._pointwise_over_x(self.operand("x"), rows, self.operand("out"))

    def backward(self, request: NormBwdRequest) -> None:
        mean, inverse, x, dx = (self.operand(name) for name in ("mean", "inv_variance", "x", "dx"))
        scaled = self.keep(request.x.size, request.x.dtype)
        self._pointwise_over_x(
            self.operand("dy"), [("MUL", self._per_channel_of_sample(self.operand("scale")))], scaled
        )
        sums = (self.operand("dscale"), self.operand("dbias"))
        statistics = (self._per_channel_of_group(mean), self._per_channel_of_group(inverse))
        if self.spatial == 1:
            self._sums(x, self.operand("dy"), statistics, sums)
        else:  # the gradient of x by channel is not needed: it goes to the memory that the next graph writes
            self._gradient(self.channels, x, self.operand("dy"), statistics, dx, sums)
        unused = (self.keep(self.groups), self.keep(self.groups))
        self._gradient(self.groups, x, scaled, (mean, inverse), dx, unused)

    def _gradient(
        self,
        instances: int,
        x: GraphMemory,
        dy: GraphMemory,
        statistics: tuple[GraphMemory, GraphMemory],
        dx: GraphMemory,
        sums: tuple[GraphMemory, GraphMemory],
    ) -> None:
        norm = _InstanceNormGraph(self.samples, instances, self.channels * self.spatial // instances)
        ins = {"XDESC": norm.data(x), "DYDESC": norm.data(dy), "SCALE_DESC": norm.parameter(self.ones)}
        ins |= {"MEAN_DESC": norm.statistic(statistics[0]), "INV_VARIANCE_DESC": norm.statistic(statistics[1])}
        outs = {"DXDESC": norm.data(dx), "DSCALE_DESC": norm.parameter(sums[0]), "DBIAS_DESC": norm.parameter(sums[1])}
        self.steps.append(norm.step("NORM_BACKWARD", ins, outs))

    def _sums(
        self,
        x: GraphMemory,
        dy: GraphMemory,
        statistics: tuple[GraphMemory, GraphMemory],
        sums: tuple[GraphMemory, GraphMemory],
    ) -> None:
        """Dscale and dbias of a matrix: rows are samples, columns are channels."""
        for name, out in zip(("dscale", "dbias"), sums, strict=True):
            matrix = _MatrixGraph(self.samples, self.channels)
            value = matrix.whole(dy)
            if name == "dscale":
                centered = matrix.pointwise("SUB", matrix.whole(x), matrix.whole(statistics[0]))
                value = matrix.pointwise("MUL", matrix.pointwise("MUL", centered, matrix.whole(statistics[1])), value)
            self.steps.append(matrix.sums(value, out))

    def _per_channel_of_group(self, statistic: GraphMemory) -> GraphMemory:
        """The number of each group of each sample, repeated for its channels: (N, C)."""
        if self.groups == self.channels:
            return statistic
        matrix = _MatrixGraph(self.samples * self.groups, self.channels // self.groups)
        return self._broadcast(matrix, matrix.per_row(statistic))

    def _per_channel_of_sample(self, parameter: GraphMemory) -> GraphMemory:
        """The number of each channel, repeated for every sample: (N, C)."""
        if self.samples == 1:
            return parameter
        matrix = _MatrixGraph(self.samples, self.channels)
        return self._broadcast(matrix, matrix.per_column(parameter))

    def _broadcast(self, matrix: _MatrixGraph, numbers: Wire) -> GraphMemory:
        memory = self.keep(self.samples * self.channels)
        self.steps.append(matrix.step(matrix.pointwise("MUL", matrix.whole(self.ones), numbers), memory))
        return memory

    def _pointwise_over_x(self, x: GraphMemory, rows: list[tuple[str, GraphMemory]], out: GraphMemory) -> None:
        """Pointwise modes over a tensor of x's shape, each with a number for every channel of every sample."""
        matrix = _MatrixGraph(self.samples * self.channels, self.spatial)
        value = matrix.whole(x)
        for mode, numbers in rows:
            value = matrix.pointwise(mode, value, matrix.per_row(numbers))
        self.steps.append(matrix.step(value, out))


class _InstanceNormGraph(PlacedGraphBuilder):
    """An instance norm of (N, C, S) in C order."""

    def __init__(self, samples: int, channels: int, size: int) -> None:
        super().__init__()
        self._dims = (samples, channels, size)

    def data(self, memory: GraphMemory) -> Wire:
        n, c, s = self._dims
        return self.wire(memory, (n, c, s, 1), (c * s, s, 1, 1))

    def parameter(self, memory: GraphMemory) -> Wire:
        c = self._dims[1]
        return self.wire(memory, (1, c, 1, 1), (c, 1, 1, 1))

    def statistic(self, memory: GraphMemory) -> Wire:
        n, c, _ = self._dims
        return self.wire(memory, (n, c, 1, 1), (c, 1, 1, 1))

    def step(self, kind: str, ins: dict[str, Wire], outs: dict[str, Wire], **attributes: str) -> GraphStep:
        self.builder.node(kind, ins, outs, MODE="INSTANCE_NORM", **attributes)
        return GraphStep(*self.lowered())


class _MatrixGraph(PlacedGraphBuilder):
    """A chain of pointwise modes over a dense matrix, as an image for the engines: a row has the channels of a pixel.

    Engines refuse a single channel, so a matrix of one column is described as one row.
    """

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self._shape = (rows, columns)

    def _axes(self, rows: int, columns: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if self._shape[1] == 1:
            rows, columns = columns, rows
        return (1, columns, 1, rows), (rows * columns, 1, rows * columns, columns)

    def whole(self, memory: GraphMemory) -> Wire:
        return self.wire(memory, *self._axes(*self._shape))

    def per_row(self, memory: GraphMemory) -> Wire:
        return self.wire(memory, *self._axes(self._shape[0], 1))

    def per_column(self, memory: GraphMemory) -> Wire:
        return self.wire(memory, *self._axes(1, self._shape[1]))

    def pointwise(self, mode: str, value: Wire, other: Wire) -> Wire:
        dims, strides = self._axes(*self._shape)
        return self.builder.pointwise(mode, value, other, out=self.builder.virtual(dims, None, strides))

    def sums(self, value: Wire, out: GraphMemory) -> GraphStep:
        """The step that writes the sum of each column of the chain's result."""
        wire = self.per_column(out)
        self.builder.reduction("ADD", value, wire.dims, out=wire)
        return GraphStep(*self.lowered())

    def step(self, value: Wire, out: GraphMemory) -> GraphStep:
        """The step that writes the chain's result to memory."""
        self.write(out, value, self._axes(*self._shape)[1])
        return GraphStep(*self.lowered())
