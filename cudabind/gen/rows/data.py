"""Rows of the generator: moving and compressing data."""

from __future__ import annotations

from cudabind.gen.row import Row

_FORMATS = ("ans", "bitcomp", "cascaded", "crc32", "deflate", "gdeflate", "gzip", "lz4", "snappy", "zstd")

_OPTIONS = ("ANS", "Bitcomp", "Cascaded", "Deflate", "Gdeflate", "Gzip", "LZ4", "Snappy", "Zstd")
_CRC = ("AUTOSAR", "BZIP2", "C", "CD_ROM_EDC", "D", "JAMCRC", "MEF", "MPEG_2", "POSIX", "Q", "XFER")
_STRUCTS = (
    *(f"nvcompBatched{name}{way}DefaultOpts" for name in _OPTIONS for way in ("Compress", "Decompress")),
    *("nvcompCRC32", "nvcompCRC32IgnoredInputChunkBytes", *(f"nvcompCRC32_{name}" for name in _CRC)),
)

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
        left_out=dict.fromkeys(_STRUCTS, "a constant struct, for C programs to copy: its members stand in the header"),
        uses=("cuda_types",),
    ),
    Row(
        module="cufile",
        headers=("cufile.h",),
        wheel="cufile",
        docs="https://docs.nvidia.com/gpudirect-storage/api-reference-guide/",
        prefixes=("cuFile", "cufile"),
        left_out={"cufileop_status_error": "inline: a table of words, which C programs are compiled with"},
        status="CUfileOpError",
        success="CU_FILE_SUCCESS",
        error="CufileError",
        returned="CUfileError",
    ),
)
