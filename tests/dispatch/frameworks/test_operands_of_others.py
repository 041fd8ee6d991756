"""Operands of torch, JAX, NumPy and other libraries as they are: every host row, and what comes back."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import dispatch as dp
from dispatch.core.row import refusals
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import HOST
from dispatch.row_check import cases_of

spec = importlib.util.spec_from_file_location("other_libraries", Path(__file__).with_name("other_libraries.py"))
libraries = importlib.util.module_from_spec(spec)
spec.loader.exec_module(libraries)
library, torch, host = libraries.library, libraries.torch, libraries.host

ROWS = [row for row in dp.TABLE if row.min_arch == HOST]
MAX_TRIED = 12  # cases of a row, for one that every library can be given
F8 = ml_dtypes.float8_e4m3fn
NARROW = ("f64", "f32", "f16", "i32", "i8")  # what all libraries have
LIBRARIES = ("torch", "numpy", "jax", "tvm_ffi")
KINDS = {"torch": "Tensor", "numpy": "ndarray", "jax": "ArrayImpl", "tvm_ffi": "Tensor"}


def has(name, dtype):
    return dtype.name in NARROW if name == "tvm_ffi" else dtype.bits >= 8


def given(name, tensor):
    """The elements of a tensor in memory of a library, at the same strides; itself where the library has no such."""
    if not has(name, tensor.dtype):
        return tensor
    array = np.asarray(tensor)
    if name == "torch":
        theirs = library("torch").from_dlpack(tensor)
        return library("torch").empty_strided(theirs.shape, theirs.stride(), dtype=theirs.dtype).copy_(theirs)
    if name == "numpy":
        layout = tensor.layout
        memory = np.zeros(layout.high - layout.low, np.uint8)
        copy = np.ndarray(array.shape, array.dtype, memory, -layout.low, array.strides)
        copy[...] = array
        return copy
    if name == "jax":
        return of_jax(tensor, array)
    if not tensor.layout.is_contiguous or not array.size:
        return tensor
    return library("tvm_ffi").from_dlpack(array.copy())


def of_jax(tensor, array):
    """JAX's arrays have their axes in any order in memory, and no gaps."""
    jax = library("jax")
    order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
    if not array.size or not tensor.transpose(order).layout.is_contiguous:
        return tensor
    from jax.experimental.layout import Format, Layout

    place = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    return jax.device_put(jax.numpy.asarray(array), Format(Layout(tuple(order)), place))


def as_numpy(result):
    """The bits of a result, whatever library it is of."""
    if isinstance(result, (tuple, list)):
        return [as_numpy(one) for one in result]
    if isinstance(result, np.ndarray):
        return result
    return dp.from_dlpack(result).numpy() if not isinstance(result, dp.Tensor) else result.numpy()


def same(one, other):
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


def numbers_of(value):
    return [value] if not isinstance(value, (tuple, list)) else list(value)


def open_request(request):
    """The request without the outputs that it was given; None where it needs them."""
    outs = {n: None for n, _, written in request.tensors() if written and getattr(request, n, None) is not None}
    try:
        return request.replace(**outs)
    except BadRequest:
        return None  # an output that is an input, too


