"""What an error carries, and that it arrives whole in another process."""

from __future__ import annotations

import pickle

import pytest

from cudabind import errors

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


def test_a_librarys_own_status_is_never_sticky() -> None:
    assert not errors.CublasLtError("cublasLt", "cublasLtMatmul", 700).sticky
