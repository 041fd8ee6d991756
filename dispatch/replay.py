"""Captured calls: one run of a plan recorded as a CUDA graph, to be launched again for less than the call itself costs.

lane.py captures and launches them. A replay holds addresses, numbers, workspace and algorithm, so it stands for the
very same arguments only. Capture runs on a stream of its own, so the caller's stream never sees it.
"""

from __future__ import annotations

import ctypes
import sys
from functools import partial
from typing import TYPE_CHECKING

from cudabind import driver

if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["Replay", "capture"]

RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: other threads and other streams may do as they like meanwhile


class Replay:
    """An executable graph and its launch on one stream; `launch()` returns the driver's status."""

    __slots__ = ("_exec", "launch")

    def __init__(self, executable: int, stream: ctypes.c_void_p, *, holding: bool = False) -> None:
        self._exec = ctypes.c_void_p(executable)
        launch = driver.cuGraphLaunch.unchecked_holding_gil if holding else driver.cuGraphLaunch.unchecked
        # Nothing is left to convert: a launch is one foreign call with two prebuilt arguments.
        self.launch: Callable[[], int] = partial(launch, self._exec, stream)

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        # The driver frees a graph that is still running once it is done.
        driver.cuGraphExecDestroy.unchecked(self._exec)


def capture(
    enqueue: Callable[[], None], target: ctypes.c_void_p, recorder: ctypes.c_void_p, *, holding: bool = False
) -> Replay:
    """Record what `enqueue()` enqueues as a graph that will be launched on the stream `target` holds now.

    Plans enqueue on whatever stream `target` names: for the time of the recording that is `recorder`. `holding`: the
    launches keep the interpreter's lock, for which cudabind.driver has conditions (BOUNDED).
    """
    stream = ctypes.c_void_p(target.value)
    driver.cuStreamBeginCapture(recorder.value, driver.CUstreamCaptureMode(RELAXED))
    target.value = recorder.value
    try:
        enqueue()
    finally:
        target.value = stream.value
        graph = driver.cuStreamEndCapture(recorder.value)
    try:
        return Replay(int(driver.cuGraphInstantiate(graph, 0)), stream, holding=holding)
    finally:
        driver.cuGraphDestroy(graph)
