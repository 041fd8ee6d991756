"""NVML: what the driver says of a GPU without a context, against what CUDA says of it with one."""

from __future__ import annotations

from ctypes import byref, c_int32, c_uint32, create_string_buffer

import pytest

from cudabind import driver
from cudabind.errors import NvmlError
from cudabind.sys import nvml

LIBRARIES = ("cuda", "nvml")
SIZE = 1 << 30
OTHERS = 64 << 20  # bytes that others on the machine may take or give meanwhile


@pytest.fixture(autouse=True)
def _initialized():
    nvml.nvmlInit_v2()
    yield
    nvml.nvmlShutdown()


@pytest.fixture
def handle(gpu):  # noqa: ARG001 - its context
    """The GPU that CUDA numbers 0, which NVML may number otherwise."""
    digits = bytes(driver.cuDeviceGetUuid(driver.cuDeviceGet(0)).bytes).hex()
    uuid = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
    made = nvml.nvmlDevice_t()
    nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), made)
    return made


def memory(handle):
    told = nvml.nvmlMemory_st()
    nvml.nvmlDeviceGetMemoryInfo(handle, told)
    return told


def test_its_memory_is_that_of_cumemgetinfo(handle):
    free, total = map(int, driver.cuMemGetInfo())
    told = memory(handle)
    assert total <= told.total < total + (4 << 30)  # with what the driver keeps
    assert abs(told.free - free) < OTHERS + told.total - total
    ptr = driver.cuMemAlloc(SIZE)
    after = memory(handle)
    assert abs(after.used - told.used - SIZE) < OTHERS
    assert abs(int(driver.cuMemGetInfo()[0]) - (free - SIZE)) < OTHERS
    driver.cuMemFree(ptr)
    assert abs(memory(handle).used - told.used) < OTHERS


def test_it_names_the_same_gpu_of_the_same_capability(gpu, handle):
    name, major, minor = create_string_buffer(96), c_int32(), c_int32()
    nvml.nvmlDeviceGetName(handle, name, 96)
    assert name.value == bytes(driver.cuDeviceGetName(256, driver.cuDeviceGet(0))).split(b"\0")[0]
    nvml.nvmlDeviceGetCudaComputeCapability(handle, byref(major), byref(minor))
    assert f"{major.value}{minor.value}" == gpu.arch


def test_a_gpu_that_is_not_there_is_refused_in_its_words():
    count = c_uint32()
    nvml.nvmlDeviceGetCount_v2(byref(count))
    assert count.value > 0
    with pytest.raises(NvmlError) as caught:
        nvml.nvmlDeviceGetHandleByIndex_v2(count.value, nvml.nvmlDevice_t())
    assert caught.value.name == "NVML_ERROR_INVALID_ARGUMENT"
    assert caught.value.text == nvml.nvmlErrorString(nvml.nvmlReturn_t.NVML_ERROR_INVALID_ARGUMENT)
