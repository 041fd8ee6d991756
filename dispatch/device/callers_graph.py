"""Keeps memory, plans and workspaces of this library alive while a graph that the caller captured may use them.

cuda.py makes one CallersGraphs for each GPU; executors and allocations register what goes into a capture. The driver
signals when it has destroyed a graph and everything instantiated from it. This module neither captures nor launches.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any

from cudabind import driver

if TYPE_CHECKING:
    from dispatch.device.device import Device
    from dispatch.device.stream import Stream

__all__ = ["CallersGraphs"]

MOVE = 1  # CU_GRAPH_USER_OBJECT_MOVE: the reference is transferred to the graph
NO_SYNC = 1  # CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
SEMAPHORE_BYTES = 64  # at least the size of a `sem_t` on every platform


class _Graph:
    """The objects that one graph keeps alive, and the semaphore that the driver posts once the graph is destroyed.

    The driver calls libc's `sem_post` on its own thread, not a Python function: Python may have ended by then.
    """

    __slots__ = ("_gone", "kept")

    def __init__(self, graph: ctypes.c_void_p) -> None:
        self._gone = ctypes.create_string_buffer(SEMAPHORE_BYTES)
        libc = _libc()
        libc.sem_init(self._gone, 0, 0)
        post = ctypes.cast(libc.sem_post, ctypes.c_void_p)
        user_object = ctypes.c_void_p()
        status = driver.cuUserObjectCreate.unchecked(ctypes.byref(user_object), self._gone, post, 1, NO_SYNC)
        if status:
            raise driver.error("cuUserObjectCreate", status)
        # The driver holds the address until it posts, possibly after the interpreter has ended.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gone))
        status = driver.cuGraphRetainUserObject.unchecked(graph, user_object, 1, MOVE)
        if status:
            raise driver.error("cuGraphRetainUserObject", status)
        self.kept: list[Any] = []

    def is_gone(self) -> bool:
        if _libc().sem_trywait(self._gone):
            return False
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._gone))
        return True


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


class CallersGraphs:
    """The graphs that callers have captured, by the id of their capture, until the driver has destroyed them."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.known: dict[int, _Graph] = {}

    def keep(self, stream: Stream, *things: object) -> None:
        """Keep objects alive as long as the graph being captured from a stream, and its executables, exist."""
        number, graph = ctypes.c_uint64(), ctypes.c_void_p()
        state = ctypes.byref(ctypes.c_int())
        with stream.context:
            status = driver.cuStreamGetCaptureInfo.unchecked(
                stream.c_handle, state, ctypes.byref(number), ctypes.byref(graph), None, None, None
            )
        if status:
            self._device.fail(status, "cuStreamGetCaptureInfo")
        if not graph.value:
            return
        captured_graph = self.known.get(number.value)
        if captured_graph is None:  # two threads may capture into one graph: the first entry stays
            captured_graph = self.known.setdefault(number.value, _Graph(graph))
        captured_graph.kept.extend(things)

    def sweep(self) -> None:
        """Drop the objects that destroyed graphs kept alive."""
        for number, graph in self.known.copy().items():
            if graph.is_gone():
                self.known.pop(number, None)
