"""Tensors of torch and arrays of NumPy that are more, or other, than memory: what is refused, and by which name."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest

spec = importlib.util.spec_from_file_location("other_libraries", Path(__file__).with_name("other_libraries.py"))
libraries = importlib.util.module_from_spec(spec)
spec.loader.exec_module(libraries)
torch = libraries.torch


# -- torch's own say --------------------------------------------------------------------------------------------------
def test_autograd_finds_what_was_overwritten(torch):
    x = torch.randn(4, 4, requires_grad=True)
    saved = x * 1.0
    loss = (saved * saved).sum()
    with torch.no_grad():
        dp.matmul(torch.eye(4), torch.eye(4), out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_mode_and_parameters(torch):
    with torch.inference_mode():
        a = torch.randn(3, 3)
        assert torch.equal(dp.matmul(a, torch.eye(3), out=torch.empty(3, 3)), a)
    layer = torch.nn.Linear(3, 3)
    with torch.no_grad():
        y = dp.matmul(torch.eye(3), layer.weight)
    assert not y.requires_grad
    assert torch.equal(y, layer.weight.detach())


class Sub:
    """Makes a subclass of torch's tensor, which has functions of its own."""

    def __new__(cls, torch, *shape):
        kind = type("Named", (torch.Tensor,), {})
        return torch.randn(*shape).as_subclass(kind)


def fake(torch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(4, 4)


def nested(torch, layout):
    return torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(4, 4)], layout=layout)


REFUSED = {
    "requires grad": (lambda t: t.randn(4, 4, requires_grad=True), "requires grad", "no_grad"),
    "parameter": (lambda t: t.nn.Parameter(t.randn(4, 4)), "requires grad", "detach"),
    "conjugated": (lambda t: t.randn(4, 4, dtype=t.complex64).conj(), "conjugated", "resolve_conj"),
    "negated": (lambda t: t.randn(4, 4, dtype=t.complex64).conj().imag, "negated", "resolve_neg"),
    "sparse": (lambda t: t.randn(4, 4).to_sparse(), "sparse", "to_dense"),
    "csr": (lambda t: t.randn(4, 4).to_sparse_csr(), "sparse", "to_dense"),
    "meta": (lambda t: t.empty(4, 4, device="meta"), "no memory", ""),
    "fake": (fake, "FakeTensor", "torch.compile"),
    "subclass": (lambda t: Sub(t, 4, 4), "Named", "as_subclass"),
    "dtype": (lambda t: t.zeros(4, 4, dtype=t.int16), "int16", "x.to"),
    "nested": (lambda t: nested(t, t.strided), "a nested tensor of 2", "to_padded_tensor"),
    "jagged": (lambda t: nested(t, t.jagged), "a nested tensor of 2", "x.unbind()"),
    "quantized": (lambda t: t.quantize_per_tensor(t.randn(4, 4), 0.1, 0, t.qint8), "qint8", "x.to"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("operand", ["a", "b", "out"])
def test_a_tensor_that_is_more_than_memory_is_refused_by_name(torch, what, operand):
    make, said, hint = REFUSED[what]
    operands = {"a": torch.randn(4, 4), "b": torch.randn(4, 4), operand: make(torch)}
    for call in (dp.matmul, dp.MatmulRequest):
        with pytest.raises(BadRequest) as found:
            call(**operands)
        assert found.value.operand == operand
        assert said in found.value.given
        assert hint in found.value.hint


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_a_nested_tensor_is_refused_behind_remembered_calls_too(torch):
    for _ in range(3):
        dp.softmax(torch.randn(2, 4))
    for layout in (torch.strided, torch.jagged):
        with pytest.raises(BadRequest, match=r"^x: got a nested tensor of 2; expected a tensor of one shape"):
            dp.softmax(nested(torch, layout))
        with pytest.raises(BadRequest, match=r"^source: got a nested tensor"):
            dp.device("host").array(nested(torch, layout))
        padded = torch.nested.to_padded_tensor(nested(torch, layout), 0.0)
        assert dp.softmax(padded).shape == (2, 4, 4)


def test_transformations_of_torch_are_refused(torch):
    eye = torch.eye(4)
    with pytest.raises(BadRequest, match="transformation"):
        torch.func.vmap(lambda x: dp.matmul(x, eye))(torch.randn(2, 4, 4))
    with pytest.raises(BadRequest):
        torch.func.grad(lambda x: dp.matmul(x, eye).sum())(torch.randn(4, 4))


def test_distributed_tensors_are_refused(torch):
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        whole = distribute_tensor(torch.randn(4, 4), init_device_mesh("cpu", (1,)), [Replicate()])
        with pytest.raises(BadRequest, match="to_local") as found:
            dp.matmul(torch.eye(4), whole)
        assert found.value.operand == "b"
        assert torch.equal(dp.matmul(torch.eye(4), whole.to_local()), whole.to_local())
    finally:
        distributed.destroy_process_group()


# -- NumPy's and JAX's ------------------------------------------------------------------------------------------------
def test_arrays_of_numpy_that_have_no_place_here():
    eye = np.eye(4, dtype=np.float32)
    frozen = eye.copy()
    frozen.flags.writeable = False
    assert np.array_equal(dp.matmul(frozen, eye), eye)
    with pytest.raises(BadRequest, match="read-only"):
        dp.matmul(eye, eye, out=frozen)
    broken = np.frombuffer(bytes(4 * 16 + 1), np.uint8)[1:].view(np.float32).reshape(4, 4)
    refused = {
        "masked": np.ma.masked_array(eye, eye > 0),
        "matrix": eye.view(np.matrix),
        "big-endian": eye.astype(">f4"),
        "objects": eye.astype(object),
        "records": np.zeros((4, 4), "f4,i2")["f0"],
        "half": np.zeros((4, 4), np.float128),
    }
    for array in refused.values():
        with pytest.raises(BadRequest) as found:
            dp.matmul(eye, array)
        assert found.value.operand == "b"
    assert np.array_equal(dp.matmul(broken, eye), broken)


def test_what_is_no_array_is_refused_as_before():
    eye = np.eye(4, dtype=np.float32)
    for wrong in ([[1.0]], "a", object(), 3):
        with pytest.raises(BadRequest, match="dispatch Tensor"):
            dp.matmul(eye, wrong)
