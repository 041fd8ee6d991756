"""The CUDA driver API over cuda-python: `driver.cuMemAlloc(n)` returns the address or raises CudaDriverError.

Users and `dispatch` call it. Types and enums are cuda-python's own. For hot paths `driver.cuGraphLaunch.unchecked` is
the driver's function itself, without argument types; it returns the status. This module never creates a context.

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

# Functions that may be called with the GIL held, because they never block. A function that blocks for room on a stream
# must not hold the GIL, which a Python host function on that stream may need to make room. So no function that enqueues
# is among them, except those in BOUNDED: they block only if a stream has about a thousand outstanding launches. Callers
# must stay below that, and use no Python host functions.
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
    except RuntimeError:  # there is no driver, so the status cannot have come from it
        return ""
    return text.decode() if text else ""


class DriverCall(Call):
    """A driver function: a call is checked; the unchecked forms are bound when they are first read."""

    unchecked: Callable[..., int]  # releases the GIL during the call
    unchecked_holding_gil: Callable[..., int]  # holds the GIL, which is faster; only for functions that never block

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
    """The driver's own function, by the versioned symbol that cuda.h gives the name, without argument types."""
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
    function.argtypes = None  # the prototype's empty list would allow no arguments
    return function


_calls = Calls("cuda.bindings.driver", "cu", "cuda", error, DriverCall)


def symbols() -> dict[str, str]:
    """The exported symbol of each function; cuda.h maps many names to a later version's symbol."""
    return {name: SYMBOLS.get(name, name) for name in _calls.functions()}


def __getattr__(name: str) -> Any:
    value = _calls.look_up(name)
    return globals().setdefault(name, value)  # one object per name, also when threads race


def __dir__() -> list[str]:
    return sorted({*globals(), *_calls.names()})
