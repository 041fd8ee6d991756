"""Converts attention masks to the form that cuDNN adds to scores.

All layers of a model get the same mask. During a recording of the forward (graphs.py) it is converted once. Otherwise
it is converted each time, because torch does not count writes to it by a CUDA graph or another library.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["additive_mask", "cached_during_capture"]

# The number added to the score of a masked key: far below any score, and still finite times log₂ e in f32.
MASKED_SCORE = {torch.float16: -65504.0, torch.bfloat16: -1e30}


class _CaptureCache(threading.local):
    """The masks converted during this thread's recording, with references to the originals; None outside recordings."""

    converted: dict[Any, tuple[torch.Tensor, tuple[Any, Any]]] | None = None


_capture_cache = _CaptureCache()


@contextmanager
def cached_during_capture() -> Iterator[None]:
    """Cache the masks converted in the block, on the captured stream, until the end of the block."""
    before, _capture_cache.converted = _capture_cache.converted, {}
    try:
        yield
    finally:
        _capture_cache.converted = before


def additive_mask(mask: torch.Tensor, dtype: torch.dtype, queries: int, keys: int) -> tuple[Any, Any]:
    """The tensor to add to scores in a dtype, (B or 1, H or 1, Sq, Skv), and a mask of queries without visible keys.

    `mask` broadcasts to the scores: bools, or numbers in that dtype.
    """
    if torch.compiler.is_compiling() or _capture_cache.converted is None or mask.is_inference():
        return _convert(mask, dtype, queries, keys)
    key = (id(mask), mask._version, mask.data_ptr(), mask.shape, mask.stride(), dtype, queries, keys)
    cached = _capture_cache.converted.get(key)
    if cached is None:
        cached = _capture_cache.converted[key] = (mask, _convert(mask, dtype, queries, keys))
    return cached[1]


def _convert(mask: Any, dtype: torch.dtype, queries: int, keys: int) -> tuple[Any, Any]:
    """cuDNN gets only finite numbers: a row of -∞ would give NaN."""
    mask = mask.reshape(*(1,) * (4 - mask.ndim), *mask.shape)
    mask = mask.expand(*mask.shape[:2], queries, keys)
    masked_score = MASKED_SCORE[dtype]
    if mask.dtype == torch.bool:
        return torch.where(mask, mask.new_zeros((), dtype=dtype), masked_score), ~mask.any(-1, keepdim=True)
    # Clamped scores have weight 0 next to larger scores; among equally low scores they share the weight, as in torch.
    return mask.clamp(min=masked_score), (mask.detach() == -torch.inf).all(-1, keepdim=True)
