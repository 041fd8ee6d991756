"""The rows of the ops that are one call of cuDNN's older API each: softmax and its neighbours.

`table.py` takes them in. A GPU row is here because its cases have passed; its rules say what cuDNN refuses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.keys import BF16, F16, F32, F64, HOST, I8, U8, Arch, Compute, Dtype, Epilogue
from dispatch.ops.activation import cudnn_activation, numpy_activation
from dispatch.ops.activation.rules import five_axes, one_layout
from dispatch.ops.ctc import cudnn_ctc, numpy_ctc
from dispatch.ops.ctc.rules import at_most_255, dense_logits
from dispatch.ops.dropout import cudnn_dropout, numpy_dropout
from dispatch.ops.dropout.rules import one_axis
from dispatch.ops.pooling import cudnn_pooling, numpy_pooling
from dispatch.ops.pooling.rules import images, whole_max
from dispatch.ops.reduction import cudnn_reduce, numpy_reduce
from dispatch.ops.reduction.rules import eight_axes, shrinks
from dispatch.ops.rnn import cudnn_rnn, numpy_rnn
from dispatch.ops.rnn.rules import dense_sequences
from dispatch.ops.softmax import cudnn_softmax, numpy_softmax
from dispatch.ops.softmax.rules import four_axes
from dispatch.row import Row, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ROWS"]

SM75 = Arch(75)  # the oldest that cuDNN 9 for CUDA 13 runs on
SINCE = (9, 0)
FLOATS = (F32, F64, F16, BF16)
H200 = ("NVIDIA H200",)
UNTRIED: tuple[str, ...] = ()

# ruff: noqa: E501
# Op, dtypes of the first input (one row each), dtype of the first output (None: the same), rules, cuDNN's function, the
# functions of the op, and where the cases have passed.
# fmt: off
CALLS: tuple[tuple[str, tuple[Dtype, ...], Dtype | None, tuple[Rule, ...], str, Any, Any, tuple[str, ...]], ...] = (
    ("softmax_fwd", FLOATS, None, (four_axes,), "cudnnSoftmaxForward",  cudnn_softmax, numpy_softmax, UNTRIED),
    ("softmax_bwd", FLOATS, None, (four_axes,), "cudnnSoftmaxBackward", cudnn_softmax, numpy_softmax, UNTRIED),
    ("activation_fwd", FLOATS, None, (five_axes,), "cudnnActivationForward", cudnn_activation, numpy_activation, UNTRIED),
    ("activation_bwd", FLOATS, None, (five_axes, one_layout), "cudnnActivationBackward", cudnn_activation, numpy_activation, UNTRIED),
    ("pooling_fwd", (I8,), None, (images, whole_max), "cudnnPoolingForward", cudnn_pooling, numpy_pooling, UNTRIED),
    ("pooling_fwd", FLOATS, None, (images,), "cudnnPoolingForward", cudnn_pooling, numpy_pooling, UNTRIED),
    ("pooling_bwd", FLOATS, None, (images,), "cudnnPoolingBackward", cudnn_pooling, numpy_pooling, UNTRIED),
    ("reduce", (F32, F64, F16), None, (shrinks, eight_axes), "cudnnReduceTensor", cudnn_reduce, numpy_reduce, UNTRIED),
    ("reduce", (F16, I8), F32, (shrinks, eight_axes), "cudnnReduceTensor", cudnn_reduce, numpy_reduce, UNTRIED),
    ("reduce", (F32,), F16, (shrinks, eight_axes), "cudnnReduceTensor", cudnn_reduce, numpy_reduce, UNTRIED),
    ("dropout_states", (U8,), None, (), "cudnnSetDropoutDescriptor", cudnn_dropout, numpy_dropout, UNTRIED),
    ("dropout_fwd", (F32, F64, F16), None, (one_axis,), "cudnnDropoutForward", cudnn_dropout, numpy_dropout, UNTRIED),
    ("dropout_bwd", (F32, F64, F16), None, (one_axis,), "cudnnDropoutBackward", cudnn_dropout, numpy_dropout, UNTRIED),
    ("ctc_loss", (F32,), None, (dense_logits, at_most_255), "cudnnCTCLoss_v8", cudnn_ctc, numpy_ctc, UNTRIED),
)
# The passes of recurrent networks, each in these dtypes and compute types.
PASSES = (
    ("rnn_fwd",         "cudnnRNNForward",            UNTRIED),
    ("rnn_bwd_data",    "cudnnRNNBackwardData_v8",    UNTRIED),
    ("rnn_bwd_weights", "cudnnRNNBackwardWeights_v8", UNTRIED),
)
SUMS = ((F32, Compute.COMPUTE_32F), (F32, Compute.COMPUTE_32F_FAST_TF32), (F64, None), (F16, None), (BF16, None))
# fmt: on


def _rows() -> Iterator[Row]:
    """A row for each dtype of a line, of the GPU and then of the host, which takes what the GPU takes."""
    plain = ((Epilogue.NONE,), ((None, None),))
    for op, dtypes, made, rules, function, on_gpu, on_host, run_on in CALLS:
        for dtype in dtypes:
            pair = (dtype, made or dtype)
            yield Row(op, pair, (), None, *plain, rules, SM75, None, SINCE, "cudnn", function, on_gpu, run_on)
            yield Row(op, pair, (), None, *plain, rules, HOST, HOST, (), "numpy", op, on_host, ("host",))
    rules = (dense_sequences,)
    for op, function, run_on in PASSES:
        for dtype, sums in SUMS:
            pair = (dtype, dtype)
            yield Row(op, pair, (), sums, *plain, rules, SM75, None, SINCE, "cudnn", function, cudnn_rnn, run_on)
            yield Row(op, pair, (), sums, *plain, rules, HOST, HOST, (), "numpy", op, numpy_rnn, ("host",))


ROWS = tuple(_rows())
