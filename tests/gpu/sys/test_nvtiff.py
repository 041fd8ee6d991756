"""nvTIFF: files that Pillow has compressed losslessly, decoded to the very pixels."""

from __future__ import annotations

import io
from ctypes import addressof, c_size_t, c_uint8, c_void_p

import numpy as np
import pytest

from cudabind import driver
from cudabind.errors import NvtiffError
from cudabind.sys import nvtiff

LIBRARIES = ("cuda", "nvtiff")
HEIGHT, WIDTH = 97, 131
NO_STREAM = nvtiff.cudaStream_t()


@pytest.fixture
def pillow():
    return pytest.importorskip("PIL.Image", reason="Pillow is not installed")


@pytest.fixture
def decoder(gpu):
    return gpu.make(
        nvtiff.nvtiffDecoder_t,
        lambda made: nvtiff.nvtiffDecoderCreateSimple(made, NO_STREAM),
        lambda made: nvtiff.nvtiffDecoderDestroy(made, NO_STREAM),
    )


def opened(gpu, data):
    """The stream over a copy of the bytes, which must outlive it."""
    if nvtiff._lib.version() < "0.8":
        pytest.skip("this test is written for nvTIFF 0.8, which opens a stream in one call")
    memory = (c_uint8 * len(data)).from_buffer_copy(data)
    stream = gpu.make(
        nvtiff.nvtiffStream_t,
        lambda made: nvtiff.nvtiffStreamOpen(memory, len(data), made),
        nvtiff.nvtiffStreamClose,
    )
    return stream, memory


def decoded(gpu, decoder, data, shape, dtype):
    stream, _memory = opened(gpu, data)
    params = gpu.make(nvtiff.nvtiffDecodeParams_t, nvtiff.nvtiffDecodeParamsCreate, nvtiff.nvtiffDecodeParamsDestroy)
    header, info = nvtiff.nvtiffStreamHeader_t(), nvtiff.nvtiffImageInfo_t()
    nvtiff.nvtiffStreamGetHeader(stream, header)
    nvtiff.nvtiffStreamGetImageInfo(stream, header.first_ifd_offset, info)
    bits, samples = 8 * np.dtype(dtype).itemsize, shape[2] if len(shape) == 3 else 1
    assert (info.image_height, info.image_width, info.samples_per_pixel) == (*shape[:2], samples)
    assert (info.bits_per_sample[0], info.bits_per_pixel) == (bits, bits * samples)
    out = gpu.poisoned(shape, dtype)
    planes, pitches = (c_void_p * 1)(out.ptr), (c_size_t * 1)(out.nbytes // shape[0])
    target = nvtiff.nvtiffImage_t(addressof(planes), addressof(pitches), 1)
    nvtiff.nvtiffDecodeCheckSupported(stream, decoder, params, target)
    nvtiff.nvtiffDecode(stream, decoder, params, target, NO_STREAM)
    driver.cuCtxSynchronize()
    return out.numpy()


@pytest.mark.parametrize("compression", ["raw", "packbits", "tiff_lzw", "tiff_adobe_deflate"])
@pytest.mark.parametrize("kind", ["RGB", "L", "I;16"])
def test_a_file_of_pillow_is_decoded_to_its_pixels(gpu, decoder, pillow, rng, compression, kind):
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    if kind == "RGB":
        pixels = np.stack([x + y, x // 3, 200 - y], axis=-1).astype(np.uint8)
    elif kind == "L":
        pixels = ((x * y) // 64 + rng.integers(0, 3, (HEIGHT, WIDTH))).astype(np.uint8)
    else:
        pixels = (x * 201 + y * 7).astype(np.uint16)
    file = io.BytesIO()
    pillow.fromarray(pixels).save(file, "TIFF", compression=compression)
    try:
        result = decoded(gpu, decoder, file.getvalue(), pixels.shape, pixels.dtype)
    except NvtiffError as error:  # nvTIFF hands Deflate on to nvCOMP, which may not be there
        if error.name not in ("NVTIFF_STATUS_NVCOMP_NOT_FOUND", "NVTIFF_STATUS_TIFF_NOT_SUPPORTED"):
            raise
        if compression != "tiff_adobe_deflate":
            raise
        pytest.skip(str(error))
    assert np.array_equal(result, pixels)


def test_bytes_that_are_no_picture_are_refused_by_name(gpu):
    with pytest.raises(NvtiffError) as caught:
        opened(gpu, b"no picture at all" * 8)
    assert caught.value.name == "NVTIFF_STATUS_BAD_TIFF"
