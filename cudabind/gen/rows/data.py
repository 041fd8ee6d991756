"""Rows of the generator: moving and compressing data."""

from __future__ import annotations

from cudabind.gen.row import Row

_FORMATS = ("ans", "bitcomp", "cascaded", "crc32", "deflate", "gdeflate", "gzip", "lz4", "snappy", "zstd")

ROWS = (
    Row(
        module="nvcomp",
        headers=(
            *("nvcomp/shared_types.h", "nvcomp.h", "nvcomp/version.h"),
            *(f"nvcomp/{name}.h" for name in _FORMATS),
        ),
        wheel="nvcomp",
        docs="https://docs.nvidia.com/cuda/nvcomp/c_api.html",
        prefixes=("nvcomp",),
        status="nvcompStatus_t",
        success="nvcompSuccess",
        text="nvcompGetStatusString",
        error="NvcompError",
        uses=("cuda_types",),
    ),
    Row(
        module="cufile",
        headers=("cufile.h",),
        wheel="cufile",
        docs="https://docs.nvidia.com/gpudirect-storage/api-reference-guide/",
        prefixes=("cuFile",),
        status="CUfileOpError",
        success="CU_FILE_SUCCESS",
        error="CufileError",
        returned="CUfileError",
    ),
)
