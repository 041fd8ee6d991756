"""A graph bound to an executor: selects an engine, by heuristics or by timing, and runs it at given addresses.

Ops call `bind`. A run is one variant pack and one `cudnnBackendExecute`; cuda_executor.py records it as a CUDA graph
and launches that from the second run on. Plans belong to their executor and are not shared between threads.
"""

from __future__ import annotations

import ctypes
import hashlib
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from cudabind.sys import cudnn
from dispatch.core.request import Plan
from dispatch.execute.algorithm_cache import Algorithm
from dispatch.execute.autotune import fastest
from dispatch.libraries.cudnn.engines import Engine, Policy, Target, engines, restore_engine
from dispatch.libraries.cudnn.handle import handle_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.core.request import Argument, Request
    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype
    from dispatch.libraries.cudnn.graph import Graph, Wire
    from dispatch.libraries.cudnn.handle import Scratch

__all__ = ["GraphPlan", "bind"]

CANDIDATES = 12  # engines that autotune times
WORKSPACE = 1 << 30  # bytes of workspace that an engine may use if the request sets no limit
ALIGNED = 256  # bytes: the alignment of scratch memory
C_NUMBER: dict[str, Any] = {"f32": ctypes.c_float, "f64": ctypes.c_double, "i32": ctypes.c_int32, "i64": ctypes.c_int64}


