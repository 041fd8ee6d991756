"""Packed sequences of attention: their offsets, and the conversion to padded arrays on the host.

`reference.py` unpacks sequences and packs results on the host; `request.py` compares layouts that share offsets.
`base.py` lists the offsets of each operand. `ragged_offsets` is public. This file calls no library.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.checks import check_int, shown
from dispatch.core.operand_checks import taken_in
from dispatch.errors import BadRequest
from dispatch.ops.sdpa.base import RAGGED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor
    from dispatch.ops.sdpa.base import SdpaRequest

__all__ = ["check_alike", "packed", "ragged_offsets", "unpacked"]

KEYS = ("ragged_k", "ragged_v")
FOR_I32 = 2**31 - 1


def ragged_offsets(lengths: Sequence[int], tensor: Any) -> Tensor:
    """Offsets of sequences that are stored one after the other in a packed tensor (tokens, heads, head), on its device.

    `tensor` may also be an array of another library. The offsets are i32 if they fit, else i64: make all four of a
    request from tensors of one size. Raises BadRequest if there are no lengths, or more than the tokens of the tensor.
    """
    own = taken_in("tensor", tensor)
    if not isinstance(lengths, (tuple, list, np.ndarray)) or (isinstance(lengths, np.ndarray) and lengths.ndim != 1):
        raise BadRequest("lengths", shown(lengths), "the lengths of sequences")
    counts = [check_int("lengths", int(n) if isinstance(n, np.integer) else n, 0) for n in lengths]
    if own.ndim != 3 or not counts or sum(counts) > own.shape[0]:
        raise BadRequest("lengths", str(counts), f"lengths of sequences that fit into the tokens of {own.layout}")
    step = own.layout.strides[0]
    ends = np.cumsum([0, *counts], dtype=np.int64) * step
    fits = own.shape[0] * step <= FOR_I32
    return own.device.array(ends.astype(np.int32) if fits else ends)


# -- checks -------------------------------------------------------------------------------------------------------
def check_alike(request: SdpaRequest, *pairs: tuple[str, str]) -> None:
    """Check that packed operands that share offsets have one layout."""
    for name, other in pairs:
        tensor: Tensor | None = getattr(request, name)
        strides = getattr(request, other).layout.strides
        if tensor is not None and tensor.layout.strides != strides:
            raise BadRequest(
                name, str(tensor.layout), f"strides {strides}, those of {other}, because it has the same offsets"
            )


# -- on the host, where offsets can be read -------------------------------------------------------------------------
def _spans(request: SdpaRequest, name: str) -> list[slice]:
    """The tokens of each sequence of an operand; BadRequest if they are out of range, overlap or are too long."""
    owner = RAGGED[name]
    lengths = np.asarray(request.seq_len_kv if owner in KEYS else request.seq_len_q)
    offsets = np.asarray(getattr(request, owner))
    layout, longest = request.layout_of(name), request.extents(name)[2]
    step = layout.strides[0]
    if (offsets % step).any():
        raise BadRequest(owner, str(offsets), f"multiples of {step}, the step from token to token of {name}")
    spans = [slice(int(o) // step, int(o) // step + int(n)) for o, n in zip(offsets, lengths, strict=False)]
    if any(not 0 <= n <= longest for n in lengths):
        raise BadRequest("seq_len_kv" if owner in KEYS else "seq_len_q", str(lengths), f"lengths up to {longest}")
    if offsets[0] < 0 or spans[-1].stop > layout.shape[0] or any(a.stop > b.start for a, b in pairwise(spans)):
        raise BadRequest(owner, str(offsets), f"consecutive sequences of {lengths} tokens in {layout}")
    return spans


def unpacked(request: SdpaRequest, name: str, array: Array) -> Array:
    """An operand as (B, heads, longest, head), with zeros after the end of each sequence."""
    if not request.packed or name not in RAGGED:
        return array
    wide: Array = np.zeros(request.extents(name), array.dtype)
    for number, span in enumerate(_spans(request, name)):
        wide[number, :, : span.stop - span.start] = np.swapaxes(array[span], 0, 1)
    return wide


def packed(request: SdpaRequest, name: str, wide: Array, between: Any = 0) -> Array:
    """A result of (B, heads, longest, head) in packed form; `between` fills the memory between sequences."""
    if not request.packed or name not in RAGGED:
        return wide
    array = np.full(request.layout_of(name).shape, between, wide.dtype)
    for number, span in enumerate(_spans(request, name)):
        array[span] = np.swapaxes(wide[number, :, : span.stop - span.start], 0, 1)
    return array
