"""cuSOLVER for sparse matrices: systems solved by QR, LU and Cholesky, on the device and on the host.

Matrices are in CSR form with 32-bit indices. The functions whose names end in Host take host memory.
"""

from __future__ import annotations

from ctypes import byref, c_int32

import numpy as np
import pytest

from cudabind.errors import CusolverError
from cudabind.sys import cusolverSp as sp
from cudabind.sys import cusparse

LIBRARIES = ("cusolverSp", "cusparse")
TOLERANCE = 1e-13  # a pivot below it counts as zero
NO_REORDERING, SYMRCM = 0, 1


@pytest.fixture
def handle(gpu):
    return gpu.make(sp.cusolverSpHandle_t, sp.cusolverSpCreate, sp.cusolverSpDestroy)


@pytest.fixture
def general(gpu):
    """The description of a general matrix whose indices start at 0: what a new one says."""
    return gpu.make(cusparse.cusparseMatDescr_t, cusparse.cusparseCreateMatDescr, cusparse.cusparseDestroyMatDescr)


@pytest.fixture
def system(sparse_matrix, rng):
    """A sparse matrix that is far from singular, symmetric on demand, and a right-hand side."""

    def make(n, symmetric=False):
        a = sparse_matrix(n, n)
        a = a + a.T if symmetric else a
        a[np.diag_indices(n)] = 1 + np.abs(a).sum(axis=1)
        return a, rng.standard_normal(n)

    return make


@pytest.fixture
def solve(gpu, handle, general, csr):
    """`x, singularity = solve(function, a, b, reorder)` in device memory."""

    def run(function, a, b, reorder):
        offsets, columns, values = csr(a)
        d_x, singularity = gpu.poisoned(b.shape, np.float64), c_int32(-2)
        function(
            *(handle, len(a), len(values), general),
            *(gpu.array(part).ptr for part in (values, offsets, columns, b)),
            *(TOLERANCE, reorder, d_x.ptr, byref(singularity)),
        )
        return d_x.numpy(), singularity.value

    return run


def test_qr_on_the_device(solve, system, solves):
    a, b = system(83)
    x, singularity = solve(sp.cusolverSpDcsrlsvqr, a, b, SYMRCM)
    assert singularity == -1
    solves(x, a, b)


def test_cholesky_on_the_device(solve, system, solves):
    a, b = system(76, symmetric=True)
    x, singularity = solve(sp.cusolverSpDcsrlsvchol, a, b, SYMRCM)
    assert singularity == -1
    solves(x, a, b)


@pytest.mark.parametrize("factors", ["qr", "lu"])
def test_on_the_host(handle, general, csr, system, solves, factors):
    a, b = system(59)
    offsets, columns, values = csr(a)
    x, singularity = np.full(len(a), np.nan), c_int32(-2)
    function = {"qr": sp.cusolverSpDcsrlsvqrHost, "lu": sp.cusolverSpDcsrlsvluHost}[factors]
    function(
        *(handle, len(a), len(values), general),
        *(part.ctypes.data for part in (values, offsets, columns, b)),
        *(TOLERANCE, SYMRCM, x.ctypes.data, byref(singularity)),
    )
    assert singularity.value == -1
    solves(x, a, b)


def test_where_a_matrix_is_singular_is_told(solve, rng):
    n, at = 7, 4
    a = np.diag(rng.uniform(1, 2, n)) + np.diag(rng.uniform(1, 2, n - 1), 1)
    a[at, at] = 1e-300  # stored, but zero as far as the tolerance tells
    _, singularity = solve(sp.cusolverSpDcsrlsvqr, a, rng.standard_normal(n), NO_REORDERING)
    assert singularity == at


def test_a_size_that_cannot_be_is_refused_by_name(solve, rng):
    b = rng.standard_normal(3)
    with pytest.raises(CusolverError) as caught:
        solve(lambda handle, n, *rest: sp.cusolverSpDcsrlsvqr(handle, -n, *rest), np.eye(3), b, NO_REORDERING)
    assert caught.value.name == "CUSOLVER_STATUS_INVALID_VALUE"
    assert caught.value.function == "cusolverSpDcsrlsvqr"
