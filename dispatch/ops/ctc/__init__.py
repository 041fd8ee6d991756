"""The loss of connectionist temporal classification with its gradient: `ctc_loss`.

`CtcRequest` is the request; `cudnn_ctc` and `numpy_ctc` carry it out, `reference` says what is right, `cases` what is
tested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.ops.ctc.request import CtcRequest
from dispatch.request import run

if TYPE_CHECKING:
    from dispatch.cudnn.formulas import Results
    from dispatch.lane import CudaLane, Lane
    from dispatch.ops.ctc.trials import CtcCase
    from dispatch.request import Plan
    from dispatch.row import Row
    from dispatch.tensor import Tensor

__all__ = ["CtcRequest", "cases", "ctc_loss", "cudnn_ctc", "numpy_ctc", "reference"]


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


def cudnn_ctc(request: CtcRequest, lane: CudaLane, row: Row) -> Plan:
    """A plan that ends in `cudnnCTCLoss_v8`."""
    from dispatch.ops.ctc import cudnn  # at first use: importing `dispatch` binds no library

    return cudnn.plan(request, lane, row)


def numpy_ctc(request: CtcRequest, lane: Lane, row: Row) -> Plan:
    """A plan that computes with NumPy."""
    from dispatch.cudnn.formulas import numpy_plan
    from dispatch.ops.ctc.formulas import evaluate

    return numpy_plan(evaluate, request, lane, row)


def reference(request: CtcRequest) -> Results:
    """The losses and the gradient of a request in float64, by name."""
    from dispatch.cudnn.formulas import EXACT
    from dispatch.ops.ctc.formulas import evaluate

    return evaluate(request, EXACT)


def cases(row: Row) -> list[CtcCase]:
    """The cases that a row of the table is tried with."""
    from dispatch.ops.ctc import trials

    return trials.cases(row)
