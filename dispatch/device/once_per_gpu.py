"""What is loaded once for each GPU, such as a module with kernels."""

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
    """Values by GPU and key, which go with the GPU's object.

    Guarantees: a value is made once, by one thread. A thread that makes one for a GPU, and may wait for that GPU within
    the driver, holds up no thread that asks for another GPU's.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Any, tuple[Any, dict[K, V]]] = WeakKeyDictionary()  # with a lock each
        self._lock = threading.RLock()  # reentrant, as the others: a finalizer may run while it is held
        anew(self, "_lock", threading.RLock)

    def get(self, gpu: Any, key: K, make: Callable[[], V]) -> V:
        """The value, which `make()` gives if there is none."""
        with self._lock:
            found = self._known.get(gpu)
            if found is None:
                found = self._known[gpu] = threading.RLock(), {}
        lock, values = found
        with lock:
            if key not in values:
                values[key] = make()
            return values[key]
