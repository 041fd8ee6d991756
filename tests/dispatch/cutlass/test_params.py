"""Kernel parameters as bytes: addresses, numbers and tensor maps are found by the stand-ins, and nothing else is."""

import ctypes
import dataclasses
import inspect
import struct

import pytest

from cudabind.errors import CudaDriverError
from dispatch.errors import Refused, WorkerFailed
from dispatch.libraries.cutlass import headers, im2col, params
from dispatch.libraries.cutlass.launch import Launch
from dispatch.libraries.cutlass.params import IM2COL_MAGIC, MAGIC, Im2colMap, Template, TensorMap, stand_ins
from dispatch.libraries.cutlass.visitors import Word

WORDS = (Word("m"), Word("a", "pointer"), Word("workspace", "pointer"), Word("alpha.value", "number"))
VALUES = {"m": 12, "a": 1, "workspace": 0x7000}


def image(words, *, tensor_map=True):
    """Parameters as a kernel would write them: an extent, a pointer, a number, and a recorded tensor map at 64."""
    m, a, workspace, alpha = words
    data = bytearray(256)
    struct.pack_into("<qqqI", data, 0, m, a, workspace, alpha)
    if tensor_map:
        recorded = struct.pack(
            "<QQ5I4x4Q5H5B4B", MAGIC, a, 64, 12, 1, 1, 1, 256, 3072, 0, 0, 64, 12, 1, 1, 1, *[1] * 5, 3, 3, 0, 9
        )
        data[64 : 64 + len(recorded)] = recorded
    return bytes(data)


def learn(**options):
    first, second = (image(stand_ins(WORDS, VALUES, which), **options) for which in (0, 1))
    return Template.learn(WORDS, (first, second))


def test_what_depends_on_addresses_and_numbers_is_found():
    template = learn()
    assert template.pointers == ((8, "a"),)
    assert template.numbers == ((24, "alpha.value"),)
    assert template.maps == (TensorMap(64, "a", 9, 3, (64, 12, 1), (256, 3072), (64, 12, 1), (1, 1, 1), 3),)


def test_an_im2col_map_is_read_with_its_corners():
    """Images (2, 15, 17, 64) of 16-bit elements, padded by 1 above, under a filter that reaches over 3 of W."""
    images = []
    for which in (0, 1):
        words = stand_ins(WORDS, VALUES, which)
        data = bytearray(image(words, tensor_map=False))
        record = struct.pack("<QQ5I4x4Q", IM2COL_MAGIC, words[1], 64, 17, 15, 2, 0, 128, 2176, 32640, 0)
        record += struct.pack("<6i2H5B4B", 0, -1, 0, -2, 1, 0, 64, 128, 1, 1, 2, 1, 0, 4, 3, 0, 1)
        data[128 : 128 + len(record)] = record
        images.append(bytes(data))
    (found,) = Template.learn(WORDS, (images[0], images[1])).maps
    assert found == Im2colMap(
        128, "a", 1, 4, (64, 17, 15, 2), (128, 2176, 32640), (0, -1), (-2, 1), 64, 128, (1, 1, 2, 1), 3
    )


def test_addresses_and_numbers_are_written_where_they_were_found():
    template = learn(tensor_map=False)
    memory = (ctypes.c_uint8 * 256)()
    template.write(ctypes.addressof(memory), {"a": 0x1234_5678_9ABC, "alpha.value": 0x3F80_0000})
    m, a, workspace, alpha = struct.unpack_from("<qqqI", bytes(memory))
    assert (m, a, workspace, alpha) == (12, 0x1234_5678_9ABC, 0x7000, 0x3F80_0000)


def test_an_operand_that_is_not_there_stays_null():
    words = stand_ins(WORDS, {"m": 12}, 0)
    assert words[1] == words[2] == 0


def test_an_address_that_was_computed_with_is_no_address_to_be_replaced():
    first, second = (bytearray(image(stand_ins(WORDS, VALUES, which))) for which in (0, 1))
    for data in (first, second):
        struct.pack_into("<q", data, 32, struct.unpack_from("<q", data, 8)[0] + 64)
    with pytest.raises(WorkerFailed, match=r"byte 3[2-9]"):
        Template.learn(WORDS, (bytes(first), bytes(second)))


def test_padding_that_differs_from_run_to_run_is_passed_over():
    first, second = (bytearray(image(stand_ins(WORDS, VALUES, which))) for which in (0, 1))
    struct.pack_into("<I", second, 200, 77)
    with pytest.raises(WorkerFailed, match="byte 200"):
        Template.learn(WORDS, (bytes(first), bytes(second)))
    assert Template.learn(WORDS, (bytes(first), bytes(second)), frozenset({200})).pointers == ((8, "a"),)


