"""Matrices in memory of the host as cuSOLVER sees them, and the kernels between its routines: copies and flags."""

import ctypes

import numpy as np

from dispatch.libraries.cusolver.copies import CopyMode


def memory_at(address, nbytes):
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), np.uint8)


def strided(address, dtype, shape, strides):
    """An array over memory; strides in elements."""
    size = np.dtype(dtype).itemsize
    reach = [(extent - 1) * stride * size for extent, stride in zip(shape, strides, strict=True)]
    low, high = sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach) + size
    flat = memory_at(address + low, high - low)
    steps = tuple(stride * size for stride in strides)
    return np.ndarray(shape, dtype, flat, -low, steps)


def value(argument):
    return argument.value or 0 if isinstance(argument, ctypes.c_void_p) else int(argument)


def columns(pointer, dtype, rows, cols, ld):
    assert ld >= max(1, rows)
    return strided(value(pointer), dtype, (rows, cols), (1, ld))


class Memory:
    """Memory of a device that holds NaN."""

    def __init__(self, nbytes):
        self.array = np.full(nbytes + 256, 0xFF, np.uint8)
        self.base = -(-self.array.ctypes.data // 256) * 256
        self.owner = self.writer = None


class Copy:
    def __init__(self, executor, source, target, batch, keep, *, conj):
        self.given = source, target, batch, keep, conj

    def enqueue(self, addresses):
        source, target, batch, keep, conj = self.given
        assert (source.rows, source.cols) == (target.rows, target.cols)
        for number in range(batch):
            one, other = (of_batch(matrix, addresses, number) for matrix in (source, target))
            strictly = {
                CopyMode.STRICT_UPPER: ~np.tri(*one.shape, dtype=bool),
                CopyMode.STRICT_LOWER: np.tri(*one.shape, k=-1, dtype=bool),
            }
            if keep in strictly:  # the rest of the target stays
                other[strictly[keep]] = (one.conj() if conj else one)[strictly[keep]]
                continue
            if keep in (CopyMode.IDENTITY, CopyMode.ZERO):
                values = np.eye(*one.shape) * (keep is CopyMode.IDENTITY)
            else:
                kept = (
                    np.tri(*one.shape, dtype=bool) if keep is CopyMode.LOWER else ~np.tri(*one.shape, k=-1, dtype=bool)
                )
                values = one.copy() if keep is CopyMode.ALL else np.where(kept, one, 0)
            other[...] = values.conj() if conj else values


def of_batch(matrix, addresses, number):
    place = matrix.pointer
    at = addresses[place.operand] + place.offset + number * place.batch_stride
    return strided(at, matrix.dtype.numpy, (matrix.rows, matrix.cols), (matrix.row_stride, matrix.col_stride))


class FillNanWhere:
    def __init__(self, executor, info, target, batch):
        self.given = info, target, batch

    def enqueue(self, addresses):
        info, target, batch = self.given
        statuses = strided(addresses[info.operand] + info.offset, np.int32, (batch,), (1,))
        for number in np.flatnonzero(statuses).tolist():
            one = of_batch(target, addresses, number)
            one[...] = complex(np.nan, np.nan) if one.dtype.kind == "c" else np.nan


class FlagNonfinite:
    def __init__(self, executor, source, flags, batch):
        self.given = source, flags, batch

    def enqueue(self, addresses):
        source, flags, batch = self.given
        found = strided(addresses[flags.operand] + flags.offset, np.int32, (batch,), (1,))
        for number in range(batch):
            found[number] |= not np.isfinite(of_batch(source, addresses, number)).all()


class PointerList:
    def __init__(self, executor, matrix, target, batch):
        self.given = matrix, target, batch

    def enqueue(self, addresses):
        matrix, target, batch = self.given
        first = addresses[matrix.pointer.operand] + matrix.pointer.offset
        at = addresses[target.operand] + target.offset
        strided(at, np.int64, (batch,), (1,))[...] = first + matrix.pointer.batch_stride * np.arange(batch)
