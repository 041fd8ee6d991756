"""cuSOLVER for dense matrices: LU, Cholesky and QR, eigenvalues, singular values, batches, and the 64-bit interface.

Matrices are column-major, as order="F" stores them. A matrix that is singular or not positive definite is no error of
the call: `info`, on the device, tells.
"""

from __future__ import annotations

from ctypes import byref, c_int32, c_size_t

import numpy as np
import pytest

from cudabind.errors import CusolverError
from cudabind.sys import cusolverDn as dn

LIBRARIES = ("cusolverDn",)
NO = dn.cublasOperation_t.CUBLAS_OP_N
LOWER = dn.cublasFillMode_t.CUBLAS_FILL_MODE_LOWER
VECTOR = dn.cusolverEigMode_t.CUSOLVER_EIG_MODE_VECTOR
NO_VECTOR = dn.cusolverEigMode_t.CUSOLVER_EIG_MODE_NOVECTOR
TYPE = {
    "float32": dn.cudaDataType_t.CUDA_R_32F,
    "float64": dn.cudaDataType_t.CUDA_R_64F,
    "complex128": dn.cudaDataType_t.CUDA_C_64F,
}
EPS = np.finfo(np.float64).eps


@pytest.fixture
def handle(gpu):
    return gpu.make(dn.cusolverDnHandle_t, dn.cusolverDnCreate, dn.cusolverDnDestroy)


@pytest.fixture
def params(gpu):
    """What the 64-bit interface takes options in; these are the defaults."""
    return gpu.make(dn.cusolverDnParams_t, dn.cusolverDnCreateParams, dn.cusolverDnDestroyParams)


@pytest.fixture
def run_64(gpu, handle, params):
    """Run a function of the 64-bit interface in as much memory, on the device and on the host, as it asks for."""

    def run(ask, function, *arguments, then=()):
        device, host, info = c_size_t(), c_size_t(), gpu.poisoned(1, np.int32)
        ask(handle, params, *arguments, byref(device), byref(host))
        on_host = np.empty(max(host.value, 1), np.uint8)
        arguments = (*arguments[:-1], *then, arguments[-1])  # getrf has one argument more than getrf_bufferSize
        function(
            *(handle, params, *arguments, gpu.workspace(device), device.value),
            *(on_host.ctypes.data, host.value, info.ptr),
        )
        assert info.numpy()[0] == 0

    return run


def random(rng, shape, dtype):
    values = rng.standard_normal(shape)
    return (values + 1j * rng.standard_normal(shape) if np.issubdtype(dtype, np.complexfloating) else values).astype(
        dtype
    )


def positive_definite(rng, n):
    half = rng.standard_normal((n, n))
    return half @ half.T + n * np.eye(n)


def test_lu_factors_solve_and_multiply_to_the_permuted_matrix(gpu, handle, rng, product, solves):
    n, columns = 45, 3
    a, b = rng.standard_normal((n, n)), rng.standard_normal((n, columns))
    d_a, d_b, pivots = gpu.array(a, order="F"), gpu.array(b, order="F"), gpu.poisoned(n, np.int32)
    size, info = c_int32(), gpu.poisoned(1, np.int32)
    dn.cusolverDnDgetrf_bufferSize(handle, n, n, d_a.ptr, n, byref(size))
    dn.cusolverDnDgetrf(handle, n, n, d_a.ptr, n, gpu.workspace(8 * size.value), pivots.ptr, info.ptr)
    assert info.numpy()[0] == 0
    dn.cusolverDnDgetrs(handle, NO, n, columns, d_a.ptr, n, pivots.ptr, d_b.ptr, n, info.ptr)
    solves(d_b.numpy(), a, b)

    rows, factors = a.copy(), d_a.numpy()
    for i, pivot in enumerate(pivots.numpy() - 1):  # LAPACK counts from one
        rows[[i, pivot]] = rows[[pivot, i]]
    lower, upper = np.tril(factors, -1) + np.eye(n), np.triu(factors)
    product(rows, lower, upper)


