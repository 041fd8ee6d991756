"""BlockSparseForm: which blocks a block-sparse tensor has, and where they lie in memory. Pure arithmetic.

Each axis is cut into sections; the sections of all axes cut the tensor into blocks, of which some are there and all
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
ALIGNMENT = 256  # bytes: at multiples of it blocks begin, as memory of their own would
MAX_EXTENT = 2**62


@names_arguments
@dataclass(frozen=True)
class BlockSparseForm:
    """What of a block-sparse tensor is no memory.

    Its elements lie in one dense tensor of one axis: the blocks one behind another, each in C order, from multiples of
    256 bytes on. What lies between them is not read, and is 0 in results, unless they are what they are added to.

    Attributes:
        sections: for each axis the extents of its sections, each 1 or more: ((4, 2), (2, 3, 7)).
        blocks: for each block that is there the number of its section along each axis: ((0, 0), (1, 2)), in the order
            in which they lie in memory; each once.
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
                raise BadRequest(f"sections[{axis}]", "none", "a section at least, such as (4,)")
        blocks = tuple(_block(number, one, sections) for number, one in enumerate(items("blocks", self.blocks)))
        if len(set(blocks)) < len(blocks):
            twice = next(one for number, one in enumerate(blocks) if one in blocks[:number])
            raise BadRequest("blocks", f"{list(twice)} twice", "each block once")
        object.__setattr__(self, "sections", sections)
        object.__setattr__(self, "blocks", blocks)
        object.__setattr__(self, "_hash", hash((sections, blocks)))  # of long tuples, which each call would take anew

    def __hash__(self) -> int:
        found: int = vars(self)["_hash"]
        return found

    @property
    def shape(self) -> Shape:
        """That of the tensor with its zeros."""
        return tuple(map(sum, self.sections))

    @property
    def ndim(self) -> int:
        return len(self.sections)

    def shape_of(self, block: Shape) -> Shape:
        """The extents of a block."""
        return tuple(one[place] for one, place in zip(self.sections, block, strict=True))

    def slices_of(self, block: Shape) -> tuple[slice, ...]:
        """Where a block is in the tensor with its zeros."""
        offsets = [sum(one[:place]) for one, place in zip(self.sections, block, strict=True)]
        return tuple(slice(at, at + extent) for at, extent in zip(offsets, self.shape_of(block), strict=True))

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.shape))
        every = math.prod(map(len, self.sections))
        return f"<BlockSparseForm {shape}, {len(self.blocks)} of {every} blocks>"


def items(name: str, given: Any) -> Sequence[Any]:
    """What is in a tuple or list; BadRequest for anything else."""
    if not isinstance(given, (tuple, list)):
        raise BadRequest(name, shown(given), "a tuple or list")
    return given


def _block(number: int, given: Any, sections: tuple[Shape, ...]) -> Shape:
    name = f"blocks[{number}]"
    found = items(name, given)
    if len(found) != len(sections):
        raise BadRequest(name, shown(given), f"{len(sections)} numbers, one for each axis")
    return tuple(check_int(name, place, 0, len(one) - 1) for place, one in zip(found, sections, strict=True))


def check_form(name: str, given: object) -> BlockSparseForm:
    """A form; BadRequest for anything else."""
    if not isinstance(given, BlockSparseForm):
        hint = "a BlockSparseTensor a unpacks into both: contract_block_sparse(spec, *a, *b)"
        raise BadRequest(name, shown(given), "a BlockSparseForm", hint)
    return given


@lru_cache(4096)
def block_offsets(form: BlockSparseForm, dtype: Dtype) -> tuple[int, ...]:
    """Where each block begins, in elements, and where the last one ends."""
    step = ALIGNMENT // dtype.itemsize
    sizes = [math.prod(form.shape_of(block)) for block in form.blocks]
    offsets = [0, *accumulate(-(-size // step) * step for size in sizes)]
    end = offsets[len(sizes) - 1] + sizes[-1] if sizes else 0
    return (*offsets[: len(sizes)], end)


def size_of(form: BlockSparseForm, dtype: Dtype) -> int:
    """The elements of the tensor of one axis that holds a form's blocks."""
    return block_offsets(form, dtype)[-1]


def has_gaps(form: BlockSparseForm, dtype: Dtype) -> bool:
    """Whether anything lies between blocks."""
    return size_of(form, dtype) != sum(math.prod(form.shape_of(block)) for block in form.blocks)


@lru_cache(1024)
def reachable(modes: tuple[str, ...], output: str, forms: tuple[BlockSparseForm, BlockSparseForm]) -> BlockSparseForm:
    """The blocks of a contraction's result that a pair of blocks adds to, in the order of their places."""
    first, second = forms
    known, found = dict(sections_by_mode(modes, forms)), set()
    for one, other in matching_blocks(modes, first.blocks, second.blocks):
        at = {**dict(zip(modes[0], one, strict=True)), **dict(zip(modes[1], other, strict=True))}
        found.add(tuple(at[mode] for mode in output))
    return BlockSparseForm(tuple(known[mode] for mode in output), tuple(sorted(found)))


def sections_by_mode(modes: tuple[str, ...], forms: Sequence[BlockSparseForm]) -> Iterable[tuple[str, Shape]]:
    """The sections along each mode, of each tensor that has it."""
    for term, form in zip(modes, forms, strict=True):
        yield from zip(term, form.sections, strict=True)


def matching_blocks(
    modes: tuple[str, ...], first: Sequence[Shape], second: Sequence[Shape]
) -> Iterable[tuple[Shape, Shape]]:
    """Each pair of blocks, one of each tensor, that are alike along the modes of both."""
    shared = [mode for mode in modes[0] if mode in modes[1]]
    at = [[term.index(mode) for mode in shared] for term in modes]
    known: dict[Shape, list[Shape]] = {}
    for other in second:
        known.setdefault(tuple(other[axis] for axis in at[1]), []).append(other)
    for one in first:
        for other in known.get(tuple(one[axis] for axis in at[0]), ()):
            yield one, other
