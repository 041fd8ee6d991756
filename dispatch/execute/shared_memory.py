"""Memory that the plans of one executor share, because they run one after the other; used in addition to the workspace.

It stays allocated as long as a plan keeps it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dispatch.device.storage import Storage
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["beyond_workspace", "of_size", "shared"]

NAME = "shared memory"


def of_size(executor: CudaExecutor, nbytes: int, purpose: str) -> Storage:
    """The only memory of this size that an executor has for a purpose.

    Plans that run inside other plans must use another purpose.
    """
    storages: weakref.WeakValueDictionary[tuple[str, int], Storage] = executor.handles.setdefault(
        NAME, weakref.WeakValueDictionary()
    )
    storage = storages.get((purpose, nbytes))
    if storage is None:
        storage = storages[purpose, nbytes] = executor.device.allocate(nbytes, executor.stream)
    return storage


def shared(executor: CudaExecutor, nbytes: int, purpose: str) -> Storage | None:
    """Memory of `nbytes`, rounded up to a power of 2; None for 0."""
    return of_size(executor, 1 << (nbytes - 1).bit_length(), purpose) if nbytes else None


def beyond_workspace(executor: CudaExecutor, nbytes: int, purpose: str) -> tuple[Storage | None, int]:
    """The address of `nbytes`: in the executor's workspace, or in shared memory, which the caller must keep."""
    workspace = executor.workspace
    if nbytes <= workspace.nbytes:
        return None, int(workspace.c_ptr.value or 0)
    storage = of_size(executor, 1 << (nbytes - 1).bit_length(), purpose)
    return storage, storage.base
