"""Rows of the generator: watching, profiling and checking what a GPU does."""

from __future__ import annotations

from cudabind.gen.row import Row

_CUPTI = (
    *("result", "version", "callbacks", "events", "metrics", "activity", "activity_deprecated", "driver_cbid"),
    *("runtime_cbid", "profiler_target", "profiler_host", "range_profiler", "pcsampling", "pmsampling"),
    *("sass_metrics", "target", "common"),
)
_SANITIZER = (*("result", "callbacks", "driver_cbid", "runtime_cbid", "memory", "patching", "stream", "barrier"),)

ROWS = (
    Row(
        module="nvml",
        headers=("nvml.h",),
        wheel="nvml",
        docs="https://docs.nvidia.com/deploy/nvml-api/",
        prefixes=("nvml",),
        status="nvmlReturn_enum",
        success="NVML_SUCCESS",
        text="nvmlErrorString",
        error="NvmlError",
    ),
    Row(
        module="cupti",
        headers=(
            "cupti.h",
            *(f"cupti_{name}.h" for name in _CUPTI),
            "Openacc/cupti_openacc.h",
            "Openmp/cupti_openmp.h",
        ),
        included=("cupti_nvtx_cbid.h",),
        wheel="cupti",
        docs="https://docs.nvidia.com/cupti/api/",
        prefixes=("cupti",),
        status="CUptiResult",
        success="CUPTI_SUCCESS",
        text="cuptiGetResultString",
        renumbered=("CUpti_driver_api_trace_cbid_enum", "CUpti_runtime_api_trace_cbid_enum"),
        error="CuptiError",
        uses=("cuda_types",),
    ),
    Row(
        module="sanitizer",
        headers=("sanitizer.h", *(f"sanitizer_{name}.h" for name in _SANITIZER)),
        wheel="sanitizer",
        docs="https://docs.nvidia.com/compute-sanitizer/SanitizerApi/",
        prefixes=("sanitizer",),
        status="SanitizerResult",
        success="SANITIZER_SUCCESS",
        text="sanitizerGetResultString",
        renumbered=("SANITIZER_CBID_DRIVER_API_enum", "SANITIZER_CBID_RUNTIME_API_enum"),
        error="SanitizerError",
        uses=("cuda_types",),
    ),
)
