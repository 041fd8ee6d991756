"""libNVVM, nvFatbin, libmathdx, the PTX compiler, cuFFT's code for kernels: no GPU, and refusals in their own words."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cudabind import _lazy, _load
from cudabind.errors import CufftError, MathdxError, NvFatbinError, NvPtxCompilerError, NvvmError
from cudabind.sys import cufft, mathdx, nvfatbin, nvptxcompiler, nvvm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FATBIN = b"\x50\xed\x55\xba"  # how such a container begins
LAYOUT = b"-".join(
    [
        b"e-p:64:64:64-i1:8:8-i8:8:8-i16:16:16-i32:32:32-i64:64:64-i128:128:128-f32:32:32-f64:64:64",
        b"v16:16:16-v32:32:32-v64:64:64-v128:128:128-n16:32:64",
    ]
)
IR = b"""
target datalayout = "LAYOUT"
target triple = "nvptx64-nvidia-cuda"
define void @twice(ptr %p) {
  %x = load float, ptr %p
  %y = fadd float %x, %x
  store float %y, ptr %p
  ret void
}
!nvvm.annotations = !{!0}
!0 = !{ptr @twice, !"kernel", i32 1}
!nvvmir.version = !{!1}
!1 = !{i32 2, i32 0}
""".replace(b"LAYOUT", LAYOUT)
PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry nothing() { ret; }
"""


def texts(*options: bytes) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(options))(*options)


@pytest.fixture
def program(need: Callable[..., None]) -> Iterator[nvvm.nvvmProgram]:
    need("nvvm")
    made = nvvm.nvvmProgram()
    nvvm.nvvmCreateProgram(made)
    yield made
    nvvm.nvvmDestroyProgram(made)


