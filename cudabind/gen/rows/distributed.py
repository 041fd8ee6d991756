"""Rows of the generator: one problem on the GPUs of many processes."""

from __future__ import annotations

from cudabind.gen.row import Row

# What CUDA's C++ headers call the 16-bit types.
_NUMBERS = "".join(f"typedef struct {{ unsigned short x; }} {name};\n" for name in ("half", "__nv_bfloat16"))

_DEVICE = ("*_block", "*_warp", "*_warpgroup", "nvshmemx_qp_[!c]*", "nvshmemx_qp_char_*")

ROWS = (
    Row(
        module="nvshmem",
        headers=(
            *("nvshmem_host.h", "host/nvshmem_api.h", "host/nvshmemx_api.h", "host/nvshmem_coll_api.h"),
            *("host/nvshmemx_coll_api.h", "device_host_transport/nvshmem_constants.h"),
            *("non_abi/nvshmemx_error.h", "non_abi/nvshmem_version.h", "bootstrap_device_host/nvshmem_uniqueid.h"),
        ),
        wheel="nvshmem",
        prologue=f"#include <assert.h>\n{_NUMBERS}",
        docs="https://docs.nvidia.com/nvshmem/api/",
        prefixes=("nvshmem",),
        left_out=dict.fromkeys(
            ("nvshmem_init", "nvshmem_init_thread", "nvshmem_finalize", "nvshmemx_status_string", "nvshmemx_init_attr"),
            "inline: calls nvshmemid_hostlib_init_attr and others with what the program was compiled with",
        )
        | {"nvshmemx_status_strings": "a table of words, which C programs are compiled with"}
        | dict.fromkeys(_DEVICE, "for device code")
        | {"nvshmemi_*": "what the headers' inline functions call"},
        status="nvshmemx_status",
        success="NVSHMEMX_SUCCESS",
        error="NvshmemError",
        not_exported={"nvshmemx_signal_op": "declared, but not among the symbols of libnvshmem_host.so"},
        uses=("cuda_types",),
    ),
    Row(
        module="cublasMp",
        headers=("cublasmp.h",),
        wheel="cublasmp",
        docs="https://docs.nvidia.com/cuda/cublasmp/",
        prefixes=("cublasMp",),
        status="cublasMpStatus_t",
        success="CUBLASMP_STATUS_SUCCESS",
        text="cublasMpGetStatusString",
        error="CublasMpError",
        uses=("cuda_types", "cublas_types"),
        needs=("cublas", "nccl"),
    ),
    Row(
        module="cusolverMp",
        headers=("cusolverMp.h",),
        wheel="cusolvermp",
        docs="https://docs.nvidia.com/cuda/cusolvermp/",
        prefixes=("cusolverMp",),
        status="cusolverStatus_t",
        success="CUSOLVER_STATUS_SUCCESS",
        error="CusolverError",
        uses=("cuda_types", "cublas_types", "cusolver_types"),
        needs=("cusolver", "cublas", "nccl"),
    ),
    Row(
        module="cufftMp",
        headers=("cufft.h", "cudalibxt.h", "cufftXt.h", "cufftMp.h"),
        wheel="cufftmp",
        docs="https://docs.nvidia.com/cuda/cufftmp/",
        prologue="#define nullptr ((void *)0)\n",
        prefixes=("cufft", "__cufftMpMakeReshape"),
        status="cufftResult_t",
        success="CUFFT_SUCCESS",
        error="CufftError",
        uses=("cuda_types",),
        left_out={"cufftMpMakeReshape": "inline: calls cufftMpMakeReshape_11_4 with the version of the header"},
        inline_as={"cufftXtSetJITCallback": "__cufftXtSetJITCallback_12_7"},
    ),
    Row(
        module="cutensorMp",
        headers=("cutensorMp.h",),
        wheel="cutensor",
        prologue="#include <library_types.h>\n",
        docs="https://docs.nvidia.com/cuda/cutensor/latest/",
        prefixes=("cutensorMp",),
        status="cutensorStatus_t",
        success="CUTENSOR_STATUS_SUCCESS",
        error="CutensorError",
        uses=("cuda_types", "cutensor"),
        needs=("nccl",),
    ),
)
