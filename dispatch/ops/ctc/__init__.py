"""The loss of connectionist temporal classification with its gradient: `ctc_loss`.

It runs on `cudnnCTCLoss_v8`, with labels and lengths on the device, or on NumPy, in logarithms, according to Graves,
Fernández, Gomez, Schmidhuber, "Connectionist Temporal Classification" (2006), equations 6 to 16. cuDNN does not write
the gradient after the end of a sequence, so it is set to 0 before. Follows
https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-adv-library.html#cudnnctcloss-v8.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from cudabind.sys import cudnn
from dispatch.core.axes import describable
from dispatch.core.host_plan import Results, exactly, numpy_call, values
from dispatch.core.request_function import request_function
from dispatch.errors import BadRequest
from dispatch.libraries.cudnn.calls import CallPlan, Operand
from dispatch.libraries.cudnn.handle import handle_of
from dispatch.libraries.cudnn.tensors import DTYPES, Descriptor, tensor_3d

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.layout import Array
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.ctc.results import CtcRequest, ctc_loss
else:
    from dispatch.ops.ctc.request import CtcRequest

    ctc_loss = request_function(CtcRequest, "ctc_loss")

__all__ = [
    "CtcRequest",
    "ctc_loss",
]


# -- rules of the rows: "needs …, has …", or "" if a rule is met ------------------------------------------------------
MAX_LABELS = 255


def at_most_255(request: CtcRequest) -> str:
    """At most 255 labels: cuDNN 9.19 has no kernel for longer sequences of labels (NOT_SUPPORTED)."""
    longest = request.max_label_length
    return "" if longest <= MAX_LABELS else f"needs max_label_length up to {MAX_LABELS}, has {longest}"


def dense_logits(request: CtcRequest) -> str:
    """Logits and gradient are in row-major order."""
    for name in ("logits", *request.outputs()):
        layout = request.layout_of(name)
        if reason := describable(layout):
            return reason
        if not layout.is_contiguous:
            return f"needs {name} dense, has {layout}: copy it with dev.array(x)"
    return ""


# -- in NumPy: for the host's rows in their own precision, and as the reference in f64 --------------------------------
def evaluate(request: CtcRequest, work: np.dtype[Any]) -> Results:
    """The losses and the gradient by name, in a working dtype; BadRequest for lengths or labels out of range."""
    logits = values(request.logits, work)
    largest = logits.max(axis=-1, keepdims=True)
    logs = logits - largest - np.log(np.exp(logits - largest).sum(axis=-1, keepdims=True))
    losses, gradient = np.zeros(logits.shape[1], work), np.zeros_like(logits)
    for number, (labels, steps) in enumerate(_sequences(request)):
        losses[number], gradient[:steps, number] = _one(logs[:steps, number], labels)
    return {"out": losses, "gradient": gradient}


def _sequences(request: CtcRequest) -> list[tuple[Array, int]]:
    """The labels and the number of steps of each sequence; BadRequest if they are out of range."""
    steps, _, classes = request.logits.shape
    labels, lengths, counts = (np.asarray(t) for t in (request.labels, request.label_lengths, request.input_lengths))
    if lengths.min() < 1 or lengths.max() > request.max_label_length or lengths.sum() > len(labels):
        wanted = f"1 to {request.max_label_length} labels each, {len(labels)} in all"
        raise BadRequest("label_lengths", str(lengths.tolist()), wanted)
    if counts.min() < 0 or counts.max() > steps:
        raise BadRequest("input_lengths", str(counts.tolist()), f"0 to {steps} steps each")
    used = labels[: lengths.sum()]
    if used.min() < 1 or used.max() >= classes:
        raise BadRequest("labels", f"labels from {used.min()} to {used.max()}", f"labels from 1 to {classes - 1}")
    ends = np.cumsum(lengths)
    return [(labels[end - length : end], int(count)) for end, length, count in zip(ends, lengths, counts, strict=True)]


def _one(logs: Array, labels: Array) -> tuple[Any, Array]:
    """The loss of one sequence, and its gradient with respect to the logits of its steps."""
    states = np.zeros(2 * len(labels) + 1, np.int64)
    states[1::2] = labels
    skips = np.zeros(len(states), np.bool_)  # whether a state can be reached from the one two before
    skips[2:] = (states[2:] != 0) & (states[2:] != states[:-2])
    chosen = logs[:, states]
    if len(logs) < len(labels) + (labels[1:] == labels[:-1]).sum():
        return 0.0, np.zeros_like(logs)
    forward = _walk(chosen, skips)
    # The same recursion from the end: a skip into a state becomes one out of it.
    backward = _walk(chosen[::-1, ::-1], np.append(skips[2:], [False, False])[::-1])[::-1, ::-1]
    total = np.logaddexp(forward[-1, -1], forward[-1, -2])
    # Both directions count the step itself; no path contains it if its probability is 0.
    shares = np.where(np.isneginf(chosen), 0, np.exp(forward + backward - chosen - total))
    gradient = np.exp(logs)
    for state, label in enumerate(states):
        gradient[:, label] -= shares[:, state]
    return -total, gradient


def _walk(chosen: Array, skips: Array) -> Array:
    """The log probabilities of all paths from the start to each state, step by step."""
    reached = np.full_like(chosen, -np.inf)
    reached[0, :2] = chosen[0, :2]
    for step in range(1, len(chosen)):
        before = reached[step - 1]
        paths = before.copy()
        paths[1:] = np.logaddexp(paths[1:], before[:-1])
        paths[2:] = np.where(skips[2:], np.logaddexp(paths[2:], before[:-2]), paths[2:])
        reached[step] = paths + chosen[step]
    return reached


# -- with cuDNN -------------------------------------------------------------------------------------------------------
ALGORITHM = cudnn.cudnnCTCLossAlgo_t

WITH_SOFTMAX = cudnn.cudnnLossNormalizationMode_t.CUDNN_LOSS_NORMALIZATION_SOFTMAX

ZERO = cudnn.cudnnCTCGradMode_t.CUDNN_CTC_ZERO_OOB_GRADIENTS

# For fewer labels, cuDNN's kernel (9.19) writes beyond its shared memory, according to compute-sanitizer: with 4
# labels, all threads of a warp write, each to one of 9 elements. It did not with 8 or more, nor with 4 if a larger
# maximum was given.
MIN_LONGEST = 16

LOGITS, LABELS, LABEL_LENGTHS, INPUT_LENGTHS, LOSSES, GRADIENT = range(6)  # the order of the request's arguments()


def cudnn_ctc(request: CtcRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request."""
    logits = tensor_3d(request.logits.layout)
    loss = Descriptor("CTCLoss")
    longest = max(request.max_label_length, MIN_LONGEST)
    cudnn.cudnnSetCTCLossDescriptor_v9(loss.handle, DTYPES[request.logits.dtype], WITH_SOFTMAX, ZERO, longest)
    algorithm = (
        ALGORITHM.CUDNN_CTC_LOSS_ALGO_DETERMINISTIC
        if request.deterministic
        else ALGORITHM.CUDNN_CTC_LOSS_ALGO_NON_DETERMINISTIC
    )
    size = ctypes.c_size_t()
    gradient: Any = logits.handle if request.with_gradient else None
    handle = handle_of(executor).follow()
    cudnn.cudnnGetCTCLossWorkspaceSize_v8(handle, algorithm, loss.handle, logits.handle, gradient, ctypes.byref(size))
    scratch = handle_of(executor).scratch(executor, size.value)
    arguments = (
        *(algorithm, loss, logits, Operand(LOGITS), Operand(LABELS), Operand(LABEL_LENGTHS), Operand(INPUT_LENGTHS)),
        *(Operand(LOSSES), gradient, Operand(GRADIENT), size, scratch.c_ptr),
    )
    zeroed = ((GRADIENT, request.logits.nbytes),) if request.with_gradient else ()
    return CallPlan(executor, row, cudnn.cudnnCTCLoss_v8, arguments, (scratch,), zeroed=zeroed)


# -- the public functions, and the calls of the rows ------------------------------------------------------------------
reference = exactly(evaluate)
numpy_ctc = numpy_call(evaluate)
