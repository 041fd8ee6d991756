"""The caches that cuTENSOR itself keeps on disk, for each GPU model and cuTENSOR version: compiled kernels, and plans.

Kernels belong to the library: a process reads them once, before its first plan that may compile one, and writes them
after each such plan that compiled another. Plans belong to a handle: they hold the kernels that incremental autotune
chose.
Follows https://docs.nvidia.com/cuda/cutensor/latest/plan_cache.html.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

from cudabind.sys import cutensor
from dispatch.execute.library_cache import LibraryCache
from dispatch.libraries.cutensor.handle import handle_of

if TYPE_CHECKING:
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["read_kernels", "read_plans", "write_kernels", "write_plans"]

PLANS = 1024  # size of a handle's plan cache once it reads plans; the default is 64, and a larger file would be refused


cache_of = cache(LibraryCache)  # one cache for this process


def _named(kind: str, executor: CudaExecutor) -> tuple[str, str, str]:
    version = ".".join(map(str, executor.versions.get("cutensor", ())))
    return kind, executor.device.model, f"cutensor-{version}"


def read_kernels(executor: CudaExecutor) -> bool:
    """Have the library read the kernels that are on disk; returns whether there were any."""
    handle = handle_of(executor).c_handle
    kernel_cache = cache_of(*_named("kernels", executor))
    return kernel_cache.load(lambda path: cutensor.cutensorReadKernelCacheFromFile(handle, path))


def write_kernels(executor: CudaExecutor) -> bool:
    """Write the kernels of the library, merged with those of other processes; returns whether they are on disk."""
    handle = handle_of(executor).c_handle
    kernel_cache = cache_of(*_named("kernels", executor))
    return kernel_cache.save(
        lambda path: cutensor.cutensorWriteKernelCacheToFile(handle, path),
        lambda path: cutensor.cutensorReadKernelCacheFromFile(handle, path),
    )


def read_plans(executor: CudaExecutor) -> bool:
    """Have the executor's handle read the plans that are on disk, once; returns whether there were any.

    cuTENSOR then drops the plans that the handle had before.
    """
    owner = handle_of(executor)
    if owner.has_read_plans:
        return False
    owner.has_read_plans = True
    handle, count = owner.c_handle, ctypes.c_uint32()
    cutensor.cutensorHandleResizePlanCache(handle, PLANS)

    def read(path: bytes) -> None:
        cutensor.cutensorHandleReadPlanCacheFromFile(handle, path, ctypes.byref(count))

    return LibraryCache(*_named("plans", executor)).load(read)


def write_plans(executor: CudaExecutor) -> bool:
    """Write the plans of the executor's handle; returns whether they are on disk. The last process to write wins."""
    handle = handle_of(executor).c_handle
    plan_cache = LibraryCache(*_named("plans", executor))  # not shared: each handle reads and writes its own
    return plan_cache.save(lambda path: cutensor.cutensorHandleWritePlanCacheToFile(handle, path))
