"""A stand-in for a GPU with cuBLASLt, on host memory: tests/differential.py runs all of matmul on it without a GPU.

Plans, descriptors, shortcuts, relocated graphs and refits are the real code. `cublasLtMatmul` is replaced by a product
in NumPy that believes nothing but what the library would be told: the attributes of real cuBLASLt descriptors, read
back, and addresses. Its results depend on the algorithm, and the algorithm on every part of the problem, so that a call
with the descriptors or the algorithm of another problem gives other numbers or writes other memory.
"""

from __future__ import annotations

import copy
import ctypes
import itertools
import threading
import zlib
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from differential_job import TOLD, Job

from cudabind import driver
from cudabind.sys import cublasLt as lt
from dispatch.bind import refit
from dispatch.device.host import HostDevice
from dispatch.device.stream import DeviceStream, Stream
from dispatch.errors import Refused
from dispatch.execute.cuda_executor import CudaExecutor
from dispatch.execute.graph_nodes import KERNEL, Node
from dispatch.keys import Arch, Dtype
from dispatch.ops.matmul import cublaslt, empty

if TYPE_CHECKING:
    from collections.abc import Callable

REFUSES = 47  # one problem in so many has no algorithm


class NoContext(nullcontext):  # type: ignore[type-arg]
    def push(self) -> int:
        return 0

    def pop(self) -> None:
        pass


class StandinStream(DeviceStream):
    """All that is enqueued is done at once."""

    def __init__(self, device: Standin) -> None:
        super().__init__(device, next(device.handles), owned=False)
        self.external = False

    def synchronize(self) -> None:
        pass

    def done(self) -> bool:
        return True

    def wait_for(self, other: Stream) -> None:
        pass

    def wait_for_uses(self, other: Stream) -> None:
        pass

    def is_capturing(self) -> bool:
        return False


class Standin(HostDevice):
    """Host memory under the rows of an sm_90."""

    is_host = False
    context: Any

    def __init__(self) -> None:
        self.handles = itertools.count(1000)
        super().__init__(1)
        self.name, self.arch, self.context, self.model = "cuda:7", Arch(90), NoContext(), "stand-in"
        self._stream = self.stream()

    def stream(self) -> Stream:
        return StandinStream(self)

    def recycle(self, event: ctypes.c_void_p) -> None:
        pass


class Recorded:
    """A recorded call: what the library was told then, told again."""

    def __init__(self, jobs: list[Job]) -> None:
        self._jobs = jobs

    def launch(self) -> int:
        for job in self._jobs:
            job()
        return 0


class StandinExecutor(CudaExecutor):
    """An executor whose recordings keep what the library is told, and whose numbers and zeros lie in host memory."""

    versions = {"cublasLt": (13, 1, 0)}  # noqa: RUF012

    def capture(self, enqueue: Callable[[], None]) -> Any:
        return Recorded(_jobs(enqueue))

    def recorded(self, plan: Any, arguments: Any) -> Any:
        return _jobs(lambda: plan.enqueue(arguments))

    def launcher(self, executable: Any, _nodes: int) -> Callable[[], int]:
        return Recorded(graphs[executable.value]).launch

    def write(self, address: int, value: complex, dtype: Dtype) -> None:
        number = np.array(value, dtype.numpy)
        ctypes.memmove(address, number.ctypes.data, number.nbytes)


Standin.open_executor = StandinExecutor


def _jobs(enqueue: Callable[[], None]) -> list[Job]:
    """What the library is told to do."""
    recording.jobs = jobs = []
    try:
        enqueue()
    finally:
        recording.jobs = None
    return jobs


# -- executable graphs: the jobs of a recording, each of which does what its image says -------------------------------
graphs: dict[int, list[Job]] = {}
numbers = itertools.count(1)


