"""Lowers a graph to cuDNN's descriptors: finalized tensors and operations, combined to an operation graph.

`engines.py` uses it. There is one function for each kind of node whose operation needs a further descriptor. The names
are those of the backend's attributes, see
https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-graph-library.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudabind.sys import cudnn
from dispatch.keys import Dtype
from dispatch.libraries.cudnn.descriptors import BackendDescriptor
from dispatch.libraries.cudnn.tensors import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.libraries.cudnn.graph import Graph, Node, Value, Wire

__all__ = ["lower"]


def lower(graph: Graph, handle: cudnn.cudnnHandle_t | None) -> BackendDescriptor:
    """The finalized operation graph; without a handle it is for a device that is described by its properties."""
    tensors: dict[int, BackendDescriptor] = {}
    for wire in graph.wires:
        tensors[wire.uid] = _tensor(wire, tensors)
    nodes = [_operation(node, graph, tensors) for node in graph.nodes]
    made = BackendDescriptor("OPERATIONGRAPH").set("OPERATIONGRAPH_OPS", "BACKEND_DESCRIPTOR", *nodes)
    if handle is not None:
        made.set("OPERATIONGRAPH_HANDLE", "HANDLE", handle)
    return made.finalize()


def _tensor(wire: Wire, tensors: dict[int, BackendDescriptor]) -> BackendDescriptor:
    made = BackendDescriptor("TENSOR")
    made.set("TENSOR_DATA_TYPE", "DATA_TYPE", DTYPES[wire.dtype])
    made.set("TENSOR_DIMENSIONS", "INT64", *wire.dims).set("TENSOR_STRIDES", "INT64", *wire.strides)
    made.set("TENSOR_UNIQUE_ID", "INT64", wire.uid).set("TENSOR_BYTE_ALIGNMENT", "INT64", wire.alignment)
    if wire.virtual:
        made.set("TENSOR_IS_VIRTUAL", "BOOLEAN", True)
    if wire.by_value:
        made.set("TENSOR_IS_BY_VALUE", "BOOLEAN", True)
    if wire.ragged:
        made.set("TENSOR_RAGGED_OFFSET_DESC", "BACKEND_DESCRIPTOR", tensors[wire.ragged])
    return made.finalize()


def _operation(node: Node, graph: Graph, tensors: dict[int, BackendDescriptor]) -> BackendDescriptor:
    made = BackendDescriptor(f"OPERATION_{node.kind}")
    prefix = f"OPERATION_{PREFIX.get(node.kind, node.kind)}"
    for name, uid in (*node.ins, *node.outs):
        made.set(f"{prefix}_{name}", "BACKEND_DESCRIPTOR", tensors[uid])
    LOWERINGS[node.kind](made, prefix, node, DTYPES[graph.compute])
    return made.finalize()


# The descriptors of gradients are named BACKWARD_…, their attributes BWD_….
PREFIX = {
    "CONVOLUTION_BACKWARD_DATA": "CONVOLUTION_BWD_DATA",
    "CONVOLUTION_BACKWARD_FILTER": "CONVOLUTION_BWD_FILTER",
    "NORM_FORWARD": "NORM_FWD",
    "NORM_BACKWARD": "NORM_BWD",
}


def _numbers(value: Value) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (int(value),)


def _pointwise(made: BackendDescriptor, prefix: str, node: Node, compute: int) -> None:
    descriptor = BackendDescriptor("POINTWISE")
    mode = cudnn.cudnnPointwiseMode_t[f"CUDNN_POINTWISE_{node.get('MODE')}"]
    math = DTYPES[Dtype.of(node.get("MATH_PREC"))] if node.has("MATH_PREC") else compute
    descriptor.set("POINTWISE_MODE", "POINTWISE_MODE", mode).set("POINTWISE_MATH_PREC", "DATA_TYPE", math)
    for name, value in node.attributes:
        if name == "AXIS":
            descriptor.set("POINTWISE_AXIS", "INT64", value)
        elif name not in ("MODE", "MATH_PREC"):
            descriptor.set(f"POINTWISE_{name}", "DOUBLE", value)
    if node.get("MODE") == "RELU_FWD":  # else some engines turn NaN into 0 (9.19: bf16 and f64 with channels first)
        descriptor.set("POINTWISE_NAN_PROPAGATION", "NAN_PROPOGATION", cudnn.cudnnNanPropagation_t.CUDNN_PROPAGATE_NAN)
    made.set(f"{prefix}_PW_DESCRIPTOR", "BACKEND_DESCRIPTOR", descriptor.finalize())


def _matmul(made: BackendDescriptor, prefix: str, node: Node, compute: int) -> None:
    descriptor = BackendDescriptor("MATMUL").set("MATMUL_COMP_TYPE", "DATA_TYPE", compute)
    if node.has("PADDING_VALUE"):
        descriptor.set("MATMUL_PADDING_VALUE", "DOUBLE", node.get("PADDING_VALUE"))
    made.set(f"{prefix}_DESC", "BACKEND_DESCRIPTOR", descriptor.finalize())


def _convolution(made: BackendDescriptor, prefix: str, node: Node, compute: int) -> None:
    stride = _numbers(node.get("STRIDE"))
    descriptor = BackendDescriptor("CONVOLUTION").set("CONVOLUTION_COMP_TYPE", "DATA_TYPE", compute)
    descriptor.set("CONVOLUTION_CONV_MODE", "CONVOLUTION_MODE", cudnn.cudnnConvolutionMode_t.CUDNN_CROSS_CORRELATION)
    descriptor.set("CONVOLUTION_SPATIAL_DIMS", "INT64", len(stride))
    descriptor.set("CONVOLUTION_PRE_PADDINGS", "INT64", *_numbers(node.get("PRE")))
    descriptor.set("CONVOLUTION_POST_PADDINGS", "INT64", *_numbers(node.get("POST")))
    descriptor.set("CONVOLUTION_DILATIONS", "INT64", *_numbers(node.get("DILATION")))
    descriptor.set("CONVOLUTION_FILTER_STRIDES", "INT64", *stride)
    made.set(f"{prefix}_CONV_DESC", "BACKEND_DESCRIPTOR", descriptor.finalize())
    is_double = compute == DATA_TYPE_DOUBLE
    for name in ("ALPHA", "BETA"):
        made.set(f"{prefix}_{name}", "DOUBLE" if is_double else "FLOAT", node.get(name))


def _reduction(made: BackendDescriptor, prefix: str, node: Node, compute: int) -> None:
    operator = cudnn.cudnnReduceTensorOp_t[f"CUDNN_REDUCE_TENSOR_{node.get('OPERATOR')}"]
    descriptor = BackendDescriptor("REDUCTION").set("REDUCTION_COMP_TYPE", "DATA_TYPE", compute)
    descriptor.set("REDUCTION_OPERATOR", "REDUCTION_OPERATOR_TYPE", operator)
    made.set(f"{prefix}_DESC", "BACKEND_DESCRIPTOR", descriptor.finalize())


def _norm(made: BackendDescriptor, prefix: str, node: Node, compute: int) -> None:
    del compute  # a norm computes in f32
    mode = cudnn.cudnnBackendNormMode_t[f"CUDNN_{node.get('MODE')}"]
    made.set(f"{prefix}_MODE", "NORM_MODE", mode)
    if node.has("PHASE"):
        phase = cudnn.cudnnBackendNormFwdPhase_t[f"CUDNN_NORM_FWD_{node.get('PHASE')}"]
        made.set(f"{prefix}_PHASE", "NORM_FWD_PHASE", phase)


def _rng(made: BackendDescriptor, prefix: str, node: Node, compute: int) -> None:
    del compute
    descriptor = BackendDescriptor("RNG")
    descriptor.set(
        "RNG_DISTRIBUTION", "RNG_DISTRIBUTION", cudnn.cudnnRngDistribution_t.CUDNN_RNG_DISTRIBUTION_BERNOULLI
    )
    descriptor.set("RNG_BERNOULLI_DIST_PROBABILITY", "DOUBLE", node.get("PROBABILITY"))
    made.set(f"{prefix}_DESC", "BACKEND_DESCRIPTOR", descriptor.finalize())


def _no_attributes(made: BackendDescriptor, prefix: str, node: Node, compute: int) -> None:
    """For operations that have only operands."""


DATA_TYPE_DOUBLE = cudnn.cudnnDataType_t.CUDNN_DATA_DOUBLE
LOWERINGS: dict[str, Callable[[BackendDescriptor, str, Node, int], None]] = {
    "POINTWISE": _pointwise,
    "MATMUL": _matmul,
    "CONVOLUTION_FORWARD": _convolution,
    "CONVOLUTION_BACKWARD_DATA": _convolution,
    "CONVOLUTION_BACKWARD_FILTER": _convolution,
    "REDUCTION": _reduction,
    "NORM_FORWARD": _norm,
    "NORM_BACKWARD": _norm,
    "RNG": _rng,
    "RESHAPE": _no_attributes,
    "SDPA_FWD": _no_attributes,
    "SDPA_BWD": _no_attributes,
    "PAGED_CACHE_LOAD": _no_attributes,
}
