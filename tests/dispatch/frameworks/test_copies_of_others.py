"""`dev.array` and `copy_from` of torch's tensors: dtypes that NumPy does not get, and what autograd follows."""

from __future__ import annotations

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest
from dispatch.keys import Dtype

torch = pytest.importorskip("torch")


def host() -> dp.Device:
    """Asked for anew, for other tests close it."""
    return dp.device("host")


DTYPES = {"bf16": "bfloat16", "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "e8m0": "float8_e8m0fnu"}
DTYPES |= {"f32": "float32", "f16": "float16", "i8": "int8", "bool": "bool"}


def drawn(name):
    return torch.linspace(0.5, 4, 12).reshape(3, 4).to(getattr(torch, name))


@pytest.mark.parametrize(("ours", "theirs"), DTYPES.items(), ids=DTYPES)
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.T, lambda x: x[1:, ::2], lambda x: x[:0]], ids=range(4))
def test_a_tensor_is_copied_bit_by_bit_in_its_dtype(ours, theirs, view):
    source = view(drawn(theirs))
    made = host().array(source)
    assert made.dtype is Dtype.of(ours)
    assert made.shape == tuple(source.shape)
    bits = source.contiguous().view(torch.uint8).numpy()
    assert np.array_equal(made.numpy().view(np.uint8), bits)
    other = host().zeros(made.shape, ours)
    assert other.copy_from(source) is other
    assert np.array_equal(other.numpy().view(np.uint8), bits)
    assert other.copy_from_async(source).result() is other


def test_a_copy_is_one_and_may_have_another_dtype():
    source = drawn("bfloat16")
    made, wide = host().array(source), host().array(source, torch.float32)
    source.zero_()
    assert made.numpy().astype(np.float32).all()
    assert np.array_equal(wide.numpy(), made.numpy().astype(np.float32))
    assert host().zeros((3, 4), "f32").copy_from(drawn("float8_e5m2")).numpy().all()


def test_what_autograd_follows_is_copied_without_it():
    for source in (drawn("float32").requires_grad_(), torch.nn.Parameter(drawn("bfloat16")), drawn("float32") + 1):
        found = host().array(source)
        assert np.array_equal(found.numpy().astype(np.float32), source.detach().float().numpy())
        assert np.array_equal(host().zeros((3, 4), found.dtype).copy_from(source).numpy(), found.numpy())


def test_views_that_are_conjugated_or_negated_in_name_only_are_copied_as_they_read():
    source = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert host().array(source).tolist() == [1 - 2j, 3 + 1j]
    assert host().array(source.imag).tolist() == [-2.0, 1.0]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.zeros(2, device="meta"), "has no memory"),
        (lambda: torch.zeros(2).to_sparse(), r"x\.to_dense\(\)"),
        (lambda: torch.zeros(2, dtype=torch.int16), "int16"),
    ],
)
def test_what_cannot_be_copied_says_why(make, said):
    for ask in (host().array, host().zeros(2).copy_from):
        if said == "int16" and ask.__name__ != "array":
            continue  # the host converts it
        with pytest.raises(BadRequest, match=said):
            ask(make())


def test_a_gpu_takes_them_too(stand_in):
    from dispatch.device.cuda import CudaDevice

    stand_in(1)
    dev = CudaDevice(0, 1)
    made = dev.array(drawn("bfloat16"))
    assert made.dtype is Dtype.of("bf16")
    assert np.array_equal(made.numpy(), host().array(drawn("bfloat16")).numpy())
    assert np.array_equal(made.copy_from(drawn("float32")).numpy(), host().array(drawn("bfloat16")).numpy())
