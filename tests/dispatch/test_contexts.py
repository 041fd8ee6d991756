"""The current CUDA context, with one GPU and with two: calls are made in the right one, and it stays what it was.

A stand-in for the driver keeps each thread's stack of contexts and refuses what the driver refused on two H200s: an
event on a stream of another context, a copy of another context's memory, a default stream where no context is current.
The handles 0, 1 and 2 mean a default stream of the current context; streams, events and pools have one of their own.
Memory is the host's.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import cudabind.driver
from dispatch import context, cuda, lane, pinned, refit, replay, stream
from dispatch.cuda import CudaDevice
from dispatch.keys import F32
from dispatch.stream import NOT_READY, Stream

INVALID_VALUE, INVALID_CONTEXT, INVALID_HANDLE = 1, 201, 400
DEFAULTS = [0, 1, 2]
SHAPE = (5, 7)


def plain(value):
    """An argument as Python has it; a bare call gets it as an instance of a ctypes type."""
    return (value.value or 0) if isinstance(value, ctypes._SimpleCData) else value


class Function:
    """One function: called, or called bare, where its result goes to the first pointer among the arguments."""

    def __init__(self, driver, name):
        self.name, self.carry_out = name, getattr(driver, f"_{name}", driver._fine)

    def __call__(self, *arguments):
        status, value = self.carry_out(*arguments)
        if status:
            raise cudabind.driver.error(self.name, status)
        return value

    def unchecked(self, *arguments):
        pointers = [argument._obj for argument in arguments if hasattr(argument, "_obj")]
        status, value = self.carry_out(*map(plain, arguments))
        if pointers and value is not None:
            pointers[0].value = value
        return status

    unchecked_holding_gil = unchecked


class StandIn:
    """The driver's functions that the rooms under test call; a method gives the status and the result."""

    error = staticmethod(cudabind.driver.error)

    def __init__(self, count):
        self.contexts = [0x1000 * (number + 1) for number in range(count)]
        self.owners = {}  # of streams, events and pools: their context
        self.memory = {}  # address: (the bytes, their number, their context)
        self.locked = []
        self.busy, self.captured = set(), set()  # contexts whose streams are
        self.launched = []  # the contexts in which recorded calls were
        self.handles = itertools.count(0x9000, 16)
        self.thread = threading.local()

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        if name.startswith("CU") or name == "cuuint64_t":
            return getattr(cudabind.driver, name)
        function = Function(self, name)
        setattr(self, name, function)
        return function

    @property
    def stack(self):
        return self.thread.__dict__.setdefault("stack", [])

    @property
    def current(self):
        return self.stack[-1] if self.stack else 0

    def owner(self, handle):
        return self.current if handle in (*DEFAULTS, None) else self.owners[int(handle)]

    def made(self, context):
        if not context:
            return INVALID_CONTEXT, None
        handle = next(self.handles)
        self.owners[handle] = context
        return 0, handle

    def lies_in(self, address):
        return next(
            context for base, (_, size, context) in self.memory.items() if base <= address < base + max(size, 1)
        )

    def moved(self, to, source, size, *on_device):
        if any(self.lies_in(address) != self.current for address in on_device):
            return INVALID_VALUE, None
        ctypes.memmove(to, source, size)
        return 0, None

    def _fine(self, *_):
        return 0, 0

    def _needs_one(self, *_):
        return (0 if self.current else INVALID_CONTEXT), None

    _cuCtxSynchronize = _cuStreamSynchronize = _needs_one

    def _cuStreamQuery(self, handle):
        context = self.owner(handle)
        return (NOT_READY if context in self.busy else 0) if context else INVALID_CONTEXT, None

    def _cuStreamIsCapturing(self, handle, _):
        return 0, int(self.owner(handle) in self.captured)

    def _cuDeviceGetCount(self):
        return 0, len(self.contexts)

    def _cuDeviceGet(self, number):
        return 0, number

    def _cuDevicePrimaryCtxRetain(self, number):
        return 0, self.contexts[number]

    def _cuDeviceGetName(self, *_):
        return 0, b"stand-in\0"

    def _cuCtxGetDevice(self, *_):
        return (0, self.contexts.index(self.current)) if self.current else (INVALID_CONTEXT, None)

    def _cuCtxSetCurrent(self, context):
        self.stack[-1:] = [context]
        return 0, None

    def _cuCtxPushCurrent(self, context):
        self.stack.append(context)
        return 0, None

    def _cuCtxPopCurrent(self, _):
        self.stack.pop()
        return 0, None

    def _cuMemGetInfo(self):
        return (0 if self.current else INVALID_CONTEXT), (1 << 20, 1 << 30)

    def _cuMemPoolCreate(self, props):
        return self.made(self.contexts[props.location.id])

    def _cuStreamCreate(self, _):
        return self.made(self.current)

    _cuEventCreate = _cuStreamCreate

    def _cuEventRecord(self, event, handle):
        if not self.owner(handle):
            return INVALID_CONTEXT, None
        return (0 if self.owners[event] == self.owner(handle) else INVALID_HANDLE), None

    def _cuStreamWaitEvent(self, handle, event, _):
        return self._cuEventRecord(event, handle)

    def _cuMemAllocFromPoolAsync(self, _, size, pool, handle):
        if self.owner(handle) != self.owners[pool]:
            return INVALID_HANDLE, None
        block = (ctypes.c_uint8 * (size + 256))()
        base = (ctypes.addressof(block) + 255) // 256 * 256
        self.memory[base] = block, size, self.owners[pool]
        return 0, base

    def _cuMemFreeAsync(self, address, handle):
        assert self.owner(handle) == self.memory.pop(address)[2]
        return 0, None

    def _cuMemHostAlloc(self, _, size, flags):
        self.locked.append((ctypes.c_uint8 * size)())
        return (0, ctypes.addressof(self.locked[-1])) if self.current else (INVALID_CONTEXT, None)

    def _cuMemcpyHtoDAsync(self, to, source, size, handle):
        return self.moved(to, source, size, to)

    def _cuMemcpyDtoHAsync(self, to, source, size, handle):
        return self.moved(to, source, size, source)

    def _cuMemcpyDtoDAsync(self, to, source, size, handle):
        return self.moved(to, source, size, to, source)

    def _cuGraphLaunch(self, *_):
        self.launched.append(self.current)
        return 0, None

    def _cuMemsetD8Async(self, to, value, size, handle):
        ctypes.memset(to, value, size)
        return (0 if self.owner(handle) == self.lies_in(to) else INVALID_HANDLE), None


