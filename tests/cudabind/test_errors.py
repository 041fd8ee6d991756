"""What an error carries, and that it arrives whole in another process."""

from __future__ import annotations

import ctypes
import importlib
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cudabind
from cudabind import _load, errors
from cudabind.errors import (
    CublasError,
    CublasLtError,
    CudnnError,
    CurandError,
    CusolverError,
    CusparseError,
    CusparseLtError,
    CutensorError,
    NcclError,
)

ALL = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.CudaError)]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_an_error_survives_pickling(kind: type[errors.CudaError]) -> None:
    error = kind("lib", "libDo", 700, "LIB_BAD", "it is bad", "do not")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)


def test_a_compilers_log_survives_pickling_too() -> None:
    error = errors.NvrtcError("nvrtc", "nvrtcCompileProgram", 6, "NVRTC_ERROR_COMPILATION", log="line 1: no")
    assert pickle.loads(pickle.dumps(error)).log == "line 1: no"
    assert str(error).endswith("\nline 1: no")


def test_the_text_names_library_function_status_and_hint() -> None:
    error = errors.CublasLtError(
        "cublasLt", "cublasLtMatmul", 15, "CUBLAS_STATUS_NOT_SUPPORTED", "not supported", "try"
    )
    assert str(error) == (
        "cublasLt: cublasLtMatmul failed with CUBLAS_STATUS_NOT_SUPPORTED (15): not supported. Hint: try"
    )


def test_a_class_has_hints_of_its_own() -> None:
    error = errors.CudaDriverError("cuda", "cuMemAlloc", 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
    assert error.hint == "free memory or make the request smaller"


@pytest.mark.parametrize("kind", [errors.CudaDriverError, errors.CudaRuntimeError])
@pytest.mark.parametrize(
    ("status", "sticky"),
    [
        (1, False),
        (2, False),
        (209, False),
        (600, False),
        (700, True),
        (702, True),
        (709, False),
        (710, True),
        (719, True),
    ],
)
def test_only_what_loses_the_process_is_sticky(kind: type[errors.CudaError], status: int, sticky: bool) -> None:
    error = kind("cuda", "cuStreamSynchronize", status, "CUDA_ERROR_SOMETHING")
    assert error.sticky is sticky
    assert ("start a new one" in str(error)) is sticky


LIBRARY_ERRORS = [kind for kind in ALL if kind.HINTS and kind not in (errors.CudaDriverError, errors.CudaRuntimeError)]


@pytest.mark.parametrize("kind", LIBRARY_ERRORS, ids=lambda kind: kind.__name__)
def test_a_librarys_own_status_is_never_sticky(kind: type[errors.CudaError]) -> None:
    for status in (1, 13, 700, 719):
        assert not kind("lib", "libDo", status).sticky


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (errors.CublasError, "CUBLAS_STATUS_EXECUTION_FAILED"),
        (errors.CublasLtError, "CUBLAS_STATUS_EXECUTION_FAILED"),
        (errors.CudnnError, "CUDNN_STATUS_EXECUTION_FAILED"),
        (errors.CufftError, "CUFFT_EXEC_FAILED"),
        (errors.CurandError, "CURAND_STATUS_LAUNCH_FAILURE"),
        (errors.CusolverError, "CUSOLVER_STATUS_EXECUTION_FAILED"),
        (errors.CusparseError, "CUSPARSE_STATUS_EXECUTION_FAILED"),
        (errors.CusparseLtError, "CUSPARSE_STATUS_EXECUTION_FAILED"),
        (errors.CutensorError, "CUTENSOR_STATUS_EXECUTION_FAILED"),
        (errors.NcclError, "ncclUnhandledCudaError"),
    ],
)
def test_what_may_be_a_fault_says_how_to_find_out(kind: type[errors.CudaError], name: str) -> None:
    assert "driver.cuCtxSynchronize()" in kind("lib", "libDo", 1, name).hint


def test_every_hint_is_for_a_status_that_a_header_has() -> None:
    """A hint under a name that no library gives would never be seen; the names are those of the bindings."""
    sources = Path(str(cudabind.__file__)).parent.glob("sys/*.py")
    known = {name for source in sources for name in re.findall(r"\w+", source.read_text())}
    for module in ("driver", "runtime", "nvrtc", "nvjitlink"):
        for value in vars(importlib.import_module(f"cuda.bindings.{module}")).values():
            known.update(getattr(value, "__members__", ()))
    known.update([f"NVJITLINK_{name}" for name in known])  # cuda-python leaves out that prefix
    for kind in ALL:
        assert set(kind.HINTS) <= known, kind


def has(library: str) -> bool:
    try:
        _load.open(library)
    except errors.LibraryNotFound:
        return False
    return True


