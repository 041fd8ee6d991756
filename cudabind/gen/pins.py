"""Where the headers come from: one row for each pinned wheel, with its version in each CUDA release."""

from __future__ import annotations

from typing import NamedTuple

# CUDA releases, oldest first. A library between two columns counts as the older one. So a struct that changed between
# two needs a column for the first release that has it as it is now: 13.1 is here for cublasLtMatrixLayoutOpaque_t.
RELEASES = ("12.9", "13.0", "13.1", "13.5")


class Pins(NamedTuple):
    """The package that a library's headers come from, for each major version of CUDA, and its version per release."""

    library: str
    cu12: str
    cu13: str
    versions: tuple[str, str, str, str]


# fmt: off
WHEELS = (
    #    library       CUDA 12                     CUDA 13                     12.9          13.0         13.1
    #    13.5
    Pins("runtime",    "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime",    ("12.9.79",    "13.0.96",   "13.1.80",   "13.5.37")),
    Pins("crt",        "nvidia-cuda-nvcc-cu12",    "nvidia-cuda-crt",        ("12.9.86",    "13.0.88",   "13.1.80",   "13.5.37")),
    Pins("cccl",       "nvidia-cuda-cccl-cu12",    "nvidia-cuda-cccl",       ("12.9.27",    "13.0.85",   "13.1.78",   "13.3.5.0.6")),
    Pins("cublas",     "nvidia-cublas-cu12",       "nvidia-cublas",          ("12.9.1.4",   "13.1.0.3",  "13.2.0.9",  "13.10.0.20")),
    Pins("cudnn",      "nvidia-cudnn-cu12",        "nvidia-cudnn-cu13",      ("9.10.2.21",  "9.19.0.56", "9.23.2.1",  "9.28.0.42")),
    Pins("cufft",      "nvidia-cufft-cu12",        "nvidia-cufft",           ("11.4.1.4",   "12.0.0.61", "12.1.0.31", "12.5.0.14")),
    Pins("curand",     "nvidia-curand-cu12",       "nvidia-curand",          ("10.3.10.19", "10.4.0.35", "10.4.1.34", "10.4.5.25")),
    Pins("cusolver",   "nvidia-cusolver-cu12",     "nvidia-cusolver",        ("11.7.5.82",  "12.0.4.66", "12.0.7.41", "12.4.1.2")),
    Pins("cusparse",   "nvidia-cusparse-cu12",     "nvidia-cusparse",        ("12.5.10.65", "12.6.3.3",  "12.7.2.19", "12.9.4.2")),
    Pins("cusparseLt", "nvidia-cusparselt-cu12",   "nvidia-cusparselt-cu13", ("0.7.1",      "0.8.0",     "0.8.1",     "0.10.0")),
    Pins("cutensor",   "cutensor-cu12",            "cutensor-cu13",          ("2.2.0",      "2.3.1",     "2.5.0",     "2.8.1")),
    Pins("nccl",       "nvidia-nccl-cu12",         "nvidia-nccl-cu13",       ("2.26.5",     "2.28.9",    "2.29.7",    "2.32.3")),
    # libraries beside those of every toolkit, by area
    Pins("cudss",         "nvidia-cudss-cu12",              "nvidia-cudss-cu13",         ("0.5.0.16", "0.7.0.20", "0.7.1.6", "1.0.0.35")),
    Pins("nvjpeg",        "nvidia-nvjpeg-cu12",             "nvidia-nvjpeg",             ("12.4.0.76", "13.0.1.86", "13.0.3.75", "13.3.2.43")),
    Pins("nvjpeg2k",      "nvidia-nvjpeg2k-cu12",           "nvidia-nvjpeg2k-cu13",      ("0.9.0.43", "0.9.0.43", "0.9.1.47", "0.11.0.51")),
    Pins("nvtiff",        "nvidia-nvtiff-cu12",             "nvidia-nvtiff-cu13",        ("0.6.0.78", "0.6.0.78", "0.7.0.79", "0.8.0.82")),
    Pins("nvimgcodec",    "nvidia-nvimgcodec-cu12",         "nvidia-nvimgcodec-cu13",    ("0.6.0.32", "0.6.0.32", "0.7.0.11", "0.9.0.20")),
    Pins("npp",           "nvidia-npp-cu12",                "nvidia-npp",                ("12.4.1.87", "13.0.1.2", "13.0.3.3", "13.2.0.93")),
    Pins("nvcomp",        "nvidia-libnvcomp-cu12",          "nvidia-libnvcomp-cu13",     ("5.1.0.21", "5.1.0.21", "5.2.0.13", "6.0.0.12")),
    Pins("cufile",        "nvidia-cufile-cu12",             "nvidia-cufile",             ("1.14.1.1", "1.15.1.6", "1.16.1.26", "1.20.0.107")),
    Pins("nvfatbin",      "nvidia-nvfatbin-cu12",           "nvidia-nvfatbin",           ("12.9.82", "13.0.85", "13.1.115", "13.5.37")),
    Pins("nvvm",          "nvidia-cuda-nvcc-cu12",          "nvidia-nvvm",               ("12.9.86", "13.0.88", "13.1.115", "13.5.37")),
    Pins("nvptxcompiler", "nvidia-cuda-nvcc-cu12",          "nvidia-nvptxcompiler",      ("12.9.86", "13.0.88", "13.1.115", "13.5.37")),
    Pins("mathdx",        "nvidia-libmathdx-cu12",          "nvidia-libmathdx-cu13",     ("0.2.3.14", "0.3.0.13", "0.3.1.9", "0.4.2.37")),
    Pins("nvml",          "nvidia-nvml-dev-cu12",           "nvidia-nvml-dev",           ("12.9.79", "13.0.87", "13.1.115", "13.5.37")),
    Pins("cupti",         "nvidia-cuda-cupti-cu12",         "nvidia-cuda-cupti",         ("12.9.79", "13.0.85", "13.1.115", "13.5.25")),
    Pins("sanitizer",     "nvidia-cuda-sanitizer-api-cu12", "nvidia-cuda-sanitizer-api", ("12.9.79", "13.0.85", "13.1.118", "13.5.25")),
    Pins("nvshmem",       "nvidia-nvshmem-cu12",            "nvidia-nvshmem-cu13",       ("3.3.24", "3.3.24", "3.4.5", "3.8.0")),
    Pins("cublasmp",      "nvidia-cublasmp-cu12",           "nvidia-cublasmp-cu13",      ("0.5.1.65", "0.6.0.84", "0.7.0.125", "0.10.0.3695")),
    Pins("cusolvermp",    "nvidia-cusolvermp-cu12",         "nvidia-cusolvermp-cu13",    ("0.7.0.833", "0.7.0.833", "0.7.2.888", "0.9.1.9318")),
    Pins("cufftmp",       "nvidia-cufftmp-cu12",            "nvidia-cufftmp-cu13",       ("11.4.0.6.post1", "12.1.3.2", "12.1.3.2", "12.1.3.2")),
    Pins("custatevec",    "custatevec-cu12",                "custatevec-cu13",           ("1.11.0", "1.11.0", "1.12.0", "1.15.0")),
    Pins("cutensornet",   "cutensornet-cu12",               "cutensornet-cu13",          ("2.9.0", "2.9.0", "2.10.0", "2.14.0")),
    Pins("cudensitymat",  "cudensitymat-cu12",              "cudensitymat-cu13",         ("0.3.0", "0.3.0", "0.4.0", "0.7.0")),
    Pins("cupauliprop",   "cupauliprop-cu12",               "cupauliprop-cu13",          ("0.1.0", "0.1.0", "0.2.0", "0.5.0")),
    Pins("custabilizer",  "custabilizer-cu12",              "custabilizer-cu13",         ("0.1.0", "0.1.0", "0.2.0", "0.5.0")),
)
# fmt: on

# Wheels whose library calls itself by another version than the wheel's first three numbers.
TOLD: dict[tuple[str, str], str] = {("cutensor", "2.8.1"): "2.8.0"}
TOLD |= {("cufile", number): number.rsplit(".", 2)[0] for number in ("1.14.1.1", "1.15.1.6", "1.16.1.26", "1.20.0.107")}

# Wheels whose library tells the CUDA release that it belongs to, instead of a version of its own.
BY_RELEASE = ("runtime", "nvfatbin", "nvvm", "nvptxcompiler", "nvml", "cupti", "sanitizer")

BASE = ("runtime", "crt", "cccl")  # the wheels that every library's headers include
