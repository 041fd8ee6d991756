"""Attention and its gradient in NumPy, and the parts of the formulas that the tests' bounds use.

The host rows run it, and in float64 it is the tests' reference. It calls no library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.host_plan import exactly, largest, values
from dispatch.errors import BadRequest
from dispatch.ops.sdpa.base import RAGGED
from dispatch.ops.sdpa.packed import packed, unpacked
from dispatch.ops.sdpa.request import Diagonal, SdpaBwdRequest, SdpaFwdRequest

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor
    from dispatch.ops.sdpa.request import SdpaRequest

__all__ = [
    "Weights",
    "evaluate",
    "factor",
    "kept",
    "lengths",
    "per_head",
    "reference",
    "sequences",
    "summed",
    "visible",
    "weights_of",
]


def evaluate(request: SdpaRequest, work: np.dtype[Any], mask: Array | None = None) -> Results:
    """The outputs of a request, by name; `mask` replaces the mask that dropout would draw."""
    results: Results = {}
    if isinstance(request, SdpaBwdRequest):
        results = _backward(request, work, mask)
    elif isinstance(request, SdpaFwdRequest):
        results = _forward(request, work, mask)
    return {name: packed(request, name, array) for name, array in results.items()}


def per_head(array: Array, heads: int) -> Array:
    """K or V with a copy for every head of Q."""
    return array if array.shape[1] == heads else np.repeat(array, heads // array.shape[1], axis=1)


def sequences(request: SdpaRequest, name: str, work: np.dtype[Any]) -> Array:
    """An operand as (B, heads, S, head), also if it is packed or stored in pages; 0 after each sequence's end."""
    array = values(getattr(request, name), work)
    if request.pages is not None and name in ("k", "v"):
        array = _loaded(request, name, array)
    elif request.packed and name in RAGGED:
        return unpacked(request, name, array)
    length = lengths(request, "seq_len_kv" if name in ("k", "v") else "seq_len_q")
    return array if length is None else np.where(np.arange(array.shape[2])[:, None] < length, array, work.type(0))


def _loaded(request: SdpaRequest, name: str, array: Array) -> Array:
    """The sequences of K or V from their pages.

    BadRequest for errors that a GPU cannot check: a sequence with a page that does not exist, a sequence without keys,
    and values of V after an end that are not finite, which an engine may propagate to the sequence's results.
    """
    table, length = np.asarray(getattr(request, f"page_table_{name}")), lengths(request, "seq_len_kv")
    b, _, _, skv = request.scores
    counts = np.zeros((b, 1), np.int64) if length is None else length.reshape(b, 1)
    if counts.min() < 1:
        raise BadRequest("seq_len_kv", str(counts.ravel().tolist()), "lengths of 1 or more with keys in pages")
    has = np.arange(table.shape[1]) * array.shape[2] < counts
    used = table[has]
    if used.min() < 0 or used.max() >= len(array):
        page_range = f"pages {used.min()} to {used.max()}"
        raise BadRequest(f"page_table_{name}", page_range, f"pages from 0 to {len(array) - 1} of {name}")
    named = (table >= 0) & (table < len(array))
    pages = array[np.where(named, table, used[0])]  # (B, P, heads, length, head)
    loaded = np.moveaxis(pages, 1, 2).reshape(b, array.shape[1], skv, array.shape[3])
    after_end = np.arange(skv)[:, None] >= counts.reshape(b, 1, 1, 1)
    exists = np.repeat(named, array.shape[2], axis=1).reshape(b, 1, skv, 1)
    if name == "v" and not np.isfinite(np.where(after_end & exists, loaded, 0)).all():
        hint = "fill new pages with zeros"
        raise BadRequest("v", "NaN or infinity after a sequence's end", "finite numbers in its pages", hint)
    return np.asarray(loaded)


def lengths(request: SdpaRequest, name: str) -> Array | None:
    """The lengths of sequences as (B, 1, 1, 1), None if all are full; BadRequest for one that is out of range."""
    tensor: Tensor | None = getattr(request, name)
    if tensor is None:
        return None
    counts, longest = np.asarray(tensor), request.scores[2 if name == "seq_len_q" else 3]
    if counts.min() < 0 or counts.max() > longest:
        raise BadRequest(name, str(counts.tolist()), f"lengths from 0 to {longest}")
    return counts.reshape(-1, 1, 1, 1)


