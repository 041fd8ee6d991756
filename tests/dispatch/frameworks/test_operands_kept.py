"""Operands of other libraries: nothing of them is kept, memory outlives what it was given for, among threads too."""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.device.frameworks.framework import ForeignStorage
from dispatch.device.frameworks.numpy import FRAMEWORK as numpy_framework

spec = importlib.util.spec_from_file_location("other_libraries", Path(__file__).with_name("other_libraries.py"))
libraries = importlib.util.module_from_spec(spec)
spec.loader.exec_module(libraries)
torch = libraries.torch


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


OTHER_MEMORY = {
    "x.data = y": lambda torch, x: setattr(x, "data", torch.zeros(1)),
    "x.set_": lambda torch, x: x.set_(torch.zeros(1)),
    "module.to": lambda torch, x: torch.nn.ParameterList([x]).double(),
}


@pytest.mark.parametrize("way", OTHER_MEMORY)
def test_memory_outlives_a_tensor_that_is_given_other_memory(torch, way):
    from torch.multiprocessing.reductions import StorageWeakRef

    weight = torch.nn.Parameter(torch.rand(64, 64), requires_grad=False)
    before, address, memory = weight.clone(), weight.data_ptr(), StorageWeakRef(weight.untyped_storage())
    request = dp.MatmulRequest(torch.eye(64), weight)
    call = dp.prepare(request)
    OTHER_MEMORY[way](torch, weight)
    assert weight.data_ptr() != address
    assert not memory.expired()
    assert torch.equal(call(), before)
    assert torch.equal(dp.run(request), before)
    del call, request
    gc.collect()
    assert memory.expired()


@pytest.mark.parametrize("way", OTHER_MEMORY)
def test_memory_outlives_a_tensor_of_dlpack_that_is_given_other_memory(torch, way):
    from torch.multiprocessing.reductions import StorageWeakRef

    x = torch.nn.Parameter(torch.rand(64, 64), requires_grad=False)
    before, memory = x.numpy().copy(), StorageWeakRef(x.untyped_storage())
    tensor = dp.from_dlpack(x)
    OTHER_MEMORY[way](torch, x)
    assert not memory.expired()
    assert np.array_equal(tensor.numpy(), before)
    del tensor
    gc.collect()
    assert memory.expired()


def test_the_memory_of_a_result_outlives_other_memory(torch):
    from torch.multiprocessing.reductions import StorageWeakRef

    call = dp.prepare(dp.MatmulRequest(torch.eye(64), torch.ones(64, 64)))
    y = call()
    memory = StorageWeakRef(y.untyped_storage())
    y.data = torch.zeros(64, 64)
    assert not memory.expired()
    with pytest.raises(dp.errors.StaleTensor, match=r"^out: "):
        call()


def test_many_calls_leave_nothing_behind(torch):
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    for _ in range(50):
        dp.matmul(a, b)
    gc.collect()
    before = sum(type(one) in (ForeignStorage, torch.Tensor) for one in gc.get_objects())
    for _ in range(1000):
        dp.matmul(a, b)
    gc.collect()
    assert sum(type(one) in (ForeignStorage, torch.Tensor) for one in gc.get_objects()) <= before + 2


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


def test_no_library_is_imported_for_it():
    code = (
        "import sys, numpy as np, dispatch as dp\n"
        "dp.matmul(np.eye(3), np.eye(3))\n"
        "assert not {'torch', 'cupy', 'jax'} & {name.partition('.')[0] for name in sys.modules}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


MOVED_MEMORY = {
    "freed": lambda x: x.untyped_storage().resize_(0),  # as FSDP does between the uses of a parameter
    "grown": lambda x: x.resize_(1 << 20),
}


@pytest.mark.parametrize("way", MOVED_MEMORY)
def test_an_operand_whose_memory_is_freed_or_moved_is_refused(torch, way):
    """By prepared calls and by requests that were made before; other operands, and one-shot calls, are not affected."""
    x, w = torch.ones(4, 4), torch.full((4, 4), 2.0)
    request = dp.MatmulRequest(x, w)
    call, out = dp.prepare(request), torch.empty(4, 4)
    into = dp.prepare(dp.MatmulRequest(x, torch.eye(4), out=out))
    for _ in range(3):
        assert torch.equal(call(), torch.full((4, 4), 8.0))
    MOVED_MEMORY[way](w)
    refit = partial(call.refit, torch.eye(4))
    for use in (call, lambda: dp.run(request), lambda: call(a=x), lambda: dp.prepare(request), refit):
        with pytest.raises(
            dp.errors.StaleTensor, match=r"^b: .*its storage was freed or moved.*Make the request again"
        ):
            use()
    assert torch.equal(call(b=torch.eye(4)), x), "an operand that is replaced is not read"
    assert torch.equal(into(), x)
    MOVED_MEMORY[way](out)
    with pytest.raises(dp.errors.StaleTensor, match=r"^out: "):
        into()


def test_a_view_in_the_middle_of_a_storage_is_not_moved(torch):
    x = torch.arange(64.0).reshape(4, 16)[:, 4:8]
    call = dp.prepare(dp.MatmulRequest(x, torch.eye(4)))
    for _ in range(2):
        assert torch.equal(call(), x)


@pytest.mark.parametrize("way", ["x.data = y", "x.set_"])
def test_an_output_that_is_given_other_memory_is_refused(torch, way):
    """Its new memory would not show the result."""
    x, out = torch.ones(4, 4), torch.empty(4, 4)
    request = dp.MatmulRequest(x, torch.eye(4), out=out)
    call, allocating = dp.prepare(request), dp.prepare(dp.MatmulRequest(x, torch.eye(4)))
    result = allocating()
    for _ in range(2):
        assert torch.equal(call(), x)
    for given in (out, result):
        OTHER_MEMORY[way](torch, given)
    for use in (call, lambda: dp.run(request), lambda: call(a=x), allocating):
        with pytest.raises(dp.errors.StaleTensor, match=r"^out: .*given other memory since.*Make the request again"):
            use()


def test_a_prepared_call_gives_arrays_of_its_operands_library_whoever_has_their_memory(monkeypatch):
    """As for outputs without elements, or of a layout that the library does not make."""
    monkeypatch.setattr(type(numpy_framework), "allocate", lambda *_: None)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    call = dp.prepare(dp.SoftmaxRequest(x))
    for given in (None, 2 * x, None):
        found = call() if given is None else call(x=given)
        operand = x if given is None else given
        assert type(found) is np.ndarray
        np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-6)
        np.testing.assert_allclose(found[0, 1] / found[0, 0], np.exp(operand[0, 1] - operand[0, 0]), rtol=1e-5)
