"""Rows of the generator: NPP, image and signal processing, which is twelve libraries over one of shared types."""

from __future__ import annotations

from cudabind.gen.row import Row

_DOCS = "https://docs.nvidia.com/cuda/npp/"
# fmt: off
_HEADERS = {
    "nppial":  ("nppi_arithmetic_and_logical_operations.h",),
    "nppicc":  ("nppi_color_conversion.h",),
    "nppidei": ("nppi_data_exchange_and_initialization.h",),
    "nppif":   ("nppi_filtering_functions.h",),
    "nppig":   ("nppi_geometry_transforms.h",),
    "nppim":   ("nppi_morphological_operations.h",),
    "nppist":  ("nppi_statistics_functions.h", "nppi_linear_transforms.h"),
    "nppisu":  ("nppi_support_functions.h",),
    "nppitc":  ("nppi_threshold_and_compare_operations.h",),
    "npps":    ("npps_arithmetic_and_logical_operations.h", "npps_conversion_functions.h", "npps_filtering_functions.h",
                "npps_initialization.h", "npps_statistics_functions.h", "npps_support_functions.h"),
}
# fmt: on


_WITHOUT = "declared, but NPP 13 exports only the form with a context, whose name ends in _Ctx"
_DECLARED = "declared, but not among the symbols of libnppi"
_UYVP = (
    *("I444_8u_ToUYVP_10u_P3C3R", "NV12_8u_ToUYVP_10u_P2C3R", "NV16_8u_ToUYVP_10u_P2C3R", "P010_16u_ToUYVP_10u_P3C3R"),
    *("P208_8u_ToUYVP_10u_C3C3R", "P210_16u_ToUYVP_10u_P2C3R", "UYVP_10u_ToI444_8u_C3P3R", "UYVP_10u_ToNV16_8u_C3P2R"),
    *("UYVP_10u_ToP208_8u_C3C3R", "UYVP_10u_ToV210_10u_C3C3R", "UYVP_10u_ToY410_10u_C3C3R"),
    *("UYVP_10u_ToYUV444_8u_C3C3R", "V210_10u_ToUYVP_10u_C3C3R", "Y410_10u_ToUYVP_10u_C3C3R"),
    "YUV444_8u_ToUYVP_10u_C3C3R",
)
_NOT_EXPORTED = {
    "nppial": {"*[!x]": _WITHOUT, "nppiSub_32s_C4*RSfs_Ctx": _DECLARED},
    "nppitc": {"*[!x]": _WITHOUT},
    "nppicc": {f"nppi{name}_Ctx": _DECLARED for name in _UYVP},
    "nppidei": {"nppiSet_32f_C2R": _DECLARED},
    "nppist": dict.fromkeys(
        ("nppiMagnitudeSqr_32fc32f_C1R", "nppiMagnitude_32fc32f_C1R", "nppiSqrDistanceSame_Norm_16u32f_AC4R"), _DECLARED
    ),
}


def _row(module: str, headers: tuple[str, ...], uses: tuple[str, ...]) -> Row:
    return Row(
        module=module,
        headers=headers,
        wheel="npp",
        docs=_DOCS,
        prefixes=("npp",),
        status="NppStatus",
        success="NPP_NO_ERROR",
        error="NppError",
        uses=("cuda_types", *uses),
        not_exported=_NOT_EXPORTED.get(module, {}),
    )


ROWS = (
    _row("nppc", ("nppdefs.h", "nppcore.h"), ()),
    *(_row(module, headers, ("nppc",)) for module, headers in _HEADERS.items()),
)
