"""cuTENSOR on several GPUs: tensors in blocks that are dealt out to the GPUs; here one block on one GPU.

Each argument that lies on the devices is an array of one address per GPU. Without strides, the first axis is packed.
"""

from __future__ import annotations

from ctypes import byref, c_double, c_int32, c_int64, c_void_p

import numpy as np
import pytest

from cudabind import driver
from cudabind.sys import cutensorMg as mg

LIBRARIES = ("cutensorMg",)
DEVICES = (c_int32 * 1)(0)


@pytest.fixture
def handle(gpu):
    return gpu.make(mg.cutensorMgHandle_t, lambda made: mg.cutensorMgCreate(made, 1, DEVICES), mg.cutensorMgDestroy)


@pytest.fixture
def tensor(gpu, handle):
    """`tensor(memory, "abc")`: descriptor and modes."""

    def make(memory, modes):
        rank = len(memory.shape)
        extents, once = (c_int64 * rank)(*memory.shape), (c_int32 * rank)(*([1] * rank))
        kind = mg.cudaDataType_t.CUDA_R_64F
        made = gpu.make(
            mg.cutensorMgTensorDescriptor_t,
            lambda made: mg.cutensorMgCreateTensorDescriptor(
                handle, made, rank, extents, None, extents, None, once, 1, DEVICES, kind
            ),
            mg.cutensorMgDestroyTensorDescriptor,
        )
        return made, (c_int32 * rank)(*map(ord, modes))

    return make


def each(address):
    """One address per GPU."""
    return (c_void_p * 1)(address)


def test_a_contraction(gpu, handle, tensor, rng, close):
    a, b = rng.standard_normal((12, 7, 9)), rng.standard_normal((9, 10, 7))
    d_a, d_b = gpu.array(a, order="F"), gpu.array(b, order="F")
    d_d = gpu.poisoned((12, 10), np.float64, order="F")
    out = tensor(d_d, "mn")
    problem = gpu.make(
        mg.cutensorMgContractionDescriptor_t,
        lambda made: mg.cutensorMgCreateContractionDescriptor(
            *(handle, made, *tensor(d_a, "mhk"), *tensor(d_b, "knh"), *out, *out),
            mg.cutensorComputeType_t.CUTENSOR_COMPUTE_64F,
        ),
        mg.cutensorMgDestroyContractionDescriptor,
    )
    find = gpu.make(
        mg.cutensorMgContractionFind_t,
        lambda made: mg.cutensorMgCreateContractionFind(handle, made, mg.cutensorMgAlgo_t.CUTENSORMG_ALGO_DEFAULT),
        mg.cutensorMgDestroyContractionFind,
    )
    on_device, on_host = (c_int64 * 1)(), c_int64()
    usual = mg.cutensorWorksizePreference_t.CUTENSOR_WORKSPACE_DEFAULT
    mg.cutensorMgContractionGetWorkspace(handle, problem, find, usual, on_device, byref(on_host))
    plan = gpu.make(
        mg.cutensorMgContractionPlan_t,
        lambda made: mg.cutensorMgCreateContractionPlan(handle, made, problem, find, on_device, on_host.value),
        mg.cutensorMgDestroyContractionPlan,
    )
    stream = driver.cuStreamCreate(0)
    host = driver.cuMemAllocHost(max(on_host.value, 1))  # must be pinned, even where no byte of it is needed
    mg.cutensorMgContraction(
        *(handle, plan, byref(c_double(2)), each(d_a.ptr), each(d_b.ptr), byref(c_double(0))),
        *(each(d_d.ptr), each(d_d.ptr), each(gpu.workspace(on_device[0])), host),
        (mg.cudaStream_t * 1)(int(stream)),
    )
    driver.cuStreamSynchronize(stream)
    driver.cuStreamDestroy(stream)
    driver.cuMemFreeHost(host)
    magnitude = np.einsum("mhk,knh->mn", np.abs(a), np.abs(b))
    bound = 2 * (2 * 63 + 2) * np.finfo(np.float64).eps * magnitude
    close(d_d.numpy(), 2 * np.einsum("mhk,knh->mn", a, b), bound)
