"""A typed table from (op, dtype, epilogue, arch) to one library call, with requests over it and workers under it.

The rooms, in the order in which they import each other:

    keys errors          the axes in NVIDIA's words; what can go wrong
    stream tensor dlpack pinned device cuda  order, memory, exchange, copies beside the host, `cuda:N` and `host`
    request              the contract of requests and plans
    ops/<op>             one op family each: request, request function, libraries, reference, cases
    row table select     what a row says; the rows; which one takes a request
    workspace tuning replay lane plans  scratch memory, algorithms, recorded graphs; lanes; bound calls
    future levels seat completion worker crew supervisor  outcomes; queues; how ends are learnt of; a thread for each
                         stream; restarts; what users hold
    trace stats status journal entries  what is seen of it: hooks and log lines, counts, answers, records of requests

Importing this package loads no CUDA library and needs no GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch import errors
from dispatch.device import Device, device, from_cuda_array_interface, from_dlpack
from dispatch.future import Future
from dispatch.keys import Arch, Compute, Dtype, Epilogue, ScaleMode
from dispatch.ops.matmul import MatmulRequest, Scales, aux_shape, matmul
from dispatch.plans import BoundCall, prepare, prepare_all
from dispatch.request import Request, run
from dispatch.row import Row
from dispatch.select import explain
from dispatch.stream import Stream
from dispatch.supervisor import Supervisor
from dispatch.table import TABLE
from dispatch.tensor import Tensor

if TYPE_CHECKING:
    from dispatch import cudnn
    from dispatch.ops.activation import (
        ActivationBwdRequest,
        ActivationMode,
        ActivationRequest,
        activation,
        activation_bwd,
    )
    from dispatch.ops.conv import (
        Activation,
        ConvBwdDataRequest,
        ConvBwdFilterRequest,
        ConvFwdRequest,
        conv_bwd_data,
        conv_bwd_filter,
        conv_fwd,
        conv_transpose,
    )
    from dispatch.ops.ctc import CtcRequest, ctc_loss
    from dispatch.ops.cutlass_conv import (
        CutlassConvBwdDataRequest,
        CutlassConvBwdFilterRequest,
        CutlassConvFwdRequest,
        cutlass_conv_bwd_data,
        cutlass_conv_bwd_filter,
        cutlass_conv_fwd,
    )
    from dispatch.ops.cutlass_gemm import CutlassGemmRequest, cutlass_gemm
    from dispatch.ops.cutlass_grouped_gemm import CutlassGroupedGemmRequest, cutlass_grouped_gemm
    from dispatch.ops.dropout import (
        DropoutBwdRequest,
        DropoutRequest,
        DropoutStatesRequest,
        dropout,
        dropout_bwd,
        dropout_states,
    )
    from dispatch.ops.norm import NormBwdRequest, NormFwdRequest, NormMode, norm_bwd, norm_fwd
    from dispatch.ops.pooling import PoolingBwdRequest, PoolingMode, PoolingRequest, pooling, pooling_bwd
    from dispatch.ops.reduction import ReduceOp, ReduceRequest, reduce
    from dispatch.ops.rnn import (
        Network,
        RnnBiasMode,
        RnnBwdDataRequest,
        RnnBwdWeightsRequest,
        RnnMode,
        RnnRequest,
        pack_weights,
        rnn,
        rnn_bwd_data,
        rnn_bwd_weights,
        unpack_weights,
    )
    from dispatch.ops.sdpa import Diagonal, SdpaBwdRequest, SdpaFwdRequest, ragged_offsets, sdpa_bwd, sdpa_fwd
    from dispatch.ops.softmax import SoftmaxAlgorithm, SoftmaxBwdRequest, SoftmaxRequest, softmax, softmax_bwd

__all__ = [
    "TABLE",
    "Activation",
    "ActivationBwdRequest",
    "ActivationMode",
    "ActivationRequest",
    "Arch",
    "BoundCall",
    "Compute",
    "ConvBwdDataRequest",
    "ConvBwdFilterRequest",
    "ConvFwdRequest",
    "CtcRequest",
    "CutlassConvBwdDataRequest",
    "CutlassConvBwdFilterRequest",
    "CutlassConvFwdRequest",
    "CutlassGemmRequest",
    "CutlassGroupedGemmRequest",
    "Device",
    "Diagonal",
    "DropoutBwdRequest",
    "DropoutRequest",
    "DropoutStatesRequest",
    "Dtype",
    "Epilogue",
    "Future",
    "MatmulRequest",
    "Network",
    "NormBwdRequest",
    "NormFwdRequest",
    "NormMode",
    "PoolingBwdRequest",
    "PoolingMode",
    "PoolingRequest",
    "ReduceOp",
    "ReduceRequest",
    "Request",
    "RnnBiasMode",
    "RnnBwdDataRequest",
    "RnnBwdWeightsRequest",
    "RnnMode",
    "RnnRequest",
    "Row",
    "ScaleMode",
    "Scales",
    "SdpaBwdRequest",
    "SdpaFwdRequest",
    "SoftmaxAlgorithm",
    "SoftmaxBwdRequest",
    "SoftmaxRequest",
    "Stream",
    "Supervisor",
    "Tensor",
    "activation",
    "activation_bwd",
    "aux_shape",
    "conv_bwd_data",
    "conv_bwd_filter",
    "conv_fwd",
    "conv_transpose",
    "ctc_loss",
    "cudnn",
    "cutlass_conv_bwd_data",
    "cutlass_conv_bwd_filter",
    "cutlass_conv_fwd",
    "cutlass_gemm",
    "cutlass_grouped_gemm",
    "device",
    "dropout",
    "dropout_bwd",
    "dropout_states",
    "errors",
    "explain",
    "from_cuda_array_interface",
    "from_dlpack",
    "matmul",
    "norm_bwd",
    "norm_fwd",
    "pack_weights",
    "pooling",
    "pooling_bwd",
    "prepare",
    "prepare_all",
    "ragged_offsets",
    "reduce",
    "register",
    "rnn",
    "rnn_bwd_data",
    "rnn_bwd_weights",
    "run",
    "sdpa_bwd",
    "sdpa_fwd",
    "softmax",
    "softmax_bwd",
    "unpack_weights",
]

register = TABLE.register

# The ops beyond matmul by their rooms, which are imported when a name is first used: `import dispatch` stays quick.
_ROOMS = {
    "dispatch.ops.activation": (
        "ActivationBwdRequest",
        "ActivationMode",
        "ActivationRequest",
        "activation",
        "activation_bwd",
    ),
    "dispatch.ops.conv": (
        "Activation",
        "ConvBwdDataRequest",
        "ConvBwdFilterRequest",
        "ConvFwdRequest",
        "conv_bwd_data",
        "conv_bwd_filter",
        "conv_fwd",
        "conv_transpose",
    ),
    "dispatch.ops.ctc": (
        "CtcRequest",
        "ctc_loss",
    ),
    "dispatch.ops.cutlass_conv": (
        "CutlassConvBwdDataRequest",
        "CutlassConvBwdFilterRequest",
        "CutlassConvFwdRequest",
        "cutlass_conv_bwd_data",
        "cutlass_conv_bwd_filter",
        "cutlass_conv_fwd",
    ),
    "dispatch.ops.cutlass_gemm": (
        "CutlassGemmRequest",
        "cutlass_gemm",
    ),
    "dispatch.ops.cutlass_grouped_gemm": (
        "CutlassGroupedGemmRequest",
        "cutlass_grouped_gemm",
    ),
    "dispatch.ops.dropout": (
        "DropoutBwdRequest",
        "DropoutRequest",
        "DropoutStatesRequest",
        "dropout",
        "dropout_bwd",
        "dropout_states",
    ),
    "dispatch.ops.norm": (
        "NormBwdRequest",
        "NormFwdRequest",
        "NormMode",
        "norm_bwd",
        "norm_fwd",
    ),
    "dispatch.ops.pooling": (
        "PoolingBwdRequest",
        "PoolingMode",
        "PoolingRequest",
        "pooling",
        "pooling_bwd",
    ),
    "dispatch.ops.reduction": (
        "ReduceOp",
        "ReduceRequest",
        "reduce",
    ),
    "dispatch.ops.rnn": (
        "Network",
        "RnnBiasMode",
        "RnnBwdDataRequest",
        "RnnBwdWeightsRequest",
        "RnnMode",
        "RnnRequest",
        "pack_weights",
        "rnn",
        "rnn_bwd_data",
        "rnn_bwd_weights",
        "unpack_weights",
    ),
    "dispatch.ops.sdpa": (
        "Diagonal",
        "SdpaBwdRequest",
        "SdpaFwdRequest",
        "ragged_offsets",
        "sdpa_bwd",
        "sdpa_fwd",
    ),
    "dispatch.ops.softmax": (
        "SoftmaxAlgorithm",
        "SoftmaxBwdRequest",
        "SoftmaxRequest",
        "softmax",
        "softmax_bwd",
    ),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> Any:
    """The op of a name, or the package that has `cudnn.Graph()`, imported now."""
    if name not in _ROOM_OF and name != "cudnn":
        raise AttributeError(f"module 'dispatch' has no attribute {name!r}")
    from importlib import import_module

    if name == "cudnn":
        return import_module("dispatch.cudnn")
    found = globals()[name] = getattr(import_module(_ROOM_OF[name]), name)
    return found
