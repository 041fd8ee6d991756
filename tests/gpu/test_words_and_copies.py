"""Copies of torch's and CuPy's tensors on a GPU, and calls by names and by torch's dtypes."""

from __future__ import annotations

import numpy as np
import pytest

import dispatch as dp
from dispatch.keys import BF16, F8E4M3

torch = pytest.importorskip("torch")


@pytest.fixture
def dev():
    return dp.device("cuda:0")


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32"])
def test_a_tensor_of_the_gpu_is_copied_in_torch_s_order(dev, dtype):
    with torch.cuda.stream(torch.cuda.Stream()):
        source = torch.zeros(1 << 22, device="cuda")
        for _ in range(50):
            source += 1
        source = source.to(getattr(torch, dtype)).requires_grad_(dtype == "float32")
        made = dev.array(source)
        with torch.no_grad():
            source.zero_()
    assert (made.numpy().astype(np.float32) == float(torch.tensor(50.0).to(getattr(torch, dtype)))).all()
    assert made.device is dev
    assert dev.array(torch.ones(4, device="cuda"), "bf16").dtype is BF16
    assert dp.device("host").array(torch.ones(4, device="cuda").bfloat16()).tolist() == [1.0] * 4
    assert dev.zeros(4, "f8e4m3").copy_from(torch.ones(4, device="cuda").to(torch.float8_e4m3fn)).dtype is F8E4M3


def test_cupy_s_arrays_are_copied(dev):
    cupy = pytest.importorskip("cupy")
    assert np.array_equal(dev.array(cupy.arange(6.0)).numpy(), np.arange(6.0))
    assert np.array_equal(dev.zeros(6, "f64").copy_from(cupy.arange(6.0)).numpy(), np.arange(6.0))


def test_a_product_by_names_is_that_by_members(dev):
    a, b, bias = dev.array(np.ones((32, 64)), "bf16"), dev.array(np.ones((64, 32)), "bf16"), dev.zeros(32, "bf16")
    found = [dp.matmul(a, b, bias=bias, epilogue=e, out_dtype=torch.bfloat16) for e in ("gelu_bias",) * 3]
    expected = dp.matmul(a, b, bias=bias, epilogue=dp.Epilogue.GELU_BIAS)
    assert all(np.array_equal(one.numpy(), expected.numpy()) for one in found)
