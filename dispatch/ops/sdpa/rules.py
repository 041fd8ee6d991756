"""What a row of attention requires of a request beyond its dtypes: what cuDNN's fused engines support, and get right.

Each rule returns the reason for a refusal in the words "needs …, has …", or "" if it is met. The rules on masks keep
requests from engines that would give wrong results; NVIDIA's own front end has the same rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.core.layouts import ALIGNED
from dispatch.ops.sdpa.base import RAGGED
from dispatch.ops.sdpa.request import Diagonal

if TYPE_CHECKING:
    from dispatch.ops.sdpa.request import SdpaBwdRequest, SdpaFwdRequest, SdpaRequest

__all__ = [
    "bounds",
    "fp8_limits",
    "heads_by_8",
    "is_packed",
    "not_packed",
    "one_bias_gradient",
    "scale_above_0",
    "tokens_by_16_bytes",
    "two_scores",
]

MAX_HEAD = 256
MIN_SCALE = 2.0**-126  # the smallest normal f32 number; cuDNN treats smaller ones as 0


def heads_by_8(request: SdpaRequest) -> str:
    """Heads have a multiple of 8 elements, up to 256."""
    for name, extent in (("q", request.q.shape[-1]), ("v", request.v.shape[-1])):
        if extent % 8 or extent > MAX_HEAD:
            return f"needs heads of {name} that are a multiple of 8 up to {MAX_HEAD}, has {extent}"
    return ""


def scale_above_0(request: SdpaRequest) -> str:
    """The scale is above 0: else cuDNN gives NaN, because it takes the maximum of the unscaled scores (9.19)."""
    if request.factor >= MIN_SCALE:
        return ""
    return f"needs a scale of {MIN_SCALE:.3g} or more, has {request.factor}: change the sign of q instead"


def bounds(request: SdpaRequest) -> str:
    """A window or BOTTOM_RIGHT needs at least one key for every query; BOTTOM_RIGHT excludes a bias and dropout."""
    bottom = request.diagonal is Diagonal.BOTTOM_RIGHT and request.masked
    sq, skv = request.scores[2:]
    if (bottom or request.left_bound is not None) and not request.padded and sq > skv:
        return f"needs no more queries than keys with left_bound or BOTTOM_RIGHT, has {sq} and {skv}"
    if bottom and (request.bias is not None or request.dropout):
        return f"needs TOP_LEFT with {'dropout' if request.dropout else 'a bias'}, has BOTTOM_RIGHT"
    return ""


def fp8_limits(request: SdpaFwdRequest) -> str:
    """fp8: heads of a multiple of 16 elements, two queries or more, and no mask except a causal one with TOP_LEFT.

    NVIDIA's front end excludes these masks on Hopper, too; a bias even ends the process (cuDNN 9.19).
    """
    if request.scores[2] < 2:
        return "needs two queries or more with fp8, has 1"
    for name, extent in (("q", request.q.shape[-1]), ("v", request.v.shape[-1])):
        if extent % 16 or extent > MAX_HEAD:
            return f"needs heads of {name} that are a multiple of 16 up to {MAX_HEAD} for fp8, has {extent}"
    unsupported = [n for n in ("bias", "seq_len_q", "page_table_k", "left_bound") if getattr(request, n) is not None]
    unsupported += ["dropout"] if request.dropout else []
    unsupported += ["BOTTOM_RIGHT"] if request.diagonal is Diagonal.BOTTOM_RIGHT and request.masked else []
    unsupported += [f"right_bound {request.right_bound}"] if request.right_bound else []
    return f"needs no {' or '.join(unsupported)} with fp8" if unsupported else ""


def one_bias_gradient(request: SdpaBwdRequest) -> str:
    """The gradient of a bias is supported only without padding."""
    return (
        "needs no lengths for the gradient of a bias, has seq_len_q" if request.bias_gradient and request.padded else ""
    )


def two_scores(request: SdpaBwdRequest) -> str:
    """The gradient needs two queries or two keys: with one of each, cuDNN 9.28's heuristics end the process."""
    return (
        "" if max(request.scores[2:]) > 1 else "needs two queries or two keys or more for the gradient, has one of each"
    )


def not_packed(request: SdpaRequest) -> str:
    """Sequences have one length, or are padded to it; packed ones have a row of their own, from sm_90 on."""
    return "needs sequences that are not packed, has ragged_q" if request.packed else ""


def is_packed(request: SdpaRequest) -> str:
    """Sequences are packed."""
    return "" if request.packed else "needs packed sequences, has no ragged_q"


def tokens_by_16_bytes(request: SdpaRequest) -> str:
    """Every sequence, head and token starts at a multiple of 16 bytes."""
    for name in (*request.reads, *request.writes):
        if name not in RAGGED or (name in request.writes and name not in request.outputs()):
            continue
        layout = request.layout_of(name)
        strides = [step for step, extent in zip(layout.strides[:-1], layout.shape, strict=False) if extent > 1]
        if layout.alignment < ALIGNED or any(step * layout.dtype.itemsize % ALIGNED for step in strides):
            return f"needs {name} and its tokens and heads at multiples of {ALIGNED} bytes, has {layout}"
    return ""
