"""Rows of the generator: decoding and encoding pictures."""

from __future__ import annotations

from cudabind.gen.row import Row


def _enums(*names: str) -> str:
    """C++ takes an enum's tag for a type by itself."""
    return "".join(f"typedef enum {name} {name};\n" for name in names)


ROWS = (
    Row(
        module="nvjpeg",
        headers=("nvjpeg.h",),
        wheel="nvjpeg",
        docs="https://docs.nvidia.com/cuda/nvjpeg/",
        prefixes=("nvjpeg",),
        status="nvjpegStatus_t",
        success="NVJPEG_STATUS_SUCCESS",
        error="NvjpegError",
        uses=("cuda_types",),
    ),
    Row(
        module="nvjpeg2k",
        headers=("nvjpeg2k.h", "nvjpeg2k_version.h"),
        wheel="nvjpeg2k",
        prologue=_enums("nvjpeg2kProgOrder", "nvjpeg2kQualityType"),
        docs="https://docs.nvidia.com/cuda/nvjpeg2000/",
        prefixes=("nvjpeg2k",),
        status="nvjpeg2kStatus_t",
        success="NVJPEG2K_STATUS_SUCCESS",
        error="Nvjpeg2kError",
        uses=("cuda_types",),
    ),
    Row(
        module="nvtiff",
        headers=("nvtiff.h", "nvtiff_version.h"),
        wheel="nvtiff",
        prologue=_enums("nvtiffTagDataType"),
        docs="https://docs.nvidia.com/cuda/nvtiff/",
        prefixes=("nvtiff",),
        status="nvtiffStatus",
        success="NVTIFF_STATUS_SUCCESS",
        error="NvtiffError",
        uses=("cuda_types",),
    ),
    Row(
        module="nvimgcodec",
        headers=("nvimgcodec.h", "nvimgcodec_version.h"),
        wheel="nvimgcodec",
        docs="https://docs.nvidia.com/cuda/nvimagecodec/c_api/",
        prefixes=("nvimgcodec",),
        status="nvimgcodecStatus_t",
        success="NVIMGCODEC_STATUS_SUCCESS",
        error="NvimgcodecError",
        not_exported={"nvimgcodecExtensionModuleEntry": "for extensions to define"},
        uses=("cuda_types",),
    ),
)
