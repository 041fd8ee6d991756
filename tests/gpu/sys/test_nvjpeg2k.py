"""nvJPEG2000: a lossless file of Pillow's decoded to the very pixels, plane by plane and whole, and encoded back."""

from __future__ import annotations

import io
from ctypes import addressof, byref, c_size_t, c_uint8, c_void_p

import numpy as np
import pytest

from cudabind.errors import Nvjpeg2kError
from cudabind.sys import nvjpeg2k

LIBRARIES = ("cuda", "nvjpeg2k")
HEIGHT, WIDTH = 145, 211  # no multiples of a code block
NO_STREAM = nvjpeg2k.cudaStream_t()


@pytest.fixture
def pillow():
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    features = pytest.importorskip("PIL.features")
    if not features.check("jpg_2000"):
        pytest.skip("this Pillow was built without JPEG 2000")
    return image


@pytest.fixture
def picture(rng):
    """Smooth, with some noise: lossless is lossless for either."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    waves = [110 + 80 * np.sin(x / (20 + 7 * k)) * np.cos(y / (31 - 6 * k)) for k in range(3)]
    return np.rint(np.stack(waves, axis=-1) + rng.integers(0, 30, (HEIGHT, WIDTH, 3))).astype(np.uint8)


@pytest.fixture
def handle(gpu):
    return gpu.make(nvjpeg2k.nvjpeg2kHandle_t, nvjpeg2k.nvjpeg2kCreateSimple, nvjpeg2k.nvjpeg2kDestroy)


def image_of(planes):
    """nvJPEG2000's description of the planes, which lie one after the other in an array; and what it points to."""
    count, height, width = planes.shape
    pixels = (c_void_p * count)(*(planes.ptr + k * height * width for k in range(count)))
    pitches = (c_size_t * count)(*([width] * count))
    kind = int(nvjpeg2k.nvjpeg2kImageType_t.NVJPEG2K_UINT8)
    made = nvjpeg2k.nvjpeg2kImage_t(addressof(pixels), addressof(pitches), kind, count)
    return made, (pixels, pitches)


def decoded(gpu, handle, data):
    """Components by height by width."""
    state = gpu.make(
        nvjpeg2k.nvjpeg2kDecodeState_t,
        lambda made: nvjpeg2k.nvjpeg2kDecodeStateCreate(handle, made),
        nvjpeg2k.nvjpeg2kDecodeStateDestroy,
    )
    stream = gpu.make(nvjpeg2k.nvjpeg2kStream_t, nvjpeg2k.nvjpeg2kStreamCreate, nvjpeg2k.nvjpeg2kStreamDestroy)
    nvjpeg2k.nvjpeg2kStreamParse(handle, data, len(data), 0, 0, stream)
    info, part = nvjpeg2k.nvjpeg2kImageInfo_t(), nvjpeg2k.nvjpeg2kImageComponentInfo_t()
    nvjpeg2k.nvjpeg2kStreamGetImageInfo(stream, info)
    for component in range(info.num_components):
        nvjpeg2k.nvjpeg2kStreamGetImageComponentInfo(stream, part, component)
        assert (part.component_width, part.component_height, part.precision, part.sgn) == (WIDTH, HEIGHT, 8, 0)
    out = gpu.poisoned((info.num_components, info.image_height, info.image_width), np.uint8)
    target, _kept = image_of(out)
    nvjpeg2k.nvjpeg2kDecode(handle, state, stream, target, NO_STREAM)
    return out.numpy()


@pytest.mark.parametrize("kind", ["RGB", "L"])
def test_a_lossless_file_of_pillow_is_decoded_to_its_pixels(gpu, handle, pillow, picture, kind):
    pixels = picture if kind == "RGB" else picture[..., 0]
    file = io.BytesIO()
    pillow.fromarray(pixels).save(file, "JPEG2000", irreversible=False)
    result = decoded(gpu, handle, file.getvalue())
    assert np.array_equal(result, np.moveaxis(np.atleast_3d(pixels), -1, 0))


def test_a_picture_is_encoded_without_loss_and_pillow_reads_it(gpu, handle, pillow, picture):
    encoder = gpu.make(
        nvjpeg2k.nvjpeg2kEncoder_t, nvjpeg2k.nvjpeg2kEncoderCreateSimple, nvjpeg2k.nvjpeg2kEncoderDestroy
    )
    state = gpu.make(
        nvjpeg2k.nvjpeg2kEncodeState_t,
        lambda made: nvjpeg2k.nvjpeg2kEncodeStateCreate(encoder, made),
        nvjpeg2k.nvjpeg2kEncodeStateDestroy,
    )
    wanted = gpu.make(
        nvjpeg2k.nvjpeg2kEncodeParams_t, nvjpeg2k.nvjpeg2kEncodeParamsCreate, nvjpeg2k.nvjpeg2kEncodeParamsDestroy
    )
    parts = (nvjpeg2k.nvjpeg2kImageComponentInfo_t * 3)(
        *(nvjpeg2k.nvjpeg2kImageComponentInfo_t(WIDTH, HEIGHT, 8, 0) for _ in range(3))
    )
    config = nvjpeg2k.nvjpeg2kEncodeConfig_t(  # what is not named is 0, as the header demands
        stream_type=int(nvjpeg2k.nvjpeg2kBitstreamType_t.NVJPEG2K_STREAM_JP2),
        color_space=int(nvjpeg2k.nvjpeg2kColorSpace_t.NVJPEG2K_COLORSPACE_SRGB),
        image_width=WIDTH, image_height=HEIGHT, num_components=3, image_comp_info=addressof(parts),
        prog_order=int(nvjpeg2k.nvjpeg2kProgOrder_t.NVJPEG2K_LRCP), num_layers=1, mct_mode=1, num_resolutions=5,
        code_block_w=64, code_block_h=64, irreversible=0,
    )  # fmt: skip
    nvjpeg2k.nvjpeg2kEncodeParamsSetEncodeConfig(wanted, config)
    source, _kept = image_of(gpu.array(np.moveaxis(picture, -1, 0)))
    nvjpeg2k.nvjpeg2kEncode(encoder, state, wanted, source, NO_STREAM)
    size = c_size_t()
    nvjpeg2k.nvjpeg2kEncodeRetrieveBitstream(encoder, state, None, byref(size), NO_STREAM)
    data = (c_uint8 * size.value)()
    nvjpeg2k.nvjpeg2kEncodeRetrieveBitstream(encoder, state, data, byref(size), NO_STREAM)
    file = bytes(data)[: size.value]
    assert 0 < len(file) < picture.nbytes
    with pillow.open(io.BytesIO(file)) as opened:
        assert np.array_equal(np.asarray(opened), picture)
    assert np.array_equal(decoded(gpu, handle, file), np.moveaxis(picture, -1, 0))


def test_bytes_that_are_no_picture_are_refused_by_name(gpu, handle):
    stream = gpu.make(nvjpeg2k.nvjpeg2kStream_t, nvjpeg2k.nvjpeg2kStreamCreate, nvjpeg2k.nvjpeg2kStreamDestroy)
    with pytest.raises(Nvjpeg2kError) as caught:
        nvjpeg2k.nvjpeg2kStreamParse(handle, b"no picture at all", 17, 0, 0, stream)
    assert caught.value.name in ("NVJPEG2K_STATUS_BAD_JPEG", "NVJPEG2K_STATUS_JPEG_NOT_SUPPORTED")