def test_cholesky_in_single_precision_leaves_the_other_triangle_alone(gpu, handle, rng, product, solves):
    n, columns = 67, 2
    a = positive_definite(rng, n).astype(np.float32)
    b = rng.standard_normal((n, columns)).astype(np.float32)
    d_a, d_b, info, size = gpu.array(a, order="F"), gpu.array(b, order="F"), gpu.poisoned(1, np.int32), c_int32()
    dn.cusolverDnSpotrf_bufferSize(handle, LOWER, n, d_a.ptr, n, byref(size))
    dn.cusolverDnSpotrf(handle, LOWER, n, d_a.ptr, n, gpu.workspace(4 * size.value), size.value, info.ptr)
    assert info.numpy()[0] == 0
    dn.cusolverDnSpotrs(handle, LOWER, n, columns, d_a.ptr, n, d_b.ptr, n, info.ptr)
    factor = np.tril(d_a.numpy())
    product(np.tril(a) + np.tril(a, -1).T, factor, factor.T)
    solves(d_b.numpy(), a, b)


def test_a_batch_of_cholesky_factorizations_tells_which_matrix_is_not_positive_definite(gpu, handle, rng, product):
    n, count, bad, minor = 9, 4, 2, 5
    a = np.stack([positive_definite(rng, n) for _ in range(count)])
    a[bad, minor, minor] = -1
    d_a, info = gpu.array(a), gpu.poisoned(count, np.int32)  # symmetric: by rows as by columns
    pointers = gpu.array([d_a.ptr + i * 8 * n * n for i in range(count)], np.uint64)
    dn.cusolverDnDpotrfBatched(handle, LOWER, n, pointers.ptr, n, info.ptr, count)
    assert info.numpy().tolist() == [minor + 1 if i == bad else 0 for i in range(count)]
    for i in set(range(count)) - {bad}:
        factor = np.tril(d_a.numpy()[i].T)
        product(a[i], factor, factor.T)


def test_a_singular_matrix_is_told_by_info_not_by_the_status(gpu, handle):
    n = 6
    a = np.triu(np.ones((n, n)))
    a[3, 3] = 0  # already triangular: the fourth pivot is an exact zero
    d_a, info, size = gpu.array(a, order="F"), gpu.poisoned(1, np.int32), c_int32()
    dn.cusolverDnDgetrf_bufferSize(handle, n, n, d_a.ptr, n, byref(size))
    work, pivots = gpu.workspace(8 * size.value), gpu.poisoned(n, np.int32)
    dn.cusolverDnDgetrf(handle, n, n, d_a.ptr, n, work, pivots.ptr, info.ptr)
    assert info.numpy()[0] == 4


def test_least_squares_by_qr(gpu, handle, rng, close):
    m, n = 71, 20
    a, b = rng.standard_normal((m, n)), rng.standard_normal((m, 1))
    d_a, d_b, tau = gpu.array(a, order="F"), gpu.array(b, order="F"), gpu.poisoned(n, np.float64)
    info, size = gpu.poisoned(1, np.int32), c_int32()
    dn.cusolverDnDgeqrf_bufferSize(handle, m, n, d_a.ptr, m, byref(size))
    dn.cusolverDnDgeqrf(handle, m, n, d_a.ptr, m, tau.ptr, gpu.workspace(8 * size.value), size.value, info.ptr)
    assert info.numpy()[0] == 0
    # b becomes Qᵀ·b; R is the upper triangle of what a became.
    left, transposed = dn.cublasSideMode_t.CUBLAS_SIDE_LEFT, dn.cublasOperation_t.CUBLAS_OP_T
    dn.cusolverDnDormqr_bufferSize(handle, left, transposed, m, 1, n, d_a.ptr, m, tau.ptr, d_b.ptr, m, byref(size))
    dn.cusolverDnDormqr(
        *(handle, left, transposed, m, 1, n, d_a.ptr, m, tau.ptr, d_b.ptr, m),
        *(gpu.workspace(8 * size.value), size.value, info.ptr),
    )
    assert info.numpy()[0] == 0
    x = np.linalg.solve(np.triu(d_a.numpy()[:n]), d_b.numpy()[:n])
    expected = np.linalg.lstsq(a, b, rcond=None)[0]
    # Where a residual is left, the condition of a counts twice: Golub and Van Loan, section 5.3.8.
    smallest = np.linalg.svd(a, compute_uv=False)[-1]
    condition = np.linalg.cond(a)
    close(x, expected, 10 * m * EPS * condition * (np.abs(expected).max() + np.linalg.norm(b) / smallest))


