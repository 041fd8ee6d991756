"""Libraries that call back without a GPU: loggers, a messenger in a struct, a compiler that asks whether to go on."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from typing import TYPE_CHECKING, Any

import pytest

from cudabind import nvrtc
from cudabind.callbacks import function_type, release
from cudabind.errors import CublasError, CudaError
from cudabind.sys import cublas, cublasLt, cudnn, cusparse, nvimgcodec

if TYPE_CHECKING:
    from collections.abc import Callable


class Heard(Exception):
    """Raised inside a callback."""


def log_cublas(function: Callable[..., None] | None) -> None:
    cublas.cublasLoggerConfigure(int(function is not None), 0, 0, None)
    cublas.cublasSetLoggerCallback(function)  # type: ignore[arg-type]


def log_cublaslt(function: Callable[..., None] | None) -> None:
    cublasLt.cublasLtLoggerSetLevel(0)
    cublasLt.cublasLtLoggerSetCallback(function)  # type: ignore[arg-type]
    cublasLt.cublasLtLoggerSetLevel(5 if function else 0)


def log_cudnn(function: Callable[..., None] | None) -> None:
    cudnn.cudnnSetCallback(0xFFFF if function else 0, None, function)  # type: ignore[arg-type]


def log_cusparse(function: Callable[..., None] | None) -> None:
    cusparse.cusparseLoggerSetLevel(0)
    cusparse.cusparseLoggerSetCallback(function)  # type: ignore[arg-type]
    cusparse.cusparseLoggerSetLevel(5 if function else 0)


def call_cublas() -> None:
    with contextlib.suppress(CublasError):  # some versions want a handle, but all log the call
        cublas.cublasGetVersion_v2(None, ctypes.byref(ctypes.c_int()))


def call_cublaslt() -> None:
    made = cublasLt.cublasLtMatmulPreference_t()
    cublasLt.cublasLtMatmulPreferenceCreate(made)


def call_cudnn() -> None:
    cudnn.cudnnCreateTensorDescriptor(cudnn.cudnnTensorDescriptor_t())


def call_cusparse() -> None:
    made = cusparse.cusparseMatDescr_t()
    cusparse.cusparseCreateMatDescr(made)
    matrix = cusparse.cusparseDnVecDescr_t()
    cusparse.cusparseCreateDnVec(matrix, 3, 4096, cusparse.cudaDataType.CUDA_R_32F)


LOGGERS = {
    "cublas": (log_cublas, call_cublas, b"cublasGetVersion"),
    "cublasLt": (log_cublaslt, call_cublaslt, b"cublasLtMatmulPreferenceCreate"),
    "cudnn": (log_cudnn, call_cudnn, b"cudnnCreateTensorDescriptor"),
    "cusparse": (log_cusparse, call_cusparse, b"cusparseCreateDnVec"),
}


@pytest.mark.parametrize("library", LOGGERS)
def test_a_logger_is_called_while_its_function_is_in_no_other_hands(library: str, need: Callable[..., None]) -> None:
    need(library)
    log, call, wanted = LOGGERS[library]
    said: list[bytes] = []
    log(lambda *given: said.extend(each for each in given if isinstance(each, bytes)))
    gc.collect()
    call()
    log(None)
    assert any(wanted in text for text in said), said
    said.clear()
    call()
    assert said == []


@pytest.mark.parametrize("library", LOGGERS)
def test_what_a_logger_raises_is_raised_by_the_call_that_was_logged(library: str, need: Callable[..., None]) -> None:
    need(library)
    log, call, _ = LOGGERS[library]
    loud = [False]

    def fail(*_: object) -> None:
        if loud[0]:
            raise Heard

    log(fail)
    loud[0] = True
    with pytest.raises(Heard):
        call()
    loud[0] = False
    log(None)
    release(fail)
    call()


def test_nvimagecodec_tells_its_messenger_by_a_field_of_a_struct(need: Callable[..., None]) -> None:
    need("nvimgcodec")
    kinds, told = nvimgcodec.nvimgcodecStructureType_t, []

    def listen(_severity: int, _category: int, message: Any, _user: int | None) -> int:
        told.append(ctypes.string_at(message.contents.message))
        return 1

    wanted: Any = nvimgcodec.nvimgcodecDebugMessengerDesc_t()
    wanted.struct_type, wanted.struct_size = kinds.NVIMGCODEC_STRUCTURE_TYPE_DEBUG_MESSENGER_DESC, ctypes.sizeof(wanted)
    wanted.message_severity, wanted.message_category = 0xFFFFFFF, 0xFFFFFFF
    wanted.user_callback = listen
    kind = kinds.NVIMGCODEC_STRUCTURE_TYPE_INSTANCE_CREATE_INFO
    create = nvimgcodec.nvimgcodecInstanceCreateInfo_t(struct_type=kind, load_builtin_modules=1)
    create.struct_size = ctypes.sizeof(create)
    create.create_debug_messenger, create.debug_messenger_desc = 1, ctypes.addressof(wanted)
    made = nvimgcodec.nvimgcodecInstance_t()
    nvimgcodec.nvimgcodecInstanceCreate(made, create)
    assert told
    nvimgcodec.nvimgcodecInstanceDestroy(made)
    release(listen)


def test_nvrtc_asks_whether_to_go_on_and_hears_of_an_exception(need: Callable[..., None]) -> None:
    need("nvrtc")
    flow = function_type(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)  # the header names no type of it
    asked: list[int | None] = []

    def compile_with(callback: Any, payload: int) -> None:
        program = nvrtc.nvrtcCreateProgram(b"__global__ void f(int *x) { *x = 1; }", b"f.cu", 0, [], [])
        try:
            nvrtc.nvrtcSetFlowCallback(program, callback.address, payload)
            nvrtc.nvrtcCompileProgram(program, 0, [])
        finally:
            nvrtc.nvrtcDestroyProgram(program)

    compile_with(flow(lambda payload, _reserved: asked.append(payload) or 0), 77)
    assert set(asked) == {77}
    with pytest.raises(CudaError, match="CANCELLED"):
        compile_with(flow(lambda *_: 1), 1)

    def fail(*_: object) -> int:
        raise Heard

    with pytest.raises(Heard):
        compile_with(flow(fail), 1)
