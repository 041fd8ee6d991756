"""The cubin of a kernel in CUDA C++: from memory, from disk, or by NVRTC.

NVRTC takes a third of a second for the smallest kernel. The cubin of a source without includes depends only on its
text, the options and NVRTC's version (NVRTC 13.5 reads no flags from the environment, as nvcc does), so it is stored on
disk.
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

    Raises NvrtcError with the compiler's messages, and LibraryNotFound if NVRTC is missing and no cubin is on disk.
    """
    if "include" in source or any("include" in option or option.startswith("-I") for option in options):
        return nvrtc.compile(source, f"{function}.cu", options).code
    from dispatch.libraries.nvrtc.kernel_cache import Entry, store

    kernel = hashlib.sha256("\0".join((source, *options)).encode()).hexdigest()
    toolchain = compiler()
    with suppress(DispatchError):  # if the folder cannot be used
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
    """NVRTC's version as a text; None without NVRTC."""
    try:
        return "NVRTC " + ".".join(map(str, nvrtc.nvrtcVersion()))
    except CudaError:
        return None
