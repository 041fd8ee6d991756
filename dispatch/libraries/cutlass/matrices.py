"""Operands for the test cases of products: random matrices, and poisoned memory for results, as kernels need them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dispatch.keys import F32
from dispatch.testing.memory import GuardedBuffer, poison

if TYPE_CHECKING:
    from dispatch.device.device import Device
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = ["pitch_of", "poisoned_matrix", "poisoned_vector", "random_matrix"]

GUARD = 4  # elements of f32 around a reduction: 16 bytes


def random_matrix(
    device: Device, rng: np.random.Generator, shape: tuple[int, ...], dtype: Dtype, order: str, step: int = 16
) -> Tensor:
    """A tensor of random numbers whose lines start at multiples of `step` bytes, with poison after each of them."""
    values = rng.integers(-8, 9, shape) if dtype.numpy.kind == "i" else rng.standard_normal(shape)
    if len(shape) < 2:
        return device.array(values, dtype)
    *batch, rows, columns = shape
    lines, length = (rows, columns) if order == "r" else (columns, rows)
    memory = device.array(poison(dtype, (*batch, lines, pitch_of(length, dtype, step))))
    view = memory[..., :length]
    matrix = view if order == "r" else view.mT
    matrix.copy_from(values.astype(dtype.numpy))
    return matrix


def poisoned_matrix(device: Device, shape: tuple[int, ...], dtype: Dtype, order: str, step: int = 16) -> GuardedBuffer:
    """Memory for a result, with the layout of `random_matrix`, with poison in it, after its lines and around it."""
    lines, length = shape[-2:] if order == "r" else shape[:-3:-1]
    guard = 16 * 8 // dtype.bits  # elements, so that every line begins at a multiple of 16 bytes, or of `step`
    pitch = pitch_of(length, dtype, step)
    before = poison(dtype, (*shape[:-2], lines + 2, pitch + (guard if step >= 16 else 0)))
    inside = (..., slice(1, lines + 1), slice(0, length))
    memory = device.array(before)
    view = memory[inside]
    return GuardedBuffer(view if order == "r" else view.mT, memory, before, inside)


def poisoned_vector(device: Device, shape: tuple[int, ...]) -> GuardedBuffer:
    """Memory for a reduction, dense, with poison in it and around it."""
    size = int(np.prod(shape, dtype=np.int64))
    before = poison(F32, (size + 2 * GUARD,))
    inside = (slice(GUARD, GUARD + size),)
    memory = device.array(before)
    return GuardedBuffer(memory[inside].reshape(shape), memory, before, inside)


def pitch_of(length: int, dtype: Dtype, step: int) -> int:
    """The elements from line to line: a multiple of `step` bytes, but of 16 bytes only if `step` is."""
    elements = max(step * 8 // dtype.bits, 1)
    pitch = -(-length // elements) * elements
    return pitch + elements * (step < 16 and pitch * dtype.bits % 128 == 0)
