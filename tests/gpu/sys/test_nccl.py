"""NCCL: communicators of one rank, calls in groups, an operation of one's own, and two ranks in two threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_float, c_int32

import ml_dtypes
import numpy as np
import pytest

from cudabind import runtime
from cudabind.errors import NcclError
from cudabind.sys import nccl

LIBRARIES = ("nccl",)
TYPE = nccl.ncclDataType_t
SUM = nccl.ncclRedOp_t.ncclSum


@pytest.fixture
def comm(gpu):
    """A communicator whose only rank is this process, on the current device."""
    unique = nccl.ncclUniqueId()
    nccl.ncclGetUniqueId(byref(unique))
    return gpu.make(nccl.ncclComm_t, lambda made: nccl.ncclCommInitRank(made, 1, unique, 0), nccl.ncclCommDestroy)


def test_the_communicator_knows_its_size_its_rank_and_its_device(comm):
    answers = []
    for ask in (nccl.ncclCommCount, nccl.ncclCommUserRank, nccl.ncclCommCuDevice):
        answer = c_int32(-1)
        ask(comm, byref(answer))
        answers.append(answer.value)
    assert answers == [1, 0, 0]


def test_reductions_and_broadcasts_of_one_rank_copy(gpu, comm, rng):
    n = 10_007
    x = rng.standard_normal(n).astype(ml_dtypes.bfloat16)
    d_x = gpu.array(x)
    copies = [gpu.poisoned(n, x.dtype) for _ in range(4)]
    nccl.ncclGroupStart()  # all of it becomes one launch
    nccl.ncclAllReduce(d_x.ptr, copies[0].ptr, n, TYPE.ncclBfloat16, SUM, comm, None)
    nccl.ncclBroadcast(d_x.ptr, copies[1].ptr, n, TYPE.ncclBfloat16, 0, comm, None)
    nccl.ncclAllGather(d_x.ptr, copies[2].ptr, n, TYPE.ncclBfloat16, comm, None)
    nccl.ncclReduceScatter(d_x.ptr, copies[3].ptr, n, TYPE.ncclBfloat16, nccl.ncclRedOp_t.ncclMax, comm, None)
    nccl.ncclGroupEnd()
    for copy in copies:
        assert np.array_equal(copy.numpy(), x)


def test_a_rank_sends_to_itself_in_a_group(gpu, comm, rng):
    x = rng.integers(0, 256, 4097).astype(np.uint8)
    d_x, d_y = gpu.array(x), gpu.poisoned(x.shape, np.uint8)
    nccl.ncclGroupStart()
    nccl.ncclSend(d_x.ptr, x.size, TYPE.ncclUint8, 0, comm, None)
    nccl.ncclRecv(d_y.ptr, x.size, TYPE.ncclUint8, 0, comm, None)
    nccl.ncclGroupEnd()
    assert np.array_equal(d_y.numpy(), x)


def test_an_operation_that_scales_before_it_adds(gpu, comm, rng, close):
    x = rng.standard_normal(515).astype(np.float32)
    d_y, op, scale = gpu.poisoned(x.shape, np.float32), c_int32(), c_float(0.3)
    immediate = nccl.ncclScalarResidence_t.ncclScalarHostImmediate
    nccl.ncclRedOpCreatePreMulSum(byref(op), byref(scale), TYPE.ncclFloat32, immediate, comm)
    nccl.ncclAllReduce(gpu.array(x).ptr, d_y.ptr, x.size, TYPE.ncclFloat32, op.value, comm, None)
    result = d_y.numpy()
    nccl.ncclRedOpDestroy(op.value, comm)
    expected = x.astype(np.float64) * scale.value
    close(result, expected, np.finfo(np.float32).eps * np.abs(expected))


def reduced(unique, rank, x):
    """What one rank of two, in a thread of its own and on a device of its own, has after the sum of all."""
    runtime.cudaSetDevice(rank)
    comm, y, kind = nccl.ncclComm_t(), np.full_like(x, np.nan), runtime.cudaMemcpyKind
    memory, stream = runtime.cudaMalloc(x.nbytes), runtime.cudaStreamCreate()
    nccl.ncclCommInitRank(byref(comm), 2, unique, rank)
    runtime.cudaMemcpy(memory, x.ctypes.data, x.nbytes, kind.cudaMemcpyHostToDevice)
    nccl.ncclAllReduce(memory, memory, x.size, TYPE.ncclFloat64, SUM, comm, nccl.cudaStream_t(int(stream)))
    runtime.cudaStreamSynchronize(stream)
    runtime.cudaMemcpy(y.ctypes.data, memory, y.nbytes, kind.cudaMemcpyDeviceToHost)
    nccl.ncclCommDestroy(comm)
    runtime.cudaStreamDestroy(stream)
    runtime.cudaFree(memory)
    return y


def test_two_ranks_in_two_threads_add_what_they_have(rng):
    if runtime.cudaGetDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    unique, x = nccl.ncclUniqueId(), rng.standard_normal((2, 12_345))
    nccl.ncclGetUniqueId(byref(unique))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: reduced(unique, rank, x[rank]), range(2))
    assert np.array_equal(first, x.sum(axis=0))  # of two numbers there is but one sum
    assert np.array_equal(second, first)


def test_a_rank_that_is_not_there_is_refused_in_the_librarys_words(gpu, comm):
    memory = gpu.poisoned(4, np.float32)
    with pytest.raises(NcclError) as caught:
        nccl.ncclBroadcast(memory.ptr, memory.ptr, 4, TYPE.ncclFloat32, 5, comm, None)
    assert caught.value.name == "ncclInvalidArgument"
    assert caught.value.function == "ncclBroadcast"
    assert caught.value.text == nccl.ncclGetErrorString(caught.value.status)
    assert "invalid argument" in caught.value.text
