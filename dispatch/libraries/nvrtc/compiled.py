"""The cubin of a kernel in CUDA C++: from memory, from disk, or by NVRTC.

NVRTC takes a third of a second for the smallest kernel. What a source that includes nothing is compiled to hangs on
its text, the options and NVRTC's version alone (NVRTC 13.5 reads no flags from the environment, as nvcc does), and lies
on disk from then on.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from functools import cache

from cudabind import nvrtc
from cudabind.errors import CudaError
from dispatch.errors import DispatchError

__all__ = ["compiled", "compiler"]


@cache
def compiled(source: str, function: str, options: tuple[str, ...]) -> bytes:
    """The cubin of `function`; `options` name its architecture, "-arch=sm_90", first.

    Raises NvrtcError with the compiler's messages, and LibraryNotFound without NVRTC where none is on disk.
    """
    if "include" in source or any("include" in option or option.startswith("-I") for option in options):
        return nvrtc.compile(source, f"{function}.cu", options).code
    from dispatch.libraries.nvrtc.kernel_cache import Entry, store

    kernel = hashlib.sha256("\0".join((source, *options)).encode()).hexdigest()
    toolchain = compiler()
    with suppress(DispatchError):  # of a folder that cannot be used
        entry = store().find(kernel, toolchain)
        if entry is not None:
            return entry.code
    started = time.monotonic()
    code = nvrtc.compile(source, f"{function}.cu", options).code
    if toolchain is not None:
        target = options[0].removeprefix("-arch=")
        seconds = round(time.monotonic() - started, 1)
        with suppress(DispatchError):
            store().put(Entry(kernel, toolchain, target, function, seconds, code))
    return code


def compiler() -> str | None:
    """NVRTC's version in words; None without NVRTC."""
    try:
        return "NVRTC " + ".".join(map(str, nvrtc.nvrtcVersion()))
    except CudaError:
        return None
