"""A kernel's parameters as bytes: the addresses and numbers in them, and the tensor maps that the driver makes.

launch.py has `fill` write the parameters twice, for two sets of stand-ins. From the difference this module computes
where each address and number is, so that later calls make their parameters without the GPU. It knows no kernel by name.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cudabind import driver
from dispatch.errors import WorkerFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dispatch.libraries.cutlass.visitors import Word

__all__ = ["Im2colMap", "Template", "TensorMap", "stand_ins"]

MAGIC = 0x70616D5F726F736E  # as in headers.py
IM2COL_MAGIC = 0x6D5F6C6F63326D69  # as in im2col.py
MAP_BYTES = 128
ALIGNED = 64  # tensor maps and parameters start at multiples of it
# Stand-ins: addresses that no GPU has, 1 MiB apart so that an offset would show; numbers that no program uses.
ADDRESSES = (0x4A00_0000_0000, 0x5B00_0000_0000)
NUMBERS = (0x7A5A_0000, 0x795A_0000)


def stand_ins(words: Sequence[Word], values: Mapping[str, int], which: int) -> list[int]:
    """The words for `fill` with stand-ins (of the first or the second set) for all addresses and numbers but nulls."""
    stand_in_words = []
    for number, word in enumerate(words, 1):
        value = values.get(word.name, 0)
        if word.kind == "pointer" and value and word.name != "workspace":
            value = ADDRESSES[which] + (number << 20)
        elif word.kind == "number":
            value = NUMBERS[which] + number
        stand_in_words.append(value)
    return stand_in_words


class TensorMap(NamedTuple):
    """The arguments of `cuTensorMapEncodeTiled`, as a kernel recorded them, and where in the parameters it goes."""

    offset: int
    word: str
    format: int
    rank: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    swizzle: int

    def encode(self, target: int, address: int) -> None:
        """Have the driver write the tensor map for a tensor at `address` to the host memory at `target`."""
        u64, u32 = ctypes.c_uint64, ctypes.c_uint32
        strides = (u64 * max(self.rank - 1, 1))(*self.strides)
        status = driver.cuTensorMapEncodeTiled.unchecked(
            ctypes.c_void_p(target),
            ctypes.c_int(self.format),
            u32(self.rank),
            ctypes.c_void_p(address),
            (u64 * self.rank)(*self.sizes),
            strides,
            (u32 * self.rank)(*self.box),
            (u32 * self.rank)(*self.steps),
            ctypes.c_int(0),  # CU_TENSOR_MAP_INTERLEAVE_NONE
            ctypes.c_int(self.swizzle),
            ctypes.c_int(2),  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B
            ctypes.c_int(0),  # CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE: zeros
        )
        _check("cuTensorMapEncodeTiled", status, self)


class Im2colMap(NamedTuple):
    """The arguments of `cuTensorMapEncodeIm2col`, as a kernel recorded them, and where in the parameters it goes.

    Sizes, strides and steps run from the channels to the images; corners from the last spatial axis to the first.
    """

    offset: int
    word: str
    format: int
    rank: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    lower: tuple[int, ...]
    upper: tuple[int, ...]
    channels: int
    pixels: int
    steps: tuple[int, ...]
    swizzle: int

    def encode(self, target: int, address: int) -> None:
        """Have the driver write the tensor map for images at `address` to the host memory at `target`."""
        u64, u32, i32 = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int32
        status = driver.cuTensorMapEncodeIm2col.unchecked(
            ctypes.c_void_p(target),
            ctypes.c_int(self.format),
            u32(self.rank),
            ctypes.c_void_p(address),
            (u64 * self.rank)(*self.sizes),
            (u64 * (self.rank - 1))(*self.strides),
            (i32 * (self.rank - 2))(*self.lower),
            (i32 * (self.rank - 2))(*self.upper),
            u32(self.channels),
            u32(self.pixels),
            (u32 * self.rank)(*self.steps),
            ctypes.c_int(0),  # CU_TENSOR_MAP_INTERLEAVE_NONE
            ctypes.c_int(self.swizzle),
            ctypes.c_int(2),  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B
            ctypes.c_int(0),  # CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE: zeros
        )
        _check("cuTensorMapEncodeIm2col", status, self)


def _check(function: str, status: int, recorded: TensorMap | Im2colMap) -> None:
    """Raise the driver's error for a tensor map, with the map."""
    if status:
        error = driver.error(function, status)
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"{recorded.word}: {recorded}")
        raise error


