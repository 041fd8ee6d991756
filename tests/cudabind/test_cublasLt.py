"""cuBLASLt itself, as far as it goes without a GPU: every symbol, versions, texts, descriptors, and a true failure."""

from __future__ import annotations

import ctypes
import inspect

import pytest

from cudabind import _bind, _lazy, _load
from cudabind.errors import CublasLtError, LibraryNotFound, SymbolNotFound
from cudabind.sys import cublasLt as lt

try:
    _load.open("cublasLt")
except LibraryNotFound as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture
def desc() -> lt.cublasLtMatmulDesc_t:
    made = lt.cublasLtMatmulDesc_t()
    lt.cublasLtMatmulDescCreate(
        ctypes.byref(made), lt.cublasComputeType_t.CUBLAS_COMPUTE_32F, lt.cudaDataType.CUDA_R_32F
    )
    return made


def test_every_function_resolves_or_its_absence_is_explained() -> None:
    dll, version = _load.open("cublasLt"), _load.version("cublasLt")
    assert {"cublasLtCreate", "cublasLtMatmul", "cublasLtMatmulAlgoGetHeuristic"} <= _bind.expected(lt, version)
    exported = {name for name, symbol in _bind.symbols(lt).items() if hasattr(dll, symbol)}
    assert _bind.expected(lt, version) <= exported
    assert not exported & lt.NOT_EXPORTED.keys()


# What each inline function is given behind the descriptor, and how much it fills.
INLINE: dict[str, tuple[str, tuple[object, ...]]] = {
    "cublasLtMatrixLayoutInit": ("cublasLtMatrixLayoutOpaque_t", (lt.cudaDataType.CUDA_R_16BF, 3, 5, 8)),
    "cublasLtGroupedMatrixLayoutInit": (
        "cublasLtMatrixLayoutOpaque_t",
        (lt.cudaDataType.CUDA_R_16BF, 2, 4096, 8192, 12288),
    ),
    "cublasLtMatmulDescInit": (
        "cublasLtMatmulDescOpaque_t",
        (lt.cublasComputeType_t.CUBLAS_COMPUTE_32F, lt.cudaDataType.CUDA_R_32F),
    ),
    "cublasLtMatrixTransformDescInit": ("cublasLtMatrixTransformDescOpaque_t", (lt.cudaDataType.CUDA_R_32F,)),
    "cublasLtEmulationDescInit": ("cublasLtEmulationDescOpaque_t", ()),
    "cublasLtMatmulPreferenceInit": ("cublasLtMatmulPreferenceOpaque_t", ()),
}


@pytest.mark.parametrize("way", ["checked", "unchecked"])
@pytest.mark.parametrize("name", INLINE)
def test_an_inline_function_fills_its_struct_as_the_exported_one_does(name: str, way: str) -> None:
    since, version = lt.SINCE.get(name), _load.version("cublasLt")
    if since is not None and _lazy.key(version) < _lazy.key(since):
        with pytest.raises(SymbolNotFound, match=since):
            getattr(lt, name)(None, *INLINE[name][1])
        return
    struct = getattr(lt, INLINE[name][0])
    filled, wanted = ((ctypes.c_uint8 * ctypes.sizeof(struct))(*[0xA5] * ctypes.sizeof(struct)) for _ in range(2))
    function = getattr(lt, name)
    result = (function if way == "checked" else function.unchecked)(ctypes.addressof(filled), *INLINE[name][1])
    assert result is (None if way == "checked" else 0)
    getattr(lt, f"{name}_internal")(ctypes.addressof(wanted), ctypes.sizeof(struct), *INLINE[name][1])
    assert bytes(filled) == bytes(wanted) != b"\xa5" * ctypes.sizeof(struct)


def test_an_inline_function_checks_its_arguments_as_the_exported_one_does() -> None:
    filled = lt.cublasLtMatmulDescOpaque_t()
    assert lt.LEFT_OUT == {}
    with pytest.raises(ctypes.ArgumentError, match="argument 4"):
        lt.cublasLtMatmulDescInit(ctypes.addressof(filled), lt.cublasComputeType_t.CUBLAS_COMPUTE_32F, "f32")
    with pytest.raises(TypeError):
        lt.cublasLtMatmulDescInit()


def test_a_function_that_returns_a_number_returns_it() -> None:
    major, minor, patch = map(int, _load.version("cublasLt").split("."))
    assert lt.cublasLtGetVersion() == major * 10000 + minor * 100 + patch


def test_a_function_that_returns_a_text_returns_str() -> None:
    status = lt.cublasStatus_t.CUBLAS_STATUS_NOT_SUPPORTED
    assert lt.cublasLtGetStatusName(status) == "CUBLAS_STATUS_NOT_SUPPORTED"
    assert "not supported" in lt.cublasLtGetStatusString(status)


def test_a_call_that_succeeds_returns_none(desc: lt.cublasLtMatmulDesc_t) -> None:
    assert lt.cublasLtMatmulDescDestroy(desc) is None


