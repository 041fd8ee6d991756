"""The loss of connectionist temporal classification with its gradient: `ctc_loss`.

`CtcRequest` is the request; `cudnn_ctc` and `numpy_ctc` carry it out, `reference` says what is right, `cases` what is
tested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.core.request import run
from dispatch.ops.ctc.request import CtcRequest

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.execute.executor import Executor

__all__ = ["CtcRequest", "ctc_loss", "cudnn_ctc", "numpy_ctc"]


def ctc_loss(
    logits: Tensor,
    labels: Tensor,
    label_lengths: Tensor,
    input_lengths: Tensor,
    *,
    max_label_length: int,
    with_gradient: bool = True,
    deterministic: bool = True,
    out: Tensor | None = None,
    gradient: Tensor | None = None,
) -> Any:
    """The CTC loss of each sequence, and with `with_gradient` its gradient by the logits; returns without waiting.

    logits are (steps, sequences, classes) before the softmax, class 0 the blank; labels lie one sequence behind
    another; labels and lengths are i32 tensors. Raises BadRequest for shapes and dtypes that do not fit, NoRow where no
    library takes them; lengths and labels out of range are the caller's to avoid, see `CtcRequest`.
    """
    fields = (max_label_length, with_gradient, deterministic, out, gradient)
    return run(CtcRequest(logits, labels, label_lengths, input_lengths, *fields))


def cudnn_ctc(request: CtcRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that ends in `cudnnCTCLoss_v8`."""
    from dispatch.ops.ctc import cudnn  # at first use: importing `dispatch` binds no library

    return cudnn.plan(request, executor, row)


def numpy_ctc(request: CtcRequest, executor: Executor, row: Row) -> Plan:
    """A plan that computes with NumPy."""
    from dispatch.core.host_plan import numpy_plan
    from dispatch.ops.ctc.reference import evaluate

    return numpy_plan(evaluate, request, executor, row)
