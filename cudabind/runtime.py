"""The CUDA runtime API over cuda-python: `runtime.cudaMalloc(n)` returns the address or raises CudaRuntimeError.

Users call it; `dispatch` itself uses the driver API. Types and enums are cuda-python's, and so is the runtime: it
is linked into cuda-python, whichever libcudart is installed. cudaGetLastError and cudaPeekAtLastError return the status
instead of raising an error, because the status is their result.

NVIDIA's documentation: https://docs.nvidia.com/cuda/cuda-runtime-api/
"""

from __future__ import annotations

from typing import Any

from cudabind._cuda_python import Calls
from cudabind.errors import CudaRuntimeError

ASK_FOR_STATUS = frozenset({"cudaGetLastError", "cudaPeekAtLastError"})


def error(function: str, status: int) -> CudaRuntimeError:
    """The error for a status of the runtime API, with the runtime's text."""
    from cuda.bindings import runtime

    try:
        name = runtime.cudaError_t(status).name
    except ValueError:  # a newer runtime's status
        return CudaRuntimeError("cudart", function, status, "an unknown status")
    _, text = runtime.cudaGetErrorString(runtime.cudaError_t(status))
    return CudaRuntimeError("cudart", function, status, name, text.decode())


_calls = Calls("cuda.bindings.runtime", "cuda", "cudart", error)


def _ask(name: str) -> Any:
    from cuda.bindings import runtime

    def ask() -> Any:
        return getattr(runtime, name)()[0]

    return ask


def symbols() -> dict[str, str]:
    """The exported symbol of each function, which is the function's name."""
    return {name: name for name in _calls.functions()}


def note() -> str:
    """A note for `python -m cudabind list`, which also shows the libcudart that it found."""
    from cuda.bindings import runtime

    _, version = runtime.cudaRuntimeGetVersion()
    return f"cudabind.runtime calls cuda-python's own copy of the runtime, {version // 1000}.{version % 1000 // 10}"


def __getattr__(name: str) -> Any:
    value = _ask(name) if name in ASK_FOR_STATUS else _calls.look_up(name)
    return globals().setdefault(name, value)  # one object per name, also when threads race


def __dir__() -> list[str]:
    return sorted({*globals(), *_calls.names()})
