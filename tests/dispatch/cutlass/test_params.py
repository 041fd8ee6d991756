"""Kernel parameters as bytes: addresses, numbers and tensor maps are found by the stand-ins, and nothing else is."""

import ctypes
import struct

import pytest

from dispatch.cutlass.params import IM2COL_MAGIC, MAGIC, Im2colMap, Template, TensorMap, stand_ins
from dispatch.cutlass.visitors import Word
from dispatch.errors import WorkerFailed

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
