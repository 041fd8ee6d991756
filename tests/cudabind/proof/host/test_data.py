"""What the libraries of pictures, data and tools do without a GPU: they read headers, and refuse cleanly."""

from __future__ import annotations

import ctypes
import io
from typing import TYPE_CHECKING

import pytest

from cudabind import _load
from cudabind.errors import CudssError, CufileError, CuptiError, LibraryNotFound, NvcompError, NvjpegError
from cudabind.sys import cudss, cufile, cupti, nppc, npps, nvcomp, nvimgcodec, nvjpeg, nvml, nvtiff

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def instance(need: Callable[..., None]) -> Iterator[nvimgcodec.nvimgcodecInstance_t]:
    need("nvimgcodec")
    kind = nvimgcodec.nvimgcodecStructureType_t.NVIMGCODEC_STRUCTURE_TYPE_INSTANCE_CREATE_INFO
    wanted = nvimgcodec.nvimgcodecInstanceCreateInfo_t(struct_type=kind, load_builtin_modules=1)
    wanted.struct_size = ctypes.sizeof(wanted)
    made = nvimgcodec.nvimgcodecInstance_t()
    nvimgcodec.nvimgcodecInstanceCreate(made, wanted)
    yield made
    nvimgcodec.nvimgcodecInstanceDestroy(made)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "BMP"])
def test_nvimagecodec_reads_what_pillow_writes(kind: str, instance: nvimgcodec.nvimgcodecInstance_t) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow, which writes the pictures, is not installed")
    if kind == "PNG":
        pytest.skip("nvImageCodec reads PNG only through OpenCV's extension")
    file = io.BytesIO()
    image.new("RGB", (35, 17), (200, 100, 50)).save(file, kind)
    data = file.getvalue()
    stream = nvimgcodec.nvimgcodecCodeStream_t()
    memory = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)  # which must outlive the stream
    nvimgcodec.nvimgcodecCodeStreamCreateFromHostMem(instance, stream, memory, len(data), None)
    tag = nvimgcodec.nvimgcodecStructureType_t.NVIMGCODEC_STRUCTURE_TYPE_IMAGE_INFO
    told = nvimgcodec.nvimgcodecImageInfo_t(struct_type=tag)
    told.struct_size = ctypes.sizeof(told)
    nvimgcodec.nvimgcodecCodeStreamGetImageInfo(stream, told)
    plane = told.plane_info[0]
    assert (told.codec_name, plane.width, plane.height) == (kind.lower().encode(), 35, 17)
    nvimgcodec.nvimgcodecCodeStreamDestroy(stream)


@pytest.mark.usefixtures("without_a_driver")
def test_nvjpeg_refuses_cleanly_without_a_driver(need: Callable[..., None]) -> None:
    need("nvjpeg")
    handle = nvjpeg.nvjpegHandle_t()
    with pytest.raises(NvjpegError, match=r"nvjpegCreateSimple failed with NVJPEG_STATUS_\w+") as caught:
        nvjpeg.nvjpegCreateSimple(handle)
    assert not caught.value.sticky
    with pytest.raises(NvjpegError) as caught:
        nvjpeg.nvjpegJpegStreamCreate(None, ctypes.byref(nvjpeg.nvjpegJpegStream_t()))
    assert caught.value.name == "NVJPEG_STATUS_INVALID_PARAMETER"


def test_nvtiff_tells_its_version(need: Callable[..., None]) -> None:
    need("nvtiff")
    numbers = [ctypes.c_int32() for _ in range(3)]
    for kind, number in zip(nvtiff.libraryPropertyType, numbers, strict=True):
        nvtiff.nvtiffGetProperty(kind, ctypes.byref(number))
    assert [number.value for number in numbers] >= [0, 6, 0]


def test_nvcomp_takes_a_struct_by_value_and_tells_sizes(need: Callable[..., None]) -> None:
    need("nvcomp")
    options, size = nvcomp.nvcompBatchedLZ4CompressOpts_t(), ctypes.c_size_t()
    for chunk in (1 << 10, 1 << 16):
        nvcomp.nvcompBatchedLZ4CompressGetMaxOutputChunkSize(chunk, options, ctypes.byref(size))
        assert chunk < size.value < 2 * chunk
    options.data_type = 0x7FFF
    with pytest.raises(NvcompError) as caught:
        nvcomp.nvcompBatchedLZ4CompressGetMaxOutputChunkSize(1 << 10, options, ctypes.byref(size))
    assert caught.value.text == nvcomp.nvcompGetStatusString(nvcomp.nvcompStatus_t(caught.value.status))


def test_npp_tells_its_version_in_a_struct_of_its_own(need: Callable[..., None]) -> None:
    need("nppc", "npps")
    told = nppc.NppLibraryVersion.from_address(nppc.nppGetLibVersion())
    assert f"{told.major}.{told.minor}.{told.build}" == _load.version("nppc") == _load.version("npps")
    context = nppc.NppStreamContext(nMultiProcessorCount=132)
    npps.nppsSumGetBufferSize_32f_Ctx(1 << 20, ctypes.byref(ctypes.c_size_t()), context)  # by value


def test_cufile_returns_its_status_in_a_struct(
    need: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("cufile")
    monkeypatch.chdir(tmp_path)  # where cuFile writes its log
    version = ctypes.c_int32()
    assert cufile.cuFileGetVersion(ctypes.byref(version)) is None
    assert version.value > 1000
    with pytest.raises(CufileError, match=r"failed with CU_FILE_INVALID_VALUE \(5022\)") as caught:
        cufile.cuFileSetParameterSizeT(9999, 1)
    told = cufile.cuFileSetParameterSizeT.unchecked(9999, 1)
    assert isinstance(told, cufile.CUfileError)
    assert told.err == caught.value.status
    assert str(cufile.cuFileSetParameterSizeT.error(told)) == str(caught.value)


@pytest.mark.usefixtures("without_a_driver")
def test_nvml_is_the_drivers_and_says_so() -> None:
    with pytest.raises(LibraryNotFound, match=r"nvml: .*libnvidia-ml\.so\.1 was not found.*an NVIDIA GPU driver"):
        nvml.nvmlInit_v2()


def test_cupti_writes_its_words_where_it_is_told(need: Callable[..., None]) -> None:
    need("cupti")
    error = cupti.cuptiGetTimestamp.error(cupti.CUptiResult.CUPTI_ERROR_INVALID_PARAMETER)
    assert (type(error), error.name) == (CuptiError, "CUPTI_ERROR_INVALID_PARAMETER")
    words = ctypes.c_char_p()
    cupti.cuptiGetResultString.unchecked(error.status, ctypes.byref(words))  # newer ones have none without a driver
    assert error.text == (words.value or b"").decode()


def test_cudss_keeps_what_it_is_configured_with(need: Callable[..., None]) -> None:
    need("cudss")
    config, number = cudss.cudssConfig_t(), ctypes.c_int32(7)
    cudss.cudssConfigCreate(config)
    steps = cudss.cudssConfigParam_t.CUDSS_CONFIG_IR_N_STEPS
    cudss.cudssConfigSet(config, steps, bytes(number), 4)
    got, size = ctypes.c_int32(), ctypes.c_size_t()
    cudss.cudssConfigGet(config, steps, ctypes.byref(got), 4, ctypes.byref(size))
    assert (got.value, size.value) == (7, 4)
    with pytest.raises(CudssError, match="CUDSS_STATUS_INVALID_VALUE"):
        cudss.cudssConfigSet(config, steps, bytes(number), 3)
    cudss.cudssConfigDestroy(config)
