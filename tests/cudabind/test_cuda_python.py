"""Driver, runtime, NVRTC and nvJitLink in the style of the generated modules, with and without a GPU."""

from __future__ import annotations

import ctypes
from importlib import metadata

import pytest

from cudabind import _load, driver, nvjitlink, nvrtc, runtime
from cudabind.errors import CudaDriverError, CudaRuntimeError, LibraryNotFound, NvJitLinkError, NvrtcError

KERNEL = 'extern "C" __global__ void fill(float *p) { p[threadIdx.x] = 3; }'


def has(library: str) -> bool:
    try:
        _load.open(library)
    except LibraryNotFound:
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not has("nvrtc"), reason="NVRTC is not installed")
needs_nvjitlink = pytest.mark.skipif(not has("nvJitLink"), reason="nvJitLink is not installed")
without_driver = pytest.mark.skipif(has("cuda"), reason="there is a driver here")


@without_driver
def test_a_missing_driver_is_an_error_of_ours_that_says_so() -> None:
    for call in (lambda: driver.cuInit(0), lambda: driver.cuGraphLaunch.unchecked):
        with pytest.raises(LibraryNotFound, match="no NVIDIA driver was found") as caught:
            call()
        assert caught.value.library == "cuda"
        assert caught.value.function.startswith("cu")


def test_a_status_from_a_bare_call_becomes_an_error() -> None:
    error = driver.error("cuGraphLaunch", 700)
    assert isinstance(error, CudaDriverError)
    assert (error.function, error.name, error.sticky) == ("cuGraphLaunch", "CUDA_ERROR_ILLEGAL_ADDRESS", True)
    assert driver.error("cuGraphLaunch", 123456).name == "an unknown status"


def test_types_and_enums_pass_through() -> None:
    from cuda.bindings import driver as bindings

    assert driver.CUresult is bindings.CUresult
    assert driver.CUDA_VERSION == bindings.CUDA_VERSION
    with pytest.raises(AttributeError):
        driver.cuNothing  # noqa: B018 - reading it is the test


def test_one_call_object_per_name() -> None:
    assert driver.cuMemAlloc is driver.cuMemAlloc
    assert "device" in driver.cuMemAlloc.__doc__
    assert {"cuMemAlloc", "CUresult"} <= set(dir(driver))


def test_the_bare_symbols_are_those_of_the_header_and_not_the_newest() -> None:
    symbols = driver.symbols()
    assert symbols["cuMemAlloc"] == "cuMemAlloc_v2"
    assert symbols["cuMemcpyHtoDAsync"] == "cuMemcpyHtoDAsync_v2"
    # The driver has a cuCtxSynchronize_v2 that takes a context, but the header's name still means the first.
    assert symbols["cuCtxSynchronize"] == "cuCtxSynchronize"


def test_what_may_block_cannot_be_had_with_the_lock_held() -> None:
    with pytest.raises(AttributeError, match="cuStreamSynchronize has no attribute 'unchecked_holding_gil'"):
        driver.cuStreamSynchronize.unchecked_holding_gil  # noqa: B018 - reading it is the test


@pytest.mark.gpu
def test_values_come_back_bare_and_failures_raise() -> None:
    if not has("cuda"):
        pytest.skip("no CUDA driver")
    assert driver.cuInit(0) is None
    device = driver.cuDeviceGet(0)
    driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(device))
    free, total = driver.cuMemGetInfo()
    assert 0 < free <= total
    pointer = driver.cuMemAlloc(256)
    assert int(pointer) > 0
    assert driver.cuMemFree(pointer) is None
    with pytest.raises(CudaDriverError) as caught:
        driver.cuMemAlloc(1 << 60)
    assert caught.value.name == "CUDA_ERROR_OUT_OF_MEMORY"
    assert caught.value.text == "out of memory"
    driver.cuDevicePrimaryCtxRelease(device)


@pytest.mark.gpu
def test_bare_functions_return_the_status() -> None:
    if not has("cuda"):
        pytest.skip("no CUDA driver")
    driver.cuInit(0)
    device = driver.cuDeviceGet(0)
    driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(device))
    event = ctypes.c_void_p(int(driver.cuEventCreate(0)))
    assert driver.cuEventQuery.unchecked(event) == driver.cuEventQuery.unchecked_holding_gil(event) == 0
    assert driver.cuCtxSynchronize.unchecked() == 0
    assert driver.cuEventDestroy.unchecked(event) == 0
    driver.cuDevicePrimaryCtxRelease(device)


