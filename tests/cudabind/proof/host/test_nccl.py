"""NCCL without a GPU: unique ids, groups, and a communicator's configuration as this version reads it."""

from __future__ import annotations

import ctypes
from ctypes import byref
from typing import TYPE_CHECKING

import pytest

from cudabind import _load
from cudabind.errors import NcclError
from cudabind.sys import nccl

if TYPE_CHECKING:
    from collections.abc import Callable

UNDEFINED = -(2**31)  # NCCL_CONFIG_UNDEF_INT is INT_MIN in nccl.h
MAGIC = 0xCAFEBEEF  # in NCCL_CONFIG_INITIALIZER


@pytest.fixture(autouse=True)
def _installed(need: Callable[..., None]) -> None:
    need("nccl")


def test_unique_ids_are_128_bytes_and_unique() -> None:
    made = [nccl.ncclUniqueId() for _ in range(8)]
    for each in made:
        nccl.ncclGetUniqueId(byref(each))
    assert {ctypes.sizeof(each) for each in made} == {128}
    assert len({bytes(each) for each in made}) == len(made)


def test_a_group_opens_and_closes() -> None:
    nccl.ncclGroupStart()
    nccl.ncclGroupEnd()
    with pytest.raises(NcclError) as caught:
        nccl.ncclGroupEnd()
    assert caught.value.name == "ncclInvalidUsage"


def config() -> nccl.ncclConfig_t:
    """As NCCL_CONFIG_INITIALIZER makes it, by the fields that this version has."""
    made = nccl.ncclConfig_t()
    for name, kind, *_ in made._fields_:
        if kind is ctypes.c_int32:
            setattr(made, name, UNDEFINED)
    made.size, made.magic, made.version = ctypes.sizeof(made), MAGIC, version()
    return made


def version() -> int:
    told = ctypes.c_int()
    nccl.ncclGetVersion(byref(told))
    return told.value


@pytest.mark.usefixtures("without_a_driver")
def test_a_configuration_is_taken_as_far_as_a_gpu_is_needed() -> None:
    unique, communicator, made = nccl.ncclUniqueId(), nccl.ncclComm_t(), config()
    nccl.ncclGetUniqueId(byref(unique))
    with pytest.raises(NcclError) as caught:
        nccl.ncclCommInitRankConfig(byref(communicator), 1, unique, 0, byref(made))
    assert caught.value.name == "ncclUnhandledCudaError"
    assert nccl.ncclGetErrorString(nccl.ncclResult_t.ncclUnhandledCudaError) in str(caught.value)


def test_the_version_is_the_one_the_loader_tells() -> None:
    major, minor, patch = map(int, _load.version("nccl").split("."))
    assert version() == 10000 * major + 100 * minor + patch
