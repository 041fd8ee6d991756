"""Calls of cuTENSOR's that fail for want of memory: made again once there is some, else out of memory."""

import ctypes
import gc
import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from cudabind.errors import CutensorError
from dispatch.errors import OutOfMemory

spec = importlib.util.spec_from_file_location(
    "contraction_stand_ins", Path(__file__).with_name("contraction_stand_ins.py")
)
stand_ins = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_ins)
stand_in, dev, executor, run = stand_ins.stand_in, stand_ins.dev, stand_ins.executor, stand_ins.run
row_of = stand_ins.row_of


def failing(executor, name, times, status=stand_in.CUDA_ERROR):
    """Has a function of the library fail so often, unless it is said with the status for any error of CUDA's."""
    kept, left = getattr(executor.library, name), [times]

    def call(*arguments):
        if left[0]:
            left[0] -= 1
            if name == "cutensorCreate":
                arguments[0].value = 1  # what no library has made, and nobody is to destroy
            return status
        return kept.function(*arguments)

    function = stand_in.Call(name, call)
    setattr(executor.library, name, function)
    return left


def test_a_call_that_fails_for_memory_is_made_again_once_there_is_some(dev, executor, rng):
    a, b = (dev.array(rng.standard_normal((3, 3)).astype("f4")) for _ in range(2))
    executor.free, trimmed = 100 << 20, []
    executor.device.trim = lambda: trimmed.append(1)
    left = failing(executor, "cutensorContract", 1)
    _, result = run(dp.ContractRequest("ik,kj->ij", a, b), executor, row_of("contract", "f32"))
    np.testing.assert_allclose(result.numpy(), a.numpy() @ b.numpy(), rtol=1e-5)
    assert (trimmed, left) == ([1], [0])


@pytest.mark.parametrize("how", ["again", "added", "captured", "recorded"])
def test_what_fails_for_memory_is_out_of_memory(dev, executor, how):
    a = dev.zeros((3, 3), "f32")
    executor.free, executor.captured = 100 << 20, how == "captured"
    if how == "recorded":
        executor.target = ctypes.c_void_p(8)
    left = failing(executor, "cutensorContract", 5)
    more = {"c": a} if how == "added" else {}  # of which a second call would add once more
    with pytest.raises(OutOfMemory, match=r"probably out of memory .100 of 81,920 MiB are free.*CUDA_ERROR") as caught:
        run(dp.ContractRequest("ik,kj->ij", a, a, **more), executor, row_of("contract", "f32"))
    assert isinstance(caught.value.__cause__, CutensorError)
    assert left == [3 if how == "again" else 4]


def test_what_fails_with_memory_to_spare_is_the_librarys_own_error(dev, executor):
    a = dev.zeros((3, 3), "f32")
    left = failing(executor, "cutensorContract", 5)
    with pytest.raises(
        CutensorError, match=r"65,536 of 81,920 MiB are free, so memory is not the cause. With CUTENSOR_LOG_LEVEL=5"
    ):
        run(dp.ContractRequest("ik,kj->ij", a, a), executor, row_of("contract", "f32"))
    assert left == [4]


def test_a_plan_that_fails_for_memory_is_out_of_memory(dev, executor):
    a = dev.zeros((3, 3), "f32")
    executor.free = 0
    failing(executor, "cutensorCreatePlan", 1)
    with pytest.raises(OutOfMemory, match="cutensorCreatePlan failed with CUTENSOR_STATUS_CUDA_ERROR"):
        run(dp.ContractRequest("ik,kj->ij", a, a), executor, row_of("contract", "f32"))


@pytest.mark.parametrize("times", [1, 2])
def test_a_handle_that_fails_for_memory_is_made_again_or_out_of_memory(dev, executor, rng, times):
    a, b = (dev.array(rng.standard_normal((3, 3)).astype("f4")) for _ in range(2))
    request, row = dp.ContractRequest("ik,kj->ij", a, b), row_of("contract", "f32")
    executor.free, trimmed = 8 << 20, []
    executor.device.trim = lambda: trimmed.append(1)
    left = failing(executor, "cutensorCreate", times, stand_in.UNSUPPORTED)
    if times == 2:
        with pytest.raises(OutOfMemory, match=r"8 of 81,920 MiB.*cutensorCreate failed with CUTENSOR_STATUS_NOT_SUPP"):
            run(request, executor, row)
    _, result = run(request, executor, row)  # once there is memory all is well
    np.testing.assert_allclose(result.numpy(), a.numpy() @ b.numpy(), rtol=1e-5)
    assert (trimmed, left) == ([1], [0])
    assert not executor.device.idle["cutensor"]


def test_a_handle_that_fails_with_memory_to_spare_is_the_librarys_own_error(dev, executor):
    a = dev.zeros((3, 3), "f32")
    left = failing(executor, "cutensorCreate", 5, stand_in.UNSUPPORTED)
    with pytest.raises(
        CutensorError, match=r"NOT_SUPPORTED.*65,536 of 81,920 MiB are free, so memory is not the cause"
    ):
        run(dp.ContractRequest("ik,kj->ij", a, a), executor, row_of("contract", "f32"))
    assert left == [4]
    gc.collect()
    assert not executor.device.idle["cutensor"]  # nobody is to destroy what was not made