def test_an_attribute_comes_back_as_it_was_set(desc: lt.cublasLtMatmulDesc_t) -> None:
    attribute = lt.cublasLtMatmulDescAttributes_t.CUBLASLT_MATMUL_DESC_EPILOGUE
    epilogue = ctypes.c_int32(lt.cublasLtEpilogue_t.CUBLASLT_EPILOGUE_GELU_BIAS)
    lt.cublasLtMatmulDescSetAttribute(desc, attribute, ctypes.byref(epilogue), ctypes.sizeof(epilogue))
    back, written = ctypes.c_int32(), ctypes.c_size_t()
    lt.cublasLtMatmulDescGetAttribute(desc, attribute, ctypes.byref(back), ctypes.sizeof(back), ctypes.byref(written))
    assert lt.cublasLtEpilogue_t(back.value) is lt.cublasLtEpilogue_t.CUBLASLT_EPILOGUE_GELU_BIAS
    assert written.value == 4
    lt.cublasLtMatmulDescDestroy(desc)


def test_a_descriptor_is_filled_in_place_by_the_exported_init() -> None:
    opaque = lt.cublasLtMatrixLayoutOpaque_t()
    handle = lt.cublasLtMatrixLayout_t(ctypes.addressof(opaque))
    lt.cublasLtMatrixLayoutInit_internal(handle, ctypes.sizeof(opaque), lt.cudaDataType_t.CUDA_R_16BF, 64, 32, 64)
    rows = ctypes.c_uint64()
    attribute = lt.cublasLtMatrixLayoutAttribute_t.CUBLASLT_MATRIX_LAYOUT_ROWS
    lt.cublasLtMatrixLayoutGetAttribute(handle, attribute, ctypes.byref(rows), 8, None)
    assert rows.value == 64


def test_a_failed_call_raises_the_librarys_error_with_name_number_and_text(desc: lt.cublasLtMatmulDesc_t) -> None:
    attribute = lt.cublasLtMatmulDescAttributes_t.CUBLASLT_MATMUL_DESC_TRANSA
    with pytest.raises(CublasLtError) as caught:
        lt.cublasLtMatmulDescSetAttribute(desc, attribute, None, 1)
    error = caught.value
    assert (error.library, error.function) == ("cublasLt", "cublasLtMatmulDescSetAttribute")
    assert (error.status, error.name) == (7, "CUBLAS_STATUS_INVALID_VALUE")
    assert error.text == lt.cublasLtGetStatusString(lt.cublasStatus_t(7))
    assert not error.sticky
    assert "cublasLtMatmulDescSetAttribute failed with CUBLAS_STATUS_INVALID_VALUE (7)" in str(error)


def test_a_handle_without_a_gpu_is_refused_and_the_error_says_why() -> None:
    handle = lt.cublasLtHandle_t()
    if lt.cublasLtCreate.unchecked(ctypes.byref(handle)) == 0:
        lt.cublasLtDestroy(handle)
        pytest.skip("there is a GPU here")
    with pytest.raises(CublasLtError) as caught:
        lt.cublasLtCreate(ctypes.byref(handle))
    assert (caught.value.status, caught.value.name) == (1, "CUBLAS_STATUS_NOT_INITIALIZED")
    assert caught.value.text
    assert "GPU" in caught.value.hint


def test_unchecked_is_the_bare_ctypes_function_and_returns_the_status(desc: lt.cublasLtMatmulDesc_t) -> None:
    bare = lt.cublasLtMatmulDescSetAttribute.unchecked
    assert bare is lt.cublasLtMatmulDescSetAttribute.unchecked
    assert isinstance(bare, ctypes._CFuncPtr)
    assert bare(desc, 0, None, 1) == 7
    assert bare.argtypes == (lt.cublasLtMatmulDesc_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)


def test_a_handle_of_another_kind_is_refused_before_the_call(desc: lt.cublasLtMatmulDesc_t) -> None:
    with pytest.raises(ctypes.ArgumentError):
        lt.cublasLtMatrixLayoutDestroy(desc)


def test_the_signature_is_the_headers() -> None:
    parameters = list(inspect.signature(lt.cublasLtMatmul).parameters)
    assert parameters[:4] == ["lightHandle", "computeDesc", "alpha", "A"]
    assert parameters[-1] == "stream"
    assert len(parameters) == 16


def test_a_callback_is_called_by_the_library() -> None:
    said: list[bytes] = []
    callback = lt.cublasLtLoggerCallback_t(lambda _level, function, _message: said.append(function))
    lt.cublasLtLoggerSetCallback(callback)
    lt.cublasLtLoggerSetLevel(5)
    made = lt.cublasLtMatmulPreference_t()
    lt.cublasLtMatmulPreferenceCreate(made)
    lt.cublasLtMatmulPreferenceDestroy(made)
    lt.cublasLtLoggerSetLevel(0)
    lt.cublasLtLoggerSetCallback(lt.cublasLtLoggerCallback_t())
    assert b"cublasLtMatmulPreferenceCreate" in said