# -- the driver's part, played by the test --------------------------------------------------------------------------
class Encoder:
    """`cuTensorMapEncode…`: takes down what it is given, writes its mark to the target, and answers with a status."""

    def __init__(self, status=0):
        self.status, self.calls = status, []

    def unchecked(self, *arguments):
        self.calls.append([list(a) if hasattr(a, "__len__") else a.value for a in arguments])
        ctypes.memset(arguments[0].value, 0xEE, 128)
        return self.status


@pytest.fixture
def encoders(monkeypatch):
    made = {name: Encoder() for name in ("cuTensorMapEncodeTiled", "cuTensorMapEncodeIm2col")}
    for name, encoder in made.items():
        monkeypatch.setattr(params.driver, name, encoder, raising=False)
    return made


def test_the_driver_makes_each_tensor_map_at_its_place_in_the_parameters(encoders):
    template = learn()
    memory = (ctypes.c_uint8 * 320)(*[0xAB] * 320)
    target = ctypes.addressof(memory)
    template.write(target, {"a": 0x1000_0000, "alpha.value": 0})
    assert encoders["cuTensorMapEncodeTiled"].calls == [
        [target + 64, 9, 3, 0x1000_0000, [64, 12, 1], [256, 3072], [64, 12, 1], [1, 1, 1], 0, 3, 2, 0]
    ]
    assert encoders["cuTensorMapEncodeIm2col"].calls == []
    assert bytes(memory)[64:192] == b"\xee" * 128
    assert bytes(memory)[192:256] == bytes(64)
    assert bytes(memory)[256:] == b"\xab" * 64  # behind the parameters nothing is written


def test_the_driver_makes_a_map_of_images_from_its_corners(encoders):
    found = Im2colMap(64, "x", 1, 4, (64, 17, 15, 2), (128, 2176, 32640), (0, -1), (-2, 1), 64, 128, (1, 1, 2, 1), 3)
    memory = (ctypes.c_uint8 * 128)()
    found.encode(ctypes.addressof(memory), 0x2000)
    (call,) = encoders["cuTensorMapEncodeIm2col"].calls
    shapes = [[64, 17, 15, 2], [128, 2176, 32640], [0, -1], [-2, 1], 64, 128, [1, 1, 2, 1]]
    assert call == [ctypes.addressof(memory), 1, 4, 0x2000, *shapes, 0, 3, 2, 0]


def test_a_map_of_one_axis_has_room_for_a_stride_that_nobody_reads(encoders):
    memory = (ctypes.c_uint8 * 128)()
    TensorMap(0, "x", 7, 1, (96,), (), (32,), (1,), 0).encode(ctypes.addressof(memory), 0x2000)
    (call,) = encoders["cuTensorMapEncodeTiled"].calls
    assert call[1:] == [7, 1, 0x2000, [96], [0], [32], [1], 0, 0, 2, 0]


@pytest.mark.parametrize("name", ["cuTensorMapEncodeTiled", "cuTensorMapEncodeIm2col"])
def test_what_the_driver_refuses_is_raised_with_the_map(name, encoders):
    encoders[name].status = 1
    tiled = TensorMap(0, "filters", 9, 2, (64, 12), (256,), (64, 12), (1, 1), 3)
    images = Im2colMap(0, "filters", 1, 3, (64, 17, 2), (128, 2176), (0,), (-2,), 64, 128, (1, 1, 1), 3)
    memory = (ctypes.c_uint8 * 128)()
    with pytest.raises(CudaDriverError, match="INVALID_VALUE") as caught:
        (tiled if name.endswith("Tiled") else images).encode(ctypes.addressof(memory), 0x2000)
    notes = getattr(caught.value, "__notes__", None)
    assert notes is None or "filters" in notes[0]


# -- what is looked for, and where ----------------------------------------------------------------------------------
def learn_from(words, values, write, size=256, padding=frozenset()):
    """The template of parameters that `write(data, words)` makes of the words for `fill`."""
    images = []
    for which in (0, 1):
        data = bytearray(size)
        write(data, stand_ins(words, values, which))
        images.append(bytes(data))
    return Template.learn(words, (images[0], images[1]), padding)


