"""The table of the binding layer: the module of each library, and what must be installed for it.

Users import a module (`from cudabind.sys import cublasLt`, `from cudabind import driver`) and call NVIDIA's functions
by NVIDIA's names. `_load` reads LIBRARIES to find a library, `python -m cudabind list` prints it. Importing this
package opens no library and needs neither a GPU nor a driver.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["LIBRARIES", "Library", "__version__"]

__version__ = "0.1.0"  # of both packages: `dispatch.__version__` and pyproject.toml read it here


class Library(NamedTuple):
    """The library of one module: how it is found, how its version is read, and which other libraries it needs."""

    name: str  # NVIDIA's name of the library
    module: str
    sonames: str  # separated by spaces, those of the newest CUDA first
    version: str  # the function that returns the version; "" if only the twin has one
    version_style: str  # how that function returns it: see cudabind._version.STYLES
    install: str
    needs: tuple[str, ...] = ()  # libraries that it is linked with: this process must use the very same files
    twin: str = ""  # a library of the same release: folder and version must be the same
    parts: str = ""  # a pattern of libraries that it loads by itself, which must come from its own folder
    exported_by: str = ""  # the file's name, if that is not `name`
    folders: str = ""  # of its wheels, below site-packages, if cuda.pathfinder does not know the library
    area: str = "the toolkit's libraries"  # under which `python -m cudabind list` shows it

    @property
    def file(self) -> str:
        """The file's name for cuda.pathfinder and for the override, `CUDABIND_<FILE>_PATH`."""
        return self.exported_by or self.name


EXTRAS = "pip install 'cudabind[cu13]', or 'cudabind[cu12]' for CUDA 12"  # _load.install chooses one
DRIVER = "an NVIDIA GPU driver"
SOLVER = ("cublas", "cublasLt", "cusparse", "nvJitLink")
LT = ("cublasLt",)

PTX_COMPILER = (
    "NVIDIA ships it as libnvptxcompiler_static.a alone, in the wheel nvidia-nvptxcompiler (CUDA 13) or "
    "nvidia-cuda-nvcc-cu12: gcc -shared -o libnvptxcompiler.so -Wl,--whole-archive libnvptxcompiler_static.a "
    "-Wl,--no-whole-archive -lstdc++ -lpthread -lm makes a library of it"
)
NPP = ("nppial", "nppicc", "nppidei", "nppif", "nppig", "nppim", "nppist", "nppisu", "nppitc", "npps")


def extras(area: str) -> str:
    """What to install for the libraries of an area; `_load.install` chooses one of the two."""
    return f"pip install 'cudabind[{area}-cu13]', or 'cudabind[{area}-cu12]' for CUDA 12"


