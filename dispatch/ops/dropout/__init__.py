"""Dropout with a seed: `dropout_states` makes the random numbers, `dropout` draws a mask, `dropout_bwd` uses it again.

`DropoutStatesRequest`, `DropoutRequest` and `DropoutBwdRequest` are the requests; `cudnn_dropout` and
`numpy_dropout` carry them out, `reference` says what is right on the host, `cases` what is tested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.core.request import run
from dispatch.ops.dropout.request import DropoutBwdRequest, DropoutRequest, DropoutStatesRequest

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.execute.executor import Executor

__all__ = [
    "DropoutBwdRequest",
    "DropoutRequest",
    "DropoutStatesRequest",
    "cudnn_dropout",
    "dropout",
    "dropout_bwd",
    "dropout_states",
    "numpy_dropout",
]


def dropout_states(device: Device, seed: int) -> Tensor:
    """The state of dropout's random numbers for a seed, on a device: a u8 tensor, of some MiB on a GPU."""
    result: Tensor = run(DropoutStatesRequest(device, seed))
    return result


def dropout(
    x: Tensor, states: Tensor, p: float = 0.5, *, out: Tensor | None = None, reserve: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Drop each element of a dense x with probability p and scale the rest by 1 / (1 - p); returns without waiting.

    Gives y and the reserve space for `dropout_bwd`, and moves `states` on: the same seed gives the same masks in the
    same order, on one kind of device (cuDNN's and NumPy's differ). Raises BadRequest for a p or a state that does not
    fit, NoRow where no library takes x.
    """
    result: tuple[Tensor, Tensor] = run(DropoutRequest(x, states, p, out, reserve))
    return result


def dropout_bwd(dy: Tensor, reserve: Tensor, p: float = 0.5, *, out: Tensor | None = None) -> Tensor:
    """The gradient of `dropout`: dx from dy, the reserve space that the forward pass gave, and its p."""
    result: Tensor = run(DropoutBwdRequest(dy, reserve, p, out))
    return result


def cudnn_dropout(
    request: DropoutStatesRequest | DropoutRequest | DropoutBwdRequest, executor: CudaExecutor, row: Row
) -> Plan:
    """A plan that ends in `cudnnSetDropoutDescriptor`, `cudnnDropoutForward` or `cudnnDropoutBackward`."""
    from dispatch.ops.dropout import cudnn  # at first use: importing `dispatch` binds no library

    return cudnn.plan(request, executor, row)


def numpy_dropout(
    request: DropoutStatesRequest | DropoutRequest | DropoutBwdRequest, executor: Executor, row: Row
) -> Plan:
    """A plan that computes with NumPy."""
    from dispatch.core.host_plan import numpy_plan
    from dispatch.ops.dropout.reference import evaluate

    return numpy_plan(evaluate, request, executor, row)
