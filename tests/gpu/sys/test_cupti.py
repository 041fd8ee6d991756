"""CUPTI: calls of the driver as it tells them to a Python function, and kernels as it writes them down."""

from __future__ import annotations

import ctypes
import threading
from ctypes import byref, c_int, c_size_t, c_uint32, c_void_p

import numpy as np
import pytest

from cudabind import driver, nvrtc
from cudabind.callbacks import release
from cudabind.errors import CuptiError
from cudabind.sys import cupti

LIBRARIES = ("cuda", "nvrtc", "cupti")
SOURCE = 'extern "C" __global__ void add_one(int n, int *x) { int i = threadIdx.x; if (i < n) x[i] += 1; }'
DRIVER_API = cupti.CUpti_CallbackDomain.CUPTI_CB_DOMAIN_DRIVER_API
LAUNCH = int(cupti.CUpti_driver_api_trace_cbid_enum.CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel)
KERNELS = cupti.CUpti_ActivityKind.CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL
BUFFER = 1 << 16


class Mine(Exception):
    """What no library raises."""


@pytest.fixture
def launch(gpu):
    """`launch(times)`: a kernel that adds one to an array; returns the array."""
    code = nvrtc.compile(SOURCE, options=[f"-arch=sm_{gpu.arch}"]).code
    module, x = driver.cuModuleLoadData(code), gpu.array(np.zeros(32, np.int32))
    kernel = driver.cuModuleGetFunction(module, b"add_one")

    def run(times):
        for _ in range(times):
            driver.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, 0, ((32, x.ptr), (c_int, c_void_p)), 0)
        return x.numpy()

    run(1)
    yield run
    driver.cuModuleUnload(module)


@pytest.fixture
def subscribed():
    """`subscriber = subscribed(function)`: CUPTI calls it as cuLaunchKernel begins and ends."""
    subscribers = []

    def subscribe(function):
        made = cupti.CUpti_SubscriberHandle()
        try:
            cupti.cuptiSubscribe(made, function, None)
        except CuptiError as error:
            if "MULTIPLE_SUBSCRIBERS" in error.name:
                pytest.skip("another profiler uses CUPTI in this process")
            raise
        subscribers.append(made)
        cupti.cuptiEnableCallback(1, made, DRIVER_API, LAUNCH)
        return made

    yield subscribe
    for made in subscribers:
        cupti.cuptiUnsubscribe(made)


def test_a_python_function_hears_of_every_launch(launch, subscribed):
    told = []

    def listen(_user, domain, number, data):
        facts = cupti.CUpti_CallbackData.from_address(data)
        told.append((domain, number, facts.callbackSite, ctypes.string_at(facts.functionName)))

    subscribed(listen)
    launch(7)
    assert len(told) == 14
    assert {each[:2] for each in told} == {(int(DRIVER_API), LAUNCH)}
    assert [each[2] for each in told] == [0, 1] * 7  # as it begins and as it ends
    assert {each[3] for each in told} == {b"cuLaunchKernel"}


def test_a_thread_of_its_own_is_heard_as_well(launch, subscribed):
    threads = []
    subscribed(lambda *_: threads.append(threading.get_ident()))
    context = driver.cuCtxGetCurrent()

    def work():
        driver.cuCtxSetCurrent(context)
        launch(3)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(threads) == 6
    assert threading.get_ident() not in threads


def test_what_it_raises_is_raised_by_the_launch(launch, subscribed):
    def fail(_user, _domain, _number, data):
        if cupti.CUpti_CallbackData.from_address(data).callbackSite == 0:
            raise Mine

    before = launch(0)[0]
    subscriber = subscribed(fail)
    for _ in range(2):
        with pytest.raises(Mine):
            launch(1)  # the driver launches all the same
    cupti.cuptiEnableCallback(0, subscriber, DRIVER_API, LAUNCH)
    assert launch(0)[0] == before + 2


def test_as_many_kernels_are_written_down_as_were_launched(launch):
    lent, names = {}, []

    def request(buffer, size, most):
        made = (ctypes.c_uint64 * (BUFFER // 8))()  # aligned as records want it
        lent[ctypes.addressof(made)] = made
        c_void_p.from_address(buffer).value = ctypes.addressof(made)
        c_size_t.from_address(size).value = BUFFER
        c_size_t.from_address(most).value = 0

    def complete(_context, _stream, buffer, _size, valid):
        record = c_void_p()
        while not cupti.cuptiActivityGetNextRecord.unchecked(buffer, valid, byref(record)):
            if c_uint32.from_address(record.value).value == KERNELS:
                names.append(ctypes.string_at(cupti.CUpti_ActivityKernel9.from_address(record.value).name))
        del lent[buffer]

    cupti.cuptiActivityRegisterCallbacks(request, complete)
    cupti.cuptiActivityEnable(KERNELS)
    launch(1000)  # more than one buffer holds
    cupti.cuptiActivityFlushAll(1)
    cupti.cuptiActivityDisable(KERNELS)
    launch(3)
    cupti.cuptiActivityFlushAll(1)
    assert names == [b"add_one"] * 1000
    assert not lent


def test_a_second_subscriber_is_refused_by_name(subscribed):
    def listen(*_):
        return None

    subscribed(listen)
    with pytest.raises(CuptiError, match="CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED"):
        cupti.cuptiSubscribe(cupti.CUpti_SubscriberHandle(), listen, None)
    release(listen)