@dataclass(frozen=True)
class Template:
    """A kernel's parameters with everything in place but addresses and numbers.

    Attributes:
        image: the bytes, those of the first set of stand-ins.
        pointers, numbers: (offset, word's name) of each address and each f32.
        maps: the tensor maps.
    """

    image: bytes
    pointers: tuple[tuple[int, str], ...]
    numbers: tuple[tuple[int, str], ...]
    maps: tuple[TensorMap | Im2colMap, ...]

    @staticmethod
    def learn(words: Sequence[Word], images: tuple[bytes, bytes], padding: frozenset[int] = frozenset()) -> Template:
        """The template that explains two images; WorkerFailed where bytes differ that no stand-in explains.

        `padding` holds the places of 4-byte words that differ from run to run though nothing else does.
        """
        first, second = images
        addresses = {(ADDRESSES[0] + (p << 20), ADDRESSES[1] + (p << 20)): w.name for p, w in enumerate(words, 1)}
        values = {(NUMBERS[0] + p, NUMBERS[1] + p): w.name for p, w in enumerate(words, 1)}
        maps = tuple(_maps(first, addresses, second))
        inside = {
            offset for tensor_map in maps for offset in range(tensor_map.offset, tensor_map.offset + MAP_BYTES, 4)
        }
        pointers, numbers = [], []
        offset = 0
        while offset + 4 <= len(first):
            one, two = first[offset : offset + 4], second[offset : offset + 4]
            if one == two or offset in inside or offset in padding:
                offset += 4
                continue
            low = offset & ~7
            pair = tuple(struct.unpack_from("<Q", image, low)[0] for image in images) if low + 8 <= len(first) else ()
            number = tuple(struct.unpack_from("<I", image, offset)[0] for image in images)
            if pair in addresses:
                pointers.append((low, addresses[pair]))
                offset = low + 8
            elif number in values:
                numbers.append((offset, values[number]))
                offset += 4
            else:
                raise WorkerFailed(
                    f"byte {offset} of a kernel's parameters depends on its addresses in an unknown way:"
                    f" {one.hex()} and {two.hex()}"
                )
        return Template(first, tuple(pointers), tuple(numbers), maps)

    def write(self, target: int, values: Mapping[str, int]) -> None:
        """Write the parameters for these addresses and numbers (as f32 bits) to host memory."""
        ctypes.memmove(target, self.image, len(self.image))
        for offset, name in self.pointers:
            ctypes.c_uint64.from_address(target + offset).value = values[name]
        for offset, name in self.numbers:
            ctypes.c_uint32.from_address(target + offset).value = values.get(name, 0)  # 0: it is read on the device
        for tensor_map in self.maps:
            tensor_map.encode(target + tensor_map.offset, values[tensor_map.word])


def _maps(image: bytes, addresses: Mapping[tuple[int, int], str], other: bytes) -> Iterator[TensorMap | Im2colMap]:
    """The recorded tensor maps of an image; no thread of the kernel reads those of absent operands."""
    for offset in range(0, len(image) - MAP_BYTES + 1, ALIGNED):
        magic, address = struct.unpack_from("<QQ", image, offset)
        if magic in RECORDS:
            pair = (address, struct.unpack_from("<Q", other, offset + 8)[0])
            if pair in addresses:
                yield RECORDS[magic](image, offset, addresses[pair])


def _tiled(image: bytes, offset: int, word: str) -> TensorMap:
    """A record in the layout of headers.py's `record_tensor_map`."""
    sizes = struct.unpack_from("<5I", image, offset + 16)
    strides = struct.unpack_from("<4Q", image, offset + 40)
    box = struct.unpack_from("<5H", image, offset + 72)
    *steps, rank, bits, base, kind = struct.unpack_from("<9B", image, offset + 82)
    _check_base(base)
    shapes = (sizes[:rank], strides[: rank - 1], box[:rank], tuple(steps[:rank]))
    return TensorMap(offset, word, kind, rank, *shapes, bits)


def _im2col(image: bytes, offset: int, word: str) -> Im2colMap:
    """A record in the layout of im2col.py's `record_im2col_map`."""
    sizes = struct.unpack_from("<5I", image, offset + 16)
    strides = struct.unpack_from("<4Q", image, offset + 40)
    corners = struct.unpack_from("<6i", image, offset + 72)
    channels, pixels = struct.unpack_from("<2H", image, offset + 96)
    *steps, rank, bits, base, kind = struct.unpack_from("<9B", image, offset + 100)
    _check_base(base)
    lower, upper = corners[: rank - 2], corners[3 : 1 + rank]
    shapes = (sizes[:rank], strides[: rank - 1], lower, upper, channels, pixels, tuple(steps[:rank]))
    return Im2colMap(offset, word, kind, rank, *shapes, bits)


def _check_base(base: int) -> None:
    if base:
        raise WorkerFailed(f"a tensor map with swizzle base {base}, which Hopper's kernels do not use")


RECORDS: dict[int, Callable[[bytes, int, str], TensorMap | Im2colMap]] = {MAGIC: _tiled, IM2COL_MAGIC: _im2col}
