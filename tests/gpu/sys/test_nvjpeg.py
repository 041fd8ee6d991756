"""nvJPEG: pictures decoded and encoded on the GPU, against Pillow; its memory by Python's functions."""

from __future__ import annotations

import io
from ctypes import byref, c_int32, c_size_t, c_ubyte, c_void_p

import numpy as np
import pytest

from cudabind import driver
from cudabind.callbacks import release
from cudabind.errors import NvjpegError
from cudabind.sys import nvjpeg

LIBRARIES = ("cuda", "nvjpeg")
HEIGHT, WIDTH = 203, 317  # no multiples of a block
INTERLEAVED = nvjpeg.nvjpegOutputFormat_t.NVJPEG_OUTPUT_RGBI
NO_STREAM = nvjpeg.cudaStream_t()


@pytest.fixture
def image():
    return pytest.importorskip("PIL.Image", reason="Pillow is not installed")


@pytest.fixture
def picture():
    """Smooth, as photos are: JPEG leaves little of noise."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    waves = [127 + 90 * np.sin(x / (20 + 7 * k)) * np.cos(y / (31 - 6 * k)) for k in range(3)]
    return np.rint(np.stack(waves, axis=-1)).astype(np.uint8)


@pytest.fixture
def handle(gpu):
    return gpu.make(nvjpeg.nvjpegHandle_t, nvjpeg.nvjpegCreateSimple, nvjpeg.nvjpegDestroy)


def state_of(gpu, handle):
    return gpu.make(
        nvjpeg.nvjpegJpegState_t, lambda made: nvjpeg.nvjpegJpegStateCreate(handle, made), nvjpeg.nvjpegJpegStateDestroy
    )


def decoded(gpu, handle, data):
    """Height by width by three colours."""
    count, subsampling = c_int32(), c_int32()
    widths, heights = ((c_int32 * nvjpeg.NVJPEG_MAX_COMPONENT)() for _ in range(2))
    nvjpeg.nvjpegGetImageInfo(handle, data, len(data), byref(count), byref(subsampling), widths, heights)
    out = gpu.poisoned((heights[0], widths[0], 3), np.uint8)
    target = nvjpeg.nvjpegImage_t()
    target.channel[0], target.pitch[0] = out.ptr, 3 * widths[0]
    nvjpeg.nvjpegDecode(handle, state_of(gpu, handle), data, len(data), INTERLEAVED, target, NO_STREAM)
    return out.numpy()


@pytest.mark.parametrize(
    ("options", "mean", "most"),
    [
        ({"quality": 95, "subsampling": 0}, 0.6, 4),
        ({"quality": 75, "subsampling": 2}, 1.5, 24),  # colours are spread over four pixels, in ways of their own
        ({"quality": 90, "subsampling": 0, "progressive": True}, 0.6, 4),
    ],
)
def test_what_pillow_has_encoded_is_decoded_as_by_pillow(gpu, handle, image, picture, options, mean, most):
    file = io.BytesIO()
    image.fromarray(picture).save(file, "JPEG", **options)
    result = decoded(gpu, handle, file.getvalue()).astype(int)
    with image.open(file) as opened:
        off = np.abs(result - np.asarray(opened.convert("RGB")))
    assert result.shape == picture.shape
    assert off.mean() <= mean
    assert off.max() <= most


def test_a_picture_there_and_back(gpu, handle, image, picture):
    state = gpu.make(
        nvjpeg.nvjpegEncoderState_t,
        lambda made: nvjpeg.nvjpegEncoderStateCreate(handle, made, NO_STREAM),
        nvjpeg.nvjpegEncoderStateDestroy,
    )
    wanted = gpu.make(
        nvjpeg.nvjpegEncoderParams_t,
        lambda made: nvjpeg.nvjpegEncoderParamsCreate(handle, made, NO_STREAM),
        nvjpeg.nvjpegEncoderParamsDestroy,
    )
    nvjpeg.nvjpegEncoderParamsSetQuality(wanted, 95, NO_STREAM)
    whole = nvjpeg.nvjpegChromaSubsampling_t.NVJPEG_CSS_444
    nvjpeg.nvjpegEncoderParamsSetSamplingFactors(wanted, whole, NO_STREAM)
    source, given = nvjpeg.nvjpegImage_t(), gpu.array(picture)
    source.channel[0], source.pitch[0] = given.ptr, 3 * WIDTH
    kind = nvjpeg.nvjpegInputFormat_t.NVJPEG_INPUT_RGBI
    nvjpeg.nvjpegEncodeImage(handle, state, wanted, source, kind, WIDTH, HEIGHT, NO_STREAM)
    size = c_size_t()
    nvjpeg.nvjpegEncodeRetrieveBitstream(handle, state, None, byref(size), NO_STREAM)
    data = (c_ubyte * size.value)()
    nvjpeg.nvjpegEncodeRetrieveBitstream(handle, state, data, byref(size), NO_STREAM)
    driver.cuCtxSynchronize()
    assert 0 < size.value < picture.size / 4
    with image.open(io.BytesIO(bytes(data))) as opened:
        by_pillow = np.asarray(opened.convert("RGB")).astype(int)
    assert by_pillow.shape == picture.shape
    assert np.abs(by_pillow - picture).max() <= 12
    assert np.abs(decoded(gpu, handle, bytes(data)).astype(int) - by_pillow).max() <= 4


def test_its_memory_comes_from_functions_of_python(gpu, image, picture):
    held, freed = {}, []

    def allocate(where, size):
        memory = int(driver.cuMemAlloc(max(size, 1)))
        held[memory] = size
        c_void_p.from_address(where).value = memory
        return 0

    def free(memory):
        freed.append(held.pop(memory))
        driver.cuMemFree(memory)
        return 0

    def allocate_locked(where, size, flags):
        memory = int(driver.cuMemHostAlloc(max(size, 1), flags))
        held[memory] = size
        c_void_p.from_address(where).value = memory
        return 0

    def free_locked(memory):
        freed.append(held.pop(memory))
        driver.cuMemFreeHost(memory)
        return 0

    own = nvjpeg.nvjpegDevAllocator_t(dev_malloc=allocate, dev_free=free)
    locked = nvjpeg.nvjpegPinnedAllocator_t(pinned_malloc=allocate_locked, pinned_free=free_locked)
    default = nvjpeg.nvjpegBackend_t.NVJPEG_BACKEND_DEFAULT
    handle, file = nvjpeg.nvjpegHandle_t(), io.BytesIO()
    nvjpeg.nvjpegCreateEx(default, own, locked, 0, handle)
    del own, locked
    image.fromarray(picture).save(file, "JPEG", quality=95, subsampling=0)
    data, state = file.getvalue(), nvjpeg.nvjpegJpegState_t()
    nvjpeg.nvjpegJpegStateCreate(handle, state)
    out, target = gpu.poisoned(picture.shape, np.uint8), nvjpeg.nvjpegImage_t()
    target.channel[0], target.pitch[0] = out.ptr, 3 * WIDTH
    nvjpeg.nvjpegDecode(handle, state, data, len(data), INTERLEAVED, target, NO_STREAM)
    assert np.abs(out.numpy().astype(int) - picture).max() <= 12
    if not held:
        pytest.skip("nvJPEG has asked these functions for nothing")
    nvjpeg.nvjpegJpegStateDestroy(state)
    nvjpeg.nvjpegDestroy(handle)
    assert not held
    assert freed
    for function in (allocate, free, allocate_locked, free_locked):
        release(function)


def test_what_an_allocator_raises_is_raised_by_the_call_that_wanted_memory(image, picture, gpu):
    def refuse(*_):
        raise MemoryError("none for pictures")

    own = nvjpeg.nvjpegDevAllocator_t(dev_malloc=refuse, dev_free=lambda *_: 0)
    locked = nvjpeg.nvjpegPinnedAllocator_t(pinned_malloc=refuse, pinned_free=lambda *_: 0)
    handle, state, file = nvjpeg.nvjpegHandle_t(), nvjpeg.nvjpegJpegState_t(), io.BytesIO()
    image.fromarray(picture).save(file, "JPEG")
    target, data, out = nvjpeg.nvjpegImage_t(), file.getvalue(), gpu.poisoned(picture.shape, np.uint8)
    target.channel[0], target.pitch[0] = out.ptr, 3 * WIDTH

    def work():  # whichever of them wants memory first
        nvjpeg.nvjpegCreateEx(nvjpeg.nvjpegBackend_t.NVJPEG_BACKEND_DEFAULT, own, locked, 0, handle)
        nvjpeg.nvjpegJpegStateCreate(handle, state)
        nvjpeg.nvjpegDecode(handle, state, data, len(data), INTERLEAVED, target, NO_STREAM)
        pytest.skip("nvJPEG has asked these functions for nothing")

    with pytest.raises(MemoryError, match="none for pictures"):
        work()


def test_bytes_that_are_no_picture_are_refused_by_name(gpu, handle):
    with pytest.raises(NvjpegError) as caught:
        decoded(gpu, handle, b"no picture at all")
    assert caught.value.name in ("NVJPEG_STATUS_BAD_JPEG", "NVJPEG_STATUS_JPEG_NOT_SUPPORTED")
