"""Unit roundoffs of dtypes and of sums, and bounds after the result is rounded."""

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
# The unit roundoffs of the sums, and of A and B before the multiplication.
SUMS = {
    Compute.COMPUTE_16F: (2.0**-11, 0.0),            Compute.COMPUTE_32F: (2.0**-24, 0.0),
    Compute.COMPUTE_64F: (2.0**-53, 0.0),            Compute.COMPUTE_32I: (0.0, 0.0),
    Compute.COMPUTE_32F_FAST_16F: (2.0**-24, 2.0**-11),
    Compute.COMPUTE_32F_FAST_16BF: (2.0**-24, 2.0**-8),
    Compute.COMPUTE_32F_FAST_TF32: (2.0**-24, 2.0**-10),
    # Three bf16 numbers represent an f32 exactly, and a product of two of them fits an f32. Sums have nine times as
    # many terms, and their random error grows with the square root of that.
    Compute.COMPUTE_32F_EMULATED_16BFX9: (3 * 2.0**-24, 0.0),
    # Integers with enough bits that the largest element of a row keeps its 53, and more if others are far smaller:
    # their sums are exact, and the truncation is at most one roundoff of both operands.
    Compute.COMPUTE_64F_EMULATED_FIXEDPOINT: (2.0**-53, 2.0**-53),
}
# fmt: on
FP8_SUMS = 2.0**-14  # a quarter of the loss of fp8 tensor cores in a sum of magnitudes, estimated; see tensor_cores.py


EXACT_STORES = (F64, F32, C64, C128)  # dtypes for which the reference's own rounding counts, too


_AS_ON_A_GPU = ContextVar("as_on_a_gpu", default=False)


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Checks made in this block use the bounds for GPU libraries, also on the host: to test what those bounds miss."""
    token = _AS_ON_A_GPU.set(True)
    try:
        yield
    finally:
        _AS_ON_A_GPU.reset(token)


def by_numpy(device: Device) -> bool:
    """Whether results have NumPy's bounds, rather than the wider ones of a GPU's libraries."""
    return device.is_host and not _AS_ON_A_GPU.get()


def tf32_error(size: Array, product: Array, spread: Array) -> Array:
    """The error of sums of products if both operands are rounded or truncated to TF32.

    Truncating two operands reduces all products by half of TF32's step twice on average; by chance the reduction is
    between nothing and twice that. `spread` is the root of the sum of squares of the products; three steps of it are
    six standard deviations.
    """
    step = SUMS[Compute.COMPUTE_32F_FAST_TF32][1]
    return np.asarray(np.minimum(2 * step * size, step * (np.abs(product) + 3 * spread)))


def stored(error: Array, values: Array, dtype: Dtype) -> Array:
    """The bound after rounding to a dtype: the result is one of the values within the bound, rounded."""
    if dtype in EXACT_STORES:
        w, tiny = ROUNDOFF[dtype]
        return np.asarray(error + w * (np.abs(values) + error) + tiny)
    top = FP8_MAX.get(dtype, np.inf)
    with np.errstate(over="ignore"):  # to infinity, which is then a right result
        ends = (np.clip(values + off, -top, top) for off in (-error, error))
        return np.asarray(np.maximum(*(np.abs(end.astype(dtype.numpy).astype(np.float64) - values) for end in ends)))
