"""libNVVM and nvFatbin: what they make is loaded by the driver, runs, and computes what it should."""

from __future__ import annotations

from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p, create_string_buffer

import numpy as np
import pytest

from cudabind import _load, driver, nvrtc
from cudabind.errors import CudaError, LibraryNotFound, NvvmError
from cudabind.sys import nvfatbin, nvvm

LIBRARIES = ("cuda", "nvrtc")
SOURCE = 'extern "C" __global__ void thrice(int n, float *x) { int i = threadIdx.x; if (i < n) x[i] *= 3; }'
# libNVVM reads an older IR, whose pointers have types, for architectures before Blackwell.
IR = b"""
target datalayout = "e-p:64:64:64-i1:8:8-i8:8:8-i16:16:16-i32:32:32-i64:64:64-i128:128:128-f32:32:32-f64:64:64-\
v16:16:16-v32:32:32-v64:64:64-v128:128:128-n16:32:64"
target triple = "nvptx64-nvidia-cuda"
declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
define void @thrice(i32 %n, POINTER %p) {
  %i = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %at = getelementptr float, POINTER %p, i32 %i
  %x = load float, POINTER %at
  %y = fmul float %x, 3.000000e+00
  store float %y, POINTER %at
  ret void
}
!nvvm.annotations = !{!0}
!0 = !{FUNCTION @thrice, !"kernel", i32 1}
!nvvmir.version = !{!1}
!1 = !{i32 2, i32 0}
"""


def need(name):
    try:
        _load.open(name)
    except LibraryNotFound as error:
        pytest.skip(str(error))


def written(ask_size, ask, handle):
    """What a compiler writes into a buffer of the size that it tells."""
    size = c_size_t()
    ask_size(handle, byref(size))
    buffer = create_string_buffer(size.value)
    ask(handle, buffer)
    return buffer.raw


def tripled(gpu, code):
    """What the kernel makes of an array."""
    x = np.arange(32, dtype=np.float32) - 7.25
    memory, module = gpu.array(x), driver.cuModuleLoadData(code)
    kernel = driver.cuModuleGetFunction(module, b"thrice")
    driver.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, 0, ((32, memory.ptr), (c_int, c_void_p)), 0)
    result = memory.numpy()
    driver.cuModuleUnload(module)
    assert np.array_equal(result, 3 * x)
    return True


def ptx_of(gpu):
    """PTX for this GPU, by libNVVM, from the IR that it reads."""
    reasons = []
    for pointer, function in ((b"ptr", b"ptr"), (b"float*", b"void (i32, float*)*")):
        program = nvvm.nvvmProgram()
        nvvm.nvvmCreateProgram(program)
        text = IR.replace(b"POINTER", pointer).replace(b"FUNCTION", function)
        options = (c_char_p * 1)(f"-arch=compute_{gpu.arch}".encode())
        try:
            nvvm.nvvmAddModuleToProgram(program, text, len(text), b"thrice.ll")
            nvvm.nvvmCompileProgram(program, 1, options)
            return written(nvvm.nvvmGetCompiledResultSize, nvvm.nvvmGetCompiledResult, program)
        except NvvmError as error:
            reasons.append((str(error), written(nvvm.nvvmGetProgramLogSize, nvvm.nvvmGetProgramLog, program)))
        finally:
            nvvm.nvvmDestroyProgram(program)
    raise AssertionError(reasons)


def test_a_program_in_nvvms_ir_runs(gpu):
    need("nvvm")
    ptx = ptx_of(gpu)
    try:
        assert tripled(gpu, ptx)
    except CudaError as error:
        if "UNSUPPORTED_PTX_VERSION" not in error.name:
            raise
        pytest.skip(f"libNVVM is newer than the driver: {error}")


@pytest.mark.parametrize("kind", ["cubin", "ptx"])
def test_a_container_of_nvfatbin_runs(gpu, kind):
    need("nvfatbin")
    option = f"-arch=sm_{gpu.arch}" if kind == "cubin" else f"-arch=compute_{gpu.arch}"
    code = nvrtc.compile(SOURCE, options=[option]).code
    container = nvfatbin.nvFatbinHandle()
    nvfatbin.nvFatbinCreate(container, (c_char_p * 1)(b"-64"), 1)
    if kind == "cubin":
        nvfatbin.nvFatbinAddCubin(container, code, len(code), gpu.arch.encode(), b"thrice")
    else:
        text = code.rstrip(b"\0") + b"\0"
        nvfatbin.nvFatbinAddPTX(container, text, len(text), gpu.arch.encode(), b"thrice", None)
    packed = written(nvfatbin.nvFatbinSize, nvfatbin.nvFatbinGet, container)
    nvfatbin.nvFatbinDestroy(container)
    assert packed.startswith(b"\x50\xed\x55\xba")
    assert tripled(gpu, packed)
