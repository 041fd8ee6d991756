"""Activations, element by element, and their gradients: `activation` and `activation_bwd`.

`ActivationRequest` and `ActivationBwdRequest` are the requests; `cudnn_activation` and `numpy_activation` carry
them out, `reference` says what is right, `cases` what is tested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.core.request import run
from dispatch.ops.activation.request import ActivationBwdRequest, ActivationMode, ActivationRequest

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.execute.executor import Executor

__all__ = [
    "ActivationBwdRequest",
    "ActivationMode",
    "ActivationRequest",
    "activation",
    "activation_bwd",
    "cudnn_activation",
    "numpy_activation",
]

RELU = ActivationMode.RELU


def activation(x: Tensor, *, mode: ActivationMode = RELU, coef: float = 1.0, out: Tensor | None = None) -> Tensor:
    """f(x) for every element of x, on the current stream; returns without waiting.

    x has any shape; y has its shape and dtype. `coef` is the ceiling of CLIPPED_RELU, the alpha of ELU, the beta of
    SWISH. Raises BadRequest for operands that do not fit, NoRow where no library takes them.
    """
    result: Tensor = run(ActivationRequest(x, mode, coef, out))
    return result


def activation_bwd(
    x: Tensor, y: Tensor, dy: Tensor, *, mode: ActivationMode = RELU, coef: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """The gradient of `activation`: dx from x, its result y and the gradient dy, all of one shape, dtype and layout."""
    result: Tensor = run(ActivationBwdRequest(x, y, dy, mode, coef, out))
    return result


def cudnn_activation(request: ActivationRequest | ActivationBwdRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that ends in `cudnnActivationForward` or `cudnnActivationBackward`."""
    from dispatch.ops.activation import cudnn  # at first use: importing `dispatch` binds no library

    return cudnn.plan(request, executor, row)


def numpy_activation(request: ActivationRequest | ActivationBwdRequest, executor: Executor, row: Row) -> Plan:
    """A plan that computes with NumPy."""
    from dispatch.core.host_plan import numpy_plan
    from dispatch.ops.activation.reference import evaluate

    return numpy_plan(evaluate, request, executor, row)