@pytest.fixture
def thread():
    """Run a function on a thread of its own, which has no context, no lanes and no streams."""

    def run(work, *arguments):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work, *arguments).result()

    return run


@pytest.fixture(params=[1, 2], ids=["one GPU", "two GPUs"])
def driver(request, monkeypatch):
    made = StandIn(request.param)
    for module in (context, cuda, lane, pinned, refit, replay, stream):
        monkeypatch.setattr(module, "driver", made)
    yield made
    gc.collect()  # devices lie in cycles; what they have must not be given back to the driver itself


def do_everything(dev):
    """All that a device and its lanes do without a library."""
    values = np.arange(35, dtype=np.float32).reshape(SHAPE)
    tensor, zeros = dev.array(values), dev.zeros(SHAPE)
    assert np.array_equal(tensor.numpy(), values)
    assert not zeros.numpy().any()
    source = dev.pinned(SHAPE)
    source[...] = values
    assert np.array_equal(zeros.copy_from_async(source).result().numpy_async().result(), values)
    here = dev.lane()
    assert np.array_equal(here.twin(tensor).numpy(), values)
    assert here.scalar(2.0, F32)
    assert here.zeros(64)
    other = dev.stream()
    other.wait_for(here.stream)
    other.close()
    dev.synchronize()
    assert "MiB are free" in dev.memory()


