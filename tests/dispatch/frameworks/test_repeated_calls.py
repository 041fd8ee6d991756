"""Repeated calls over torch's tensors make no request, and end as a request on a fresh executor would.

No GPU is needed to see that: the device of tests/dispatch/call_cache_cases.py has host memory, so that torch's tensors
on the CPU can be its operands. Calls of all classes are drawn at random, good ones and bad ones.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import threading
import weakref
from functools import partial
from pathlib import Path

import pytest

import dispatch as dp
from dispatch.core import framework_call_cache
from dispatch.device.frameworks import frameworks
from dispatch.device.frameworks.framework import ForeignStorage
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, Closed, StaleTensor
from dispatch.ops import matmul

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from dispatch.device.frameworks import torch as torch_s  # noqa: E402  # it imports torch

spec = importlib.util.spec_from_file_location("call_cache_cases", Path(__file__).parents[1] / "call_cache_cases.py")
calls = importlib.util.module_from_spec(spec)
spec.loader.exec_module(calls)

ROUNDS = 1500
HOST = dp.device("host")


class NotingExecutor(calls.NotingExecutor):
    """Notes what it is told to enqueue, by whichever way."""

    def enqueue(self, plan, arguments, reads, writes):
        self.runs.append((plan, arguments))

    def enqueue_at(self, plan, arguments):
        self.runs.append((plan, arguments))


class Gpu(calls.Gpu):
    """Host memory under the name of a GPU."""


Gpu.open_executor = NotingExecutor


class TorchThere(torch_s.Torch):
    """PyTorch, whose tensors on the CPU are on that GPU."""

    def __init__(self, device):
        self.device, self.handle = device, device.executor().stream.c_handle.value
        self.code = torch_s.Torch.code._replace(
            ordinal=f"(-1 if {{x}}.is_meta else {device.ordinal})", handle=f"{self.handle}"
        )

    def tensor(self, operand, given):
        host = super().tensor(operand, given)
        home = self.device
        found = ForeignStorage(self, home, home.executor().stream, given, host.ptr)
        return found.tensor(host.dtype, host.shape, host.layout.strides)

    def stream(self, device):
        return device.executor().stream if device is self.device else super().stream(device)

    def is_on_gpu(self, given):
        return True

    def lasting(self, device):
        return self.handle

    def maker(self, device, shape, strides, dtype):
        """Torch's memory on the CPU is aligned to 64 bytes, on a GPU to 512."""
        make = super().maker(HOST, shape, strides, dtype)
        return None if make is None else partial(aligned, make)


def aligned(make):
    made = make()
    if not made.numel():
        return made
    memory = torch.empty(made.untyped_storage().nbytes() + 256, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 256 :][: made.untyped_storage().nbytes()]
    return memory.view(made.dtype).as_strided(made.shape, made.stride())


@pytest.fixture
def dev(monkeypatch):
    monkeypatch.setattr(calls.RnnRequest, "bytes_of", lambda *_: 4096)
    device = Gpu(9)
    there = TorchThere(device)
    for kind in torch_s.TYPES:
        monkeypatch.setitem(frameworks._known, kind, there)
    for ways in every_ways():
        monkeypatch.setattr(ways, "lookups", {})
        ways.clear()
    yield device
    device.close()
    for ways in every_ways():
        ways.clear()


def every_ways():
    functions = [getattr(dp, name) for name in dir(dp)]
    found = [getattr(function, "__globals__", {}).get("_framework_calls") for function in functions]
    return [ways for ways in (*found, matmul.FRAMEWORK_CALLS) if ways is not None]


def theirs(tensor):
    """A tensor of torch's in the same memory; None where it has no such."""
    layout = tensor.layout
    dtype = torch_s.THEIRS.get(layout.dtype)
    if dtype is None or layout.dtype.bits < 8 or any(stride < 0 for stride in layout.strides) or layout.readonly:
        return None
    if not layout.size:
        return torch.empty_strided(layout.shape, layout.strides, dtype=dtype)
    memory = (ctypes.c_uint8 * layout.high).from_address(tensor.ptr)
    memory.kept = tensor
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).as_strided(layout.shape, layout.strides)