def test_the_runtime_raises_with_its_own_words() -> None:
    if has("cuda"):
        pytest.skip("there is a driver here")
    with pytest.raises(CudaRuntimeError) as caught:
        runtime.cudaMalloc(256)
    assert (caught.value.status, caught.value.name) == (35, "cudaErrorInsufficientDriver")
    assert "driver version is insufficient" in caught.value.text
    assert runtime.cudaGetLastError() == runtime.cudaError_t.cudaErrorInsufficientDriver


def test_the_runtime_is_cuda_pythons_own_and_of_its_cuda() -> None:
    version = runtime.cudaRuntimeGetVersion()
    assert str(version // 1000) == metadata.version("cuda-bindings").split(".")[0]
    assert f"{version // 1000}.{version % 1000 // 10}" in runtime.note()


@needs_nvrtc
def test_a_list_that_is_too_short_is_no_missing_library() -> None:
    with pytest.raises(ValueError, match="nvrtcCreateProgram: List is too small: 0 < 5"):
        nvrtc.nvrtcCreateProgram(b"", b"name.cu", 5, [], [])


@needs_nvrtc
def test_nvrtc_compiles_to_what_arch_asks_for() -> None:
    cubin = nvrtc.compile(KERNEL, options=["-arch=sm_90"])
    assert (cubin.kind, cubin.code[:4], cubin.log) == ("cubin", b"\x7fELF", "")
    ptx = nvrtc.compile(KERNEL, options=["-arch=compute_90"])
    assert ptx.kind == "ptx"
    assert b".entry fill" in ptx.code
    for option in ("-dlto", "--dlink-time-opt"):
        ltoir = nvrtc.compile(KERNEL, options=["-arch=sm_90", option, "-rdc=true"])
        assert (ltoir.kind, ltoir.code[:4] == b"\x7fELF", ltoir.log) == ("ltoir", False, "")


@needs_nvrtc
def test_nvrtc_takes_headers_and_lowers_names() -> None:
    source = '#include "three.h"\ntemplate <class T> __global__ void fill(T *p) { *p = THREE; }'
    made = nvrtc.compile(source, headers={"three.h": "#define THREE 3\n"}, names=["fill<float>"])
    assert made.lowered == {"fill<float>": "_Z4fillIfEvPT_"}


@needs_nvrtc
def test_a_failed_compilation_raises_with_the_log() -> None:
    with pytest.raises(NvrtcError) as caught:
        nvrtc.compile("__global__ void fill() { nowhere(); }", name="mine.cu")
    assert caught.value.name == "NVRTC_ERROR_COMPILATION"
    assert 'mine.cu(1): error: identifier "nowhere" is undefined' in caught.value.log
    assert caught.value.log in str(caught.value)


@needs_nvrtc
@needs_nvjitlink
def test_nvjitlink_links_what_nvrtc_made() -> None:
    ptx = nvrtc.compile(KERNEL, options=["-arch=compute_90"])
    assert nvjitlink.link([("PTX", ptx.code)], ["-arch=sm_90"])[:4] == b"\x7fELF"
    ltoir = nvrtc.compile(KERNEL, options=["-arch=sm_90", "-dlto"])
    assert nvjitlink.link([("LTOIR", ltoir.code)], ["-arch=sm_90", "-lto"])[:4] == b"\x7fELF"


@needs_nvjitlink
def test_a_failed_link_raises_with_the_log() -> None:
    with pytest.raises(NvJitLinkError) as caught:
        nvjitlink.link([("PTX", b".version 8.0\nnonsense\0")], ["-arch=sm_90"])
    assert caught.value.function in ("nvJitLinkAddData", "nvJitLinkComplete")
    assert caught.value.name.startswith("NVJITLINK_ERROR_")
    assert caught.value.log


@needs_nvrtc
@needs_nvjitlink
def test_several_results_come_back_as_a_tuple() -> None:
    assert ".".join(map(str, nvrtc.nvrtcVersion())) == _load.version("nvrtc")
    assert ".".join(map(str, nvjitlink.nvJitLinkVersion())) == _load.version("nvJitLink")
