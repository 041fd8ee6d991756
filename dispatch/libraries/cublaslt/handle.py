"""The cuBLASLt handle of an executor: created at its first product; reused by another executor once it is closed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cudabind.sys import cublasLt as lt
from dispatch.libraries.handle import lent

if TYPE_CHECKING:
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["handle_of"]

NAME = "cublasLt"


def handle_of(executor: CudaExecutor) -> Any:
    """The `cublasLtHandle_t` of an executor; destroying a handle would end all captures, so another one reuses it."""
    handle = executor.handles.get(NAME)
    if handle is None:
        handle = executor.handles[NAME] = lent(executor, NAME, _create, lt.cublasLtDestroy.unchecked)
    return handle


def _create() -> lt.cublasLtHandle_t:
    handle = lt.cublasLtHandle_t()
    lt.cublasLtCreate(handle)
    return handle
