"""The table of rows: which file holds the rows of an op.

`select.py` asks the rows from the top down, and the first that takes a request carries it out. `core/row.py` says what
each column means.
"""

from __future__ import annotations

from cudabind._fork import guard
from dispatch.core.nonfinite import stated
from dispatch.core.row import Table
from dispatch.table.cublaslt import ROWS

__all__ = ["ROOMS", "TABLE"]

# The rows of further families are in files of their own, read when the table is first asked for one of their ops.
ROOMS: dict[str, tuple[str, ...]] = {
    "dispatch.table.cudnn_graph": (
        *("conv_fwd", "conv_bwd_data", "conv_bwd_filter", "sdpa_fwd", "sdpa_bwd", "norm_fwd", "norm_bwd"),
        "cudnn_graph",
    ),
    "dispatch.table.cudnn_call": (
        *("softmax_fwd", "softmax_bwd", "activation_fwd", "activation_bwd", "pooling_fwd", "pooling_bwd", "reduce"),
        *("dropout_states", "dropout_fwd", "dropout_bwd", "rnn_fwd", "rnn_bwd_data", "rnn_bwd_weights", "ctc_loss"),
    ),
    "dispatch.table.cutlass": (
        *("cutlass_gemm", "cutlass_grouped_gemm"),
        *("cutlass_conv_fwd", "cutlass_conv_bwd_data", "cutlass_conv_bwd_filter"),
    ),
}

TABLE = Table(stated(ROWS), ROOMS)
# While rows come in no process is forked: in a child they, and the module they stand in, would be half made for ever.
guard(TABLE.lock)
