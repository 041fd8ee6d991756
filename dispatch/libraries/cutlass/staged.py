"""Outputs whose lines end amid 16 bytes: the kernel writes memory of the plan's own, from where the lines are copied.

TMA stores whole 16 bytes: up to the next multiple of them it writes behind what a tensor map bounds, so that behind
each line of 53 f16 three more elements are written (an H200 did it; triton-lang/triton#11583 has the same of an H100).
In memory that a caller gives those may be anybody's. What a call makes itself has room for them, and needs none of
this. The plans of `dispatch.ops` whose kernels write by tensor maps come here; nothing here launches a kernel.
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
APART = 256  # bytes from one output to the next: a multiple of it is what each begins at
MOST_PITCH = (1 << 31) - 1  # bytes from line to line of one copy: CU_DEVICE_ATTRIBUTE_MAX_PITCH of every GPU so far


class Lines(NamedTuple):
    """The dense lines of a matrix, or of a batch of them: how many bytes each has, how many there are, and the steps.

    `pitch` is the bytes from line to line, `batch` those from matrix to matrix; of a single one they mean nothing.
    `size` is that of an element.
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
        steps = (tensor.layout.strides[line] * size, batch * size)
        return cls(size, tensor.shape[dense] * size, tensor.shape[line], batches, *steps)

    @property
    def are_whole(self) -> bool:
        """Whether each ends at a multiple of 16 bytes, as each begins at one."""
        return self.width % STORED == 0

    @property
    def staged(self) -> Lines:
        """The same lines one behind the other, with room for what is stored behind each."""
        pitch = -(-self.width // STORED) * STORED
        return self._replace(pitch=pitch, batch=pitch * self.lines)


class Staged:
    """A plan's own memory for those of its outputs whose lines end amid 16 bytes, of which there may be none.

    `addresses` says where the kernel writes each of them, `words` how many elements its lines and matrices are apart
    there, under the names of a kernel's words.
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
        """Enqueue copies of the outputs at these addresses, for a kernel that leaves some lines as they are."""
        for name, address in self.addresses.items():
            _copy(self._staged[name], address, self._given[name], given[name], stream)

    def copy_out(self, given: Mapping[str, int], stream: int) -> None:
        """Enqueue copies of what the kernel has written to the outputs at these addresses: their lines and no more."""
        for name, address in self.addresses.items():
            _copy(self._given[name], given[name], self._staged[name], address, stream)


def _copy(to: Lines, to_address: int, of: Lines, of_address: int, stream: int) -> None:
    """Enqueue the copy of all lines: by one call, but where matrices are no whole lines apart, or lines too far."""
    if to.lines == 1:  # of each matrix: they are the lines of one
        to, of = (x._replace(lines=x.batches, batches=1, pitch=x.batch) for x in (to, of))
    is_tall = to.lines == 1 or max(to.pitch, of.pitch) <= MOST_PITCH
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
