"""The CUDA driver API over cuda-python: `driver.cuMemAlloc(n)` returns the address or raises CudaDriverError.

Called by users and by `dispatch`. Types and enums are cuda-python's own. For hot paths `driver.cuGraphLaunch.unchecked`
is the driver's function itself, without argument types, and returns the status. This module never creates a context.

NVIDIA's documentation: https://docs.nvidia.com/cuda/cuda-driver-api/
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from cudabind import LIBRARIES, _load
from cudabind._cuda_python import NO_DRIVER, Call, Calls
from cudabind.errors import CudaDriverError, LibraryNotFound, SymbolNotFound
from cudabind.sys.cuda_symbols import SYMBOLS

if TYPE_CHECKING:
    from collections.abc import Callable

# These look at a state and return. Whatever waits for room on a stream must not hold the lock that a host function on
# it may need to make room, so no function that enqueues is among them, but for the two of BOUNDED: they wait where a
# stream has about a thousand launches outstanding, and are for who has fewer, and no host functions in Python.
BOUNDED = frozenset({"cuEventRecord", "cuGraphLaunch"})
NEVER_BLOCKS = BOUNDED | frozenset(
    {
        "cuCtxGetCurrent",
        "cuCtxPopCurrent",
        "cuCtxPushCurrent",
        "cuCtxSetCurrent",
        "cuEventQuery",
        "cuGraphExecKernelNodeSetParams",
        "cuGraphExecMemcpyNodeSetParams",
        "cuGraphExecMemsetNodeSetParams",
        "cuStreamBeginCapture",
        "cuStreamEndCapture",
        "cuStreamGetCaptureInfo",
        "cuStreamIsCapturing",
        "cuStreamQuery",
        "cuThreadExchangeStreamCaptureMode",
    }
)


def error(function: str, status: int) -> CudaDriverError:
    """The error for a status, for callers of `unchecked`: `raise driver.error("cuGraphLaunch", status)`."""
    from cuda.bindings import driver

    try:
        name = driver.CUresult(status).name
    except ValueError:  # a newer driver's status
        return CudaDriverError("cuda", function, status, "an unknown status")
    return CudaDriverError("cuda", function, status, name, _text(status))


def _text(status: int) -> str:
    from cuda.bindings import driver

    try:
        _, text = driver.cuGetErrorString(driver.CUresult(status))
    except RuntimeError:  # without a driver there are no words for a status, and nobody can have got one from it
        return ""
    return text.decode() if text else ""


class DriverCall(Call):
    """A driver function: checked when called; its bare forms bind when they are first read."""

    unchecked: Callable[..., int]  # releases the interpreter lock during the call
    unchecked_holding_gil: Callable[..., int]  # keeps it, which is faster; only for functions that never block

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            if name == "unchecked":
                self.unchecked = _bare(self.__name__, ctypes.CFUNCTYPE(ctypes.c_int))
                return self.unchecked
            if name == "unchecked_holding_gil" and self.__name__ in NEVER_BLOCKS:
                self.unchecked_holding_gil = _bare(self.__name__, ctypes.PYFUNCTYPE(ctypes.c_int))
                return self.unchecked_holding_gil
            raise AttributeError(f"{self.__name__} has no attribute {name!r}")


def _bare(name: str, prototype: Any) -> Any:
    """The driver's own function under the version that cuda.h gives the name, without argument types."""
    symbol = SYMBOLS.get(name, name)
    try:
        dll = _load.open("cuda")
    except LibraryNotFound as missing:
        raise LibraryNotFound("cuda", name, text=missing.text, hint=NO_DRIVER) from missing
    try:
        address = ctypes.cast(dll[symbol], ctypes.c_void_p).value
    except AttributeError as missing:
        text = f"the driver {_load.version('cuda')} ({_load.path('cuda')}) does not export {symbol}."
        hint = f"a newer driver may have it: {LIBRARIES['cuda'].install}"
        raise SymbolNotFound("cuda", name, text=text, hint=hint) from missing
    function = prototype(address)
    function.argtypes = None  # the prototype's empty list would refuse all arguments
    return function


_calls = Calls("cuda.bindings.driver", "cu", "cuda", error, DriverCall)


def symbols() -> dict[str, str]:
    """The exported symbol of each function: cuda.h gives many names a later version's symbol."""
    return {name: SYMBOLS.get(name, name) for name in _calls.functions()}


def __getattr__(name: str) -> Any:
    value = _calls.look_up(name)
    return globals().setdefault(name, value)  # one object per name, also when threads race


def __dir__() -> list[str]:
    return sorted({*globals(), *_calls.names()})
