"""Masks of attention as cuDNN adds them to scores. All layers of a model are given one mask: it is converted once."""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from dispatch.torch.shared import on_gpu, quiet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["added", "kept_in_a_capture"]

# What is added to the score of a key that is not seen: far below any other, and finite also times log₂ e in f32.
NEVER = {torch.float16: -65504.0, torch.bfloat16: -1e30}


class _Last(threading.local):
    """The mask that this thread converted last, what it was then, and what it came to."""

    mask: Any = None  # a weak reference
    seen: Any = None
    found: tuple[Any, Any] | None = None
    capture: object = None  # stands for a capture, in which what was converted before it is not to be used


_last = _Last()


@contextmanager
def kept_in_a_capture() -> Iterator[None]:
    """Masks that are converted in here, where the current stream is captured, are known until its end."""
    before = _last.capture
    _last.capture, _last.mask = object(), None
    try:
        yield
    finally:
        _last.capture, _last.mask, _last.found = before, None, None


def added(mask: torch.Tensor, dtype: torch.dtype, queries: int, keys: int) -> tuple[Any, Any]:
    """What is added to scores in a dtype, (B or 1, H or 1, Sq, Skv), and which queries see no key.

    `mask` broadcasts to the scores: bools, or numbers in that dtype. What the thread's last call came to is given
    again where it was over the same mask, and torch counts no change of it.
    """
    seen = None if torch.compiler.is_compiling() else _seen(mask, dtype, queries, keys)
    if seen is not None and _last.mask is not None and _last.mask() is mask and _last.seen == seen:
        found: tuple[Any, Any] = _last.found  # type: ignore[assignment]
        return found
    found = _convert(mask, dtype, queries, keys)
    if seen is not None:
        _last.mask, _last.seen, _last.found = weakref.ref(mask, _forget), seen, found
    return found


def _forget(reference: Any) -> None:
    """A mask is gone, and what it came to may go, too; the thread that says so may be any."""
    if _last.mask is reference:
        _last.mask = _last.found = None


def _seen(mask: torch.Tensor, dtype: torch.dtype, queries: int, keys: int) -> Any:
    """What a conversion depends on besides the mask itself; None where it may not be known."""
    followed = torch.is_grad_enabled() and mask.requires_grad
    if followed or mask.is_inference() or not on_gpu(mask):
        return None
    if type(mask) is not torch.Tensor or not quiet():
        return None
    if _last.capture is None and _captured():
        return None
    return (
        _last.capture,
        _stream(mask),
        mask._version,
        mask.data_ptr(),
        mask.shape,
        mask.stride(),
        dtype,
        queries,
        keys,
    )


_captured: Callable[[], bool] = torch.cuda.is_current_stream_capturing


def _stream(mask: torch.Tensor) -> int:
    handle: int = torch._C._cuda_getCurrentRawStream(mask.get_device())
    return handle


def _convert(mask: Any, dtype: torch.dtype, queries: int, keys: int) -> tuple[Any, Any]:
    """cuDNN is given finite numbers alone: a row of -∞ would be NaN."""
    mask = mask.reshape(*(1,) * (4 - mask.ndim), *mask.shape)
    mask = mask.expand(*mask.shape[:2], queries, keys)
    never = NEVER[dtype]
    if mask.dtype == torch.bool:
        return torch.where(mask, mask.new_zeros((), dtype=dtype), never), ~mask.any(-1, keepdim=True)
    # What is lower than that has no weight either, but beside others as low it has its share, as in torch.
    return mask.clamp(min=never), (mask.detach() == -torch.inf).all(-1, keepdim=True)
