"""Each library's own words: its version, in every way it tells it, and a name and a text for each of its statuses."""

from __future__ import annotations

import ctypes
import importlib
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest

from cudabind import _lazy, _load, nvrtc, runtime
from cudabind.errors import CublasError, CudaError, CufftError, CusolverError, CutensorError

if TYPE_CHECKING:
    from collections.abc import Callable

    Need = Callable[..., None]

UNKNOWN = 12345
COUNTERS = {"ncclNumResults"}  # the last of an enum, which stands for no status
NEWER = {"ncclTimeout": "2.32.3"}  # the first version that has words for it

# fmt: off
# A function that spells a status as the header does.
NAMES = [
    # library       enum                function
    ("cublas",     "cublasStatus_t",   "cublasGetStatusName"),
    ("cublasLt",   "cublasStatus_t",   "cublasLtGetStatusName"),
    ("cudnn",      "cudnnStatus_t",    "cudnnGetErrorString"),
    ("cusparse",   "cusparseStatus_t", "cusparseGetErrorName"),
    ("cusparseLt", "cusparseStatus_t", "cusparseLtGetErrorName"),
    ("cutensor",   "cutensorStatus_t", "cutensorGetErrorString"),
]
# A function that has words for a status.
TEXTS = [
    ("cublas",     "cublasStatus_t",   "cublasGetStatusString"),
    ("cublasLt",   "cublasStatus_t",   "cublasLtGetStatusString"),
    ("cusparse",   "cusparseStatus_t", "cusparseGetErrorString"),
    ("cusparseLt", "cusparseStatus_t", "cusparseLtGetErrorString"),
    ("nccl",       "ncclResult_t",     "ncclGetErrorString"),
]
# A function that tells the version as one number, and what major, minor and patch count in it.
NUMBERS = [
    # module          function               weights             how it is told
    ("cublas_legacy", "cublasGetVersion",    (10000, 100, 1),    "written"),
    ("cublasLt",      "cublasLtGetVersion",  (10000, 100, 1),    "returned"),
    ("cudnn",         "cudnnGetVersion",     (10000, 100, 1),    "returned"),
    ("cufft",         "cufftGetVersion",     (1000, 100, 1),     "written"),
    ("curand",        "curandGetVersion",    (1000, 100, 1),     "written"),
    ("cusolverDn",    "cusolverGetVersion",  (1000, 100, 1),     "written"),
    ("cutensor",      "cutensorGetVersion",  (10000, 100, 1),    "returned"),
    ("nccl",          "ncclGetVersion",      (10000, 100, 1),    "written"),
]
# fmt: on

# A call that fails without a GPU: the function, what it is given (a name stands for a new one of that type), the error.
# tests/cudabind/test_errors.py has the libraries whose first call makes a handle.
ONE_DEVICE = (ctypes.c_int32 * 1)(0)
REFUSED: list[tuple[str, str, tuple[Any, ...], type[CudaError], str]] = [
    ("cufft", "cufftPlan1d", (ctypes.byref(ctypes.c_int()), 8, 0x29, 1), CufftError, "CUFFT_INTERNAL_ERROR"),
    ("cufft", "cufftDestroy", (99,), CufftError, "CUFFT_INVALID_PLAN"),
    ("cublas_legacy", "cublasInit", (), CublasError, "CUBLAS_STATUS_NOT_INITIALIZED"),
    ("cusolverRf", "cusolverRfCreate", ("cusolverRfHandle_t",), CusolverError, "CUSOLVER_STATUS_NOT_INITIALIZED"),
    (
        *("cutensorMg", "cutensorMgCreate", ("cutensorMgHandle_t", 1, ONE_DEVICE)),
        *(CutensorError, "CUTENSOR_STATUS_INSUFFICIENT_DRIVER"),
    ),
]


def of(library: str) -> Any:
    return importlib.import_module(f"cudabind.sys.{library}")


@pytest.mark.parametrize(("library", "enum", "function"), NAMES)
def test_every_status_has_the_headers_name(need: Need, library: str, enum: str, function: str) -> None:
    need(library)
    statuses = getattr(of(library), enum)
    assert len(statuses) >= 10
    said = {status.name: getattr(of(library), function)(status) for status in statuses}
    stranger = getattr(of(library), function)(UNKNOWN)
    assert stranger not in said
    # An older library does not know the statuses that newer headers added.
    strangers = {name for name, word in said.items() if word == stranger}
    assert {name for name, word in said.items() if word != name} == strangers
    newest = max(map(_lazy.key, of(library).SINCE.values()), default=_lazy.key("0"))
    assert not strangers or _lazy.key(_load.version(library)) < newest


@pytest.mark.parametrize(("library", "enum", "function"), TEXTS)
def test_every_status_has_words_of_its_own(need: Need, library: str, enum: str, function: str) -> None:
    need(library)
    version = _lazy.key(_load.version(library))
    names = COUNTERS | {name for name, since in NEWER.items() if version < _lazy.key(since)}
    statuses = [status for status in getattr(of(library), enum) if status.name not in names]
    texts = {getattr(of(library), function)(status) for status in (*statuses, UNKNOWN)}
    assert len(texts) == len(statuses) + 1
    assert all(texts)


def test_every_status_of_the_runtime_has_its_name_and_words() -> None:
    statuses = [status for status in runtime.cudaError_t if status.name != "cudaErrorApiFailureBase"]
    assert {status.name: runtime.cudaGetErrorName(status).decode() for status in statuses} == {
        status.name: status.name for status in statuses
    }
    assert all(runtime.cudaGetErrorString(status) for status in statuses)


def test_every_status_of_nvrtc_has_its_name(need: Need) -> None:
    need("nvrtc")
    said = {status.name: nvrtc.nvrtcGetErrorString(status).decode() for status in nvrtc.nvrtcResult}
    strangers = {name for name, word in said.items() if word == "NVRTC_ERROR unknown"}
    assert {name for name, word in said.items() if word != name} == strangers
    assert len(said) - len(strangers) > 10
    # cuda-python may know statuses of a newer NVRTC.
    bindings = ".".join(metadata.version("cuda-bindings").split(".")[:2])
    assert not strangers or _lazy.key(_load.version("nvrtc")) < _lazy.key(bindings)


@pytest.mark.parametrize(("module", "function", "weights", "how"), NUMBERS)
def test_the_version_is_the_same_in_every_way_to_ask(
    need: Need, module: str, function: str, weights: tuple[int, int, int], how: str
) -> None:
    library = "cublas" if module == "cublas_legacy" else module
    need(library)
    told = ctypes.c_int()
    number = getattr(of(module), function)() if how == "returned" else getattr(of(module), function)(ctypes.byref(told))
    number = told.value if how == "written" else number
    parts = map(int, _load.version(library).split("."))
    assert number == sum(part * weight for part, weight in zip(parts, weights, strict=True))


@pytest.mark.usefixtures("without_a_driver")
@pytest.mark.parametrize(("module", "function", "arguments", "error", "name"), REFUSED)
def test_what_needs_a_gpu_raises_the_librarys_own_error(
    need: Need,
    module: str,
    function: str,
    arguments: tuple[Any, ...],
    error: type[CudaError],
    name: str,
) -> None:
    library = "cublas" if module == "cublas_legacy" else module
    need(library)
    given = [ctypes.byref(getattr(of(module), each)()) if isinstance(each, str) else each for each in arguments]
    with pytest.raises(error) as caught:
        getattr(of(module), function)(*given)
    assert (caught.value.library, caught.value.function, caught.value.name) == (library, function, name)
    assert not caught.value.sticky
    assert name in str(caught.value)