def converted(fields):
    """The same fields with torch's tensors; None where one has none. What is one tensor stays one."""
    found, known = {}, {}
    for name, value in fields.items():
        if isinstance(value, Tensor):
            if id(value) not in known:
                known[id(value)] = theirs(value)
            found[name] = known[id(value)]
            if found[name] is None:
                return None
        else:
            found[name] = value
    return found


def shown(value, given):
    if isinstance(value, (tuple, list)):
        return [shown(one, given) for one in value]
    if isinstance(value, torch.Tensor):
        where = given.get(value.data_ptr(), "made") if value.numel() else "nowhere"
        return where, value.dtype, value.shape, value.stride()
    return repr(value)


def outcome(executor, action, given):
    """What an action gives, or raises, and what it has the executor enqueue; addresses by the operand that is there."""
    executor.runs.clear()
    try:
        result = action()
    except Exception as error:  # noqa: BLE001  # it is compared
        return (type(error), str(error)), []
    results = result if isinstance(result, (tuple, list)) else [result]
    places = {one.data_ptr(): f"result {n}" for n, one in enumerate(results) if isinstance(one, torch.Tensor)}
    places |= given
    runs = [(plan.key, [places.get(word, repr(word)) for word in words]) for plan, words in executor.runs]
    return shown(result, given), runs


def both(dev, kind, fields):
    """The outcomes of the request function, and of a request on an executor that remembers nothing."""
    given = {one.data_ptr(): name for name, one in fields.items() if isinstance(one, torch.Tensor) and one.numel()}
    call = outcome(dev.executor(), lambda: calls.function_of(kind)(**fields), given)
    fresh = NotingExecutor(dev.executor().stream)
    return call, outcome(fresh, lambda: fresh.run(kind(**fields)), given)


def judge(dev, rng, rounds=ROUNDS):
    return calls.judge(dev, rng, rounds, both, converted)


def test_each_call_is_what_its_request_is_on_a_fresh_executor(dev, rng):
    differences, quick, drawn = judge(dev, rng)
    assert not differences, "\n".join(map(str, differences[0]))
    by_library = ("compress_2_4",)  # how many bytes there are cuSPARSELt alone knows, which is not here
    assert all(quick[kind.op] > 10 for kind in drawn.kinds if kind.op not in by_library), quick


reordered = partial(calls.reordered, module=framework_call_cache)
replaced = partial(calls.replaced, module=framework_call_cache)
swapped = calls.swapped


MUTATIONS = {
    "addresses in another order": reordered(lambda form: form._replace(addresses=swapped(form.addresses))),
    "an address stays": reordered(lambda form: form._replace(addresses=(None, *form.addresses[1:]))),
    "results in another order": reordered(lambda form: form._replace(results=swapped(form.results))),
    "no pair is looked at": reordered(lambda form: form._replace(pairs=())),
    "all may be one view": reordered(lambda form: form._replace(pairs=tuple((*pair[:2], True) for pair in form.pairs))),
    "no two overlap": replaced("overlap_bounds", lambda *_: (0, 0, None)),
    "equal choices are the same": replaced("is_same_choice", lambda *_: True),
    "no alignment is looked at": replaced("ALIGNED", 0),
}


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_wrong_way_is_found(dev, rng, mutate, monkeypatch):
    clear = framework_call_cache._maker.cache_clear
    clear()
    mutate(monkeypatch)
    try:
        differences, _, _ = judge(dev, rng, 5 * ROUNDS)
    finally:
        clear()
    assert differences


# -- what only torch knows of a tensor --------------------------------------------------------------------------------
def randn(*shape):
    """As a GPU's memory is aligned, or each turn would be another layout."""
    return aligned(lambda: torch.randn(*shape)).copy_(torch.randn(*shape))


class Subclass(torch.Tensor):
    pass


def softmax(x, **more):
    return dp.softmax(x, **more)


