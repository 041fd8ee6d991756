"""Operands of torch, JAX, NumPy and other libraries as they are: every host row, what comes back, what is refused."""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import dispatch as dp
from dispatch.core.row import refusals
from dispatch.device.frameworks.framework import Adopted
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import HOST
from dispatch.row_check import cases_of

ROWS = [row for row in dp.TABLE if row.min_arch == HOST]
MOST_TRIED = 12  # cases of a row, for one that every library can be given
F8 = ml_dtypes.float8_e4m3fn
NARROW = ("f64", "f32", "f16", "i32", "i8")  # what all libraries have
LIBRARIES = ("torch", "numpy", "jax", "tvm_ffi")
KINDS = {"torch": "Tensor", "numpy": "ndarray", "jax": "ArrayImpl", "tvm_ffi": "Tensor"}


def library(name):
    if name == "jax":
        pytest.importorskip("jax").config.update("jax_enable_x64", True)
    return pytest.importorskip(name)


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
    for case in cases_of(row)[:MOST_TRIED]:
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


# -- what comes back --------------------------------------------------------------------------------------------------
@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def host():
    return dp.device("host")


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
    "quantized": (lambda t: t.quantize_per_tensor(t.randn(4, 4), 0.1, 0, t.qint8), "qint8", "x.to"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize_per_tensor")
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


# -- lifetimes --------------------------------------------------------------------------------------------------------
def test_nothing_is_kept(torch):
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    watched = [weakref.ref(a), weakref.ref(b)]
    y = dp.matmul(a, b)
    watched.append(weakref.ref(y))
    del a, b
    gc.collect()
    assert watched[0]() is None
    assert watched[1]() is None
    assert watched[2]() is y
    del y
    assert watched[2]() is None


def test_memory_outlives_what_it_was_given_for(torch):
    a = np.arange(16, dtype=np.float32).reshape(4, 4)
    y = dp.matmul(a, np.eye(4, dtype=np.float32))
    request = dp.MatmulRequest(torch.ones(4, 4), torch.eye(4))
    del a
    gc.collect()
    [np.full((4, 4), 7, np.float32) for _ in range(100)]
    assert np.array_equal(y, np.arange(16).reshape(4, 4))
    assert torch.equal(dp.run(request), torch.ones(4, 4))


def test_many_calls_leave_nothing_behind(torch):
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    for _ in range(50):
        dp.matmul(a, b)
    gc.collect()
    before = sum(type(one) in (Adopted, torch.Tensor) for one in gc.get_objects())
    for _ in range(1000):
        dp.matmul(a, b)
    gc.collect()
    assert sum(type(one) in (Adopted, torch.Tensor) for one in gc.get_objects()) <= before + 2


def test_from_many_threads(torch):
    begun = threading.Barrier(8)

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        begun.wait()
        for turn in range(60):
            n = 2 + (seed + turn) % 9
            a, b = (torch.randn(n, n, generator=generator) for _ in "ab")
            y = dp.matmul(a, b.numpy()) if turn % 2 else dp.matmul(a, b)
            assert torch.allclose(y, a @ b, atol=1e-4)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_what_is_no_array_is_refused_as_before():
    eye = np.eye(4, dtype=np.float32)
    for wrong in ([[1.0]], "a", object(), 3):
        with pytest.raises(BadRequest, match="dispatch Tensor"):
            dp.matmul(eye, wrong)


def test_no_library_is_imported_for_it():
    code = (
        "import sys, numpy as np, dispatch as dp\n"
        "dp.matmul(np.eye(3), np.eye(3))\n"
        "assert not {'torch', 'cupy', 'jax'} & {name.partition('.')[0] for name in sys.modules}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


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
