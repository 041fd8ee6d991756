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
)
# fmt: on

# Wheels whose library calls itself by another version than the wheel's first three numbers.
TOLD: dict[tuple[str, str], str] = {("cutensor", "2.8.1"): "2.8.0"}

BASE = ("runtime", "crt", "cccl")  # the wheels that every library's headers include