class GraphPlan(Plan):
    """One execution plan of cuDNN, with everything but the addresses filled in.

    `places` maps each wire's unique id to the index of its address in the request's arguments. After these come the
    addresses of `extra`: tensors owned by the plan that the graph reads.
    """

    __slots__ = (
        "_constants",
        "_engine",
        "_executor",
        "_extra_addresses",
        "_handle",
        "_keep",
        "_numbers",
        "_places",
        "_scratch",
        "_scratch_addresses",
        "_scratch_sizes",
        "_scratches",
        "_uids",
    )

    def __init__(
        self,
        executor: CudaExecutor,
        row: Row,
        graph: Graph,
        places: dict[int, int],
        engine: Engine,
        extra: tuple[Tensor, ...] = (),
    ) -> None:
        super().__init__(row, capture_safe=True)
        self._keep, self._extra_addresses = extra, tuple(tensor.ptr for tensor in extra)
        self._executor, self._handle = executor, handle_of(executor)
        fixed = [wire for wire in graph.wires if wire.value is not None]
        self._constants = [_number(wire.dtype, wire.value or 0.0) for wire in fixed]
        numbers = {uid: _number(graph.wire(uid).dtype, 0.0) for uid in places if graph.wire(uid).by_value}
        self._numbers = tuple((places[uid], number) for uid, number in numbers.items())
        pointers = [uid for uid in places if uid not in numbers]
        self._places = tuple(places[uid] for uid in pointers)
        self._scratches: dict[int, Scratch] = {}
        scratch_wires = [wire for wire in graph.wires if wire.scratch]
        self._scratch_sizes = tuple(_aligned_bytes(wire) for wire in scratch_wires)
        uids = [*pointers, *numbers, *(wire.uid for wire in (*fixed, *scratch_wires))]
        self._uids = (ctypes.c_int64 * len(uids))(*uids)
        self.use_engine(engine)

    def use_engine(self, engine: Engine) -> None:
        """Use this engine from now on."""
        self._engine = engine
        ends = list(accumulate(self._scratch_sizes, initial=-(-engine.workspace // ALIGNED) * ALIGNED))
        scratch = self._handle.scratch(self._executor, ends[-1])
        start = scratch.c_ptr.value or 0
        self._scratch = self._scratches[start] = (
            scratch  # all are kept while tuning, because recorded graphs contain their addresses
        )
        self._scratch_addresses = [start + end for end in ends[:-1]]

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        arguments += self._extra_addresses
        for place, number in self._numbers:
            number.value = arguments[place]
        addresses: list[Any] = [arguments[place] for place in self._places]
        addresses += [ctypes.addressof(number) for _, number in self._numbers]
        addresses += [ctypes.addressof(number) for number in self._constants]
        addresses += self._scratch_addresses
        status = self._execute(addresses)
        if status:
            self._executor.stream.done()  # raises DeviceFault if the device is lost
            raise cudnn.cudnnBackendExecute.error(status)

    def _execute(self, addresses: list[int]) -> int:
        """Run with these addresses, in the order of the unique ids; returns the library's status."""
        handle = self._handle.follow()
        pack = cudnn.cudnnBackendDescriptor_t()
        cudnn.cudnnBackendCreateDescriptor(PACK, pack)
        try:
            self._fill(pack, (ctypes.c_void_p * len(addresses))(*addresses))
            return cudnn.cudnnBackendExecute.unchecked(handle, self._engine.plan.c, pack)
        finally:
            cudnn.cudnnBackendDestroyDescriptor.unchecked(pack)

    def _fill(self, pack: cudnn.cudnnBackendDescriptor_t, pointers: ctypes.Array[ctypes.c_void_p]) -> None:
        count = len(self._uids)
        cudnn.cudnnBackendSetAttribute(pack, UIDS, TYPE.CUDNN_TYPE_INT64, count, self._uids)
        cudnn.cudnnBackendSetAttribute(pack, POINTERS, TYPE.CUDNN_TYPE_VOID_PTR, count, pointers)
        cudnn.cudnnBackendSetAttribute(pack, SCRATCH, TYPE.CUDNN_TYPE_VOID_PTR, 1, ctypes.byref(self._scratch.c_ptr))
        cudnn.cudnnBackendFinalize(pack)

    def tune(self, request: Request, candidates: Sequence[Engine]) -> Engine:
        """Select the fastest of several engines by timing them on copies of the request's operands."""

        def run(number: int, arguments: tuple[Argument, ...]) -> None:
            self.use_engine(candidates[number])
            self.enqueue(arguments)

        best = candidates[fastest(self._executor, request, run, len(candidates))]
        self.use_engine(best)
        self._scratches = {}
        return best


PACK = cudnn.cudnnBackendDescriptorType_t.CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR
TYPE = cudnn.cudnnBackendAttributeType_t
UIDS = cudnn.cudnnBackendAttributeName_t.CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS
POINTERS = cudnn.cudnnBackendAttributeName_t.CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS
SCRATCH = cudnn.cudnnBackendAttributeName_t.CUDNN_ATTR_VARIANT_PACK_WORKSPACE


def bind(
    request: Request,
    executor: CudaExecutor,
    row: Row,
    graph: Graph,
    places: dict[int, int],
    policy: Policy,
    *,
    autotune: bool = False,
    extra: tuple[Tensor, ...] = (),
) -> GraphPlan:
    """The plan of a request that is this graph; `places` maps unique ids to indices in its arguments and `extra`.

    Raises Refused with cuDNN's message if no engine supports the graph.
    """
    target = Target(handle_of(executor).c_handle)
    if not autotune:
        return GraphPlan(executor, row, graph, places, next(engines(graph, target, policy)), extra)
    cache = executor.algorithms("cudnn")
    name = hashlib.sha256(f"{policy}{graph.text()}".encode()).hexdigest()
    cached = cache.get(request.op, name)
    engine = None if cached is None else restore_engine(cached.blob, target, policy)
    if engine is not None:
        return GraphPlan(executor, row, graph, places, engine, extra)
    executor.refuse_capture("a request with autotune=True")
    candidates = _first_engines(graph, target, policy)
    plan = GraphPlan(executor, row, graph, places, candidates[0], extra)
    if len(candidates) > 1:
        best = plan.tune(request, candidates)
        cache.put(request.op, name, Algorithm(best.saved(), best.workspace))
    return plan


def _first_engines(graph: Graph, target: Target, policy: Policy) -> list[Engine]:
    candidates = []
    for engine in engines(graph, target, policy):
        candidates.append(engine)
        if len(candidates) == CANDIDATES:
            break
    return candidates


def _aligned_bytes(wire: Wire) -> int:
    """The size of a wire in scratch memory, rounded up to the alignment of the next one."""
    reach = 1 + sum((extent - 1) * stride for extent, stride in zip(wire.dims, wire.strides, strict=True))
    return -(-reach * wire.dtype.itemsize // ALIGNED) * ALIGNED


def _number(dtype: Dtype, value: float) -> Any:
    if dtype.name in ("f16", "bf16"):
        bits = dtype.numpy.type(value)
        return ctypes.c_uint16.from_buffer_copy(bits.tobytes())
    kind = C_NUMBER[dtype.name]
    return kind(value if kind in (ctypes.c_float, ctypes.c_double) else int(value))
