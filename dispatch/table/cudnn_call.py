"""The rows by single calls of cuDNN's older API: softmax, activations, pooling, reductions, dropout, networks, norms.

`table.py` imports this file when one of its ops is first looked up. `run_on` names the machines on which all cases of a
row have passed. Combinations that cuDNN refuses are in the rules, or have no row: bf16 has no dropout, i8 no gradient. Sums
over rows and columns use a graph (`cudnn_sums`) if cuDNN has an engine for it.
"""

# fmt: off
# ruff: noqa: E501
from __future__ import annotations

from dataclasses import replace
from typing import Any

from dispatch.core.nonfinite import stated
from dispatch.core.row import Row
from dispatch.keys import BF16, F16, F32, F64, I8, U8, Arch, Compute
from dispatch.ops.activation import cudnn_activation, elu_above_0, five_axes, numpy_activation, one_layout
from dispatch.ops.ctc import at_most_255, cudnn_ctc, dense_logits, numpy_ctc
from dispatch.ops.dropout import cudnn_dropout, numpy_dropout, one_axis
from dispatch.ops.local_norm import cudnn_local_norm, dense_alike, numpy_local_norm, odd_window
from dispatch.ops.pooling import cudnn_pooling, images, numpy_pooling, pairs, whole_max
from dispatch.ops.reduction import cudnn_reduce, cudnn_sums, eight_axes, lines, numpy_reduce, partial, shrinks, sums
from dispatch.ops.rnn import cudnn_rnn, numpy_rnn
from dispatch.ops.rnn.rules import bytes_by_16, dense_sequences, one_bias, two_or_none
from dispatch.ops.softmax import cudnn_softmax, four_axes, numpy_softmax, one_dense_layout
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

COMP_64F, COMP_32F, FAST_TF32 = Compute.COMPUTE_64F, Compute.COMPUTE_32F, Compute.COMPUTE_32F_FAST_TF32
SM75, SM80 = Arch(75), Arch(80)  # the oldest GPU for cuDNN 9 with CUDA 13; bf16 and TF32 exist from sm_80 on
V9 = (9, 0)
H200 = ("H200",)
PASSED_OVER = "follow IEEE 754, except that neighbours in a window may ignore NaN"
SPREADS = "also affect neighbours outside their window: sums over windows are differences of sums over lines"

SOFTMAX_FWD     = ("cudnn", "cudnnSoftmaxForward",        cudnn_softmax)
SOFTMAX_BWD     = ("cudnn", "cudnnSoftmaxBackward",       cudnn_softmax)
ACTIVATION_FWD  = ("cudnn", "cudnnActivationForward",     cudnn_activation)
ACTIVATION_BWD  = ("cudnn", "cudnnActivationBackward",    cudnn_activation)
POOLING_FWD     = ("cudnn", "cudnnPoolingForward",        cudnn_pooling)
POOLING_BWD     = ("cudnn", "cudnnPoolingBackward",       cudnn_pooling)
SUMS            = ("cudnn", "cudnnBackendExecute",        cudnn_sums)
REDUCE          = ("cudnn", "cudnnReduceTensor",          cudnn_reduce)
DROPOUT_STATES  = ("cudnn", "cudnnSetDropoutDescriptor",  cudnn_dropout)
DROPOUT_FWD     = ("cudnn", "cudnnDropoutForward",        cudnn_dropout)
DROPOUT_BWD     = ("cudnn", "cudnnDropoutBackward",       cudnn_dropout)
RNN_FWD         = ("cudnn", "cudnnRNNForward",            cudnn_rnn)
RNN_BWD_DATA    = ("cudnn", "cudnnRNNBackwardData_v8",    cudnn_rnn)
RNN_BWD_WEIGHTS = ("cudnn", "cudnnRNNBackwardWeights_v8", cudnn_rnn)
CTC             = ("cudnn", "cudnnCTCLoss_v8",            cudnn_ctc)
LRN             = ("cudnn", "cudnnLRNCrossChannelForward", cudnn_local_norm)
LRN_BWD         = ("cudnn", "cudnnLRNCrossChannelBackward", cudnn_local_norm)
DIVISIVE        = ("cudnn", "cudnnDivisiveNormalizationForward", cudnn_local_norm)
DIVISIVE_BWD    = ("cudnn", "cudnnDivisiveNormalizationBackward", cudnn_local_norm)

