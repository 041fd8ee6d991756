"""The nodes of a CUDA graph as bytes: reads the work of a captured call, and changes it in the executable graph.

relocation.py compares the bytes and decides what changes. The structures are those of cuda.h, with its names:
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__GRAPH.html
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind import driver

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Node", "Nodes", "NotRelocatable", "NumbersInMemory", "setter"]

KERNEL, MEMCPY, MEMSET = 0, 1, 2  # CUgraphNodeType
NO_MORE = 1  # CUDA_ERROR_INVALID_VALUE: the kernel has no parameter with that index
BUFFER, SIZE = 1, 2  # CU_LAUNCH_PARAM_BUFFER_POINTER and …_SIZE: the keys of `extra`
# CUlaunchAttributeID of the attributes of kernel nodes: access policy window, cooperative, cluster dimension, cluster
# scheduling policy, priority, memory sync domain, preferred cluster dimension, device-updatable node, shared memory
# carveout.
ATTRIBUTES = (1, 2, 4, 5, 8, 10, 11, 13, 14)


class NotRelocatable(Exception):  # a result that is stored, not an error: hence no "Error" in its name
    """The reason why a call cannot be launched as a relocated graph."""


class NumbersInMemory(NotRelocatable):
    """The call reads its numbers from device memory, each from its own address."""


class Node(NamedTuple):
    """The work of a node: `form` is the same for all addresses of the operands, `image` has the bytes that vary.

    The image of a kernel is its parameters; the image of a memset or memcpy is the whole structure that describes it.
    """

    kind: int
    form: tuple[Any, ...]
    image: bytes


class KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2: `launch` has grid, block and bytes of shared memory."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        ("launch", ctypes.c_uint * 7),
        ("kernelParams", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
    )


class MemsetParams(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS_v1."""

    _fields_ = (
        ("dst", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("elementSize", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


MEMCPY_BYTES = 200  # of a CUDA_MEMCPY3D
SOURCE_KIND, TARGET_KIND = slice(32, 36), slice(120, 124)  # its srcMemoryType and dstMemoryType
HOST_MEMORY = (1).to_bytes(4, "little")  # CU_MEMORYTYPE_HOST


class Nodes:
    """The nodes of a captured graph, in the order in which they were captured.

    `sizes` caches the offsets and sizes of kernel parameters between captures of one call, whose kernels stay loaded.
    Raises NotRelocatable for nodes of other kinds, and if the driver does not report the required data.
    """

    def __init__(self, graph: ctypes.c_void_p, sizes: dict[tuple[int, int], tuple[tuple[int, int], ...]]) -> None:
        self._sizes = sizes
        self.handles = _handles(graph)
        self.edges = _edges(graph, self.handles)
        self.nodes = [self._node(ctypes.c_void_p(handle)) for handle in self.handles]

    def _node(self, handle: ctypes.c_void_p) -> Node:
        kind = ctypes.c_int()
        _told("cuGraphNodeGetType", handle, ctypes.byref(kind))
        if kind.value == KERNEL:
            return self._kernel(handle)
        if kind.value == MEMSET:
            memset = MemsetParams()
            _told("cuGraphMemsetNodeGetParams", handle, ctypes.byref(memset))
            return Node(MEMSET, (), bytes(memset))
        if kind.value == MEMCPY:
            memcpy = (ctypes.c_ubyte * MEMCPY_BYTES)()
            _told("cuGraphMemcpyNodeGetParams", handle, ctypes.byref(memcpy))
            if HOST_MEMORY in (bytes(memcpy[SOURCE_KIND]), bytes(memcpy[TARGET_KIND])):
                raise NotRelocatable(
                    "it copies from or to the host's memory, whose content is not part of the parameters"
                )
            return Node(MEMCPY, (), bytes(memcpy))
        raise NotRelocatable(f"it enqueues a node of type {kind.value}: neither a kernel nor a memset nor a memcpy")

    def _kernel(self, handle: ctypes.c_void_p) -> Node:
        params = KernelParams()
        _told("cuGraphKernelNodeGetParams", handle, ctypes.byref(params))
        places = self._places(params.func or 0, params.kern or 0)
        if params.extra:
            image = _packed(params.extra)
            places = ()
        else:
            size = max((offset + size for offset, size in places), default=0)
            whole = bytearray(size)
            values = (ctypes.c_void_p * len(places)).from_address(params.kernelParams) if places else ()
            for value, (offset, size) in zip(values, places, strict=True):
                whole[offset : offset + size] = ctypes.string_at(value, size)
            image = bytes(whole)
        form = (params.func, params.kern, params.ctx, tuple(params.launch), places, _attributes(handle))
        return Node(KERNEL, form, image)

    def _places(self, func: int, kern: int) -> tuple[tuple[int, int], ...]:
        """The offset and size of each parameter of a kernel."""
        parameters = self._sizes.get((func, kern))
        if parameters is None:
            get_info = (driver.cuFuncGetParamInfo if func else driver.cuKernelGetParamInfo).unchecked
            handle, offset, size = ctypes.c_void_p(func or kern), ctypes.c_size_t(), ctypes.c_size_t()
            places: list[tuple[int, int]] = []
            while not (
                status := get_info(handle, ctypes.c_size_t(len(places)), ctypes.byref(offset), ctypes.byref(size))
            ):
                places.append((offset.value, size.value))
            if status != NO_MORE:  # a parameter that is not seen would count as constant
                raise NotRelocatable(f"the parameters of a kernel cannot be read: status {status}")
            parameters = self._sizes[func, kern] = tuple(places)
        return parameters


def _told(function: str, *arguments: Any) -> None:
    """Call a driver function that reports on a graph; NotRelocatable if it fails."""
    status = getattr(driver, function).unchecked(*arguments)
    if status:
        raise NotRelocatable(f"{function} returned status {status}")


def _handles(graph: ctypes.c_void_p) -> tuple[int, ...]:
    count = ctypes.c_size_t()
    _told("cuGraphGetNodes", graph, None, ctypes.byref(count))
    handles = (ctypes.c_void_p * count.value)()
    if count.value:
        _told("cuGraphGetNodes", graph, handles, ctypes.byref(count))
    return tuple(handles)


def _edges(graph: ctypes.c_void_p, handles: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """The sorted edges: (number of a node, number of a node that waits for it, edge data)."""
    if len(handles) == 1:
        return ()
    count = ctypes.c_size_t()
    _told("cuGraphGetEdges", graph, None, None, None, ctypes.byref(count))
    if not count.value:
        return ()
    before, behind = ((ctypes.c_void_p * count.value)() for _ in range(2))
    data = (ctypes.c_uint64 * count.value)()  # a CUgraphEdgeData each
    _told("cuGraphGetEdges", graph, before, behind, data, ctypes.byref(count))
    number = {handle: place for place, handle in enumerate(handles)}
    return tuple(
        sorted((number[one], number[other], how) for one, other, how in zip(before, behind, data, strict=True))
    )


def _packed(extra: int) -> bytes:
    """The parameters of a kernel launched with one buffer; `extra` is pairs of a key and a value, ended by 0."""
    pairs = ctypes.cast(extra, ctypes.POINTER(ctypes.c_void_p))
    values: dict[int, int] = {}
    place = 0
    while key := pairs[place]:
        values[key] = pairs[place + 1] or 0
        place += 2
    if values.keys() != {BUFFER, SIZE}:
        raise NotRelocatable(f"a kernel's parameters have the keys {sorted(values)}")
    return ctypes.string_at(values[BUFFER], ctypes.c_size_t.from_address(values[SIZE]).value)


def _attributes(handle: ctypes.c_void_p) -> tuple[tuple[int, bytes], ...]:
    get_attribute, value = driver.cuGraphKernelNodeGetAttribute.unchecked, (ctypes.c_ubyte * 64)()
    attributes = []
    for name in ATTRIBUTES:
        if not get_attribute(handle, name, value):  # else this kernel or this driver lacks the attribute
            attributes.append((name, bytes(value)))
            ctypes.memset(value, 0, 64)
    return tuple(attributes)


def setter(executable: ctypes.c_void_p, handle: int, node: Node, image: int) -> tuple[Callable[[], int], Any]:
    """A function that sets the parameters of a node of an executable graph to the bytes at the address `image`.

    They apply from the next launch on. The function returns the driver's status. The second value must live as long as
    the function.
    """
    c_handle = ctypes.c_void_p(handle)
    if node.kind == KERNEL:
        func, kern, context, launch, places, _ = node.form
        params = KernelParams(func=func, launch=launch, kern=kern, ctx=context)
        if places:
            values = (ctypes.c_void_p * len(places))(*(image + offset for offset, _ in places))
            params.kernelParams = ctypes.addressof(values)
        else:
            size = ctypes.c_size_t(len(node.image))
            values = (ctypes.c_void_p * 5)(BUFFER, image, SIZE, ctypes.addressof(size), 0)
            params.extra = ctypes.addressof(values)
            values._size = size  # type: ignore[attr-defined]  # kept alive with `values`
        set_params = driver.cuGraphExecKernelNodeSetParams.unchecked_holding_gil
        return partial(set_params, executable, c_handle, ctypes.byref(params)), (params, values)
    context = ctypes.c_void_p()
    driver.cuCtxGetCurrent.unchecked_holding_gil(ctypes.byref(context))
    functions = {MEMSET: driver.cuGraphExecMemsetNodeSetParams, MEMCPY: driver.cuGraphExecMemcpyNodeSetParams}
    set_params = functions[node.kind].unchecked_holding_gil
    return partial(set_params, executable, c_handle, ctypes.c_void_p(image), context), None
