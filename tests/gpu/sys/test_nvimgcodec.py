"""nvImageCodec: pictures decoded into device memory, against Pillow, by whichever of its decoders takes them."""

from __future__ import annotations

import ctypes
import io
from ctypes import byref, c_size_t, c_uint8, c_uint32

import numpy as np
import pytest

from cudabind import driver
from cudabind.sys import nvimgcodec as codec

LIBRARIES = ("cuda", "nvimgcodec")
HEIGHT, WIDTH = 141, 205
DEVICE = codec.nvimgcodecImageBufferKind_t.NVIMGCODEC_IMAGE_BUFFER_KIND_STRIDED_DEVICE


def described(kind, tag, **fields):
    """A struct of nvImageCodec, which tells its own type and size."""
    tag = getattr(codec.nvimgcodecStructureType_t, f"NVIMGCODEC_STRUCTURE_TYPE_{tag}")
    made = kind(struct_type=int(tag), **fields)
    made.struct_size = ctypes.sizeof(made)
    return made


def execution(device=0):
    """Its own threads and all backends, on this GPU."""
    return described(codec.nvimgcodecExecutionParams_t, "EXECUTION_PARAMS", device_id=device, max_num_cpu_threads=2)


@pytest.fixture
def pillow():
    return pytest.importorskip("PIL.Image", reason="Pillow is not installed")


@pytest.fixture
def instance(gpu):
    wanted = described(
        codec.nvimgcodecInstanceCreateInfo_t, "INSTANCE_CREATE_INFO", load_builtin_modules=1, load_extension_modules=1
    )
    return gpu.make(
        codec.nvimgcodecInstance_t,
        lambda made: codec.nvimgcodecInstanceCreate(made, wanted),
        codec.nvimgcodecInstanceDestroy,
    )


@pytest.fixture
def decoder(gpu, instance):
    parameters = execution()
    return gpu.make(
        codec.nvimgcodecDecoder_t,
        lambda made: codec.nvimgcodecDecoderCreate(instance, made, parameters, b""),
        codec.nvimgcodecDecoderDestroy,
    )


def picture():
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    waves = [127 + 90 * np.sin(x / (20 + 7 * k)) * np.cos(y / (31 - 6 * k)) for k in range(3)]
    return np.rint(np.stack(waves, axis=-1)).astype(np.uint8)


def interleaved(address, kind, name):
    """The description of an image of RGB bytes, pixel by pixel, which nvImageCodec shall write there."""
    info = described(codec.nvimgcodecImageInfo_t, "IMAGE_INFO", codec_name=name, num_planes=1, buffer=address)
    info.color_spec = int(codec.nvimgcodecColorSpec_t.NVIMGCODEC_COLORSPEC_SRGB)
    info.chroma_subsampling = int(codec.nvimgcodecChromaSubsampling_t.NVIMGCODEC_SAMPLING_NONE)
    info.sample_format = int(codec.nvimgcodecSampleFormat_t.NVIMGCODEC_SAMPLEFORMAT_I_RGB)
    info.buffer_kind = int(kind)
    plane = info.plane_info[0]
    plane.struct_type = int(codec.nvimgcodecStructureType_t.NVIMGCODEC_STRUCTURE_TYPE_IMAGE_PLANE_INFO)
    plane.struct_size = ctypes.sizeof(plane)
    plane.width, plane.height, plane.num_channels, plane.row_stride = WIDTH, HEIGHT, 3, 3 * WIDTH
    plane.sample_type = int(codec.nvimgcodecSampleDataType_t.NVIMGCODEC_SAMPLE_DATA_TYPE_UINT8)
    plane.precision = 8
    return info


def decode(instance, decoder, data, address, kind, name):
    """Decode the bytes of a file into the memory at an address; the status of the one picture."""
    memory = (c_uint8 * len(data)).from_buffer_copy(data)  # which must outlive the stream
    stream, image = codec.nvimgcodecCodeStream_t(), codec.nvimgcodecImage_t()
    future, status, count = codec.nvimgcodecFuture_t(), c_uint32(), c_size_t()
    codec.nvimgcodecCodeStreamCreateFromHostMem(instance, stream, memory, len(data), None)
    try:
        codec.nvimgcodecImageCreate(instance, image, interleaved(address, kind, name))
        wanted = described(codec.nvimgcodecDecodeParams_t, "DECODE_PARAMS", apply_exif_orientation=1)
        codec.nvimgcodecDecoderDecode(decoder, stream, image, 1, wanted, future)
        codec.nvimgcodecFutureWaitForAll(future)
        codec.nvimgcodecFutureGetProcessingStatus(future, byref(status), byref(count))
        assert count.value == 1
    finally:
        for handle, destroy in (
            (future, codec.nvimgcodecFutureDestroy),
            (image, codec.nvimgcodecImageDestroy),
            (stream, codec.nvimgcodecCodeStreamDestroy),
        ):
            if handle:
                destroy(handle)
    return codec.nvimgcodecProcessingStatus(status.value)


@pytest.mark.parametrize(
    ("kind", "options", "most"),
    [
        ("JPEG", {"quality": 95, "subsampling": 0}, 4),
        ("JPEG2000", {"irreversible": False}, 0),
        ("TIFF", {"compression": "tiff_lzw"}, 0),
        ("BMP", {}, 0),
    ],
)
def test_a_file_of_pillow_is_decoded_into_device_memory(gpu, instance, decoder, pillow, kind, options, most):
    file = io.BytesIO()
    pillow.fromarray(picture()).save(file, kind, **options)
    with pillow.open(file) as opened:
        expected = np.asarray(opened.convert("RGB"))
    out = gpu.poisoned(expected.shape, np.uint8)
    name = {"JPEG2000": b"jpeg2k"}.get(kind, kind.lower().encode())
    status = decode(instance, decoder, file.getvalue(), out.ptr, DEVICE, name)
    assert status == codec.nvimgcodecProcessingStatus.NVIMGCODEC_PROCESSING_STATUS_SUCCESS
    driver.cuCtxSynchronize()
    off = np.abs(out.numpy().astype(int) - expected)
    assert off.max() <= most
    assert off.mean() <= most / 6


def test_a_file_cut_short_is_not_called_a_success(gpu, instance, decoder, pillow):
    file = io.BytesIO()
    pillow.fromarray(picture()).save(file, "JPEG2000", irreversible=False)
    data = file.getvalue()
    out = gpu.poisoned((HEIGHT, WIDTH, 3), np.uint8)
    status = decode(instance, decoder, data[: len(data) // 3], out.ptr, DEVICE, b"jpeg2k")
    assert isinstance(status, codec.nvimgcodecProcessingStatus)
    assert status != codec.nvimgcodecProcessingStatus.NVIMGCODEC_PROCESSING_STATUS_UNKNOWN