class Nodes:
    """What graph_nodes.Nodes reads off a graph, of a list of jobs."""

    def __init__(self, jobs: list[Job], _sizes: Any) -> None:
        self.handles, self.edges = tuple(range(len(jobs))), ()
        self.nodes = [Node(KERNEL, job.form(), job.image()) for job in jobs]


def instantiated(jobs: list[Job]) -> int:
    """The handle of an executable graph."""
    number = next(numbers)
    graphs[number] = [copy.copy(job) for job in jobs]
    return number


def setter(executable: Any, handle: int, node: Node, image: int) -> tuple[Callable[[], int], None]:
    """What has a job do what its new image says."""
    job, size = graphs[executable.value][handle], len(node.image)

    def put() -> int:
        job.take(ctypes.string_at(image, size))
        return 0

    return put, None


class Recording(threading.local):
    """What this thread records at present."""

    jobs: list[Job] | None = None


recording = Recording()


def product(*given: Any) -> int:
    """`cublasLtMatmul`."""
    job = Job(*given)
    if job.is_refused:
        return int(lt.cublasStatus_t.CUBLAS_STATUS_INVALID_VALUE)
    if recording.jobs is not None:
        recording.jobs.append(job)
    else:
        job()
    return 0


def heuristic(_handle: Any, _descriptors: Any, problem: Any, workspace: int, _count: int = 1) -> list[Any]:
    """An algorithm that depends on all of a problem; some problems have none."""
    number = zlib.crc32(repr((problem, workspace)).encode())
    if number % REFUSES == 0:
        raise Refused("the stand-in's heuristic finds no algorithm")
    result = lt.cublasLtMatmulHeuristicResult_t()
    result.algo.data[0] = number
    matrices = tuple(matrix.alignment for matrix in (problem.a, problem.b, problem.c, problem.d))
    TOLD[number] = (matrices, problem.bias_alignment, problem.aux_alignment)
    return [result]


def _move(to: int, source: int, nbytes: int, _stream: int) -> None:
    ctypes.memmove(to, source, nbytes)


def _move_lines(copy: Any, _stream: int) -> None:
    assert min(copy.dstPitch, copy.srcPitch) >= copy.WidthInBytes, "CUDA_ERROR_INVALID_VALUE"
    for line in range(copy.Height):
        start, source = copy.dstDevice + line * copy.dstPitch, copy.srcDevice + line * copy.srcPitch
        ctypes.memmove(start, source, copy.WidthInBytes)


def _set(address: int, value: int, nbytes: int, _stream: int) -> None:
    ctypes.memset(address, value, nbytes)


def _gone(_handle: Any) -> int:
    return 0


DRIVER = SimpleNamespace(
    cuGraphDestroy=SimpleNamespace(unchecked=_gone),
    cuGraphExecDestroy=SimpleNamespace(unchecked=lambda handle: graphs.pop(handle.value, None) and 0),
    cuMemcpyDtoDAsync=_move,
    cuMemcpy2DAsync=_move_lines,
    cuMemsetD8Async=_set,
    CUDA_MEMCPY2D=SimpleNamespace,
    CUmemorytype=driver.CUmemorytype,
)


def install(patch: Callable[[Any, str, Any], None]) -> None:
    """Put the stand-in where the real libraries are called; `patch` is pytest's `monkeypatch.setattr`, or `setattr`."""
    from dispatch.execute import cuda_executor, learner, plan_relocation, relocated_graph

    patch(cublaslt, "heuristic", heuristic)
    patch(cublaslt, "handle_of", lambda _: None)
    patch(cublaslt, "_untyped_matmul", lambda: product)
    for module in (empty, refit, cuda_executor, learner, relocated_graph):
        patch(module, "driver", DRIVER)
    patch(learner, "Nodes", Nodes)
    patch(learner, "instantiated", instantiated)
    patch(plan_relocation, "FIRST", 2)  # soon
    patch(plan_relocation, "EVERY", 1)
    patch(relocated_graph, "setter", setter)