def runs(row, host, rng):
    """A request of the row with operands that any library may have, and its result; None where no case has such."""
    for case in cases_of(row)[:MAX_TRIED]:
        request = case.request(host, rng)
        if refusals(row, request, request.signature()) and getattr(request, "library", "") is None:
            request = replace(request, library=row.stands_for or row.library)  # of one that is asked only by its name
        if refusals(row, request, request.signature()) or (request := open_request(request)) is None:
            continue
        try:
            return request, as_numpy(dp.run(request))
        except NoRow:
            continue
    return None


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_gives_the_same_bits(row, rng):
    """With operands of each library that is installed, the results being of that library."""
    found = runs(row, dp.device("host"), rng)
    if found is None:
        pytest.skip("no case of it leaves its outputs open")
    request, expected = found
    for name in LIBRARIES:
        if importlib.util.find_spec(name) is None:
            continue
        library(name)
        plain = {
            one: tensor for one, tensor, _ in request.tensors() if isinstance(getattr(request, one, None), dp.Tensor)
        }
        other = {one: given(name, tensor) for one, tensor in plain.items()}
        result = dp.run(request.replace(**other))
        written = (
            slice(int(request.ends.numpy()[-1])) if hasattr(request, "ends") else ...
        )  # no row behind the last end
        if isinstance(expected, list):
            assert same(as_numpy(result), expected), name
        else:
            assert same(as_numpy(result)[written], expected[written]), name
        if any(other[one] is not tensor for one, tensor in plain.items()):
            for one in numbers_of(result):
                if isinstance(one, dp.Tensor):
                    assert not has(name, one.dtype)
                else:
                    assert type(one).__name__ == KINDS[name] or not has(name, dp.from_dlpack(one).dtype)


def test_outputs_that_were_given_come_back_themselves(torch, host):
    a, b, out = torch.randn(5, 7), torch.randn(7, 3), torch.full((5, 3), torch.nan)
    assert dp.matmul(a, b, out=out) is out
    assert torch.allclose(out, a @ b, atol=1e-5)
    first = np.full((5, 3), np.nan, np.float32)
    assert dp.matmul(a, b, out=first) is first
    assert np.allclose(first, out)
    ours = host.empty((5, 3))
    assert dp.matmul(a, b, out=ours) is ours
    assert np.allclose(ours.numpy(), out)


def test_the_first_operand_of_another_library_says_what_comes_back(torch, host):
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    ours = host.array(a.numpy())
    for first, second, kind in (
        (a, b.numpy(), torch.Tensor),
        (a.numpy(), b, np.ndarray),
        (ours, b, torch.Tensor),
        (ours, b.numpy(), np.ndarray),
        (ours, host.array(b.numpy()), dp.Tensor),
        (a, host.array(b.numpy()), torch.Tensor),
    ):
        result = dp.matmul(first, second)
        assert type(result) is kind
        assert np.allclose(np.asarray(result), a @ b, atol=1e-5)


def test_several_results_and_strides(torch):
    a, b = torch.randn(5, 7).bfloat16(), torch.randn(7, 3).bfloat16()
    out, aux = dp.matmul(a, b, epilogue=dp.Epilogue.GELU_AUX)
    assert out.dtype is aux.dtype is torch.bfloat16
    assert torch.allclose(aux.float(), a.float() @ b.float(), rtol=2e-2, atol=2e-2)
    x = torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last)
    y = dp.conv_fwd(x, torch.randn(3, 4, 3, 3))
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_views_of_larger_memory(torch):
    memory = torch.randn(40, 40)
    a, b = memory[3:9, 5:15], memory[30:37, 1:11].t()
    out = memory[20:26, 8:15]
    before = memory.clone()
    dp.matmul(a, b, out=out)
    right = a.double() @ b.double()
    assert torch.allclose(out.double(), right, atol=1e-4)
    memory[20:26, 8:15] = before[20:26, 8:15]
    assert torch.equal(memory, before)


def test_operands_in_trees_scales_lists_and_numbers(torch):
    evt = dp.evt
    a, b, bias = torch.randn(16, 32).bfloat16(), torch.randn(32, 16).bfloat16(), torch.randn(16).bfloat16()
    tree = evt.relu(evt.accumulator() + evt.row("bias"))
    y = dp.matmul(a, b, epilogue=tree, operands={"bias": bias})
    assert torch.allclose(y.float(), torch.relu(a.float() @ b.float() + bias.float()), rtol=2e-2, atol=0.1)
    low, scale = a.to(torch.float8_e4m3fn), torch.tensor([0.5])
    y = dp.matmul(low, b.t().contiguous().to(torch.float8_e4m3fn).t(), scales=dp.Scales(a=scale))
    right = low.float() * 0.5 @ b.to(torch.float8_e4m3fn).float()
    assert y.dtype is torch.bfloat16
    assert torch.allclose(y.float(), right, rtol=2e-2, atol=0.1)
    alpha = torch.tensor([2.0])
    assert torch.allclose(dp.matmul(a.float(), b.float(), alpha=alpha), 2 * a.float() @ b.float(), rtol=1e-4, atol=1e-4)


