"""Philox's numbers in NumPy: the reference, and the host's rows if cuRAND is not installed.

The formulas and their precision are those of cuRAND (`curand_uniform.h`, `curand_normal.h`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import exactly, numpy_call
from dispatch.keys import BF16, F16, F32, F64, U32
from dispatch.libraries.nvrtc.philox import words
from dispatch.ops.random.request import (
    RandomBitsRequest,
    RandomExponentialRequest,
    RandomLognormalRequest,
    RandomUniformRequest,
)

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.device.layout import Array
    from dispatch.keys import Dtype

__all__ = ["evaluate", "numpy_random", "reference", "units", "words_each"]

STEPS = {F32: 24, F16: 11, BF16: 8}  # random bits of a number in [0, 1)


def words_each(dtype: Dtype) -> int:
    """How many words of 32 bits an element takes."""
    return 2 if dtype.itemsize == 8 else 1


def evaluate(request: Any, _: np.dtype[Any] | None = None) -> Results:
    """The numbers of a request for Philox, computed like its row does: only `out`."""
    drawn = words(request.seed, request.offset, request.count, words_each(request.kind))
    with np.errstate(all="ignore"):
        return {"out": numbers(request, drawn).reshape(request.shape)}


def numbers(request: Any, drawn: Array) -> Any:
    """A request's numbers from its words, before rounding to a dtype of 16 bits."""
    kind = request.kind
    if isinstance(request, RandomBitsRequest):
        return drawn[:, 0] if kind is U32 else drawn[:, 0] | drawn[:, 1].astype(np.uint64) << np.uint64(32)
    work = np.float64 if kind is F64 else np.float32
    if isinstance(request, RandomUniformRequest):
        u = units(drawn, kind, request.interval)
        low, high = work(request.low), work(request.high)
        return u if (low, high) == (0, 1) else low + (high - low) * u
    if isinstance(request, RandomExponentialRequest):
        return -np.log(units(drawn, F64 if kind is F64 else F32, "(0,1]")) * work(request.scale)
    normal = normals(request, drawn) * work(request.std) + work(request.mean)
    return np.exp(normal) if isinstance(request, RandomLognormalRequest) else normal


def units(drawn: Array, kind: Dtype, interval: str) -> Any:
    """Uniform numbers from words: f32, or f64 from pairs of words."""
    if kind is F64:
        z = drawn[:, 0] ^ (drawn[:, 1].astype(np.uint64) << np.uint64(21))
        return z * 2.0**-53 + (2.0**-54 if interval == "(0,1]" else 0.0)
    if kind is F32 and interval == "(0,1]":
        return drawn[:, 0].astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    bits = STEPS[kind]
    steps = (drawn[:, 0] >> np.uint32(32 - bits)).astype(np.float32)
    return (steps + np.float32(interval == "(0,1]")) * np.float32(2.0**-bits)


def normals(request: Any, drawn: Array) -> Any:
    """Standard normal numbers, in pairs that begin at even elements."""
    before, after = request.offset % 2, (request.offset + len(drawn)) % 2
    if before or after:  # the other half of the pair at an end
        start, count = request.offset - before, len(drawn) + before + after
        drawn = words(request.seed, start, count, drawn.shape[1])
    pairs = drawn.reshape(-1, 2 * drawn.shape[1])
    normal = box_muller(pairs)
    return normal.reshape(-1)[before : normal.size - after]


def box_muller(pairs: Array) -> Array:
    """Two normal numbers from each row of two words (f32) or four words (f64)."""
    if pairs.shape[1] == 2:
        scale = np.float32(2.0**-32 * 2 * math.pi)
        u = units(pairs[:, :1], F32, "(0,1]")
        angle = pairs[:, 1].astype(np.float32) * scale + scale / np.float32(2)
    else:
        u = units(pairs[:, :2], F64, "(0,1]")
        angle = units(pairs[:, 2:], F64, "(0,1]") * (2 * math.pi)
    size = np.sqrt(-2 * np.log(u))
    return np.stack([np.sin(angle) * size, np.cos(angle) * size], 1)


reference = exactly(evaluate)
numpy_random = numpy_call(evaluate)
