"""Descriptors of matrices in sliced and in blocked ELL, recreated if their memory is at other addresses.

Follows https://docs.nvidia.com/cuda/cusparse/#cusparse-generic-api-reference. Indices begin at 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind.sys import cusparse
from dispatch.libraries.cusparse.descriptors import INDEX_TYPES, Descriptor

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BlockedEllSpec", "EllMatrix", "SlicedEllSpec"]


class SlicedEllSpec(NamedTuple):
    """The fields of the descriptor of a matrix in sliced ELL; places are the indices of its operands' addresses."""

    shape: tuple[int, int]
    nnz: int
    size: int  # of values, including padding
    slice_size: int
    offset_bytes: int
    column_bytes: int
    value_type: int
    offsets: int
    columns: int
    values: int


class BlockedEllSpec(NamedTuple):
    """The same for blocked ELL."""

    shape: tuple[int, int]
    block: int
    width: int  # of values
    column_bytes: int
    value_type: int
    columns: int
    values: int


class EllMatrix(Descriptor):
    """A `cusparseSpMatDescr_t` in either format."""

    __slots__ = ("_addresses", "_spec")

    def __init__(self, spec: SlicedEllSpec | BlockedEllSpec, placeholder: int) -> None:
        self._spec = spec
        self._make((placeholder, placeholder, placeholder))

    def _make(self, parts: tuple[Any, Any, Any]) -> None:
        spec = self._spec
        offsets, columns, values = parts
        self.c, self._addresses = cusparse.cusparseSpMatDescr_t(), parts
        base, kind = cusparse.cusparseIndexBase_t.CUSPARSE_INDEX_BASE_ZERO, cusparse.cudaDataType(spec.value_type)
        index = INDEX_TYPES[spec.column_bytes]
        if isinstance(spec, SlicedEllSpec):
            sizes = (*spec.shape, spec.nnz, spec.size, spec.slice_size)
            kinds = (INDEX_TYPES[spec.offset_bytes], index, base, kind)
            cusparse.cusparseCreateSlicedEll(self.c, *sizes, offsets, columns, values, *kinds)
        else:
            (m, n), block, width = spec.shape, spec.block, spec.width
            cusparse.cusparseCreateBlockedEll(self.c, m, n, block, width, columns, values, index, base, kind)

    def set_addresses(self, addresses: Sequence[Any]) -> None:
        spec = self._spec
        offsets = addresses[spec.offsets] if isinstance(spec, SlicedEllSpec) else self._addresses[0]
        parts = (offsets, addresses[spec.columns], addresses[spec.values])
        if parts != self._addresses:
            self.destroy()
            self._make(parts)

    def destroy(self) -> None:
        cusparse.cusparseDestroySpMat.unchecked(self.c)
        self.c = None
