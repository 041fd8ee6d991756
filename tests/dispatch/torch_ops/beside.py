"""What the tests of ops for PyTorch share: gradients of one random cotangent, and comparison."""

from __future__ import annotations

import pytest
import torch

__all__ = ["close", "first_of", "gradients", "mapped_to_f64"]


def gradients(y, given):
    """The gradients of a result by operands, for a cotangent that is the same for the same shape and dtype."""
    torch.manual_seed(1)
    return torch.autograd.grad(y, given, torch.randn(y.shape, dtype=torch.float32).to(y.dtype))


def close(ours, others, tolerance):
    """The same shapes, and values within the tolerance; dtypes may be wider in what is compared with."""
    assert len(ours) == len(others)
    for one, other in zip(ours, others, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one.to(other.dtype), other, rtol=tolerance, atol=tolerance)


def mapped_to_f64(given):
    """The operands in f64, of their own gradients."""
    return [t.detach().double().requires_grad_() for t in given]


def first_of(values):
    """Parameters of a test: the first at once, the others with what takes long."""
    first, *others = values
    return [first, *(pytest.param(value, marks=pytest.mark.exhaustive) for value in others)]
