"""A typed table from (op, dtype, epilogue, arch) to one library call, with requests over it and workers under it.

The folders, in the order in which they import each other (docs/architecture.md):

    device      order, memory, exchange, `cuda:N` and `host`
    core        requests, rows, operands: what an op family is made of
    execute     what runs a plan on a stream
    testing     what the cases of all families use
    libraries   handles, descriptors and kernels, a folder for each library
    ops         one op family each: request, request function, libraries, reference, cases
    table       the rows; which one takes a request
    bind        from a request to its plan; prepared calls
    supervise   a worker for each stream, in threads or processes; restarts; what users see of them

Importing this package loads no CUDA library and needs no GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch import errors
from dispatch.bind.prepare import BoundCall, prepare, prepare_all
from dispatch.core.request import Request, run
from dispatch.core.row import Fusion, Row
from dispatch.device.device import Device
from dispatch.device.external_memory import from_cuda_array_interface, from_dlpack
from dispatch.device.registry import device
from dispatch.device.stream import Stream
from dispatch.device.tensor import Tensor
from dispatch.keys import Arch, Compute, Dtype, Epilogue, ScaleMode
from dispatch.ops.matmul import MatmulRequest, Scales, aux_shape, matmul
from dispatch.supervise import trace
from dispatch.supervise.future import Future
from dispatch.supervise.supervisor import Supervisor
from dispatch.table.select import explain
from dispatch.table.table import TABLE

if TYPE_CHECKING:
    from dispatch.libraries.cutlass import evt
    from dispatch.ops import graph as cudnn
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
    "Fusion",
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
    "evt",
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
    "trace",
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
_MODULES = {"cudnn": "dispatch.ops.graph", "evt": "dispatch.libraries.cutlass.evt"}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> Any:
    """The op of a name, or a module for users, imported now."""
    if name not in _ROOM_OF and name not in _MODULES:
        raise AttributeError(f"module 'dispatch' has no attribute {name!r}")
    from importlib import import_module

    if name in _MODULES:
        return import_module(_MODULES[name])
    found = globals()[name] = getattr(import_module(_ROOM_OF[name]), name)
    return found