def test_each_of_many_addresses_and_numbers_is_told_from_the_others():
    names = [f"p{number}" for number in range(40)]
    words = [Word(name, "pointer" if number % 2 else "number") for number, name in enumerate(names)]

    def write(data, given):
        for place, value in enumerate(given):
            struct.pack_into("<Q" if words[place].kind == "pointer" else "<I", data, 8 * place, value)

    found = learn_from(words, dict.fromkeys(names, 1), write, 320)
    assert found.pointers == tuple((8 * n, f"p{n}") for n in range(1, 40, 2))
    assert found.numbers == tuple((8 * n, f"p{n}") for n in range(0, 40, 2))
    stand_in = [stand_ins(words, dict.fromkeys(names, 1), which) for which in (0, 1)]
    assert len({*stand_in[0], *stand_in[1]}) == 80
    assert all(value % 2**20 == 0 for value in stand_in[0][1::2])  # an offset into an operand would show


@pytest.mark.parametrize("size", [252, 256, 260, 268])
@pytest.mark.parametrize("from_the_end", [4, 8, 12])
def test_a_number_at_the_very_end_is_found(size, from_the_end):
    place = size - from_the_end
    found = learn_from(WORDS, VALUES, lambda data, given: struct.pack_into("<I", data, place, given[3]), size)
    assert (found.pointers, found.numbers, found.maps) == ((), ((place, "alpha.value"),), ())


def test_an_address_at_the_very_end_is_found_and_one_that_is_cut_off_is_not_understood():
    found = learn_from(WORDS, VALUES, lambda data, given: struct.pack_into("<Q", data, 248, given[1]))
    assert found.pointers == ((248, "a"),)
    with pytest.raises(WorkerFailed, match="in an unknown way"):
        learn_from(WORDS, VALUES, lambda data, given: struct.pack_into("<I", data, 256, given[1] >> 32), 260)


@pytest.mark.parametrize("offset", [0, 64, 128, 192])
def test_a_map_is_found_at_every_multiple_of_64_that_it_fits_at(offset):
    def write(data, given):
        data[offset : offset + 128] = image(given)[64:192]

    (found,) = learn_from(WORDS, VALUES, write, offset + 128).maps
    assert (found.offset, found.word) == (offset, "a")


def test_a_map_that_does_not_fit_or_has_no_operand_is_none():
    def cut(data, given):
        data[192:] = image(given)[64:128]

    found = learn_from(WORDS, VALUES, cut)
    assert (found.maps, found.pointers) == ((), ((200, "a"),))  # what stands there is an address like any other

    def from_elsewhere(data, _given):
        data[64:192] = image([0, 0x1234, 0, 0])[64:192]

    assert learn_from(WORDS, VALUES, from_elsewhere).maps == ()


def test_the_corners_of_a_map_of_volumes_are_three_and_three():
    def write(data, given):
        record = struct.pack("<QQ5I4x4Q", IM2COL_MAGIC, given[1], 64, 9, 8, 7, 2, 128, 1152, 9216, 64512)
        record += struct.pack("<6i2H5B4B", -1, -2, -3, 1, 2, 3, 64, 128, 1, 2, 3, 4, 1, 5, 3, 0, 1)
        data[64 : 64 + len(record)] = record

    (found,) = learn_from(WORDS, VALUES, write).maps
    assert (found.rank, found.lower, found.upper) == (5, (-1, -2, -3), (1, 2, 3))
    assert (found.sizes, found.strides) == ((64, 9, 8, 7, 2), (128, 1152, 9216, 64512))
    assert (found.channels, found.pixels, found.steps, found.swizzle) == (64, 128, (1, 2, 3, 4, 1), 3)


def test_a_swizzle_base_is_refused():
    def write(data, given):
        data[64:192] = image(given)[64:192]
        data[64 + 82 + 7] = 1

    with pytest.raises(WorkerFailed, match="swizzle base 1"):
        learn_from(WORDS, VALUES, write)


def test_a_template_is_never_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        learn().image = b""


def test_the_marks_of_records_are_those_that_the_headers_write():
    text = inspect.getsource(headers) + inspect.getsource(im2col)
    assert f"{MAGIC:#x}" in text
    assert f"{IM2COL_MAGIC:#x}" in text


@pytest.mark.parametrize("grid", [(8, 1, 65536), (1, 70000, 1)], ids=str)
def test_a_grid_that_no_gpu_launches_is_refused_before_anything_is_made_for_it(grid):
    """Multistage kernels have a block along z for each product of a batch; the driver's word would be a bad value."""

    class Loaded:
        words, gemm, scale = WORDS, None, None

        def images(self, _executor, _values, _which):
            return b"", (256, 0, 128, *grid, 1, 0, 64)  # the facts that `fill` tells

    with pytest.raises(Refused, match=rf"up to 65535 blocks along y and z, has {' x '.join(map(str, grid))}"):
        Launch(Loaded(), None, VALUES, (1, 1))
