"""CollectiveGraph: a collective of NCCL that all ranks have captured together, for `dp.prepare(request, graph=True)`.

NCCL's own call takes tens of microseconds on the host; the launch of a graph that contains it takes a few. Follows
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/cudagraph.html.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from dispatch.device.disposal import enqueueing_collectives
from dispatch.errors import CollectiveError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.execute.cuda_graph import GraphExec
    from dispatch.libraries.nccl.communicator import NcclCommunicator

__all__ = ["CollectiveGraph", "capture_collective"]


class CollectiveGraph:
    """A communicator's calls as a graph, launched on the stream that they were prepared for.

    Guarantees: it is not launched once the communicator has failed or is closed; the communicator's deadline applies to
    each launch. The communicator destroys it at its own end, because NCCL waits for that.
    """

    __slots__ = ("__weakref__", "_comm", "_context", "_function", "_graph", "_stream")

    def __init__(self, comm: NcclCommunicator, graph: GraphExec, executor: CudaExecutor, function: str) -> None:
        self._comm, self._function = comm, function
        self._stream, self._context = ctypes.c_void_p(executor.target.value), executor.stream.context
        self._graph: GraphExec | None = graph
        comm.graphs.add(self)

    def launch(self) -> int:
        """Launch it and watch its work; returns the driver's status. Raises the error of a failed communicator."""
        comm = self._comm
        with enqueueing_collectives(), self._context:  # work on a stream with a handle needs no current context
            with comm.lock:
                comm.check()
                graph = self._graph
                if graph is None:
                    raise CollectiveError(f"{comm!r}: its graphs are destroyed")
                status = graph.launch()
            if not status:
                comm.record_work(self._stream, self._function)
        return status

    def destroy(self) -> None:
        """Destroy the executable graph; a launch that is under way ends first."""
        with self._comm.lock:
            graph, self._graph = self._graph, None
        del graph  # outside of the lock: the driver may wait


def capture_collective(
    comm: NcclCommunicator, executor: CudaExecutor, enqueue: Callable[[], None], function: str
) -> CollectiveGraph:
    """Capture what `enqueue()` enqueues. All ranks call this together: NCCL may exchange addresses meanwhile.

    It is tried once, because the ranks would otherwise make different numbers of calls: if another library ends the
    capture, the communicator fails, so that all ranks get an error.
    """
    graph = executor.capture(enqueue, tries=1)
    if graph is None:
        why = f"another call, such as a wait for the whole context, ended the capture of {function}"
        comm.raise_failed(CollectiveError(f"{comm!r}: {why}"))
    return CollectiveGraph(comm, graph, executor, function)
