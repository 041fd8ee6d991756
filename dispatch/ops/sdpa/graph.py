"""An attention request as a graph of cuDNN operations, with the indices of its operands among the request's arguments.

There are two graphs: one unified operation for requests that need no more, and the chain of products, masks and softmax
in the order that cuDNN's fused attention engines recognize. This file calls no library.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from dispatch.device.layout import c_strides
from dispatch.keys import F32, I32, I64
from dispatch.libraries.cudnn.request_graph import RequestGraphBuilder
from dispatch.ops.sdpa.base import RAGGED
from dispatch.ops.sdpa.request import Diagonal, SdpaBwdRequest, SdpaFwdRequest

if TYPE_CHECKING:
    from dispatch.device.layout import Layout
    from dispatch.libraries.cudnn.graph import Graph, Wire
    from dispatch.ops.sdpa.request import SdpaRequest

__all__ = ["LoweredGraph", "composed_graph", "graphs", "unified_graph"]

AXES = 4  # the number of axes of every tensor of attention


class LoweredGraph(NamedTuple):
    """A graph, and for the unique id of each operand its index among the request's arguments.

    The offsets of the sequences of padded operands come after the arguments, by the stride of the batch: see
    `composed_graph`.
    """

    graph: Graph
    places: dict[int, int]
    strides: tuple[int, ...] = ()


def graphs(request: SdpaRequest) -> list[Graph]:
    """The composed graph of a request, which every version of cuDNN supports."""
    return [composed_graph(request).graph]


def composed_graph(request: SdpaRequest, *, by_offsets: bool = False) -> LoweredGraph:
    """The graph of a request as a chain of operations.

    With `by_offsets`, padded sequences are described as packed ones, each with its own offset. The results are the same
    to the last bit, and engines load nothing after a sequence's end, where a NaN would reach the results.
    """
    graph_builder = _GraphBuilder(request, by_offsets=by_offsets)
    if isinstance(request, SdpaFwdRequest):
        graph_builder.forward(request)
    elif isinstance(request, SdpaBwdRequest):
        graph_builder.backward(request)
    return LoweredGraph(graph_builder.builder.build(), graph_builder.places, tuple(graph_builder.offset_wires))


def unified_graph(request: SdpaFwdRequest) -> LoweredGraph:
    """The graph of a forward without masks and bias as one operation (cuDNN 9.13)."""
    graph_builder = _GraphBuilder(request)
    tensor, builder = graph_builder.tensor, graph_builder.builder
    ins = {"QDESC": tensor("q"), "KDESC": tensor("k"), "VDESC": tensor("v")}
    ins["SCALEDESC"] = builder.scalar(request.factor, AXES)
    outs = {"ODESC": tensor("out"), "STATSDESC": tensor("stats_out") if request.stats else None}
    builder.node("SDPA_FWD", ins, outs)
    return LoweredGraph(builder.build(), graph_builder.places)


def _positive_strides(layout: Layout) -> tuple[int, ...]:
    """The strides of a tensor; axes of one element, with stride 0 in `x[None]`, get those of a dense tensor."""
    strides = list(layout.strides)
    span = max((e * step for e, step in zip(layout.shape, strides, strict=True)), default=1)
    for axis in reversed(range(len(strides))):
        if strides[axis] < 1:
            is_last = axis + 1 == len(strides)
            strides[axis] = 1 if is_last else span if axis == 0 else strides[axis + 1] * layout.shape[axis + 1]
    return tuple(strides)


class _GraphBuilder(RequestGraphBuilder["SdpaRequest"]):
    def __init__(self, request: SdpaRequest, *, by_offsets: bool = False) -> None:
        super().__init__(request)
        self.by_offsets = by_offsets
        self.offset_wires: dict[int, int] = {}  # the unique id of the offsets, by the stride of a batch
        self._wires: dict[str, Wire] = {}

    # -- operands -------------------------------------------------------------------------------------------------
    def tensor(self, name: str, *, transposed: bool = False) -> Wire:
        """The wire of an operand; K and V also with their last two axes exchanged."""
        if name in self._wires:
            return self._wires[name]
        request = self.request
        layout = request.layout_of(name)
        dims, strides, ragged = layout.shape, _positive_strides(layout), 0
        if request.packed and name in RAGGED:
            dims, ragged = request.extents(name), self.tensor(RAGGED[name]).uid
            token, head, element = strides
            strides = (dims[2] * token, head, token, element)
        elif self.by_offsets and name in RAGGED:
            batch, head, token, element = strides
            # The only sequence of x[None] has a stride of 0, and ends with its operand.
            ragged = self._offsets_wire(batch if dims[0] > 1 else max(dims[1] * head, dims[2] * token))
            strides = (dims[2] * token, head, token, element)
        elif name.startswith("page_table"):
            dims, strides = (dims[0], 1, dims[1], 1), (dims[1], dims[1], 1, 1)
        elif len(dims) < AXES:
            dims, strides = (layout.size, 1, 1, 1), (1, 1, 1, 1)
        if transposed:
            dims, strides = (*dims[:2], dims[3], dims[2]), (*strides[:2], strides[3], strides[2])
        return self._wires.setdefault(name, self.operand(name, dims, strides, ragged=ragged))

    def _offsets_wire(self, stride: int) -> int:
        """The offsets of sequences that are `stride` elements apart."""
        if stride not in self.offset_wires:
            wire = self.builder.tensor((self.request.scores[0] + 1, 1, 1, 1), (1, 1, 1, 1), I64)
            self.places[wire.uid] = len(self.request.reads) + len(self.request.writes) + len(self.offset_wires)
            self.offset_wires[stride] = wire.uid
        return self.offset_wires[stride]

    def _lengths(self) -> tuple[Wire | None, Wire | None]:
        if not self.request.padded:
            return None, None
        return self.tensor("seq_len_q"), self.tensor("seq_len_kv")

    def _paged(self, name: str, *, transposed: bool = False) -> Wire:
        """K or V as a sequence, loaded by its page table; K with its last two axes exchanged."""
        b, _, _, skv = self.request.scores
        container = self.tensor(name)
        _, heads, _, d = container.dims
        dims, strides = (b, heads, skv, d), (heads * skv * d, skv * d, d, 1)
        if transposed:
            dims, strides = (b, heads, d, skv), (heads * skv * d, skv * d, 1, d)
        sequence = self.builder.virtual(dims, container.dtype, strides)
        ins = {
            "CONTAINER_DESC": container,
            "SEQUENCE_DESC": self.tensor("seq_len_kv"),
            "PAGE_TABLE_DESC": self.tensor(f"page_table_{name}"),
        }
        self.builder.node("PAGED_CACHE_LOAD", ins, {"YDESC": sequence})
        return sequence

    # -- the scores -----------------------------------------------------------------------------------------------
    def _scores(self, product: Wire) -> Wire:
        """Apply scale, bias and padding, which come before the backward's statistics."""
        builder, request = self.builder, self.request
        value = builder.pointwise("MUL", product, builder.scalar(request.factor, AXES))
        if request.q.dtype.is_fp8:
            value = self._multiply(value, "descale_q", "descale_k")
        if request.bias is not None:
            value = builder.pointwise("ADD", value, self.tensor("bias"))
        lengths = [length for length in self._lengths() if length is not None]
        if lengths:
            inside = [
                builder.pointwise("CMP_LT", self._index(value, axis), length, MATH_PREC="bool")
                for axis, length in zip((2, 3), lengths, strict=True)
            ]
            in_range = builder.pointwise("LOGICAL_AND", *inside, MATH_PREC="bool")
            value = self._select(value, in_range)
        return value

    def _index(self, value: Wire, axis: int) -> Wire:
        return self.builder.pointwise("GEN_INDEX", value, AXIS=axis, MATH_PREC="i32")

    def _select(self, value: Wire, choice: Wire) -> Wire:
        return self.builder.pointwise("BINARY_SELECT", value, self.builder.scalar(-math.inf, AXES), choice)

    def _masks(self, value: Wire) -> Wire:
        """Apply the bounds to the right and to the left of the diagonal, limited to all queries and keys together.

        Larger bounds mask nothing either, and the i32 sums with them must not wrap around.
        """
        request = self.request
        furthest = sum(request.scores[2:])
        if request.right_bound is not None:
            value = self._mask_right(value, min(request.right_bound, furthest))
        if request.left_bound is not None:
            value = self._mask_left(value, min(request.left_bound, furthest))
        return value

    def _shifted(self, index: Wire, sign: int) -> Wire:
        """An index of queries plus Skv - Sq, or one of keys minus that (sign -1), for a BOTTOM_RIGHT diagonal."""
        builder, request = self.builder, self.request
        if request.diagonal is Diagonal.TOP_LEFT:
            return index
        q, kv = self._lengths()
        if q is None or kv is None:
            q, kv = (builder.scalar(extent, AXES, I32) for extent in request.scores[2:])
        first, second = ("ADD", "SUB") if sign > 0 else ("SUB", "ADD")
        moved = builder.pointwise(first, index, kv, out=self._index_like(index), MATH_PREC="i32")
        return builder.pointwise(second, moved, q, out=self._index_like(index), MATH_PREC="i32")

    def _index_like(self, like: Wire) -> Wire:
        return self.builder.virtual(like.dims, I32)

    def _mask_right(self, value: Wire, bound: int) -> Wire:
        builder = self.builder
        row = self._shifted(self._index(value, 2), 1)
        column = self._index(value, 3)
        if bound:
            number = builder.scalar(bound, AXES, I32)
            row = builder.pointwise("ADD", row, number, out=self._index_like(row), MATH_PREC="i32")
        return self._select(value, builder.pointwise("CMP_GE", row, column, MATH_PREC="bool"))

    def _mask_left(self, value: Wire, bound: int) -> Wire:
        builder, request = self.builder, self.request
        row, column = self._index(value, 2), self._index(value, 3)
        if request.diagonal is Diagonal.TOP_LEFT or not request.padded:
            # One sum in f32: the pattern that the engines recognize for fixed lengths.
            if request.diagonal is Diagonal.BOTTOM_RIGHT:
                bound += request.scores[2] - request.scores[3]
            column = builder.pointwise("ADD", column, builder.scalar(float(bound), AXES))
        else:
            number = builder.scalar(bound, AXES, I32)
            column = builder.pointwise("ADD", column, number, out=self._index_like(column), MATH_PREC="i32")
            column = self._shifted(column, -1)
        return self._select(value, builder.pointwise("CMP_GT", column, row, MATH_PREC="bool"))

    def _mask(self, out: Wire | None = None) -> Wire:
        """1 for the weights that dropout keeps."""
        builder = self.builder
        mask = out or builder.virtual(self.request.scores)
        ins = {"SEED": self.tensor("seed"), "OFFSET_DESC": self.tensor("offset")}
        builder.node("RNG", ins, {"YDESC": mask}, PROBABILITY=1 - self.request.dropout)
        return mask

    # -- forward --------------------------------------------------------------------------------------------------
    def forward(self, request: SdpaFwdRequest) -> None:
        builder = self.builder
        q = self.tensor("q")
        k = self.tensor("k", transposed=True) if request.pages is None else self._paged("k", transposed=True)
        len_q, len_kv = self._lengths()
        padding = 0.0 if request.padded else None
        value = builder.matmul(q, k, m=len_q, n=len_kv, padding=padding)
        value = self._masks(self._scores(value))
        rows = (*request.scores[:3], 1)
        largest = builder.reduction("MAX", value, rows)
        powers = builder.pointwise("EXP", builder.pointwise("SUB", value, largest))
        total = builder.reduction("ADD", powers, rows)
        # Without these statistics the engines do not recognize the graph; they are virtual if they are not requested.
        stats = self.tensor("stats_out") if request.stats else builder.virtual(rows)
        builder.pointwise("ADD", largest, builder.pointwise("LOG", total), out=stats)
        weights = builder.virtual(request.scores, request.q.dtype)
        if request.q.dtype.is_fp8:
            self._fp8(request, builder.pointwise("DIV", powers, total), weights)
            return
        if request.dropout:
            mask = self._mask(self.tensor("mask_out") if request.mask else None)
            masked = builder.pointwise("MUL", builder.pointwise("DIV", powers, total), mask)
            builder.pointwise("MUL", masked, builder.scalar(1 / (1 - request.dropout), AXES), out=weights)
        else:
            builder.pointwise("DIV", powers, total, out=weights)
        v = self.tensor("v") if request.pages is None else self._paged("v")
        builder.matmul(weights, v, out=self.tensor("out"), m=len_q, k=len_kv)

    def _multiply(self, value: Wire, *names: str) -> Wire:
        for name in names:
            product = self.builder.virtual(value.dims, None, value.strides)
            value = self.builder.pointwise("MUL", value, self.tensor(name), out=product)
        return value

    def _fp8(self, request: SdpaFwdRequest, exact: Wire, weights: Wire) -> None:
        """The second product of fp8: weights scaled and rounded, then scaled back, and the largest of both."""
        builder, scalar_dims = self.builder, (1,) * AXES
        builder.reduction("AMAX", exact, scalar_dims, out=self.tensor("amax_s") if request.amax else None)
        builder.pointwise("MUL", exact, self.tensor("scale_s"), out=weights)
        out = self.tensor("out")
        value = builder.matmul(weights, self.tensor("v"), out=builder.virtual(out.dims, None, out.strides))
        value = self._multiply(value, "descale_s", "descale_v")
        builder.reduction("AMAX", value, scalar_dims, out=self.tensor("amax_o") if request.amax else None)
        builder.pointwise("MUL", value, self.tensor("scale_o"), out=out)

    # -- backward -------------------------------------------------------------------------------------------------
    def backward(self, request: SdpaBwdRequest) -> None:
        builder = self.builder
        heads = request.scores[1]
        len_q, len_kv = self._lengths()
        rows = (*request.scores[:3], 1)
        do, o = self.tensor("do"), self.tensor("o")
        mask = self._mask() if request.dropout else None
        keeps = 1 - request.dropout
        _, h, sq, dv = o.dims
        product = builder.virtual(o.dims, None, (h * sq * dv, sq * dv, h * dv, 1))
        builder.pointwise("MUL", do, o, out=product)
        total = builder.reduction("ADD", product, rows)
        # The engines expect this operation; without dropout it is a factor of 1.
        delta = builder.pointwise("MUL", total, builder.scalar(keeps, AXES), out=builder.scratch(rows, F32))

        q, k = self.tensor("q"), self.tensor("k", transposed=True)
        value = self._scores(builder.matmul(q, k, m=len_q, n=len_kv))
        value = builder.pointwise("SUB", value, self.tensor("stats"))
        weights = builder.pointwise("EXP", self._masks(value))
        masked = self._dropped_out(weights, mask)
        self._product_over_heads(self._transposed(masked), do, "dv", heads, m=len_kv, k=len_q)

        gradient = builder.matmul(do, self.tensor("v", transposed=True), m=len_q, n=len_kv)
        if mask is not None:
            gradient = builder.pointwise("MUL", gradient, mask)
        gradient = builder.pointwise("MUL", builder.pointwise("SUB", gradient, delta), weights)
        if mask is not None:
            gradient = builder.pointwise("MUL", gradient, builder.scalar(1 / keeps, AXES))
        if request.bias_gradient:
            builder.reduction("ADD", gradient, self._dims("dbias"), out=self.tensor("dbias"))
        gradient = builder.pointwise("MUL", gradient, builder.scalar(request.factor, AXES))
        self._product_over_heads(self._transposed(gradient), q, "dk", heads, m=len_kv, k=len_q)
        self._dq(request, gradient, k, len_q, len_kv)

    def _dropped_out(self, weights: Wire, mask: Wire | None) -> Wire:
        if mask is None:
            return weights
        dropped = self.builder.pointwise("MUL", weights, mask)
        return self.builder.pointwise("MUL", dropped, self.builder.scalar(1 / (1 - self.request.dropout), AXES))

    def _dims(self, name: str) -> tuple[int, ...]:
        return self.request.layout_of(name).shape

    def _transposed(self, value: Wire) -> Wire:
        """The transpose in the operands' dtype, as an operand of a product."""
        b, h, sq, skv = value.dims
        strides = (h * sq * skv, sq * skv, 1, skv)
        transposed = self.builder.virtual((b, h, skv, sq), self.request.q.dtype, strides)
        self.builder.node("RESHAPE", {"XDESC": value}, {"YDESC": transposed})
        return transposed

    def _product_over_heads(self, a: Wire, b: Wire, name: str, heads: int, *, m: Wire | None, k: Wire | None) -> None:
        """A product for every head of Q, summed over the heads that share a head of K or V."""
        builder, request = self.builder, self.request
        out = self.tensor(name)
        if out.dims[1] == heads:
            builder.matmul(a, b, out=out, m=m, k=k)
            return
        dims = (out.dims[0], heads, *out.dims[2:])
        full = builder.virtual(dims, request.q.dtype, c_strides(dims))
        builder.matmul(a, b, out=full, m=m, k=k)
        builder.node("REDUCTION", {"XDESC": full}, {"YDESC": out}, OPERATOR="ADD")

    def _dq(self, request: SdpaBwdRequest, gradient: Wire, k: Wire, len_q: Wire | None, len_kv: Wire | None) -> None:
        builder = self.builder
        dims, strides = ((*t[:2], t[3], t[2]) for t in (k.dims, k.strides))
        keys = builder.virtual(dims, request.q.dtype, strides, ragged=k.ragged)
        builder.node("RESHAPE", {"XDESC": k}, {"YDESC": keys})
        dq = self.tensor("dq")
        if request.deterministic or request.bias_gradient:
            builder.matmul(gradient, keys, out=dq, m=len_q, k=len_kv)
            return
        # Blocks of keys are added to dQ in memory, in f32, in any order.
        sums = builder.scratch(dq.dims, F32)
        builder.matmul(gradient, keys, out=sums, m=len_q, k=len_kv)
        builder.pointwise("IDENTITY", sums, out=dq)
