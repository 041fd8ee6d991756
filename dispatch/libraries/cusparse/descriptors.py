"""Descriptors of sparse and dense operands: created once with a plan, and updated with the addresses of each run.

Descriptors are in host memory only. cuSPARSE does not accept a null address if there are elements, so each is created
with the address of a `placeholder`, which is never read. Follows
https://docs.nvidia.com/cuda/cusparse/#cusparse-generic-api-reference.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind.errors import CusparseError
from cudabind.sys import cusparse
from dispatch.errors import Refused
from dispatch.libraries.finalizer import finalizer

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NULL_ADDRESS", "DenseMatrix", "DenseVector", "Descriptor", "SparseMatrix", "SparseSpec", "SparseVector"]

INDEX_TYPES = {4: cusparse.cusparseIndexType_t.CUSPARSE_INDEX_32I, 8: cusparse.cusparseIndexType_t.CUSPARSE_INDEX_64I}
PARTS = 3
# What it says of two index widths, or of more elements than a matrix has places, depending on its version.
REFUSALS = ("CUSPARSE_STATUS_NOT_SUPPORTED", "CUSPARSE_STATUS_INVALID_VALUE")
NULL_ADDRESS = 0  # for a matrix without elements whose memory is allocated later: any write faults


class SparseSpec(NamedTuple):
    """The fields of the descriptor of a sparse matrix; places are the indices of its operands among a plan's addresses.

    `rows` and `columns` hold offsets or indices, depending on the format. For BSR `nnz` counts blocks.
    """

    format: int  # a cusparseFormat_t
    shape: tuple[int, int]
    nnz: int
    base: int
    block: tuple[int, int]
    value_type: int  # a cudaDataType_t
    row_bytes: int  # of an element of `rows`
    column_bytes: int
    values: int
    rows: int
    columns: int
    fill: int | None = None
    diag: int | None = None


class Descriptor:
    """A descriptor of a library, whose addresses differ between runs."""

    __slots__ = ("__weakref__", "c")

    c: Any

    def set_addresses(self, addresses: Sequence[Any]) -> None:
        """Set the addresses of a run's operands."""
        raise NotImplementedError

    def destroy(self) -> None:
        """Destroy it; a second call does nothing."""
        raise NotImplementedError

    @finalizer
    def __del__(self) -> None:
        if getattr(self, "c", None):
            self.destroy()


class DenseVector(Descriptor):
    """A vector with contiguous elements."""

    __slots__ = ("_place",)

    def __init__(self, size: int, value_type: int, place: int, placeholder: int) -> None:
        self._place = place
        self.c = cusparse.cusparseDnVecDescr_t()
        kind = cusparse.cudaDataType(value_type)
        cusparse.cusparseCreateDnVec(self.c, size, placeholder if size else None, kind)

    def set_addresses(self, addresses: Sequence[Any]) -> None:
        cusparse.cusparseDnVecSetValues(self.c, addresses[self._place] or None)

    def destroy(self) -> None:
        cusparse.cusparseDestroyDnVec.unchecked(self.c)
        self.c = None


class SparseVector(Descriptor):
    """A sparse vector; it is recreated if its indices are at another address, because the library has no setter."""

    __slots__ = ("_addresses", "_given", "_places")

    def __init__(
        self,
        sizes: tuple[int, int],
        index_bytes: int,
        base: int,
        value_type: int,
        places: tuple[int, int],
        placeholder: int,
    ) -> None:
        """`sizes` are those of the whole vector and of its stored elements, `places` those of indices and values."""
        self._places = places
        kind = cusparse.cudaDataType(value_type)
        self._given = sizes, (INDEX_TYPES[index_bytes], cusparse.cusparseIndexBase_t(base), kind)
        self._make((placeholder, placeholder))

    def _make(self, parts: tuple[Any, Any]) -> None:
        (size, nnz), (index, base, kind) = self._given
        self.c, self._addresses = cusparse.cusparseSpVecDescr_t(), parts
        cusparse.cusparseCreateSpVec(self.c, size, nnz, *parts, index, base, kind)

    def set_addresses(self, addresses: Sequence[Any]) -> None:
        indices, values = (addresses[place] or None for place in self._places)
        if indices != self._addresses[0]:
            self.destroy()
            self._make((indices, values))
        elif values != self._addresses[1]:
            cusparse.cusparseSpVecSetValues(self.c, values)
            self._addresses = indices, values

    def destroy(self) -> None:
        cusparse.cusparseDestroySpVec.unchecked(self.c)
        self.c = None


class DenseMatrix(Descriptor):
    """A row-major or column-major matrix; `ld` is the leading dimension."""

    __slots__ = ("_place",)

    def __init__(
        self, shape: tuple[int, int], ld: int, value_type: int, place: int, placeholder: int, *, by_rows: bool
    ) -> None:
        self._place = place
        self.c = cusparse.cusparseDnMatDescr_t()
        order = cusparse.cusparseOrder_t
        chosen = order.CUSPARSE_ORDER_ROW if by_rows else order.CUSPARSE_ORDER_COL
        kind = cusparse.cudaDataType(value_type)
        cusparse.cusparseCreateDnMat(self.c, *shape, ld, placeholder, kind, chosen)

    def set_batch(self, count: int, step: int) -> None:
        """Make it describe a batch whose matrices have this stride in elements."""
        cusparse.cusparseDnMatSetStridedBatch(self.c, count, step)

    def set_addresses(self, addresses: Sequence[Any]) -> None:
        cusparse.cusparseDnMatSetValues(self.c, addresses[self._place] or None)

    def destroy(self) -> None:
        cusparse.cusparseDestroyDnMat.unchecked(self.c)
        self.c = None


