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
    """One module's library: where it is bound, how it is found, how it tells its version, and what it is linked with."""

    name: str  # NVIDIA's name of what the module binds
    module: str
    sonames: str  # parted by spaces, the newest CUDA's first
    version: str  # the function that tells the version, or with the style "with" the library of the same release
    version_style: str  # how it tells it: see cudabind._load.VERSION_STYLES
    install: str
    needs: tuple[str, ...] = ()  # libraries that it is linked with: they must be the ones that this process uses
    exported_by: str = ""  # cuda.pathfinder's name of the file, where that is not `name`

    @property
    def file(self) -> str:
        """The name that stands for the file: cuda.pathfinder knows it, and `CUDABIND_<FILE>_PATH` overrides it."""
        return self.exported_by or self.name


EXTRA = "pip install cudabind[cu13], or cudabind[cu12] for a driver of CUDA 12"
DRIVER = "an NVIDIA GPU driver"
_SOLVER = ("cublas", "cublasLt", "cusparse", "nvJitLink")

# fmt: off
_ROWS = (
    #       name          module                     sonames                                       version                  style        install  needs                      exported_by
    Library("cuda",       "cudabind.driver",         "libcuda.so.1",                               "cuDriverGetVersion",    "thousands", DRIVER),
    Library("cudart",     "cudabind.runtime",        "libcudart.so.13 libcudart.so.12",            "cudaRuntimeGetVersion", "thousands", EXTRA),
    Library("nvrtc",      "cudabind.nvrtc",          "libnvrtc.so.13 libnvrtc.so.12",              "nvrtcVersion",          "pair",      EXTRA),
    Library("nvJitLink",  "cudabind.nvjitlink",      "libnvJitLink.so.13 libnvJitLink.so.12",      "nvJitLinkVersion",      "pair",      EXTRA),
    Library("cublas",     "cudabind.sys.cublas",     "libcublas.so.13 libcublas.so.12",            "cublasGetProperty",     "property",  EXTRA,   ("cublasLt",)),
    Library("cublasXt",   "cudabind.sys.cublasXt",   "libcublas.so.13 libcublas.so.12",            "cublasGetProperty",     "property",  EXTRA,   ("cublasLt",),             "cublas"),
    Library("cublasLt",   "cudabind.sys.cublasLt",   "libcublasLt.so.13 libcublasLt.so.12",        "cublasLtGetProperty",   "property",  EXTRA),
    Library("cudnn",      "cudabind.sys.cudnn",      "libcudnn.so.9",                              "cudnnGetProperty",      "property",  EXTRA),
    Library("cufft",      "cudabind.sys.cufft",      "libcufft.so.12 libcufft.so.11",              "cufftGetProperty",      "property",  EXTRA),
    Library("curand",     "cudabind.sys.curand",     "libcurand.so.10",                            "curandGetProperty",     "property",  EXTRA),
    Library("cusolverDn", "cudabind.sys.cusolverDn", "libcusolver.so.12 libcusolver.so.11",        "cusolverGetProperty",   "property",  EXTRA,   _SOLVER,                   "cusolver"),
    Library("cusolverSp", "cudabind.sys.cusolverSp", "libcusolver.so.12 libcusolver.so.11",        "cusolverGetProperty",   "property",  EXTRA,   _SOLVER,                   "cusolver"),
    Library("cusolverRf", "cudabind.sys.cusolverRf", "libcusolver.so.12 libcusolver.so.11",        "cusolverGetProperty",   "property",  EXTRA,   _SOLVER,                   "cusolver"),
    Library("cusolverMg", "cudabind.sys.cusolverMg", "libcusolverMg.so.12 libcusolverMg.so.11",    "cusolverDn",            "with",      EXTRA,   _SOLVER),
    Library("cusparse",   "cudabind.sys.cusparse",   "libcusparse.so.12",                          "cusparseGetProperty",   "property",  EXTRA,   ("nvJitLink",)),
    Library("cusparseLt", "cudabind.sys.cusparseLt", "libcusparseLt.so.0",                         "cusparseLtGetProperty", "property",  EXTRA),
    Library("cutensor",   "cudabind.sys.cutensor",   "libcutensor.so.2",                           "cutensorGetVersion",    "returned",  EXTRA,   ("cublasLt",)),
    Library("cutensorMg", "cudabind.sys.cutensorMg", "libcutensorMg.so.2",                         "cutensor",              "with",      EXTRA,   ("cutensor",)),
    Library("nccl",       "cudabind.sys.nccl",       "libnccl.so.2",                               "ncclGetVersion",        "decimal",   EXTRA),
)
# fmt: on

LIBRARIES: dict[str, Library] = {row.name: row for row in _ROWS}
