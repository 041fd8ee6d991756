"""BlockSparseForm: the blocks that a block-sparse tensor stores, and their offsets in memory. Only arithmetic.

Each axis is cut into sections. The sections of all axes cut the tensor into blocks; some are stored, all others are 0.
Follows `cutensorCreateBlockSparseTensorDescriptor`,
others are 0. Follows `cutensorCreateBlockSparseTensorDescriptor`,
https://docs.nvidia.com/cuda/cutensor/latest/api/cutensor.html.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from dispatch.checks import check_int, names_arguments, shown
from dispatch.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dispatch.keys import Dtype

__all__ = ["ALIGNMENT", "BlockSparseForm", "block_offsets", "check_form", "has_gaps", "reachable", "size_of"]

Shape = tuple[int, ...]
ALIGNMENT = 256  # bytes: the offset of each block is a multiple of it, like the address of newly allocated memory
MAX_EXTENT = 2**62


@names_arguments
@dataclass(frozen=True)
class BlockSparseForm:
    """The description of a block-sparse tensor, without its elements.

    The elements are in one dense tensor of one axis: the blocks in sequence, each in C order, at offsets that are
    multiples of 256 bytes. Elements between the blocks are not read. In results they are 0, unless the result is also
    the added operand.

    Attributes:
        sections: for each axis the extents of its sections, each 1 or more: ((4, 2), (2, 3, 7)).
        blocks: for each stored block the index of its section along each axis: ((0, 0), (1, 2)), in the order of the
            blocks in memory; each once.
    """

    sections: tuple[Shape, ...]
    blocks: tuple[Shape, ...]

    def __post_init__(self) -> None:
        sections = tuple(
            tuple(check_int(f"sections[{axis}]", extent, 1, MAX_EXTENT) for extent in items(f"sections[{axis}]", one))
            for axis, one in enumerate(items("sections", self.sections))
        )
        for axis, one in enumerate(sections):
            if not one:
                raise BadRequest(f"sections[{axis}]", "none", "at least one section, such as (4,)")
        blocks = tuple(_block(number, one, sections) for number, one in enumerate(items("blocks", self.blocks)))
        if len(set(blocks)) < len(blocks):
            twice = next(one for number, one in enumerate(blocks) if one in blocks[:number])
            raise BadRequest("blocks", f"{list(twice)} twice", "each block once")
        object.__setattr__(self, "sections", sections)
        object.__setattr__(self, "blocks", blocks)
        object.__setattr__(self, "_hash", hash((sections, blocks)))  # hashing long tuples in each call would be slow

    def __hash__(self) -> int:
        value: int = vars(self)["_hash"]
        return value

    @property
    def shape(self) -> Shape:
        """The shape of the tensor including its zeros."""
        return tuple(map(sum, self.sections))

    @property
    def ndim(self) -> int:
        return len(self.sections)

    def shape_of(self, block: Shape) -> Shape:
        """The extents of a block."""
        return tuple(one[place] for one, place in zip(self.sections, block, strict=True))

    def slices_of(self, block: Shape) -> tuple[slice, ...]:
        """The location of a block in the tensor including its zeros."""
        offsets = [sum(one[:place]) for one, place in zip(self.sections, block, strict=True)]
        return tuple(slice(at, at + extent) for at, extent in zip(offsets, self.shape_of(block), strict=True))

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.shape))
        every = math.prod(map(len, self.sections))
        return f"<BlockSparseForm {shape}, {len(self.blocks)} of {every} blocks>"


def items(name: str, given: Any) -> Sequence[Any]:
    """The items of a tuple or list; BadRequest for anything else."""
    if not isinstance(given, (tuple, list)):
        raise BadRequest(name, shown(given), "a tuple or list")
    return given


def _block(number: int, given: Any, sections: tuple[Shape, ...]) -> Shape:
    name = f"blocks[{number}]"
    indices = items(name, given)
    if len(indices) != len(sections):
        raise BadRequest(name, shown(given), f"{len(sections)} numbers, one for each axis")
    return tuple(check_int(name, place, 0, len(one) - 1) for place, one in zip(indices, sections, strict=True))


def check_form(name: str, given: object) -> BlockSparseForm:
    """A form; BadRequest for anything else."""
    if not isinstance(given, BlockSparseForm):
        hint = "pass a BlockSparseTensor as *a: contract_block_sparse(spec, *a, *b)"
        raise BadRequest(name, shown(given), "a BlockSparseForm", hint)
    return given


@lru_cache(4096)
def block_offsets(form: BlockSparseForm, dtype: Dtype) -> tuple[int, ...]:
    """The offset of each block, in elements, and the end of the last one."""
    step = ALIGNMENT // dtype.itemsize
    sizes = [math.prod(form.shape_of(block)) for block in form.blocks]
    offsets = [0, *accumulate(-(-size // step) * step for size in sizes)]
    end = offsets[len(sizes) - 1] + sizes[-1] if sizes else 0
    return (*offsets[: len(sizes)], end)


def size_of(form: BlockSparseForm, dtype: Dtype) -> int:
    """The number of elements of the tensor of one axis that holds a form's blocks."""
    return block_offsets(form, dtype)[-1]


def has_gaps(form: BlockSparseForm, dtype: Dtype) -> bool:
    """Whether there are elements between blocks."""
    return size_of(form, dtype) != sum(math.prod(form.shape_of(block)) for block in form.blocks)


@lru_cache(1024)
def reachable(modes: tuple[str, ...], output: str, forms: tuple[BlockSparseForm, BlockSparseForm]) -> BlockSparseForm:
    """The blocks of a contraction's result that a pair of blocks contributes to, in the order of their coordinates."""
    first, second = forms
    sections, blocks = dict(sections_by_mode(modes, forms)), set()
    for one, other in matching_blocks(modes, first.blocks, second.blocks):
        at = {**dict(zip(modes[0], one, strict=True)), **dict(zip(modes[1], other, strict=True))}
        blocks.add(tuple(at[mode] for mode in output))
    return BlockSparseForm(tuple(sections[mode] for mode in output), tuple(sorted(blocks)))


def sections_by_mode(modes: tuple[str, ...], forms: Sequence[BlockSparseForm]) -> Iterable[tuple[str, Shape]]:
    """The sections along each mode, for each tensor that has it."""
    for term, form in zip(modes, forms, strict=True):
        yield from zip(term, form.sections, strict=True)


def matching_blocks(
    modes: tuple[str, ...], first: Sequence[Shape], second: Sequence[Shape]
) -> Iterable[tuple[Shape, Shape]]:
    """Each pair of blocks, one of each tensor, that have the same index along the common modes."""
    shared = [mode for mode in modes[0] if mode in modes[1]]
    at = [[term.index(mode) for mode in shared] for term in modes]
    by_index: dict[Shape, list[Shape]] = {}
    for other in second:
        by_index.setdefault(tuple(other[axis] for axis in at[1]), []).append(other)
    for one in first:
        for other in by_index.get(tuple(one[axis] for axis in at[0]), ()):
            yield one, other
