"""WhileGraph: a CUDA graph that repeats a recorded graph while a number in device memory is not 0, in one launch.

It has a kernel, then a while node, then a kernel. The body of the while node is the recorded graph followed by a kernel
that passes the number to the node. Plans of iterative solvers launch it. It requires a driver of CUDA 12.4 or newer.
The structures are those of cuda.h:
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__GRAPH.html
"""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind import driver
from dispatch.device.once_per_gpu import OncePerGpu
from dispatch.device.stream import relaxed
from dispatch.execute.cuda_graph import GraphExec, instantiated
from dispatch.execute.graph_nodes import KernelParams

if TYPE_CHECKING:
    from dispatch.device.cuda import CudaDevice

__all__ = ["MIN_DRIVER", "Launched", "NodeParams", "WhileGraph"]

MIN_DRIVER = 12040
CONDITIONAL, WHILE, ASSIGN_DEFAULT = (
    13,
    1,
    1,
)  # CUgraphNodeType, CUgraphConditionalNodeType, CU_GRAPH_COND_ASSIGN_DEFAULT
# Only the driver has cudaGraphSetConditional, and links it when it compiles PTX. The PTX version is an old one that
# every supported driver accepts.
PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.extern .func cudaGraphSetConditional (.param .b64 handle, .param .b32 value);
.visible .entry set_condition(.param .u64 handle, .param .u64 number)
{
    .reg .b32 %value;
    .reg .b64 %handle, %at;
    ld.param.u64 %handle, [handle];
    ld.param.u64 %at, [number];
    cvta.to.global.u64 %at, %at;
    ld.global.u32 %value, [%at];
    {
        .param .b64 first;
        .param .b32 second;
        st.param.b64 [first], %handle;
        st.param.b32 [second], %value;
        call.uni cudaGraphSetConditional, (first, second);
    }
    ret;
}
\0"""


class Launched(NamedTuple):
    """A kernel, its launch configuration, and the one structure that it takes by value."""

    function: int
    blocks: int
    threads: int
    parameters: ctypes.Structure


class NodeParams(ctypes.Structure):
    """CUgraphNodeParams of a conditional node: its CUDA_CONDITIONAL_NODE_PARAMS from `handle` to `context`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("reserved0", ctypes.c_int * 3),
        ("handle", ctypes.c_uint64),
        ("kind", ctypes.c_int),
        ("size", ctypes.c_uint),
        ("graphs", ctypes.POINTER(ctypes.c_void_p)),
        ("context", ctypes.c_void_p),
        ("reserved1", ctypes.c_uint64 * 25),
        ("reserved2", ctypes.c_int64),
    )


class Condition(ctypes.Structure):
    """The two parameters of the kernel that passes the number to the while node."""

    _fields_ = (("handle", ctypes.c_uint64), ("number", ctypes.c_uint64))


def called(name: str, *arguments: Any) -> None:
    """Call a driver function; raises the driver's error for a status other than 0."""
    if status := getattr(driver, name).unchecked(*arguments):
        raise driver.error(name, status)


class WhileGraph:
    """An executable graph, which must be made and launched in its device's context; it takes ownership of `body`."""

    __slots__ = ("_after", "_before", "_exec", "_graph", "_kept")

    def __init__(
        self, device: CudaDevice, before: Launched, body: ctypes.c_void_p, after: Launched, number: int
    ) -> None:
        """`number` is the address of the 32 bits that are read after each pass; the first pass always runs."""
        self._graph = ctypes.c_void_p()
        self._kept: list[Any] = []
        called("cuGraphCreate", ctypes.byref(self._graph), ctypes.c_uint(0))
        try:
            self._before = self._kernel(self._graph, (), before)
            inner, loop = self._loop(self._before)
            child = ctypes.c_void_p()
            called("cuGraphAddChildGraphNode", ctypes.byref(child), inner, None, ctypes.c_size_t(0), body)
            condition = Launched(_set_condition(device), 1, 1, Condition(self._kept[0].value, number))
            self._kernel(inner, (child,), condition)
            self._after = self._kernel(self._graph, (loop,), after)
            self._exec = GraphExec(instantiated(self._graph), ctypes.c_void_p())
        except BaseException:
            driver.cuGraphDestroy.unchecked(self._graph)
            self._graph = ctypes.c_void_p()
            raise
        finally:
            driver.cuGraphDestroy.unchecked(body)

    def __del__(self) -> None:
        if getattr(self, "_graph", None) and not sys.is_finalizing():
            with relaxed():
                driver.cuGraphDestroy.unchecked(self._graph)

    def _loop(self, behind: ctypes.c_void_p) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        """Add a while node after `behind`; returns the graph of its body, and the node."""
        context, handle, node = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_void_p()
        called("cuCtxGetCurrent", ctypes.byref(context))
        flags = ctypes.c_uint(1), ctypes.c_uint(ASSIGN_DEFAULT)
        called("cuGraphConditionalHandleCreate", ctypes.byref(handle), self._graph, context, *flags)
        self._kept.append(handle)
        params = NodeParams(type=CONDITIONAL, handle=handle.value, kind=WHILE, size=1, context=context)
        before, count = (ctypes.c_void_p * 1)(behind), ctypes.c_size_t(1)
        called("cuGraphAddNode", ctypes.byref(node), self._graph, before, None, count, ctypes.byref(params))
        return ctypes.c_void_p(params.graphs[0]), node

    def _kernel(self, graph: ctypes.c_void_p, behind: tuple[ctypes.c_void_p, ...], what: Launched) -> ctypes.c_void_p:
        params, held = _params(what)
        node, before = ctypes.c_void_p(), (ctypes.c_void_p * max(1, len(behind)))(*behind)
        count = ctypes.c_size_t(len(behind))
        node_arguments = before if behind else None, count, ctypes.byref(params)
        called("cuGraphAddKernelNode", ctypes.byref(node), graph, *node_arguments)
        del held  # the driver has copied the parameters
        return node

    def set(self, before: Launched, after: Launched) -> None:
        """Set new parameters of the first and the last kernel, from the next launch on."""
        for node, what in ((self._before, before), (self._after, after)):
            params, held = _params(what)
            called("cuGraphExecKernelNodeSetParams", self._exec.c_exec, node, ctypes.byref(params))
            del held

    def launch(self, stream: ctypes.c_void_p) -> None:
        """Enqueue the graph on a stream."""
        called("cuGraphLaunch", self._exec.c_exec, stream)


def _params(what: Launched) -> tuple[KernelParams, Any]:
    """The driver's structure for a kernel node, and the memory to keep until the driver has read it."""
    parameters = what.parameters
    if isinstance(parameters, Condition):
        values = (ctypes.c_void_p * 2)(ctypes.addressof(parameters), ctypes.addressof(parameters) + 8)
    else:
        values = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
    launch = (what.blocks, 1, 1, what.threads, 1, 1, 0)
    return KernelParams(func=what.function, launch=launch, kernelParams=ctypes.addressof(values)), (values, parameters)


_functions: OncePerGpu[bytes, tuple[Any, int]] = OncePerGpu()  # with its module


def _set_condition(device: CudaDevice) -> int:
    """The kernel that passes a number to a while node, loaded once for each device."""
    name = b"set_condition"

    def load() -> tuple[Any, int]:
        module = driver.cuModuleLoadData(PTX)
        return module, int(driver.cuModuleGetFunction(module, name))

    return _functions.get(device, name, load)[1]
