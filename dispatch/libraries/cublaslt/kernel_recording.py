"""Which kernels cuBLASLt would launch for an algorithm, and whether they round to D's dtype before the epilogue.

The library does not document where an epilogue is applied, but a recording of the call shows it: in registers after the
sums, by one kernel; in the kernel that adds up split sums; or by a kernel that reads the stored D. cublaslt.py uses
this for the products for which it matters. Nothing runs here: the recording is inspected and discarded.
"""

from __future__ import annotations

import ctypes
import re
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from cudabind import driver
from cudabind._fork import anew
from cudabind.errors import CudaError
from dispatch.execute.cuda_graph import UNTOLD
from dispatch.keys import FP8, HALF, Epilogue

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.device.stream import Stream
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cublaslt.problem import Problem

__all__ = ["LOW_PRECISION", "fuses", "kernels", "must_fuse", "must_not_accumulate"]

LOW_PRECISION = frozenset(dtype.cuda for dtype in (*HALF, *FP8))  # less precise than the sums of any compute type
# Epilogues that commute with rounding: rounding D first gives the same result.
COMMUTING = frozenset(
    (
        *(Epilogue.NONE, Epilogue.RELU, Epilogue.RELU_AUX, Epilogue.DRELU, Epilogue.DRELU_BGRAD),
        *(Epilogue.BGRADA, Epilogue.BGRADB),
    )
)
# cuBLASLt's kernel that adds up split sums, in 13.1. Its template parameters: the dtypes of the sums in memory, of C,
# of the sums, of D, a flag, and the dtype to which a sum is rounded before bias and activation. The first and the last
# must be f32.
REDUCTION = "splitKreduce_kernel"
IN_F32 = re.compile(rf"{REDUCTION}ILi\d+ELi\d+Eif[^L]*Lb[01]Ef")
MAX_TRIES = 3  # of a recording, which other threads may invalidate
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: other threads and other streams are not restricted meanwhile
KERNEL, MEMSET = 0, 2  # CUgraphNodeType
MAX_NODES = 16


def must_fuse(problem: Problem) -> bool:
    """Whether D must not be rounded before its epilogue, because that would change D."""
    return problem.d.dtype in LOW_PRECISION and not problem.reduced_precision and problem.epilogue not in COMMUTING


def must_not_accumulate(problem: Problem) -> bool:
    """Whether a product must not be rounded to D's dtype before it is added to D in place."""
    return problem.d.dtype in LOW_PRECISION and not problem.reduced_precision


def fuses(names: tuple[str, ...] | None) -> bool:
    """Whether kernels with these names apply the epilogue to sums in the compute type; False for unknown names."""
    return names is not None and sum(not IN_F32.search(name) for name in names) == 1


def kernels(executor: CudaExecutor, call: Callable[[], int]) -> tuple[str, ...] | None:
    """The names of the kernels that a call of the library launches on the executor's target; None if unknown.

    The call is recorded on a stream of its own; its operands may have any addresses.
    """
    with executor.device.context:
        for _ in range(MAX_TRIES):
            with executor.device.recordings.record():
                graph = _recorded(executor, call, _recorder(executor))
            if graph is not None:
                try:
                    return _names(graph)
                finally:
                    driver.cuGraphDestroy.unchecked(graph)
            with _lock:
                _recorders.pop(executor, None)  # the stream of a failed recording may not serve for another
    return None


_recorders: WeakKeyDictionary[CudaExecutor, Stream] = WeakKeyDictionary()
_lock = threading.RLock()  # finalizers may come in between
anew(sys.modules[__name__], "_lock", threading.RLock)


def _recorder(executor: CudaExecutor) -> Stream:
    with _lock:
        stream = _recorders.get(executor)
    if stream is None:  # only the executor's own thread asks for it
        stream = executor.device.stream()
        with _lock:
            _recorders[executor] = stream
    return stream


def _recorded(executor: CudaExecutor, call: Callable[[], int], recorder: Stream) -> ctypes.c_void_p | None:
    graph, target = ctypes.c_void_p(), executor.target.value
    # The GIL is held while a capture begins and ends. If Ctrl-C comes after its beginning, the capture is ended, too,
    # as in cuda_graph.py.
    end = partial(driver.cuStreamEndCapture.unchecked_holding_gil, recorder.c_handle, ctypes.byref(graph))
    begun, refused, lost = UNTOLD, 0, 0
    try:
        begun = driver.cuStreamBeginCapture.unchecked_holding_gil(recorder.c_handle, RELAXED)
        if not begun:
            executor.target.value = recorder.c_handle.value
            refused = call()
    finally:
        executor.target.value = target
        if begun in (0, UNTOLD):
            lost = end()
    if (refused or lost) and graph.value:
        driver.cuGraphDestroy.unchecked(graph)
    return None if begun or refused or lost else graph


def _names(graph: ctypes.c_void_p) -> tuple[str, ...] | None:
    """The names of a graph's kernels; "" for a single kernel; memset nodes are ignored."""
    try:
        nodes, count = driver.cuGraphGetNodes(driver.CUgraph(graph.value), MAX_NODES)
        kinds = [int(driver.cuGraphNodeGetType(node)) for node in nodes[: int(count)]]
        if int(count) > MAX_NODES or not {KERNEL, MEMSET}.issuperset(kinds):
            return None
        launched = [node for node, kind in zip(nodes, kinds, strict=False) if kind == KERNEL]
        return tuple(map(_name, launched)) if len(launched) > 1 else ("",) * len(launched)
    except CudaError:
        return None


def _name(node: Any) -> str:
    """A kernel's mangled name; "" with drivers before 12.3, which do not return it."""
    try:
        name = driver.cuFuncGetName(driver.cuGraphKernelNodeGetParams(node).func)
    except (CudaError, AttributeError):
        return ""
    return name.decode() if isinstance(name, bytes) else str(name)
