"""The map of the binding layer: which library is in which module, and what must be installed for it.

Users import a module (`from cudabind.sys import cublasLt`, `from cudabind import driver`) and call NVIDIA's functions by
NVIDIA's names. `_load` reads LIBRARIES to find a library, `python -m cudabind list` prints it. Importing this package
opens no library and needs neither a GPU nor a driver.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["LIBRARIES", "Library", "__version__"]

__version__ = "0.1.0"


class Library(NamedTuple):
    """One library: where it is bound, how it is found, and how it tells its version."""

    name: str  # NVIDIA's name; cuda.pathfinder's name too
    module: str
    soname: str
    version: str  # the function that tells the version
    version_style: str  # how it tells it: see cudabind._load.VERSION_STYLES
    install: str
    family: str = ""  # libraries of one family must come from one place and agree in version


CU13 = "pip install cudabind[cu13]"
DRIVER = "an NVIDIA GPU driver"

# fmt: off
_ROWS = (
    #       name         module                   soname                version                  style        install  family
    Library("cuda",      "cudabind.driver",       "libcuda.so.1",       "cuDriverGetVersion",    "thousands", DRIVER),
    Library("cudart",    "cudabind.runtime",      "libcudart.so.13",    "cudaRuntimeGetVersion", "thousands", CU13),
    Library("nvrtc",     "cudabind.nvrtc",        "libnvrtc.so.13",     "nvrtcVersion",          "pair",      CU13),
    Library("nvJitLink", "cudabind.nvjitlink",    "libnvJitLink.so.13", "nvJitLinkVersion",      "pair",      CU13),
    Library("cublasLt",  "cudabind.sys.cublasLt", "libcublasLt.so.13",  "cublasLtGetProperty",   "property",  CU13,    "cublas"),
)
# fmt: on

LIBRARIES: dict[str, Library] = {row.name: row for row in _ROWS}
