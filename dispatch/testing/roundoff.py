"""Unit roundoffs of dtypes and of sums, and what rounding on the way out allows."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import numpy as np

from dispatch.core.precision import FP8_MAX
from dispatch.keys import BF16, C64, C128, F8E4M3, F8E5M2, F16, F32, F64, Compute, Dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dispatch.device.device import Device
    from dispatch.device.layout import Array

__all__ = ["EXACT_STORES", "FP8_SUMS", "ROUNDOFF", "SUMS", "as_on_a_gpu", "by_numpy", "stored", "tf32_error"]

# fmt: off
# Unit roundoff 2^-p, for p significant bits, and half the smallest subnormal step.
ROUNDOFF = {
    F64: (2.0**-53, 0.0),    F32: (2.0**-24, 2.0**-150),  F16: (2.0**-11, 2.0**-25),  BF16: (2.0**-8, 2.0**-134),
    C128: (2.0**-53, 0.0),   C64: (2.0**-24, 2.0**-150),  F8E4M3: (2.0**-4, 2.0**-10),  F8E5M2: (2.0**-3, 2.0**-17),
}
# Of the sums, and of A and B before they are multiplied.
SUMS = {
    Compute.COMPUTE_16F: (2.0**-11, 0.0),            Compute.COMPUTE_32F: (2.0**-24, 0.0),
    Compute.COMPUTE_64F: (2.0**-53, 0.0),            Compute.COMPUTE_32I: (0.0, 0.0),
    Compute.COMPUTE_32F_FAST_16F: (2.0**-24, 2.0**-11),
    Compute.COMPUTE_32F_FAST_16BF: (2.0**-24, 2.0**-8),
    Compute.COMPUTE_32F_FAST_TF32: (2.0**-24, 2.0**-10),
    # Three numbers of bf16 are an f32 exactly, and products of two of them an f32: sums are of nine times as many, and
    # what these are off by chance grows like the root of that.
    Compute.COMPUTE_32F_EMULATED_16BFX9: (3 * 2.0**-24, 0.0),
    # Whole numbers of so many bits that the largest of a row keeps its 53, and more where others are far smaller: their
    # sums are exact, and what is cut off is at most a roundoff of both operands.
    Compute.COMPUTE_64F_EMULATED_FIXEDPOINT: (2.0**-53, 2.0**-53),
}
# fmt: on
FP8_SUMS = 2.0**-14  # a quarter of what fp8 tensor cores lose of a sum of magnitudes: an estimate, see tensor_cores.py


EXACT_STORES = (F64, F32, C64, C128)  # dtypes in which the reference's own rounding, or its parts', is to be allowed


_AS_ON_A_GPU = ContextVar("as_on_a_gpu", default=False)


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Checks made here allow what a GPU's libraries do, also on the host: for what a bound would let through there."""
    token = _AS_ON_A_GPU.set(True)
    try:
        yield
    finally:
        _AS_ON_A_GPU.reset(token)


def by_numpy(device: Device) -> bool:
    """Whether results are held to what NumPy computes, rather than to what a GPU's libraries may."""
    return device.is_host and not _AS_ON_A_GPU.get()


def tf32_error(size: Array, product: Array, spread: Array) -> Array:
    """What rounding both operands to TF32, or cutting them off, makes of sums of products.

    All products become smaller by half of TF32's step in the mean, twice, and by chance by up to as much again, or not
    at all: with the root of the sum of their squares as `spread`, three steps of it are six standard deviations.
    """
    step = SUMS[Compute.COMPUTE_32F_FAST_TF32][1]
    return np.asarray(np.minimum(2 * step * size, step * (np.abs(product) + 3 * spread)))


def stored(error: Array, values: Array, dtype: Dtype) -> Array:
    """The bound after rounding to a dtype: the result is what one of the values within the bound is rounded to."""
    if dtype in EXACT_STORES:
        w, tiny = ROUNDOFF[dtype]
        return np.asarray(error + w * (np.abs(values) + error) + tiny)
    top = FP8_MAX.get(dtype, np.inf)
    with np.errstate(over="ignore"):  # an infinity, which then is right
        ends = (np.clip(values + off, -top, top) for off in (-error, error))
        return np.asarray(np.maximum(*(np.abs(end.astype(dtype.numpy).astype(np.float64) - values) for end in ends)))
