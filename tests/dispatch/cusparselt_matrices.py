"""Matrices in memory of the host as cuSPARSELt's descriptors say that they lie there."""

import ctypes
from types import SimpleNamespace

import numpy as np

from cudabind.sys import cusparseLt as lt
from dispatch.ops.structured.form import StructuredForm
from dispatch.ops.structured.layout import host_bytes, unpack

ROW = lt.cusparseOrder_t.CUSPARSE_ORDER_ROW
PLACEHOLDER = 1 << 20  # the address of a workspace that nobody reads


def address_of(argument):
    return (argument.value if isinstance(argument, ctypes.c_void_p) else argument) or 0


def memory_at(address, nbytes):
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), np.uint8)


def array_at(address, dtype, shape, strides):
    """Elements at an address with steps in elements."""
    assert address % 16 == 0, "an address is a multiple of 16 bytes"
    assert address != PLACEHOLDER, "the placeholder is read"
    reach = 1 + sum((extent - 1) * step for extent, step in zip(shape, strides, strict=True))
    memory = memory_at(address, reach * dtype.itemsize)
    return np.ndarray(shape, dtype.numpy, memory, strides=[step * dtype.itemsize for step in strides])


class Memory:
    """Memory of a device that holds NaN."""

    def __init__(self, nbytes):
        self.array = np.full(nbytes + 256, 0xFF, np.uint8)
        self.base = -(-self.array.ctypes.data // 256) * 256
        self.owner = self.writer = None


class MatrixSpec(SimpleNamespace):
    """What the descriptor of a matrix says."""

    @property
    def shape(self):
        return (self.batch, self.rows, self.cols)

    def at(self, address):
        """The matrices at an address, (batch, rows, cols)."""
        steps = (self.ld, 1) if self.order == ROW else (1, self.ld)
        return array_at(address, self.dtype, self.shape, (self.stride, *steps))

    def compressed_at(self, address, operation):
        """Matrices (batch, m, k) of the host's compressed bytes; one where a batch has one for all."""
        batch = self.batch if self.stride else 1
        m, k = (self.rows, self.cols) if operation == 0 else (self.cols, self.rows)
        form = StructuredForm((batch, m, k), self.dtype.name)
        assert self.ld == (self.cols if self.order == ROW else self.rows), "compressed matrices were dense"
        assert batch == 1, "how the library lays out a batch is not known"
        data = memory_at(address, host_bytes(form.shape, self.dtype))
        return np.broadcast_to(unpack(data, form), (self.batch, m, k))

    def bytes(self):
        """Of one matrix, however many there are."""
        return host_bytes((1, self.rows, self.cols), self.dtype)


def turned(array, operation):
    return array if operation == 0 else array.swapaxes(-1, -2)