def test_arrays_of_jax(rng):
    jax = library("jax")
    a, b = (jax.numpy.asarray(rng.standard_normal((6, 6)), "float32") for _ in "ab")
    y = dp.matmul(a, b)
    assert isinstance(y, jax.Array)
    assert np.allclose(y, np.asarray(a, np.float64) @ np.asarray(b), atol=1e-5)
    with pytest.raises(BadRequest, match="read-only"):
        dp.matmul(a, b, out=a + 0)
    with pytest.raises(BadRequest, match="pure_callback"):
        jax.jit(lambda x: dp.matmul(x, b))(a)


# -- requests, bound calls, supervisors -------------------------------------------------------------------------------
def test_requests_and_bound_calls(torch):
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    request = dp.MatmulRequest(a, b)
    assert type(dp.run(request)) is torch.Tensor
    assert "host" in repr(dp.explain(request))
    call = dp.prepare(request)
    y = call()
    assert torch.allclose(y, a @ b, atol=1e-5)
    a.fill_(2.0)
    assert call() is y
    assert torch.allclose(y, a @ b, atol=1e-5)
    other = torch.randn(4, 4)
    assert torch.allclose(call(a=other), other @ b, atol=1e-5)
    call.refit(b=torch.eye(4))
    assert torch.equal(b, torch.eye(4))
    assert torch.allclose(call(), a, atol=1e-5)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_supervisors(torch, isolation):
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    with dp.Supervisor("host", streams=2, isolation=isolation) as sup:
        if isolation == "process":
            with pytest.raises(BadRequest, match="shared memory"):
                sup.submit(dp.MatmulRequest(a, b)).result()
            return
        futures = sup.submit_many([dp.MatmulRequest(a, b) for _ in range(8)])
        results = [future.result() for future in futures]
        assert all(type(one) is torch.Tensor and torch.allclose(one, a @ b, atol=1e-5) for one in results)
        assert len({one.data_ptr() for one in results}) == len(results)


# -- without elements -------------------------------------------------------------------------------------------------
CALLS = {
    "softmax": dp.softmax,
    "activation": lambda x: dp.activation(x, mode="tanh"),
    "matmul": lambda x: dp.matmul(x, np.ones((3, 2), np.float32)),
    "fp8": lambda x: dp.matmul(np.repeat(x, 16, 1).astype(F8), np.ones((32, 48), F8).T),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("empty", ["a mask", "made", "a slice"])
def test_an_array_without_elements_is_as_any_other(call, empty):
    """NumPy tells strides of 0 of some, and a row may ask for dense ones."""
    x = np.ones((4, 3), np.float32)
    x = {"a mask": x[np.zeros(4, bool)], "made": np.empty((0, 3), np.float32), "a slice": x[:0]}[empty]
    for _ in range(3):
        found = CALLS[call](x)
        assert found.shape == (0, {"matmul": 2, "fp8": 32}.get(call, 3))


def test_a_bound_call_over_numpys_arrays_gives_an_array_that_it_writes_again(rng):
    a, b = rng.standard_normal((4, 3)), rng.standard_normal((3, 5))
    call = dp.prepare(dp.MatmulRequest(a, b))
    first = call()
    assert type(first) is np.ndarray
    np.testing.assert_allclose(first, a @ b)
    a *= 2
    assert call() is first
    np.testing.assert_allclose(first, a @ b)
    other = rng.standard_normal((4, 3))
    assert call(a=other) is first
    np.testing.assert_allclose(first, other @ b)