def _in(
    area: str, folders: str = "", twin: str = "", file: str = ""
) -> tuple[str, tuple[str, ...], str, str, str, str, str]:
    """The columns from `install` on for a library of an area."""
    return (extras(area), (), twin, "", file, folders, area)


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
    # Libraries that are not part of every toolkit; each area has its own extras.
    Library("cudss",       "cudabind.sys.cudss",       "libcudss.so.1 libcudss.so.0",                 "cudssGetProperty",       "property",      *_in("solvers")),
    Library("nvjpeg",      "cudabind.sys.nvjpeg",      "libnvjpeg.so.13 libnvjpeg.so.12",             "nvjpegGetProperty",      "property",      *_in("images")),
    Library("nvjpeg2k",    "cudabind.sys.nvjpeg2k",    "libnvjpeg2k.so.0",                            "nvjpeg2kGetProperty",    "property",      *_in("images", "nvidia/nvjpeg2k/lib")),
    Library("nvtiff",      "cudabind.sys.nvtiff",      "libnvtiff.so.0",                              "nvtiffGetProperty",      "property",      *_in("images", "nvidia/nvtiff/lib")),
    Library("nvimgcodec",  "cudabind.sys.nvimgcodec",  "libnvimgcodec.so.0",                          "nvimgcodecGetProperties", "tagged_struct", *_in("images", "nvidia/nvimgcodec")),
    Library("nppc",        "cudabind.sys.nppc",        "libnppc.so.13 libnppc.so.12",                 "nppGetLibVersion",       "pointer",       *_in("npp")),
    *(Library(name,        f"cudabind.sys.{name}",     f"lib{name}.so.13 lib{name}.so.12",            "",                       "",              *_in("npp", twin="nppc")) for name in NPP),
    Library("nvcomp",      "cudabind.sys.nvcomp",      "libnvcomp.so.6 libnvcomp.so.5",               "nvcompGetProperties",    "struct",        *_in("data", "nvidia/libnvcomp/lib64 nvidia/nvcomp")),
    Library("cufile",      "cudabind.sys.cufile",      "libcufile.so.0",                              "cuFileGetVersion",       "thousands",     *_in("data")),
    Library("nvfatbin",    "cudabind.sys.nvfatbin",    "libnvfatbin.so.13 libnvfatbin.so.12",         "nvFatbinVersion",        "pair",          *_in("compilers")),
    Library("nvvm",        "cudabind.sys.nvvm",        "libnvvm.so.4 libnvvm.so",                     "12.9",                   "symbols",       *_in("compilers")),
    Library("nvptxcompiler", "cudabind.sys.nvptxcompiler", "libnvptxcompiler.so",                     "nvPTXCompilerGetVersion", "pair",         PTX_COMPILER, area="compilers"),
    Library("mathdx",      "cudabind.sys.mathdx",      "libmathdx.so.0",                              "mathdxGetVersionEx",     "triple",        *_in("compilers")),
    Library("nvml",        "cudabind.sys.nvml",        "libnvidia-ml.so.1",                           "nvmlSystemGetCudaDriverVersion_v2", "thousands", DRIVER, area="tools"),
    Library("cupti",       "cudabind.sys.cupti",       "libcupti.so.13 libcupti.so.12",               "cuptiGetVersion",        "cupti",         *_in("tools")),
    Library("sanitizer",   "cudabind.sys.sanitizer",   "libsanitizer-public.so",                      "12.9",                   "symbols",       *_in("tools", "nvidia/cu13/compute-sanitizer nvidia/cuda_sanitizer_api/compute-sanitizer")),
    Library("nvshmem",     "cudabind.sys.nvshmem",     "libnvshmem_host.so.3",                        "nvshmemx_vendor_get_version_info", "triple", *_in("distributed", file="nvshmem_host")),
    Library("cublasMp",    "cudabind.sys.cublasMp",    "libcublasmp.so.0",                            "cublasMpGetVersion",     "ten_thousands", *_in("distributed", file="cublasmp")),
    Library("cusolverMp",  "cudabind.sys.cusolverMp",  "libcusolverMp.so.0",                          "0.7.0",                  "symbols",       *_in("distributed")),
    Library("cufftMp",     "cudabind.sys.cufftMp",     "libcufftMp.so.12 libcufftMp.so.11",           "cufftGetProperty",       "property",      *_in("distributed")),
    Library("cutensorMp",  "cudabind.sys.cutensorMp",  "libcutensorMp.so.2",                          "",                       "",              EXTRAS, ("cutensor",), "cutensor", area="distributed"),
    Library("custatevec",  "cudabind.sys.custatevec",  "libcustatevec.so.1",                          "custatevecGetProperty",  "property",      *_in("quantum")),
    Library("cutensornet", "cudabind.sys.cutensornet", "libcutensornet.so.2",                         "cutensornetGetVersion",  "returned",      *_in("quantum")),
    Library("cudensitymat", "cudabind.sys.cudensitymat", "libcudensitymat.so.0",                      "cudensitymatGetVersion", "returned",      *_in("quantum")),
    Library("cupauliprop", "cudabind.sys.cupauliprop", "libcupauliprop.so.0",                         "cupaulipropGetVersion",  "returned",      *_in("quantum")),
    Library("custabilizer", "cudabind.sys.custabilizer", "libcustabilizer.so.0",                      "custabilizerGetVersion", "returned",      *_in("quantum")),
)
# fmt: on

LIBRARIES: dict[str, Library] = {row.name: row for row in _ROWS}
