"""Recurrent networks, LSTM, GRU, ReLU and tanh: `rnn`, and its gradients `rnn_bwd_data` and `rnn_bwd_weights`.

`RnnRequest`, `RnnBwdDataRequest` and `RnnBwdWeightsRequest` are the requests over a `Network`; `cudnn_rnn`
and `numpy_rnn` carry them out, `reference` says what is right on the host, `cases` what is tested. The files: network
(what it is made of), weights (packing), request, cells and reference (what is right), cudnn, rules, cases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.core.request import run
from dispatch.ops.rnn.network import Network, RnnBiasMode, RnnMode
from dispatch.ops.rnn.request import RnnBwdDataRequest, RnnBwdWeightsRequest, RnnRequest
from dispatch.ops.rnn.weights import pack_weights, unpack_weights, weight_shapes

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.execute.executor import Executor
    from dispatch.keys import Compute
    from dispatch.ops.rnn.request import RnnBase

__all__ = [
    "Network",
    "RnnBiasMode",
    "RnnBwdDataRequest",
    "RnnBwdWeightsRequest",
    "RnnMode",
    "RnnRequest",
    "cudnn_rnn",
    "numpy_rnn",
    "pack_weights",
    "rnn",
    "rnn_bwd_data",
    "rnn_bwd_weights",
    "unpack_weights",
    "weight_shapes",
]

Lengths = tuple[int, ...]


def rnn(
    x: Tensor,
    weights: Tensor,
    network: Network,
    *,
    hx: Tensor | None = None,
    cx: Tensor | None = None,
    lengths: Lengths | None = None,
    training: bool = False,
    compute: Compute | None = None,
    dropout: float = 0.0,
    states: Tensor | None = None,
) -> Any:
    """Run sequences x (steps, sequences, input_size) through a network, on the current stream; returns without waiting.

    Gives (y, hy), for an LSTM (y, hy, cy), and with `training` the reserve space for the backward passes behind them.
    The fields of `RnnRequest` document shapes and layouts. Raises BadRequest for operands that do not fit, NoRow where
    no library takes them.
    """
    return run(RnnRequest(x, weights, network, hx, cx, lengths, training, compute, dropout, states))


def rnn_bwd_data(
    y: Tensor,
    dy: Tensor,
    weights: Tensor,
    reserve: Tensor,
    network: Network,
    *,
    hx: Tensor | None = None,
    cx: Tensor | None = None,
    dhy: Tensor | None = None,
    dcy: Tensor | None = None,
    lengths: Lengths | None = None,
    compute: Compute | None = None,
    dropout: float = 0.0,
) -> Any:
    """The gradients of x and of the first states: (dx, dhx), for an LSTM (dx, dhx, dcx). It changes the reserve space.

    The fields of `RnnBwdDataRequest` document shapes and layouts.
    """
    states = (hx, cx, dhy, dcy)
    return run(RnnBwdDataRequest(y, dy, weights, reserve, network, *states, lengths, compute, dropout))


def rnn_bwd_weights(
    x: Tensor,
    y: Tensor,
    reserve: Tensor,
    network: Network,
    *,
    hx: Tensor | None = None,
    lengths: Lengths | None = None,
    compute: Compute | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """The gradient of the weight space, after `rnn_bwd_data` has run; `unpack_weights` gives it by name."""
    result: Tensor = run(RnnBwdWeightsRequest(x, y, reserve, network, hx, lengths, compute, dropout))
    return result


def cudnn_rnn(request: RnnBase, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that ends in `cudnnRNNForward`, `cudnnRNNBackwardData_v8` or `cudnnRNNBackwardWeights_v8`."""
    from dispatch.ops.rnn import cudnn  # at first use: importing `dispatch` binds no library

    return cudnn.plan(request, executor, row)


def numpy_rnn(request: RnnBase, executor: Executor, row: Row) -> Plan:
    """A plan that computes with NumPy."""
    from dispatch.core.host_plan import numpy_plan
    from dispatch.ops.rnn.reference import evaluate

    return numpy_plan(evaluate, request, executor, row)