NETWORK = (dense_sequences, bytes_by_16, two_or_none)

TRIED_ROWS = (
#       op                 first result   compute    rules
#                                                                                          min_arch, max_arch, min_version, calls, run_on
    Row("softmax",         (F64,  F64),   COMP_64F,  (four_axes, one_dense_layout),        SM75, None, V9, *SOFTMAX_FWD,     H200),
    Row("softmax",         (F32,  F32),   COMP_32F,  (four_axes, one_dense_layout),        SM75, None, V9, *SOFTMAX_FWD,     H200),
    Row("softmax",         (F16,  F16),   COMP_32F,  (four_axes, one_dense_layout),        SM75, None, V9, *SOFTMAX_FWD,     H200),
    Row("softmax",         (BF16, BF16),  COMP_32F,  (four_axes, one_dense_layout),        SM80, None, V9, *SOFTMAX_FWD,     H200),
    Row("softmax_bwd",     (F64,  F64),   COMP_64F,  (four_axes, one_dense_layout),        SM75, None, V9, *SOFTMAX_BWD,     H200),
    Row("softmax_bwd",     (F32,  F32),   COMP_32F,  (four_axes, one_dense_layout),        SM75, None, V9, *SOFTMAX_BWD,     H200),
    Row("softmax_bwd",     (F16,  F16),   COMP_32F,  (four_axes, one_dense_layout),        SM75, None, V9, *SOFTMAX_BWD,     H200),
    Row("softmax_bwd",     (BF16, BF16),  COMP_32F,  (four_axes, one_dense_layout),        SM80, None, V9, *SOFTMAX_BWD,     H200),
    Row("activation",      (F64,  F64),   COMP_64F,  (five_axes,),                         SM75, None, V9, *ACTIVATION_FWD,  H200),
    Row("activation",      (F32,  F32),   COMP_32F,  (five_axes,),                         SM75, None, V9, *ACTIVATION_FWD,  H200),
    Row("activation",      (F16,  F16),   COMP_32F,  (five_axes,),                         SM75, None, V9, *ACTIVATION_FWD,  H200),
    Row("activation",      (BF16, BF16),  COMP_32F,  (five_axes,),                         SM80, None, V9, *ACTIVATION_FWD,  H200),
    Row("activation_bwd",  (F64,  F64),   COMP_64F,  (five_axes, one_layout, elu_above_0), SM75, None, V9, *ACTIVATION_BWD,  H200, note="SWISH: 0 for an x above 2^53"),
    Row("activation_bwd",  (F32,  F32),   COMP_32F,  (five_axes, one_layout, elu_above_0), SM75, None, V9, *ACTIVATION_BWD,  H200, note="SWISH: 0 for an x above 2^24"),
    Row("activation_bwd",  (F16,  F16),   COMP_32F,  (five_axes, one_layout, elu_above_0), SM75, None, V9, *ACTIVATION_BWD,  H200),
    Row("activation_bwd",  (BF16, BF16),  COMP_32F,  (five_axes, one_layout, elu_above_0), SM80, None, V9, *ACTIVATION_BWD,  H200, note="SWISH: 0 for an x above 2^24"),
    Row("pooling",         (F64,  F64),   COMP_64F,  (images,),                            SM75, None, V9, *POOLING_FWD,     H200),
    Row("pooling",         (F32,  F32),   COMP_32F,  (images,),                            SM75, None, V9, *POOLING_FWD,     H200),
    Row("pooling",         (F16,  F16),   COMP_32F,  (images,),                            SM75, None, V9, *POOLING_FWD,     H200),
    Row("pooling",         (BF16, BF16),  COMP_32F,  (images,),                            SM80, None, V9, *POOLING_FWD,     H200),
    Row("pooling",         (I8,   I8),    None,      (images, whole_max),                  SM75, None, V9, *POOLING_FWD,     H200),
    Row("pooling_bwd",     (F64,  F64),   COMP_64F,  (images, pairs),                      SM75, None, V9, *POOLING_BWD,     H200),
    Row("pooling_bwd",     (F32,  F32),   COMP_32F,  (images, pairs),                      SM75, None, V9, *POOLING_BWD,     H200),
    Row("pooling_bwd",     (F16,  F16),   COMP_32F,  (images, pairs),                      SM75, None, V9, *POOLING_BWD,     H200),
    Row("pooling_bwd",     (BF16, BF16),  COMP_32F,  (images, pairs),                      SM80, None, V9, *POOLING_BWD,     H200),
    Row("reduce",          (F32,  F32),   COMP_32F,  (shrinks, sums, lines, partial),      SM80, None, V9, *SUMS,            H200, variant="sums"),
    Row("reduce",          (F16,  F32),   COMP_32F,  (shrinks, sums, lines, partial),      SM80, None, V9, *SUMS,            H200, variant="sums"),
    Row("reduce",          (BF16, F32),   COMP_32F,  (shrinks, sums, lines),               SM80, None, V9, *SUMS,            H200, variant="sums"),
    Row("reduce",          (I8,   F32),   COMP_32F,  (shrinks, sums, lines, partial),      SM80, None, V9, *SUMS,            H200, variant="sums"),
    Row("reduce",          (F64,  F64),   COMP_64F,  (shrinks, eight_axes),                SM75, None, V9, *REDUCE,          H200),
    Row("reduce",          (F32,  F32),   COMP_32F,  (shrinks, eight_axes),                SM75, None, V9, *REDUCE,          H200),
    Row("reduce",          (F32,  F16),   COMP_32F,  (shrinks, eight_axes),                SM75, None, V9, *REDUCE,          H200),
    Row("reduce",          (F16,  F16),   COMP_32F,  (shrinks, eight_axes),                SM75, None, V9, *REDUCE,          H200),
    Row("reduce",          (F16,  F32),   COMP_32F,  (shrinks, eight_axes),                SM75, None, V9, *REDUCE,          H200),
    Row("reduce",          (I8,   F32),   COMP_32F,  (shrinks, eight_axes),                SM75, None, V9, *REDUCE,          H200),
    Row("dropout_states",  (U8,   U8),    None,      (),                                   SM75, None, V9, *DROPOUT_STATES,  H200),
    Row("dropout",         (F64,  F64),   COMP_64F,  (one_axis,),                          SM75, None, V9, *DROPOUT_FWD,     H200),
    Row("dropout",         (F32,  F32),   COMP_32F,  (one_axis,),                          SM75, None, V9, *DROPOUT_FWD,     H200),
    Row("dropout",         (F16,  F16),   COMP_32F,  (one_axis,),                          SM75, None, V9, *DROPOUT_FWD,     H200),
    Row("dropout_bwd",     (F64,  F64),   COMP_64F,  (one_axis,),                          SM75, None, V9, *DROPOUT_BWD,     H200),
    Row("dropout_bwd",     (F32,  F32),   COMP_32F,  (one_axis,),                          SM75, None, V9, *DROPOUT_BWD,     H200),
    Row("dropout_bwd",     (F16,  F16),   COMP_32F,  (one_axis,),                          SM75, None, V9, *DROPOUT_BWD,     H200),
    Row("rnn",             (F64,  F64),   COMP_64F,  NETWORK,                              SM75, None, V9, *RNN_FWD,         H200),
    Row("rnn",             (F32,  F32),   COMP_32F,  NETWORK,                              SM75, None, V9, *RNN_FWD,         H200),
    Row("rnn",             (F32,  F32),   FAST_TF32, NETWORK,                              SM80, None, V9, *RNN_FWD,         H200),
    Row("rnn",             (F16,  F16),   COMP_32F,  NETWORK,                              SM75, None, V9, *RNN_FWD,         H200),
    Row("rnn",             (BF16, BF16),  COMP_32F,  NETWORK,                              SM80, None, V9, *RNN_FWD,         H200),
    Row("rnn_bwd_data",    (F64,  F64),   COMP_64F,  NETWORK,                              SM75, None, V9, *RNN_BWD_DATA,    H200),
    Row("rnn_bwd_data",    (F32,  F32),   COMP_32F,  NETWORK,                              SM75, None, V9, *RNN_BWD_DATA,    H200),
    Row("rnn_bwd_data",    (F32,  F32),   FAST_TF32, NETWORK,                              SM80, None, V9, *RNN_BWD_DATA,    H200),
    Row("rnn_bwd_data",    (F16,  F16),   COMP_32F,  NETWORK,                              SM75, None, V9, *RNN_BWD_DATA,    H200),
    Row("rnn_bwd_data",    (BF16, BF16),  COMP_32F,  NETWORK,                              SM80, None, V9, *RNN_BWD_DATA,    H200),
    Row("rnn_bwd_weights", (F64,  F64),   COMP_64F,  NETWORK,                              SM75, None, V9, *RNN_BWD_WEIGHTS, H200),
    Row("rnn_bwd_weights", (F32,  F32),   COMP_32F,  NETWORK,                              SM75, None, V9, *RNN_BWD_WEIGHTS, H200),
    Row("rnn_bwd_weights", (F32,  F32),   FAST_TF32, NETWORK,                              SM80, None, V9, *RNN_BWD_WEIGHTS, H200),
    Row("rnn_bwd_weights", (F16,  F16),   COMP_32F,  NETWORK,                              SM75, None, V9, *RNN_BWD_WEIGHTS, H200),
    Row("rnn_bwd_weights", (BF16, BF16),  COMP_32F,  NETWORK,                              SM80, None, V9, *RNN_BWD_WEIGHTS, H200),
    Row("ctc_loss",        (F32,  F32),   COMP_32F,  (dense_logits, at_most_255),          SM75, None, V9, *CTC,             H200),
    Row("lrn",                 (F64,  F64),    COMP_64F,  (dense_alike,),                        SM75, None, V9, *LRN, H200, nonfinite=PASSED_OVER),
    Row("lrn",                 (F32,  F32),    COMP_32F,  (dense_alike,),                        SM75, None, V9, *LRN, H200, nonfinite=PASSED_OVER),
    Row("lrn",                 (F16,  F16),    COMP_32F,  (dense_alike,),                        SM75, None, V9, *LRN, H200, nonfinite=PASSED_OVER),
    Row("lrn_bwd",             (F64,  F64),    COMP_64F,  (dense_alike,),                        SM75, None, V9, *LRN_BWD, H200, nonfinite=PASSED_OVER),
    Row("lrn_bwd",             (F32,  F32),    COMP_32F,  (dense_alike,),                        SM75, None, V9, *LRN_BWD, H200, nonfinite=PASSED_OVER),
    Row("lrn_bwd",             (F16,  F16),    COMP_32F,  (dense_alike,),                        SM75, None, V9, *LRN_BWD, H200, nonfinite=PASSED_OVER),
    Row("divisive_norm",       (F64,  F64),    COMP_64F,  (dense_alike,),                        SM75, None, V9, *DIVISIVE, H200, nonfinite=SPREADS),
    Row("divisive_norm",       (F32,  F32),    COMP_32F,  (dense_alike,),                        SM75, None, V9, *DIVISIVE, H200, nonfinite=SPREADS),
    Row("divisive_norm",       (F16,  F16),    COMP_32F,  (dense_alike,),                        SM75, None, V9, *DIVISIVE, H200, nonfinite=SPREADS),
    Row("divisive_norm_bwd",   (F64,  F64),    COMP_64F,  (dense_alike, odd_window),             SM75, None, V9, *DIVISIVE_BWD, H200, nonfinite=SPREADS),
    Row("divisive_norm_bwd",   (F32,  F32),    COMP_32F,  (dense_alike, odd_window),             SM75, None, V9, *DIVISIVE_BWD, H200, nonfinite=SPREADS),
    Row("divisive_norm_bwd",   (F16,  F16),    COMP_32F,  (dense_alike, odd_window),             SM75, None, V9, *DIVISIVE_BWD, H200, nonfinite=SPREADS),
)
# fmt: on
# Networks with one bias use the same calls.
ONE_BIAS_ROWS = tuple(
    replace(row, rules=(dense_sequences, bytes_by_16, one_bias), variant="one bias")
    for row in TRIED_ROWS
    if two_or_none in row.rules
)
GPU_ROWS = (*TRIED_ROWS, *ONE_BIAS_ROWS)

NUMPY: dict[Any, Any] = {
    cudnn_softmax: numpy_softmax,
    cudnn_activation: numpy_activation,
    cudnn_pooling: numpy_pooling,
    cudnn_reduce: numpy_reduce,
    cudnn_sums: numpy_reduce,
    cudnn_dropout: numpy_dropout,
    cudnn_rnn: numpy_rnn,
    cudnn_ctc: numpy_ctc,
    cudnn_local_norm: numpy_local_norm,
}
ROWS = stated(
    (
        *GPU_ROWS,
        *(on_host(row, NUMPY[row.call]) for row in GPU_ROWS),
    )
)
