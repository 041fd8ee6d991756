"""Column-major matrices, and vectors of any step, in memory of the host at an address."""

import ctypes

import numpy as np
import scipy.linalg.blas as blas
from numpy.lib.stride_tricks import as_strided

LETTERS = {"f32": "s", "f64": "d", "c64": "c", "c128": "z"}


def memory(address, count, dtype):
    """So many elements at an address."""
    raw = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(raw, dtype)


def matrix(address, rows, columns, ld, dtype):
    """A column-major matrix at an address."""
    assert ld >= max(rows, 1), f"a leading dimension of {ld} for {rows} rows"
    if rows * columns == 0:
        return np.zeros((rows, columns), dtype)
    whole = memory(address, ld * (columns - 1) + rows, dtype)
    return as_strided(whole, (rows, columns), (dtype.itemsize, ld * dtype.itemsize))


def op(a, trans):
    return (a, a.T, np.conj(a.T))[trans]


def of_scipy(routine, dtype):
    return getattr(blas, f"{LETTERS[dtype.name]}{routine}")


def put(target, found, uplo=None):
    """Write a result, or the triangle of it that is one."""
    if uplo is None:
        target[...] = found
    else:
        here = np.triu(np.ones(target.shape, bool)) if uplo else np.tril(np.ones(target.shape, bool))
        target[here] = found[here]


def vector(address, n, step, dtype):
    """The elements of a vector in their order."""
    assert step != 0
    if n == 0:
        return np.zeros(0, dtype)
    return memory(address, (n - 1) * abs(step) + 1, dtype)[:: abs(step)][:: 1 if step > 0 else -1]
