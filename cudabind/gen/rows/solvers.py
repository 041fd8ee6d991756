"""Rows of the generator: direct solvers of sparse systems."""

from __future__ import annotations

from cudabind.gen.row import Row

ROWS = (
    Row(
        module="cudss",
        headers=("cudss.h", "cudss_data_types.h", "cudss_distributed_interface.h", "cudss_threading_interface.h"),
        wheel="cudss",
        docs="https://docs.nvidia.com/cuda/cudss/functions.html",
        prefixes=("cudss",),
        status="cudssStatus_t",
        success="CUDSS_STATUS_SUCCESS",
        error="CudssError",
        uses=("cuda_types",),
        renumbered=("cudssConfigParam_t", "cudssDataParam_t", "cudssPivotType_t"),
    ),
)
