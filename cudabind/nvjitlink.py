"""nvJitLink, the run-time linker, over cuda-python: its functions by NVIDIA's names, and `link` for all steps at once.

Users and CUTLASS's rows call it. A failed link raises NvJitLinkError with the linker's log. It needs no GPU and no
driver, and it never reads a file: inputs are bytes.

NVIDIA's documentation: https://docs.nvidia.com/cuda/nvjitlink/
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from cudabind import _load
from cudabind.errors import LibraryNotFound, NvJitLinkError

if TYPE_CHECKING:
    from collections.abc import Sequence

# fmt: off
# NVIDIA's names and cuda-python's for the same functions.
NAMES = {
    "nvJitLinkCreate":               "create",
    "nvJitLinkDestroy":              "destroy",
    "nvJitLinkAddData":              "add_data",
    "nvJitLinkAddFile":              "add_file",
    "nvJitLinkComplete":             "complete",
    "nvJitLinkGetLinkedCubinSize":   "get_linked_cubin_size",
    "nvJitLinkGetLinkedCubin":       "get_linked_cubin",
    "nvJitLinkGetLinkedPtxSize":     "get_linked_ptx_size",
    "nvJitLinkGetLinkedPtx":         "get_linked_ptx",
    "nvJitLinkGetLinkedLTOIRSize":   "get_linked_ltoir_size",
    "nvJitLinkGetLinkedLTOIR":       "get_linked_ltoir",
    "nvJitLinkGetErrorLogSize":      "get_error_log_size",
    "nvJitLinkGetErrorLog":          "get_error_log",
    "nvJitLinkGetInfoLogSize":       "get_info_log_size",
    "nvJitLinkGetInfoLog":           "get_info_log",
    "nvJitLinkVersion":              "version",
}
# fmt: on


def link(inputs: Sequence[tuple[str, bytes]], options: Sequence[str]) -> bytes:
    """Link compiled pieces into one cubin.

    Args:
        inputs: each piece with its kind, by InputType's names: ``"PTX"``, ``"LTOIR"``, ``"CUBIN"``, ``"OBJECT"`` …
        options: nvJitLink's options, such as ``"-arch=sm_90a"`` and ``"-lto"``.

    Raises:
        NvJitLinkError: it does not link; ``log`` holds the linker's messages.
        LibraryNotFound: nvJitLink is not installed.
    """
    module = _module()
    handle = _call("nvJitLinkCreate", len(options), list(options))
    try:
        for index, (kind, data) in enumerate(inputs):
            kind_number = getattr(module.InputType, kind)
            _logged(handle, "nvJitLinkAddData", handle, kind_number, data, len(data), f"input {index} ({kind})")
        _logged(handle, "nvJitLinkComplete", handle)
        cubin = bytearray(_call("nvJitLinkGetLinkedCubinSize", handle))
        _call("nvJitLinkGetLinkedCubin", handle, cubin)
        return bytes(cubin)
    finally:
        _call("nvJitLinkDestroy", handle)


def _logged(handle: int, function: str, *args: Any) -> Any:
    try:
        return _call(function, *args)
    except NvJitLinkError as failed:
        log = bytearray(_call("nvJitLinkGetErrorLogSize", handle))
        _call("nvJitLinkGetErrorLog", handle, log)
        words = log.rstrip(b"\0").decode(errors="replace").strip()
        raise NvJitLinkError("nvJitLink", function, failed.status, failed.name, log=words) from failed


def _module() -> Any:
    return importlib.import_module("cuda.bindings.nvjitlink")


def _call(function: str, *args: Any) -> Any:
    """Call a function of cuda-python by NVIDIA's name, and raise our own errors."""
    module = _module()
    _load.open_override("nvJitLink")
    try:
        return getattr(module, NAMES[function])(*args)
    except module.nvJitLinkError as failed:
        name = str(failed).split(" ", maxsplit=1)[0]
        raise NvJitLinkError("nvJitLink", function, int(failed.status), f"NVJITLINK_{name}") from failed
    except RuntimeError as missing:
        text = _load.in_short(missing)
        raise LibraryNotFound("nvJitLink", function, text=text, hint=_load.install("nvJitLink")) from missing


def symbols() -> dict[str, str]:
    """The exported symbol of each function; the header's inline functions call one with the version in its name.

    Raises:
        LibraryNotFound: nvJitLink is not installed.
    """
    version = _load.version("nvJitLink").replace(".", "_")
    return {name: name if name == "nvJitLinkVersion" else f"__{name}_{version}" for name in NAMES}


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        return getattr(_module(), name)
    return globals().setdefault(name, functools.partial(_call, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *NAMES, *(name for name in dir(_module()) if not name.startswith("_"))})
