"""Descriptors of matrices in sliced and in blocked ELL, made anew where their memory is elsewhere.

Follows https://docs.nvidia.com/cuda/cusparse/#cusparse-generic-api-reference. Indices begin with 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind.sys import cusparse
from dispatch.libraries.cusparse.descriptors import INDEX_TYPES, Descriptor

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BlockedEll", "EllMatrix", "SlicedEll"]


class SlicedEll(NamedTuple):
    """What the descriptor of a matrix in sliced ELL is made of; the places are those of its operands' addresses."""

    shape: tuple[int, int]
    nnz: int
    size: int  # of values, padding among them
    slice_size: int
    offset_bytes: int
    column_bytes: int
    value_type: int
    offsets: int
    columns: int
    values: int


class BlockedEll(NamedTuple):
    """The same of blocked ELL."""

    shape: tuple[int, int]
    block: int
    width: int  # of values
    column_bytes: int
    value_type: int
    columns: int
    values: int


class EllMatrix(Descriptor):
    """A `cusparseSpMatDescr_t` of either."""

    __slots__ = ("_at", "_said")

    def __init__(self, said: SlicedEll | BlockedEll, placeholder: int) -> None:
        self._said = said
        self._make((placeholder, placeholder, placeholder))

    def _make(self, parts: tuple[Any, Any, Any]) -> None:
        said = self._said
        offsets, columns, values = parts
        self.c, self._at = cusparse.cusparseSpMatDescr_t(), parts
        base, kind = cusparse.cusparseIndexBase_t.CUSPARSE_INDEX_BASE_ZERO, cusparse.cudaDataType(said.value_type)
        index = INDEX_TYPES[said.column_bytes]
        if isinstance(said, SlicedEll):
            sizes = (*said.shape, said.nnz, said.size, said.slice_size)
            kinds = (INDEX_TYPES[said.offset_bytes], index, base, kind)
            cusparse.cusparseCreateSlicedEll(self.c, *sizes, offsets, columns, values, *kinds)
        else:
            (m, n), block, width = said.shape, said.block, said.width
            cusparse.cusparseCreateBlockedEll(self.c, m, n, block, width, columns, values, index, base, kind)

    def point(self, addresses: Sequence[Any]) -> None:
        said = self._said
        offsets = addresses[said.offsets] if isinstance(said, SlicedEll) else self._at[0]
        parts = (offsets, addresses[said.columns], addresses[said.values])
        if parts != self._at:
            self.destroy()
            self._make(parts)

    def destroy(self) -> None:
        cusparse.cusparseDestroySpMat.unchecked(self.c)
        self.c = None