def use_a_default_stream(driver, dev, handle):
    """Memory on another library's default stream: made, used on ours as well, kept, and freed."""
    ours = dev.lane().stream
    theirs = Stream.from_handle(dev, handle)
    with theirs:
        tensor = dev.array(np.ones(SHAPE, np.float32))
        assert tensor.numpy().all()
        assert tensor.numpy_async().result().all()
        dev.zeros(SHAPE)  # freed at once, and there
    for state in (driver.busy, driver.captured):
        state.add(int(dev.here.handle))
    assert not theirs.done()
    assert theirs.is_capturing()
    dev.park(tensor.storage)
    for state in (driver.busy, driver.captured):
        state.clear()
    assert theirs.done()
    assert not theirs.is_capturing()
    tensor.storage.use(ours, write=True)
    theirs.wait_for(ours)
    theirs.synchronize()
    ours.precede_handle(theirs.c_handle)
    tensor.storage.lent.add(handle)
    size = len(driver.memory)
    holder = [tensor]
    del tensor
    nobody = threading.Thread(target=holder.clear)  # no context is current there, and none has to be
    nobody.start()
    nobody.join()
    assert len(driver.memory) == size - 1


def test_a_thread_gets_the_context_of_the_first_device_it_uses_and_keeps_it(driver, thread):
    def work():
        devices = [CudaDevice(number, 1) for number in range(len(driver.contexts))]
        assert driver.stack == driver.contexts[:1]
        for dev in (*devices, *reversed(devices)):
            do_everything(dev)
            assert driver.stack == driver.contexts[:1]

        def elsewhere():
            assert devices[-1].array(np.ones(3)).numpy().all()
            assert driver.stack == driver.contexts[-1:]
            do_everything(devices[0])
            assert driver.stack == driver.contexts[-1:]

        thread(elsewhere)

    thread(work)


def test_the_choice_of_another_library_stays(driver, thread):
    def work():
        devices = [CudaDevice(number, 1) for number in range(len(driver.contexts))]
        for chosen in driver.contexts:
            driver.cuCtxSetCurrent(chosen)
            for dev in devices:
                do_everything(dev)
                assert driver.stack == [chosen]

    thread(work)


@pytest.mark.parametrize("handle", DEFAULTS)
def test_default_streams_are_those_of_their_device(driver, thread, handle):
    def work():
        devices = [CudaDevice(number, 1) for number in range(len(driver.contexts))]
        for chosen in driver.contexts:
            driver.cuCtxSetCurrent(chosen)
            for dev in devices:
                use_a_default_stream(driver, dev, handle)
                assert driver.stack == [chosen]

    thread(work)


def test_a_recorded_call_on_a_default_stream_is_launched_in_its_context(driver, thread):
    def work():
        dev = [CudaDevice(number, 1) for number in range(len(driver.contexts))][-1]
        with Stream.from_handle(dev, 0):
            recorded = dev.lane().capture(lambda: None)
        driver.cuCtxSetCurrent(driver.contexts[0])
        assert recorded.launch() == 0
        assert driver.launched == driver.contexts[-1:]
        assert driver.stack == driver.contexts[:1]

    thread(work)


def test_a_copy_between_tensors_and_a_refit_find_the_memory_of_their_device(driver, thread):
    def work():
        dev = [CudaDevice(number, 1) for number in range(len(driver.contexts))][-1]
        driver.cuCtxSetCurrent(driver.contexts[0])
        target, source = dev.zeros(SHAPE), dev.array(np.ones(SHAPE, np.float32))

        class Request:
            def tensors(self):
                return [("b", target, False)]

        refit.refit(dev.lane(), Request(), {"b": source})
        assert target.numpy().all()
        refit.refit(dev.lane(), Request(), {"b": np.zeros(SHAPE, np.float32)})
        assert not target.numpy().any()
        assert driver.stack == driver.contexts[:1]

    thread(work)
