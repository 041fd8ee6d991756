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


class Memory:
    """Allocators in Python, as nvJPEG calls them: what is held and what was asked for is kept."""

    def __init__(self):
        self.held, self.asked = {}, []

    def device(self):
        return nvjpeg.nvjpegDevAllocator_t(dev_malloc=self.allocate, dev_free=self.free)

    def locked(self):
        return nvjpeg.nvjpegPinnedAllocator_t(pinned_malloc=self.allocate_locked, pinned_free=self.free)

    def allocate(self, where, size):
        return self.keep(where, "device", size, int(driver.cuMemAlloc(max(size, 1))), driver.cuMemFree)

    def allocate_locked(self, where, size, flags):
        memory = int(driver.cuMemHostAlloc(max(size, 1), flags))
        return self.keep(where, "locked", size, memory, driver.cuMemFreeHost)

    def keep(self, where, kind, size, memory, give_back):
        self.held[memory] = give_back
        self.asked.append((kind, size))
        c_void_p.from_address(where).value = memory
        return 0

    def free(self, memory):
        if memory:
            self.held.pop(memory)(memory)
        return 0

    def forget(self):
        for function in (self.allocate, self.free, self.allocate_locked):
            release(function)


def decoded_in_stages(gpu, handle, data, shape, device_memory, locked_memory):
    """By a decoder whose buffers are made apart: where a decoder's memory comes from then is said by these buffers.

    What `nvjpegCreateEx` was given is only their default, and `nvjpegDecode` alone may do without either.
    """
    decoder = gpu.make(
        nvjpeg.nvjpegJpegDecoder_t,
        lambda made: nvjpeg.nvjpegDecoderCreate(handle, nvjpeg.nvjpegBackend_t.NVJPEG_BACKEND_HYBRID, made),
        nvjpeg.nvjpegDecoderDestroy,
    )
    locked = gpu.make(
        nvjpeg.nvjpegBufferPinned_t,
        lambda made: nvjpeg.nvjpegBufferPinnedCreate(handle, locked_memory, made),
        nvjpeg.nvjpegBufferPinnedDestroy,
    )
    device = gpu.make(
        nvjpeg.nvjpegBufferDevice_t,
        lambda made: nvjpeg.nvjpegBufferDeviceCreate(handle, device_memory, made),
        nvjpeg.nvjpegBufferDeviceDestroy,
    )
    state = gpu.make(
        nvjpeg.nvjpegJpegState_t,
        lambda made: nvjpeg.nvjpegDecoderStateCreate(handle, decoder, made),
        nvjpeg.nvjpegJpegStateDestroy,
    )
    parameters = gpu.make(
        nvjpeg.nvjpegDecodeParams_t,
        lambda made: nvjpeg.nvjpegDecodeParamsCreate(handle, made),
        nvjpeg.nvjpegDecodeParamsDestroy,
    )
    stream = gpu.make(
        nvjpeg.nvjpegJpegStream_t,
        lambda made: nvjpeg.nvjpegJpegStreamCreate(handle, made),
        nvjpeg.nvjpegJpegStreamDestroy,
    )
    nvjpeg.nvjpegStateAttachPinnedBuffer(state, locked)
    nvjpeg.nvjpegStateAttachDeviceBuffer(state, device)
    nvjpeg.nvjpegDecodeParamsSetOutputFormat(parameters, INTERLEAVED)
    nvjpeg.nvjpegJpegStreamParse(handle, data, len(data), 0, 0, stream)
    out, target = gpu.poisoned(shape, np.uint8), nvjpeg.nvjpegImage_t()
    target.channel[0], target.pitch[0] = out.ptr, 3 * shape[1]
    nvjpeg.nvjpegDecodeJpegHost(handle, decoder, state, parameters, stream)
    nvjpeg.nvjpegDecodeJpegTransferToDevice(handle, decoder, state, stream, NO_STREAM)
    nvjpeg.nvjpegDecodeJpegDevice(handle, decoder, state, target, NO_STREAM)
    return out.numpy()


def jpeg(image, picture):
    file = io.BytesIO()
    image.fromarray(picture).save(file, "JPEG", quality=95, subsampling=0)
    return file.getvalue()


def test_the_memory_of_its_buffers_comes_from_functions_of_python(gpu, handle, image, picture):
    memory, data = Memory(), jpeg(image, picture)
    inner = type(gpu)()  # whose handles are destroyed before the functions are forgotten
    result = decoded_in_stages(inner, handle, data, picture.shape, memory.device(), memory.locked())
    assert np.abs(result.astype(int) - picture).max() <= 12
    assert {kind for kind, _ in memory.asked} == {"device", "locked"}, memory.asked
    assert all(size > 0 for _, size in memory.asked)
    assert memory.held
    inner.clean_up()
    assert not memory.held  # every piece was given back by its own function
    memory.forget()


@pytest.mark.parametrize("backend", ["DEFAULT", "HYBRID", "GPU_HYBRID"])
def test_allocators_of_a_handle_are_asked_for_its_buffers(gpu, image, picture, backend):
    memory, data = Memory(), jpeg(image, picture)
    device, locked = memory.device(), memory.locked()
    kind, inner = getattr(nvjpeg.nvjpegBackend_t, f"NVJPEG_BACKEND_{backend}"), type(gpu)()
    handle = inner.make(
        nvjpeg.nvjpegHandle_t,
        lambda made: nvjpeg.nvjpegCreateEx(kind, device, locked, 0, made),
        nvjpeg.nvjpegDestroy,
    )
    whole = decoded(inner, handle, data)
    by_decode = list(memory.asked)
    result = decoded_in_stages(inner, handle, data, picture.shape, None, None)
    for each in (whole, result):
        assert np.abs(each.astype(int) - picture).max() <= 12
    by_stages = memory.asked[len(by_decode) :]
    inner.clean_up()
    assert not memory.held
    memory.forget()
    print(f"{backend}: nvjpegDecode asked for {by_decode}, its buffers for {by_stages}")
    if not memory.asked:
        pytest.skip("this nvJPEG keeps the allocators of nvjpegCreateEx to itself: a buffer's own are asked, see above")


def test_what_an_allocator_raises_is_raised_by_the_call_that_wanted_memory(gpu, handle, image, picture):
    def refuse(*_):
        raise MemoryError("none for pictures")

    data = jpeg(image, picture)
    own = nvjpeg.nvjpegDevAllocator_t(dev_malloc=refuse, dev_free=lambda *_: 0)
    locked = nvjpeg.nvjpegPinnedAllocator_t(pinned_malloc=refuse, pinned_free=lambda *_: 0)
    with pytest.raises(MemoryError, match="none for pictures"):
        decoded_in_stages(gpu, handle, data, picture.shape, own, locked)


def test_bytes_that_are_no_picture_are_refused_by_name(gpu, handle):
    with pytest.raises(NvjpegError) as caught:
        decoded(gpu, handle, b"no picture at all")
    assert caught.value.name in ("NVJPEG_STATUS_BAD_JPEG", "NVJPEG_STATUS_JPEG_NOT_SUPPORTED")
