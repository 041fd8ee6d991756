"""What cuTENSOR keeps of its own on disk, for each GPU model and version of it: compiled kernels, and plans.

Kernels are the library's: a process reads them once, before its first plan that may compile one, and writes them behind
each such plan that has compiled another. Plans are a handle's: which kernels incremental autotune has found.
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

PLANS = 1024  # that a handle keeps once it reads them: by itself 64, and a file with more would be refused


cache_of = cache(LibraryCache)  # the one of this process


def _named(kind: str, executor: CudaExecutor) -> tuple[str, str, str]:
    version = ".".join(map(str, executor.versions.get("cutensor", ())))
    return kind, executor.device.model, f"cutensor-{version}"


def read_kernels(executor: CudaExecutor) -> bool:
    """Have the library take the kernels that are on disk; whether there are any."""
    handle = handle_of(executor).c_handle
    kept = cache_of(*_named("kernels", executor))
    return kept.load(lambda path: cutensor.cutensorReadKernelCacheFromFile(handle, path))


def write_kernels(executor: CudaExecutor) -> bool:
    """Keep the kernels that the library has compiled, and what other processes have kept; whether they are on disk."""
    handle = handle_of(executor).c_handle
    kept = cache_of(*_named("kernels", executor))
    return kept.save(
        lambda path: cutensor.cutensorWriteKernelCacheToFile(handle, path),
        lambda path: cutensor.cutensorReadKernelCacheFromFile(handle, path),
    )


def read_plans(executor: CudaExecutor) -> bool:
    """Have the executor's handle take the plans that are on disk, once; whether there were any.

    What it had before is forgotten, as cuTENSOR reads them.
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
    """Keep the plans of the executor's handle; whether they are on disk. Of several processes the last one's stay."""
    handle = handle_of(executor).c_handle
    kept = LibraryCache(*_named("plans", executor))  # each handle reads and writes it for itself
    return kept.save(lambda path: cutensor.cutensorHandleWritePlanCacheToFile(handle, path))