def written(ask_size: Callable[..., None], ask: Callable[..., None], handle: object) -> bytes:
    """What a compiler writes into a buffer of the size that it tells."""
    size = ctypes.c_size_t()
    ask_size(handle, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    ask(handle, buffer)
    return buffer.raw


def compiled(program: nvvm.nvvmProgram) -> bytes:
    nvvm.nvvmAddModuleToProgram(program, IR, len(IR), b"twice.ll")
    nvvm.nvvmCompileProgram(program, 1, texts(b"-arch=compute_100"))
    return written(nvvm.nvvmGetCompiledResultSize, nvvm.nvvmGetCompiledResult, program)


def test_libnvvm_makes_ptx_of_its_ir(program: nvvm.nvvmProgram) -> None:
    major, minor = ctypes.c_int32(), ctypes.c_int32()
    nvvm.nvvmVersion(ctypes.byref(major), ctypes.byref(minor))
    assert major.value == 2
    ptx = compiled(program)
    assert b".visible .entry twice(" in ptx
    assert b".target sm_100" in ptx
    assert b"add" in ptx


def test_libnvvm_says_what_is_wrong_with_its_input(program: nvvm.nvvmProgram) -> None:
    nvvm.nvvmAddModuleToProgram(program, b"nonsense", 8, b"nonsense.ll")
    with pytest.raises(NvvmError, match=r"nvvmVerifyProgram failed with NVVM_ERROR_\w+ \(\d+\)") as caught:
        nvvm.nvvmVerifyProgram(program, 0, None)
    assert caught.value.text == nvvm.nvvmGetErrorString(nvvm.nvvmResult(caught.value.status))
    assert b"nonsense" in written(nvvm.nvvmGetProgramLogSize, nvvm.nvvmGetProgramLog, program)


@pytest.fixture
def container(need: Callable[..., None]) -> Iterator[nvfatbin.nvFatbinHandle]:
    need("nvfatbin")
    made = nvfatbin.nvFatbinHandle()
    nvfatbin.nvFatbinCreate(made, texts(b"-64"), 1)
    yield made
    nvfatbin.nvFatbinDestroy(made)


# What a transform of 64 complex numbers within a block is to be.
TRAITS = {"SIZE": 64, "DIRECTION": 1, "PRECISION": 1, "TYPE": 0, "SM": 900, "ELEMENTS_PER_THREAD": 8}


def test_cufft_gives_the_code_of_a_transform_for_kernels_of_ones_own(need: Callable[..., None]) -> None:
    need("cufft")
    if _lazy.key(_load.version("cufft")) < _lazy.key(cufft.SINCE["cufftDeviceCreate"]):
        pytest.skip(f"cuFFT {_load.version('cufft')} has no code for kernels of one's own")
    names, description, device = cufft.cufftDescriptionTrait, ctypes.c_int32(), ctypes.c_int32()
    cufft.cufftDescriptionCreate(ctypes.byref(description))
    for name, value in TRAITS.items():
        cufft.cufftDescriptionSetTraitInt64(description.value, names[f"CUFFT_DESC_TRAIT_{name}"], value)
    back, supported, count = ctypes.c_int64(), ctypes.c_bool(), ctypes.c_size_t()
    cufft.cufftDescriptionGetTraitInt64(description.value, names.CUFFT_DESC_TRAIT_SIZE, ctypes.byref(back))
    assert back.value == 64
    cufft.cufftDeviceCreate(ctypes.byref(device), 1, ctypes.byref(description))
    made = device.value
    cufft.cufftDeviceIsSupported(made, description.value, ctypes.byref(supported))
    assert supported.value
    cufft.cufftDeviceGetNumDeviceFunctions(made, description.value, ctypes.byref(count))
    functions = (ctypes.c_int32 * count.value)()
    cufft.cufftDeviceGetDeviceFunctions(made, description.value, count.value, functions)
    threads = ctypes.c_int64()
    trait = cufft.cufftDeviceFunctionTrait.CUFFT_DEVICE_FUNC_TRAIT_THREADS_PER_FFT
    cufft.cufftDeviceGetDeviceFunctionTraitInt64(made, functions[0], trait, ctypes.byref(threads))
    assert threads.value == 64 // 8
    cufft.cufftDeviceGetNumLTOIRs(made, ctypes.byref(count), functions[0])
    sizes = (ctypes.c_size_t * count.value)()
    cufft.cufftDeviceGetLTOIRSizes(made, count.value, sizes, functions[0])
    codes = [ctypes.create_string_buffer(size) for size in sizes]
    addresses, kinds = (ctypes.c_void_p * len(codes))(*map(ctypes.addressof, codes)), (ctypes.c_int32 * len(codes))()
    cufft.cufftDeviceGetLTOIRs(made, len(codes), addresses, kinds, functions[0])
    fatbin = int(cufft.cufftDeviceCodeContainer_t.CUFFT_DEVICE_FATBIN)
    assert [code.raw.startswith(FATBIN) for code in codes] == [kind == fatbin for kind in kinds]
    cufft.cufftDeviceDestroy(made)
    with pytest.raises(CufftError, match="cufftDescriptionSetTraitInt64 failed with CUFFT_"):
        cufft.cufftDescriptionSetTraitInt64(12345, names.CUFFT_DESC_TRAIT_SIZE, 64)


def test_nvfatbin_packs_ptx(container: nvfatbin.nvFatbinHandle) -> None:
    nvfatbin.nvFatbinAddPTX(container, PTX + b"\0", len(PTX) + 1, b"80", b"nothing", None)
    packed = written(nvfatbin.nvFatbinSize, nvfatbin.nvFatbinGet, container)
    assert packed.startswith(FATBIN)
    assert len(packed) > 64


def test_nvfatbin_refuses_by_name_and_in_its_own_words(container: nvfatbin.nvFatbinHandle) -> None:
    with pytest.raises(NvFatbinError) as caught:
        nvfatbin.nvFatbinAddCubin(container, b"no cubin", 8, b"80", b"wrong")
    assert caught.value.name.startswith("NVFATBIN_ERROR_")
    assert caught.value.text == nvfatbin.nvFatbinGetErrorString(nvfatbin.nvFatbinResult(caught.value.status))


@pytest.fixture
def gemm(need: Callable[..., None]) -> Iterator[ctypes.c_int64]:
    """cuBLASDx' description of a product of 32 by 16 and 16 by 8 in f32, for one block of sm_80."""
    need("mathdx")
    made = ctypes.c_int64()
    mathdx.cublasdxCreateDescriptor(ctypes.byref(made))
    operators = mathdx.cublasdxOperatorType
    for operator, value in (
        (operators.CUBLASDX_OPERATOR_FUNCTION, mathdx.cublasdxFunction.CUBLASDX_FUNCTION_MM),
        (operators.CUBLASDX_OPERATOR_TYPE, mathdx.cublasdxType.CUBLASDX_TYPE_REAL),
        (operators.CUBLASDX_OPERATOR_EXECUTION, mathdx.commondxExecution.COMMONDX_EXECUTION_BLOCK),
        (operators.CUBLASDX_OPERATOR_API, mathdx.cublasdxApi.CUBLASDX_API_SMEM),
        (operators.CUBLASDX_OPERATOR_SM, 800),
    ):
        mathdx.cublasdxSetOperatorInt64(made.value, operator, value)
    kind = int(mathdx.commondxPrecision.COMMONDX_PRECISION_F32)
    for operator, values in (
        (operators.CUBLASDX_OPERATOR_SIZE, (32, 8, 16)),
        (operators.CUBLASDX_OPERATOR_PRECISION, (kind, kind, kind)),
    ):
        mathdx.cublasdxSetOperatorInt64s(made.value, operator, 3, (ctypes.c_int64 * 3)(*values))
    yield made
    mathdx.cublasdxDestroyDescriptor(made.value)


def test_libmathdx_refuses_in_its_own_words(gemm: ctypes.c_int64) -> None:
    with pytest.raises(MathdxError) as caught:
        mathdx.cublasdxSetOperatorInt64(gemm.value, mathdx.cublasdxOperatorType.CUBLASDX_OPERATOR_SM, -1)
    assert caught.value.name == "COMMONDX_INVALID_VALUE"
    assert caught.value.text == mathdx.commondxStatusToStr(mathdx.commondxStatusType.COMMONDX_INVALID_VALUE)


@pytest.fixture(scope="module")
def ptx_compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The PTX compiler as a shared library, made as the error says."""
    archives = [file for path in sys.path for file in Path(path).glob("nvidia/*/lib/libnvptxcompiler_static.a")]
    if not archives or shutil.which("gcc") is None:
        pytest.skip("the wheel nvidia-nvptxcompiler is not installed, or gcc is not")
    made = tmp_path_factory.mktemp("ptx") / "libnvptxcompiler.so"
    link = ["-Wl,--whole-archive", str(archives[0]), "-Wl,--no-whole-archive", "-lstdc++", "-lpthread", "-lm"]
    subprocess.run(["gcc", "-shared", "-o", made, *link], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDABIND_NVPTXCOMPILER_PATH", str(made))
        yield
    _load._opened.pop("nvptxcompiler", None)


@pytest.mark.usefixtures("ptx_compiler")
def test_the_ptx_compiler_makes_a_cubin_or_says_why_not() -> None:
    handle = nvptxcompiler.nvPTXCompilerHandle()
    nvptxcompiler.nvPTXCompilerCreate(handle, len(PTX), PTX)
    nvptxcompiler.nvPTXCompilerCompile(handle, 1, texts(b"--gpu-name=sm_90"))
    ask = (nvptxcompiler.nvPTXCompilerGetCompiledProgramSize, nvptxcompiler.nvPTXCompilerGetCompiledProgram)
    assert written(*ask, handle).startswith(b"\x7fELF")
    nvptxcompiler.nvPTXCompilerDestroy(handle)
    wrong = PTX.replace(b"ret;", b"rat;")
    nvptxcompiler.nvPTXCompilerCreate(handle, len(wrong), wrong)
    with pytest.raises(NvPtxCompilerError, match="NVPTXCOMPILE_ERROR_COMPILATION_FAILURE"):
        nvptxcompiler.nvPTXCompilerCompile(handle, 1, texts(b"--gpu-name=sm_90"))
    ask = (nvptxcompiler.nvPTXCompilerGetErrorLogSize, nvptxcompiler.nvPTXCompilerGetErrorLog)
    assert b"rat" in written(*ask, handle)
    nvptxcompiler.nvPTXCompilerDestroy(handle)
