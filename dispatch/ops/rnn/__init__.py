"""Recurrent networks, LSTM, GRU, ReLU and tanh: `rnn`, and its gradients `rnn_bwd_data` and `rnn_bwd_weights`.

`RnnRequest`, `RnnBwdDataRequest` and `RnnBwdWeightsRequest` are the requests over a `Network`. `cudnn_rnn` and
`numpy_rnn` make their plans, `reference` computes the expected results on the host, and `cases` has the test cases.
The files: network (the network and its weights), descriptors (the network in cuDNN's terms), weights (packing),
request, cells and reference (the formulas in NumPy), cudnn, rules, cases.
"""

from __future__ import annotations

from dispatch.core.host_plan import numpy_call
from dispatch.core.plan_call import plan_call
from dispatch.core.request_function import request_function
from dispatch.ops.rnn.network import Network, RnnBiasMode, RnnMode
from dispatch.ops.rnn.reference import evaluate
from dispatch.ops.rnn.request import RnnBwdDataRequest, RnnBwdWeightsRequest, RnnRequest
from dispatch.ops.rnn.weights import pack_weights, unpack_weights, weight_shapes

__all__ = [
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
    "weight_shapes",
]

cudnn_rnn = plan_call(
    "cudnn_rnn",
    "dispatch.ops.rnn.cudnn",
    "A plan that ends in `cudnnRNNForward`, `cudnnRNNBackwardData_v8` or `cudnnRNNBackwardWeights_v8`.",
)
numpy_rnn = numpy_call(evaluate)
rnn = request_function(RnnRequest, "rnn")
rnn_bwd_data = request_function(RnnBwdDataRequest, "rnn_bwd_data")
rnn_bwd_weights = request_function(RnnBwdWeightsRequest, "rnn_bwd_weights")