def test_eigenvalues_and_vectors_of_a_hermitian_matrix(gpu, handle, rng, close):
    n = 39
    a = random(rng, (n, n), np.complex128)
    a = a + a.conj().T
    d_a, d_w = gpu.array(a, order="F"), gpu.poisoned(n, np.float64)
    info, size = gpu.poisoned(1, np.int32), c_int32()
    dn.cusolverDnZheevd_bufferSize(handle, VECTOR, LOWER, n, d_a.ptr, n, d_w.ptr, byref(size))
    dn.cusolverDnZheevd(
        handle, VECTOR, LOWER, n, d_a.ptr, n, d_w.ptr, gpu.workspace(16 * size.value), size.value, info.ptr
    )
    assert info.numpy()[0] == 0
    w, v = d_w.numpy(), d_a.numpy()
    bound = 10 * n * EPS * np.linalg.norm(a, 2)
    close(w, np.linalg.eigvalsh(a), bound)
    close(a @ v, v * w, bound)
    close(v.conj().T @ v, np.eye(n), 10 * n * EPS)


def check_svd(close, a, u, s, vt):
    m, n = a.shape
    eps = np.finfo(s.dtype).eps
    bound = 10 * m * eps * np.linalg.norm(a.astype(np.float64), 2)
    close(s, np.linalg.svd(a.astype(np.float64), compute_uv=False), bound)
    close((u[:, :n] * s) @ vt, a.astype(np.float64), bound)
    close(u.T @ u, np.eye(u.shape[1]), 10 * m * eps)
    close(vt @ vt.T, np.eye(n), 10 * m * eps)


def test_singular_values_and_all_singular_vectors(gpu, handle, rng, close):
    m, n = 43, 28  # gesvd wants no fewer rows than columns
    a = rng.standard_normal((m, n))
    d_a, d_s, d_u, d_vt = (
        gpu.array(a, order="F"),
        gpu.poisoned(n, np.float64),
        *(gpu.poisoned((k, k), np.float64, order="F") for k in (m, n)),
    )
    info, size, every = gpu.poisoned(1, np.int32), c_int32(), ord("A")
    dn.cusolverDnDgesvd_bufferSize(handle, m, n, byref(size))
    dn.cusolverDnDgesvd(
        *(handle, every, every, m, n, d_a.ptr, m, d_s.ptr, d_u.ptr, m, d_vt.ptr, n),
        *(gpu.workspace(8 * size.value), size.value, None, info.ptr),
    )
    assert info.numpy()[0] == 0
    check_svd(close, a, d_u.numpy(), d_s.numpy(), d_vt.numpy())


@pytest.mark.parametrize("dtype", TYPE)
def test_lu_through_the_64_bit_interface(gpu, handle, params, run_64, rng, solves, dtype):
    n, columns, kind = 58, 5, TYPE[dtype]
    # The large diagonal keeps it well-conditioned also in f32; its rows exchanged, pivots are needed to find it.
    a = (random(rng, (n, n), dtype) + n * np.eye(n, dtype=dtype))[rng.permutation(n)]
    b = random(rng, (n, columns), dtype)
    d_a, d_b, pivots = gpu.array(a, order="F"), gpu.array(b, order="F"), gpu.poisoned(n, np.int64)
    run_64(dn.cusolverDnXgetrf_bufferSize, dn.cusolverDnXgetrf, n, n, kind, d_a.ptr, n, kind, then=(pivots.ptr,))
    info = gpu.poisoned(1, np.int32)
    dn.cusolverDnXgetrs(handle, params, NO, n, columns, kind, d_a.ptr, n, pivots.ptr, kind, d_b.ptr, n, info.ptr)
    assert info.numpy()[0] == 0
    solves(d_b.numpy(), a, b)


