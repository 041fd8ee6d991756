"""Recorded calls: one run of a plan captured as a CUDA graph, whose launch takes less time than the call itself.

cuda_executor.py captures and launches them. A GraphExec contains addresses, numbers, workspace and algorithm, so it
repeats exactly the same call; relocated_graph.py has graphs that are launched at other addresses. The capture runs on a
separate stream, so the caller's stream is never under capture.
"""

from __future__ import annotations

import ctypes
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from cudabind import driver
from cudabind.errors import CudaDriverError, CudaError
from dispatch.device.disposal import dispose
from dispatch.device.recordings import LOST, Recordings
from dispatch.device.stream import RELAXED, relaxed
from dispatch.errors import OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["TRIES", "GraphExec", "capture", "instantiated", "launcher", "recorded"]

OUT_OF_MEMORY, LAUNCH_OUT_OF_RESOURCES = 2, 701  # CUDA_ERROR_…
TRIES = 3  # of a recording that other libraries end
UNTOLD = -1  # the status before it is assigned: Ctrl-C may come between the call and the assignment


class GraphExec:
    """An executable graph and its launch on one stream; `launch()` returns the driver's status."""

    __slots__ = ("c_exec", "keep", "launch")

    def __init__(self, executable: int, stream: ctypes.c_void_p, *, holds_gil: bool = False) -> None:
        self.c_exec = ctypes.c_void_p(executable)
        self.keep: Any = None  # keeps alive the memory whose addresses are in the graph
        self.launch: Callable[[], int] = launcher(self.c_exec, stream, holds_gil=holds_gil)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            dispose(_destroy, self.c_exec)


def _destroy(executable: ctypes.c_void_p) -> None:
    with relaxed():  # the driver frees a graph that is still running once it is done
        driver.cuGraphExecDestroy.unchecked(executable)


def launcher(executable: ctypes.c_void_p, stream: ctypes.c_void_p, *, holds_gil: bool = False) -> Callable[[], int]:
    """A function that launches an executable graph on a stream: one ctypes call with converted arguments."""
    launch = driver.cuGraphLaunch.unchecked_holding_gil if holds_gil else driver.cuGraphLaunch.unchecked
    return partial(launch, executable, stream)


def capture(
    enqueue: Callable[[], None],
    target: ctypes.c_void_p,
    recorder: ctypes.c_void_p,
    recordings: Recordings,
    *,
    holds_gil: bool = False,
    tries: int = TRIES,
) -> GraphExec | None:
    """Record the work that `enqueue()` enqueues, as a graph to launch on the stream whose handle is now in `target`.

    `holds_gil`: launches hold the GIL, under the conditions in cudabind.driver (BOUNDED). None if other libraries ended
    every attempt.
    """
    graph = recorded(enqueue, target, recorder, recordings, tries=tries)
    if graph is None:
        return None
    try:
        executable = instantiated(graph)
    finally:
        driver.cuGraphDestroy.unchecked(graph)
    return GraphExec(executable, ctypes.c_void_p(target.value), holds_gil=holds_gil)


def instantiated(graph: ctypes.c_void_p) -> int:
    """The handle of a new executable graph.

    Raises:
        OutOfMemory: the driver had no memory for it, or too few resources while little memory was free.
        CudaDriverError: another error of the driver.
    """
    with relaxed():
        try:
            return int(driver.cuGraphInstantiate(graph.value, 0))
        except CudaDriverError as error:
            if error.status not in (OUT_OF_MEMORY, LAUNCH_OUT_OF_RESOURCES):
                raise
            from dispatch.device.shortage import free_memory  # only at a failure: keeps `import dispatch` fast

            memory = free_memory()
            if error.status == LAUNCH_OUT_OF_RESOURCES and not memory.is_short:
                raise
            raise OutOfMemory(
                f"the GPU is probably out of memory ({memory}), and a graph needs some: {error}"
            ) from error


def recorded(
    enqueue: Callable[[], None],
    target: ctypes.c_void_p,
    recorder: ctypes.c_void_p,
    recordings: Recordings,
    *,
    tries: int = TRIES,
) -> ctypes.c_void_p | None:
    """The graph of the work that `enqueue()` enqueues; the caller must destroy it.

    Plans enqueue on the stream whose handle is in `target`; during the recording that is `recorder`. Other libraries
    that synchronize the context end captures, so a lost recording is repeated; None if every attempt was lost.
    """
    for _ in range(tries):
        with recordings.record():
            graph = _recorded(enqueue, target, recorder)
        if graph is not None:
            return graph
    return None


def _recorded(
    enqueue: Callable[[], None], target: ctypes.c_void_p, recorder: ctypes.c_void_p
) -> ctypes.c_void_p | None:
    """The graph; None if another library has ended the capture. Raises the errors of `enqueue()` itself."""
    from dispatch.execute.clean_stack import clean_stack  # only for recordings: keeps `import dispatch` fast

    graph, stream = ctypes.c_void_p(), target.value
    end = partial(driver.cuStreamEndCapture.unchecked_holding_gil, recorder, ctypes.byref(graph))
    begun, status = UNTOLD, 0
    error: CudaError | None = None
    is_whole = False
    # Other threads and streams may do anything except synchronize the whole context. A synchronization at the moment
    # when a capture begins or ends has crashed inside the driver (580, seen with very many of them). So the GIL is held
    # at that moment, and no Python thread can start one.
    try:
        begun = driver.cuStreamBeginCapture.unchecked_holding_gil(recorder, RELAXED)
        if not begun:
            target.value = recorder.value
            clean_stack()
            enqueue()
            is_whole = True
    except CudaError as raised:  # an error of the library, or because its capture was ended
        error = raised
    finally:
        target.value = stream
        if begun in (0, UNTOLD):
            status = end()  # no Ctrl-C can come between the block and this call
        if graph.value and (status or not is_whole):
            driver.cuGraphDestroy.unchecked(graph)
    if begun:
        _pass_over("cuStreamBeginCapture", begun)
        return None
    if error is not None and status not in LOST:
        raise error
    if status:
        _pass_over("cuStreamEndCapture", status)
        return None
    return graph


def _pass_over(function: str, status: int) -> None:
    """Raise the error of a status, unless the status only means that a capture was ended."""
    if status not in LOST:
        raise driver.error(function, status)
