"""The map of the binding layer: which library is in which module, and what must be installed for it.

Users import a module (`from cudabind.sys import cublasLt`, `from cudabind import driver`) and call NVIDIA's functions
by NVIDIA's names. `_load` reads LIBRARIES to find a library, `python -m cudabind list` prints it. Importing this
package opens no library and needs neither a GPU nor a driver.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["LIBRARIES", "Library", "__version__"]

__version__ = "0.1.0"  # of both packages: `dispatch.__version__` and pyproject.toml read it here


class Library(NamedTuple):
    """One module's library: where it is bound, how it is found, how it tells its version, and what it belongs to."""

    name: str  # NVIDIA's name of what the module binds
    module: str
    sonames: str  # parted by spaces, the newest CUDA's first
    version: str  # the function that tells the version; "" where only the twin can tell it
    version_style: str  # how it tells it: see cudabind._version.STYLES
    install: str
    needs: tuple[str, ...] = ()  # what it is linked with: this process must use the very same files
    twin: str = ""  # a library of the same release: the folder and the version must be the same
    parts: str = ""  # what it loads by itself, as a pattern: must come from its own folder
    exported_by: str = ""  # the file's name, where it is not `name`

    @property
    def file(self) -> str:
        """The file's name for cuda.pathfinder and for the override, `CUDABIND_<FILE>_PATH`."""
        return self.exported_by or self.name


EXTRAS = "pip install 'cudabind[cu13]', or 'cudabind[cu12]' for CUDA 12"  # _load.install says which
DRIVER = "an NVIDIA GPU driver"
SOLVER = ("cublas", "cublasLt", "cusparse", "nvJitLink")
LT = ("cublasLt",)

# fmt: off
_ROWS = (
    #       name          module                     sonames                                   version
    #       style            install needs           twin          parts             exported_by
    Library("cuda",       "cudabind.driver",         "libcuda.so.1",                           "cuDriverGetVersion",    "thousands",     DRIVER),
    Library("cudart",     "cudabind.runtime",        "libcudart.so.13 libcudart.so.12",        "cudaRuntimeGetVersion", "thousands",     EXTRAS),
    Library("nvrtc",      "cudabind.nvrtc",          "libnvrtc.so.13 libnvrtc.so.12",          "nvrtcVersion",          "pair",          EXTRAS),
    Library("nvJitLink",  "cudabind.nvjitlink",      "libnvJitLink.so.13 libnvJitLink.so.12",  "nvJitLinkVersion",      "pair",          EXTRAS),
    Library("cublas",     "cudabind.sys.cublas",     "libcublas.so.13 libcublas.so.12",        "cublasGetProperty",     "property",      EXTRAS, LT,             "cublasLt"),
    Library("cublasXt",   "cudabind.sys.cublasXt",   "libcublas.so.13 libcublas.so.12",        "cublasGetProperty",     "property",      EXTRAS, LT,             "cublasLt",   "",               "cublas"),
    Library("cublasLt",   "cudabind.sys.cublasLt",   "libcublasLt.so.13 libcublasLt.so.12",    "cublasLtGetProperty",   "property",      EXTRAS),
    Library("cudnn",      "cudabind.sys.cudnn",      "libcudnn.so.9",                          "cudnnGetProperty",      "property",      EXTRAS, (),             "",           "libcudnn_*.so.9"),
    Library("cufft",      "cudabind.sys.cufft",      "libcufft.so.12 libcufft.so.11",          "cufftGetProperty",      "property",      EXTRAS),
    Library("curand",     "cudabind.sys.curand",     "libcurand.so.10",                        "curandGetProperty",     "property",      EXTRAS),
    Library("cusolverDn", "cudabind.sys.cusolverDn", "libcusolver.so.12 libcusolver.so.11",    "cusolverGetProperty",   "property",      EXTRAS, SOLVER,         "",           "",               "cusolver"),
    Library("cusolverSp", "cudabind.sys.cusolverSp", "libcusolver.so.12 libcusolver.so.11",    "cusolverGetProperty",   "property",      EXTRAS, SOLVER,         "",           "",               "cusolver"),
    Library("cusolverRf", "cudabind.sys.cusolverRf", "libcusolver.so.12 libcusolver.so.11",    "cusolverGetProperty",   "property",      EXTRAS, SOLVER,         "",           "",               "cusolver"),
    Library("cusolverMg", "cudabind.sys.cusolverMg", "libcusolverMg.so.12 libcusolverMg.so.11", "",                     "",              EXTRAS, SOLVER,         "cusolverDn"),
    Library("cusparse",   "cudabind.sys.cusparse",   "libcusparse.so.12",                      "cusparseGetProperty",   "property",      EXTRAS, ("nvJitLink",)),
    Library("cusparseLt", "cudabind.sys.cusparseLt", "libcusparseLt.so.0",                     "cusparseLtGetProperty", "property",      EXTRAS),
    Library("cutensor",   "cudabind.sys.cutensor",   "libcutensor.so.2",                       "cutensorGetVersion",    "returned",      EXTRAS),
    Library("cutensorMg", "cudabind.sys.cutensorMg", "libcutensorMg.so.2",                     "",                      "",              EXTRAS, ("cutensor",),  "cutensor"),
    Library("nccl",       "cudabind.sys.nccl",       "libnccl.so.2",                           "ncclGetVersion",        "ten_thousands", EXTRAS),
)
# fmt: on

LIBRARIES: dict[str, Library] = {row.name: row for row in _ROWS}
