"""Masks of attention as cuDNN adds them to scores.

All layers of a model are given one mask: in a recording of its forward (graphs.py) that is converted once. Elsewhere it
is converted each time, for torch does not count what a CUDA graph or another library writes to it.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["additive_mask", "cached_during_capture"]

# What is added to the score of a key that is not seen: far below any other, and finite also times log₂ e in f32.
MASKED_SCORE = {torch.float16: -65504.0, torch.bfloat16: -1e30}


class _CaptureCache(threading.local):
    """What masks came to in the recording that this thread makes, with each mask, so that it is not gone; else None."""

    converted: dict[Any, tuple[torch.Tensor, tuple[Any, Any]]] | None = None


_capture_cache = _CaptureCache()


@contextmanager
def cached_during_capture() -> Iterator[None]:
    """Masks that are converted in here, on the one stream that is captured, are known until its end."""
    before, _capture_cache.converted = _capture_cache.converted, {}
    try:
        yield
    finally:
        _capture_cache.converted = before


def additive_mask(mask: torch.Tensor, dtype: torch.dtype, queries: int, keys: int) -> tuple[Any, Any]:
    """What is added to scores in a dtype, (B or 1, H or 1, Sq, Skv), and which queries see no key.

    `mask` broadcasts to the scores: bools, or numbers in that dtype.
    """
    if torch.compiler.is_compiling() or _capture_cache.converted is None or mask.is_inference():
        return _convert(mask, dtype, queries, keys)
    seen = (id(mask), mask._version, mask.data_ptr(), mask.shape, mask.stride(), dtype, queries, keys)
    kept = _capture_cache.converted.get(seen)
    if kept is None:
        kept = _capture_cache.converted[seen] = (mask, _convert(mask, dtype, queries, keys))
    return kept[1]


def _convert(mask: Any, dtype: torch.dtype, queries: int, keys: int) -> tuple[Any, Any]:
    """cuDNN is given finite numbers alone: a row of -∞ would be NaN."""
    mask = mask.reshape(*(1,) * (4 - mask.ndim), *mask.shape)
    mask = mask.expand(*mask.shape[:2], queries, keys)
    masked_score = MASKED_SCORE[dtype]
    if mask.dtype == torch.bool:
        return torch.where(mask, mask.new_zeros((), dtype=dtype), masked_score), ~mask.any(-1, keepdim=True)
    # What is lower than that has no weight either, but beside others as low it has its share, as in torch.
    return mask.clamp(min=masked_score), (mask.detach() == -torch.inf).all(-1, keepdim=True)