def summed(array: Array, heads: int) -> Array:
    """The gradient of a shared K or V: the gradients of the heads of Q, summed by groups."""
    b, full, *rest = array.shape
    return array if full == heads else array.reshape(b, heads, full // heads, *rest).sum(axis=2)


def visible(request: SdpaRequest) -> Array:
    """Which keys each query attends to, as (B or 1, 1, Sq, Skv)."""
    sq, skv = request.scores[2:]
    row, column = np.arange(sq)[:, None], np.arange(skv)[None, :]
    mask = np.ones((1, 1, sq, skv), bool)
    shift: Any = 0
    len_q, len_kv = (lengths(request, name) for name in ("seq_len_q", "seq_len_kv"))
    if len_q is not None and len_kv is not None:
        mask = (row < len_q) & (column < len_kv)
        shift = len_kv - len_q
    else:
        shift = skv - sq
    if request.diagonal is Diagonal.TOP_LEFT:
        shift = 0
    if request.right_bound is not None:
        mask = mask & (column <= row + shift + request.right_bound)
    if request.left_bound is not None:
        mask = mask & (column > row + shift - request.left_bound)
    return mask


def factor(request: SdpaRequest, *names: str) -> float:
    """The product of some of fp8's factors; 1 if there are none."""
    tensors = [getattr(request, name, None) for name in names]
    return float(np.prod([float(np.asarray(tensor).reshape(())) for tensor in tensors if tensor is not None]))


class Weights(NamedTuple):
    """The softmax of the scores, and the logarithms of its sums (-∞ for a query that attends to no key)."""

    weights: Array
    stats: Array
    scores: Array


def weights_of(request: SdpaRequest, work: np.dtype[Any], stats: Array | None = None) -> Weights:
    """The weights of every query, computed from the statistics of the forward if given."""
    q, k = sequences(request, "q", work), per_head(sequences(request, "k", work), request.scores[1])
    scores = (q @ np.swapaxes(k, -1, -2)) * work.type(request.factor * factor(request, "descale_q", "descale_k"))
    if request.bias is not None:
        scores = scores + values(request.bias, work)
    scores = np.where(visible(request), scores, -np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        if stats is not None:
            return Weights(np.exp(scores - _seen(stats)), stats, scores)
        top = _seen(scores.max(axis=-1, keepdims=True))
        weights = np.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        # Not from the statistics, which are too imprecise if all scores of a query have a large magnitude.
        weights = weights / np.where(total == 0, total.dtype.type(1), total)
        return Weights(weights, top + np.log(total), scores)


def _seen(top: Array) -> Array:
    """The offset to subtract from the scores of each query: `top`, or 0 if it is -∞ (no key)."""
    return np.where(np.isneginf(top), top.dtype.type(0), top)


def kept(request: SdpaRequest) -> Array | None:
    """Dropout's mask, 1 or 0, from NumPy's Philox with seed and offset; a GPU draws another mask from these."""
    if request.seed is None or request.offset is None:
        return None
    seed, offset = (int(np.asarray(tensor).reshape(())) for tensor in (request.seed, request.offset))
    drawn = np.random.Generator(np.random.Philox(key=seed % 2**64, counter=offset % 2**64)).random(request.scores)
    return (drawn >= request.dropout).astype(np.float64)


def _forward(request: SdpaFwdRequest, work: np.dtype[Any], mask: Array | None = None) -> Results:
    attention = weights_of(request, work)
    weights = attention.weights
    mask = kept(request) if mask is None else mask
    if mask is not None:
        weights = weights * mask.astype(work) / work.type(1 - request.dropout)
    between = work.type(factor(request, "scale_s", "descale_s", "descale_v"))
    o = (weights @ per_head(sequences(request, "v", work), request.scores[1])) * between
    scaled = o * work.type(factor(request, "scale_o"))
    top = largest(request.q.dtype) if request.q.dtype.is_fp8 else np.inf  # fp8 saturates, and NaN stays
    results = {"out": np.clip(scaled, -top, top)}
    if request.stats:
        results["stats_out"] = attention.stats
    if request.mask and mask is not None:
        results["mask_out"] = mask
    if request.amax:
        results["amax_s"], results["amax_o"] = weights.max().reshape(1), np.abs(o).max().reshape(1)
    return results


def _backward(request: SdpaBwdRequest, work: np.dtype[Any], mask: Array | None = None) -> Results:
    heads = request.scores[1]
    q, do, o = (sequences(request, name, work) for name in ("q", "do", "o"))
    k, v = (per_head(sequences(request, name, work), heads) for name in ("k", "v"))
    stats = values(request.stats, work)
    length = lengths(request, "seq_len_q")
    if length is not None:  # after the end they are undefined
        stats = np.where(np.arange(stats.shape[2])[:, None] < length, stats, work.type(-np.inf))
    weights = weights_of(request, work, stats).weights
    delta = (do * o).sum(axis=-1, keepdims=True)
    gradient, weighed = do @ np.swapaxes(v, -1, -2), weights
    mask = kept(request) if mask is None else mask
    if mask is not None:
        factor = mask.astype(work) / work.type(1 - request.dropout)
        gradient, weighed = gradient * factor, weights * factor
    inner = weights * (gradient - delta)
    scaled = inner * work.type(request.factor)
    results = {
        "dq": scaled @ k,
        "dk": summed(np.swapaxes(scaled, -1, -2) @ q, request.k.shape[1]),
        "dv": summed(np.swapaxes(weighed, -1, -2) @ do, request.v.shape[1]),
    }
    if request.bias_gradient and request.bias is not None:
        axes = tuple(axis for axis in (0, 1) if request.bias.shape[axis] == 1)
        results["dbias"] = inner.sum(axis=axes, keepdims=True)
    return results


reference = exactly(evaluate)
