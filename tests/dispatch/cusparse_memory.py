"""Memory of the host as cuSPARSE's stand-in reads it, and what its descriptors say of a matrix there."""

import ctypes
from types import SimpleNamespace

import numpy as np

from cudabind.sys import cusparse
from dispatch.keys import BF16, C64, C128, F16, F32, F64

DTYPES = {dtype.cuda: dtype.numpy for dtype in (F32, F64, C64, C128, F16, BF16)}
INDICES = {2: np.dtype(np.int32), 3: np.dtype(np.int64)}
CSR, CSC, COO, BSR = 1, 2, 3, 6
WORK = 72  # bytes
PLACEHOLDER = 256
NOT_SUPPORTED = cusparse.cusparseStatus_t.CUSPARSE_STATUS_NOT_SUPPORTED
INVALID_VALUE = cusparse.cusparseStatus_t.CUSPARSE_STATUS_INVALID_VALUE
INTERNAL_ERROR = cusparse.cusparseStatus_t.CUSPARSE_STATUS_INTERNAL_ERROR
ITEMS = {"S": 4, "D": 8, "C": 8, "Z": 16}


def memory_at(address, nbytes):
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), np.uint8)


def array_at(address, dtype, *shape):
    assert address != PLACEHOLDER, "the placeholder is read"
    size = int(np.prod(shape))
    assert address or not size
    return (
        np.ndarray(shape, dtype, memory_at(address, size * np.dtype(dtype).itemsize))
        if size
        else np.zeros(shape, dtype)
    )


def address_of(argument):
    return (argument.value if isinstance(argument, ctypes.c_void_p) else argument) or 0


class Memory:
    """Memory of a device that holds NaN."""

    def __init__(self, nbytes):
        self.array = np.full(nbytes + 256, 0xFF, np.uint8)
        self.base = -(-self.array.ctypes.data // 256) * 256
        self.owner = self.writer = None


class Matrix(SimpleNamespace):
    """What a descriptor of a sparse matrix says."""

    def places(self):
        """The row and the column of each element, or block, and where the values are."""
        value_type, (rows, columns) = DTYPES[self.value_type], (INDICES[kind] for kind in self.kinds)
        m, n = self.m, self.n
        shape = (self.nnz, *self.block) if self.format == BSR else (self.nnz,)
        values = array_at(self.values, value_type, *shape)
        if self.format == COO:
            row, column = array_at(self.rows, rows, self.nnz), array_at(self.columns, rows, self.nnz)
            assert (np.diff(row) >= 0).all(), "COO is sorted by row"
            return row - self.base, column - self.base, values
        lines = m if self.format != CSC else n
        at = (self.rows, self.columns) if self.format != CSC else (self.columns, self.rows)
        ends = array_at(at[0], rows, lines + 1)
        assert ends[0] == self.base
        assert ends[-1] == self.base + self.nnz
        across = array_at(at[1], columns, self.nnz) - self.base
        along = np.repeat(np.arange(lines), np.diff(ends))
        row, column = (along, across) if self.format != CSC else (across, along)
        return row, column, values

    def is_at_vectors(self):
        """Whether all parts begin at multiples of 16 bytes."""
        return not any(at % 16 for at in (self.values, self.rows, self.columns))

    def dense(self, values=None):
        row, column, own = self.places()
        values = own if values is None else values
        work = np.complex128 if values.dtype.kind == "c" else np.float64
        found = np.zeros((self.m, self.n, *self.block), work)
        np.add.at(found, (row, column), values.reshape(-1, *self.block).astype(work))
        return found.transpose(0, 2, 1, 3).reshape(self.m * self.block[0], self.n * self.block[1])


class Dense(SimpleNamespace):
    def array(self):
        dtype = DTYPES[self.value_type]
        if self.by_rows is None:
            return array_at(self.values, dtype, self.m)
        long, short = (self.m, self.n) if self.by_rows else (self.n, self.m)
        assert self.ld >= max(1, short)
        reach = (long - 1) * self.ld + short if long and short else 0
        flat = array_at(self.values, dtype, reach)
        lines = np.lib.stride_tricks.as_strided(flat, (long, short), (self.ld * dtype.itemsize, dtype.itemsize))
        return lines if self.by_rows else lines.T


def turned(array, operation):
    return {0: array, 1: array.T, 2: array.conj().T}[int(operation)]


def number_at(pointer, kind):
    return array_at(address_of(pointer), DTYPES[kind], 1)[0]