def test_symmetric_eigenvalues_through_the_64_bit_interface(gpu, run_64, rng, close):
    n, kind = 41, TYPE["float64"]
    a = rng.standard_normal((n, n))
    a = a + a.T
    d_a, d_w = gpu.array(np.tril(a), order="F"), gpu.poisoned(n, np.float64)  # it reads one triangle
    run_64(
        *(dn.cusolverDnXsyevd_bufferSize, dn.cusolverDnXsyevd),
        *(VECTOR, LOWER, n, kind, d_a.ptr, n, kind, d_w.ptr, kind),
    )
    w, v = d_w.numpy(), d_a.numpy()
    bound = 10 * n * EPS * np.linalg.norm(a, 2)
    close(w, np.linalg.eigvalsh(a), bound)
    close(a @ v, v * w, bound)


def test_singular_values_through_the_64_bit_interface_in_single_precision(gpu, run_64, rng, close):
    m, n, kind = 52, 31, TYPE["float32"]
    a = rng.standard_normal((m, n)).astype(np.float32)
    d_s = gpu.poisoned(n, np.float32)
    d_u, d_vt = (gpu.poisoned(shape, np.float32, order="F") for shape in ((m, n), (n, n)))
    some = ord("S")  # as many left vectors as there are singular values
    run_64(
        *(dn.cusolverDnXgesvd_bufferSize, dn.cusolverDnXgesvd, some, some, m, n),
        *(kind, gpu.array(a, order="F").ptr, m, kind, d_s.ptr, kind, d_u.ptr, m, kind, d_vt.ptr, n, kind),
    )
    check_svd(close, a, d_u.numpy(), d_s.numpy(), d_vt.numpy())


def test_eigenvalues_of_a_matrix_without_symmetry(gpu, run_64, rng, close):
    n, kind = 33, TYPE["complex128"]
    a = random(rng, (n, n), np.complex128)
    d_w, d_v = gpu.poisoned(n, np.complex128), gpu.poisoned((n, n), np.complex128, order="F")
    run_64(
        *(dn.cusolverDnXgeev_bufferSize, dn.cusolverDnXgeev, NO_VECTOR, VECTOR, n),
        *(kind, gpu.array(a, order="F").ptr, n, kind, d_w.ptr, kind, None, n, kind, d_v.ptr, n, kind),
    )
    w, v = d_w.numpy(), d_v.numpy()
    bound = 10 * n * EPS * np.linalg.norm(a, 2)
    close(a @ v, v * w, bound)
    # They come in no order. Bauer and Fike: each moves by the error times the condition of the eigenvectors at most.
    expected, vectors = np.linalg.eig(a)
    distance = np.abs(w[:, None] - expected)
    assert sorted(distance.argmin(axis=1)) == list(range(n)), "an eigenvalue is missing, or there twice"
    close(distance.min(axis=1), np.zeros(n), bound * np.linalg.cond(vectors))


def test_a_size_that_cannot_be_is_refused_by_name(handle):
    with pytest.raises(CusolverError) as caught:
        dn.cusolverDnDsyevd_bufferSize(handle, VECTOR, LOWER, -1, None, 4, None, byref(c_int32()))
    assert caught.value.name == "CUSOLVER_STATUS_INVALID_VALUE"
    assert caught.value.function == "cusolverDnDsyevd_bufferSize"
    assert not caught.value.sticky
