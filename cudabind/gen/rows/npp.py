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
    )


ROWS = (
    _row("nppc", ("nppdefs.h", "nppcore.h"), ()),
    *(_row(module, headers, ("nppc",)) for module, headers in _HEADERS.items()),
)
