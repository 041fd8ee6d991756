"""Objects that are loaded once for each GPU, such as a module with kernels."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from cudabind._fork import anew

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["OncePerGpu"]

K = TypeVar("K")
V = TypeVar("V")


class OncePerGpu(Generic[K, V]):
    """Values by GPU and key, which are dropped with the GPU's object.

    Guarantees: a value is made once, by one thread. A thread that makes a value for one GPU, and may wait for that GPU
    in the driver, does not block threads that get values for another GPU.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Any, tuple[Any, dict[K, V]]] = WeakKeyDictionary()  # each with a lock
        self._lock = threading.RLock()  # reentrant, as the others: a finalizer may run while it is held
        anew(self, "_lock", threading.RLock)

    def get(self, gpu: Any, key: K, make: Callable[[], V]) -> V:
        """The value for this key, made by `make()` if there is none."""
        with self._lock:
            entry = self._known.get(gpu)
            if entry is None:
                entry = self._known[gpu] = threading.RLock(), {}
        lock, values = entry
        with lock:
            if key not in values:
                values[key] = make()
            return values[key]
