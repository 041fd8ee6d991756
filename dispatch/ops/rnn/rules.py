"""What a row of the recurrent networks asks of a request beyond its dtypes: layouts that cuDNN has names for.

Each rule gives the reason in the words "needs …, has …", or "" where the request is fine.
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
    """Sequences dense, all with the steps first in memory or all with the sequences first; the rest row-major."""
    names = SEQUENCES[request.op]
    ways = [steps_first(request.layout_of(name)) for name in names]
    if None in ways:
        return f"needs dense sequences, has {names[ways.index(None)]} {request.layout_of(names[ways.index(None)])}"
    # One step, or one sequence, is in both orders at once.
    both = all(1 in request.layout_of(name).shape[:2] for name in names)
    if len(set(ways)) > 1 and not both:
        return f"needs {' and '.join(names)} in one order, has {[request.layout_of(name).strides for name in names]}"
    for name in (*request.reads, *request.writes):
        tensor = getattr(request, name)
        if name not in names and tensor is not None and not tensor.layout.is_contiguous:
            return f"needs {name} dense, has {tensor.layout}: copy it with dev.array(x)"
    return ""


def bytes_by_16(request: RnnBase) -> str:
    """The products are those of cuBLAS, which may load 16 bytes at once; no document says that it never does here."""
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
