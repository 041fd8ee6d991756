"""What a row of the recurrent networks requires of a request beyond its dtypes: layouts that cuDNN can describe.

Each rule returns the reason for a refusal in the words "needs …, has …", or "" if it is met.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.ops.rnn.network import steps_first

if TYPE_CHECKING:
    from dispatch.ops.rnn.request import RnnBase

__all__ = ["bytes_by_16", "dense_sequences", "one_bias", "two_or_none"]

ALIGNED = 16
SEQUENCES = {"rnn": ("x", "out"), "rnn_bwd_data": ("y", "dy", "out"), "rnn_bwd_weights": ("x", "y")}


def dense_sequences(request: RnnBase) -> str:
    """Sequences are dense, all with the steps first in memory or all with the sequences first; others row-major."""
    names = SEQUENCES[request.op]
    ways = [steps_first(request.layout_of(name)) for name in names]
    if None in ways:
        return f"needs dense sequences, has {names[ways.index(None)]} {request.layout_of(names[ways.index(None)])}"
    # With one step, or one sequence, both orders are the same.
    both = all(1 in request.layout_of(name).shape[:2] for name in names)
    if len(set(ways)) > 1 and not both:
        return f"needs {' and '.join(names)} in one order, has {[request.layout_of(name).strides for name in names]}"
    for name in (*request.reads, *request.writes):
        tensor = getattr(request, name)
        if name not in names and tensor is not None and not tensor.layout.is_contiguous:
            return f"needs {name} dense, has {tensor.layout}: copy it with dev.array(x)"
    return ""


def bytes_by_16(request: RnnBase) -> str:
    """Operands are aligned to 16 bytes, which cuBLAS may load at once; no document says that it never does here."""
    for name, tensor, _ in request.tensors():
        if tensor.layout.alignment < ALIGNED:
            return f"needs {name} at a multiple of {ALIGNED} bytes, has {tensor.layout.alignment}"
    return ""


def one_bias(request: RnnBase) -> str:
    """SINGLE_INP_BIAS or SINGLE_REC_BIAS."""
    return "" if len(request.network.biased) == 1 else f"needs one bias, has {_bias(request)}"


def two_or_none(request: RnnBase) -> str:
    """DOUBLE_BIAS or NO_BIAS; networks of one bias have rows of their own."""
    return "" if len(request.network.biased) != 1 else f"needs two biases or none, has {_bias(request)}"


def _bias(request: RnnBase) -> str:
    return str(getattr(request.network.bias, "name", request.network.bias))
