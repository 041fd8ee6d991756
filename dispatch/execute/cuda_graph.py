"""Captured calls: one run of a plan recorded as a CUDA graph, to be launched again for less than the call itself costs.

cuda_executor.py captures and launches them. A GraphExec holds addresses, numbers, workspace and algorithm, so it stands
for the very same arguments only; relocated_graph.py has those that are launched at others. Capture runs on a stream of
its own, so the caller's stream never sees it.
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


__all__ = ["GraphExec", "capture", "instantiated", "launcher", "recorded"]

OUT_OF_MEMORY, LAUNCH_OUT_OF_RESOURCES = 2, 701  # CUDA_ERROR_…
TRIES = 3  # of a recording that something ends, before it is given up
UNTOLD = -1  # the status of a call that an interrupt of the main thread came in behind, before it was told


class GraphExec:
    """An executable graph and its launch on one stream; `launch()` returns the driver's status."""

    __slots__ = ("c_exec", "keep", "launch")

    def __init__(self, executable: int, stream: ctypes.c_void_p, *, holds_gil: bool = False) -> None:
        self.c_exec = ctypes.c_void_p(executable)
        self.keep: Any = None  # memory whose addresses are in the graph
        self.launch: Callable[[], int] = launcher(self.c_exec, stream, holds_gil=holds_gil)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            dispose(_destroy, self.c_exec)


def _destroy(executable: ctypes.c_void_p) -> None:
    with relaxed():  # the driver frees a graph that is still running once it is done
        driver.cuGraphExecDestroy.unchecked(executable)


def launcher(executable: ctypes.c_void_p, stream: ctypes.c_void_p, *, holds_gil: bool = False) -> Callable[[], int]:
    """The launch of an executable graph on a stream: one foreign call, of which nothing is left to convert."""
    launch = driver.cuGraphLaunch.unchecked_holding_gil if holds_gil else driver.cuGraphLaunch.unchecked
    return partial(launch, executable, stream)


def capture(
    enqueue: Callable[[], None],
    target: ctypes.c_void_p,
    recorder: ctypes.c_void_p,
    recordings: Recordings,
    *,
    holds_gil: bool = False,
) -> GraphExec | None:
    """Record what `enqueue()` enqueues as a graph that will be launched on the stream `target` holds now.

    `holds_gil`: the launches keep the interpreter's lock, for which cudabind.driver has conditions (BOUNDED). None
    where recordings are lost again and again.
    """
    graph = recorded(enqueue, target, recorder, recordings)
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
        CudaDriverError: another error of the driver's.
    """
    with relaxed():
        try:
            return int(driver.cuGraphInstantiate(graph.value, 0))
        except CudaDriverError as error:
            if error.status not in (OUT_OF_MEMORY, LAUNCH_OUT_OF_RESOURCES):
                raise
            from dispatch.device.shortage import free_memory  # with the first failure: `import dispatch` stays quick

            told = free_memory()
            if error.status == LAUNCH_OUT_OF_RESOURCES and not told.is_short:
                raise
            raise OutOfMemory(f"the GPU is likely out of memory: {told}, and a graph takes some: {error}") from error


def recorded(
    enqueue: Callable[[], None], target: ctypes.c_void_p, recorder: ctypes.c_void_p, recordings: Recordings
) -> ctypes.c_void_p | None:
    """The graph of what `enqueue()` enqueues, which the caller is to destroy.

    Plans enqueue on whatever stream `target` names: for the time of the recording that is `recorder`. Waits for the
    context in other libraries end captures, so one that is lost is repeated; None where that happens again and again.
    """
    for _ in range(TRIES):
        with recordings.one():
            graph = _recorded(enqueue, target, recorder)
        if graph is not None:
            return graph
    return None


def _recorded(
    enqueue: Callable[[], None], target: ctypes.c_void_p, recorder: ctypes.c_void_p
) -> ctypes.c_void_p | None:
    """The graph; None where something has ended the capture. Raises what `enqueue()` does of its own accord."""
    from dispatch.execute.clean_stack import clean_stack  # with the first recording: `import dispatch` stays quick

    graph, stream = ctypes.c_void_p(), target.value
    end = partial(driver.cuStreamEndCapture.unchecked_holding_gil, recorder, ctypes.byref(graph))
    begun, status = UNTOLD, 0
    error: CudaError | None = None
    is_whole = False
    # Other threads and streams may do as they like, but for waits for the whole context. One that another library makes
    # at the very moment at which a capture begins or ends has crashed inside the driver (580, seen under a storm of
    # them): the interpreter's lock is held for that moment, so that no thread of Python begins one.
    try:
        begun = driver.cuStreamBeginCapture.unchecked_holding_gil(recorder, RELAXED)
        if not begun:
            target.value = recorder.value
            clean_stack()
            enqueue()
            is_whole = True
    except CudaError as raised:  # of the library, or because the capture was ended under it
        error = raised
    finally:
        target.value = stream
        if begun in (0, UNTOLD):
            status = end()  # nothing that Ctrl-C may come in by lies before this
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
    """Raise what a status means, unless it is that a capture was ended."""
    if status not in LOST:
        raise driver.error(function, status)