@pytest.mark.usefixtures("dev")
def test_a_repeated_call_makes_no_request(made):
    for _ in range(5):
        softmax(randn(8, 16))
        dp.matmul(randn(8, 16), randn(4, 16).t(), bias=randn(4), epilogue=dp.Epilogue.GELU_BIAS)
        dp.matmul(a=randn(8, 16), b=randn(16, 4), out=randn(8, 4), alpha=2.0)
    assert made == {"softmax": 1, "matmul": 2}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.requires_grad_(), "requires grad"),
        (lambda x: torch.complex(x, x).conj().imag, "negated"),
        (lambda x: x.as_subclass(Subclass), "Subclass"),
        (lambda x: x.to_sparse(), "sparse"),
        (lambda x: x.to("meta"), "meta"),
        (lambda x: x.double(), None),
        (lambda x: x[:, :8], None),
        (lambda x: torch.cat([x, x])[1:9], None),
        (lambda x: x.detach(), None),
        (torch.nn.Parameter, "requires grad"),
        (lambda x: torch.nn.Parameter(x, requires_grad=False), None),
    ],
)
@pytest.mark.usefixtures("dev")
def test_what_a_tensor_is_besides_its_layout_is_asked_each_time(change, words):
    softmax(randn(8, 16))
    softmax(randn(8, 16))
    given = change(randn(8, 16))
    if words is None:
        assert softmax(given).shape == given.shape
    else:
        with pytest.raises(BadRequest, match=words):
            softmax(given)
        with torch.no_grad():
            if given.requires_grad:
                assert softmax(given).shape == given.shape


@pytest.mark.usefixtures("dev")
def test_in_place_is_one_view_and_no_other():
    for _ in range(3):
        x, far = randn(8, 8), randn(8, 8)
        assert softmax(x, out=x) is x
        assert softmax(x, out=far.t()).stride() == (1, 8)
        with pytest.raises(BadRequest, match="overlaps"):
            softmax(x, out=x.t())


@pytest.mark.usefixtures("dev")
def test_the_version_of_what_is_written_counts_on():
    out, x = randn(8, 16), randn(8, 16)
    for turn in range(out._version + 1, 5):
        assert softmax(x, out=out) is out
        assert out._version == turn


def test_nothing_that_was_given_is_kept(dev):
    x = randn(8, 16)
    softmax(x)
    softmax(x)
    gone = weakref.ref(x)
    del x
    dev.executor().runs.clear()
    gc.collect()
    assert gone() is None


def test_each_thread_has_its_own(dev, made):
    softmax(randn(8, 16))
    runs = []

    def other():
        softmax(randn(8, 16))
        runs.extend(dev.executor().runs)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert made["softmax"] == 2
    assert len(runs) == len(dev.executor().runs) == 1


def test_a_device_that_is_closed_says_so(dev):
    softmax(randn(8, 16))
    softmax(randn(8, 16))
    dev.close()
    with pytest.raises((Closed, StaleTensor)):
        softmax(randn(8, 16))


def test_the_table_is_asked_again_once_it_has_changed(dev, made):
    softmax(randn(8, 16))
    dev.forget_plans()
    softmax(randn(8, 16))
    assert made["softmax"] == 2


def test_a_plan_is_not_kept_where_the_table_changed_meanwhile(dev, made, monkeypatch):
    fast_call = framework_call_cache._fast_call

    def changes(*given):
        dev.forget_plans()
        return fast_call(*given)

    monkeypatch.setattr(framework_call_cache, "_fast_call", changes)
    for turn in range(1, 4):
        softmax(randn(8, 16))
        assert not dev.executor().calls
        assert made["softmax"] == turn


@pytest.mark.usefixtures("dev")
def test_memory_that_was_let_go_is_refused_after_good_calls():
    """As FSDP has it between two uses of a parameter: the tensor is as before, and nothing lies behind it."""
    for _ in range(2):
        softmax(randn(8, 16))
        dp.matmul(randn(8, 16), randn(16, 4))
    gone = torch.empty(8, 16)
    gone.untyped_storage().resize_(0)
    for given in (gone, torch._efficientzerotensor(8, 16)):
        assert given.data_ptr() == 0
        for call in (softmax, lambda x: dp.matmul(x, randn(16, 4)), lambda x: softmax(randn(8, 16), out=x)):
            with pytest.raises(BadRequest, match="was freed or not yet allocated"):
                call(given)
    assert softmax(torch.empty(0, 16)).shape == (0, 16)


def test_operands_of_several_libraries_make_a_request(dev, made):
    x = randn(8, 16)
    out = dev.empty((8, 16), "f32")
    for _ in range(2):
        softmax(x)
        softmax(x, out=out)
    assert made["softmax"] == 3
