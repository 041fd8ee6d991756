"""cuTensorNet: a network of tensors contracted along the path it finds, against NumPy."""

from __future__ import annotations

from ctypes import byref, c_int32, c_int64

import numpy as np
import pytest

from cudabind.sys import cutensornet as net

LIBRARIES = ("cuda", "cutensor", "cutensornet")
SIZES = {"a": 7, "b": 12, "c": 5, "d": 9, "e": 11}
PART = net.cutensornetWorkspaceKind_t.CUTENSORNET_WORKSPACE_SCRATCH
DEVICE = net.cutensornetMemspace_t.CUTENSORNET_MEMSPACE_DEVICE
RECOMMENDED = net.cutensornetWorksizePref_t.CUTENSORNET_WORKSIZE_PREF_RECOMMENDED


@pytest.fixture
def handle(gpu):
    return gpu.make(net.cutensornetHandle_t, net.cutensornetCreate, net.cutensornetDestroy)


def labels(modes):
    return (c_int32 * len(modes))(*map(ord, modes))


def extents(modes):
    return (c_int64 * len(modes))(*(SIZES[mode] for mode in modes))


def strides(array):
    """In elements, for an array by rows."""
    return (c_int64 * len(array.shape))(*(int(np.prod(array.shape[k + 1 :])) for k in range(len(array.shape))))


@pytest.mark.parametrize(
    ("inputs", "output"),
    [(("ab", "bcd", "de"), "ace"), (("ab", "bcd", "de", "ce"), "a"), (("ab", "bc"), "ca"), (("abd", "db"), "ab")],
)
@pytest.mark.parametrize("dtype", ["f8", "c16"])
def test_a_network_is_contracted_as_by_einsum(gpu, handle, rng, inputs, output, dtype):
    kind = net.cudaDataType_t.CUDA_R_64F if dtype == "f8" else net.cudaDataType_t.CUDA_C_64F
    hosts = [rng.standard_normal([SIZES[mode] for mode in modes]).astype(dtype) for modes in inputs]
    if dtype == "c16":
        hosts = [host + 1j * rng.standard_normal(host.shape) for host in hosts]
    network = gpu.make(
        net.cutensornetNetworkDescriptor_t,
        lambda made: net.cutensornetCreateNetwork(handle, made),
        net.cutensornetDestroyNetwork,
    )
    ids = []
    for modes in inputs:
        number = c_int64(-1)
        net.cutensornetNetworkAppendTensor(
            handle, network, len(modes), extents(modes), labels(modes), None, kind, byref(number)
        )
        ids.append(number.value)
    net.cutensornetNetworkSetOutputTensor(handle, network, len(output), labels(output), kind)
    config = gpu.make(
        net.cutensornetContractionOptimizerConfig_t,
        lambda made: net.cutensornetCreateContractionOptimizerConfig(handle, made),
        net.cutensornetDestroyContractionOptimizerConfig,
    )
    info = gpu.make(
        net.cutensornetContractionOptimizerInfo_t,
        lambda made: net.cutensornetCreateContractionOptimizerInfo(handle, network, made),
        net.cutensornetDestroyContractionOptimizerInfo,
    )
    net.cutensornetContractionOptimize(handle, network, config, 1 << 28, info)
    given = [gpu.array(host) for host in hosts]
    for number, array in zip(ids, given, strict=True):
        net.cutensornetNetworkSetInputTensorMemory(handle, network, number, array.ptr, strides(array))
    result = gpu.poisoned(tuple(SIZES[mode] for mode in output), dtype)
    net.cutensornetNetworkSetOutputTensorMemory(handle, network, result.ptr, strides(result))
    work = gpu.make(
        net.cutensornetWorkspaceDescriptor_t,
        lambda made: net.cutensornetCreateWorkspaceDescriptor(handle, made),
        net.cutensornetDestroyWorkspaceDescriptor,
    )
    net.cutensornetWorkspaceComputeContractionSizes(handle, network, info, work)
    size = c_int64()
    net.cutensornetWorkspaceGetMemorySize(handle, work, RECOMMENDED, DEVICE, PART, byref(size))
    assert 0 <= size.value <= 1 << 28
    net.cutensornetWorkspaceSetMemory(handle, work, DEVICE, PART, gpu.workspace(size.value), size.value)
    net.cutensornetNetworkPrepareContraction(handle, network, work)
    every_slice, stream = net.cutensornetSliceGroup_t(), net.cudaStream_t()
    net.cutensornetNetworkContract(handle, network, 0, work, every_slice, stream)
    expected = np.einsum(f"{','.join(inputs)}->{output}", *hosts)
    scale = np.einsum(f"{','.join(inputs)}->{output}", *map(np.abs, hosts))
    assert (np.abs(result.numpy() - expected) <= 400 * np.finfo(np.float64).eps * scale).all()
    net.cutensornetNetworkContract(handle, network, 1, work, every_slice, stream)  # and added to what is there
    assert (np.abs(result.numpy() - 2 * expected) <= 800 * np.finfo(np.float64).eps * scale).all()
