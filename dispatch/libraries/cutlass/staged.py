"""Outputs whose lines do not end at multiples of 16 bytes: a kernel writes the plan's memory, then lines are copied.

TMA stores whole 16 bytes. It writes beyond the bounds of a tensor map up to the next multiple of 16 bytes, so that
three more elements are written after each line of 53 f16 (seen on an H200; triton-lang/triton#11583 reports the same
for an H100). In memory that a caller passes, they may belong to something else. Outputs that a call allocates have
padding for them, and need no staging. Plans in `dispatch.ops` whose kernels write with tensor maps use this; this file
launches no kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cudabind import driver
from dispatch.keys import U8

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["Lines", "Staged"]

STORED = 16  # bytes that TMA stores at once
APART = 256  # bytes: each output starts at a multiple of it
MAX_PITCH = (1 << 31) - 1  # bytes from line to line of one copy: CU_DEVICE_ATTRIBUTE_MAX_PITCH of every GPU so far


class Lines(NamedTuple):
    """The dense lines of a matrix, or of a batch of them: their size in bytes, their number, and the strides.

    `pitch` is the bytes from line to line, `batch` those from matrix to matrix; they are arbitrary for a single line or
    matrix. `size` is that of an element.
    """

    size: int
    width: int
    lines: int
    batches: int
    pitch: int
    batch: int

    @classmethod
    def of(cls, tensor: Tensor, order: str) -> Lines:
        """The lines of a tensor of two axes or three, whose rows or columns ("row", "column") are dense."""
        size = tensor.dtype.itemsize
        line, dense = (-2, -1) if order == "row" else (-1, -2)
        batches, batch = (tensor.shape[0], tensor.layout.strides[0]) if tensor.ndim > 2 else (1, 0)
        strides = (tensor.layout.strides[line] * size, batch * size)
        return cls(size, tensor.shape[dense] * size, tensor.shape[line], batches, *strides)

    @property
    def are_whole(self) -> bool:
        """Whether each line ends at a multiple of 16 bytes, as each begins at one."""
        return self.width % STORED == 0

    @property
    def staged(self) -> Lines:
        """The same lines one after the other, with padding for the bytes that are stored after each."""
        pitch = -(-self.width // STORED) * STORED
        return self._replace(pitch=pitch, batch=pitch * self.lines)


class Staged:
    """A plan's own memory for its outputs whose lines do not end at a multiple of 16 bytes; there may be none.

    `addresses` has the address that the kernel writes for each of them, `words` the strides of its lines and matrices
    in elements, under the names of a kernel's words.
    """

    __slots__ = ("_given", "_memory", "_staged", "addresses", "words")

    def __init__(self, executor: CudaExecutor, outputs: Mapping[str, Lines]) -> None:
        self._given = {name: lines for name, lines in outputs.items() if not lines.are_whole}
        self._staged = {name: lines.staged for name, lines in self._given.items()}
        self.addresses: dict[str, int] = {}
        self.words: dict[str, int] = {}
        self._memory: Tensor | None = None
        if not self._staged:
            return
        sizes = {name: -(-staged.batch * staged.batches // APART) * APART for name, staged in self._staged.items()}
        self._memory = executor.empty((sum(sizes.values()),), (1,), U8)
        address = self._memory.ptr
        for name, staged in self._staged.items():
            self.addresses[name] = address
            self.words[f"{name}.pitch"] = staged.pitch // staged.size
            self.words[f"{name}.batch"] = staged.batch // staged.size if staged.batches > 1 else 0
            address += sizes[name]

    def copy_in(self, given: Mapping[str, int], stream: int) -> None:
        """Enqueue copies of the outputs at these addresses, for a kernel that does not write all lines."""
        for name, address in self.addresses.items():
            _copy(self._staged[name], address, self._given[name], given[name], stream)

    def copy_out(self, given: Mapping[str, int], stream: int) -> None:
        """Enqueue copies of the kernel's results to the outputs at these addresses: only their lines."""
        for name, address in self.addresses.items():
            _copy(self._given[name], given[name], self._staged[name], address, stream)


def _copy(to: Lines, to_address: int, of: Lines, of_address: int, stream: int) -> None:
    """Enqueue the copy of all lines: one call, unless matrices are no whole lines apart, or lines too far apart."""
    if to.lines == 1:  # in each matrix: they become the lines of one matrix
        to, of = (x._replace(lines=x.batches, batches=1, pitch=x.batch) for x in (to, of))
    is_tall = to.lines == 1 or max(to.pitch, of.pitch) <= MAX_PITCH
    is_deep = is_tall and (to.batches == 1 or not (to.batch % to.pitch or of.batch % of.pitch))
    kind = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    for matrix in range(1 if is_deep else to.batches):
        for line in range(1 if is_tall else to.lines):
            copy = driver.CUDA_MEMCPY3D()
            copy.WidthInBytes = to.width
            copy.Height, copy.Depth = to.lines if is_tall else 1, to.batches if is_deep else 1
            copy.dstMemoryType = copy.srcMemoryType = kind
            copy.dstDevice = to_address + matrix * to.batch + line * to.pitch
            copy.srcDevice = of_address + matrix * of.batch + line * of.pitch
            copy.dstPitch, copy.srcPitch = (x.pitch if copy.Height > 1 else x.width for x in (to, of))
            copy.dstHeight, copy.srcHeight = (x.batch // x.pitch if copy.Depth > 1 else copy.Height for x in (to, of))
            driver.cuMemcpy3DAsync(copy, stream)