# The first call that needs a GPU: the library, the function, the kind of what it makes, more arguments, what is raised.
# fmt: off
RNG = (100,)  # CURAND_RNG_PSEUDO_DEFAULT
FIRST_CALLS = [
    ("cublas", "cublasCreate_v2", "cublasHandle_t", (), CublasError, "CUBLAS_STATUS_NOT_INITIALIZED"),
    ("cublasLt", "cublasLtCreate", "cublasLtHandle_t", (), CublasLtError, "CUBLAS_STATUS_NOT_INITIALIZED"),
    ("cudnn", "cudnnCreate", "cudnnHandle_t", (), CudnnError, "CUDNN_STATUS_NOT_INITIALIZED"),
    ("curand", "curandCreateGenerator", "curandGenerator_t", RNG, CurandError, "CURAND_STATUS_INITIALIZATION_FAILED"),
    ("cusolverDn", "cusolverDnCreate", "cusolverDnHandle_t", (), CusolverError, "CUSOLVER_STATUS_NOT_INITIALIZED"),
    ("cusolverSp", "cusolverSpCreate", "cusolverSpHandle_t", (), CusolverError, "CUSOLVER_STATUS_NOT_INITIALIZED"),
    ("cusparse", "cusparseCreate", "cusparseHandle_t", (), CusparseError, "CUSPARSE_STATUS_NOT_INITIALIZED"),
    ("cusparseLt", "cusparseLtInit", "cusparseLtHandle_t", (), CusparseLtError, "CUSPARSE_STATUS_NOT_INITIALIZED"),
    ("cutensor", "cutensorCreate", "cutensorHandle_t", (), CutensorError, "CUTENSOR_STATUS_CUDA_ERROR"),
    ("nccl", "ncclCommInitAll", "ncclComm_t", (1, None), NcclError, "ncclUnhandledCudaError"),
]
# fmt: on


@pytest.mark.parametrize(("library", "function", "kind", "more", "error", "name"), FIRST_CALLS)
def test_without_a_driver_the_library_itself_says_so(
    library: str, function: str, kind: str, more: tuple[object, ...], error: type[errors.CudaError], name: str
) -> None:
    if not has(library):
        pytest.skip(f"{library} is not installed: {_load.install(library)}")
    if has("cuda"):
        pytest.skip("there is a driver here")
    module = importlib.import_module(f"cudabind.sys.{library}")
    made = getattr(module, kind)()
    with pytest.raises(error) as caught:
        getattr(module, function)(ctypes.byref(made), *more)
    assert type(caught.value) is error
    assert (caught.value.library, caught.value.function, caught.value.name) == (library, function, name)
    assert caught.value.hint
    assert not caught.value.sticky


def test_the_name_is_not_said_twice() -> None:
    error = errors.CudnnError("cudnn", "cudnnCreate", 2000, "CUDNN_STATUS_BAD_PARAM", "CUDNN_STATUS_BAD_PARAM", "try")
    assert str(error) == "cudnn: cudnnCreate failed with CUDNN_STATUS_BAD_PARAM (2000). Hint: try"


# In a process of its own: after a fault no CUDA call of a process works again.
FAULT = """
import ctypes, json, sys
from cudabind import driver, nvrtc
from cudabind.errors import CudaError
from cudabind.sys import cublas, cufft, curand

def outcome(call, *arguments):
    try:
        return [call(*arguments), None]
    except CudaError as error:
        return [error.sticky, "driver.cuCtxSynchronize()" in error.hint]

driver.cuInit(0)
driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(driver.cuDeviceGet(0)))
handle, generator, plan = cublas.cublasHandle_t(), curand.curandGenerator_t(), ctypes.c_int32()
cublas.cublasCreate_v2(ctypes.byref(handle))
curand.curandCreateGenerator(ctypes.byref(generator), 100)
cufft.cufftPlan1d(ctypes.byref(plan), 64, cufft.cufftType.CUFFT_C2C, 1)
memory, one = int(driver.cuMemAlloc(1 << 16)), ctypes.c_float(1)
calls = {
    "cublas": (cublas.cublasSscal_v2, handle, 64, ctypes.byref(one), memory, 1),
    "cufft": (cufft.cufftExecC2C, plan, memory, memory, -1),
    "curand": (curand.curandGenerateUniform, generator, memory, 64),
}
before = {name: outcome(*call) for name, call in calls.items()} | {"driver": outcome(driver.cuCtxSynchronize)}
major = driver.cuDeviceGetAttribute(driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0)
source = 'extern "C" __global__ void bad(int *p) { p[threadIdx.x] = 1; }'
module = driver.cuModuleLoadData(nvrtc.compile(source, options=[f"-arch=compute_{major}0"]).code)
bad = driver.cuModuleGetFunction(module, b"bad")
driver.cuLaunchKernel(bad, 1, 1, 1, 32, 1, 1, 0, 0, ((8,), (ctypes.c_void_p,)), 0)
fault = outcome(driver.cuCtxSynchronize)
after = {name: outcome(*call) for name, call in calls.items()} | {"driver": outcome(driver.cuCtxSynchronize)}
json.dump({"before": before, "fault": fault, "after": after}, sys.stdout)
"""


@pytest.mark.gpu
def test_after_a_fault_only_the_driver_says_that_the_process_is_lost() -> None:
    for library in ("cuda", "nvrtc", "cublas", "cufft", "curand"):
        if not has(library):
            pytest.skip(f"{library} is not installed: {_load.install(library)}")
    done = subprocess.run([sys.executable, "-c", FAULT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert all(outcome == [None, None] for outcome in said["before"].values())
    lost, ask = [True, False], [False, True]
    assert said["fault"] == lost
    assert said["after"] == {"cublas": ask, "cufft": ask, "curand": ask, "driver": lost}