class SparseMatrix(Descriptor):
    """A sparse matrix; Refused if cuSPARSE rejects its form.

    For BSR it is recreated if its indices are at another address, because there is no setter.
    """

    __slots__ = ("_addresses", "spec")

    def __init__(self, spec: SparseSpec, placeholder: int) -> None:
        self.spec = spec
        try:
            self._make((placeholder,) * PARTS)
        except CusparseError as error:
            if error.name not in REFUSALS:
                raise
            rows, columns = (8 * nbytes for nbytes in (spec.row_bytes, spec.column_bytes))
            text = f"{spec.nnz} elements in {spec.shape[0]} x {spec.shape[1]}, indices of {rows} and {columns} bits"
            raise Refused(f"{error.function} rejects {text}: {error.name}") from error

    def _make(self, parts: tuple[Any, ...]) -> None:
        spec, formats = self.spec, cusparse.cusparseFormat_t
        values, rows, columns = parts if spec.nnz else (None, *parts[1:])
        kinds = INDEX_TYPES[spec.row_bytes], INDEX_TYPES[spec.column_bytes]
        base, kind = cusparse.cusparseIndexBase_t(spec.base), cusparse.cudaDataType(spec.value_type)
        self.c, self._addresses = cusparse.cusparseSpMatDescr_t(), parts
        (m, n), (high, wide) = spec.shape, spec.block
        arguments: tuple[Any, ...]
        make: Any
        if spec.format == formats.CUSPARSE_FORMAT_CSR:
            make = cusparse.cusparseCreateCsr
            arguments = (m, n, spec.nnz, rows, columns if spec.nnz else None, values, *kinds, base, kind)
        elif spec.format == formats.CUSPARSE_FORMAT_CSC:
            make = cusparse.cusparseCreateCsc
            arguments = (m, n, spec.nnz, columns, rows if spec.nnz else None, values, *kinds[::-1], base, kind)
        elif spec.format == formats.CUSPARSE_FORMAT_COO:
            make = cusparse.cusparseCreateCoo
            places = (rows, columns) if spec.nnz else (None, None)
            arguments = (m, n, spec.nnz, *places, values, kinds[0], base, kind)
        else:
            make = cusparse.cusparseCreateBsr
            sizes = (m // high, n // wide, spec.nnz, high, wide)
            order = cusparse.cusparseOrder_t.CUSPARSE_ORDER_ROW
            arguments = (*sizes, rows, columns if spec.nnz else None, values, *kinds, base, kind, order)
        make(self.c, *arguments)
        attributes = cusparse.cusparseSpMatAttribute_t
        for attribute, number in (
            (attributes.CUSPARSE_SPMAT_FILL_MODE, spec.fill),
            (attributes.CUSPARSE_SPMAT_DIAG_TYPE, spec.diag),
        ):
            if number is not None:
                held = ctypes.c_int32(number)
                cusparse.cusparseSpMatSetAttribute(self.c, attribute, ctypes.byref(held), ctypes.sizeof(held))

    def set_batch(self, count: int, offsets: int, elements: int) -> None:
        """Make a matrix in CSR or COO describe a batch; with a stride of 0 all matrices share a part.

        `offsets` is the stride of row offsets in CSR, `elements` that of indices and values.
        """
        if self.spec.format == cusparse.cusparseFormat_t.CUSPARSE_FORMAT_COO:
            cusparse.cusparseCooSetStridedBatch(self.c, count, elements)
        else:
            cusparse.cusparseCsrSetStridedBatch(self.c, count, offsets, elements)

    @property
    def indices_at(self) -> tuple[Any, ...]:
        """The addresses of rows and columns."""
        return self._addresses[1:]

    def set_addresses(self, addresses: Sequence[Any]) -> None:
        spec, formats = self.spec, cusparse.cusparseFormat_t
        parts = tuple(addresses[place] or None for place in (spec.values, spec.rows, spec.columns))
        if parts == self._addresses:
            return
        values, rows, columns = parts
        if spec.format == formats.CUSPARSE_FORMAT_CSR:
            cusparse.cusparseCsrSetPointers(self.c, rows, columns, values)
        elif spec.format == formats.CUSPARSE_FORMAT_CSC:
            cusparse.cusparseCscSetPointers(self.c, columns, rows, values)
        elif spec.format == formats.CUSPARSE_FORMAT_COO:
            cusparse.cusparseCooSetPointers(self.c, rows, columns, values)
        elif parts[1:] == self._addresses[1:]:
            cusparse.cusparseSpMatSetValues(self.c, values)
        else:
            self.destroy()
            self._make(parts)
        self._addresses = parts

    def destroy(self) -> None:
        cusparse.cusparseDestroySpMat.unchecked(self.c)
        self.c = None
