"""Rows of the generator: compilers, and what makes code at run time."""

from __future__ import annotations

from cudabind.gen.row import Row

_MATHDX = ("libcommondx.h", "libmathdx.h", "libcublasdx.h", "libcufftdx.h", "libcusolverdx.h", "libcuranddx.h")

ROWS = (
    Row(
        module="nvfatbin",
        headers=("nvFatbin.h",),
        wheel="nvfatbin",
        docs="https://docs.nvidia.com/cuda/nvfatbin/",
        prefixes=("nvFatbin",),
        status="nvFatbinResult",
        success="NVFATBIN_SUCCESS",
        text="nvFatbinGetErrorString",
        error="NvFatbinError",
    ),
    Row(
        module="nvvm",
        headers=("nvvm.h",),
        wheel="nvvm",
        docs="https://docs.nvidia.com/cuda/libnvvm-api/",
        prefixes=("nvvm",),
        status="nvvmResult",
        success="NVVM_SUCCESS",
        text="nvvmGetErrorString",
        error="NvvmError",
    ),
    Row(
        module="nvptxcompiler",
        headers=("nvPTXCompiler.h",),
        wheel="nvptxcompiler",
        docs="https://docs.nvidia.com/cuda/ptx-compiler-api/",
        prefixes=("nvPTXCompiler",),
        status="nvPTXCompileResult",
        success="NVPTXCOMPILE_SUCCESS",
        error="NvPtxCompilerError",
    ),
    Row(
        module="mathdx",
        headers=(*_MATHDX, "libnvcompdx.h"),
        wheel="mathdx",
        docs="https://docs.nvidia.com/cuda/libmathdx/",
        prefixes=("commondx", "mathdx", "cublasdx", "cufftdx", "cusolverdx", "curanddx", "nvcompdx"),
        status="commondxStatusType_t",
        success="COMMONDX_SUCCESS",
        text="commondxStatusToStr",
        error="MathdxError",
        renumbered=("commondxOption_t",),
    ),
)
