"""cuSOLVER's refactorization: many sparse matrices of one pattern, whose LU pattern was found once, on the host."""

from __future__ import annotations

import numpy as np
import pytest

from cudabind.errors import CusolverError
from cudabind.sys import cusolverRf as rf

LIBRARIES = ("cusolverRf",)


@pytest.fixture
def handle(gpu):
    made = gpu.make(rf.cusolverRfHandle_t, rf.cusolverRfCreate, rf.cusolverRfDestroy)
    # L is given without the ones on its diagonal.
    assumed = rf.cusolverRfUnitDiagonal_t.CUSOLVERRF_UNIT_DIAGONAL_ASSUMED_L
    rf.cusolverRfSetMatrixFormat(made, rf.cusolverRfMatrixFormat_t.CUSOLVERRF_MATRIX_FORMAT_CSR, assumed)
    return made


def lu(a):
    """The factors without row exchanges, L without its diagonal of ones."""
    factors = a.copy()
    for i in range(len(a)):
        factors[i + 1 :, i] /= factors[i, i]
        factors[i + 1 :, i + 1 :] -= np.outer(factors[i + 1 :, i], factors[i, i + 1 :])
    return np.tril(factors, -1), np.triu(factors)


def dominant(values):
    """The same matrix with a diagonal so large that no row exchanges are needed."""
    a = values.copy()
    a[np.diag_indices(len(a))] = 1 + np.abs(a).sum(axis=1)
    return a


def test_a_second_matrix_of_the_same_pattern_is_factored_and_solved(gpu, handle, sparse_matrix, csr, rng, solves):
    n = 47
    pattern = sparse_matrix(n, n)
    p, q = (rng.permutation(n).astype(np.int32) for _ in range(2))
    first, second = np.zeros((n, n)), np.zeros((n, n))
    first[np.ix_(p, q)] = dominant(pattern)
    second[np.ix_(p, q)] = dominant(pattern * rng.uniform(0.5, 2, (n, n)))

    # L·U = a[p][:, q], of the first matrix: it is set up in host memory.
    parts = [csr(matrix) for matrix in (first, *lu(first[np.ix_(p, q)]))]
    rf.cusolverRfSetupHost(
        n,
        *(x for o, c, v in parts for x in (len(v), o.ctypes.data, c.ctypes.data, v.ctypes.data)),
        *(p.ctypes.data, q.ctypes.data, handle),
    )
    rf.cusolverRfAnalyze(handle)

    offsets, columns, values = csr(second)
    d_p, d_q = gpu.array(p), gpu.array(q)
    rf.cusolverRfResetValues(
        *(n, len(values), gpu.array(offsets).ptr, gpu.array(columns).ptr, gpu.array(values).ptr),
        *(d_p.ptr, d_q.ptr, handle),
    )
    rf.cusolverRfRefactor(handle)
    b = rng.standard_normal(n)
    d_x, work = gpu.array(b), gpu.poisoned(n, np.float64)
    rf.cusolverRfSolve(handle, d_p.ptr, d_q.ptr, 1, work.ptr, n, d_x.ptr, n)
    solves(d_x.numpy(), second, b)


def test_a_zero_on_the_way_is_refused_by_name(gpu, handle, csr):
    n, none = 5, (np.zeros(6, np.int32), np.zeros(0, np.int32), np.zeros(0))  # L has but its ones
    offsets, columns, values = diagonal = csr(np.eye(n))
    rf.cusolverRfSetupHost(
        n,
        *(x for o, c, v in (diagonal, none, diagonal) for x in (len(v), o.ctypes.data, c.ctypes.data, v.ctypes.data)),
        *(columns.ctypes.data, columns.ctypes.data, handle),
    )
    rf.cusolverRfAnalyze(handle)
    values[3] = 0
    same = gpu.array(columns).ptr  # the columns of a diagonal are the permutation that changes nothing
    rf.cusolverRfResetValues(n, n, gpu.array(offsets).ptr, same, gpu.array(values).ptr, same, same, handle)
    with pytest.raises(CusolverError) as caught:
        rf.cusolverRfRefactor(handle)
    assert caught.value.name == "CUSOLVER_STATUS_ZERO_PIVOT"
    assert caught.value.function == "cusolverRfRefactor"
    assert not caught.value.sticky
