"""The cuBLASLt handle of an executor: made at its first product, another executor's once it is closed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from cudabind.sys import cublasLt as lt

if TYPE_CHECKING:
    from dispatch.device.cuda import CudaDevice
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["handle_of"]

NAME = "cublasLt"


def handle_of(executor: CudaExecutor) -> Any:
    """The `cublasLtHandle_t` of an executor; to destroy one ends all captures, so it serves another one afterwards."""
    handle = executor.handles.get(NAME)
    if handle is None:
        try:
            handle, _ = executor.device.idle[NAME].pop()
        except IndexError:
            handle = _made(executor.device)
        executor.handles[NAME] = handle
        executor.at_close.append(partial(_give_back, executor.device, handle))  # which keeps no executor alive
    return handle


def _made(device: CudaDevice) -> Any:
    handle = lt.cublasLtHandle_t()
    with device.context:
        lt.cublasLtCreate(handle)
    return handle


def _give_back(device: CudaDevice, handle: Any) -> None:
    if device.fault is None:
        device.idle[NAME].append((handle, lt.cublasLtDestroy.unchecked))
